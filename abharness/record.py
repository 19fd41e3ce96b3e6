"""Everything on disk: the models of a run's files and their schema version; `storage` writes and reads them.

The folder of a run is drawn in docs/reference/records.md, which is made from the docstrings here.
Field order tells the story: version, status, identity, configuration, evidence, results, error. Times are seconds
(`_s`), sizes bytes (`_bytes`). Absent is `None` with a reason, never 0. NaN and infinity are never written.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from abharness.base import Model
from abharness.windows import Compilation, GpuWindow, HostLoad, Sampling
from abharness.witnesses import CacheEvidence, GpuHolder, KernelFolder, ProbeReport, ProcessWitness

SCHEMA_VERSION = 1

Variant = Literal["baseline", "candidate"]
Count = Annotated[int, Field(ge=1)]
AnswerState = Literal["right", "wrong", "truncated", "no_answer", "error"]


class Finding(Model):
    """One thing a check saw that bears on validity; returned as a value, never printed by the check.

    Attributes:
        code: A validity code of the design, for example `env_mismatch`.
        message: What was seen, with number and threshold.
        hint: The likely cause and the next step.
        fatal: True: the launch fails. False: it is recorded and the comparison gives no verdict.
    """

    code: str
    message: str
    hint: str | None = None
    fatal: bool = False


class RequestRecord(Model):
    """One streamed request as the client saw it. All `_s` times are seconds on one monotonic clock.

    Attributes:
        index: Position in the cell's fixed prompt sequence, from 0.
        prompt_sha256: Hash of the prompt's token ids as comma-joined decimal text.
        requested_input_len: Prompt tokens sent.
        requested_output_len: `max_tokens` and `min_tokens` sent.
        submitted_s: When the request was handed to the client.
        sent_s: When its bytes had been written to the socket; None if that never happened.
        first_token_s: Arrival of the first chunk that carries generated text or a token; None if there was none.
        first_answer_s: The same for the first chunk of answer text (not reasoning).
        last_token_s: Arrival of the last chunk that carries a token (not the usage chunk).
        prompt_tokens: `usage.prompt_tokens`, or None when the server sent no usage.
        output_tokens: `usage.completion_tokens`, or None when the server sent no usage.
        cached_tokens: `usage.prompt_tokens_details.cached_tokens`, or None when not sent.
        chunks: Chunks that carried a token. Not a token count.
        itl_p50_s: Median gap between token-carrying chunks; None with fewer than two chunks.
        itl_p99_s: 99th percentile of those gaps.
        itl_max_s: Largest gap.
        finish_reason: As sent by the server.
        error: Why the request counts as failed, else None. A failed request is in no latency and no rate.
    """

    index: int
    prompt_sha256: str
    requested_input_len: int
    requested_output_len: int
    submitted_s: float
    sent_s: float | None = None
    first_token_s: float | None = None
    first_answer_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    chunks: int = 0
    itl_p50_s: float | None = None
    itl_p99_s: float | None = None
    itl_max_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None


class ClientLoad(Model):
    """How busy the load generator itself was during a cell.

    Attributes:
        cpu_share: CPU seconds of the client's process over wall seconds; 1.0 is one full core.
        loop_lag_p50_s: Median overshoot of a periodic timer in the event loop.
        loop_lag_p99_s: 99th percentile of the same.
        chunks_per_s: Stream chunks received a second over the whole cell.
    """

    cpu_share: float
    loop_lag_p50_s: float
    loop_lag_p99_s: float
    chunks_per_s: float


class ServerCounters(Model):
    """Deltas of the server's own counters (`/metrics`) over a cell; None where the server does not export one.

    Attributes:
        prompt_tokens: Prompt tokens that the server counted.
        generation_tokens: Tokens that it generated.
        prefix_cache_queries: Prompt tokens that it looked up in the prefix cache.
        prefix_cache_hits: Of these, found there.
        preemptions: Requests that it set back and computed again.
    """

    prompt_tokens: float | None = None
    generation_tokens: float | None = None
    prefix_cache_queries: float | None = None
    prefix_cache_hits: float | None = None
    preemptions: float | None = None


class CellRecord(Model):
    """One cell of one launch: one workload at one shape and concurrency, one repeat.

    Attributes:
        workload: The workload's name in the spec.
        kind: `decode` or `prefill`.
        input_len: Prompt tokens a request.
        output_len: Output tokens a request.
        max_concurrency: Requests kept in flight.
        repeat: From 0.
        started_s: First submission, on the same monotonic clock as the requests.
        ended_s: End of the last stream.
        prompts_sha256: Hash over the request prompt hashes in order: equal in both variants or not comparable.
        client: The load generator's own business.
        counters: Server counter deltas over the cell, or None when `/metrics` could not be read.
        gpus: What each GPU the launch could use did meanwhile, or None with the reason in `gpus_absent`.
        gpus_steady: The same over the steady window alone (`metrics.steady_window`), or None where there was none.
        gpus_absent: Why no GPU was sampled; None too in records from before there was sampling.
        compilation: What was compiled meanwhile; None in records from before that was looked at.
        host: What else the CPUs did meanwhile; None likewise.
        findings: What the checks of this cell saw.
    """

    workload: str
    kind: Literal["decode", "prefill"]
    input_len: Count
    output_len: Count
    max_concurrency: Count
    repeat: int
    started_s: float
    ended_s: float
    prompts_sha256: str
    client: ClientLoad
    counters: ServerCounters | None
    gpus: list[GpuWindow] | None = None
    gpus_steady: list[GpuWindow] | None = None
    gpus_absent: str | None = None
    compilation: Compilation | None = None
    host: HostLoad | None = None
    findings: list[Finding] = []


class TracedPhase(Model):
    """One traced phase of one launch: what was sent, and where its kernels are.

    Attributes:
        name: `decode[16]`: 16 rows decode together; `prefill[2048]`: prompts of 2,048 tokens.
        kind: `decode` or `prefill`.
        input_len: Prompt tokens a request.
        output_len: Output tokens a request.
        requests: Requests sent, all at once in a decode phase, one after the other in a prefill phase.
        rows: Rows of the decode steps that count; None in a prefill phase.
        started_s: When the phase began, on the clock of the requests.
        ended_s: When its traces were written.
        files: Kernel tables (Parquet), one for each process that ran the model, relative to the launch's folder.
        raw: The profiler's own files, which may be large: relative to the launch's folder, with their sizes in bytes.
        absent: Why there is no table, or None.
    """

    name: str
    kind: Literal["decode", "prefill"]
    input_len: Count
    output_len: Count
    requests: Count
    rows: Count | None = None
    started_s: float
    ended_s: float
    files: list[str] = []
    raw: dict[str, int] = {}
    absent: str | None = None


class RequestLine(Model):
    """A line of `requests.jsonl`: which cell, which request.

    Attributes:
        workload: The workload's name in the spec.
        input_len: Prompt tokens a request, of the cell.
        output_len: Output tokens a request, of the cell.
        max_concurrency: Requests kept in flight, of the cell.
        repeat: From 0.
        request: The request.
    """

    workload: str
    input_len: Count
    output_len: Count
    max_concurrency: Count
    repeat: int
    request: RequestRecord


CLOSE_NATS = 0.5
"""Candidates no further from the chosen token are kept: logits in steps of 0.125 (bfloat16) often tie three or four."""


class TokenStep(Model):
    """One generated token with the other candidates at its position, for explaining a flip.

    Log-probabilities are in nats, to four decimals: rounding in bfloat16 moves them by a thousand times as much.

    Attributes:
        token: The chosen token's text (`bytes:` escaped where it is no valid UTF-8).
        logprob: Its log-probability.
        runner_up: The most probable other token's text, or None when not sent.
        runner_up_logprob: Its log-probability.
        close: Further candidates within `CLOSE_NATS` of the chosen token, as far as sent; None where not kept.
    """

    token: str
    logprob: float | None = None
    runner_up: str | None = None
    runner_up_logprob: float | None = None
    close: dict[str, float] | None = None


class Extraction(Model):
    """What one filter made of an answer.

    Attributes:
        value: The number found, as canonical decimal text, or None.
        method: How it was found (`marker`, `boxed`, `final_statement`, `last_number`, ...), or why not.
        low_confidence: True when no rule supports the choice over the other numbers of the text.
        exact_match: Numeric equality with the gold answer; None where the answer was not scored.
    """

    value: str | None
    method: str
    low_confidence: bool = False
    exact_match: bool | None = None


class AnswerRecord(Model):
    """One GSM8K question in one launch: a line of `gsm8k.jsonl`.

    The keys of lm-eval's samples files are here under their names; `exact_match` is by `filter`.

    Attributes:
        workload: The workload's name in the spec.
        doc_id: Index of the question in the dataset's split.
        doc: The question and its worked answer, as the dataset has them.
        target: The worked answer alone.
        arguments: What was sent: prompt or messages, and the generation settings.
        resps: The reply's text, in the nesting of lm-eval.
        filtered_resps: What `filter` made of it.
        filter: The filter that decides.
        exact_match: 1.0 right, 0.0 wrong; None where the answer was not scored.
        state: `right`, `wrong`, `truncated`, `no_answer`, `error`, under `filter`.
        extractions: What each filter made of it.
        finish_reason: As sent by the server.
        prompt_tokens: `usage.prompt_tokens`, or None when not sent.
        output_tokens: `usage.completion_tokens`, or None when not sent.
        reasoning: Thinking text that the server sent apart from the answer; it is not scored.
        tokens: The generated tokens with their rivals; None where no log-probabilities were asked for or sent.
        e2el_s: From sending to the whole reply, seconds.
        error: Why there is no reply, else None.
    """

    workload: str
    doc_id: int
    doc: dict[str, str]
    target: str
    arguments: dict[str, Any]
    resps: list[list[str]]
    filtered_resps: list[str]
    filter: Literal["strict-match", "flexible-extract"]
    exact_match: float | None
    state: AnswerState
    extractions: dict[str, Extraction]
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    reasoning: str | None = None
    tokens: list[TokenStep] | None = None
    e2el_s: float | None = None
    error: str | None = None


class AccuracyRun(Model):
    """One gsm8k workload in one launch, its answers apart in `gsm8k.jsonl`.

    Attributes:
        workload: The workload's name in the spec.
        num_questions: Questions asked.
        doc_ids: Which, in the order of asking.
        answered: Lines written to `gsm8k.jsonl`.
        max_concurrency: Questions kept in flight.
        max_tokens: Longest answer.
        questions_sha256: Hash over doc ids, questions, golds and prompts: equal in both variants or not comparable.
        started_s: First question, on the clock of the requests.
        ended_s: Last reply.
        counters: Server counter deltas over the questions, or None when `/metrics` could not be read.
        findings: What the checks of these answers saw.
    """

    workload: str
    num_questions: int
    doc_ids: list[int]
    answered: int
    max_concurrency: int
    max_tokens: int
    questions_sha256: str
    started_s: float
    ended_s: float
    counters: ServerCounters | None = None
    findings: list[Finding] = []


class EnvironmentCheck(Model):
    """One verification of one launch: what was declared, what each process shows, what follows.

    Attributes:
        when: `before_load`, `after_load` or `attached`.
        expected: Declared variables; None means must be unset.
        processes: Every process of the tree: the first witness, `/proc`.
        probes: What the probe says of the processes of the tree: the second witness.
        probe_absent: Why the probe was not brought into this launch; None when it was.
        gpu_holders: Who has a compute context on the launch's GPUs.
        log_matches: Each expected log pattern with the line that matched, or None.
        log_doubts: Lines that call an environment variable unknown or ignored.
        log_cache_loads: Lines that say that compiled code was loaded from a cache.
        plugins: Each required plugin with the ids of the processes that show it as loaded.
        plugin_failures: Each required plugin whose loading failed by the log, with that line.
        findings: What follows; empty when everything declared was seen. `compare` draws it again from the rest.
    """

    when: Literal["before_load", "after_load", "attached"]
    expected: dict[str, str | None]
    processes: list[ProcessWitness]
    probes: list[ProbeReport] = []
    probe_absent: str | None = None
    gpu_holders: list[GpuHolder] = []
    log_matches: dict[str, str | None] = {}
    log_doubts: list[str] = []
    log_cache_loads: list[str] = []
    plugins: dict[str, list[int]] = {}
    plugin_failures: dict[str, str] = {}
    findings: list[Finding] = []


class Evidence(Model):
    """`evidence.json`: everything a verdict about one launch rests on.

    Attributes:
        server_pid: The process we started.
        socket_owner_pid: The process that holds the listening socket.
        tree_pids: Every process that was seen in the server's tree until the load ended.
        environment: Verifications, before and after load.
        caches: The launch's own cache directories.
        default_caches_touched: Files under the default cache locations that changed during the launch.
        shared_memory_left: Names in /dev/shm that appeared during the launch and are not provably its own.
        gpu_uuids: GPUs the launch could use; None with a reason in `gpu_absent` where there is none.
        gpu_absent: Why no GPU was looked at, or None.
        gpu_pids_seen: By GPU, every process that computed there during the load, by the driver's numbers, in order.
        gpu_pids_first_seen_s: When each of these was first seen, seconds on the clock of the requests.
        server_versions: What the server's interpreter reports: `python`, `vllm`, `torch`, ...
        server_info_absent: Why the server's resolved configuration is not on record (`server_info.json`), or None.
    """

    server_pid: int | None = None
    socket_owner_pid: int | None = None
    tree_pids: list[int] = []
    environment: list[EnvironmentCheck] = []
    caches: list[CacheEvidence] = []
    default_caches_touched: list[str] = []
    shared_memory_left: list[str] = []
    gpu_uuids: list[str] | None = None
    gpu_absent: str | None = None
    gpu_pids_seen: dict[str, list[int]] = {}
    gpu_pids_first_seen_s: dict[str, list[float]] = {}
    server_versions: dict[str, str] = {}
    server_info_absent: str | None = None


class Failure(Model):
    """Why a launch did not complete.

    Attributes:
        kind: Class name of the error.
        message: What happened.
        phase: `preflight`, `start`, `ready`, `verify`, `warmup`, a cell's name, `stop`.
        code: A validity code where the failure is one (`env_mismatch`, ...), else None.
        hint: The next step, or None.
        log_tail: The server's last words.
        command: Shell command that starts the same server by hand.
    """

    kind: str
    message: str
    phase: str
    code: str | None = None
    hint: str | None = None
    log_tail: list[str] = []
    command: str | None = None


class LaunchRecord(Model):
    """One server lifetime: the statistical sample. Written atomically when the launch ends, failed or not.

    Attributes:
        schema_version: Of this file's form.
        status: `completed`, `failed` or `interrupted`.
        experiment: The experiment's name.
        launch_index: From 0, in order of time.
        variant: `baseline` or `candidate`.
        sentinel: The unique value of `ABHARNESS_LAUNCH` in this launch's environment.
        config_hash: Hash of the resolved configuration; `--resume` never mixes two.
        started_at: UTC time, ISO 8601.
        argv: The exact command.
        env: The exact environment, secrets redacted.
        inherited: Names in `env` that came from the caller's environment.
        not_passed: Names of switch-like variables the caller had and the server was not given.
        kernels: The kernel folders it was given.
        model: Path or hub name as the server got it.
        served_model_name: Unique to the launch; the completions must be signed with it.
        port: Loopback port.
        ready_s: From process start to the first real completion.
        stop_s: From asking it to stop until nothing of it was left.
        wall_s: From preflight to stopped.
        findings: Launch-level results of checks; those of a cell are with the cell.
        sampling: How the GPUs were sampled; None where there was no GPU to sample.
        cells: Every measured cell; its requests are in `requests.jsonl`.
        accuracy: Every gsm8k workload; its answers are in `gsm8k.jsonl`.
        traces: The traced phases, after everything measured; empty where no trace was asked for.
        error: Why it did not complete, else None.
    """

    schema_version: int = SCHEMA_VERSION
    status: Literal["completed", "failed", "interrupted"]
    experiment: str
    launch_index: int
    variant: Variant
    sentinel: str
    config_hash: str
    started_at: str
    argv: list[str]
    env: dict[str, str]
    inherited: list[str]
    not_passed: list[str]
    kernels: list[KernelFolder] = []
    model: str
    served_model_name: str
    port: int
    ready_s: float | None = None
    stop_s: float | None = None
    wall_s: float
    findings: list[Finding] = []
    sampling: Sampling | None = None
    cells: list[CellRecord] = []
    accuracy: list[AccuracyRun] = []
    traces: list[TracedPhase] = []
    error: Failure | None = None


class RunRecord(Model):
    """`experiment.json`: what was asked, what was planned, where it ran.

    Attributes:
        schema_version: Of this file's form.
        experiment: The experiment's name.
        question: As the spec words it.
        config_hash: Hash of everything in the spec that changes what is run; the folder's name ends with it.
        created_at: UTC time, ISO 8601.
        abharness_version: Version that ran it.
        spec: The resolved spec as plain data.
        spec_sha256: Hash of `spec` as it was written; None in records of versions that did not write it.
        plan: Order of the launches, as variant names.
        aa: The baseline ran against itself: both variants of `spec` are the baseline.
        provenance: Host, CPU, GPU, driver, versions, git commit and dirty flag of the working directory.
    """

    schema_version: int = SCHEMA_VERSION
    experiment: str
    question: str
    config_hash: str
    created_at: str
    abharness_version: str
    spec: dict[str, Any]
    spec_sha256: str | None = None
    plan: list[Variant]
    provenance: dict[str, Any]
    aa: bool = False
