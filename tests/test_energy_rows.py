"""What the comparison says of energy, of the GPUs' conditions and of their power limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from abharness.cli import main
from abharness.windows import GpuWindow
from tests.synthetic import Made, gpu, write_run


def compared(
    folder: Path, capsys: Any, baseline: Made, candidate: Made, *arguments: str, primary: str | None = None
) -> Any:
    """Exit code and report of four launches a variant; `--format json` gives the comparison."""
    overrides = () if primary is None else (f"design.primary={primary}",)
    # The same cell times for all, energies a little apart: a test needs spread.
    write_run(folder / "r", {"baseline": spread(baseline), "candidate": spread(candidate)}, *overrides)
    code = main(["compare", str(folder / "r"), *arguments])
    out = capsys.readouterr().out
    return code, json.loads(out)["comparisons"][0] if "json" in arguments else out


def spread(made: Made) -> list[Made]:
    def scaled(one: GpuWindow, by: float) -> GpuWindow:
        return one.model_copy(update={"energy_j": None if one.energy_j is None else one.energy_j * by})

    found = []
    for by in (0.998, 0.999, 1.001, 1.002):
        values = {**vars(made), "gpus": made.gpus and [scaled(one, by) for one in made.gpus]}
        found.append(Made(**values))
    return found


def row(comparison: Any, name: str) -> Any:
    (found,) = [one for one in comparison["cells"][0]["rows"] if one["metric"]["name"] == name]
    return found


def test_less_energy_per_token_is_better(tmp_path: Path, capsys: Any) -> None:
    more, less = Made(gpus=[gpu()]), Made(gpus=[gpu(energy_j=80)])
    _, found = compared(tmp_path, capsys, more, less, "--format", "json")
    energy = row(found, "energy_per_output_token")
    # 44 output tokens.
    assert energy["samples"]["baseline"] == pytest.approx([88 * by / 44 for by in (0.998, 0.999, 1.001, 1.002)])
    assert energy["call"] == "better"
    assert not energy["decisive"]
    net = row(found, "net_energy_per_output_token")
    assert net["samples"]["baseline"][0] == pytest.approx((88 * 0.998 - 100 * 0.44) / 44)
    assert row(found, "energy_per_output_token_steady")["call"] == "no verdict"


def test_the_report_shows_energy_in_millijoules_and_what_the_gpu_did(tmp_path: Path, capsys: Any) -> None:
    capped = gpu(energy_j=80, power_mean_w=380, sm_clock_mhz=1965, reasons={"sw_power_cap": 0.12})
    code, out = compared(tmp_path, capsys, Made(gpus=[gpu()]), Made(gpus=[capped]))
    assert code == 0
    lines = {" ".join(line.split()[:-2]): line.split()[-2:] for line in out.splitlines() if line.strip()}
    (energy,) = [line for line in out.splitlines() if line.startswith("energy_per_output_token mJ/tok")]
    assert "2000 ± 0%" in energy
    assert "-9.09%" in energy
    assert lines["SM clock MHz"] == ["1980", "1965"]
    assert lines["power W (instant)"] == ["400", "380"]
    assert lines["sw_power_cap % of samples"] == ["0", "12"]


def test_where_no_gpu_was_sampled_there_are_no_energy_rows(tmp_path: Path, capsys: Any) -> None:
    _, out = compared(tmp_path, capsys, Made(), Made())
    assert "energy" not in out
    assert "SM clock" not in out


WHY = "window of 0.52 s is shorter than 2.0 s, 20 of the counter's update periods"
NO_ENERGY = {"energy_j": None, "energy_source": None, "energy_absent": WHY}


def test_why_an_energy_is_not_known_reaches_the_report(tmp_path: Path, capsys: Any) -> None:
    unknown = Made(gpus=[gpu(**NO_ENERGY)])
    code, out = compared(tmp_path, capsys, unknown, unknown)
    assert code == 0, "it decides nothing"
    (line,) = [line for line in out.splitlines() if line.startswith("energy_per_output_token mJ/tok")]
    assert line.split()[-5:] == ["-", "-", "no", "verdict", "[1]"]
    assert f"[1] energy: {WHY} (launch 0-baseline, and 7 more like it)" in out


def test_one_launch_without_an_energy_leaves_no_verdict_on_it(tmp_path: Path, capsys: Any) -> None:
    """The other seven would be another experiment, and their n another than the one shown."""
    launches = {"baseline": spread(Made(gpus=[gpu()])), "candidate": spread(Made(gpus=[gpu(energy_j=80)]))}
    launches["candidate"][2].gpus = [gpu(**NO_ENERGY)]
    write_run(tmp_path / "r", launches)  # type: ignore[arg-type]
    main(["compare", str(tmp_path / "r"), "--format", "json"])
    energy = row(json.loads(capsys.readouterr().out)["comparisons"][0], "energy_per_output_token")
    assert energy["call"] == "no verdict"
    assert energy["notes"] == [f"energy: {WHY} (launch 5-candidate)"]


def test_f3_a_withheld_energy_is_no_verdict_though_there_is_a_number(tmp_path: Path, capsys: Any) -> None:
    apart = "counter 187 J, integrated power 327 J: 43% apart, limit 10%"
    _, out = compared(tmp_path, capsys, Made(gpus=[gpu()]), Made(gpus=[gpu(energy_j=80, energy_absent=apart)]))
    assert f"energy: {apart}" in out
    assert "-9.09%" not in out


@pytest.mark.parametrize(
    "other",
    [{"energy_source": "integrated power"}, {"power_kind": "average"}],
)
def test_f2_energies_that_were_measured_in_different_ways_are_not_compared(
    other: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    code, out = compared(tmp_path, capsys, Made(gpus=[gpu()]), Made(gpus=[gpu(energy_j=80, **other)]))
    assert code == 0
    assert "energy: measured in different ways: baseline by counter, power: instant; candidate by" in out
    assert "-9.09%" not in out


def test_an_energy_that_decides_and_is_not_known_is_no_verdict(tmp_path: Path, capsys: Any) -> None:
    primary = "decode[1]/energy_per_output_token"
    known, unknown = Made(gpus=[gpu()]), Made(gpus=[gpu(**NO_ENERGY)])
    assert compared(tmp_path / "a", capsys, known, Made(gpus=[gpu(energy_j=100)]), primary=primary)[0] == 1
    assert compared(tmp_path / "b", capsys, known, unknown, primary=primary)[0] == 3
    assert compared(tmp_path / "c", capsys, Made(), Made(), primary=primary)[0] == 3


def test_only_gpus_that_work_are_summed(tmp_path: Path, capsys: Any) -> None:
    both = [gpu(), gpu(uuid="GPU-2", energy_j=44), gpu(uuid="GPU-3", memory_used_bytes_max=0, **NO_ENERGY)]
    _, found = compared(tmp_path, capsys, Made(gpus=both), Made(gpus=both), "--format", "json")
    assert row(found, "energy_per_output_token")["samples"]["candidate"][0] == pytest.approx(132 * 0.998 / 44)
    names = [item["name"] for item in found["cells"][0]["conditions"]]
    assert names == [
        "SM clock MHz of GPU-1", "power W (instant) of GPU-1", "SM clock MHz of GPU-2", "power W (instant) of GPU-2"
    ]  # fmt: skip


def test_one_working_gpu_without_an_energy_leaves_the_sum_unknown(tmp_path: Path, capsys: Any) -> None:
    both = [gpu(), gpu(uuid="GPU-2", **NO_ENERGY)]
    _, out = compared(tmp_path, capsys, Made(gpus=both), Made(gpus=both))
    assert f"energy of GPU-2: {WHY}" in out


def test_the_steady_window_has_its_own_energy(tmp_path: Path, capsys: Any) -> None:
    made = Made(gpus=[gpu()], gpus_steady=[gpu(energy_j=60)])
    _, found = compared(tmp_path, capsys, made, made, "--format", "json")
    steady = row(found, "energy_per_output_token_steady")
    # One stream after another: the steady window is the cell's own, with its 44 tokens.
    assert steady["samples"]["baseline"] == pytest.approx([60 / 44] * 4)


def test_an_unknown_idle_power_leaves_the_net_energy_unknown(tmp_path: Path, capsys: Any) -> None:
    made = Made(gpus=[gpu(idle_power_w=None)])
    _, found = compared(tmp_path, capsys, made, made, "--format", "json")
    assert row(found, "energy_per_output_token")["call"] == "~"
    assert "idle power of GPU-1 is not known" in row(found, "net_energy_per_output_token")["notes"][0]
    made = Made(gpus=[gpu(idle_power_w=300)])
    _, found = compared(tmp_path / "2", capsys, made, made, "--format", "json")
    assert "no more than idling takes" in row(found, "net_energy_per_output_token")["notes"][0]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"power_limit_w": 500}, "candidate '500 W'"),
        (
            {"power_limit_changed": True, "power_limit_w_min": 500, "power_limit_w_max": 700},
            "candidate '500 to 700 W within a cell'",
        ),
    ],
)
def test_another_power_limit_is_an_undeclared_difference(
    values: dict[str, Any], told: str, tmp_path: Path, capsys: Any
) -> None:
    code, out = compared(tmp_path, capsys, Made(gpus=[gpu()]), Made(gpus=[gpu(**values)]))
    assert code == 3
    assert f"power_limit.GPU-1: baseline '700 W'; {told}" in out
    waiver = "undeclared_difference:power_limit.GPU-1"
    assert main(["compare", str(tmp_path / "r"), "--allow", waiver]) == 0


def test_an_unknown_power_limit_is_no_difference(tmp_path: Path, capsys: Any) -> None:
    code, _ = compared(tmp_path, capsys, Made(gpus=[gpu()]), Made(gpus=[gpu(power_limit_w=None)]))
    assert code == 0
