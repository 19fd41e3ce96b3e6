"""Replays on a real GPU: graphs, traces of their nodes, clocks, and this repository's kernels."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from abharness.cli import main
from abharness.replay.records import Replay, read_record

ROOT = Path(__file__).parent.parent
PYTHON = os.environ.get("ABHARNESS_GPU_PYTHON", sys.executable)
SIZES = """\
name: small
blocks:
  - repeat: 4
    layers: [{name: up, n: 4096, k: 1024}, {name: down, n: 1024, k: 4096}]
"""
PQ2 = [
    "--kernels", str(ROOT / "kernels" / "pq2"), "--weights-by", "pq2.replaying:weights",
    "--reference", "pq2.replaying:reference?columns=512", "--production", "pq2.replaying:legacy",
]  # fmt: skip
pytestmark = pytest.mark.gpu


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sizes.yaml").write_text(SIZES)
    monkeypatch.chdir(tmp_path)
    assert main(["replay", "synthesize", "sizes.yaml", "-o", "capture", "--rows", "1", "--rows", "8"]) == 0
    return tmp_path


def replay(here: Path, action: str, *arguments: str) -> Replay:
    assert main(["replay", action, "capture", "--python", PYTHON, "--seconds", "0.5", "--pause", "0", *arguments]) == 0
    folder = max(here.glob("results/replay-small/*"), key=lambda path: path.stat().st_mtime)
    return read_record(folder / "replay.json", Replay)


def test_a_step_of_dense_layers_is_timed_by_graph_and_by_its_nodes(here: Path) -> None:
    found = replay(here, "run", "--rows", "8")
    (check,) = found.checks
    assert (check.wrong, check.compared) == (None, True)
    assert check.reference == "abharness_replay.dense:reference"
    (segment,) = found.segments
    # 64 MiB of weights are little beside the L2 cache: the step is repeated over copies of them.
    assert found.device.l2_bytes is not None
    assert segment.copies * 64 * 2**20 >= 4 * found.device.l2_bytes
    assert segment.gpu is not None
    assert segment.gpu.sm_clock_mhz is not None
    assert segment.gpu.power_mean_w is not None
    assert found.device.power_limit_w is not None
    assert segment.positions_s is not None, segment.positions_absent
    assert segment.gaps_s is not None
    whole = sum(segment.positions_s) + sum(segment.gaps_s)
    assert 0.7 * segment.step_s < whole < 1.5 * segment.step_s  # a profiler slows kernels of a few microseconds


def test_pq2s_sets_are_right_and_exact_is_identical(here: Path) -> None:
    candidates = ["--candidate", "tuned=pq2.replaying:tuned", "--candidate", "exact=pq2.replaying:exact"]
    found = replay(here, "run", *PQ2, *candidates)
    assert [one.wrong for one in found.checks] == [None] * 6
    assert [one.bit_identical for one in found.checks if one.name == "exact"] == [True, True]
    for one in found.segments:
        assert one.positions_s is not None, one.positions_absent
        assert all(any("quantize" in name for name in names) for names in one.kernels)


def test_tuning_gives_a_table_that_can_be_read(here: Path) -> None:
    functions = ["--function", "pq2.replaying:tuned", "--options", "pq2.replaying:options", "--most", "3"]
    table = ["--table", "pq2.replaying:table", "--to", "table.json"]
    found = replay(here, "tune", "--rows", "8", *PQ2[:6], *functions, *table)
    assert [found.segments[0].candidate, found.segments[-1].candidate] == ["production", "production"]
    assert len(found.segments) > 2
    written = here / "table.json"
    if written.exists():  # nothing may be faster than production, or the machine may have drifted
        assert "tuned" in json.loads(written.read_text())
