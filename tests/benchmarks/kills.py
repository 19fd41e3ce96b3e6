"""Kills `abharness run` with SIGKILL on real vLLM servers, at points over a run's whole life, and shows what is left.

    python -m tests.benchmarks.kills --points 10 --seed 1 --folder /tmp/kills

Uses `experiments/quickstart.yaml`, made small: the managed CPU environment and model, two launches. Each kill hits the run
that `--resume` went on with after the one before; of every two points one kills the guard as well. The table shows what
was left and until when; at the end `--resume` must come to a whole report. Exit status 1 where anything stayed, or where
anything measured was lost or changed.
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
    Point(line="start$"),
    Point(line="start$", delay_s=8.0),
    Point(line="start$", delay_s=20.0),
    Point(line="verify before_load"),
    Point(line="decode .* warm-up"),
    Point(line="decode .* x1$"),
    Point(line="gsm8k 2 questions"),
    Point(line="stop$"),
    Point(file="launches/*/.*.json.*"),
]


def points(count: int, seed: int) -> list[Point]:
    """Every other point by phase, the others by time."""
    draw = random.Random(seed)
    phases = draw.sample(PHASES, len(PHASES))
    return [phases[number // 2 % len(phases)] if number % 2 else Point(delay_s=round(draw.uniform(1, 60), 1))
            for number in range(count)]  # fmt: skip


def kill(scene: Scene, point: Point, *, guard: bool) -> list[str]:
    """Go on with the run and kill it once; returns what went wrong, and prints a row of the table."""
    harness = scene.start("--resume") if any(scene.folder.glob("results/*/*")) else scene.start()
    if not scene.wait_for(point, harness):
        print(f"| {point} | (the run ended before, status {harness.returncode}) |", flush=True)
        return [] if harness.returncode in (0, 1, 3) else [f"status {harness.returncode}"]
    said = (scene.said().strip().splitlines() or ["(nothing said yet)"])[-1][:60]
    kept, lines = scene.records(), scene.measured()
    scene.note_shared_memory()
    alive = len(scene.processes())
    scene.kill(harness, guard=guard)
    killed_s = time.monotonic()
    problems = [] if guard else [f"left: {name}" for name in scene.wait_until_clear(90)]
    clear_s = time.monotonic() - killed_s
    problems += lost(scene, kept, lines)
    print(
        f"| {point} | {said} | {'harness, guard' if guard else 'harness'} | {alive} | "
        f"{'by --resume' if guard else f'{clear_s:.1f} s'} | {len(kept)} files, {lines} lines | "
        f"{'; '.join(problems) or 'ok'} |",
        flush=True,
    )
    return problems


def lost(scene: Scene, kept: dict[str, str], lines: int) -> list[str]:
    """What is not on disk any more as it was."""
    now, problems = scene.records(), []
    problems += [f"changed: {path}" for path, digest in kept.items() if now.get(path) != digest]
    return problems + ([f"{lines} lines before, {scene.measured()} after"] if scene.measured() < lines else [])


def last(scene: Scene) -> list[str]:
    """Go on to the end; returns what went wrong."""
    kept, lines = scene.records(), scene.measured()
    code = scene.start("--resume").wait()
    problems = [f"exit status {code}"] if code not in (0, 1, 3) else []
    problems += [f"left at the end: {name}" for name in scene.wait_until_clear(30)] + lost(scene, kept, lines)
    done = len(list(scene.folder.glob("results/*/*/launches/*/launch.json")))
    problems += [f"{done} complete launches of 2"] if done != 2 else []
    problems += [] if any(scene.folder.glob("results/*/*/report.md")) else ["no report"]
    print(
        f"| the last --resume | status {code}, {done} launches on record | {'; '.join(problems) or 'ok'} |", flush=True
    )
    return problems


def main() -> int:
    """Run the kills and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--at", action="append", metavar="REGEX[+S]", help="these points, in this order: a line on stderr"
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the runs; emptied first; a short path")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    scene = Scene(arguments.folder, [str(SPEC), *(part for key in SMALL for part in ("--set", key))], free_port())
    print("| point | last line said | killed | processes | clear after | kept | outcome |")
    print("| --- | --- | --- | ---: | ---: | --- | --- |", flush=True)
    problems = []
    chosen = [
        Point(line=line, delay_s=float(delay or 0))
        for line, _, delay in (at.partition("+") for at in arguments.at or ())
    ]
    for number, point in enumerate(chosen or points(arguments.points, arguments.seed)):
        # Of each kind of point half.
        problems += kill(scene, point, guard=number % 4 in (1, 2))
    return 1 if problems + last(scene) else 0


if __name__ == "__main__":
    sys.exit(main())
