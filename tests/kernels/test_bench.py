"""The benchmark without a GPU: it says that it needs one, and knows what a step multiplies by."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEVICE

from pq2 import bench


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a CUDA device")
def test_nothing_is_measured_on_a_cpu() -> None:
    done = subprocess.run([sys.executable, "-m", "pq2.bench"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "needs a CUDA device: nothing is measured on a CPU" in done.stderr


def test_every_documented_command_is_one() -> None:
    lines = [
        line.split("python -m pq2.bench", 1)[1] for line in bench.__doc__.splitlines() if line.startswith("    python")
    ]
    commands = [re.split(r"\s{2,}", line)[0].split() for line in lines]
    parsed = [vars(bench.parser().parse_args(command)) for command in commands]
    assert parsed[0] == {"shape": "hybrid-27b", "rows": [1], "tune": False, "json": None}
    assert parsed[1]["shape"] == "qwen3-8b"
    assert parsed[2]["rows"] == [1, 16, 2048]
    assert parsed[3]["tune"]
    assert parsed[4]["json"] == Path("FILE")


def test_shapes_that_were_not_tuned_get_what_is_best_most_often() -> None:
    best = {"1x128": [4, 32, 1], "2x128": [8, 8, 1], "3x128": [8, 8, 1]}
    assert bench.with_default(best) == {"default": [8, 8, 1], **best}


def test_a_step_is_told_with_its_floor_and_its_sum() -> None:
    rows = [
        {"n": 16384, "k": 5120, "count": 48, "m": 1, "bytes": 4_000_000, "s": {"legacy": 20e-6, "single": 10e-6}},
        {"n": 5120, "k": 6144, "count": 2, "m": 1, "bytes": 2_000_000, "s": {"legacy": 10e-6, "single": 5e-6}},
    ]
    lines = bench.table_lines(rows, 1e12)
    assert lines[2] == "| N x K | count | floor | legacy | single |"
    assert lines[4] == "| 16384 x 5120 | 48 | 4.00 | 20.00 | 10.00 |"
    assert lines[6] == "| step, ms | 50 | 0.196 | 0.980 | 0.490 |"


def test_the_launches_tried_are_launches_that_the_tables_have() -> None:
    from pq2.dispatch import table

    _, rows = table("sm_90")
    tuned = {(one.n, one.k) for shape in bench.TUNED_SHAPES for one in bench.projections(shape) if one.converted}
    assert {tuple(launch) for launch in rows.values()} <= set(bench.TUNE)
    assert {name for name in rows if name != "default"} & {f"{n}x{k}" for n, k in tuned}
