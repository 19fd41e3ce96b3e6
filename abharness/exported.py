"""A recorded run -> what every export starts from: its completed launches, where their files go, what is not valid.

An export holds raw values of launches, and a reader of it sees no report. So what `compare` would give no verdict for
carries its validity codes with it, in every format.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath

from abharness.compare import Comparison, compare_runs
from abharness.runs import CellKey, Launch, Run


@dataclass(frozen=True, slots=True)
class Document:
    """A file to write: where, relative to the folder of the export, and its text."""

    path: PurePosixPath
    text: str


@dataclass(frozen=True, slots=True)
class Exported:
    """One run.

    Attributes:
        comparison: Its own, for the validity of what is exported.
        folder: Where its files go within the folder of a format.
        left_out: What is not exported, each with the reason.
    """

    run: Run
    comparison: Comparison
    folder: PurePosixPath
    left_out: tuple[str, ...]

    def launches(self) -> Iterator[Launch]:
        """The completed launches, in order."""
        yield from (launch for launch in self.run.launches if launch.record.status == "completed")

    def codes(self, key: CellKey) -> list[str]:
        """Why a cell is not valid; empty where it is."""
        own = [code for cell in self.comparison.cells if cell.key == key for code in cell.codes]
        return list(dict.fromkeys([*self.comparison.everywhere, *own]))

    def answer_codes(self, workload: str) -> list[str]:
        """Why the answers of a workload are not valid; empty where they are."""
        own = [code for item in self.comparison.accuracy if item.workload == workload for code in item.codes]
        return list(dict.fromkeys([*self.comparison.everywhere, *own]))


def make(run: Run) -> Exported:
    """What is exported of a run.

    Raises:
        RecordError: It cannot be compared: what is valid of it is not known.
    """
    left_out = [f"{run.path}: {warning}" for warning in run.warnings]
    for launch in run.launches:
        record = launch.record
        if record.status != "completed":
            why = (
                f"{record.status} in phase {record.error.phase}: {record.error.message}"
                if record.error
                else record.status
            )
            left_out.append(f"{run.path}: launch {record.launch_index}-{record.variant} is left out: {why}")
    folder = PurePosixPath(file_name(run.record.experiment), file_name(run.path.absolute().name))
    return Exported(run, compare_runs(run, run), folder, tuple(left_out))


def launch_name(launch: Launch) -> str:
    """As its folder in a record is called: `3-candidate`."""
    return f"{launch.record.launch_index}-{launch.record.variant}"


def started(launch: Launch) -> datetime | None:
    """When a launch began, UTC; None where the record's text is no time."""
    try:
        return datetime.fromisoformat(launch.record.started_at).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def file_name(text: str) -> str:
    """A text from a record as one part of a path: it can name no folder, nothing hidden and no place outside."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", text)[:80].lstrip(".") or "_"
