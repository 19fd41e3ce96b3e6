"""Finished launches -> about how long the rest of a run takes. Nothing is known before one has been measured.

A launch still to come is taken to last as long as the finished ones of its variant, or of the other where its own has
none. Within a launch, the phases of the last finished one tell what is still to come.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from abharness.record import Variant


class TimeLeft:
    """The clock of one run. Times are seconds on one monotonic clock, given by the caller."""

    def __init__(self, plan: Sequence[Variant], on_record: Mapping[int, float]) -> None:
        """Start with what is on record.

        Args:
            plan: Variant of every launch, in order.
            on_record: Launch index -> seconds it took, for those that will not be run again.
        """
        self._plan = plan
        self._ahead = [index for index in range(len(plan)) if index not in on_record]
        self._took: dict[Variant, list[float]] = defaultdict(list)
        for index, seconds in on_record.items():
            self._took[plan[index]].append(seconds)
        self._profiles: dict[Variant, list[float]] = {}
        self._variant: Variant | None = None
        self._started_s = 0.0
        self._offsets: list[float] = []

    def launch(self, index: int, now_s: float) -> None:
        """A launch begins."""
        self._variant = self._plan[index]
        self._ahead = [other for other in self._ahead if other > index]
        self._started_s, self._offsets = now_s, []

    def phase(self, now_s: float) -> None:
        """A phase of the launch begins; every launch of a run has the same phases."""
        self._offsets.append(now_s - self._started_s)

    def done(self, now_s: float, *, completed: bool) -> None:
        """The launch ended; one that failed says nothing about how long the others take."""
        if completed and self._variant is not None:
            took = now_s - self._started_s
            self._took[self._variant].append(took)
            self._profiles[self._variant] = [*self._offsets, took]
        self._variant = None

    def left_s(self, now_s: float) -> float | None:
        """Seconds to the end of the last launch.

        Returns:
            None while no launch has finished, and when the last one takes longer than those before it.
        """
        if not any(self._took.values()):
            return None
        later = sum(self._expected(self._plan[index]) for index in self._ahead)
        here = 0.0 if self._variant is None else self._rest_of_launch(self._variant, now_s)
        return later + here if later + here > 0 else None

    def _expected(self, variant: Variant) -> float:
        known = self._took.get(variant) or [seconds for part in self._took.values() for seconds in part]
        return statistics.mean(known)

    def _rest_of_launch(self, variant: Variant, now_s: float) -> float:
        elapsed = now_s - self._started_s
        profile = self._profiles.get(variant) or next(iter(self._profiles.values()), None)
        reached = len(self._offsets)
        if profile is None or not reached or reached >= len(profile):
            return max(self._expected(variant) - elapsed, 0.0)
        # From here: the rest of this phase as it took before, then all that follows it.
        this_phase = profile[reached] - profile[reached - 1] - (elapsed - self._offsets[-1])
        return max(this_phase, 0.0) + profile[-1] - profile[reached]


def about(seconds: float | None) -> str | None:
    """An estimate in words, no more exact than it is: `about 12 min left`."""
    if seconds is None:
        return None
    if seconds < 10:
        return "a few seconds left"
    if seconds < 90:
        return f"about {round(seconds / 10) * 10} s left"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {minutes} min left"
    return f"about {minutes // 60} h {minutes % 60 // 10 * 10} min left"


def duration(seconds: float) -> str:
    """A time that was measured: `41 s`, `2 min 04 s`, `1 h 02 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
