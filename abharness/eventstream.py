"""What a run tells while it works -> events on stdout, one JSON object a line, each written as it happens.

A thread of its own writes: a reader that is slow, or gone, delays no request and ends no measurement.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from abharness import __version__
from abharness.errors import AbharnessError
from abharness.events import (
    Event,
    Finished,
    LaunchFinished,
    LaunchStarted,
    Note,
    Phase,
    Problem,
    Progress,
    RunStarted,
    Warn,
)
from abharness.redaction import scrub
from abharness.timeleft import TimeLeft

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from abharness.compare import Comparison
    from abharness.progress import RunStart
    from abharness.record import LaunchRecord, Variant

EVERY_S = 1.0
"""Least time between two `progress` events of a phase."""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class JsonReporter:
    """A reporter that writes events; a context manager whose end writes `finished`, whatever ended the block."""

    def __init__(self, stream: TextIO, exit_code: Callable[[BaseException], int]) -> None:
        """Start to write.

        Args:
            stream: Gets the lines.
            exit_code: The process's exit code for an error that ends the run.
        """
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._exit_code = exit_code
        self._finished: Finished | None = None
        self._run_dir: Path | None = None
        self._left: TimeLeft | None = None
        self._index: int | None = None
        self._unwritten: OSError | None = None
        self._phase = ""
        self._told_s = 0.0
        self._writer = threading.Thread(target=self._write, args=(stream,), name="events", daemon=True)
        self._writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._finished = self._failed(error)
        if self._finished is not None:
            self._tell(self._finished)
        self._lines.put(None)
        self._writer.join()
        if error is None and self._unwritten is not None:
            raise self._unwritten

    def _write(self, stream: TextIO) -> None:
        while (line := self._lines.get()) is not None:
            try:
                stream.write(scrub(line))
                stream.flush()
            except OSError as error:
                # Nobody reads any more, or the disk is full: the run goes on, and what it measures is on disk.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
                self._unwritten = None if isinstance(error, BrokenPipeError) else error

    def _tell(self, event: Event) -> None:
        # All ASCII: no control character of a log reaches a terminal, no byte of a path that is no UTF-8 is in the way.
        self._lines.put(json.dumps(event.model_dump(mode="json"), allow_nan=False) + "\n")

    def _failed(self, error: BaseException) -> Finished:
        known = error if isinstance(error, AbharnessError) else None
        return Finished(
            time=_now(),
            outcome="interrupted" if isinstance(error, KeyboardInterrupt) else "error",
            exit_code=self._exit_code(error),
            summary=None,
            codes=[],
            run_dir=None if self._run_dir is None else str(self._run_dir),
            files=[],
            error=Problem(
                kind=type(error).__name__,
                message=str(error) or "interrupted; what was measured is kept",
                hint=None if known is None else known.hint,
                code=None if known is None else known.code,
            ),
        )

    def finished(self, comparison: Comparison, files: Sequence[Path]) -> None:
        """The run has a comparison; `finished` is written at the end of the block."""
        self._finished = Finished(
            time=_now(),
            outcome=comparison.outcome,
            exit_code=comparison.exit_code,
            summary=comparison.summary,
            codes=list(comparison.codes),
            run_dir=None if self._run_dir is None else str(self._run_dir),
            files=[str(path) for path in files],
            error=None,
        )

    # The reporter.

    def begin(self, run: RunStart) -> None:
        """The plan is known and the run folder made."""
        self._run_dir, self._left = run.run_dir, TimeLeft(run.plan, run.on_record)
        self._tell(
            RunStarted(
                time=_now(),
                experiment=run.experiment,
                run_dir=str(run.run_dir),
                config_hash=run.config_hash,
                plan=list(run.plan),
                on_record=sorted(run.on_record),
                abharness_version=__version__,
                versions={variant: dict(found) for variant, found in run.versions.items()},
            )
        )

    def _left_s(self, now_s: float) -> float | None:
        left = None if self._left is None else self._left.left_s(now_s)
        return None if left is None else round(left, 1)

    def launch(self, index: int, total: int, variant: Variant) -> None:
        """A launch begins."""
        self._index, now_s = index, time.monotonic()
        if self._left is not None:
            self._left.launch(index, now_s)
        self._tell(LaunchStarted(time=_now(), index=index, total=total, variant=variant, left_s=self._left_s(now_s)))

    def phase(self, name: str) -> None:
        """A phase of the launch begins."""
        self._phase, self._told_s, now_s = name, 0.0, time.monotonic()
        if self._left is not None:
            self._left.phase(now_s)
        self._tell(Phase(time=_now(), index=self._index or 0, name=name, left_s=self._left_s(now_s)))

    def advance(self, done: int, total: int) -> None:
        """Requests or questions done in this phase."""
        now_s = time.monotonic()
        if done < total and now_s - self._told_s < EVERY_S:
            return
        self._told_s = now_s
        self._tell(
            Progress(
                time=_now(),
                index=self._index or 0,
                phase=self._phase,
                done=done,
                total=total,
                left_s=self._left_s(now_s),
            )
        )

    def waiting(self, text: str) -> None:
        """Why a phase is not finished yet: for people who watch."""

    def note(self, text: str) -> None:
        """Something worth knowing."""
        self._tell(Note(time=_now(), index=self._index, text=text))

    def warn(self, text: str, code: str | None = None) -> None:
        """A doubt."""
        self._tell(Warn(time=_now(), index=self._index, code=code, text=text))

    def launch_done(self, record: LaunchRecord, folder: Path) -> None:
        """A launch is on record."""
        if self._left is not None:
            self._left.done(time.monotonic(), completed=record.status == "completed")
        self._tell(
            LaunchFinished(
                time=_now(),
                index=record.launch_index,
                variant=record.variant,
                status=record.status,
                folder=str(folder),
                ready_s=record.ready_s,
                wall_s=record.wall_s,
                error=record.error,
            )
        )
        self._index = None

    def close(self) -> None:
        """The launches are over; the events are not."""
