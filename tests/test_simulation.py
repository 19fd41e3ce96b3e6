"""What the judgement gets wrong and what it finds, on a small seeded part of `tests.benchmarks.simulation`."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from abharness.compare import compare_runs
from abharness.waivers import Waiver
from tests.benchmarks.other_tests import TESTS
from tests.simulation import Setting, Simulator

EXPERIMENTS = 300
ALLOWANCE = 3 * math.sqrt(0.05 * 0.95 / EXPERIMENTS)
"""Three standard errors of a share of 5%: how far chance may carry the seeded count above alpha."""


@pytest.mark.parametrize("noise", ["normal", "heavy-tailed", "heteroscedastic", "bimodal"])
def test_the_default_design_calls_equal_variants_no_more_often_than_alpha(noise: str) -> None:
    """At 2% noise `min_effect` hides nothing: what keeps the calls rare is the test and its correction."""
    assert Simulator(Setting(noise, sd=0.02)).judge(EXPERIMENTS).any_called <= 0.05 + ALLOWANCE


def test_without_the_correction_it_would_call_them_more_often() -> None:
    """The twin that shows the test above can fail: six cells at the level of one."""
    uncorrected = 0
    made = Simulator(Setting("heteroscedastic", sd=0.02))
    for rates in made.draw(EXPERIMENTS, 0):
        run = made.run(rates)
        rows = [row for cell in compare_runs(run, run).cells for row in cell.rows if row.decisive]
        uncorrected += any(row.ratio.p is not None and row.ratio.p < 0.05 for row in rows)
    assert uncorrected / EXPERIMENTS > 0.05 + ALLOWANCE


def test_order_ab_takes_drift_for_a_difference_and_abba_does_not() -> None:
    called = {
        order: Simulator(Setting("drifting", order=order)).judge(100, waivers=[Waiver("order_confounded")]).any_called
        for order in ("ab", "abba")
    }
    assert called["ab"] > 0.5
    assert called["abba"] <= 0.05


def test_a_change_of_5_percent_is_found_in_nearly_every_cell() -> None:
    found = Simulator(Setting(effect=0.05)).judge(50)
    assert found.cells_called > 0.95
    assert found.wrong_way == 0


def test_decode_and_prefill_cells_are_one_family() -> None:
    """Corrected apart, decode and prefill would each be wrong with probability alpha."""
    made = Simulator(Setting(cells=3))
    run = made.run(made.draw(1, 0)[0])
    rows = [row for cell in compare_runs(run, run).cells for row in cell.rows if row.decisive]
    assert {row.metric.name for row in rows} == {"output_throughput", "prefill_throughput"}
    raw = sorted(row.ratio.p for row in rows if row.ratio.p is not None)
    corrected = sorted(row.p for row in rows if row.p is not None)
    assert corrected[0] == pytest.approx(min(1.0, 3 * raw[0]))


def test_the_vectorised_twin_of_the_benchmark_is_the_shipped_test() -> None:
    made = Simulator(Setting("heteroscedastic", cells=3))
    rates = made.draw(5, 0)
    is_candidate = np.array([variant == "candidate" for variant in made.order])
    logs = np.log(rates)
    twin = next(iter(TESTS.values()))(logs[:, ~is_candidate], logs[:, is_candidate])
    for values, expected in zip(rates, twin, strict=True):
        run = made.run(values)
        rows = [row for cell in compare_runs(run, run).cells for row in cell.rows if row.decisive]
        assert [row.p for row in rows] == pytest.approx(list(expected))


def test_the_same_seed_draws_the_same_experiments() -> None:
    setting = Setting("bimodal", cells=2)
    assert (Simulator(setting).draw(3, 7) == Simulator(setting).draw(3, 7)).all()
    assert (Simulator(setting).draw(3, 7) != Simulator(setting).draw(3, 8)).any()


@pytest.mark.parametrize("table", ["false positives", "order"])
def test_the_command_prints_its_tables(table: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.simulation", "--experiments", "2", "--only", table]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "rates.json")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert "| drifting |" in done.stdout
    assert len(json.loads((tmp_path / "rates.json").read_text())["rows"]) == {"false positives": 60, "order": 16}[table]
