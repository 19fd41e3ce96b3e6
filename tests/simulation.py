"""Seeded experiments drawn from known truths, judged by the comparison that `abharness compare` makes.

A draw is a matrix of launch values; each is put into the records of a run as the request times that give it, and the
run, in memory, goes through `compare_runs`. Nothing of the judgement is written a second time here.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from abharness.compare import Comparison, compare_runs
from abharness.plan import launch_order
from abharness.prompts import combined_hash
from abharness.record import CellRecord, RequestRecord, Variant
from abharness.runs import CellKey, Run, read_run
from abharness.spec import DesignSpec
from abharness.waivers import Waiver
from tests.synthetic import Made, request, spec, write_run

Values = NDArray[np.float64]

OWN_SHARE = 0.5
"""Share of a launch's variance that is each cell's own; the rest moves all cells of the launch together."""

CLOCK_GAP, FAR_CLOCK_GAP = 4.0, 16.0
"""How far apart the two clock states of bimodal noise lie, in standard deviations of the noise within a state. Of all
gaps the first is the hardest for four launches a variant, and a large one for two."""

DRIFT = 6.0
"""Change from the first launch to the last under drifting noise, in standard deviations."""

OUTPUT_LEN = 11


@dataclass(frozen=True, slots=True)
class Setting:
    """One kind of experiment.

    Attributes:
        noise: A name of `NOISES`.
        sd: Standard deviation of the logarithm of a launch value.
        launches: Launches a variant.
        cells: Cells, every third of them prefill.
        effect: True relative change of every cell's rate.
        order: As in `design.order`.
    """

    noise: str = "normal"
    sd: float = 0.005
    launches: int = 4
    cells: int = 6
    effect: float = 0.0
    order: str = "abba"


@dataclass(frozen=True, slots=True)
class Rates:
    """What came of a number of experiments.

    Attributes:
        any_called: Share of experiments in which any decisive row was called.
        cells_called: Mean share of decisive rows that were called in the direction of a gain.
        wrong_way: Share of experiments in which any decisive row was called as a loss.
    """

    experiments: int
    any_called: float
    cells_called: float
    wrong_way: float


def _mixed(common: Values, own: Values) -> Values:
    return np.sqrt(1 - OWN_SHARE) * common + np.sqrt(OWN_SHARE) * own


def _normal(rng: np.random.Generator, many: int, order: Sequence[Variant], cells: int) -> Values:
    return _mixed(rng.standard_normal((many, len(order), 1)), rng.standard_normal((many, len(order), cells)))


def _heavy(rng: np.random.Generator, many: int, order: Sequence[Variant], cells: int) -> Values:
    one, two = (rng.standard_t(3, (many, len(order), width)) / np.sqrt(3) for width in (1, cells))
    return _mixed(one, two)


def _unequal(rng: np.random.Generator, many: int, order: Sequence[Variant], cells: int) -> Values:
    scale = np.array([3.0 if variant == "candidate" else 1.0 for variant in order])
    return scale[None, :, None] * _normal(rng, many, order, cells)


def _drifting(rng: np.random.Generator, many: int, order: Sequence[Variant], cells: int) -> Values:
    sign = rng.choice([-1.0, 1.0], (many, 1, 1))
    time = np.linspace(0, 1, len(order))[None, :, None]
    return _normal(rng, many, order, cells) + DRIFT * sign * time


def _bimodal(rng: np.random.Generator, many: int, order: Sequence[Variant], cells: int) -> Values:
    return _normal(rng, many, order, cells) + CLOCK_GAP * rng.integers(0, 2, (many, len(order), 1))


def _far_bimodal(rng: np.random.Generator, many: int, order: Sequence[Variant], cells: int) -> Values:
    return _normal(rng, many, order, cells) + FAR_CLOCK_GAP * rng.integers(0, 2, (many, len(order), 1))


NOISES: dict[str, Callable[[np.random.Generator, int, Sequence[Variant], int], Values]] = {
    "normal": _normal,
    "heavy-tailed": _heavy,
    "heteroscedastic": _unequal,
    "drifting": _drifting,
    "bimodal": _bimodal,
    "far bimodal": _far_bimodal,
}
"""Noise of the logarithm in units of `sd`: normal; Student's t with 3 degrees of freedom (scaled to variance 1); three
times the noise in the candidate; a straight drift of `DRIFT`, up or down; clocks that are in one of two states for the
whole of a launch, `CLOCK_GAP` or `FAR_CLOCK_GAP` apart."""


def keys(count: int) -> list[tuple[CellKey, str]]:
    """Cells of an experiment with their kinds: decode at growing concurrency, every third a prefill."""
    found = []
    for number in range(count):
        if number % 3 == 2:
            found.append((CellKey("prefill", 16 * 2**number, 1, 1), "prefill"))
        else:
            found.append((CellKey("decode", 16, OUTPUT_LEN, number + 1), "decode"))
    return found


class Simulator:
    """Makes runs of one setting: records as a faultless run leaves them, but for the times."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.keys = keys(setting.cells)
        self.order = launch_order(DesignSpec.model_validate(self._design()))
        launches: dict[Variant, list[Made]] = {
            "baseline": [Made()] * setting.launches,
            "candidate": [Made()] * setting.launches,
        }
        design = [f"design.{name}={value}" for name, value in self._design().items()]
        with tempfile.TemporaryDirectory() as folder:
            self.template = read_run(write_run(Path(folder) / "r", launches, *design))
        recorded = spec(*design).model_dump(mode="json")
        gsm8k = [item for item in recorded["workloads"] if item["kind"] == "gsm8k"]
        recorded["workloads"] = [item for item in recorded["workloads"] if item not in gsm8k]
        self.record = self.template.record.model_copy(update={"spec": recorded, "spec_sha256": None})

    def _design(self) -> dict[str, object]:
        return {"order": self.setting.order, "launches_per_variant": self.setting.launches}

    def draw(self, experiments: int, seed: int) -> Values:
        """Rates, tok/s: one for each experiment, launch in order of time, and cell."""
        setting = self.setting
        rng = np.random.default_rng([seed, setting.launches, setting.cells, sum(map(ord, setting.noise))])
        noise = NOISES[setting.noise](rng, experiments, self.order, setting.cells)
        gain = np.array([setting.effect if variant == "candidate" else 0.0 for variant in self.order])
        rates: Values = 100.0 * np.exp(setting.sd * noise) * (1 + gain)[None, :, None]
        return rates

    def run(self, rates: Values) -> Run:
        """The run whose launches have these rates, one row a launch."""
        launches = []
        for launch, row in zip(self.template.launches, rates.tolist(), strict=True):
            cells, requests = [], {}
            for (key, kind), rate in zip(self.keys, row, strict=True):
                one = _request(key, rate)
                requests[key, 0] = [one]
                cells.append(_cell(key, kind, one))
            record = launch.record.model_copy(update={"cells": cells, "accuracy": []})
            launches.append(dataclasses.replace(launch, record=record, requests=requests, answers={}))
        return dataclasses.replace(self.template, record=self.record, launches=tuple(launches))

    def judge(self, experiments: int, seed: int = 0, *, waivers: Sequence[Waiver] = ()) -> Rates:
        """Draw experiments and put each through the comparison."""
        called = gains = losses = rows = 0
        for rates in self.draw(experiments, seed):
            run = self.run(rates)
            calls = decisive_calls(compare_runs(run, run, waivers))
            rows += len(calls)
            gains += calls.count("better")
            losses += "worse" in calls
            called += any(call != "~" for call in calls)
        return Rates(experiments, called / experiments, gains / rows, losses / experiments)


