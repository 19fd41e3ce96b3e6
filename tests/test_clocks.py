"""Clocks, throttling and gaps of sampling, from a fake GPU through the command line to the verdict."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from abharness.checks import OTHER_CPUS_LIMIT
from abharness.cli import main
from abharness.record import Evidence, LaunchRecord, RequestLine
from abharness.samples import read_samples
from abharness.storage import read_lines, read_model
from abharness.windows import GpuWindow
from tests.conftest import FAKE_SITE
from tests.synthetic import Made, gpu, write_run

ROOT = Path(__file__).parent.parent
FAKE_NVML = Path(__file__).parent / "fake_nvml"
FIRST, SECOND = "GPU-11111111", "GPU-22222222"
CANDIDATE = {"when": {"FAKE_SWITCH": "fast"}}


def device(uuid: str) -> dict[str, Any]:
    return {"uuid": uuid, "name": "Fake H", "used": 2**20, "pids": [], "limit_mw": 700_000}


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    comparison: dict[str, Any]
    run: Path

    def launch(self, label: str) -> LaunchRecord:
        return read_model(self.run / "launches" / label / "launch.json", LaunchRecord)

    def advice(self, code: str) -> list[str]:
        return [item["finding"]["message"] for item in self.comparison["advice"] if item["finding"]["code"] == code]

    def seen(self, code: str) -> list[str]:
        return [item["finding"]["message"] for item in self.comparison["seen"] if item["finding"]["code"] == code]


def spec(
    folder: Path,
    gpu_dir: Path,
    faults: dict[str, Any],
    *,
    telemetry: str = "{interval_s: 0.05}",
    num_prompts: str = "8",
) -> Path:
    path = folder / "fake.yaml"
    path.write_text(f"""\
experiment: fake
server:
  model: some/model
  env:
    PYTHONPATH: "{FAKE_SITE}"
    FAKE_GPU_DIR: "{gpu_dir}"
    FAKE_TPOT_S: "0.01"
    FAKE_SPEEDS: '{{"fast": 1.0}}'
    FAKE_FAULTS: '{json.dumps(faults)}'
  ready_timeout_s: 60
variants:
  baseline: {{env: {{FAKE_SWITCH: null}}}}
  candidate: {{env: {{FAKE_SWITCH: fast}}}}
design: {{launches_per_variant: 1}}
telemetry: {telemetry}
workloads:
  - {{name: decode, kind: decode, input_len: 16, output_len: 32, max_concurrency: 2, num_warmups: 0,
     num_prompts: {num_prompts}}}
