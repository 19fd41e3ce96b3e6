"""Events of a run -> lines or live bars on stderr: rich on a terminal, plain lines elsewhere. stdout is the report's."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from abharness.redaction import scrub


class Reporter(Protocol):
    """What the runner tells while it works."""

    def launch(self, index: int, total: int, variant: str) -> None:
        """A launch begins; `index` from 0."""

    def phase(self, name: str) -> None:
        """A phase of the launch begins: `start`, a cell, `stop`."""

    def advance(self, done: int, total: int) -> None:
        """Requests or questions done in this phase."""

    def waiting(self, text: str) -> None:
        """Why a phase is not finished yet; may be called often."""

    def note(self, text: str) -> None:
        """Something worth keeping on the screen."""

    def close(self) -> None:
        """The run is over; give the terminal back."""


class PlainReporter:
    """One line a phase, and at most one line in ten seconds while waiting."""

    EVERY_S = 10.0
    WIDTH = 110

    def __init__(self) -> None:
        self._prefix = ""
        self._phase = ""
        self._told_s = 0.0

    def _line(self, text: str) -> None:
        self._told_s = time.monotonic()
        print(f"{time.strftime('%H:%M:%S')} {self._prefix}{scrub(text)}", file=sys.stderr, flush=True)  # noqa: T201

    def launch(self, index: int, total: int, variant: str) -> None:
        self._prefix = f"launch {index + 1}/{total} {variant}: "

    def phase(self, name: str) -> None:
        self._phase = name
        self._line(name)

    def advance(self, done: int, total: int) -> None:
        if done < total and time.monotonic() - self._told_s > self.EVERY_S:
            self._line(f"{self._phase} {done}/{total}")

    def waiting(self, text: str) -> None:
        if time.monotonic() - self._told_s > self.EVERY_S:
            self._line(f"{self._phase}: {text[: self.WIDTH]}")

    def note(self, text: str) -> None:
        self._line(text)

    def close(self) -> None:
        self._prefix = ""


class RichReporter:
    """A live line for the launch and the phase, notes above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=2,  # drawing shares a core and an interpreter lock with what is being timed
        )
        self._run: TaskID | None = None
        self._phase: TaskID | None = None
        self._prefix = ""

    def launch(self, index: int, total: int, variant: str) -> None:
        self._progress.start()
        self._prefix = f"launch {index + 1}/{total} {variant}: "
        if self._run is None:
            self._run = self._progress.add_task("", total=total, text="")
        self._progress.update(self._run, completed=index, description=f"launch {index + 1}/{total} {variant}")

    def phase(self, name: str) -> None:
        if self._phase is not None:
            self._progress.remove_task(self._phase)
        self._phase = self._progress.add_task(f"  {name}", total=None, text="")

    def advance(self, done: int, total: int) -> None:
        if self._phase is not None:
            self._progress.update(self._phase, completed=done, total=total, text=f"{done}/{total}")

    def waiting(self, text: str) -> None:
        if self._phase is not None:
            self._progress.update(self._phase, text=scrub(text)[:60])

    def note(self, text: str) -> None:
        self._progress.console.print(f"{self._prefix}{scrub(text)}", markup=False, highlight=False)

    def close(self) -> None:
        self._prefix = ""
        self._progress.stop()


def make_reporter() -> Reporter:
    """The reporter that fits where stderr goes."""
    console = Console(stderr=True)
    return RichReporter(console) if console.is_terminal else PlainReporter()
