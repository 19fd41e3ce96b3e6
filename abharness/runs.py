"""The folder of a run: its layout, finding runs below a folder, reading one with everything that was kept.

Reading is tolerant where nothing is lost by it (a half-written last line is dropped and said so) and strict where a
wrong reading would make a wrong comparison (unknown schema version, damaged launch record). Answers are scored again
from the replies: what was concluded when they were written is not read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from abharness.accuracy import rescored
from abharness.errors import RecordError
from abharness.executed import Executed
from abharness.metrics import steady_window
from abharness.record import (
    AnswerRecord,
    CellRecord,
    Evidence,
    LaunchRecord,
    RequestLine,
    RequestRecord,
    RunRecord,
    TracedPhase,
    Variant,
)
from abharness.samples import by_gpu, read_samples, summarise
from abharness.storage import packed, read_json, read_lines, read_model
from abharness.trace import read_kernels

RUN_FILE = "experiment.json"
LAUNCH_FILE = "launch.json"
REQUESTS_FILE = "requests.jsonl"
ANSWERS_FILE = "gsm8k.jsonl"
EVIDENCE_FILE = "evidence.json"
LOG_FILE = "server.log"
SERVER_INFO_FILE = "server_info.json"
TELEMETRY_FILE = "telemetry.parquet"
KERNELS_DIR = "kernels"
TRACES_DIR = "traces"


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
        server_info: The server's resolved configuration, or None where it is not on record.
        executed: The traced phases with the kernels they show.
    """

    path: Path
    record: LaunchRecord
    evidence: Evidence
    requests: dict[tuple[CellKey, int], list[RequestRecord]]
    answers: dict[str, list[AnswerRecord]]
    server_info: dict[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    executed: tuple[Executed, ...] = ()

    def cells_of(self, key: CellKey) -> list[CellRecord]:
        """The repeats of one cell."""
        return [cell for cell in self.record.cells if CellKey.of(cell) == key]


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


def find_aa_runs(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """A/A runs among these run folders and beside them.

    Returns:
        Their folders in order of their names, and a warning for each folder beside that could not be looked at.
    """
    known = {path.absolute(): path for path in paths}
    # Named as the run itself is: relative paths stay relative.
    beside = (p.parent if p.parent.absolute() == p.absolute().parent else p.absolute().parent for p in paths)
    for near in dict.fromkeys(beside):
        for file in near.glob(f"*/{RUN_FILE}"):
            known.setdefault(file.parent.absolute(), file.parent)
    found: list[Path] = []
    warnings: list[str] = []
    for _, folder in sorted(known.items()):
        try:
            if read_model(folder / RUN_FILE, RunRecord).aa:
                found.append(folder)
        except RecordError as error:
            if folder not in paths:  # one that was asked for is read, and refused, on its own account
                warnings.append(f"not looked at for an A/A floor: {error}")
    return found, warnings


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
    if _is_there(path / REQUESTS_FILE):
        lines, dropped = read_lines(path / REQUESTS_FILE, RequestLine)
        warnings += dropped
        for line in lines:
            requests[CellKey.of(line), line.repeat].append(line.request)
    record = _with_samples(path, record, requests)
    if _is_there(path / ANSWERS_FILE):
        replies, dropped = read_lines(path / ANSWERS_FILE, AnswerRecord)
        warnings += dropped
        changed = 0
        for reply in replies:
            try:
                scored = rescored(reply)
            except ValueError as error:
                warnings.append(f"{path / ANSWERS_FILE}: line dropped: {error}")
                continue
            changed += scored != reply
            answers[reply.workload].append(scored)
        if changed:
            warnings.append(
                f"{path / ANSWERS_FILE}: {changed} answers are scored otherwise than recorded; the new count"
            )
    info_file = path / SERVER_INFO_FILE
    info = read_json(info_file) if info_file.exists() else None
    executed = read_executed(path, record.traces, evidence)
    return Launch(path, record, evidence, dict(requests), dict(answers), info, tuple(warnings), executed)


def _is_there(lines: Path) -> bool:
    return lines.exists() or packed(lines).exists()


def read_executed(path: Path, phases: Sequence[TracedPhase], evidence: Evidence) -> tuple[Executed, ...]:
    """The traced phases of a launch with their kernel tables; what cannot be read is absent, with the reason.

    Args:
        path: Folder of the launch.
        phases: On its record.
        evidence: Says whether it had a GPU: a trace without device activity then shows nothing of it.
    """
    found = []
    for phase in phases:
        try:
            traces = tuple(read_kernels(path / file) for file in phase.files)
            absent = phase.absent or (None if traces else "no kernel table is on record")
        except RecordError as error:
            traces, absent = (), str(error)
        if evidence.gpu_uuids and any(not trace.on_device for trace in traces):
            traces, absent = (), "the trace holds no device activity, and the launch had a GPU"
        found.append(Executed(phase, traces, absent))
    return tuple(found)


def _with_samples(
    path: Path, record: LaunchRecord, requests: Mapping[tuple[CellKey, int], Sequence[RequestRecord]]
) -> LaunchRecord:
    """The same launch with the GPU windows of its cells made again from the raw samples, where these are there.

    Small published records leave the raw samples out; a file that is damaged leaves the windows unknown.
    """
    raw = path / TELEMETRY_FILE
    sampling = record.sampling
    if sampling is None or not raw.exists():
        return record
    try:
        samples = by_gpu(read_samples(raw))
    except RecordError as error:
        unknown: dict[str, Any] = {"gpus": [], "gpus_steady": None, "gpus_absent": str(error)}
        return record.model_copy(update={"cells": [cell.model_copy(update=unknown) for cell in record.cells]})
    by_device = {uuid: samples.get(uuid, []) for uuid in sampling.memory_before_bytes}
    cells = []
    for cell in record.cells:
        errors = {gpu.uuid: gpu.errors for gpu in cell.gpus or []}
        windows = summarise(by_device, sampling, cell.started_s, cell.ended_s, errors)
        steady = steady_window(requests.get((CellKey.of(cell), cell.repeat), []), cell.max_concurrency)
        in_steady = summarise(by_device, sampling, steady.start_s, steady.end_s, errors) if steady else None
        cells.append(cell.model_copy(update={"gpus": windows, "gpus_steady": in_steady}))
    return record.model_copy(update={"cells": cells})


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
