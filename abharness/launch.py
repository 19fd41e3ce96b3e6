"""One planned launch -> its record: start, proof, load, proof again, stop.

Whatever happens (a dead server, a full disk, Ctrl-C), the server is stopped, what was measured is on disk and a
LaunchRecord says what went wrong.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from abharness import accuracy, endpoints, hearing, judge, loadgen, prompts, server, verify, warmup
from abharness.ask import Reply, ask, first_completion
from abharness.checks import check_cell
from abharness.errors import AbharnessError, GpuLost, LaunchError, LoadFailed, VerificationFailed
from abharness.observe import CounterWatch, WindowWatch
from abharness.plan import PlannedLaunch, Shape, default_caches, shapes
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
    Variant,
)
from abharness.redaction import redact, redact_data
from abharness.runs import (
    ANSWERS_FILE,
    EVIDENCE_FILE,
    LAUNCH_FILE,
    LOG_FILE,
    REQUESTS_FILE,
    SERVER_INFO_FILE,
    TELEMETRY_FILE,
)
from abharness.sampler import Sampler
from abharness.samples import write_samples
from abharness.signals import interrupts_held
from abharness.spec import SENTINEL_VARIABLE, ExperimentSpec, Gsm8kWorkload
from abharness.storage import append_lines, write_json, write_model
from abharness.telemetry import GPU_LOST_HINT, Gpu


@dataclass(frozen=True, slots=True)
class Questions:
    """A gsm8k workload made ready before anything is launched."""

    asked: Sequence[accuracy.Question]
    prompts: Sequence[accuracy.Prompt]
    sha256: str


@dataclass(frozen=True, slots=True)
class RunContext:
    """What the launches of one run share.

    Attributes:
        questions: Questions of each gsm8k workload.
        versions: What each variant's interpreter reports of itself.
    """

    spec: ExperimentSpec
    config_hash: str
    gpu: Gpu
    reporter: Reporter
    questions: Mapping[str, Questions]
    versions: Mapping[Variant, Mapping[str, str]]


def utc_now() -> str:
    """This moment as ISO 8601 text, seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class LaunchExecution:
    """One launch: the state that ends up in its record."""

    def __init__(self, run: RunContext, planned: PlannedLaunch, folder: Path) -> None:
        self.run = run
        self.spec = run.spec
        self.planned = planned
        self.folder = folder
        self.phase = "preflight"
        self.started_at = utc_now()
        self.started_s = time.monotonic()
        self.ready_s: float | None = None
        self.stop_s: float | None = None
        self.cells: list[CellRecord] = []
        self.accuracy: list[AccuracyRun] = []
        self.findings: list[Finding] = []
        self.evidence = Evidence(server_versions=dict(run.versions[planned.variant]))
        self.sampler = Sampler(run.gpu, run.spec.telemetry.interval_s)
        self.ordinal = 0
        self.token_pool: Sequence[int] = ()

    @property
    def base_url(self) -> str:
        """The server's root."""
        return f"http://127.0.0.1:{self.planned.port}"

    def carry_out(self) -> BaseException | None:
        """Run the launch to its record, whatever happens.

        Returns:
            None, or the `AbharnessError` or `KeyboardInterrupt` that ended it.

        Raises:
            BaseException: Anything else (a full disk, a fault of the harness), after the record was written.
        """
        error: BaseException | None = None
        log_tail: list[str] = []
        self.folder.mkdir(parents=True)
        self.planned.tmp_dir.mkdir(parents=True)
        self.planned.probe_dir.mkdir()
        vllm = server.VllmServer(self._command())
        try:
            self.evidence = self.evidence.model_copy(update=self._gpu_evidence())
            try:
                self._serve(vllm)
            finally:
                self._stop(vllm)
        except BaseException as failure:
            error = failure
            log_tail = getattr(failure, "log_tail", []) or vllm.log_tail(40)
        with interrupts_held():
            try:
                self._write(self._record(vllm, error, log_tail))
            finally:
                shutil.rmtree(self.planned.tmp_dir.parent, ignore_errors=True)
        if error is not None and not isinstance(error, AbharnessError | KeyboardInterrupt):
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
        self.sampler.note_memory_before()
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
        self._save_server_info()
        self.sampler.start()
        try:
            self.sampler.idle(vllm.alive)
            self._load(vllm)
        except LoadFailed:
            # Then the load ended for that, whatever else it said.
            self._raise_if_lost(vllm)
            raise
        finally:
            self.sampler.stop()
            seen = self.sampler.pids
            found = {
                "gpu_pids_seen": {uuid: list(pids) for uuid, pids in seen.items()},
                "gpu_pids_first_seen_s": {uuid: list(pids.values()) for uuid, pids in seen.items()},
                "tree_pids": [pid for pid, _ in vllm.known()],
            }
            self.evidence = self.evidence.model_copy(update=found)
        self._raise_if_lost(vllm)
        self._enter("after load")
        reason = vllm.alive() or first_completion(self.base_url, self.planned.served_model_name, timeout_s=60.0)
        if reason:
            raise LoadFailed(f"the server no longer answers after the load: {reason}", log_tail=vllm.log_tail(40))
        vllm.check_listener()
        self._verify(vllm, "after_load")

    def _load(self, vllm: server.VllmServer) -> None:
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

    def _alive(self, vllm: server.VllmServer) -> str | None:
        """Why the load cannot go on, or None; returns at once."""
        return self.sampler.lost or vllm.alive()

    def _raise_if_lost(self, vllm: server.VllmServer) -> None:
        if self.sampler.lost is not None:
            raise GpuLost(self.sampler.lost, hint=GPU_LOST_HINT, log_tail=vllm.log_tail(40))

    def _save_server_info(self) -> None:
        """The resolved configuration, asked for before anything is timed: the answer takes the server seconds."""
        info, absent = endpoints.server_info(self.base_url)
        if info is not None:
            write_json(self.folder / SERVER_INFO_FILE, redact_data(info))
        self.evidence = self.evidence.model_copy(update={"server_info_absent": absent})

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
        expected = self.spec.verify.expect_log
        check = verify.check_environment(
            when=when,
            root_pid=vllm.pid,
            launched=self.planned.env,
            known=vllm.known(),
            expected=self.planned.expected,
            sentinel=(SENTINEL_VARIABLE, self.planned.sentinel),
            log_text=vllm.log_text(),
            expect_log=expected.get(self.planned.variant, ()),
            other_log=[
                text for variant, texts in expected.items() for text in texts if variant != self.planned.variant
            ],
            plugins=self.spec.verify.plugins.get(self.planned.variant, ()),
            probes=hearing.hear(self.planned.probe_dir),
            probe_absent=self.planned.probe_absent,
            caches={name: str(path) for name, path in self.planned.cache_dirs.items()},
            gpu_pids={uuid: self.run.gpu.compute_pids(uuid) for uuid in self.run.gpu.uuids()},
        )
        self.evidence = self.evidence.model_copy(update={"environment": [*self.evidence.environment, check]})
        fatal = [finding for finding in check.findings if finding.fatal]
        if fatal:
            raise VerificationFailed(
                "; ".join(finding.message for finding in fatal), hint=fatal[0].hint, code=fatal[0].code
            )

    def _next_prompts(self, shape: Shape, count: int, label: str, input_len: int) -> list[list[int]]:
        built = prompts.build_prompts(
            self.token_pool,
            seed=self.spec.design.seed,
            label=f"{shape.label} {label}",
            num_prompts=count,
            input_len=input_len,
            first_ordinal=self.ordinal,
        )
        self.ordinal += count
        return built

    def _drive(
        self, shape: Shape, vllm: server.VllmServer, sent: list[list[int]], output_len: int | Sequence[int]
    ) -> loadgen.CellTraffic:
        return loadgen.run_cell(
            base_url=self.base_url,
            served_model=self.planned.served_model_name,
            prompts=sent,
            output_len=output_len,
            max_concurrency=shape.max_concurrency,
            request_timeout_s=self.spec.server.request_timeout_s,
            alive=lambda: self._alive(vllm),
            on_progress=self.run.reporter.advance,
        )

    def _warm_up(self, shape: Shape, vllm: server.VllmServer) -> None:
        for wave in warmup.waves(shape):
            self._enter(f"{shape.label} warm-up")
            sent = self._next_prompts(shape, len(wave.output_lens), f"warm-up {wave.name}", wave.input_len)
            counters = CounterWatch(self.base_url)
            traffic = self._drive(shape, vllm, sent, wave.output_lens)
            failed = [request.error for request in traffic.requests if request.error]
            if failed:
                raise LoadFailed(f"{len(failed)} of {len(sent)} warm-up requests failed: {failed[0]}")
            # Tokens of the warm-up that the server counts late must not be counted in the window.
            counters.ended(
                prompt_tokens=sum(map(len, sent)),
                generation_tokens=sum(wave.output_lens),
            )

    def _cell(self, shape: Shape, vllm: server.VllmServer) -> None:
        self._warm_up(shape, vllm)
        for repeat in range(shape.repeats):
            self._enter(shape.label if shape.repeats == 1 else f"{shape.label} repeat {repeat + 1}/{shape.repeats}")
            sent = self._next_prompts(shape, shape.num_prompts, f"repeat {repeat}", shape.input_len)
            watch = WindowWatch(self.base_url, self.folder / LOG_FILE, self.planned.cache_dirs, self.sampler)
            try:
                traffic = self._drive(shape, vllm, sent, shape.output_len)
            except (loadgen.CellFailed, loadgen.CellInterrupted) as cut:
                self._keep(shape, repeat, cut.traffic.requests)
                raise
            self._keep(shape, repeat, traffic.requests)
            seen = watch.ended(traffic.started_s, traffic.ended_s, traffic.requests, shape.max_concurrency)
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
                **seen,
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
        counters = CounterWatch(self.base_url)
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
            alive=lambda: self._alive(vllm),
            on_answer=on_answer,
        )
        ended_s = time.monotonic()
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
                ended_s=ended_s,
                counters=counters.ended(
                    prompt_tokens=sum(record.prompt_tokens or 0 for record in records),
                    generation_tokens=sum(record.output_tokens or 0 for record in records),
                ),
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
        except GpuLost:
            # The memory of a device that was lost under load cannot be seen to come back: that error is on its way up.
            if self.sampler.lost is None:
                raise
        finally:
            self.stop_s = time.monotonic() - stopped_s
            if vllm.started:
                caches, touched = vllm.cache_evidence(), vllm.defaults_touched()
                found = {"caches": caches, "default_caches_touched": touched, "shared_memory_left": vllm.leftovers()}
                self.evidence = self.evidence.model_copy(update=found)
                self.findings += judge.judge_caches(caches, touched)
        # An error on its way up belongs to the phase it came from.
        self.phase = before

    def _gpu_evidence(self) -> dict[str, Any]:
        uuids = self.run.gpu.uuids()
        return {"gpu_uuids": uuids or None, "gpu_absent": None if uuids else getattr(self.run.gpu, "reason", "no GPU")}

    def _record(self, vllm: server.VllmServer, error: BaseException | None, log_tail: list[str]) -> LaunchRecord:
        planned = self.planned
        failure: Failure | None = None
        if error is not None:
            # The server that could not be stopped may have failed for another reason first: tell both.
            first = error.__context__ if isinstance(error.__context__, AbharnessError) else None
            failure = Failure(
                kind=type(error).__name__,
                message=(str(error) or "interrupted") + (f"; before that: {first}" if first else ""),
                phase=self.phase,
                code=getattr(error, "code", None) or getattr(first, "code", None),
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
            config_hash=self.run.config_hash,
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
            sampling=self.sampler.sampling(),
            cells=self.cells,
            accuracy=self.accuracy,
            error=failure,
        )

    def _write(self, record: LaunchRecord) -> None:
        # The launch record comes last: a folder that has one has everything else.
        if self.sampler.samples:
            write_samples(self.folder / TELEMETRY_FILE, list(self.sampler.samples))
        write_model(self.folder / EVIDENCE_FILE, self.evidence)
        write_model(self.folder / LAUNCH_FILE, record)
