"""Executes a Plan: one launch after the other, each started, proven, loaded, proven again, stopped and recorded.

Whatever happens in a launch (a dead server, a full disk, Ctrl-C), the server is stopped, what was measured is on disk
and a LaunchRecord says what went wrong.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from abharness import accuracy, endpoints, loadgen, prompts, provenance, resources, server, verify
from abharness.ask import Reply, ask, first_completion
from abharness.checks import check_cell
from abharness.errors import (
    AbharnessError,
    LaunchError,
    LoadFailed,
    PreflightError,
    TeardownError,
    UsageError,
    VerificationFailed,
)
from abharness.plan import Plan, PlannedLaunch, default_caches
from abharness.progress import Reporter
from abharness.record import (
    AccuracyRun,
    AnswerRecord,
    CellRecord,
    Evidence,
    Failure,
    Finding,
    LaunchRecord,
    RequestLine,
    RequestRecord,
    RunRecord,
    Variant,
    append_lines,
    read_model,
    write_model,
)
from abharness.redaction import hidden, redact
from abharness.runs import ANSWERS_FILE, EVIDENCE_FILE, LAUNCH_FILE, LOG_FILE, REQUESTS_FILE, RUN_FILE, launches_dir
from abharness.spec import (
    SENTINEL_VARIABLE,
    DecodeWorkload,
    ExperimentSpec,
    Gsm8kWorkload,
    PrefillWorkload,
)
from abharness.telemetry import Gpu

WARMUP_OUTPUT_LEN = 64
"""Longest output of a warm-up request, tokens: it reaches the decode shapes of a cell without doubling its time."""

STOPS_THE_RUN = (PreflightError, VerificationFailed, TeardownError)
"""After these the next launch would fail the same way, or would not be alone on the machine."""


@dataclass(frozen=True, slots=True)
class Questions:
    """A gsm8k workload made ready before anything is launched."""

    asked: Sequence[accuracy.Question]
    prompts: Sequence[accuracy.Prompt]
    sha256: str


@dataclass(frozen=True, slots=True)
class Shape:
    """One cell to run: a workload's name with one of its shapes."""

    workload: str
    kind: Any
    input_len: int
    output_len: int
    max_concurrency: int
    num_prompts: int
    num_warmups: int
    repeats: int

    @property
    def label(self) -> str:
        """Text that names the cell and seeds its prompts."""
        return f"{self.workload} input_len={self.input_len} output_len={self.output_len} x{self.max_concurrency}"


def shapes(workload: DecodeWorkload | PrefillWorkload) -> list[Shape]:
    """The cells of a workload, in the order they are run."""
    if isinstance(workload, DecodeWorkload):
        return [
            Shape(
                workload.name,
                "decode",
                workload.input_len,
                workload.output_len,
                concurrency,
                workload.num_prompts or 2 * concurrency,
                concurrency if workload.num_warmups is None else workload.num_warmups,
                workload.repeats,
            )
            for concurrency in workload.max_concurrency
        ]
    return [
        Shape(
            workload.name,
            "prefill",
            input_len,
            1,
            workload.max_concurrency,
            workload.num_prompts,
            workload.num_warmups,
            workload.repeats,
        )
        for input_len in workload.input_lens
    ]


def load_questions(spec: ExperimentSpec) -> dict[str, Questions]:
    """Questions and prompts of every gsm8k workload: a missing dataset shows before the first launch, not after it.

    Raises:
        UsageError: A dataset cannot be read or is too small.
    """
    ready: dict[str, Questions] = {}
    for workload in spec.workloads:
        if not isinstance(workload, Gsm8kWorkload):
            continue
        pool = accuracy.load_questions(workload.dataset)
        asked = accuracy.draw(pool, workload.num_questions, spec.design.seed)
        fewshot: Sequence[accuracy.Question] = ()
        if workload.num_fewshot:
            source, split = (
                (workload.fewshot_dataset, "test") if workload.fewshot_dataset else (workload.dataset, "train")
            )
            examples = accuracy.load_questions(source, split)
            fewshot = accuracy.fewshot_examples(examples, workload.num_fewshot, spec.design.seed, asked=asked)
        built = [accuracy.build_prompt(question, style=workload.style, fewshot=fewshot) for question in asked]
        ready[workload.name] = Questions(asked, built, accuracy.questions_sha256(asked, built))
    return ready


