"""Executes a Plan into a run folder: one launch after the other; finished ones are kept, broken ones set aside."""

from __future__ import annotations

import contextlib
import fcntl
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from abharness import accuracy, provenance
from abharness.errors import GpuLost, PreflightError, TeardownError, UsageError, VerificationFailed
from abharness.launch import LaunchExecution, utc_now
from abharness.load import Questions, RunContext
from abharness.plan import Plan, recorded_hash
from abharness.progress import Reporter, RunStart
from abharness.record import LaunchRecord, RunRecord, Variant
from abharness.redaction import hidden
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
        kept: bool = True,
    ) -> None:
        self.spec = spec
        self.plan = plan
        self.run_dir = run_dir
        self.gpu = gpu
        self.reporter = reporter
        self.versions = versions
        self.kept = kept

    def run(self) -> None:
        """Run every launch that is not on record as completed; earlier attempts are kept under `attempts/`.

        Raises:
            KeyboardInterrupt: Asked to stop; the interrupted launch is on record.
            AbharnessError: The run cannot go on.
        """
        questions = load_questions(self.spec)
        context = RunContext(self.spec, self.plan.config_hash, self.gpu, self.reporter, questions, self.versions)
        self._write_run_record()
        failures: Counter[Variant] = Counter()
        with _one_run_at_a_time(self.run_dir), signals_interrupt():
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
            path = launches_dir(self.run_dir) / planned.label / LAUNCH_FILE
            if path.exists() and (record := read_model(path, LaunchRecord)).status == "completed":
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
        if path.exists():
            recorded = read_model(path, RunRecord)
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


def _redacted_spec(spec: ExperimentSpec) -> dict[str, Any]:
    data = spec.model_dump(mode="json")
    for holder in (data["server"], *data["variants"].values()):
        holder["env"] = {name: None if value is None else hidden(name, value) for name, value in holder["env"].items()}
    return data


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
