"""Numbers -> estimates, intervals, tests and diagnostics. Pure; what cannot be computed is None with a reason.

The sample is one launch: requests inside a launch share its clocks, memory layout and compilation. Ratios are tested
with Welch's t on the logarithms of the launch values, because a rank test of four against four never goes under
p = 0.029 and so can never pass a correction over several cells. Its assumption: launch values are roughly log-normal.
`python -m tests.benchmarks.simulation` measures its errors under noise that is not.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_LAUNCHES = 1000
"""No number of launches above this is worth telling anybody."""

NO_SPREAD = 1e-12
"""Standard error of a logarithm below which launches are equal to the last digit: a count, not a measured time."""

FREEDOM_SHARE = 0.9
"""Part of Welch's estimated degrees of freedom that is used, but at least the smaller variant's launches less one.

The estimate is itself uncertain with few launches, and that shows in the far tail where a corrected p is read: of A/A
experiments whose candidate has three times the noise, with four launches a variant, plain Welch calls 5.7% at six cells
and 5.9% at twelve, this 4.6% at both (alpha 0.05; `python -m tests.benchmarks.other_tests` draws 40,000 of them). It
costs little: a change of four standard deviations is found in 94% of cells instead of 96%."""

OUTLIER_DEVIATIONS = 10.0
"""Robust standard deviations from the median at which a launch stands out. A median deviation of so few launches is
itself uncertain: of normal samples of four 2.4% reach this by chance, of six 1.0%, of eight 0.5% (drawn 100,000 times).
The usual limit of 3.5 is reached by 17% of samples of four."""

LEAST_FOR_OUTLIERS = 4
"""Launches below which a median cannot say which of them stands out."""

MOST_RELABELLINGS = 1000
"""Ways of splitting launches into two groups that are all looked at; of more, a seeded draw of this many."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Candidate over baseline, as a relative change.

    Attributes:
        effect: candidate/baseline - 1 of the medians.
        low: Lower end of the confidence interval of the ratio of geometric means, minus 1; None if unknown.
        high: Upper end of it; None if unknown, or too large for a number.
        p: Two-sided, uncorrected; None if it cannot be computed.
        reason: Why `p` is None.
        noise: Standard deviation of the logarithm of the launch values within a variant; None if unknown.
    """

    effect: float | None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    reason: str | None = None
    noise: float | None = None


def spread(values: Sequence[float]) -> float | None:
    """Half-range over the median, the `± x%` of the table; None for fewer than two values or a zero median."""
    if len(values) < 2:
        return None
    middle = statistics.median(values)
    return (max(values) - min(values)) / 2 / abs(middle) if middle else None


def compare_ratio(baseline: Sequence[float], candidate: Sequence[float], *, alpha: float) -> Ratio:
    """Welch's t on logarithms (B. L. Welch, Biometrika 34, 1947), with `FREEDOM_SHARE` of its degrees of freedom.

    Args:
        baseline: One value a launch, all positive.
        candidate: The same.
        alpha: Two-sided level of the interval.
    """
    if not baseline or not candidate:
        return Ratio(None, reason="no launch of one variant has this value")
    if not all(math.isfinite(value) for value in (*baseline, *candidate)):
        return Ratio(None, reason="a value is not a finite number")
    if min(*baseline, *candidate) <= 0:
        return Ratio(None, reason="a value is zero or negative: a ratio has no meaning")
    effect = statistics.median(candidate) / statistics.median(baseline) - 1
    if not math.isfinite(effect):
        return Ratio(None, reason="the ratio is too large for a number")
    if len(baseline) < 2 or len(candidate) < 2:
        return Ratio(effect, reason="one launch a variant shows no spread; at least 2 are needed")
    logs = [[math.log(value) for value in values] for values in (baseline, candidate)]
    variances = [_variance(values) for values in logs]
    errors = [variance / len(values) for variance, values in zip(variances, logs, strict=True)]
    error = math.sqrt(sum(errors))
    difference = _mean(logs[1]) - _mean(logs[0])
    if error < NO_SPREAD:
        same = abs(difference) < NO_SPREAD
        return Ratio(
            effect, effect, effect, 1.0 if same else None, None if same else "the launches show no spread at all"
        )
    welch = sum(errors) ** 2 / sum(e**2 / (len(v) - 1) for e, v in zip(errors, logs, strict=True) if e > 0)
    freedom = max(FREEDOM_SHARE * welch, min(len(baseline), len(candidate)) - 1)
    reach = _critical(alpha, freedom) * error
    return Ratio(
        effect,
        _change(difference - reach),
        _change(difference + reach),
        _two_sided(difference / error, freedom),
        noise=math.sqrt(_mean(variances)),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    middle = _mean(values)
    return math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1)


# scipy.special is imported where it is needed: it takes as long as reading hundreds of records, and it starts threads,
# beside which no work can be shared out to forked processes.


def _two_sided(t: float, freedom: float) -> float:
    """P of Student's t; from scipy.special, because the distribution objects of scipy.stats cost 50 times as much."""
    from scipy import special

    return float(2 * special.stdtr(freedom, -abs(t)))


