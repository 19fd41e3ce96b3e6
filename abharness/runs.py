"""The folder of a run: its layout, finding runs below a folder, reading one with everything that was kept.

Reading is tolerant where nothing is lost by it (a half-written last line is dropped and said so) and strict where a
wrong reading would make a wrong comparison (unknown schema version, damaged launch record).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from abharness.errors import RecordError
from abharness.record import (
    AnswerRecord,
    CellRecord,
    Evidence,
    LaunchRecord,
    RequestLine,
    RequestRecord,
    RunRecord,
    Variant,
)
from abharness.storage import read_lines, read_model

RUN_FILE = "experiment.json"
LAUNCH_FILE = "launch.json"
REQUESTS_FILE = "requests.jsonl"
ANSWERS_FILE = "gsm8k.jsonl"
EVIDENCE_FILE = "evidence.json"
LOG_FILE = "server.log"


@dataclass(frozen=True, slots=True, order=True)
class CellKey:
    """What makes two cells the same question."""

    workload: str
    input_len: int
    output_len: int
    max_concurrency: int

    @staticmethod
    def of(line: CellRecord | RequestLine) -> CellKey:
        """The key of a record that has these fields."""
        return CellKey(line.workload, line.input_len, line.output_len, line.max_concurrency)

    def __str__(self) -> str:
        return (
            f"{self.workload} input_len={self.input_len} output_len={self.output_len} "
            f"max_concurrency={self.max_concurrency}"
        )


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch as read from disk.

    Attributes:
        requests: Requests by cell and repeat.
        answers: Answers by workload.
    """

    path: Path
    record: LaunchRecord
    evidence: Evidence
    requests: dict[tuple[CellKey, int], list[RequestRecord]]
    answers: dict[str, list[AnswerRecord]]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """One run as read from disk; `launches` in order of their index."""

    path: Path
    record: RunRecord
    launches: tuple[Launch, ...]
    warnings: tuple[str, ...] = field(default=())

    def of(self, variant: Variant) -> list[Launch]:
        """The launches of one variant that completed."""
        return [x for x in self.launches if x.record.variant == variant and x.record.status == "completed"]


def launches_dir(run: Path) -> Path:
    """Folder of the launches of a run."""
    return run / "launches"


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Run folders at or below the given folders, in order of their names (which start with their time).

    Raises:
        RecordError: A folder does not exist or holds no run.
    """
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise RecordError(f"{folder}: no such folder", hint="give a results folder or a run's folder")
        if (folder / RUN_FILE).is_file():
            found.append(folder)
            continue
        below = sorted(path.parent for path in folder.rglob(RUN_FILE))
        if not below:
            raise RecordError(f"{folder}: no run here (no {RUN_FILE} at or below it)")
        found += below
    return list(dict.fromkeys(found))


def read_launch(path: Path) -> Launch:
    """Read the folder of one launch.

    Raises:
        RecordError: Its launch record or evidence cannot be read.
    """
    record = read_model(path / LAUNCH_FILE, LaunchRecord)
    evidence_file = path / EVIDENCE_FILE
    evidence = read_model(evidence_file, Evidence) if evidence_file.exists() else Evidence()
    requests: dict[tuple[CellKey, int], list[RequestRecord]] = defaultdict(list)
    answers: dict[str, list[AnswerRecord]] = defaultdict(list)
    warnings: list[str] = []
    if (path / REQUESTS_FILE).exists():
        lines, dropped = read_lines(path / REQUESTS_FILE, RequestLine)
        warnings += dropped
        for line in lines:
            requests[CellKey.of(line), line.repeat].append(line.request)
    if (path / ANSWERS_FILE).exists():
        replies, dropped = read_lines(path / ANSWERS_FILE, AnswerRecord)
        warnings += dropped
        for reply in replies:
            answers[reply.workload].append(reply)
    return Launch(path, record, evidence, dict(requests), dict(answers), tuple(warnings))


def read_run(path: Path) -> Run:
    """Read a run with all its launches; a launch folder without a launch record yet is named in `warnings`.

    Raises:
        RecordError: The run record or a launch record is damaged.
    """
    record = read_model(path / RUN_FILE, RunRecord)
    launches: list[Launch] = []
    warnings: list[str] = []
    folder = launches_dir(path)
    for below in sorted(folder.iterdir()) if folder.is_dir() else []:
        if (below / LAUNCH_FILE).is_file():
            launch = read_launch(below)
            if launch.record.config_hash != record.config_hash:
                raise RecordError(
                    f"{below}: configuration {launch.record.config_hash} in a run of {record.config_hash}",
                    hint="this launch belongs to another run; move it out",
                )
            twin = next((one for one in launches if one.record.sentinel == launch.record.sentinel), None)
            if twin is not None:
                raise RecordError(
                    f"{below} and {twin.path} are the same launch ({launch.record.sentinel})",
                    hint="one launch is one observation: move the copy out",
                )
            launches.append(launch)
            warnings += launch.warnings
        elif below.is_dir():
            warnings.append(
                f"{below}: no {LAUNCH_FILE}: the harness was killed during this launch; rerun with --resume"
            )
    launches.sort(key=lambda launch: launch.record.launch_index)
    return Run(path, record, tuple(launches), tuple(warnings))
