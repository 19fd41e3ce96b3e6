"""Executes a Plan into a run folder: one launch after the other; finished ones are kept, broken ones set aside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from abharness import accuracy, provenance
from abharness.atomic import unfinished
from abharness.claims import HeldLaunch
from abharness.errors import (
    GpuLost,
    NewerRecord,
    PreflightError,
    RecordError,
    TeardownError,
    UsageError,
    VerificationFailed,
)
from abharness.launch import LaunchExecution, utc_now
from abharness.load import Questions, RunContext
from abharness.plan import Plan, recorded_hash
from abharness.progress import Reporter, RunStart
from abharness.record import LaunchRecord, RunRecord, Variant
from abharness.redaction import hidden, redact_argv, scrub_data
from abharness.runs import LAUNCH_FILE, RUN_FILE, launches_dir
from abharness.signals import signals_interrupt
from abharness.spec import ExperimentSpec, Gsm8kWorkload
from abharness.storage import read_model, write_model
from abharness.telemetry import Gpu

STOPS_THE_RUN = (PreflightError, VerificationFailed, TeardownError, GpuLost)
"""After these the next launch would fail the same way, or would not be alone on the machine."""

MOST_FAILURES = 2
"""Failed launches of one variant after which the others would most likely fail too."""


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
        kept: It stays after the run.
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
        hold: Callable[[HeldLaunch | None], None],
        kept: bool = True,
    ) -> None:
        """Prepare a run; nothing is started.

        Args:
            spec: The experiment.
            plan: Its launches.
            run_dir: Where everything goes; nobody else uses it.
            gpu: The devices of the launches.
            reporter: Told what happens.
            versions: What each variant's interpreter reports of itself.
            hold: Told what the launch of the moment holds of the machine; None when it has given everything back.
            kept: The run folder stays.
        """
        self.spec = spec
        self.plan = plan
        self.run_dir = run_dir
        self.gpu = gpu
        self.reporter = reporter
        self.versions = versions
        self.hold = hold
        self.kept = kept

    def run(self) -> None:
        """Run every launch that is not on record as completed; earlier attempts are kept under `attempts/`.

        Raises:
            KeyboardInterrupt: Asked to stop; the interrupted launch is on record.
            AbharnessError: The run cannot go on.
        """
        questions = load_questions(self.spec)
        context = RunContext(
            self.spec, self.plan.config_hash, self.gpu, self.reporter, questions, self.versions, self.hold
        )
        for path in unfinished(self.run_dir):
            path.unlink()
        self._write_run_record()
        failures: Counter[Variant] = Counter()
        with signals_interrupt():
            on_record = self._on_record()
            self.reporter.begin(self._start(on_record))
            for place, planned in enumerate(self.plan.launches):
                folder = launches_dir(self.run_dir) / planned.label
                if place in on_record:
                    self.reporter.note(f"launch {planned.label} is on record; skipped")
                    continue
                _set_aside(folder, self.run_dir)
                self.reporter.launch(place, len(self.plan.launches), planned.variant)
                error = LaunchExecution(context, planned, folder).carry_out()
                self.reporter.launch_done(read_model(folder / LAUNCH_FILE, LaunchRecord), folder)
                if isinstance(error, KeyboardInterrupt):
                    raise error
                if error is not None:
                    failures[planned.variant] += 1
                if isinstance(error, STOPS_THE_RUN) or failures[planned.variant] >= MOST_FAILURES:
                    self.reporter.note("the remaining launches are left out; --resume goes on from here")
                    break

    def _on_record(self) -> dict[int, float]:
        """Place in the plan -> seconds it took, of every launch that is on record as completed."""
        found: dict[int, float] = {}
        for place, planned in enumerate(self.plan.launches):
            record = self._completed(launches_dir(self.run_dir) / planned.label / LAUNCH_FILE)
            if record is not None:
                found[place] = record.wall_s
        return found

    def _start(self, on_record: Mapping[int, float]) -> RunStart:
        return RunStart(
            experiment=self.spec.experiment,
            run_dir=self.run_dir,
            config_hash=self.plan.config_hash,
            plan=[planned.variant for planned in self.plan.launches],
            on_record=on_record,
            versions=self.versions,
            kept=self.kept,
        )

    def _write_run_record(self) -> None:
        path = self.run_dir / RUN_FILE
        recorded = self._recorded(path)
        if recorded is not None:
            if recorded.config_hash != self.plan.config_hash:
                raise UsageError(
                    f"{self.run_dir} holds configuration {recorded.config_hash}, not {self.plan.config_hash}"
                )
            return
        launches_dir(self.run_dir).mkdir(parents=True, exist_ok=True)
        recorded_spec = _redacted_spec(self.spec)
        write_model(
            path,
            RunRecord(
                experiment=self.spec.experiment,
                question=self.spec.question,
                config_hash=self.plan.config_hash,
                created_at=utc_now(),
                abharness_version=provenance.own_version(),
                spec=recorded_spec,
                spec_sha256=recorded_hash(recorded_spec),
                plan=[launch.variant for launch in self.plan.launches],
                provenance=provenance.collect(self.gpu),
                aa=self.spec.is_aa,
            ),
        )

    def _recorded(self, path: Path) -> RunRecord | None:
        """The record of this run, where it was begun before; one that is damaged is set aside and written anew."""
        if not path.exists():
            return None
        try:
            return read_model(path, RunRecord)
        except NewerRecord:
            raise
        except RecordError as error:
            self.reporter.note(f"{error}; set aside and written anew")
            _set_aside(path, self.run_dir)
            return None

    def _completed(self, path: Path) -> LaunchRecord | None:
        """The record of a launch that completed; one that is damaged is as good as none."""
        if not path.exists():
            return None
        try:
            record = read_model(path, LaunchRecord)
        except NewerRecord:
            raise
        except RecordError as error:
            self.reporter.note(f"{error}; the launch is run again")
            return None
        return record if record.status == "completed" else None


def _redacted_spec(spec: ExperimentSpec) -> dict[str, Any]:
    data = spec.model_dump(mode="json")
    for holder in (data["server"], *data["variants"].values()):
        holder["env"] = {name: None if value is None else hidden(name, value) for name, value in holder["env"].items()}
        holder["serve_args"] = redact_argv(holder["serve_args"])
    return dict(scrub_data(data))


def _set_aside(folder: Path, run_dir: Path) -> None:
    """Move what is broken out of the way: what was measured is kept, and never mixed with what comes."""
    if not folder.exists():
        return
    attempts = run_dir / "attempts"
    attempts.mkdir(exist_ok=True)
    number = sum(path.name.startswith(f"{folder.name}.") for path in attempts.iterdir())
    folder.rename(attempts / f"{folder.name}.{number + 1}")
