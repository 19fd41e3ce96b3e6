"""Replays on real torch, in the managed CPU environment: without graphs or clocks, everything else as on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from abharness.cli import main
from abharness.replay.records import Replay, read_record

ROOT = Path(__file__).parent.parent
SIZES = """\
name: small
blocks:
  - repeat: 2
    layers: [{name: up, n: 384, k: 256}, {name: down, n: 256, k: 384}]
"""
FUNCTIONS = """\
import torch


def off(layer, by=0.0):
    weight = layer.tensors["weight"]
    return lambda x: torch.nn.functional.linear(x, weight) * (1 + by)


def at_the_end(layer):
    weight = layer.tensors["weight"]
    def call(x):
        result = torch.nn.functional.linear(x, weight)
        if layer.name == "1.down":
            result[-1, -1] = torch.nan
        return result
    return call


def racing(layer):
    calls, weight = [], layer.tensors["weight"]
    def call(x):
        calls.append(x)
        return torch.nn.functional.linear(x, weight) + (len(calls) > 1)
    return call


def options(layer):
    return [{"by": 0.005}, {"by": 0.5}, {"by": 0.0}] if layer.n == 384 else []


def table(arch, chosen):
    return repr((arch, chosen))
"""
pytestmark = pytest.mark.real


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sizes.yaml").write_text(SIZES)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert main(["replay", "synthesize", "sizes.yaml", "-o", "capture", "--rows", "2"]) == 0
    return tmp_path


def replay(action: str, *arguments: str) -> int:
    cpu = ["--python", "managed:cpu", "--device", "cpu", "--seconds", "0.2", "--pause", "0"]
    return main(["replay", action, "capture", *cpu, *arguments])


def newest(here: Path) -> Replay:
    folder = max(here.glob("results/replay-small/*"), key=lambda path: path.stat().st_mtime)
    return read_record(folder / "replay.json", Replay)


def test_what_is_wrong_is_seen_by_running_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"close": "mine:off?by=0.005", "off": "mine:off?by=0.1", "end": "mine:at_the_end", "race": "mine:racing"}
    assert replay("run", *(part for name, text in names.items() for part in ("--candidate", f"{name}={text}"))) == 0
    found = newest(here)
    checks = {one.name: one for one in found.checks}
    assert checks["production"].reference == "abharness_replay.dense:reference"
    assert 0 < (checks["production"].worst_relative_error or 0) < 5e-3  # the rounding of bf16
    assert checks["close"].wrong is None
    assert checks["close"].differing == ["384x256", "256x384"]
    assert "off by 1.0" in (checks["off"].wrong or "")
    assert "1.down: the result is not finite" in (checks["end"].wrong or "")
    assert "it gives other results when calls follow each other" in (checks["race"].wrong or "")
    assert [one.candidate for one in found.segments] == ["production", "close"]
    for one in found.segments:
        assert one.positions_s is not None
        assert len(one.positions_s) == 4
        assert 0 < one.step_p10_s <= one.step_s <= one.step_p90_s
        assert one.ended_s - one.started_s >= 0.2
    out = capsys.readouterr().out
    assert "384x256 x2" in out
    assert out.count("not timed") == 3


def test_tuning_tries_each_option_of_each_shape(here: Path) -> None:
    tuned = ("--function", "mine:off", "--options", "mine:options", "--table", "mine:table", "--to", "table.txt")
    assert replay("tune", *tuned) == 0
    found = newest(here)
    tried = {one.name: one for one in found.checks if one.name != "production"}
    assert [one.by_shape for one in found.checks if one.name == "option-1"] == [{"384x256": {"by": 0.5}}, {}]
    assert tried["option-0"].differing == ["384x256"]
    assert tried["option-2"].bit_identical
    names = [one.candidate for one in found.segments]
    assert names == ["production", "option-0", "option-2", "production"]


def test_pq2s_reference_replays_on_a_cpu_and_its_kernels_say_that_they_do_not(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq2 = ("--kernels", str(ROOT / "kernels" / "pq2"), "--weights-by", "pq2.replaying:weights")
    functions = ("--production", "pq2.replaying:reference", "--reference", "pq2.replaying:reference")
    assert replay("run", *pq2, *functions, "--rows", "2", "--rows", "3") == 0  # weights stay from one to the next
    found = newest(here)
    assert [(one.rows, one.worst_relative_error) for one in found.checks] == [(2, 0.0), (3, 0.0)]
    assert [one.rows for one in found.segments] == [2, 3]
    assert any(note.startswith("kernels pq2: sha256 ") for note in found.notes)
    assert replay("run", *pq2, "--production", "pq2.replaying:tuned") == 2
    assert "PathUnavailable: PQ2_KERNELS=tuned: these kernels run on CUDA" in capsys.readouterr().err
    assert json.loads((here / "capture" / "capture.json").read_text())["weights"] == "made"
