"""What a server does between its linear layers -> spins that stand for it, and where they hold; pure.

A replay of the layers alone runs at another clock than a server: its power is another. Spins in place of attention, norms,
sampling and waiting bring the power back near the server's, and with it the clock. Their lengths are the gaps of a traced
step; a spin draws less than the kernels that it stands for, so all of them are multiplied by one number, found by
replaying with some and comparing power, or the clock where that moves.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from abharness.errors import UsageError
from abharness.replay.attribution import Interval, attribute, medians
from abharness.replay.records import Calibration, Device, Matched, Point

SCALES = (0.0, 0.5, 1.0, 1.5)
"""Multiples of the gaps that are replayed."""
CLOCK_MOVES = 0.01
"""Relative difference from which clocks are not the same."""
CLOCK_OFF = 0.03
"""Relative difference from serving's clock from which a replay misleads."""
STRETCHED = 0.02
"""Share by which a traced step may be longer than the time a token takes, before it is told."""


def gaps(
    steps: Sequence[Sequence[Interval]], sequences: Sequence[tuple[str, ...]], tpot_s: float
) -> tuple[list[float], str]:
    """The time before each position in the server.

    Args:
        steps: Kernels of traced decode steps.
        sequences: Kernels of each position, as production runs them.
        tpot_s: Seconds from token to token, not traced.

    Returns:
        The gaps, seconds; before the first position is what the token takes beyond the step's span. And a remark where
        the profiler stretched the step, or nothing.

    Raises:
        UsageError: A step runs other kernels of these names than the positions have.
    """
    found = medians([attribute(step, sequences) for step in steps])
    inner = list(found.gaps_s[1:])
    busy = sum(found.positions_s)
    between = busy + sum(inner)
    if between <= tpot_s * (1 + STRETCHED):
        return [max(0.0, tpot_s - between), *inner], ""
    # Under the profiler the step takes longer than a token does without: the gaps are what is stretched.
    room = max(0.0, tpot_s - busy)
    share = room / sum(inner) if sum(inner) else 0.0
    remark = (
        f"the traced step takes {between * 1e3:.3f} ms and a token {tpot_s * 1e3:.3f} ms: the profiler stretched the gaps, "
        f"which are multiplied by {share:.3f}"
    )
    return [0.0, *(gap * share for gap in inner)], remark


def choose(points: Sequence[Point], power_w: float, clock_mhz: float) -> tuple[float, Matched, str]:
    """The scale at which a replay is in the server's state.

    Args:
        points: Replays with spins of some lengths, that without any among them.
        power_w: The server's mean power.
        clock_mhz: Its median SM clock.

    Returns:
        The scale, what it was found by (`power`, `clock` or `neither`), and a remark.
    """
    ordered = sorted(points, key=lambda point: point.scale)
    clocks = [point.sm_clock_mhz for point in ordered]
    moves = (max(clocks) - min(clocks)) / clock_mhz > CLOCK_MOVES
    bare = ordered[0]
    if not moves:
        scale, inside = _meet([(point.scale, point.power_w) for point in ordered], power_w)
        off = (bare.sm_clock_mhz - clock_mhz) / clock_mhz
        if abs(off) <= CLOCK_MOVES:
            remark = (
                f"the clock is serving's with and without spins ({bare.sm_clock_mhz:.0f} and {clock_mhz:.0f} MHz): here "
                "no proxy is needed"
            )
        else:
            remark = f"spins do not move the clock, which is {off:+.1%} off serving's: another cause than power sets it"
        if not inside:
            remark += f"; serving's power, {power_w:.0f} W, is outside of what the replays drew"
        return scale, "power" if inside else "neither", remark
    scale, inside = _meet([(point.scale, point.sm_clock_mhz) for point in ordered], clock_mhz)
    if inside:
        return scale, "clock", f"without spins the clock is {bare.sm_clock_mhz:.0f} MHz, in serving {clock_mhz:.0f} MHz"
    return scale, "neither", f"no length of spins brings the clock to serving's {clock_mhz:.0f} MHz"


def _meet(line: Sequence[tuple[float, float]], wanted: float) -> tuple[float, bool]:
    """Where a line through points first has a value; else the scale of the nearest point, and False."""
    for (low, at_low), (high, at_high) in itertools.pairwise(line):
        if min(at_low, at_high) <= wanted <= max(at_low, at_high):
            share = 0.0 if at_low == at_high else (wanted - at_low) / (at_high - at_low)
            return low + share * (high - low), True
    return min(line, key=lambda point: abs(point[1] - wanted))[0], False


def at_rows(calibration: Calibration, rows: int) -> tuple[list[float], float, float]:
    """Gaps, scale and serving's clock for a row count, between those that were calibrated.

    Raises:
        UsageError: It is outside of them.
    """
    known = sorted(calibration.rows)
    if rows in calibration.rows:
        low = high = calibration.rows[rows]
        share = 0.0
    elif not known[0] < rows < known[-1]:
        raise UsageError(
            f"the calibration has {', '.join(map(str, known))} rows, and {rows} is not between them",
            hint="calibrate at a row count on the other side, too: nothing is extrapolated",
        )
    else:
        place = bisect.bisect(known, rows)
        low, high = calibration.rows[known[place - 1]], calibration.rows[known[place]]
        share = (rows - known[place - 1]) / (known[place] - known[place - 1])

    def between(a: float, b: float) -> float:
        return a + share * (b - a)

    return (
        [between(a, b) for a, b in zip(low.gaps_s, high.gaps_s, strict=True)],
        between(low.scale, high.scale),
        between(low.serving_clock_mhz, high.serving_clock_mhz),
    )


def spins(gaps_s: Sequence[float], scale: float, clock_mhz: float) -> list[int]:
    """Cycles of the spin before each position; a gap that is there is one cycle at least: it parts two kernels."""
    return [max(1, round(gap * scale * clock_mhz * 1e6)) if gap > 0 and scale > 0 else 0 for gap in gaps_s]


def does_not_apply(calibration: Calibration, device: Device, positions: Sequence[str], model: str | None) -> list[str]:
    """Why a calibration does not hold for a replay; none where it does."""
    found = []
    if calibration.gpu_name != device.name:
        found.append(f"it was made on {calibration.gpu_name}, this is {device.name or 'no GPU'}")
    if calibration.power_limit_w != device.power_limit_w:
        found.append(
            f"its power limit was {_watts(calibration.power_limit_w)}, here it is {_watts(device.power_limit_w)}"
        )
    if calibration.positions != list(positions):
        found.append(f"it has {len(calibration.positions)} positions, and the capture has others ({len(positions)})")
    if calibration.model != model:
        found.append(f"it is of the model {calibration.model}, the capture of {model}")
    return found


def _watts(value: float | None) -> str:
    return "not known" if value is None else f"{value:.0f} W"


def clock_remark(clock_mhz: float, serving_mhz: float) -> str | None:
    """Which way a replay misleads whose clock is not serving's; None where it is, within `CLOCK_OFF`."""
    off = (clock_mhz - serving_mhz) / serving_mhz
    if abs(off) <= CLOCK_OFF:
        return None
    side, look = ("below", "slower") if off < 0 else ("above", "faster")
    return (
        f"the replay's clock, {clock_mhz:.0f} MHz, is {abs(off):.0%} {side} serving's {serving_mhz:.0f} MHz: kernels bound "
        f"by arithmetic or latency look {look} here than they are in serving, those bound by memory do not; do not "
        "choose between the two kinds by it"
    )
