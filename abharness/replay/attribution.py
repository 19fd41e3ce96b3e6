"""Kernels of a step, in order -> the time of every position (the call of a linear layer), and of what lies between; pure.

A candidate's call may be several kernels: it quantises its input first, or adds up parts of K last. Which they are is
learned from one step in which a spin stands before every call: what follows a spin belongs to its position, whatever it is
called. A graph's replay, or a server's step, then has the same names in the same order, or it is told where it has not.

Kernels may overlap (programmatic dependent launch): a position's time is what its kernels take beyond those before them, so
that positions and gaps add up to the step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from abharness.errors import UsageError
from abharness.timeline import Kernels

SPIN = "spin_kernel"
"""What the kernel of `torch.cuda._sleep` is called."""


class Interval(NamedTuple):
    """One kernel: its name, and when it began and ended, seconds."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Attributed:
    """The time of one step.

    Attributes:
        positions_s: Of each position: what its kernels take beyond those before them.
        gaps_s: Before each position: from the end of all kernels before it to its first one; 0 where they overlap. The
            first is 0: nothing of this step is before it. Spins and other kernels run there.
        started_s: When the first kernel of a position began.
        ended_s: When the last one ended.
    """

    positions_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    started_s: float
    ended_s: float

    @property
    def span_s(self) -> float:
        """From the first to the last."""
        return self.ended_s - self.started_s


def intervals(kernels: Kernels) -> list[Interval]:
    """The rows of a kernel table, copies and fills among them, in the order in which they began."""
    return [Interval(kernel.name, kernel.start_s, kernel.start_s + kernel.duration_s) for kernel in kernels.rows()]


def is_spin(name: str) -> bool:
    """Whether this is a spin."""
    return SPIN in name


def learn(marked: Sequence[str], positions: int) -> list[tuple[str, ...]]:
    """The kernels of each position, from the names of a step with a spin before each.

    Raises:
        UsageError: Another number of spins, or a position without a kernel.
    """
    found: list[list[str]] = []
    for name in marked:
        if is_spin(name):
            found.append([])
        elif found:
            found[-1].append(name)
    if len(found) != positions:
        raise UsageError(
            f"a step of {positions} positions has {len(found)} spins in its trace: positions cannot be told apart",
            hint="the profiler lost kernels; try again",
        )
    empty = [place for place, names in enumerate(found) if not names]
    if empty:
        raise UsageError(
            f"position {empty[0]} of the step ran no kernel", hint="a candidate must launch its work itself"
        )
    return [tuple(names) for names in found]


def attribute(found: Sequence[Interval], sequences: Sequence[tuple[str, ...]]) -> Attributed:
    """Give the kernels of one step to its positions.

    Args:
        found: The step's kernels in the order in which they began; those of other names are left out, spins among them.
        sequences: The names of each position's kernels, in order.

    Raises:
        UsageError: The kernels of these names are not these, in this order.
    """
    known = {name for names in sequences for name in names}
    ours = [kernel for kernel in found if kernel.name in known]
    wanted = [(place, name) for place, names in enumerate(sequences) for name in names]
    for number, (kernel, (place, name)) in enumerate(zip(ours, wanted, strict=False)):
        if kernel.name != name:
            raise UsageError(
                f"kernel {number} of the step is {kernel.name[:80]}; position {place} of the capture has {name[:80]} there",
                hint="the step runs other layers, or in another order, than what was captured",
            )
    if len(ours) != len(wanted):
        raise UsageError(
            f"the step has {len(ours)} kernels of the names that the capture's {len(sequences)} positions have, and they "
            f"have {len(wanted)}",
            hint="the step runs other layers than what was captured: capture all of them, at the same number of rows",
        )
    if not ours:
        raise UsageError("no kernel of the capture's positions is in the step")
    positions = [0.0] * len(sequences)
    gaps = [0.0] * len(sequences)
    frontier = ours[0].start_s
    last = -1
    for kernel, (place, _) in zip(ours, wanted, strict=True):
        if place != last:
            gaps[place] = max(0.0, kernel.start_s - frontier)
            last = place
        positions[place] += max(0.0, kernel.end_s - max(kernel.start_s, frontier))
        frontier = max(frontier, kernel.end_s)
    return Attributed(tuple(positions), tuple(gaps), ours[0].start_s, frontier)


def replays(found: Sequence[Interval], sequences: Sequence[tuple[str, ...]], count: int) -> list[Attributed]:
    """The same for a trace of several replays.

    Raises:
        UsageError: The kernels cannot be divided among so many replays, or are others.
    """
    known = {name for names in sequences for name in names}
    ours = [kernel for kernel in found if kernel.name in known]
    if len(ours) % count:
        raise UsageError(
            f"{len(ours)} kernels cannot be those of {count} replays: the profiler lost some", hint="try again"
        )
    size = len(ours) // count
    return [attribute(ours[at : at + size], sequences) for at in range(0, len(ours), size)] if size else []


def every(found: Sequence[Interval], sequences: Sequence[tuple[str, ...]]) -> list[Attributed]:
    """The same for a trace of anything: every whole step in it, wherever it is; what is between them is passed over.

    Raises:
        UsageError: There is no whole step.
    """
    known = {name for names in sequences for name in names}
    ours = [kernel for kernel in found if kernel.name in known]
    names = [kernel.name for kernel in ours]
    wanted = [name for names in sequences for name in names]
    steps, at = [], 0
    while at + len(wanted) <= len(ours):
        if names[at : at + len(wanted)] == wanted:
            steps.append(attribute(ours[at : at + len(wanted)], sequences))
            at += len(wanted)
        else:
            at += 1
    if not steps:
        raise UsageError(
            f"no step of {len(sequences)} positions in it: {len(ours)} kernels have names that they have",
            hint="it is a trace of something else, or of a part of a step; graphs must be traced node by node "
            "(nsys profile --cuda-graph-trace=node)",
        )
    return steps


def medians(steps: Sequence[Attributed]) -> Attributed:
    """Position by position, the median over some steps; the span likewise, from 0."""
    return Attributed(
        tuple(map(statistics.median, zip(*(step.positions_s for step in steps), strict=True))),
        tuple(map(statistics.median, zip(*(step.gaps_s for step in steps), strict=True))),
        0.0,
        statistics.median(step.span_s for step in steps),
    )


def by_copy(step: Attributed, copies: int) -> Iterator[Attributed]:
    """A step that repeats itself with other weights, taken apart; each copy begins where the one before it ended."""
    size = len(step.positions_s) // copies
    for at in range(0, len(step.positions_s), size):
        positions, gaps = step.positions_s[at : at + size], step.gaps_s[at : at + size]
        yield Attributed(positions, gaps, 0.0, sum(positions) + sum(gaps))
