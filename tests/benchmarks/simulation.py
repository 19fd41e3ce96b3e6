"""What the judgement gets wrong and what it finds, over seeded experiments: tables on stdout, numbers as JSON.

    python -m tests.benchmarks.simulation [--experiments 2000] [--jobs 2] [--only NAME] [--json FILE]

Every experiment goes through the comparison that `abharness compare` makes; see `tests/simulation.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from abharness.waivers import Waiver
from tests.simulation import CLOCK_GAP, DRIFT, FAR_CLOCK_GAP, NOISES, OWN_SHARE, Rates, Setting, Simulator

ALPHA = 0.05
COUNTS = (2, 3, 4, 6, 8)
Results = dict[Setting, Rates]


def settings(name: str) -> list[Setting]:
    """The experiments of one table."""
    if name == "false positives":
        return [Setting(noise, sd, count) for sd in (0.005, 0.02) for noise in NOISES for count in COUNTS]
    if name == "cells":
        return [Setting(noise, 0.02, cells=cells) for noise in NOISES for cells in (1, 3, 12)]
    if name == "power":
        return [
            Setting(noise, launches=count, effect=effect)
            for noise in NOISES
            for effect in (0.01, 0.02, 0.05)
            for count in COUNTS
        ]
    return [
        Setting(noise, launches=count, order=order, effect=effect)
        for noise in ("normal", "drifting")
        for order in ("ab", "abba")
        for effect in (0.0, 0.05)
        for count in (4, 8)
    ]


TABLES = ("false positives", "cells", "power", "order")


def judge(name: str, setting: Setting, experiments: int, seed: int) -> Rates:
    # `ab` is refused a verdict; what it would say without that is the point of the table.
    waivers = [Waiver("order_confounded")] if name == "order" else []
    return Simulator(setting).judge(experiments, seed, waivers=waivers)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *(list(row) for row in rows)]
    lines.insert(1, ["---"] + ["---:"] * (len(lines[0]) - 1))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _short(value: float) -> float:
    return round(value, 4)


def _any(rates: Rates) -> str:
    return f"{rates.any_called:.1%}"


def _both(rates: Rates) -> str:
    return f"{rates.any_called:.0%} / {rates.cells_called:.0%}"


def render(name: str, results: Results) -> str:
    """One table as Markdown."""

    def find(**wanted: object) -> Rates:
        return next(rates for one, rates in results.items() if all(getattr(one, k) == v for k, v in wanted.items()))

    def rows(values: Iterable[object], field: str, show: Callable[[Rates], str], **fixed: object) -> list[str]:
        return [show(find(**{field: value}, **fixed)) for value in values]

    launches = [f"n={count}" for count in COUNTS]
    if name == "false positives":
        return "\n".join(
            f"A/A experiments with any call, noise {sd:.1%}, 6 cells:\n\n"
            + _table(["noise", *launches], [[n, *rows(COUNTS, "launches", _any, noise=n, sd=sd)] for n in NOISES])
            for sd in (0.005, 0.02)
        )
    if name == "cells":
        counts = (1, 3, 12)
        return "A/A experiments with any call, noise 2.0%, n=4:\n\n" + _table(
            ["noise", *(f"{count} cell{'s' * (count > 1)}" for count in counts)],
            [[n, *rows(counts, "cells", _any, noise=n)] for n in NOISES],
        )
    if name == "power":
        return "\n".join(
            f"A true change of {effect:.0%}, noise 0.5%, 6 cells: found in any cell / mean share of cells:\n\n"
            + _table(
                ["noise", *launches], [[n, *rows(COUNTS, "launches", _both, noise=n, effect=effect)] for n in NOISES]
            )
            for effect in (0.01, 0.02, 0.05)
        )
    head = ["noise", "order", "A/A called, n=4", "A/A called, n=8", "5% found in cells, n=4", "5% found in cells, n=8"]
    lines = []
    for noise in ("normal", "drifting"):
        for order in ("ab", "abba"):
            fixed = {"noise": noise, "order": order}
            called = rows((4, 8), "launches", _any, effect=0.0, **fixed)
            found = rows((4, 8), "launches", lambda rates: f"{rates.cells_called:.0%}", effect=0.05, **fixed)
            lines.append([noise, order, *called, *found])
    return "Order of launches, noise 0.5%, 6 cells (`ab` with its refusal waived):\n\n" + _table(head, lines)


def main() -> int:
    """Run the tables; exit 1 when the default design calls more A/As than alpha and chance allow."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", choices=TABLES, action="append")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    data: list[list[object]] = []
    worst = 0.0
    for name in arguments.only or TABLES:
        started = time.monotonic()
        wanted = settings(name)
        # Only errors at the level of alpha need the accuracy of all the experiments.
        errors = name in ("false positives", "cells")
        many = arguments.experiments if errors else max(1, arguments.experiments // 4)
        with ProcessPoolExecutor(arguments.jobs) as pool:
            futures = [pool.submit(judge, name, setting, many, arguments.seed) for setting in wanted]
            results = {setting: future.result() for setting, future in zip(wanted, futures, strict=True)}
        for setting, rates in results.items():
            data.append([name, *dataclasses.astuple(setting), *(_short(value) for value in dataclasses.astuple(rates))])
            if errors and setting.launches >= 4:
                worst = max(worst, rates.any_called)
        print(render(name, results))
        print(f"{len(wanted)} settings x {many} experiments: {time.monotonic() - started:.0f} s", file=sys.stderr)
    allowance = 3 * math.sqrt(ALPHA * (1 - ALPHA) / arguments.experiments)
    print(f"most A/As called at 4 launches and more: {worst:.2%} (alpha {ALPHA:.0%}, chance may add {allowance:.2%})")
    if arguments.json:
        drawn = {
            "seed": arguments.seed,
            "own_share": OWN_SHARE,
            "clock_gap_sd": [CLOCK_GAP, FAR_CLOCK_GAP],
            "drift_sd": DRIFT,
        }
        columns = ["table", *(one.name for kind in (Setting, Rates) for one in dataclasses.fields(kind))]
        rows = ",\n".join(json.dumps(row) for row in data)
        text = f'{{"noise": {json.dumps(drawn)},\n"columns": {json.dumps(columns)},\n"rows": [\n{rows}\n]}}\n'
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(text, encoding="utf-8")
    return 1 if worst > ALPHA + allowance else 0


if __name__ == "__main__":
    sys.exit(main())
