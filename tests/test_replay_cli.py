"""`abharness replay` from the command line to its records, on a GPU that is not there: its driver and worker are fakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from abharness.replay.records import Calibration, Replay, read_record

ROOT = Path(__file__).parent.parent
FAKE_NVML = Path(__file__).parent / "fake_nvml"
GPU = {"uuid": "GPU-11111111", "name": "Fake H", "used": 2**20, "pids": [], "limit_mw": 700_000}
SERVED = ROOT / "results" / "pq2-single"
OLD = {"us": 8.0, "kernels": ["pq2_quantize_kernel", "pq2_legacy_single_kernel"]}
NEW = {"us": 7.0, "kernels": ["pq2_quantize_kernel", "pq2_single_kernel"]}


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def record(self) -> Path:
        """Folder of the record that was made last."""
        return max(self.folder.glob("results/*/*"), key=lambda path: path.stat().st_mtime)

    @property
    def replay(self) -> Replay:
        return read_record(self.record / "replay.json", Replay)


@dataclass(frozen=True)
class Bench:
    """A folder with a capture, and a GPU."""

    folder: Path

    def command(self, *arguments: str, nvml: list[dict[str, Any]] | None = None) -> Outcome:
        gpu_dir = self.folder / "gpu"
        gpu_dir.mkdir(exist_ok=True)
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "TMPDIR": os.environ["TMPDIR"],
            "PYTHONPATH": f"{FAKE_NVML}:{ROOT}",
            "FAKE_NVML": json.dumps([GPU] if nvml is None else nvml),
            "FAKE_GPU_DIR": str(gpu_dir),
        }
        argv = [sys.executable, "-m", "abharness.cli", "replay", *arguments]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False, cwd=self.folder)
        return Outcome(done.returncode, done.stdout, done.stderr, self.folder)

    def replay(
        self, action: str, functions: dict[str, Any], *arguments: str, nvml: list[dict[str, Any]] | None = None
    ) -> Outcome:
        python = self.folder / "python"
        if not python.exists():
            python.write_text(f"#!/bin/sh\nexec {sys.executable} -m tests.fake_worker\n")
            python.chmod(0o755)
        told = [
            "--python", str(python), "--env", f"FAKE_REPLAY={json.dumps(functions)}",
            "--env", f"FAKE_GPU_DIR={self.folder / 'gpu'}", "--seconds", "0.3", "--pause", "0",
        ]  # fmt: skip
        return self.command(action, "capture", *told, *arguments, nvml=nvml)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    made = Bench(tmp_path)
    assert made.command("synthesize", "qwen3-8b", "-o", "capture").code == 0
    return made


def test_candidates_are_checked_timed_and_put_beside_clock_and_power(bench: Bench) -> None:
    done = bench.replay("run", {"old": OLD, "new": NEW}, "--production", "old", "--candidate", "new=new")
    assert done.code == 0, done.err
    replay = done.replay
    assert (replay.status, replay.device.name, replay.device.power_limit_w) == ("completed", "Fake H", 700.0)
    assert [(one.name, one.bit_identical, one.compared) for one in replay.checks] == [
        ("production", None, True),
        ("new", True, True),
    ]
    old, new = replay.segments
    assert (old.step_s, new.step_s) == pytest.approx((145 * 8e-6, 145 * 7e-6))
    assert old.gpu is not None
    assert (old.gpu.sm_clock_mhz, old.gpu.power_w) == (1500, 700)
    assert old.positions_s == pytest.approx([8e-6] * 145, rel=1e-2)
    assert (new.kernels, set(new.kernels_of)) == ([["pq2_quantize_kernel", "pq2_single_kernel"]], {0})
    assert "new" in done.out
    assert "-12.50%" in done.out
    assert (done.record / "report.txt").read_text() == done.out
    assert f"records in {done.record.relative_to(bench.folder)}" in done.err
    shown = bench.command("show", str(done.record))
    assert (shown.code, shown.out) == (0, done.out)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"error": 0.5}, "0.self_attn.qkv_proj: off by 5.00e-01 against fake:reference (--tolerance 0.01): not timed"),
        ({"error": None}, "the result is not finite: not timed"),
        ({"errors": {"4096x12288": 0.011}}, "0.mlp.down_proj: off by 1.10e-02"),
    ],
)
def test_a_wrong_candidate_is_told_and_not_timed(bench: Bench, wrong: dict[str, Any], told: str) -> None:
    done = bench.replay("run", {"old": OLD, "new": NEW | wrong}, "--production", "old", "--candidate", "new=new")
    assert done.code == 0
    assert told in done.err
    assert "not timed" in done.out
    assert [one.candidate for one in done.replay.segments] == ["production"]


def test_production_that_is_wrong_ends_it(bench: Bench) -> None:
    done = bench.replay("run", {"old": OLD | {"error": 0.5}}, "--production", "old")
    assert done.code == 4
    assert "there is nothing to compare with" in done.err
    assert (done.replay.status, done.replay.segments) == ("failed", [])


def test_what_was_measured_is_kept_when_a_candidate_ends_the_worker(bench: Bench) -> None:
    dying = NEW | {"dies": int(signal.SIGSEGV)}
    done = bench.replay("run", {"old": OLD, "new": dying}, "--production", "old", "--candidate", "new=new")
    assert done.code == 4
    assert "the process that replays ended (signal SIGSEGV) when asked to sustain" in done.err
    assert (done.replay.status, [one.candidate for one in done.replay.segments]) == ("failed", ["production"])
    assert "SIGSEGV" in (done.replay.error or "")


def test_results_that_differ_when_calls_follow_each_other_are_not_timed(bench: Bench) -> None:
    racing = NEW | {"differs": "it gives other results when calls follow each other: not timed"}
    done = bench.replay("run", {"old": OLD, "new": racing}, "--production", "old", "--candidate", "new=new")
    assert done.code == 0, done.err
    (check,) = [one for one in done.replay.checks if one.name == "new"]
    assert check.wrong is not None
    assert "other results when calls follow each other" in check.wrong
    assert [one.candidate for one in done.replay.segments] == ["production"]


def test_production_whose_results_differ_in_a_graph_ends_it(bench: Bench) -> None:
    racing = OLD | {"differs": "it gives other results when calls follow each other: not timed"}
    done = bench.replay("run", {"old": racing, "new": NEW}, "--production", "old", "--candidate", "new=new")
    assert done.code == 4
    assert "other results when calls follow each other" in done.err
    assert "there is nothing to compare with" in done.err


def test_a_candidate_that_a_graph_refused_is_not_timed_with_spins_either(bench: Bench) -> None:
    folder = str(calibrated(bench))
    racing = NEW | {"differs": "it gives other results when calls follow each other: not timed"}
    arguments = ("--production", "old", "--candidate", "new=new", "--calibration", folder)
    done = bench.replay("run", {"old": OLD, "new": racing}, *arguments)
    assert done.code == 0, done.err
    assert done.err.count("other results") == 1
    assert [(one.candidate, one.proxy) for one in done.replay.segments] == [("production", False), ("production", True)]


def test_a_trace_that_lost_a_kernel_leaves_positions_unknown_and_the_step_timed(bench: Bench) -> None:
    done = bench.replay("run", {"old": OLD | {"loses": True}}, "--production", "old")
    assert done.code == 0, done.err
    (segment,) = done.replay.segments
    assert segment.positions_s is None
    assert segment.positions_absent is not None
    assert "no times of positions" in done.out


def calibrated(bench: Bench) -> Path:
    done = bench.replay(
        "calibrate", {"old": OLD}, "--production", "old", "--serving", str(SERVED), "--variant", "baseline"
    )
    assert done.code == 0, done.err
    return done.record


def test_the_sequence_calibrate_run_validate_against_a_run_that_an_h200_served(bench: Bench) -> None:
    folder = calibrated(bench)
    found = read_record(folder / "calibration.json", Calibration)
    rows = found.rows[1]
    assert (found.gpu_name, found.power_limit_w, rows.serving_clock_mhz) == ("Fake H", 700.0, 1980.0)
    assert [point.scale for point in rows.points] == [0.0, 0.5, 1.0, 1.5]
    assert rows.points[0].sm_clock_mhz == 1500
    # The stand-in's clock never reaches the 1,980 MHz of the H200, and the calibration says so.
    assert (rows.matched, rows.scale) == ("neither", 1.5)
    assert "no length of spins brings the clock to serving's 1980 MHz" in rows.remark
    assert any("served on NVIDIA H200" in note for note in read_record(folder / "replay.json", Replay).notes)

    done = bench.replay(
        "run", {"old": OLD, "new": NEW}, "--production", "old", "--candidate", "new=new", "--calibration", str(folder)
    )
    assert done.code == 0, done.err
    assert [(one.candidate, one.proxy) for one in done.replay.segments] == [
        ("production", False), ("new", False), ("production", True), ("new", True),
    ]  # fmt: skip
    bare, spun = done.replay.segments[1], done.replay.segments[3]
    assert spun.step_s - bare.step_s > 1e-3
    assert spun.positions_s == pytest.approx(bare.positions_s, rel=1e-2)  # spins are charged to no position
    assert "1500 MHz, is 24% below serving's 1980 MHz" in done.out
    assert "look slower here" in done.out

    (trace,) = SERVED.glob("*/launches/1-candidate/kernels/*decode*.parquet")
    placed = bench.command("positions", str(trace), str(done.record), "--candidate", "new")
    assert placed.code == 0, placed.err
    assert "4096x4096 x36" in placed.out
    assert " 11 steps; of each" in f" {placed.out.splitlines()[-1]}"

    valid = bench.command("validate", str(done.record), "--candidate", "new", "--serving", str(SERVED))
    assert valid.code == 0, valid.err
    lines = [line.split() for line in valid.out.splitlines()]
    replay, proxy, serving = (
        next(line for line in lines if line[:2] == ["1", way]) for way in ("replay", "replay", "serving")
    )
    assert replay[-3:-1] == ["-5.62%", "+1.48"]  # 145 us of a token of 2.58 ms; the server's went down by 7.1%
    assert "-7.10%" in serving
    assert "with spins" in valid.out
    assert proxy
    assert "replayed on Fake H, served on NVIDIA H200" in valid.out
    assert (done.record / "validation.txt").read_text() == valid.out


def test_a_calibration_of_another_card_is_refused(bench: Bench) -> None:
    path = calibrated(bench) / "calibration.json"
    path.write_text(path.read_text().replace("Fake H", "Other"))
    done = bench.replay("run", {"old": OLD}, "--production", "old", "--calibration", str(path))
    assert done.code == 2
    assert "does not apply here: it was made on Other, this is Fake H" in done.err
    other = bench.replay("run", {"old": OLD}, "--production", "old", "--calibration", str(path), "--rows", "4")
    assert other.code == 2
    assert "has 1 rows, and 4 is not between them" in other.err
    made = len(list(bench.folder.glob("results/*/*")))
    tune = ("--function", "old", "--options", "options", "--calibration", str(path), "--rows", "1", "--rows", "4")
    assert bench.replay("tune", {"old": OLD, "options": {"us": 0, "options": []}}, *tune).code == 2
    assert len(list(bench.folder.glob("results/*/*"))) == made  # before anything ran


def test_calibrating_with_another_kernel_than_the_server_ran_is_refused(bench: Bench) -> None:
    done = bench.replay("calibrate", {"new": NEW}, "--production", "new", "--serving", str(SERVED))
    assert done.code == 2
    assert "the step runs other layers" in done.err
    assert len(done.replay.segments) == 1  # what was measured before


OPTIONS = [{"us": 7.5}, {"us": 6.0, "same": False}, {"us": 5.0, "error": 0.4}]


def test_tuning_ranks_marks_what_is_not_identical_and_writes_a_table(bench: Bench) -> None:
    functions = {"old": OLD, "options": {"us": 0, "options": OPTIONS}}
    tune = ("--function", "old", "--options", "options", "--table", "table", "--to", "table.json")
    done = bench.replay("tune", functions, *tune)
    assert done.code == 0, done.err
    first, *_, last = done.replay.segments
    assert (first.candidate, last.candidate) == ("production", "production")
    assert json.loads((bench.folder / "table.json").read_text()) == {
        "table": {"1": dict.fromkeys(dict.fromkeys(done.replay.shapes), OPTIONS[1])}
    }
    lines = [line.split() for line in done.out.splitlines()]
    assert ['{"us":6.0,"same":false}', "6.00", "-25.00%", "differ"] in lines
    assert ['{"us":7.5}', "7.50", "-6.25%", "identical"] in lines
    assert "option-2 is wrong for" in done.out
    assert all("5.0" not in line[0] for line in lines if line)

    exact = bench.replay("tune", functions, *tune, "--exact", "--most", "1")
    assert exact.code == 0, exact.err
    assert set(json.loads((bench.folder / "table.json").read_text())["table"]["1"]["4096x4096"]) == {"us"}
    assert "the first 1 of 3 options were tried (--most)" in exact.out


def test_no_ranking_and_no_table_of_a_machine_that_drifted(bench: Bench) -> None:
    functions = {"old": OLD | {"us_last": 8.3}, "options": {"us": 0, "options": [{"us": 6.0}]}}
    done = bench.replay(
        "tune", functions, "--function", "old", "--options", "options", "--table", "table", "--to", "table.json"
    )
    assert done.code == 0, done.err
    assert "no ranking: production took +3.75% between its two segments" in done.out
    assert "no table" in done.out
    assert not (bench.folder / "table.json").exists()
    assert len(done.replay.segments) == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--rows", "0"], "--rows 0: expected 1 to 65536"),
        (["--seconds", "0"], "--seconds 0: expected more than 0"),
        (["--pause", "-1"], "--pause -1"),
        (["--tolerance", "2"], "--tolerance 2: expected more than 0 and less than 1"),
        (["--candidate", "new"], "--candidate new: expected NAME=module:function"),
        (["--candidate", "a=b:c", "--candidate", "a=b:d"], "--candidate a: the name is taken"),
        (["--candidate", "production=b:c"], "--candidate production: the name is taken"),
        (["--env", "X"], "--env X: expected NAME=VALUE"),
        (["--kernels", "nowhere"], "nowhere does not exist"),
        (["--calibration", "nothing.json"], "nothing.json"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_runs(bench: Bench, arguments: list[str], told: str) -> None:
    done = bench.replay("run", {"old": OLD}, "--production", "old", *arguments)
    assert done.code == 2, done.err
    assert told in done.err
    assert not (bench.folder / "results").exists()


def test_who_else_is_on_the_gpu_and_what_holds_its_clock_are_told(bench: Bench) -> None:
    busy = bench.replay("run", {"old": OLD}, "--production", "old", nvml=[GPU | {"pids": [1, 2]}])
    assert busy.code == 0, busy.err
    assert "2 other processes were on the GPU before it began" in busy.out
    capped = bench.replay("run", {"old": OLD | {"reasons": ["sw_power_cap"]}}, "--production", "old")
    assert "other processes" not in capped.out
    (line,) = [line for line in capped.out.splitlines() if line.startswith("production") and "MHz" not in line][1:]
    assert line.endswith("sw_power_cap 100%")


def test_without_a_gpu_it_says_so(bench: Bench) -> None:
    done = bench.command("run", "capture", nvml=[])
    assert done.code == 2
    assert "no GPU: NVML sees no device" in done.err
    assert "--device cpu" in done.err


def test_an_interpreter_without_torch_is_told(bench: Bench) -> None:
    done = bench.command("run", "capture", "--seconds", "0.1", "--device", "cpu")
    assert done.code == 4
    assert "No module named 'torch'" in done.err
    assert "--python names the interpreter" in done.err
    assert bench.command("run", "capture", "--python", "nowhere", "--device", "cpu").code == 2
