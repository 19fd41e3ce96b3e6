"""Run folders made of numbers: what `compare` reads, without launching anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from abharness import accuracy
from abharness.plan import config_hash, launch_order, recorded_hash
from abharness.prompts import combined_hash
from abharness.record import (
    AccuracyRun,
    CellRecord,
    ClientLoad,
    EnvironmentCheck,
    Evidence,
    Failure,
    Finding,
    LaunchRecord,
    RequestLine,
    RequestRecord,
    RunRecord,
    ServerCounters,
    TokenStep,
    Variant,
)
from abharness.spec import ExperimentSpec
from abharness.specload import parse_spec
from abharness.storage import append_lines, write_model
from abharness.windows import Compilation, GpuWindow, HostLoad
from abharness.witnesses import LoadedModule, ProbeReport, ProcessWitness

SPEC = """\
experiment: made
question: Is it faster?
server: {model: m, env: {SHARED: "1"}}
variants:
  baseline: {env: {SWITCH: null}}
  candidate: {env: {SWITCH: "1"}}
design: {launches_per_variant: 4}
workloads:
  - {name: decode, kind: decode, input_len: 16, output_len: 11, max_concurrency: 1, num_prompts: 4}
  - {name: gsm8k, kind: gsm8k, num_questions: 8, dataset: ./q.jsonl}
"""

QUESTIONS = [
    accuracy.Question(i, f"What is {i}?", f"It is {i}.\n#### {i}", accuracy.parse_gold(str(i))) for i in range(8)
]


@dataclass
class Made:
    """One launch to write; every field is a way in which it may differ."""

    speed: float = 100.0
    answers: Mapping[int, str] = field(default_factory=dict)
    drop_answers: int = 0
    error: str | None = None
    requests: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    counters: ServerCounters | Literal["exact"] | None = "exact"
    answer_counters: ServerCounters | Literal["exact"] | None = "exact"
    compilation: Compilation | None = field(default_factory=Compilation)
    host: HostLoad | None = None
    gpus: Sequence[GpuWindow] | None = None
    gpus_steady: Sequence[GpuWindow] | None = None
    client: Mapping[str, float] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    prompts: str = "p"
    findings: Sequence[Finding] = ()
    verified: bool = True
    server_info: Mapping[str, Any] | None = field(default_factory=lambda: {"vllm_config": {}, "vllm_env": {}})
    status: Any = "completed"
    failure: Failure | None = None
    started_at: str = "2026-01-01T00:00:00+00:00"
    model: str = "m"


def spec(*overrides: str) -> ExperimentSpec:
    return parse_spec(SPEC, "made.yaml", overrides)


def write_run(
    folder: Path,
    launches: Mapping[Variant, Sequence[Made]],
    *overrides: str,
    provenance: Mapping[str, Any] | None = None,
    aa: bool = False,
) -> Path:
    """Write a run whose k-th launch of a variant is the k-th of `launches`; fewer than planned are left out."""
    wanted = spec(*overrides).against_itself() if aa else spec(*overrides)
    order = launch_order(wanted.design)
    folder.mkdir(parents=True)
    write_model(
        folder / "experiment.json",
        RunRecord(
            experiment=wanted.experiment,
            question=wanted.question,
            config_hash=config_hash(wanted),
            created_at="2026-01-01T00:00:00+00:00",
            abharness_version="0",
            spec=wanted.model_dump(mode="json"),
            spec_sha256=recorded_hash(wanted.model_dump(mode="json")),
            plan=order,
            provenance=dict(provenance or {"cpu": "x"}),
            aa=aa,
        ),
    )
    counts: dict[Variant, int] = {"baseline": 0, "candidate": 0}
    for index, variant in enumerate(order):
        if counts[variant] < len(launches[variant]):
            write_launch(folder, wanted, index, variant, launches[variant][counts[variant]])
            counts[variant] += 1
    return folder


def write_launch(run: Path, wanted: ExperimentSpec, index: int, variant: Variant, made: Made) -> None:
    path = run / "launches" / f"{index}-{variant}"
    path.mkdir(parents=True)
    shape = {"workload": "decode", "input_len": 16, "output_len": 11, "max_concurrency": 1, "repeat": 0}
    requests = [request(i, made) for i in range(4)]
    append_lines(path / "requests.jsonl", [RequestLine(request=one, **shape) for one in requests])
    cell = CellRecord(
        kind="decode",
        started_s=0,
        ended_s=44 / made.speed,
        prompts_sha256=combined_hash(one.prompt_sha256 for one in requests),
        client=ClientLoad(
            **{"cpu_share": 0.1, "loop_lag_p50_s": 0, "loop_lag_p99_s": 0, "chunks_per_s": 1, **made.client}
        ),
        counters=_counted(requests) if made.counters == "exact" else made.counters,
        compilation=made.compilation,
        host=made.host,
        gpus=None if made.gpus is None else list(made.gpus),
        gpus_steady=None if made.gpus_steady is None else list(made.gpus_steady),
        gpus_absent="no GPU" if made.gpus is None else None,
        **shape,
    )
    asked = QUESTIONS[: wanted.workloads[1].num_questions] if len(wanted.workloads) > 1 else []  # type: ignore[union-attr]
    kept = asked[: len(asked) - made.drop_answers]
    answers = [answer(question, made) for question in kept]
    if kept:
        append_lines(path / "gsm8k.jsonl", answers)
    env = {"SHARED": "1", **({"SWITCH": "1"} if variant == "candidate" and not wanted.is_aa else {}), **made.env}
    checks = [verification(when, wanted, variant, env) for when in ("before_load", "after_load")]
    write_model(
        path / "evidence.json",
        Evidence(
            environment=checks if made.verified else [],
            gpu_absent="no GPU",
            server_versions={"vllm": "1", **made.versions},
        ),
    )
    if made.server_info is not None:
        (path / "server_info.json").write_text(json.dumps(made.server_info))
    write_model(
        path / "launch.json",
        LaunchRecord(
            status=made.status,
            experiment=wanted.experiment,
            launch_index=index,
            variant=variant,
            sentinel=f"t-{index}",
            config_hash=config_hash(wanted),
            started_at=made.started_at,
            argv=["python", "-m", "vllm", "serve", "m", "--port", "1", "--served-model-name", f"n-{index}"],
            env=env,
            inherited=[],
            not_passed=[],
            model=made.model,
            served_model_name=f"n-{index}",
            port=1,
            wall_s=1,
            findings=list(made.findings),
            cells=[cell],
            accuracy=[
                AccuracyRun(
                    workload="gsm8k",
                    num_questions=len(asked),
                    doc_ids=[question.doc_id for question in asked],
                    answered=len(kept),
                    max_concurrency=1,
                    max_tokens=64,
                    questions_sha256="q",
                    started_s=0,
                    ended_s=1,
                    counters=_counted(answers) if made.answer_counters == "exact" else made.answer_counters,
                )
            ]
            if asked
            else [],
            error=made.failure,
        ),
    )


def verification(when: Any, wanted: ExperimentSpec, variant: Variant, env: Mapping[str, str]) -> EnvironmentCheck:
    """What both witnesses show of a launch that is as declared."""
    declared = wanted.merged_env(variant)
    witness = ProcessWitness(
        pid=1, ppid=0, start_ticks=1, name="VLLM::EngineCore", state="ok", role="EngineCore", started_with=declared
    )
    report = ProbeReport(
        pid=1, ppid=0, start_ticks=1, name="EngineCore", reason="asked", executable="python", python="3", plugins=[],
        environ=dict(env), modules={"vllm": LoadedModule(version="1", file="/vllm")}, cache_dirs={}, gpu_absent="no GPU",
    )  # fmt: skip
    return EnvironmentCheck(when=when, expected=declared, processes=[witness], probes=[report])


def _counted(asked: Sequence[Any]) -> ServerCounters:
    """The counters of a server that did what it was asked and nothing else."""
    prompt = sum(one.prompt_tokens or 0 for one in asked)
    return ServerCounters(
        prompt_tokens=prompt,
        generation_tokens=sum(one.output_tokens or 0 for one in asked),
        prefix_cache_queries=prompt,
        prefix_cache_hits=0,
        preemptions=0,
    )


def gpu(**values: Any) -> GpuWindow:
    """A GPU that did a cell's work; every field is a way in which it may have been different."""
    fields: dict[str, Any] = {
        "uuid": "GPU-1", "samples": 10, "expected_samples": 10, "coverage": 1.0, "sm_clock_mhz": 1980,
        "mem_clock_mhz": 2619, "utilization_max": 1.0, "memory_used_bytes_before": 0, "memory_used_bytes_max": 2**33,
        "reasons": {}, "power_w": 400, "power_mean_w": 400, "power_kind": "instant", "power_limit_w": 700,
        "energy_j": 88, "energy_integral_j": 90, "energy_source": "counter", "idle_power_w": 100,
    }  # fmt: skip
    return GpuWindow.model_validate({**fields, **values})


