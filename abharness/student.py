"""Student's t -> probabilities, critical values and the power of a two-sample test, in plain Python.

Importing scipy takes longer than everything else of a comparison, and this is all that is needed of it. The tests hold
every function here against scipy.
"""

from __future__ import annotations

import math
from statistics import NormalDist

_CLOSE = 1e-15
"""Relative step at which a continued fraction has converged."""


def two_sided(t: float, freedom: float) -> float:
    """Probability that |T| is at least |t|.

    Args:
        t: Any finite number.
        freedom: Degrees of freedom, above 0; need not be whole.
    """
    return _incomplete_beta(t * t, freedom)


def _incomplete_beta(square: float, freedom: float) -> float:
    """I_x(freedom/2, 1/2) at x = freedom / (freedom + square): both tails of Student's t beyond the root of `square`."""
    a, b = freedom / 2, 0.5
    x, rest = freedom / (freedom + square), square / (freedom + square) if math.isfinite(square) else 1.0
    if x == 0 or rest == 0:
        return float(rest == 0)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1 - front * _fraction(rest, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function by Lentz's method (Numerical Recipes, section 6.4).

    Where it is used no denominator comes near zero: x is below (a + 1) / (a + b + 2).
    """
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, 100_000):
        at = a + 2 * m
        even = m * (b - m) * x / ((at - 1) * at)
        d = 1 / (1 + even * d)
        c = 1 + even / c
        result *= c * d
        odd = -(a + m) * (a + b + m) * x / (at * (at + 1))
        d = 1 / (1 + odd * d)
        c = 1 + odd / c
        step = c * d
        result *= step
        if abs(step - 1) < _CLOSE:
            break
    return result


def critical(alpha: float, freedom: float) -> float:
    """The t at which `two_sided` is `alpha`.

    Args:
        alpha: Two-sided level, above 0 and below 1.
        freedom: Degrees of freedom, at least 1.
    """
    wanted = math.log(alpha)
    # Newton's method on the logarithms, which are nearly a straight line far out, kept between bounds.
    low, high, at = -40.0, 800.0, math.log(_near(alpha, freedom))
    for _ in range(100):
        t = math.exp(at)
        p = two_sided(t, freedom)
        low, high = (at, high) if p > alpha else (low, at)
        slope = 2 * _density(t, freedom) * t / p if p > 0 else 0.0
        following = at + (math.log(p) - wanted) / slope if slope > 0 else math.inf
        if abs(following - at) < 1e-7:  # the error left is of the order of its square
            return math.exp(following)
        at = following if low < following < high else (low + high) / 2
    return math.exp(at)


def _near(alpha: float, freedom: float) -> float:
    """About the critical value: two terms of the expansion around the normal one (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(1 - max(alpha, 1e-15) / 2)
    return z + z * (z**2 + 1) / (4 * freedom) + z * (5 * z**4 + 16 * z**2 + 3) / (96 * freedom**2)


def _density(t: float, freedom: float) -> float:
    scale = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(freedom * math.pi) / 2
    return math.exp(scale - (freedom + 1) / 2 * math.log1p(t * t / freedom))


def power(noncentrality: float, freedom: float, t: float) -> float:
    """Chance that a noncentral T exceeds t: that of a normal variable, averaged over the scale estimated beside it.

    Args:
        noncentrality: Difference of the means in standard errors.
        freedom: Degrees of freedom, at least 2.
        t: Critical value, above 0.
    """
    half, unit = freedom / 2, math.sqrt(2 * freedom)
    # Steps of the scale's own standard error, as narrow as the normal tail needs. The integrand falls off on both sides
    # without a bend, so equal steps are as exact as a number can be; far fewer would do where t is not huge.
    step = max(min(0.25, unit / (4 * t)), 0.002)
    front = math.log(2 * step / unit) + half * math.log(half) - math.lgamma(half)
    total = 0.0
    for index in range(int(-40 / step), int(10 / step)):
        log_s = index * step / unit
        weight = math.exp(front + freedom * log_s - half * math.exp(2 * log_s))
        total += weight * math.erfc((t * math.exp(log_s) - noncentrality) / math.sqrt(2)) / 2
    return total