def _critical(alpha: float, freedom: float) -> float:
    """The t at which `_two_sided` is alpha."""
    from scipy import special

    return float(-special.stdtrit(freedom, alpha / 2))


def _change(logarithm: float) -> float | None:
    """A difference of logarithms as a relative change; None where that is too large for a number."""
    return math.expm1(logarithm) if logarithm < 700 else None


@dataclass(frozen=True, slots=True)
class RankTest:
    """Exact two-sided Mann-Whitney test.

    Attributes:
        p: Uncorrected; None where values are tied and the exact distribution does not hold.
        smallest: Smallest p that these numbers of launches can reach.
    """

    p: float | None
    smallest: float


def rank_test(baseline: Sequence[float], candidate: Sequence[float]) -> RankTest:
    """Mann and Whitney, Annals of Mathematical Statistics 18, 1947; needs no assumption but exchangeability.

    Args:
        baseline: One value a launch, at least one.
        candidate: The same.
    """
    smallest = min(1.0, 2 / math.comb(len(baseline) + len(candidate), len(baseline)))
    if len({*baseline, *candidate}) < len(baseline) + len(candidate):
        return RankTest(None, smallest)
    below = sum(one < other for one in baseline for other in candidate)
    largest = max(below, len(baseline) * len(candidate) - below)
    ways = _arrangements(len(baseline), len(candidate))
    return RankTest(min(1.0, 2 * sum(ways[largest:]) / sum(ways)), smallest)


@functools.lru_cache(maxsize=64)
def _arrangements(first: int, second: int) -> tuple[int, ...]:
    """Of all orders of two groups, how many have U pairs with the value of the first group below; by U, from 0.

    The coefficients of the Gaussian binomial: the product of (1 - x^(second + i)) / (1 - x^i), i from 1 to `first`.
    """
    ways = [1] + [0] * (first * second)
    for i in range(1, first + 1):
        for u in range(len(ways) - 1, second + i - 1, -1):
            ways[u] -= ways[u - second - i]
        for u in range(i, len(ways)):
            ways[u] += ways[u - i]
    return tuple(ways)


@dataclass(frozen=True, slots=True)
class Outlier:
    """One value that stands out.

    Attributes:
        index: Its place in the given values.
        change: Relative to the median of its variant.
        deviations: How many robust standard deviations that is; None where the others are equal to the last digit.
    """

    index: int
    change: float
    deviations: float | None


def outliers(values: Sequence[float], least: float) -> list[Outlier]:
    """Values far from the median, by the median absolute deviation of the logarithms.

    After Iglewicz and Hoaglin, "How to detect and handle outliers", 1993, with `OUTLIER_DEVIATIONS` as the limit.

    Args:
        values: One a launch, all positive.
        least: Relative change below which nothing stands out.
    """
    if len(values) < LEAST_FOR_OUTLIERS or min(values) <= 0:
        return []
    logs = [math.log(value) for value in values]
    middle = statistics.median(logs)
    scale = 1.4826 * statistics.median(abs(value - middle) for value in logs)
    found: list[Outlier] = []
    for index, value in enumerate(logs):
        change = _change(value - middle)
        if change is None or abs(change) <= least:
            continue
        if scale < NO_SPREAD:
            found.append(Outlier(index, change, None))
        elif abs(value - middle) > OUTLIER_DEVIATIONS * scale:
            found.append(Outlier(index, change, abs(value - middle) / scale))
    return found


@dataclass(frozen=True, slots=True)
class Trend:
    """A diagnostic of the order of launches: a relative change with its uncorrected two-sided p."""

    change: float
    p: float


def drift(values: Sequence[float], groups: Sequence[object], positions: Sequence[float]) -> Trend | None:
    """Change from the first to the last position, the groups' own levels removed.

    One slope common to the groups, fitted to the logarithms by least squares (analysis of covariance).

    Args:
        values: One a launch, all positive.
        groups: The variant of each.
        positions: Place of each in time.

    Returns:
        None with fewer launches than the fit needs (two more than groups), or no spread to test against.
    """
    freedom = len(values) - len(set(groups)) - 1
    if freedom < 1 or min(values) <= 0:
        return None
    y = _centred([math.log(value) for value in values], groups)
    t = _centred(positions, groups)
    square = math.fsum(one**2 for one in t)
    if square == 0:
        return None
    slope = math.fsum(a * b for a, b in zip(t, y, strict=True)) / square
    rest = math.fsum((b - slope * a) ** 2 for a, b in zip(t, y, strict=True))
    return _trend(slope * (max(positions) - min(positions)), slope, rest / freedom / square, freedom)


