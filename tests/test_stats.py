"""Estimates and tests against independent references: scipy's own, published examples, simulation."""

import math
import random

import pytest
from scipy import stats as reference

from abharness.stats import (
    MOST_RELABELLINGS,
    compare_ratio,
    detectable_effect,
    drift,
    holm,
    launches_needed,
    mcnemar_exact,
    order_correlation,
    outliers,
    pair_effect,
    rank_test,
    relabellings,
    spread,
    upper_quantile,
)


def test_welch_on_logs_is_scipys_with_nine_tenths_of_its_degrees_of_freedom() -> None:
    draw = random.Random(1)
    a = [math.exp(draw.gauss(3, 0.01)) for _ in range(4)]
    b = [math.exp(draw.gauss(3.05, 0.03)) for _ in range(6)]
    ratio = compare_ratio(a, b, alpha=0.05)
    welch = reference.ttest_ind([math.log(x) for x in b], [math.log(x) for x in a], equal_var=False)
    freedom = 0.9 * welch.df
    assert freedom > 3
    assert ratio.p == pytest.approx(2 * reference.t.sf(abs(welch.statistic), freedom))
    difference = sum(map(math.log, b)) / 6 - sum(map(math.log, a)) / 4
    reach = reference.t.ppf(0.975, freedom) * difference / welch.statistic
    assert ratio.low == pytest.approx(math.expm1(difference - reach))
    assert ratio.high == pytest.approx(math.expm1(difference + reach))


def test_the_degrees_of_freedom_never_go_below_the_smaller_variants_own() -> None:
    ratio = compare_ratio([1.0, 1.0, 1.0], [1.1, 1.2, 1.3], alpha=0.05)
    welch = reference.ttest_ind([math.log(x) for x in (1.1, 1.2, 1.3)], [0.0, 0.0, 0.0], equal_var=False)
    assert welch.df == pytest.approx(2)
    assert ratio.p == pytest.approx(welch.pvalue)


def test_the_ratio_of_reciprocals_is_the_reciprocal() -> None:
    a, b = [10.0, 10.2, 9.9], [11.0, 11.3, 10.8]
    one = compare_ratio(a, b, alpha=0.05)
    other = compare_ratio([1 / x for x in a], [1 / x for x in b], alpha=0.05)
    assert one.p == pytest.approx(other.p)
    assert one.low is not None
    assert other.high is not None
    assert 1 + one.low == pytest.approx(1 / (1 + other.high))


def test_g2_two_launches_with_overlapping_spread_show_nothing() -> None:
    ratio = compare_ratio([100, 104], [103, 107], alpha=0.05)
    assert ratio.p is not None
    assert ratio.p > 0.05
    assert ratio.noise is not None
    needed, shown = launches_needed(ratio.noise, 0.01, 0.05), detectable_effect(ratio.noise, 2, 0.05)
    assert needed is not None
    assert needed > 2
    assert shown is not None
    assert shown > 0.03


@pytest.mark.parametrize(
    ("a", "b"), [([], [1.0]), ([1.0], []), ([1.0], [1.1]), ([0.0, 1.0], [1.0, 1.0]), ([-1.0, 1.0], [1.0, 2.0]),
     ([1e-300, 1e-300], [1e300, 1e301]), ([1.0, math.inf], [1.0, 2.0]), ([1.0, math.nan], [1.0, 2.0])],
)  # fmt: skip
def test_what_cannot_be_tested_has_a_reason_and_no_p(a: list[float], b: list[float]) -> None:
    ratio = compare_ratio(a, b, alpha=0.05)
    assert ratio.p is None
    assert ratio.reason


def test_launches_without_any_spread_are_equal_or_not_testable() -> None:
    assert compare_ratio([2.0, 2.0], [2.0, 2.0], alpha=0.05).p == 1.0
    other = compare_ratio([2.0, 2.0], [3.0, 3.0], alpha=0.05)
    assert other.p is None
    assert other.reason


def test_holm_on_a_worked_example() -> None:
    # 0.01, 0.04, 0.03, 0.005: sorted 0.005*4, 0.01*3, 0.03*2, max(0.06, 0.04*1)
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])


