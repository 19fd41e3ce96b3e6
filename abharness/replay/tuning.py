"""Segments of a tuning -> how far the machine drifted, and, where it did not, which option is best for each shape; pure.

Production is replayed first and last. What lies between is compared with it only where both agree. One graph tunes all
shapes at once: the layers of each shape run that shape's option of the same number, and each is timed by its positions.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from abharness.replay.records import CandidateCheck, Segment

DRIFT = 0.01
"""Share by which production may differ between its two segments."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """One option of one shape.

    Attributes:
        candidate: Name of the candidate that had it.
        options: The option.
        time_s: Median seconds of a call, over positions of the shape.
        change: Against production (the mean of both segments), as a fraction.
        bit_identical: Whether all results of the candidate at this shape are production's, bit for bit.
    """

    candidate: str
    options: Mapping[str, Any]
    time_s: float
    change: float
    bit_identical: bool


@dataclass(frozen=True, slots=True)
class Ranking:
    """The options of one row count, best first; or why there is no ranking.

    Attributes:
        rows: Row count.
        drift: Production's last segment over its first, less one; None where one is missing.
        refused: Why nothing is ranked, or None.
        production_s: By shape, seconds of a call in production.
        shapes: By shape, its options from the fastest on.
    """

    rows: int
    drift: float | None
    refused: str | None
    production_s: Mapping[str, float]
    shapes: Mapping[str, Sequence[Ranked]]


def groups(options: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Mapping[str, Any]]]:
    """Options by shape -> what each graph runs: the first of every shape, the second, and so on.

    A shape that has no more repeats its last one, which is not ranked again.
    """
    most = max((len(found) for found in options.values()), default=0)
    return [
        {shape: found[min(number, len(found) - 1)] for shape, found in options.items() if found}
        for number in range(most)
    ]


def shape_times(segment: Segment, shapes: Sequence[str]) -> dict[str, float]:
    """Median seconds of a call by shape; none where times of positions are not known."""
    found: dict[str, list[float]] = {}
    for shape, time_s in zip(shapes, segment.positions_s or [], strict=False):
        found.setdefault(shape, []).append(time_s)
    return {shape: statistics.median(times) for shape, times in found.items()}


def drift(first: Segment, last: Segment) -> float:
    """How much longer a step took at the end than at the beginning, as a fraction."""
    return last.step_s / first.step_s - 1


def rank(
    rows: int,
    shapes: Sequence[str],
    first: Segment,
    last: Segment | None,
    tried: Sequence[tuple[Segment, CandidateCheck]],
    *,
    most_drift: float = DRIFT,
) -> Ranking:
    """Rank what was tried between two segments of production.

    Args:
        rows: Row count.
        shapes: `NxK` of every position.
        first: Production, before.
        last: Production, after; None where it was not reached.
        tried: Each candidate's segment and its check.
        most_drift: Largest drift with which there is a ranking.
    """
    before = shape_times(first, shapes)
    after = shape_times(last, shapes) if last is not None else {}
    moved = drift(first, last) if last is not None else None
    refused = None
    if last is None or moved is None:
        refused = "production was not replayed again: the drift is not known"
    elif abs(moved) > most_drift:
        refused = (
            f"production took {moved:+.2%} between its two segments (more than {most_drift:.1%}): the machine drifted, and "
            "nothing is ranked; try again, with longer --seconds or --pause"
        )
    elif not before or not after:
        refused = f"times of positions are not known: {first.positions_absent or last.positions_absent}"
    production = {shape: (before[shape] + after[shape]) / 2 for shape in before if shape in after}
    ranked: dict[str, list[Ranked]] = {shape: [] for shape in production}
    for segment, check in tried:
        times = shape_times(segment, shapes)
        for shape, options in check.by_shape.items():
            if shape not in times or shape not in production or refused is not None:
                continue
            if any(dict(one.options) == dict(options) for one in ranked[shape]):
                continue
            change = times[shape] / production[shape] - 1
            exact = shape not in check.differing
            ranked[shape].append(Ranked(segment.candidate, options, times[shape], change, exact))
    for found in ranked.values():
        found.sort(key=lambda one: one.time_s)
    return Ranking(rows, moved, refused, production, ranked)


def chosen(ranking: Ranking, *, exact: bool) -> dict[str, Mapping[str, Any]]:
    """By shape the best option that is faster than production; with `exact` only those that are bit-identical."""
    found: dict[str, Mapping[str, Any]] = {}
    for shape, options in ranking.shapes.items():
        best = next((one for one in options if one.bit_identical or not exact), None)
        if best is not None and best.change < 0:
            found[shape] = best.options
    return found
