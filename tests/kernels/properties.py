"""Hypothesis for the tests of kernels/: the same examples in every run, and no clock. `given` comes from here."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

settings.register_profile(
    "kernels",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kernels")

seeds = st.integers(0, 2**31)

__all__ = ["given", "seeds", "st"]