def test_g2_mcnemar_on_four_discordant_questions() -> None:
    assert mcnemar_exact(3, 1) == pytest.approx(0.625)
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(10, 0) == pytest.approx(2 / 1024)


def test_launches_needed_have_the_power_they_promise() -> None:
    noise, effect = 0.01, 0.02
    count = launches_needed(noise, effect, 0.05)
    assert count is not None
    draw = random.Random(2)
    found = 0
    for _ in range(1000):
        a = [draw.gauss(0, noise) for _ in range(count)]
        b = [draw.gauss(math.log1p(effect), noise) for _ in range(count)]
        found += reference.ttest_ind(a, b).pvalue < 0.05
    assert found / 1000 > 0.76


def test_the_detectable_effect_is_the_one_that_needs_this_many_launches() -> None:
    for noise, count in ((0.01, 4), (0.05, 3), (0.005, 8)):
        effect = detectable_effect(noise, count, 0.05)
        assert effect is not None
        assert launches_needed(noise, effect * 1.001, 0.05) == count
        assert launches_needed(noise, effect * 0.7, 0.05) != count
        independent = reference.nct.sf(
            reference.t.ppf(0.975, 2 * count - 2), 2 * count - 2, math.log1p(effect) / noise / math.sqrt(2 / count)
        )
        assert independent == pytest.approx(0.8, abs=1e-4)
    assert detectable_effect(0.01, 1, 0.05) is None
    assert detectable_effect(9.0, 2, 0.05) is None
    assert launches_needed(0.5, 0.0001, 0.05) is None


def test_spread_is_half_the_range_over_the_median() -> None:
    assert spread([99.0, 100.0, 103.0]) == pytest.approx(0.02)
    assert spread([1.0]) is None
    assert spread([0.0, 0.0]) is None


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([5e-324, 1e-323], [1e-323, 2e-323]),
        ([1e-200, 1e200], [1e-100, 1e100]),
        ([2.0, 2.0], [2.0, 2.0 + 4e-16]),
        ([2.0, 2.0, 2.0], [2.0, 2.1, 2.2]),
        ([1e-9, 1.1e-9], [1e-9, 1.05e-9]),
    ],
)
def test_every_number_of_an_extreme_sample_is_finite_or_absent(a: list[float], b: list[float]) -> None:
    ratio = compare_ratio(a, b, alpha=0.05)
    for number in (ratio.effect, ratio.low, ratio.high, ratio.p, ratio.noise):
        assert number is None or math.isfinite(number)
    for trend in (drift([*a, *b], [0] * len(a) + [1] * len(b), range(len(a) + len(b))),):
        assert trend is None or math.isfinite(trend.change + trend.p)


def test_the_rank_test_is_scipys_and_knows_the_least_p_of_its_n() -> None:
    a, b = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]
    assert rank_test(a, b).p == pytest.approx(2 / 70)
    assert rank_test(a, b).smallest == pytest.approx(2 / 70)
    assert rank_test(a[:3], b[:3]).smallest == pytest.approx(0.1)
    assert rank_test([1.0, 2.0], [2.0, 3.0]).p is None, "tied: the exact distribution does not hold"
    assert rank_test([1.0], [2.0]).smallest == 1.0


def test_drift_is_found_beside_an_effect_of_the_variant() -> None:
    positions = list(range(8))
    groups = ["b", "c", "c", "b", "b", "c", "c", "b"]
    noise = [0.001, -0.001, 0.0005, 0.0, -0.0005, 0.001, -0.001, 0.0]
    values = [
        math.exp(0.01 * t + (0.2 if g == "c" else 0) + e) for t, g, e in zip(positions, groups, noise, strict=True)
    ]
    found = drift(values, groups, positions)
    assert found is not None
    assert found.change == pytest.approx(math.expm1(0.07), rel=0.1)
    assert found.p < 1e-4
    # The same as ordinary least squares on the two dummies and time.
    slope = reference.linregress(
        [t - 3.5 for t in positions],
        [math.log(v) - (0.2 if g == "c" else 0) for v, g in zip(values, groups, strict=True)],
    ).slope
    assert math.log1p(found.change) / 7 == pytest.approx(slope, rel=0.05)
    still = drift([math.exp(e) for e in noise], groups, positions)
    assert still is not None
    assert still.p > 0.05
    assert drift(values[:3], groups[:3], positions[:3]) is None


