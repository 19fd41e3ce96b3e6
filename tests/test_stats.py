"""Estimates and tests against independent references: scipy's own, published examples, simulation."""

import math
import random

import pytest
from scipy import stats as reference

from abharness.stats import compare_ratio, detectable_effect, holm, launches_needed, mcnemar_exact, spread


def test_welch_on_logs_agrees_with_scipy() -> None:
    draw = random.Random(1)
    a = [math.exp(draw.gauss(3, 0.01)) for _ in range(4)]
    b = [math.exp(draw.gauss(3.05, 0.03)) for _ in range(6)]
    ratio = compare_ratio(a, b, alpha=0.05, min_effect=0.01)
    expected = reference.ttest_ind([math.log(x) for x in b], [math.log(x) for x in a], equal_var=False)
    interval = expected.confidence_interval(0.95)
    assert ratio.p == pytest.approx(expected.pvalue)
    assert ratio.low == pytest.approx(math.expm1(interval.low))
    assert ratio.high == pytest.approx(math.expm1(interval.high))


def test_the_ratio_of_reciprocals_is_the_reciprocal() -> None:
    a, b = [10.0, 10.2, 9.9], [11.0, 11.3, 10.8]
    one = compare_ratio(a, b, alpha=0.05, min_effect=0.01)
    other = compare_ratio([1 / x for x in a], [1 / x for x in b], alpha=0.05, min_effect=0.01)
    assert one.p == pytest.approx(other.p)
    assert one.low is not None
    assert other.high is not None
    assert 1 + one.low == pytest.approx(1 / (1 + other.high))


def test_g2_two_launches_with_overlapping_spread_show_nothing() -> None:
    ratio = compare_ratio([100, 104], [103, 107], alpha=0.05, min_effect=0.01)
    assert ratio.p is not None
    assert ratio.p > 0.05
    assert ratio.launches_needed is not None
    assert ratio.launches_needed > 2
    assert ratio.detectable is not None
    assert ratio.detectable > 0.03


@pytest.mark.parametrize(
    ("a", "b"), [([], [1.0]), ([1.0], []), ([1.0], [1.1]), ([0.0, 1.0], [1.0, 1.0]), ([-1.0, 1.0], [1.0, 2.0])]
)
def test_what_cannot_be_tested_has_a_reason_and_no_p(a: list[float], b: list[float]) -> None:
    ratio = compare_ratio(a, b, alpha=0.05, min_effect=0.01)
    assert ratio.p is None
    assert ratio.reason


def test_launches_without_any_spread_are_equal_or_not_testable() -> None:
    assert compare_ratio([2.0, 2.0], [2.0, 2.0], alpha=0.05, min_effect=0.01).p == 1.0
    other = compare_ratio([2.0, 2.0], [3.0, 3.0], alpha=0.05, min_effect=0.01)
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
    assert detectable_effect(0.01, 1, 0.05) is None
    assert launches_needed(0.5, 0.0001, 0.05) is None


def test_spread_is_half_the_range_over_the_median() -> None:
    assert spread([99.0, 100.0, 103.0]) == pytest.approx(0.02)
    assert spread([1.0]) is None
    assert spread([0.0, 0.0]) is None
