"""What else the machine's CPUs did during a window: whole machine less the server's tree and the client itself.

A server whose CPU cannot keep up with its GPU is slowed by whatever shares its caches, its memory or its physical
cores, also where there are free ones: nothing in its own record shows that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil

from abharness.windows import HostLoad

IDLE_FIELDS = ("idle", "iowait", "steal", "guest", "guest_nice")
"""Fields of the machine's CPU times that are no work of its processes, or are counted in another field too."""


class HostWatch:
    """CPU use from the moment it is made to `ended`."""

    def __init__(self, tree: Callable[[], Sequence[int]]) -> None:
        """Begin.

        Args:
            tree: Ids of the processes of the server, as far as they are known.
        """
        self._tree = tree
        self._began = self._look()

    def ended(self) -> HostLoad:
        """What was used since; a process that came or went meanwhile is counted as far as it can be."""
        (began_s, busy, stolen, own), (ended_s, busy_now, stolen_now, own_now) = self._began, self._look()
        length = ended_s - began_s
        ours = sum(max(0.0, seconds - own.get(pid, 0.0)) for pid, seconds in own_now.items())
        return HostLoad(
            cpus=psutil.cpu_count() or 1,
            other_cpus=max(0.0, busy_now - busy - ours) / length,
            stolen_cpus=max(0.0, stolen_now - stolen) / length,
        )

    def _look(self) -> tuple[float, float, float, dict[int, float]]:
        """This moment, CPU seconds of the machine, seconds that a hypervisor took, and those of our processes."""
        own: dict[int, float] = {}
        for pid in (psutil.Process().pid, *self._tree()):
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.Error:
                continue  # it is gone
            own[pid] = times.user + times.system
        machine = psutil.cpu_times()
        busy = sum(value for name, value in machine._asdict().items() if name not in IDLE_FIELDS)
        return time.monotonic(), busy, getattr(machine, "steal", 0.0), own
