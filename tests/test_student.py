"""Student's t in plain Python, held against scipy over the whole range in which it is asked."""

from __future__ import annotations

import math
import random

import pytest
from scipy import special, stats

from abharness import student
from abharness.stats import mcnemar_exact, rank_test

DRAWN = random.Random(0)


def _between(low: float, high: float) -> float:
    """Log-uniform."""
    return math.exp(DRAWN.uniform(math.log(low), math.log(high)))


def test_both_tails_are_scipys() -> None:
    for freedom, t in [(_between(1, 2000), _between(1e-4, 1e4)) for _ in range(2000)]:
        expected = 2 * special.stdtr(freedom, -t)
        assert student.two_sided(t, freedom) == pytest.approx(expected, rel=1e-10, abs=1e-300), (t, freedom)
        assert student.two_sided(-t, freedom) == student.two_sided(t, freedom)


@pytest.mark.parametrize(("t", "p"), [(0.0, 1.0), (1e200, 0.0), (1e-200, 1.0)])
def test_the_ends_of_the_range(t: float, p: float) -> None:
    assert student.two_sided(t, 3.5) == pytest.approx(p, abs=1e-300)


def test_critical_values_are_scipys() -> None:
    for freedom, alpha in [(_between(1, 2000), _between(1e-12, 0.999)) for _ in range(1000)]:
        expected = -special.stdtrit(freedom, alpha / 2)
        assert student.critical(alpha, freedom) == pytest.approx(expected, rel=1e-10), (alpha, freedom)


def test_power_is_that_of_scipys_noncentral_t() -> None:
    for count in (2, 3, 4, 6, 20, 100, 1000):
        for alpha in (0.1, 0.05, 0.01, 0.001):
            t = student.critical(alpha, 2 * count - 2)
            for noncentrality in (0.01, 0.5, 1, 2, 3, 5, 10, t, 2 * t):
                expected = 1 - special.nctdtr(2 * count - 2, noncentrality, t)
                assert student.power(noncentrality, 2 * count - 2, t) == pytest.approx(expected, abs=1e-10)


def test_the_exact_tests_are_scipys() -> None:
    for _ in range(300):
        values = DRAWN.sample(range(1000), DRAWN.randint(2, 20))
        cut = DRAWN.randint(1, len(values) - 1)
        expected = stats.mannwhitneyu(values[:cut], values[cut:], method="exact").pvalue
        assert rank_test(values[:cut], values[cut:]).p == pytest.approx(expected, rel=1e-12)
    for total in range(1, 40):
        for lost in range(total + 1):
            expected = stats.binomtest(lost, total, 0.5).pvalue
            assert mcnemar_exact(lost, total - lost) == pytest.approx(expected, rel=1e-12)
