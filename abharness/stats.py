"""Numbers -> estimates, intervals and tests. Pure; warnings are return values.

The sample is one launch: requests inside a launch share its clocks, memory layout and compilation. Ratios are tested
with Welch's t on the logarithms of the launch values, because a rank test of four against four never goes under
p = 0.029 and so can never pass a correction over several cells. Its assumption: launch values are roughly log-normal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats as scipy_stats

MOST_LAUNCHES = 1000
"""No number of launches above this is worth telling anybody."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Candidate over baseline, as a relative change.

    Attributes:
        effect: candidate/baseline - 1 of the medians.
        low: Lower end of the confidence interval of the ratio of geometric means, minus 1; None if unknown.
        high: Upper end of it.
        p: Two-sided, uncorrected; None if it cannot be computed.
        reason: Why `p` is None.
        launches_needed: Launches a variant that would show `min_effect` with 80% power at this noise; None if that is
            more than `MOST_LAUNCHES`, or unknown.
        detectable: Smallest relative change that this many launches show with 80% power at this noise; None if unknown.
    """

    effect: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    reason: str | None = None
    launches_needed: int | None = None
    detectable: float | None = None


def spread(values: Sequence[float]) -> float | None:
    """Half-range over the median, the `± x%` of the table; None for fewer than two values or a zero median."""
    if len(values) < 2:
        return None
    middle = statistics.median(values)
    return (max(values) - min(values)) / 2 / abs(middle) if middle else None


def compare_ratio(baseline: Sequence[float], candidate: Sequence[float], *, alpha: float, min_effect: float) -> Ratio:
    """Welch's t on logarithms (B. L. Welch, Biometrika 34, 1947).

    Args:
        baseline: One value a launch, all positive.
        candidate: The same.
        alpha: Two-sided level of the interval.
        min_effect: Relative change for `launches_needed`.
    """
    if not baseline or not candidate:
        return Ratio(None, reason="no launch of one variant has this value")
    middle = statistics.median(baseline)
    if min(*baseline, *candidate, 1.0) <= 0:
        return Ratio(None, reason="a value is zero or negative: a ratio has no meaning")
    effect = statistics.median(candidate) / middle - 1
    if len(baseline) < 2 or len(candidate) < 2:
        return Ratio(effect, reason="one launch a variant shows no spread; at least 2 are needed")
    logs = [[math.log(value) for value in values] for values in (baseline, candidate)]
    means = [statistics.fmean(values) for values in logs]
    errors = [statistics.variance(values) / len(values) for values in logs]
    error = math.sqrt(sum(errors))
    difference = means[1] - means[0]
    if error < 1e-12:
        # Equal to the last digit in every launch: a simulator or a count, not a measured time.
        same = abs(difference) < 1e-12
        return Ratio(
            effect, effect, effect, 1.0 if same else None, None if same else "the launches show no spread at all"
        )
    freedom = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, logs, strict=True) if e > 0)
    p = float(2 * scipy_stats.t.sf(abs(difference) / error, freedom))
    reach = float(scipy_stats.t.ppf(1 - alpha / 2, freedom)) * error
    noise = math.sqrt(statistics.fmean([statistics.variance(values) for values in logs]))
    return Ratio(
        effect,
        math.expm1(difference - reach),
        math.expm1(difference + reach),
        p,
        launches_needed=launches_needed(noise, min_effect, alpha),
        detectable=detectable_effect(noise, min(len(baseline), len(candidate)), alpha),
    )


def launches_needed(noise: float, effect: float, alpha: float, power: float = 0.8) -> int | None:
    """Launches a variant at which a two-sample t test finds a relative change with the given power.

    Args:
        noise: Standard deviation of the logarithm of the launch values.
        effect: Relative change to find.
        alpha: Two-sided level, uncorrected.
        power: Chance to find it.

    Returns:
        The number, or None when `MOST_LAUNCHES` would not do.
    """
    if effect <= 0:
        return None
    # Power grows with the number of launches: bisect for the first that suffices.
    low, high = 2, MOST_LAUNCHES
    if _power(noise, effect, high, alpha) < power:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _power(noise, effect, middle, alpha) >= power else (middle + 1, high)
    return low


def detectable_effect(noise: float, count: int, alpha: float, power: float = 0.8) -> float | None:
    """The smallest relative change that a two-sample t test finds with the given power.

    Args:
        noise: Standard deviation of the logarithm of the launch values.
        count: Launches a variant.
        alpha: Two-sided level, uncorrected.
        power: Chance to find it.

    Returns:
        A relative increase to two digits or so, or None when even a hundredfold change would not be found.
    """
    low, high = 0.0, 100.0
    if count < 2 or _power(noise, high, count, alpha) < power:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _power(noise, middle, count, alpha) >= power else (middle, high)
    return high


def _power(noise: float, effect: float, count: int, alpha: float) -> float:
    if noise <= 0:
        return 1.0
    freedom = 2 * count - 2
    critical = scipy_stats.t.ppf(1 - alpha / 2, freedom)
    return float(scipy_stats.nct.sf(critical, freedom, math.log1p(effect) / (noise * math.sqrt(2 / count))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p values, in the given order (S. Holm, Scand. J. Statist. 6, 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [0.0] * len(p_values)
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def mcnemar_exact(only_baseline: int, only_candidate: int) -> float:
    """Two-sided exact McNemar test on discordant pairs: a sign test with p = 1/2."""
    total = only_baseline + only_candidate
    if total == 0:
        return 1.0
    return float(scipy_stats.binomtest(only_baseline, total, 0.5).pvalue)
