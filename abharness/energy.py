"""Readings of one GPU's energy counter and power -> the energy of one window, or why it is not known. Pure.

The counter is the better witness: the hardware sums, and nothing between two readings is lost. It moves in steps, so a
window must be long against them. Power that is read now and then and summed here is the second witness: where both are
there they must agree, and where there is no counter it stands in for it, under conditions. An energy that is not known
is None with a reason, never 0.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from abharness.windows import EnergySource, PowerKind

Point = tuple[float, float]
"""A moment, monotonic seconds, and what was read then."""

LEAST_PERIODS = 20
"""Update periods of the counter that a window must be long. A reading is up to one period old at either end of the
window, and how old is chance: the difference of two readings is off by up to one period in this many, 5%."""

LEAST_INTERVALS = 10
"""Sampling intervals that a window must be long. Between two samples the counter is taken to rise evenly; where the
power jumps from idle to load between them, that is off by up to a quarter of an interval's energy at either end, and by
5% of the window in ten."""

ASSUMED_PERIOD_S = 0.1
"""The counter's update period where it could not be measured: the longest that is known of NVIDIA's devices."""

EDGE_INTERVALS = 2.0
"""Sampling intervals that the two samples around an end of the window may lie apart: one look was missed, not more."""

INTERVAL_SLACK_S = 0.01
"""Time by which a sample may be late through no fault but the scheduler's."""

AGREEMENT_LIMIT = 0.10
"""Difference of counter and integrated power, of the larger, above which neither is believed. The window's ends cost the
counter up to 5%, and power is specified to 5% of its value (NVML: accurate to within 5 W, or 5%)."""

INTEGRAL_COVERAGE = 0.90
"""Share of the expected samples that integrated power needs; one sample of grace, as for the clocks."""

LEAST_INTEGRAL_S: dict[PowerKind, float] = {"instant": 2.0, "average": 10.0, "unspecified": 10.0}
"""Seconds that a window must be long for integrated power to stand in for the counter. Of instant power 20 samples at
the usual interval; an average over a second tells of the second before, so that a window's first one is told half, which
is 5% of ten. A reading that does not say what it is may be an average."""