def _centred(values: Sequence[float], groups: Sequence[object]) -> list[float]:
    levels = {group: _mean([v for v, g in zip(values, groups, strict=True) if g == group]) for group in set(groups)}
    return [value - levels[group] for value, group in zip(values, groups, strict=True)]


def _trend(shown: float, estimate: float, square_error: float, freedom: int) -> Trend | None:
    change = _change(shown)
    if square_error < NO_SPREAD**2 or change is None:
        return None
    return Trend(change, _two_sided(estimate / math.sqrt(square_error), freedom))


def pair_effect(pairs: Sequence[tuple[float, float, bool]]) -> Trend | None:
    """First launch of a pair over the second, the effect of the variant removed.

    Args:
        pairs: Value of the first, value of the second (both positive), whether the first is of the baseline.

    Returns:
        None with fewer than three pairs, pairs all in one order, or no spread to test against.
    """
    freedom = len(pairs) - 2
    if freedom < 1 or len({swapped for *_, swapped in pairs}) < 2 or min(min(a, b) for a, b, _ in pairs) <= 0:
        return None
    y = [math.log(first) - math.log(second) for first, second, _ in pairs]
    side = [1.0 if first_is_baseline else -1.0 for *_, first_is_baseline in pairs]
    middle, tilt = _mean(y), _mean(side)
    square = math.fsum((s - tilt) ** 2 for s in side)
    slope = math.fsum((s - tilt) * (v - middle) for s, v in zip(side, y, strict=True)) / square
    intercept = middle - slope * tilt
    rest = math.fsum((v - intercept - slope * s) ** 2 for s, v in zip(side, y, strict=True))
    return _trend(intercept, intercept, rest / freedom * (1 / len(pairs) + tilt**2 / square), freedom)


def order_correlation(baseline: Sequence[float], candidate: Sequence[float]) -> float:
    """Pearson correlation of variant and time: 0 means that a linear drift cancels out of the comparison.

    Args:
        baseline: Positions in time of its launches.
        candidate: The same; no position may be in both.

    Returns:
        From -1 to 1, positive where the candidate came later; 0 when one of them has no launch.
    """
    positions = [*baseline, *candidate]
    if not baseline or not candidate:
        return 0.0
    share = len(candidate) / len(positions)
    apart = _mean(candidate) - _mean(baseline)
    middle = _mean(positions)
    return apart * math.sqrt(share * (1 - share) / _mean([(one - middle) ** 2 for one in positions]))


def relabellings(count: int, group: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way of taking two groups of equal size out of `count` launches, in both orders.

    Args:
        count: Launches there are.
        group: Launches in each group; twice that is at most `count`.

    Returns:
        Pairs of index tuples; a seeded draw of `MOST_RELABELLINGS` where there are more.
    """
    total = math.comb(count, group) * math.comb(count - group, group)
    if total > MOST_RELABELLINGS:
        draw = random.Random(0)
        drawn = [draw.sample(range(count), 2 * group) for _ in range(MOST_RELABELLINGS)]
        return [(tuple(one[:group]), tuple(one[group:])) for one in drawn]
    return [
        (first, second)
        for first in itertools.combinations(range(count), group)
        for second in itertools.combinations([index for index in range(count) if index not in first], group)
    ]


def upper_quantile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


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

    def suffices(count: int) -> bool:
        return math.log1p(effect) >= _noncentrality(count, alpha, power) * noise * math.sqrt(2 / count)

    # Power grows with the number of launches: bisect for the first that suffices.
    low, high = 2, MOST_LAUNCHES
    if not suffices(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low


def detectable_effect(noise: float, count: int, alpha: float, power: float = 0.8) -> float | None:
    """The smallest relative change that a two-sample t test finds with the given power.

    Args:
        noise: Standard deviation of the logarithm of the launch values.
        count: Launches a variant.
        alpha: Two-sided level, uncorrected.
        power: Chance to find it.

    Returns:
        A relative increase, or None when even a hundredfold change would not be found.
    """
    if count < 2:
        return None
    effect = _change(_noncentrality(count, alpha, power) * noise * math.sqrt(2 / count))
    return effect if effect is not None and effect <= 100 else None


@functools.lru_cache(maxsize=1024)
def _noncentrality(count: int, alpha: float, power: float) -> float:
    """Difference of the means, in standard errors, that a two-sample t test finds with the given power."""
    from scipy import special

    freedom = 2 * count - 2
    critical = _critical(alpha, freedom)
    low, high = 0.0, 2 * critical + 10
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if 1 - special.nctdtr(freedom, middle, critical) >= power else (middle, high)
    return high


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
    from scipy import special

    return min(1.0, 2 * float(special.bdtr(min(only_baseline, only_candidate), total, 0.5)))
