"""How long commands take to start and `compare` takes on 1,000 launch records: medians, and ratios to an empty interpreter.

    python -m tests.benchmarks.startup [--runs 125] [--rounds 5] [--folder RUNS]

Each measurement is a process of its own, in turn with an empty interpreter's, so that both see the same machine. The
records are made (`tests.synthetic`): runs of eight launches with a decode cell of four requests and eight questions with
the log-probabilities of their answers, 40 KB a launch; every answer of a run is another run's too. `--folder` compares
what is there instead.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.synthetic import Made, write_run


def write_runs(folder: Path, count: int) -> None:
    """Runs whose candidate is 5% faster, each with its own noise."""
    draw = random.Random(0)
    for index in range(count):
        write_run(
            folder / f"{index:04}",
            {
                "baseline": [Made(speed=100 + draw.gauss(0, 0.5)) for _ in range(4)],
                "candidate": [Made(speed=105 + draw.gauss(0, 0.5)) for _ in range(4)],
            },
        )


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one process, its children's included."""
    before = os.times()
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=False)
    wall = time.perf_counter() - started
    after = os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=125, help="of eight launches")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="compare these records instead of made ones")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="abharness-startup-") as made:
        folder = arguments.folder or Path(made)
        if arguments.folder is None:
            write_runs(folder, arguments.runs)
        cli = ["-m", "abharness.cli"]
        commands = {
            "an empty interpreter": ["-c", "pass"],
            "abharness --help": [*cli, "--help"],
            "abharness compare --help": [*cli, "compare", "--help"],
            f"abharness compare, {8 * arguments.runs} launches": [*cli, "compare", str(folder)],
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(arguments.rounds):
            for name, command in commands.items():
                taken[name].append(seconds(command))
    empty = statistics.median(wall for wall, _ in taken["an empty interpreter"])
    print(f"{'':45} {'wall ms':>8} {'CPU ms':>8} {'above empty ms':>15}")
    for name, values in taken.items():
        wall, cpu = (statistics.median(part) for part in zip(*values, strict=True))
        print(f"{name:45} {wall * 1e3:8.0f} {cpu * 1e3:8.0f} {(wall - empty) * 1e3:15.0f}")


if __name__ == "__main__":
    main()