""")
    return path


def run(
    folder: Path,
    faults: dict[str, Any] | None = None,
    *,
    devices: list[dict[str, Any]] | None = None,
    nvml: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    **options: str,
) -> Outcome:
    """`abharness run` in a process of its own, whose NVML bindings are the fake ones."""
    gpu_dir = folder / "gpu"
    gpu_dir.mkdir()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PYTHONPATH": f"{FAKE_NVML}:{ROOT}",
        "FAKE_NVML": json.dumps([device(FIRST)] if devices is None else devices),
        "FAKE_GPU_DIR": str(gpu_dir),
        "FAKE_NVML_FAULTS": json.dumps(nvml or {}),
        **(environ or {}),
    }
    path = spec(folder, gpu_dir, faults or {}, **options)
    argv = [sys.executable, "-m", "abharness.cli", "run", str(path), "-o", str(folder / "results")]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    runs = list((folder / "results" / "fake").glob("*")) if (folder / "results").exists() else []
    if not runs:
        return Outcome(done.returncode, done.stdout + done.stderr, {}, folder)
    found = json.loads((runs[0] / "comparison.json").read_text())["comparisons"][0]
    return Outcome(done.returncode, done.stdout + done.stderr, found, runs[0])


def test_an_honest_run_on_a_gpu_has_its_samples_windows_and_pids_on_record(tmp_path: Path) -> None:
    done = run(tmp_path, {"gpu": {"power_w": 412.5, "reasons": ["sw_power_cap"]}})
    assert (done.code, done.comparison["codes"]) == (0, []), done.out
    told = {item["finding"]["code"] for item in done.comparison["advice"]}
    assert told - {"host_busy"} <= {"effect_unproven"}
    # Other programs at work on the test's machine are told of, and only where the record has them.
    hosts = [cell.host for label in ("0-baseline", "1-candidate") for cell in done.launch(label).cells]
    busy = any(max(host.other_cpus, host.stolen_cpus) > OTHER_CPUS_LIMIT for host in hosts if host)
    assert ("host_busy" in told) is busy
    for label in ("0-baseline", "1-candidate"):
        record = done.launch(label)
        (cell,) = record.cells
        assert cell.gpus is not None
        (window,) = cell.gpus
        assert window.uuid == FIRST
        assert window.samples > 0
        assert window.coverage == window.samples / window.expected_samples
        assert (window.sm_clock_mhz, window.sm_clock_mhz_min, window.mem_clock_mhz) == (1980, 1980, 2619)
        assert (window.power_w, window.temperature_c_max, window.utilization) == (412.5, 55, 0.97)
        assert window.reasons == {"sw_power_cap": 1.0}
        assert window.memory_used_bytes_before == 2**20
        assert window.memory_used_bytes_max == 2**20 + 4 * 2**30
        samples = read_samples(done.run / "launches" / label / "telemetry.parquet")
        inside = [one for one in samples if cell.started_s <= one.t_s <= cell.ended_s]
        assert len(inside) == window.samples
        assert {one.reasons for one in inside} == {("sw_power_cap",)}
        assert record.sampling is not None
        assert record.sampling.samples == len(samples)
        assert record.sampling.cpu_s > 0
        assert (record.sampling.asked_interval_s, record.sampling.power_kind) == (0.05, {FIRST: "instant"})
        assert record.sampling.interval_s >= 0.05
        assert FIRST in record.sampling.energy_period_s
        assert record.sampling.idle_power_w[FIRST] == pytest.approx(412.5, rel=0.2)
        assert (record.sampling.idle_ended_s or 0) < cell.started_s, "before the load"
        assert (window.power_kind, window.power_mean_w, window.power_limit_w) == ("instant", 412.5, 700)
        assert {one.power_limit_w for one in inside} == {700}
        assert all(one.energy_j is not None for one in inside)
        assert max(one.t_s for one in samples) > cell.ended_s, "the last window has a sample behind its end"
        assert cell.gpus_steady is not None
        assert cell.gpus_steady[0].samples <= window.samples
        evidence = read_model(done.run / "launches" / label / "evidence.json", Evidence)
        engines = [one.pid for one in evidence.environment[0].processes if one.name.startswith("VLLM::EngineCore")]
        assert evidence.gpu_pids_seen == {FIRST: engines}
        assert len(evidence.gpu_pids_first_seen_s[FIRST]) == 1


# A process that takes memory on the device once an engine works there, and goes when that engine goes.
VISITOR = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
while not (there := list(folder.glob("*.json"))):
    time.sleep(0.01)
(folder / f"{os.getpid()}.json").write_text(json.dumps({"memory_bytes": 2**20}))
while pathlib.Path("/proc", there[0].stem).exists():
    time.sleep(0.01)
"""


def test_a_process_that_comes_to_the_gpu_while_the_server_starts_fails_the_launch(tmp_path: Path) -> None:
    visitor = subprocess.Popen([sys.executable, "-c", VISITOR, str(tmp_path / "gpu")])
    try:
        done = run(tmp_path)
    finally:
        visitor.kill()
        visitor.wait()
    assert done.code == 4
    assert "foreign_gpu_process" in done.comparison["codes"]
    assert f"pid {visitor.pid}" in done.out