def request(index: int, made: Made) -> RequestRecord:
    took = 11 / made.speed
    values: dict[str, Any] = {
        "index": index,
        "prompt_sha256": hashlib.sha256(f"{made.prompts}{index}".encode()).hexdigest(),
        "requested_input_len": 16,
        "requested_output_len": 11,
        "submitted_s": index * took,
        "sent_s": index * took,
        "first_token_s": (index + 0.1) * took,
        "last_token_s": (index + 1) * took,
        "prompt_tokens": 16,
        "output_tokens": 11,
        "chunks": 11,
        "finish_reason": "length",
    }
    return RequestRecord.model_validate({**values, **made.requests.get(index, {})})


def answer(question: accuracy.Question, made: Made) -> Any:
    text = made.answers.get(question.doc_id, f"It is {question.doc_id}.\n#### {question.doc_id}")
    tokens = [TokenStep(token=c, logprob=-0.7, runner_up="?", runner_up_logprob=-0.72) for c in text]
    cut = text.endswith("...")
    return accuracy.answer_record(
        "gsm8k",
        question,
        accuracy.build_prompt(question, style="chat"),
        text,
        finish_reason="length" if cut else "stop",
        generation={"max_tokens": 64},
        tokens=tokens,
        prompt_tokens=20,
        output_tokens=len(tokens),
        error=made.error,
    )
