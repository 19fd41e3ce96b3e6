"""Kills `abharness run` with SIGKILL on real vLLM servers, at points over a run's whole life, and shows what is left.

    python -m tests.benchmarks.kills --points 10 --seed 1 --folder /tmp/kills

Uses `experiments/quickstart.yaml`, made small: the managed CPU environment and model, two launches. Of every two points
the second kills the guard as well. After each kill: what was left, until when, and whether `--resume` ended in a whole
report with every complete record as it was. Exit status 1 where anything stayed or was lost.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import time
from pathlib import Path

from tests.conftest import free_port
from tests.kills import Point, Scene

SPEC = Path(__file__).parent.parent.parent / "experiments" / "quickstart.yaml"
SMALL = ("design.launches_per_variant=1", "design.primary=null", "workloads.decode.max_concurrency=1",
         "workloads.decode.num_prompts=2", "workloads.decode.output_len=8", "workloads.gsm8k.num_questions=2",
         "workloads.gsm8k.max_tokens=16", "workloads.prefill.input_lens=[64]", "workloads.prefill.num_prompts=1",
         "workloads.gsm8k.max_concurrency=2")  # fmt: skip

PHASES = [
    Point(line="baseline: start$"),
    Point(line="baseline: start$", delay_s=8.0),
    Point(line="verify before_load"),
    Point(line="decode .* warm-up"),
    Point(line="decode .* x1$"),
    Point(line="gsm8k 2 questions"),
    Point(line="baseline: stop"),
    Point(file="launches/0-baseline/.*.json.*"),
    Point(line="candidate: start$", delay_s=5.0),
    Point(line="candidate: decode .* x1$"),
]


def points(count: int, seed: int) -> list[Point]:
    """Every other point by phase, the others by time."""
    draw = random.Random(seed)
    phases = draw.sample(PHASES, len(PHASES))
    return [phases[number // 2 % len(phases)] if number % 2 else Point(delay_s=round(draw.uniform(1, 60), 1))
            for number in range(count)]  # fmt: skip


def one(point: Point, folder: Path, *, guard: bool) -> list[str]:
    """One kill; returns what went wrong, and prints a row of the table."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    arguments = [str(SPEC), *(part for key in SMALL for part in ("--set", key))]
    scene = Scene(folder, arguments, free_port())
    harness = scene.start()
    if not scene.wait_for(point, harness):
        print(f"{point}: the run was over before (status {harness.returncode})", flush=True)
        return []
    where = (scene.stderr.read_text().splitlines() or ["(nothing said yet)"])[-1][9:70]
    alive = len(scene.processes())
    scene.kill(harness, guard=guard)
    killed_s = time.monotonic()
    problems = []
    if not guard:
        problems += [f"left: {name}" for name in scene.wait_until_clear(90)]
    clear_s = time.monotonic() - killed_s
    kept, lines = scene.records(), scene.measured()
    code = scene.start("--resume").wait(600)
    if code == 2 and "nothing to resume" in scene.stderr.read_text():
        code = scene.start().wait(600)
    problems += [f"exit status {code}"] if code not in (0, 1, 3) else []
    problems += [f"left after --resume: {name}" for name in scene.wait_until_clear(30)]
    now = scene.records()
    problems += [f"changed: {path}" for path, digest in kept.items() if now.get(path) != digest]
    problems += [f"{lines} lines before, {scene.measured()} after"] if scene.measured() < lines else []
    done = len(list(folder.glob("results/*/*/launches/*/launch.json")))
    problems += [f"{done} complete launches of 2"] if done != 2 else []
    problems += [] if any(folder.glob("results/*/*/report.md")) else ["no report"]
    cleared = "by --resume" if guard else f"{clear_s:.1f} s"
    print(
        f"| {point} | {where} | {'harness and guard' if guard else 'harness'} | {alive} | {cleared} | {len(kept)} files, "
        f"{lines} lines | {code} | {'; '.join(problems) or 'ok'} |",
        flush=True,
    )
    return problems


def main() -> int:
    """Run the kills and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="for the runs; emptied first; a short path")
    arguments = parser.parse_args()
    print("| point | last line said | killed | processes | clear after | kept | --resume | outcome |")
    print("| --- | --- | --- | ---: | ---: | --- | ---: | --- |", flush=True)
    bad = 0
    for number, point in enumerate(points(arguments.points, arguments.seed)):
        # Of each kind of point half.
        guard = number % 4 in (1, 2)
        bad += bool(one(point, arguments.folder / str(number), guard=guard))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
