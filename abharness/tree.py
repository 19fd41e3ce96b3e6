"""A launch's sentinel and its first process -> every process that is provably its own, and their orderly end.

A process is ours when it was seen below one of ours (by parent links), in the session of one of ours, or with the
launch's sentinel in the environment it was started with. From then on it is named by (pid, start time), and that is
checked again right before every signal: a pid may have been given to another process since.
"""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from abharness import procfs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

POLL_S = 0.05

ORDERLY = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""The signals that end a server, the politest first."""


class ProcessTree:
    """The processes of one launch.

    Attributes:
        sentinel: Name and value of the variable unique to the launch.
        root: `(pid, start_ticks)` of the process that was started, or None where it is not known.
        known: Title of every process ever seen in the tree, by its `(pid, start_ticks)`.
        observed_s: When it was last looked at, on the monotonic clock.
    """

    def __init__(self, sentinel: tuple[str, str]) -> None:
        self.sentinel = sentinel
        self.root: tuple[int, int] | None = None
        self.known: dict[tuple[int, int], str] = {}
        self.observed_s = 0.0

    def grow_from(self, root: tuple[int, int] | None, known: Iterable[tuple[int, int]] = ()) -> None:
        """Name the first process, and others that are known to be of the tree."""
        self.root = root
        for key in known if root is None else (root, *known):
            self.known.setdefault(key, procfs.title(key[0]))

    def observe(self) -> list[procfs.Process]:
        """Look at the processes and remember everybody in the tree; returns those alive now."""
        everything = list(procfs.processes())
        ours = {one.pid: one for one in everything if (one.pid, one.start_ticks) in self.known}
        # The number of a session is given to nobody else while one of its processes is there.
        sessions = {self.root[0]} if self.root and any(one.session == self.root[0] for one in ours.values()) else set()
        ours.update((one.pid, one) for one in everything if one.session in sessions)
        # A re-parented process may have started others since.
        for one in [one for one in ours.values() if not one.ended]:
            ours.update((child.pid, child) for child in procfs.descendants(one.pid, everything))
        for one in ours.values():
            title = procfs.title(one.pid)
            # What ends has no title any more: the one it had tells what it was.
            if one.ended or title.startswith("["):
                title = self.known.get((one.pid, one.start_ticks), title)
            self.known[one.pid, one.start_ticks] = title
        self.observed_s = time.monotonic()
        return [one for one in ours.values() if not one.ended]

    def remaining(self) -> list[tuple[int, int]]:
        """`(pid, start_ticks)` of those that still run."""
        return [(pid, ticks) for pid, ticks in self.known if procfs.is_alive(pid, ticks)]

    def adopt_carriers(self) -> None:
        """Find those that carry the sentinel too: vLLM's processes may have lost their parent, and left the session."""
        self.observe()
        for one in procfs.carrying(*self.sentinel):
            if one.pid != os.getpid():
                self.known.setdefault((one.pid, one.start_ticks), procfs.title(one.pid))

    def end(self, numbers: Sequence[signal.Signals], grace_s: float) -> None:
        """Ask every process of the tree to end, by one signal after the other.

        Args:
            numbers: In this order; each is given only where something still runs.
            grace_s: How long each may take.
        """
        for number in numbers:
            # vLLM's server ends its own children in order when it is asked alone; the others are told afterwards.
            targets = [one for one in self.remaining() if number is not signal.SIGINT or one == self.root]
            if not targets:
                continue
            _signal(targets, number)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline:
                self.observe()
                if not self.remaining():
                    break
                if number is signal.SIGKILL:
                    _signal(self.remaining(), number)
                time.sleep(POLL_S)
            self.adopt_carriers()


def _signal(targets: Iterable[tuple[int, int]], number: signal.Signals) -> None:
    for pid, ticks in targets:
        if procfs.is_alive(pid, ticks):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