def decisive_calls(comparison: Comparison) -> list[str]:
    """The calls of the rows that decide; a simulated run is valid, or the simulation is wrong."""
    calls = [row.call for cell in comparison.cells for row in cell.rows if row.decisive]
    assert calls, "no cell was judged"
    assert "no verdict" not in calls, comparison.codes
    return [str(call) for call in calls]


def _request(key: CellKey, rate: float) -> RequestRecord:
    tokens = key.output_len if key.output_len > 1 else key.input_len
    took = tokens / rate
    first = took if key.output_len == 1 else 0.1 * took
    made = request(0, Made())
    return made.model_copy(
        update={
            "requested_input_len": key.input_len, "requested_output_len": key.output_len,
            "prompt_tokens": key.input_len, "output_tokens": key.output_len, "chunks": key.output_len,
            "first_token_s": first, "last_token_s": took,
        }
    )  # fmt: skip


def _cell(key: CellKey, kind: str, one: RequestRecord) -> CellRecord:
    return CellRecord(
        kind=kind,
        started_s=0,
        ended_s=one.last_token_s,
        prompts_sha256=combined_hash([one.prompt_sha256]),
        client={"cpu_share": 0.1, "loop_lag_p50_s": 0, "loop_lag_p99_s": 0, "chunks_per_s": 1},
        counters=None,
        repeat=0,
        **dataclasses.asdict(key),
    )