def test_drift_p_is_uniform_where_there_is_none() -> None:
    draw = random.Random(3)
    groups = [0, 1, 1, 0, 0, 1, 1, 0]
    ps = [drift([math.exp(draw.gauss(g, 0.01)) for g in groups], groups, range(8)) for _ in range(1000)]
    assert 0.03 < sum(one.p < 0.05 for one in ps if one is not None) / 1000 < 0.07


def test_the_first_of_a_pair_is_told_from_the_variant() -> None:
    noise = [0.001, -0.001, 0.0005, -0.0005]
    pairs = [
        (math.exp(0.03 + e + (0.1 if not first else 0)), math.exp(0.1 if first else 0), first)
        for e, first in zip(noise, (True, False, True, False), strict=True)
    ]
    found = pair_effect(pairs)
    assert found is not None
    assert found.change == pytest.approx(math.expm1(0.03), rel=0.01)
    assert found.p < 0.01
    assert pair_effect(pairs[:2]) is None
    assert pair_effect([(1.0, 1.1, True), (1.0, 1.2, True), (1.0, 1.3, True)]) is None, "one order only"


def test_an_outlier_is_named_with_its_distance_and_needs_four_values_and_a_size_that_matters() -> None:
    values = [100.0, 100.2, 99.9, 106.0]
    (found,) = outliers(values, 0.01)
    assert (found.index, found.change) == (3, pytest.approx(106 / 100.1 - 1, rel=1e-3))
    assert found.deviations is not None
    assert found.deviations > 10
    assert outliers(values[1:], 0.01) == []
    assert outliers(values, 0.10) == []
    assert outliers([100.0, 101.0, 99.0, 104.0], 0.01) == [], "within what the others scatter"
    (equal,) = outliers([100.0, 100.0, 100.0, 110.0], 0.01)
    assert equal.deviations is None


@pytest.mark.parametrize(
    ("order", "expected"), [("bccbbccb", 0.0), ("bcbc", 0.447), ("bbcc", 0.894), ("ccccbbbb", -0.873), ("bb", 0.0)]
)
def test_the_correlation_of_variant_and_time(order: str, expected: float) -> None:
    places = {side: [float(i) for i, one in enumerate(order) if one == side] for side in "bc"}
    assert order_correlation(places["b"], places["c"]) == pytest.approx(expected, abs=1e-3)


def test_relabellings_are_all_balanced_splits_in_both_orders_or_a_seeded_draw() -> None:
    splits = relabellings(8, 4)
    assert len(splits) == len(set(splits)) == 70
    assert all(set(a) | set(b) == set(range(8)) for a, b in splits)
    assert len(relabellings(8, 2)) == 420
    drawn = relabellings(16, 8)
    assert len(drawn) == MOST_RELABELLINGS
    assert all(len(set(a) | set(b)) == 16 for a, b in drawn)
    assert drawn == relabellings(16, 8)


def test_the_upper_quantile_is_a_value_that_occurs() -> None:
    assert upper_quantile(range(1, 71), 0.95) == 67
    assert upper_quantile([1, 2, 3, 4, 5, 6], 0.95) == 6
    assert upper_quantile([3.0], 0.95) == 3.0
    assert upper_quantile(range(1, 21), 0.95) == 19


def test_the_exact_tests_are_scipys() -> None:
    drawn = random.Random(0)
    for _ in range(300):
        values = drawn.sample(range(1000), drawn.randint(2, 20))
        cut = drawn.randint(1, len(values) - 1)
        expected = reference.mannwhitneyu(values[:cut], values[cut:], method="exact").pvalue
        assert rank_test(values[:cut], values[cut:]).p == pytest.approx(expected, rel=1e-12)
    for total in range(1, 40):
        for lost in range(total + 1):
            expected = reference.binomtest(lost, total, 0.5).pvalue
            assert mcnemar_exact(lost, total - lost) == pytest.approx(expected, rel=1e-12)