# Each row: faults of the fake server, faults of NVML, the invalidating code, what the message must say.
LIES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "G3 the candidate's SM clock falls": (
        {"gpu": {**CANDIDATE, "sm_clock_mhz": 1520, "reasons": ["sw_power_cap"]}}, {}, "clocks_differ", "1980 MHz"
    ),
    "the device slows down for heat": (
        {"gpu": {"reasons": ["sw_thermal_slowdown"]}}, {}, "throttled", "sw_thermal_slowdown"
    ),
    "F5 the sampled device idles": ({"gpu": {"utilization": 0}}, {}, "telemetry_gap", "not the one that works"),
    "F5 the sampled device's memory is not taken": (
        {"gpu": {"memory_bytes": 0}}, {}, "telemetry_gap", "not the one that works"
    ),
    "NVML fails from some moment on": (
        {}, {"fail": {"after": 4, "times": 10_000}}, "telemetry_gap", "Unknown Error"
    ),
    "a reading takes longer than the interval": ({}, {"slow_s": 0.25}, "telemetry_gap", "samples in a window"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_the_gpu_ends_in_its_code(lie: str, tmp_path: Path) -> None:
    faults, nvml, code, text = LIES[lie]
    done = run(tmp_path, faults, nvml=nvml)
    assert (done.code, done.comparison["codes"]) == (3, [code]), done.out
    assert text in " ".join(done.seen(code)), done.out
    assert done.comparison["cells"][0]["codes"] == [code]


def test_f5_the_work_is_on_the_device_that_is_not_sampled(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        {"gpu": {"uuid": SECOND}},
        devices=[device(FIRST), device(SECOND)],
        environ={"CUDA_VISIBLE_DEVICES": FIRST},
    )
    assert done.comparison["codes"] == ["telemetry_gap"], done.out
    assert "not the one that works" in done.seen("telemetry_gap")[0]


def test_what_the_device_cannot_say_is_unknown_and_named(tmp_path: Path) -> None:
    """A field that is not supported is neither 0 nor equal."""
    done = run(tmp_path, nvml={"not_supported": ["sm_clock_mhz", "reasons"]})
    assert (done.code, done.comparison["codes"]) == (0, []), done.out
    gpus = done.launch("0-baseline").cells[0].gpus
    assert gpus is not None
    assert (gpus[0].sm_clock_mhz, gpus[0].reasons) == (None, None)
    assert gpus[0].missing == {"sm_clock_mhz": "Not Supported", "reasons": "Not Supported"}
    assert any("sm_clock_mhz" in text and "reasons" in text for text in done.advice("not_checked")), done.out


def test_f1_without_a_counter_and_a_long_window_the_energy_is_unknown_in_words(tmp_path: Path) -> None:
    done = run(tmp_path, nvml={"not_supported": ["energy_j"]})
    assert (done.code, done.comparison["codes"]) == (0, []), done.out
    gpus = done.launch("0-baseline").cells[0].gpus
    assert gpus is not None
    assert (gpus[0].energy_j, gpus[0].energy_source) == (None, None)
    assert "no energy counter (Not Supported)" in (gpus[0].energy_absent or "")
    assert re.search(r"energy_per_output_token mJ/tok +- +- +no verdict \[\d\]", done.out)
    assert "energy: no energy counter (Not Supported), and integrated power needs a window of 2 s" in done.out


def test_a_mig_slice_is_sampled_and_has_no_energy(tmp_path: Path) -> None:
    slices = [{"uuid": "MIG-1", "used": 2**20, "pids": []}]
    done = run(
        tmp_path,
        {"gpu": {"uuid": "MIG-1"}},
        devices=[{**device(FIRST), "mig": slices}],
        environ={"CUDA_VISIBLE_DEVICES": "MIG-1"},
    )
    assert (done.code, done.comparison["codes"]) == (0, []), done.out
    gpus = done.launch("0-baseline").cells[0].gpus
    assert gpus is not None
    assert gpus[0].uuid == "MIG-1"
    assert gpus[0].memory_used_bytes_max == 2**20 + 4 * 2**30
    assert gpus[0].power_w is None
    assert f"GPU {FIRST} is shared by MIG slices" in done.out


def test_older_drivers_and_newer_reasons_are_read(tmp_path: Path) -> None:
    done = run(tmp_path, {"gpu": {"reasons": ["sync_boost", "one_of_the_future"]}}, nvml={"old_driver": True})
    gpus = done.launch("0-baseline").cells[0].gpus
    assert gpus is not None
    assert gpus[0].reasons == {"sync_boost": 1.0, "bit_40": 1.0}


def test_a_gpu_that_is_lost_ends_the_launch_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    done = run(tmp_path, nvml={"lost_after": 60}, telemetry="{interval_s: 0.1}", num_prompts="40")
    assert done.code == 4, done.out
    record = done.launch("0-baseline")
    assert record.error is not None
    assert record.error.kind == "GpuLost"
    assert FIRST in record.error.message
    assert record.error.phase.startswith("decode")
    folder = done.run / "launches" / "0-baseline"
    lines, _ = read_lines(folder / "requests.jsonl", RequestLine)
    assert any("cut off" in (line.request.error or "") for line in lines), "at once, not when the load is over"
    assert read_samples(folder / "telemetry.parquet")
    assert not (done.run / "launches" / "1-candidate").exists(), "the next launch would lose it too"


def test_compare_judges_by_the_raw_samples_not_by_their_summary(tmp_path: Path) -> None:
    done = run(tmp_path, {"gpu": {**CANDIDATE, "sm_clock_mhz": 1520}})
    path = done.run / "launches" / "1-candidate" / "launch.json"
    data = json.loads(path.read_text())
    data["cells"][0]["gpus"][0]["sm_clock_mhz"] = 1980
    path.write_text(json.dumps(data))
    assert compare(done.run)[0] == 3
    raw = path.parent / "telemetry.parquet"
    raw.write_bytes(raw.read_bytes()[:100])
    code, out = compare(done.run)
    assert code == 3
    assert "telemetry_gap" in out
    assert "cannot be read" in out
    # A record published without its raw files is judged by its summaries.
    raw.unlink()
    assert compare(done.run)[0] == 0


def compare(folder: Path) -> tuple[int, str]:
    argv = [sys.executable, "-m", "abharness.cli", "compare", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_a_cell_shorter_than_the_interval_has_no_verdict(tmp_path: Path) -> None:
    done = run(tmp_path, telemetry="{interval_s: 10}")
    assert (done.code, done.comparison["codes"]) == (3, ["telemetry_gap"]), done.out
    assert "telemetry.interval_s" in done.out


@pytest.mark.parametrize("text", ["{interval_s: 0.01}", "{interval_s: 11}", "{interval: 0.1}"])
def test_intervals_out_of_bounds_are_refused(text: str, tmp_path: Path) -> None:
    done = run(tmp_path, telemetry=text)
    assert done.code == 2
    assert "telemetry.interval" in done.out


# Each row: the candidate's GPUs, the codes of the comparison, what its messages must say.
RECORDED: dict[str, tuple[list[GpuWindow], list[str], str]] = {
    "the same clocks": ([gpu()], [], ""),
    "an SM clock inside the tolerance": ([gpu(sm_clock_mhz=1935)], [], ""),
    "an SM clock outside of it": ([gpu(sm_clock_mhz=1905)], ["clocks_differ"], "SM clock of GPU-1: baseline 1980 MHz"),
    "another memory clock": ([gpu(mem_clock_mhz=1593)], ["clocks_differ"], "memory clock of GPU-1"),
    "the power cap now and then": ([gpu(reasons={"sw_power_cap": 0.2})], [], ""),
    "the power cap most of the time": (
        [gpu(reasons={"sw_power_cap": 0.9})], [], "GPU-1: baseline 0%, candidate 90% of the samples"
    ),
    "one hot sample in fifty": ([gpu(reasons={"hw_thermal_slowdown": 0.02})], [], ""),
    "the power brake": ([gpu(reasons={"hw_power_brake_slowdown": 0.06})], ["throttled"], "hw_power_brake_slowdown in 6%"),
    "a second GPU that idles at other clocks": (
        [gpu(), gpu(uuid="GPU-2", memory_used_bytes_max=0, sm_clock_mhz=345, reasons={"sw_thermal_slowdown": 1.0})], [], ""
    ),
    "one sample is missing": ([gpu(samples=9, coverage=0.9)], [], ""),
    "a third of the samples is missing": ([gpu(samples=7, coverage=0.7)], ["telemetry_gap"], "7 of 10 samples"),
    "no samples at all": ([gpu(samples=0, coverage=0)], ["telemetry_gap"], "0 of 10 samples"),
    "unknown whether it works": ([gpu(memory_used_bytes_max=None, utilization_max=None)], [], ""),
    "clocks unknown are not equal and not different": ([gpu(sm_clock_mhz=None)], [], ""),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDED)
def test_clocks_on_record_are_compared_across_the_variants(case: str, tmp_path: Path, capsys: Any) -> None:
    candidate, codes, text = RECORDED[case]
    launches = {"baseline": [Made(gpus=[gpu()])] * 4, "candidate": [Made(gpus=candidate)] * 4}
    write_run(tmp_path / "r", launches)  # type: ignore[arg-type]
    code = main(["compare", str(tmp_path / "r"), "--format", "json"])
    found = json.loads(capsys.readouterr().out)["comparisons"][0]
    assert (code, found["codes"]) == (3 if codes else 0, codes)
    assert text in " ".join(item["finding"]["message"] for item in (*found["seen"], *found["advice"]))
    unknown = [item for item in found["advice"] if item["finding"]["code"] == "not_checked"]
    assert bool(unknown) == ("unknown" in case)


def test_one_launch_at_another_clock_does_not_move_the_median_of_four(tmp_path: Path, capsys: Any) -> None:
    odd = [Made(gpus=[gpu(sm_clock_mhz=1200)]), *[Made(gpus=[gpu()])] * 3]
    write_run(tmp_path / "r", {"baseline": [Made(gpus=[gpu()])] * 4, "candidate": odd})
    assert main(["compare", str(tmp_path / "r")]) == 0
    write_run(tmp_path / "s", {"baseline": [Made(gpus=[gpu()])] * 4, "candidate": [odd[0], odd[0], odd[0], odd[1]]})
    assert main(["compare", str(tmp_path / "s")]) == 3
    assert "candidate 1200 MHz" in capsys.readouterr().out


# SM clocks of the candidate (the baseline's is 1980 MHz) and its speed (the baseline's is 100), the exit code, the calls of
# its decisive rows, whether `clocks_differ` stands.
AGAINST: dict[str, tuple[dict[str, float], float, int, str, bool]] = {
    "faster at lower clocks": ({"sm_clock_mhz": 1700}, 120, 0, "better", False),
    "slower at lower clocks": ({"sm_clock_mhz": 1700}, 80, 3, "no verdict", True),
    "slower at higher clocks": ({"sm_clock_mhz": 2100}, 80, 1, "worse", False),
    "faster at higher clocks": ({"sm_clock_mhz": 2100}, 120, 3, "no verdict", True),
    "no difference shown at lower clocks": ({"sm_clock_mhz": 1700}, 100, 3, "no verdict", True),
    "faster, one clock lower and one higher": ({"sm_clock_mhz": 1700, "mem_clock_mhz": 3300}, 120, 3, "no verdict", True),
}  # fmt: skip


@pytest.mark.parametrize("case", AGAINST)
def test_a_call_stands_where_the_clocks_speak_against_it(case: str, tmp_path: Path, capsys: Any) -> None:
    """Nothing runs slower for a higher clock: the clocks explain a difference in one direction only."""
    clocks, speed, code, call, stands = AGAINST[case]
    spread = (0.999, 1.0, 1.0, 1.001)
    launches = {
        "baseline": [Made(speed=100 * one, gpus=[gpu()]) for one in spread],
        "candidate": [Made(speed=speed * one, gpus=[gpu(**clocks)]) for one in spread],
    }
    write_run(tmp_path / "r", launches)  # type: ignore[arg-type]
    assert main(["compare", str(tmp_path / "r"), "--format", "json"]) == code
    found = json.loads(capsys.readouterr().out)["comparisons"][0]
    rows = {row["metric"]["name"]: row for cell in found["cells"] for row in cell["rows"]}
    assert {row["call"] for row in rows.values() if row["decisive"]} == {call}
    assert found["codes"] == (["clocks_differ"] if stands else [])
    told = [item["finding"]["code"] for item in found["advice"]]
    assert ("clocks_against" in told) is not stands
    # Energy goes with the clocks in either direction.
    assert {row["call"] for name, row in rows.items() if "energy" in name} <= {"no verdict"}