STEP_GAP_S = 0.05
"""Gap between two looks at the counter from which on a step between them has no moment."""


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy of one GPU in one window.

    Attributes:
        energy_j: Joules, by `source`; None where there is no such number.
        integral_j: Power integrated over the window, joules; None where the samples do not cover it.
        source: Where `energy_j` comes from.
        absent: Why `energy_j` may not be used, or is None; None where it may be used.
    """

    energy_j: float | None = None
    integral_j: float | None = None
    source: EnergySource | None = None
    absent: str | None = None


@dataclass(frozen=True, slots=True)
class Conditions:
    """How the readings were taken.

    Attributes:
        interval_s: Between two samples.
        period_s: The counter's update period; None where it was not measured.
        power_kind: What the power reading is.
        no_counter: Why the device has no energy counter.
        no_power: Why it has no power reading.
    """

    interval_s: float
    period_s: float | None = None
    power_kind: PowerKind = "unspecified"
    no_counter: str | None = None
    no_power: str | None = None


def of_window(
    counter: Sequence[Point], power: Sequence[Point], started_s: float, ended_s: float, conditions: Conditions
) -> Energy:
    """The energy between two moments.

    Args:
        counter: Readings of the energy counter, joules, in order of time; those around the window too.
        power: The same of the power, watts.
        started_s: Start of the window, monotonic seconds.
        ended_s: Its end.
        conditions: How the readings were taken.
    """
    integral = _integral(power, started_s, ended_s, conditions)
    if not counter:
        return _integrated(integral, power, started_s, ended_s, conditions)
    found = _counted(counter, started_s, ended_s, conditions)
    if isinstance(found, str):
        return Energy(integral_j=integral, absent=found)
    absent = None
    if integral is not None:
        apart = abs(found - integral) / max(found, integral)
        if apart > AGREEMENT_LIMIT:
            told = f"counter {found:.0f} J, integrated power {integral:.0f} J"
            absent = f"{told}: {apart:.0%} apart, limit {AGREEMENT_LIMIT:.0%}"
    return Energy(found, integral, "counter", absent)


def idle_power_w(counter: Sequence[Point], least_s: float) -> float | None:
    """Mean power from the first to the last step of the counter, watts.

    Both ends lie on a step, where the counter is as old as the gap between two looks and not as a whole period.

    Args:
        counter: Readings, joules, in order of time, close together around the ends.
        least_s: Least time between these two steps.

    Returns:
        The power, or None where the counter fell or stood still, or its steps lie closer together than `least_s`.
    """
    steps = steps_of(counter)
    if len(steps) < 2 or steps[-1][0] - steps[0][0] < least_s:
        return None
    if any(later < earlier for (_, earlier), (_, later) in pairwise(counter)):
        return None
    (first_s, first_j), (last_s, last_j) = steps[0], steps[-1]
    return (last_j - first_j) / (last_s - first_s)


def steps_of(counter: Sequence[Point]) -> list[Point]:
    """The readings at which the counter had moved since the one before, no more than `STEP_GAP_S` earlier."""
    near = (pair for pair in pairwise(counter) if pair[1][0] - pair[0][0] <= STEP_GAP_S)
    return [later for earlier, later in near if later[1] != earlier[1]]


def _counted(counter: Sequence[Point], started_s: float, ended_s: float, conditions: Conditions) -> float | str:
    """Joules by the counter, or why not."""
    length = ended_s - started_s
    period = conditions.period_s or ASSUMED_PERIOD_S
    for unit, many, name in (
        (period, LEAST_PERIODS, "the counter's update periods"),
        (conditions.interval_s, LEAST_INTERVALS, "the sampling intervals"),
    ):
        if length < many * unit:
            return (
                f"window of {length:.2f} s is shorter than {many * unit:.1f} s, {many} of {name}: "
                f"its energy would be uncertain by more than 5%"
            )
    before = max(0, bisect_right(counter, started_s, key=lambda point: point[0]) - 1)
    around = counter[before : bisect_left(counter, ended_s, key=lambda point: point[0]) + 1]
    for (_, earlier), (_, later) in pairwise(around):
        if later < earlier:
            return f"counter reset: it went from {earlier:.2f} J to {later:.2f} J"
    ends = [_at(counter, moment, conditions.interval_s) for moment in (started_s, ended_s)]
    if ends[0] is None or ends[1] is None:
        where = " and ".join(name for name, end in zip(("start", "end"), ends, strict=True) if end is None)
        return f"no samples close enough around the {where} of the window: {_edge_rule(conditions)}"
    joules = ends[1] - ends[0]
    if joules <= 0:
        return f"the energy counter stood still at {ends[0]:.2f} J for {length:.2f} s"
    return joules


def _integrated(
    integral: float | None, power: Sequence[Point], started_s: float, ended_s: float, conditions: Conditions
) -> Energy:
    """Integrated power as the energy of a device without a counter."""
    length, kind = ended_s - started_s, conditions.power_kind
    least = LEAST_INTEGRAL_S[kind]
    no_counter = conditions.no_counter or "not sampled"
    if not power:
        reasons = dict.fromkeys((no_counter, conditions.no_power or "not sampled"))
        return Energy(absent=f"neither energy counter nor power: {'; '.join(reasons)}")
    without = f"no energy counter ({no_counter}), and integrated power"
    if length < least:
        absent = f"{without} needs a window of {least:.0f} s ({kind} power), this one has {length:.2f} s"
    elif integral is None:
        edges = f"some around both ends, {_edge_rule(conditions)}"
        absent = f"{without} needs {INTEGRAL_COVERAGE:.0%} of the samples and {edges}"
    elif integral <= 0:
        absent = f"{without} is {integral:.0f} J: no device draws nothing"
    else:
        return Energy(integral, integral, "integrated power")
    return Energy(integral_j=integral, absent=absent)


def _integral(power: Sequence[Point], started_s: float, ended_s: float, conditions: Conditions) -> float | None:
    """Trapezoids of power over the window, joules; None where the samples do not cover it."""
    first = bisect_left(power, started_s, key=lambda point: point[0])
    inside = power[first : bisect_right(power, ended_s, key=lambda point: point[0])]
    expected = int((ended_s - started_s) / conditions.interval_s)
    if len(inside) < INTEGRAL_COVERAGE * expected - 1:
        return None
    ends = [_at(power, moment, conditions.interval_s) for moment in (started_s, ended_s)]
    if ends[0] is None or ends[1] is None:
        return None
    points = [(started_s, ends[0]), *inside, (ended_s, ends[1])]
    return sum((later_s - s) * (w + later_w) / 2 for (s, w), (later_s, later_w) in pairwise(points))


def _at(points: Sequence[Point], moment: float, interval_s: float) -> float | None:
    """The reading at a moment, on the line between the samples around it; None where these lie too far apart."""
    after = bisect_left(points, moment, key=lambda point: point[0])
    if after < len(points) and points[after][0] == moment:
        return points[after][1]
    if after in (0, len(points)):
        return None
    (left_s, left), (right_s, right) = points[after - 1], points[after]
    if right_s - left_s > EDGE_INTERVALS * interval_s + INTERVAL_SLACK_S:
        return None
    return left + (right - left) * (moment - left_s) / (right_s - left_s)


def _edge_rule(conditions: Conditions) -> str:
    return f"at most {EDGE_INTERVALS:.0f} intervals of {conditions.interval_s:g} s apart"
