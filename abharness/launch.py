"""One planned launch -> its record: start, proof, load, proof again, stop.

Whatever happens (a dead server, a full disk, Ctrl-C), the server is stopped, what was measured is on disk and a
LaunchRecord says what went wrong.
"""

from __future__ import annotations

import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from abharness import endpoints, hearing, judge, kernelfolder, server, verify
from abharness.ask import first_completion
from abharness.errors import AbharnessError, GpuLost, LaunchError, LoadFailed, VerificationFailed
from abharness.executed import judge_kernels
from abharness.load import Load, RunContext
from abharness.plan import PlannedLaunch, default_caches, trace_shapes
from abharness.record import Evidence, Failure, Finding, LaunchRecord, TracedPhase
from abharness.redaction import redact, redact_argv, redact_data, scrub, scrubbed_copy
from abharness.runs import EVIDENCE_FILE, LAUNCH_FILE, LOG_FILE, SERVER_INFO_FILE, TELEMETRY_FILE, read_executed
from abharness.sampler import Sampler
from abharness.samples import write_samples
from abharness.signals import interrupts_held
from abharness.spec import SENTINEL_VARIABLE
from abharness.storage import write_json, write_model
from abharness.telemetry import GPU_LOST_HINT
from abharness.tracing import trace_launch


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
        self.traces: list[TracedPhase] = []
        self.findings: list[Finding] = []
        self.evidence = Evidence(server_versions=dict(run.versions[planned.variant]))
        self.sampler = Sampler(run.gpu, run.spec.telemetry.interval_s)
        self.load: Load | None = None

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
            log_path=self.planned.log_path,
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
        kernelfolder.require_unchanged(self.planned.kernels)
        self.sampler.note_memory_before()
        self.run.hold(vllm.held(self.folder / LOG_FILE))
        vllm.start()
        self.run.hold(vllm.held(self.folder / LOG_FILE))
        self._enter("start")
        self.evidence = self.evidence.model_copy(update={"server_pid": vllm.pid})
        vllm.wait_ready(
            lambda: first_completion(self.base_url, self.planned.served_model_name, timeout_s=60.0),
            lambda waited_s, reason: self.run.reporter.waiting(f"{waited_s:.0f} s: {reason}"),
        )
        self.ready_s = time.monotonic() - self.started_s
        self.run.hold(vllm.held(self.folder / LOG_FILE))
        self.evidence = self.evidence.model_copy(update={"socket_owner_pid": vllm.socket_owner_pid})
        self._verify(vllm, "before_load")
        self._save_server_info()
        load = self._make_load(vllm)
        self.sampler.start()
        try:
            self.sampler.idle(vllm.alive)
            load.measure()
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
        reason = vllm.alive() or first_completion(load.base_url, self.planned.served_model_name, timeout_s=60.0)
        if reason:
            raise LoadFailed(f"the server no longer answers after the load: {reason}", log_tail=vllm.log_tail(40))
        vllm.check_listener()
        self._verify(vllm, "after_load")
        # Once more: what a process imports late must be the same, too.
        kernelfolder.require_unchanged(self.planned.kernels)
        # Last: what is measured and proven by now stays so, whatever the profiler does to the server.
        self.traces = trace_launch(load, self.planned, self.folder, self._enter)
        self._judge_kernels()

    def _judge_kernels(self) -> None:
        expected = self.spec.verify.expect_kernels.get(self.planned.variant)
        if expected is None:
            return
        executed = read_executed(self.folder, self.traces, self.evidence)
        for finding in judge_kernels(executed, expected, [shape.phase for shape in trace_shapes(self.spec)]):
            if finding.fatal:
                raise VerificationFailed(finding.message, hint=finding.hint, code=finding.code)
            self.run.reporter.warn(finding.message, finding.code)

    def _make_load(self, vllm: server.VllmServer) -> Load:
        self.load = Load(
            self.run,
            self.planned,
            self.folder,
            sampler=self.sampler,
            tree=lambda: [pid for pid, _ in vllm.known()],
            alive=lambda: self._alive(vllm),
            enter=self._enter,
        )
        return self.load

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
            plugins=self.spec.plugins_of(self.planned.variant),
            kernels=self.planned.kernels,
            expect_report=self.spec.verify.expect_report.get(self.planned.variant),
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

    def _stop(self, vllm: server.VllmServer) -> None:
        before = self.phase
        self._enter("stop")
        stopped_s = time.monotonic()
        try:
            vllm.stop()
            self.run.hold(None)
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
            argv=redact_argv(planned.argv),
            env=redact(planned.env),
            inherited=list(planned.inherited),
            not_passed=list(planned.not_passed),
            kernels=list(planned.kernels),
            model=scrub(planned.argv[4]),
            served_model_name=planned.served_model_name,
            port=planned.port,
            ready_s=self.ready_s,
            stop_s=self.stop_s,
            wall_s=time.monotonic() - self.started_s,
            findings=self.findings,
            sampling=self.sampler.sampling(),
            cells=self.load.cells if self.load else [],
            accuracy=self.load.accuracy if self.load else [],
            traces=self.traces,
            error=failure,
        )

    def _write(self, record: LaunchRecord) -> None:
        # The launch record comes last: a folder that has one has everything else.
        if self.planned.log_path.exists():
            scrubbed_copy(self.planned.log_path, self.folder / LOG_FILE)
        if self.sampler.samples:
            write_samples(self.folder / TELEMETRY_FILE, list(self.sampler.samples))
        write_model(self.folder / EVIDENCE_FILE, self.evidence)
        write_model(self.folder / LAUNCH_FILE, record)