class Runner:
    """Runs the launches of a plan into a run folder.

    Attributes:
        run_dir: Where everything goes.
    """

    def __init__(
        self,
        spec: ExperimentSpec,
        plan: Plan,
        *,
        run_dir: Path,
        gpu: Gpu,
        reporter: Reporter,
        versions: Mapping[Variant, Mapping[str, str]],
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.run_dir = run_dir
        self.gpu = gpu
        self.reporter = reporter
        self.versions = versions
        self.questions: dict[str, Questions] = {}

    def run(self) -> None:
        """Run every launch that is not on record as completed; earlier attempts are kept under `attempts/`.

        Raises:
            KeyboardInterrupt: Asked to stop; the interrupted launch is on record.
            AbharnessError: The run cannot go on.
        """
        self.questions = load_questions(self.spec)
        self._write_run_record()
        with _one_run_at_a_time(self.run_dir), _signals_interrupt():
            for planned in self.plan.launches:
                folder = launches_dir(self.run_dir) / planned.label
                if _is_complete(folder):
                    self.reporter.note(f"launch {planned.label} is on record; skipped")
                    continue
                _set_aside(folder, self.run_dir)
                self.reporter.launch(planned.index, len(self.plan.launches), planned.variant)
                error = _Launch(self, planned, folder).carry_out()
                if isinstance(error, KeyboardInterrupt):
                    raise error
                if error is not None:
                    self.reporter.note(f"failed: {error}")
                if isinstance(error, STOPS_THE_RUN):
                    break

    def _write_run_record(self) -> None:
        path = self.run_dir / RUN_FILE
        if path.exists():
            recorded = read_model(path, RunRecord)
            if recorded.config_hash != self.plan.config_hash:
                raise UsageError(
                    f"{self.run_dir} holds configuration {recorded.config_hash}, not {self.plan.config_hash}"
                )
            return
        launches_dir(self.run_dir).mkdir(parents=True, exist_ok=True)
        write_model(
            path,
            RunRecord(
                experiment=self.spec.experiment,
                question=self.spec.question,
                config_hash=self.plan.config_hash,
                created_at=_now(),
                abharness_version=provenance.own_version(),
                spec=_redacted_spec(self.spec),
                plan=[launch.variant for launch in self.plan.launches],
                provenance=provenance.collect(self.gpu),
            ),
        )


class _Launch:
    """One launch: the state that ends up in its record."""

    def __init__(self, run: Runner, planned: PlannedLaunch, folder: Path) -> None:
        self.run = run
        self.spec = run.spec
        self.planned = planned
        self.folder = folder
        self.phase = "preflight"
        self.started_at = _now()
        self.started_s = time.monotonic()
        self.ready_s: float | None = None
        self.stop_s: float | None = None
        self.cells: list[CellRecord] = []
        self.accuracy: list[AccuracyRun] = []
        self.findings: list[Finding] = []
        self.evidence = Evidence(server_versions=dict(run.versions[planned.variant]))
        self.ordinal = 0
        self.token_pool: Sequence[int] = ()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.planned.port}"

    def carry_out(self) -> BaseException | None:
        """Run the launch to its record. Errors made on purpose and interrupts are returned; others are raised."""
        error: BaseException | None = None
        log_tail: list[str] = []
        self.folder.mkdir(parents=True)
        self.planned.tmp_dir.mkdir(parents=True)
        vllm = server.VllmServer(self._command())
        try:
            self.evidence = self.evidence.model_copy(update=self._gpu_evidence())
            try:
                self._serve(vllm)
            finally:
                self._stop(vllm)
        except KeyboardInterrupt as interrupt:
            error = interrupt
        except (AbharnessError, OSError) as failure:
            error = failure
            log_tail = getattr(failure, "log_tail", []) or vllm.log_tail(40)
        finally:
            with _interrupts_held():
                self._write(self._record(vllm, error, log_tail))
                shutil.rmtree(self.planned.tmp_dir.parent, ignore_errors=True)
        if isinstance(error, OSError):
            raise error
        return error

    def _command(self) -> server.LaunchCommand:
        planned = self.planned
        work = planned.tmp_dir.parent / "cwd"
        work.mkdir(parents=True, exist_ok=True)
        return server.LaunchCommand(
            argv=planned.argv,
            env=planned.env,
            cwd=work,
            host="127.0.0.1",
            port=planned.port,
            log_path=self.folder / LOG_FILE,
            served_model_name=planned.served_model_name,
            sentinel=(SENTINEL_VARIABLE, planned.sentinel),
            ready_timeout_s=self.spec.server.ready_timeout_s,
            cache_dirs=planned.cache_dirs,
            watched_defaults=default_caches(planned.env),
            gpu=self.run.gpu,
        )

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.run.reporter.phase(phase)

    def _serve(self, vllm: server.VllmServer) -> None:
        vllm.start()
        self._enter("start")
        self.evidence = self.evidence.model_copy(update={"server_pid": vllm.pid})
        vllm.wait_ready(
            lambda: first_completion(self.base_url, self.planned.served_model_name, timeout_s=60.0),
            lambda waited_s, reason: self.run.reporter.waiting(f"{waited_s:.0f} s: {reason}"),
        )
        self.ready_s = time.monotonic() - self.started_s
        self.run.reporter.note(f"ready after {self.ready_s:.0f} s")
        self.evidence = self.evidence.model_copy(update={"socket_owner_pid": vllm.socket_owner_pid})
        self._verify(vllm, "before_load")
        if self.spec.workloads:
            pool = endpoints.token_pool(self.base_url, self.planned.served_model_name)
            self.token_pool = pool.tokens
            self._check_lengths(pool.max_model_len)
        for workload in self.spec.workloads:
            if isinstance(workload, Gsm8kWorkload):
                self._answer(workload, vllm)
            else:
                for shape in shapes(workload):
                    self._cell(shape, vllm)
        self._enter("after load")
        reason = vllm.alive() or first_completion(self.base_url, self.planned.served_model_name, timeout_s=60.0)
        if reason:
            raise LoadFailed(f"the server no longer answers after the load: {reason}", log_tail=vllm.log_tail(40))
        self._verify(vllm, "after_load")

    def _check_lengths(self, max_model_len: int | None) -> None:
        """The server's own limit, where the spec did not set one: refused before load, not failed in the middle."""
        for workload in self.spec.workloads:
            if max_model_len is None or isinstance(workload, Gsm8kWorkload):
                continue
            need = max(shape.input_len + shape.output_len for shape in shapes(workload))
            if need > max_model_len:
                raise LoadFailed(
                    f"{workload.name} needs {need} tokens a request, the server takes {max_model_len}",
                    hint="lower the lengths or raise --max-model-len",
                )

    def _verify(self, vllm: server.VllmServer, when: Any) -> None:
        self._enter(f"verify {when}")
        check = verify.check_environment(
            when=when,
            root_pid=vllm.pid,
            known=vllm.known(),
            expected=self.planned.expected,
            sentinel=(SENTINEL_VARIABLE, self.planned.sentinel),
            log_text=vllm.log_text(),
            expect_log=self.spec.verify.expect_log.get(self.planned.variant, ()),
            plugins=self.spec.verify.plugins.get(self.planned.variant, ()),
        )
        self.evidence = self.evidence.model_copy(update={"environment": [*self.evidence.environment, check]})
        fatal = [finding for finding in check.findings if finding.fatal]
        if fatal:
            raise VerificationFailed(
                "; ".join(finding.message for finding in fatal), hint=fatal[0].hint, code=fatal[0].code
            )

    def _next_prompts(self, shape: Shape, count: int, label: str) -> list[list[int]]:
        built = prompts.build_prompts(
            self.token_pool,
            seed=self.spec.design.seed,
            label=f"{shape.label} {label}",
            num_prompts=count,
            input_len=shape.input_len,
            first_ordinal=self.ordinal,
        )
        self.ordinal += count
        return built

    def _drive(
        self, shape: Shape, vllm: server.VllmServer, sent: list[list[int]], output_len: int
    ) -> loadgen.CellTraffic:
        return loadgen.run_cell(
            base_url=self.base_url,
            served_model=self.planned.served_model_name,
            prompts=sent,
            output_len=output_len,
            max_concurrency=shape.max_concurrency,
            request_timeout_s=self.spec.server.request_timeout_s,
            alive=vllm.alive,
            on_progress=self.run.reporter.advance,
        )

    def _cell(self, shape: Shape, vllm: server.VllmServer) -> None:
        if shape.num_warmups:
            self._enter(f"{shape.label} warm-up")
            warmups = self._next_prompts(shape, shape.num_warmups, "warm-up")
            traffic = self._drive(shape, vllm, warmups, min(shape.output_len, WARMUP_OUTPUT_LEN))
            failed = [request.error for request in traffic.requests if request.error]
            if failed:
                raise LoadFailed(f"{len(failed)} of {len(warmups)} warm-up requests failed: {failed[0]}")
        for repeat in range(shape.repeats):
            self._enter(shape.label if shape.repeats == 1 else f"{shape.label} repeat {repeat + 1}/{shape.repeats}")
            sent = self._next_prompts(shape, shape.num_prompts, f"repeat {repeat}")
            before = endpoints.read_counters(self.base_url)
            try:
                traffic = self._drive(shape, vllm, sent, shape.output_len)
            except (loadgen.CellFailed, loadgen.CellInterrupted) as cut:
                self._keep(shape, repeat, cut.traffic.requests)
                raise
            self._keep(shape, repeat, traffic.requests)
            cell = CellRecord(
                workload=shape.workload,
                kind=shape.kind,
                input_len=shape.input_len,
                output_len=shape.output_len,
                max_concurrency=shape.max_concurrency,
                repeat=repeat,
                started_s=traffic.started_s,
                ended_s=traffic.ended_s,
                prompts_sha256=prompts.prompts_hash(sent),
                client=traffic.client,
                counters=endpoints.counters_delta(before, endpoints.read_counters(self.base_url)),
            )
            self.cells.append(cell)
            for finding in check_cell(cell, traffic.requests):
                self.run.reporter.note(f"{shape.label}: {finding.code}: {finding.message}")

    def _keep(self, shape: Shape, repeat: int, requests: Sequence[RequestRecord]) -> None:
        lines = [
            RequestLine(
                workload=shape.workload,
                input_len=shape.input_len,
                output_len=shape.output_len,
                max_concurrency=shape.max_concurrency,
                repeat=repeat,
                request=request,
            )
            for request in requests
        ]
        append_lines(self.folder / REQUESTS_FILE, lines)

    def _answer(self, workload: Gsm8kWorkload, vllm: server.VllmServer) -> None:
        self._enter(f"{workload.name} {workload.num_questions} questions")
        ready = self.run.questions[workload.name]
        started_s = time.monotonic()
        records: list[AnswerRecord] = []

        def on_answer(index: int, reply: Reply) -> None:
            records.append(self._answer_record(workload, ready, index, reply))
            append_lines(self.folder / ANSWERS_FILE, records[-1:])
            self.run.reporter.advance(len(records), workload.num_questions)

        ask(
            base_url=self.base_url,
            served_model=self.planned.served_model_name,
            prompts=[prompt.messages or prompt.text or "" for prompt in ready.prompts],
            max_tokens=workload.max_tokens,
            max_concurrency=workload.max_concurrency,
            logprobs=workload.logprobs,
            stop=ready.prompts[0].stop,
            seed=self.spec.design.seed,
            request_timeout_s=self.spec.server.request_timeout_s,
            alive=vllm.alive,
            on_answer=on_answer,
        )
        self.accuracy.append(
            AccuracyRun(
                workload=workload.name,
                num_questions=workload.num_questions,
                doc_ids=[question.doc_id for question in ready.asked],
                answered=len(records),
                max_concurrency=workload.max_concurrency,
                max_tokens=workload.max_tokens,
                questions_sha256=ready.sha256,
                started_s=started_s,
                ended_s=time.monotonic(),
            )
        )
        states = accuracy.summarise(records).states
        self.run.reporter.note(f"{workload.name}: {', '.join(f'{count} {state}' for state, count in states.items())}")

    def _answer_record(self, workload: Gsm8kWorkload, ready: Questions, index: int, reply: Reply) -> AnswerRecord:
        return accuracy.answer_record(
            workload.name,
            ready.asked[index],
            ready.prompts[index],
            reply.text,
            finish_reason=reply.finish_reason,
            generation={"max_tokens": workload.max_tokens, "temperature": 0, "seed": self.spec.design.seed},
            reasoning=reply.reasoning,
            tokens=reply.tokens,
            prompt_tokens=reply.prompt_tokens,
            output_tokens=reply.output_tokens,
            e2el_s=reply.e2el_s,
            error=reply.error,
            decided_by=workload.filter,
        )

    def _stop(self, vllm: server.VllmServer) -> None:
        before = self.phase
        self._enter("stop")
        stopped_s = time.monotonic()
        try:
            vllm.stop()
        finally:
            self.stop_s = time.monotonic() - stopped_s
            self.evidence = self.evidence.model_copy(
                update={
                    "caches": vllm.cache_evidence(),
                    "default_caches_touched": vllm.defaults_touched(),
                }
            )
            self.phase = before
        self.findings += resources.check_caches_used(self.evidence.caches, self.evidence.default_caches_touched)

    def _gpu_evidence(self) -> dict[str, Any]:
        uuids = self.run.gpu.uuids()
        return {"gpu_uuids": uuids or None, "gpu_absent": None if uuids else getattr(self.run.gpu, "reason", "no GPU")}

    def _record(self, vllm: server.VllmServer, error: BaseException | None, log_tail: list[str]) -> LaunchRecord:
        planned = self.planned
        failure: Failure | None = None
        if error is not None:
            failure = Failure(
                kind=type(error).__name__,
                message=str(error) or "interrupted",
                phase=self.phase,
                code=getattr(error, "code", None),
                hint=getattr(error, "hint", None),
                log_tail=log_tail,
                command=vllm.by_hand() if isinstance(error, LaunchError) else None,
            )
        interrupted = isinstance(error, KeyboardInterrupt)
        return LaunchRecord(
            status="completed" if error is None else "interrupted" if interrupted else "failed",
            experiment=self.spec.experiment,
            launch_index=planned.index,
            variant=planned.variant,
            sentinel=planned.sentinel,
            config_hash=self.run.plan.config_hash,
            started_at=self.started_at,
            argv=list(planned.argv),
            env=redact(planned.env),
            inherited=list(planned.inherited),
            not_passed=list(planned.not_passed),
            model=planned.argv[4],
            served_model_name=planned.served_model_name,
            port=planned.port,
            ready_s=self.ready_s,
            stop_s=self.stop_s,
            wall_s=time.monotonic() - self.started_s,
            findings=self.findings,
            cells=self.cells,
            accuracy=self.accuracy,
            error=failure,
        )

    def _write(self, record: LaunchRecord) -> None:
        # The launch record comes last: a folder that has one has everything else.
        write_model(self.folder / EVIDENCE_FILE, self.evidence)
        write_model(self.folder / LAUNCH_FILE, record)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _redacted_spec(spec: ExperimentSpec) -> dict[str, Any]:
    data = spec.model_dump(mode="json")
    for holder in (data["server"], *data["variants"].values()):
        holder["env"] = {name: None if value is None else hidden(name, value) for name, value in holder["env"].items()}
    return data


def _is_complete(folder: Path) -> bool:
    path = folder / LAUNCH_FILE
    return path.exists() and read_model(path, LaunchRecord).status == "completed"


def _set_aside(folder: Path, run_dir: Path) -> None:
    """Move a broken launch's folder out of the way: what it measured is kept, and never mixed with the new one."""
    if not folder.exists():
        return
    attempts = run_dir / "attempts"
    attempts.mkdir(exist_ok=True)
    number = sum(path.name.startswith(f"{folder.name}.") for path in attempts.iterdir())
    folder.rename(attempts / f"{folder.name}.{number + 1}")


@contextlib.contextmanager
def _one_run_at_a_time(run_dir: Path) -> Iterator[None]:
    with (run_dir / ".lock").open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"{run_dir} is in use by another abharness run", hint="wait for it to end") from error
        yield
    (run_dir / ".lock").unlink(missing_ok=True)


@contextlib.contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install one handler for the signals that ask a program to end; only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _signals_interrupt() -> contextlib.AbstractContextManager[None]:
    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return _handlers(interrupt)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold back interrupts until the block is done, then deliver one."""
    asked: list[int] = []
    with _handlers(lambda number, _frame: asked.append(number)):
        yield
    if asked:
        raise KeyboardInterrupt
