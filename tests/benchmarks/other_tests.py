"""The tests that could have been the default, on the same draws: how often each calls equal variants, and what it finds.

    python -m tests.benchmarks.other_tests [--experiments 40000]

Vectorised, without `min_effect` and without the records; `tests.benchmarks.simulation` has the real comparison. All but
the permutation test are corrected with Holm over the cells.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy import special

from abharness import stats
from tests.simulation import Setting, Simulator

ALPHA = 0.05
Array = NDArray[np.float64]
Test = Callable[[Array, Array], Array]


def _holm(p: Array) -> Array:
    order = np.argsort(p, axis=1)
    steps = np.take_along_axis(p, order, 1) * (p.shape[1] - np.arange(p.shape[1]))
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.minimum(1, np.maximum.accumulate(steps, 1)), 1)
    return adjusted


def _t_test(freedom: Callable[[Array, Array, int], Array | float]) -> Test:
    """A t test on the two variances of the mean, with degrees of freedom from them and the launches a variant."""

    def test(a: Array, b: Array) -> Array:
        count = a.shape[1]
        errors = [part.var(1, ddof=1) / count for part in (a, b)]
        t = np.abs(b.mean(1) - a.mean(1)) / np.sqrt(errors[0] + errors[1])
        return _holm(2 * special.stdtr(freedom(errors[0], errors[1], count), -t))

    return test


def _welch(one: Array, two: Array, count: int) -> Array:
    return (one + two) ** 2 / ((one**2 + two**2) / (count - 1))


def shipped(one: Array, two: Array, count: int) -> Array:
    """Degrees of freedom as `stats.compare_ratio` takes them."""
    return np.maximum(stats.FREEDOM_SHARE * _welch(one, two, count), count - 1)


def shrunk(a: Array, b: Array) -> Array:
    """Student's t with each cell's variance drawn towards the mean over the cells, as if by 4 more launches."""
    count, more = a.shape[1], 4
    own = (a.var(1, ddof=1) + b.var(1, ddof=1)) / 2
    freedom = 2 * count - 2
    variance = (more * own.mean(1, keepdims=True) + freedom * own) / (more + freedom)
    return _holm(2 * special.stdtr(freedom + more, -np.abs(b.mean(1) - a.mean(1)) / np.sqrt(2 * variance / count)))


def permuted(a: Array, b: Array) -> Array:
    """Welch's statistic against all relabellings, the largest of the cells at a time (Westfall and Young, 1993)."""
    count = a.shape[1]
    values = np.concatenate([a, b], 1)
    found = []
    for rest in itertools.combinations(range(1, 2 * count), count - 1):
        mask = np.zeros(2 * count, bool)
        mask[[0, *rest]] = True
        one, two = values[:, mask], values[:, ~mask]
        found.append(np.abs(one.mean(1) - two.mean(1)) / np.sqrt(one.var(1, ddof=1) + two.var(1, ddof=1)))
    every = np.array(found)
    observed = every[0]  # the first relabelling is the one that was run
    order = np.argsort(-observed, axis=1)
    sorted_down = np.take_along_axis(every, order[None], 2)
    largest = np.maximum.accumulate(sorted_down[:, :, ::-1], 2)[:, :, ::-1]
    steps = np.maximum.accumulate((largest >= np.take_along_axis(observed, order, 1)[None] - 1e-9).mean(0), 1)
    adjusted = np.empty_like(steps)
    np.put_along_axis(adjusted, order, steps, 1)
    return adjusted


TESTS: dict[str, Test] = {
    "Welch, 0.9 of its degrees of freedom (shipped)": _t_test(shipped),
    "Welch": _t_test(_welch),
    "Welch, n-1 degrees of freedom": _t_test(lambda one, two, count: count - 1),
    "Student": _t_test(lambda one, two, count: 2 * count - 2),
    "Student, variance shared over the cells": shrunk,
    "permutation, largest of the cells": permuted,
}

COLUMNS: list[tuple[str, Setting]] = [
    ("normal", Setting("normal")),
    ("heavy-tailed", Setting("heavy-tailed")),
    ("bimodal", Setting("bimodal")),
    ("bimodal, 1 cell", Setting("bimodal", cells=1)),
    ("heteroscedastic, 1 cell", Setting("heteroscedastic", cells=1)),
    ("heteroscedastic", Setting("heteroscedastic")),
    ("heteroscedastic, 12 cells", Setting("heteroscedastic", cells=12)),
    ("far bimodal, n=2", Setting("far bimodal", launches=2)),
    ("1% found", Setting(effect=0.01)),
    ("2% found", Setting(effect=0.02)),
    ("2% found, n=3", Setting(effect=0.02, launches=3)),
]


def measure(setting: Setting, experiments: int) -> dict[str, str]:
    """For every test: share of experiments with any call, or share of cells called where there is an effect."""
    made = Simulator(setting)
    logs = np.log(made.draw(experiments, seed=1))
    is_candidate = np.array([variant == "candidate" for variant in made.order])
    a, b = logs[:, ~is_candidate], logs[:, is_candidate]
    told = {}
    for name, test in TESTS.items():
        called = np.concatenate(
            [test(x, y) < ALPHA for x, y in zip(np.array_split(a, 20), np.array_split(b, 20), strict=True)]
        )
        told[name] = f"{called.mean():.0%}" if setting.effect else f"{called.any(1).mean():.1%}"
    return told


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=40000)
    arguments = parser.parse_args()
    columns = [(title, measure(one, arguments.experiments)) for title, one in COLUMNS]
    print("A/A experiments with any call, or share of cells found; 0.5% noise, n=4 and 6 cells where not said:\n")
    print(f"| | {' | '.join(title for title, _ in columns)} |\n| --- |{' ---: |' * len(columns)}")
    for name in TESTS:
        print(f"| {name} | {' | '.join(told[name] for _, told in columns)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
