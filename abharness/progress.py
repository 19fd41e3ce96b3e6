"""What a run tells while it works -> a live view or plain lines on stderr. stdout is the report's.

On a terminal two lines are drawn anew: the launch with the time left, the phase with what is done of it. Elsewhere it is
quiet: a line when a launch begins and one when it ends, warnings, failures, and a sign of life every five minutes.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from abharness.failures import last_words, what_happened
from abharness.record import LaunchRecord, Variant
from abharness.redaction import screen_safe
from abharness.terminal import Look, cells, statement, wants_color
from abharness.timeleft import TimeLeft, about, duration

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True, slots=True)
class RunStart:
    """What is known when the first launch is next.

    Attributes:
        plan: Variant of every launch, in order of time.
        on_record: Launch index -> seconds it took, for launches that an earlier run completed.
        versions: What each variant's interpreter reports of itself.
        kept: The run folder stays.
    """

    experiment: str
    run_dir: Path
    config_hash: str
    plan: Sequence[Variant]
    on_record: Mapping[int, float]
    versions: Mapping[Variant, Mapping[str, str]]
    kept: bool


class Reporter(Protocol):
    """What the runner tells while it works."""

    def begin(self, run: RunStart) -> None:
        """The plan is known and the run folder made."""

    def launch(self, index: int, total: int, variant: Variant) -> None:
        """A launch begins; `index` from 0."""

    def phase(self, name: str) -> None:
        """A phase of the launch begins: `start`, a cell, `stop`."""

    def advance(self, done: int, total: int) -> None:
        """Requests or questions done in this phase; called between requests that are timed, so it must be quick."""

    def waiting(self, text: str) -> None:
        """Why a phase is not finished yet; may be called often."""

    def note(self, text: str) -> None:
        """Something worth knowing."""

    def warn(self, text: str, code: str | None = None) -> None:
        """A doubt, with its validity code where it has one."""

    def launch_done(self, record: LaunchRecord, folder: Path) -> None:
        """The launch ended, failed or not, and its record is in its folder."""

    def close(self) -> None:
        """The run is over; give the terminal back."""


Doubt = Literal["bad", "unknown"]
"""Roles of statements that are to be seen, in the words of `terminal.Role`."""


class _Told(ABC):
    """What both reporters for people say in the same words."""

    def __init__(self) -> None:
        self._left: TimeLeft | None = None
        self._kept = True
        self._prefix = ""
        self._phase = ""
        self._done = ""

    @abstractmethod
    def _say(self, text: str, *below: str, role: Doubt | None = None) -> None:
        """Print a statement and lines below it; `role` may paint it."""

    def begin(self, run: RunStart) -> None:
        self._left, self._kept = TimeLeft(run.plan, run.on_record), run.kept

    def launch(self, index: int, total: int, variant: Variant) -> None:
        self._prefix, self._phase, self._done = f"launch {index + 1}/{total} {variant}: ", "", ""
        if self._left is not None:
            self._left.launch(index, time.monotonic())

    def phase(self, name: str) -> None:
        self._phase, self._done = name, ""
        if self._left is not None:
            self._left.phase(time.monotonic())

    def _about(self) -> str | None:
        return None if self._left is None else about(self._left.left_s(time.monotonic()))

    def warn(self, text: str, code: str | None = None) -> None:
        self._say(f"{self._prefix}warning: {f'{code}: ' if code else ''}{text}", role="unknown")

    def launch_done(self, record: LaunchRecord, folder: Path) -> None:
        if self._left is not None:
            self._left.done(time.monotonic(), completed=record.status == "completed")
        if record.error is None:
            ready = "" if record.ready_s is None else f", ready after {duration(record.ready_s)}"
            left = self._about()
            self._say(f"{self._prefix}done in {duration(record.wall_s)}{ready}{f'; {left}' if left else ''}")
        elif record.status == "failed":
            below = [*last_words(record.error), f"next: {record.error.hint or 'see its record'}"]
            if self._kept:
                below.append(f"record: {folder}")
            if self._kept and record.error.command:
                below.append(f"the command that starts its server by hand: abharness compare {folder.parent.parent}")
            self._say(f"{self._prefix}failed: {what_happened(record.error)}", *below, role="bad")
        self._prefix = ""


class PlainReporter(_Told):
    """Few lines, for a file or a pipe; what is noted within a launch is in its record."""

    SIGN_OF_LIFE_S = 300.0

    def __init__(self) -> None:
        super().__init__()
        self._told_s = 0.0

    def _say(self, text: str, *below: str, role: Doubt | None = None) -> None:  # noqa: ARG002 - a log has no colours
        self._told_s = time.monotonic()
        lines = [f"{time.strftime('%H:%M:%S')} {screen_safe(text)}", *(f"  {screen_safe(line)}" for line in below)]
        print("\n".join(lines), file=sys.stderr, flush=True)  # noqa: T201

    def _sign_of_life(self, text: str) -> None:
        if time.monotonic() - self._told_s > self.SIGN_OF_LIFE_S:
            self._say(f"{self._prefix}{self._phase}{f', {text}' if text else ''}")

    def launch(self, index: int, total: int, variant: Variant) -> None:
        super().launch(index, total, variant)
        left = self._about()
        self._say(f"{self._prefix}started{f'; {left}' if left else ''}")

    def phase(self, name: str) -> None:
        super().phase(name)
        self._sign_of_life("")

    def advance(self, done: int, total: int) -> None:
        self._sign_of_life(f"{done}/{total} done")

    def waiting(self, text: str) -> None:
        self._sign_of_life(text[:110])

    def note(self, text: str) -> None:
        if not self._prefix:
            self._say(text)

    def close(self) -> None:
        self._prefix = ""


_STYLES: dict[Doubt, str] = {"bad": "bold red", "unknown": "bold yellow"}


class RichReporter(_Told):
    """A live view of the launch and its phase, with what is to stay above it."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        super().__init__()
        self._console = console
        self._title = ""
        self._phase_s = 0.0
        self._live = Live(
            self,
            console=console,
            transient=True,
            refresh_per_second=2,  # drawing shares a core and an interpreter lock with what is being timed
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The two lines, cut to the width there is."""
        from rich.text import Text

        width = options.max_width
        left = self._about() or ("" if self._left is None else "time left unknown")
        yield Text(ends(self._title, left, width), style="bold", no_wrap=True, overflow="crop")
        elapsed = duration(time.monotonic() - self._phase_s) if self._phase else ""
        told = " ".join(part for part in (self._done, elapsed) if part)
        yield Text(ends(f"  {self._phase}", told, width), no_wrap=True, overflow="crop")

    def _say(self, text: str, *below: str, role: Doubt | None = None) -> None:
        from rich.text import Text

        style = _STYLES[role] if role else ""
        look = Look(width=self._console.width)
        lines = [Text(line, style=style) for line in statement(text, look)]
        lines += [Text(line) for part in below for line in statement(f"  {part}", look)]
        # A path or command that is wider is left whole, to be copied.
        self._console.print(Text("\n").join(lines), soft_wrap=True)

    def launch(self, index: int, total: int, variant: Variant) -> None:
        super().launch(index, total, variant)
        self._title = self._prefix.rstrip(": ")
        self._live.start()

    def phase(self, name: str) -> None:
        super().phase(screen_safe(name))
        self._phase_s = time.monotonic()

    def advance(self, done: int, total: int) -> None:
        self._done = f"{done}/{total}"

    def waiting(self, text: str) -> None:
        self._done = screen_safe(text)

    def note(self, text: str) -> None:
        self._say(f"{self._prefix}{text}")

    def launch_done(self, record: LaunchRecord, folder: Path) -> None:
        super().launch_done(record, folder)
        self._phase = self._done = ""

    def close(self) -> None:
        self._prefix = ""
        self._live.stop()


def ends(left: str, right: str, width: int) -> str:
    """Two texts at the ends of a line of a width; the longer one is cut where both do not fit.

    The start of the left and of the right text stays: `decode input_len=64 outp…  3/8 12 s`.
    """
    most_right = max(width - cells(left) - 2, width // 2)
    right = _cut(right, most_right)
    left = _cut(left, width - cells(right) - 2 if right else width)
    return left + " " * max(width - cells(left) - cells(right), 0) + right


def _cut(text: str, width: int) -> str:
    if cells(text) <= width:
        return text
    while text and cells(text) > width - 1:
        text = text[:-1]
    return f"{text}…" if width > 0 else ""


def make_reporter(color: str = "auto") -> Reporter:
    """The reporter that fits where stderr goes.

    A live view needs a terminal that can be drawn on, whatever `FORCE_COLOR` says: cursor movements in a log file are
    of no use.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return PlainReporter()
    from rich.console import Console

    return RichReporter(Console(stderr=True, no_color=not wants_color(sys.stderr, color, os.environ)))
