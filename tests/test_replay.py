"""Replays below serving: what is computed from kernels, gaps, clocks and segments, and the files it rests on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from abharness.errors import RecordError, UsageError
from abharness.replay import attribution, calibration, serving, tuning, validation
from abharness.replay.attribution import Interval
from abharness.replay.records import (
    Calibration,
    CandidateCheck,
    Device,
    Point,
    Replay,
    RowCalibration,
    Segment,
    read_record,
)
from abharness.storage import write_model
from abharness.trace import read_trace
from abharness.windows import GpuWindow
from tests.traces import Ran, decode, kineto, nsys

RESULTS = Path(__file__).parent.parent / "results"
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
US = 1e-6


def at(name: str, start: float, end: float) -> Interval:
    return Interval(name, start * US, end * US)


def micro(values: Sequence[float]) -> list[float]:
    return [round(value / US, 6) for value in values]


# Attribution.


def test_positions_are_told_apart_by_spins_whatever_they_run() -> None:
    marked = ["memset", SPIN, "quantise", "mm", SPIN, "mm", "reduce", SPIN, "mm"]
    assert attribution.learn(marked, 3) == [("quantise", "mm"), ("mm", "reduce"), ("mm",)]


@pytest.mark.parametrize(
    ("marked", "message"),
    [
        ([SPIN, "mm"], "2 positions has 1 spins"),
        ([SPIN, "mm", SPIN, "mm", SPIN, "mm"], "2 positions has 3 spins"),
        ([SPIN, SPIN, "mm"], "position 0 of the step ran no kernel"),
        ([], "2 positions has 0 spins"),
    ],
)
def test_a_trace_in_which_they_cannot_be_told_apart_is_refused(marked: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        attribution.learn(marked, 2)


SEQUENCES = [("quantise", "mm"), ("mm", "reduce"), ("mm",)]


def test_quantising_is_charged_to_the_next_product_and_a_reduction_to_the_one_before() -> None:
    step = attribution.attribute(
        [
            at("norm", 0, 5),
            at("quantise", 6, 8),
            at("mm", 9, 19),
            at("attention", 20, 30),
            at("mm", 31, 41),
            at("reduce", 41, 44),
            at(SPIN, 44, 50),
            at("mm", 52, 62),
            at("sample", 63, 70),
        ],
        SEQUENCES,
    )
    assert micro(step.positions_s) == [12, 13, 10]
    assert micro(step.gaps_s) == [0, 12, 8]
    assert micro([step.started_s, step.ended_s, step.span_s]) == [6, 62, 56]
    # What a position waits for within itself is nobody's gap: it is what the step takes besides.
    assert round(step.span_s / US - sum(micro(step.positions_s)) - sum(micro(step.gaps_s)), 6) == 1


def test_kernels_that_overlap_are_not_counted_twice() -> None:
    """Programmatic dependent launch: the next one begins before the one before has ended."""
    step = attribution.attribute(
        [at("quantise", 0, 4), at("mm", 2, 12), at("mm", 10, 20), at("reduce", 11, 15), at("mm", 20, 30)], SEQUENCES
    )
    assert micro(step.positions_s) == [12, 8, 10]
    assert micro(step.gaps_s) == [0, 0, 0]
    assert sum(micro(step.positions_s)) == 30


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["quantise", "mm", "mm", "reduce"], "4 kernels of the names .* and they have 5"),
        (["quantise", "mm", "mm", "reduce", "mm", "mm"], "6 kernels of the names"),
        (
            ["mm", "quantise", "mm", "reduce", "mm"],
            "kernel 0 of the step is mm; position 0 of the capture has quantise",
        ),
        (["norm"], "has 0 kernels"),
    ],
)
def test_a_step_that_runs_something_else_is_refused(names: list[str], message: str) -> None:
    found = [at(name, 10 * place, 10 * place + 5) for place, name in enumerate(names)]
    with pytest.raises(UsageError, match=message):
        attribution.attribute(found, SEQUENCES)


def test_replays_are_taken_apart_and_copies_within_them() -> None:
    found = [at("mm", 10 * place, 10 * place + 4 + place % 2) for place in range(8)]
    steps = attribution.replays(found, [("mm",)] * 4, 2)
    assert [micro(step.positions_s) for step in steps] == [[4, 5, 4, 5]] * 2
    copies = [part for step in steps for part in attribution.by_copy(step, 2)]
    assert [micro(part.positions_s) for part in copies] == [[4, 5]] * 4
    assert micro(attribution.medians(copies).positions_s) == [4, 5]
    with pytest.raises(UsageError, match="7 kernels cannot be those of 2 replays"):
        attribution.replays(found[:-1], [("mm",)] * 4, 2)


def test_whole_steps_are_found_in_a_trace_of_anything() -> None:
    names = [
        "mm",
        "quantise",
        "mm",
        "norm",
        "mm",
        "reduce",
        "mm",
        "mm",
        "quantise",
        "mm",
        "mm",
        "reduce",
        "mm",
        "quantise",
    ]
    found = [at(name, 10 * place, 10 * place + 5) for place, name in enumerate(names)]
    steps = attribution.every(found, SEQUENCES)
    assert [micro([step.started_s])[0] for step in steps] == [10, 80]
    assert [micro(step.positions_s) for step in steps] == [[10, 10, 5]] * 2
    with pytest.raises(UsageError, match="no step of 3 positions in it: 4 kernels"):
        attribution.every(found[:5], SEQUENCES)


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 20)), min_size=1, max_size=30), st.integers(1, 4))
def test_positions_and_gaps_add_up_to_the_step(times: list[tuple[float, float]], kernels: int) -> None:
    """Whatever overlaps: one kernel a position, each starting after the one before did."""
    start, found = 0.0, []
    for wait, duration in times:
        start += wait
        found.append(at("mm", start, start + duration))
    step = attribution.attribute(found, [("mm",)] * len(found))
    assert sum(step.positions_s) + sum(step.gaps_s) == pytest.approx(step.span_s, abs=1e-12)
    assert min(step.positions_s) >= 0


@pytest.mark.parametrize("form", [kineto, nsys])
def test_both_profilers_files_give_the_same_times(form: Any, tmp_path: Path) -> None:
    ran = [Ran(name, 4.0, graph=True) for name in ("quantise", "mm", "norm", "mm", "reduce", "mm")]
    trace = read_trace(form(tmp_path / "trace.json", [decode(4, *ran)]))
    step = attribution.attribute(attribution.intervals(trace.kernels), SEQUENCES)
    assert micro(step.positions_s) == pytest.approx([8, 8, 4], abs=1e-2)
    assert micro(step.gaps_s)[1] == pytest.approx(5, abs=1e-2)  # the norm, and half a microsecond on each side


def test_steps_that_an_h200_served_are_attributed_to_their_145_projections() -> None:
    run = serving.open_run(RESULTS / "pq2-single")
    sequences = [("pq2_quantize_kernel", "pq2_single_kernel")] * 145
    steps = serving.decode_steps(run, "candidate", 1)
    state = serving.serving(run, "candidate", 1)
    assert (len(steps), state.gpu_name, state.sm_clock_mhz, state.power_limit_w) == (22, "NVIDIA H200", 1980.0, 700.0)
    median = attribution.medians([attribution.attribute(step, sequences) for step in steps])
    layers = [micro(median.positions_s[place : place + 4]) for place in range(0, 144, 4)]
    qkv, o, gate_up, down = (sorted(column)[18] for column in zip(*layers, strict=True))
    assert o < qkv < down < gate_up  # 4096x4096, 6144x4096, 4096x12288, 24576x4096
    assert median.positions_s[144] > 20 * US  # the head: 151,936 rows
    gaps_s, remark = calibration.gaps(steps, sequences, state.tpot_s)
    assert len(gaps_s) == 145
    assert sum(gaps_s) + sum(median.positions_s) == pytest.approx(state.tpot_s, rel=0.02)
    # Attention is between a layer's first projection and its second, half a norm before the others.
    before_o, before_down = (sorted(gaps_s[place:144:4])[18] for place in (1, 3))
    assert before_o > 2 * before_down
    with pytest.raises(UsageError, match=r"290 kernels of the names .* and they have 288"):
        attribution.attribute(steps[0], sequences[1:])
    assert remark == "" or "stretched" in remark


def test_a_run_says_what_it_lacks() -> None:
    run = serving.open_run(RESULTS / "pq2-single")
    with pytest.raises(UsageError, match="no completed launch of the baseline decoded with max_concurrency 8") as error:
        serving.serving(run, "baseline", 8)
    assert error.value.hint == "it has 1"
    with pytest.raises(UsageError, match="no traced step of the baseline decodes 8 rows: the run was not traced"):
        serving.decode_steps(run, "baseline", 8)


# Calibration.


def test_what_a_token_takes_beyond_the_step_is_before_its_first_layer() -> None:
    steps = [[at("mm", 0, 10), at("norm", 11, 14), at("mm", 15, 25)]]
    gaps_s, remark = calibration.gaps(steps, [("mm",), ("mm",)], 100 * US)
    assert (micro(gaps_s), remark) == ([75, 5], "")


def test_gaps_that_the_profiler_stretched_are_cut_to_the_token() -> None:
    steps = [[at("mm", 0, 10), at("mm", 40, 50)]]
    gaps_s, remark = calibration.gaps(steps, [("mm",), ("mm",)], 35 * US)
    assert micro(gaps_s) == [0, 15]
    assert "0.050 ms and a token 0.035 ms: the profiler stretched the gaps, which are multiplied by 0.500" in remark


def points(*values: tuple[float, float, float]) -> list[Point]:
    return [Point(scale=scale, power_w=power, sm_clock_mhz=clock, step_s=1e-3) for scale, power, clock in values]


def test_spins_are_as_long_as_brings_the_clock_to_servings() -> None:
    found = points((0, 700, 1400), (0.5, 650, 1600), (1, 550, 1800))
    scale, matched, remark = calibration.choose(found, 600, 1700)
    assert (scale, matched) == (0.75, "clock")
    assert remark == "without spins the clock is 1400 MHz, in serving 1700 MHz"


def test_where_the_clock_does_not_move_power_decides_and_no_proxy_is_needed() -> None:
    found = points((1, 320, 1980), (0, 500, 1980), (0.5, 400, 1980))
    scale, matched, remark = calibration.choose(found, 360, 1980)
    assert (scale, matched) == (0.75, "power")
    assert "the clock is serving's with and without spins (1980 and 1980 MHz): here no proxy is needed" in remark


def test_what_cannot_be_met_is_said() -> None:
    scale, matched, remark = calibration.choose(points((0, 700, 1400), (1, 600, 1600)), 500, 1900)
    assert (scale, matched, remark) == (1, "neither", "no length of spins brings the clock to serving's 1900 MHz")
    scale, matched, remark = calibration.choose(points((0, 300, 1980), (1, 250, 1980)), 400, 1700)
    assert (scale, matched) == (0, "neither")
    assert "+16.5% off serving's: another cause than power sets it" in remark
    assert "400 W, is outside of what the replays drew" in remark


def rows_of(gaps: list[float], scale: float, clock: float) -> RowCalibration:
    return RowCalibration(
        gaps_s=[gap * US for gap in gaps],
        tpot_s=1e-3,
        serving_power_w=400,
        serving_clock_mhz=clock,
        points=points((0, 500, 1500), (1, 400, clock)),
        scale=scale,
        matched="clock",
        remark="",
    )


def calibrated(**changes: Any) -> Calibration:
    given: dict[str, Any] = {
        "capture": "c",
        "model": "m",
        "gpu_name": "NVIDIA H200",
        "power_limit_w": 700.0,
        "positions": ["a", "b"],
        "serving": "results/x",
        "rows": {1: rows_of([10, 20], 1.0, 1980), 9: rows_of([50, 20], 0.5, 1900)},
    }
    return Calibration(**(given | changes))


def test_row_counts_between_two_are_interpolated_and_nothing_is_extrapolated() -> None:
    gaps_s, scale, clock = calibration.at_rows(calibrated(), 3)
    assert (micro(gaps_s), scale, clock) == ([20, 20], 0.875, 1960)
    assert micro(calibration.at_rows(calibrated(), 9)[0]) == [50, 20]
    for rows in (10, 16):
        with pytest.raises(UsageError, match=f"has 1, 9 rows, and {rows} is not between them"):
            calibration.at_rows(calibrated(), rows)


def test_a_spin_is_in_cycles_of_servings_clock_and_parts_two_kernels_at_least() -> None:
    assert calibration.spins([10 * US, 0.0, 1e-12], 0.5, 1980) == [9900, 0, 1]
    assert calibration.spins([10 * US], 0.0, 1980) == [0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"gpu_name": "NVIDIA H100"}, "it was made on NVIDIA H100, this is NVIDIA H200"),
        ({"power_limit_w": 500.0}, "its power limit was 500 W, here it is 700 W"),
        ({"power_limit_w": None}, "its power limit was not known, here it is 700 W"),
        ({"positions": ["a"]}, "it has 1 positions, and the capture has others"),
        ({"model": "other"}, "it is of the model other, the capture of m"),
    ],
)
def test_a_calibration_holds_for_its_card_limit_and_model(changes: dict[str, Any], reason: str | None) -> None:
    device = Device(kind="cuda", name="NVIDIA H200", torch="2", power_limit_w=700.0)
    found = calibration.does_not_apply(calibrated(**changes), device, ["a", "b"], "m")
    assert len(found) == (reason is not None)
    assert reason is None or reason in found[0]


def test_a_clock_that_is_not_servings_says_which_way_it_misleads() -> None:
    assert calibration.clock_remark(1950, 1980) is None
    low, high = calibration.clock_remark(1400, 1980), calibration.clock_remark(1980, 1700)
    assert low is not None
    assert high is not None
    assert "1400 MHz, is 29% below serving's 1980 MHz" in low
    assert "arithmetic or latency look slower here than they are in serving, those bound by memory do not" in low
    assert "16% above" in high
    assert "look faster here" in high


# Tuning.


def segment(candidate: str, step_us: float, positions: list[float] | None = None, **changes: Any) -> Segment:
    given: dict[str, Any] = {
        "candidate": candidate,
        "rows": 1,
        "proxy": False,
        "started_s": 0.0,
        "ended_s": 1.0,
        "step_s": step_us * US,
        "step_p10_s": step_us * US,
        "step_p90_s": step_us * US,
        "batches": 3,
        "replays_a_batch": 1,
        "copies": 1,
        "positions_s": None if positions is None else [one * US for one in positions],
    }
    return Segment(**(given | changes))


def checked(name: str, by_shape: dict[str, dict[str, Any]], differing: list[str] | None = None) -> CandidateCheck:
    return CandidateCheck(
        name=name,
        rows=1,
        function="f",
        by_shape=by_shape,
        reference="r",
        worst_relative_error=1e-3,
        worst_layer="a",
        bit_identical=not differing,
        differing=differing or [],
    )


SHAPES = ["8x4", "16x4", "8x4"]


def test_every_graph_runs_one_option_of_each_shape_and_none_is_ranked_twice() -> None:
    options: dict[str, Sequence[dict[str, Any]]] = {"8x4": [{"b": 1}, {"b": 2}], "16x4": [{"b": 3}], "4x4": []}
    made = tuning.groups(options)
    assert made == [{"8x4": {"b": 1}, "16x4": {"b": 3}}, {"8x4": {"b": 2}, "16x4": {"b": 3}}]
    tried = [
        (segment("option-0", 30, [9, 12, 9]), checked("option-0", made[0], ["8x4"])),
        (segment("option-1", 30, [11, 99, 11]), checked("option-1", made[1])),
    ]
    found = tuning.rank(
        1, SHAPES, segment("production", 31, [10, 11, 10]), segment("production", 31, [10, 11, 10]), tried
    )
    assert found.refused is None
    assert [(one.options, round(one.change, 6), one.bit_identical) for one in found.shapes["8x4"]] == [
        ({"b": 1}, -0.1, False),
        ({"b": 2}, 0.1, True),
    ]
    assert [one.candidate for one in found.shapes["16x4"]] == ["option-0"]
    assert tuning.chosen(found, exact=False) == {"8x4": {"b": 1}}
    assert tuning.chosen(found, exact=True) == {}  # the identical one is slower than production


def test_a_machine_that_drifted_ranks_nothing() -> None:
    tried = [(segment("option-0", 20, [5, 5, 5]), checked("option-0", {"8x4": {}}))]
    first, last = segment("production", 30.0, [10, 10, 10]), segment("production", 30.6, [10, 10, 10])
    found = tuning.rank(1, SHAPES, first, last, tried)
    assert found.drift == pytest.approx(0.02)
    assert found.refused is not None
    assert "production took +2.00% between its two segments (more than 1.0%)" in found.refused
    assert found.shapes == {"8x4": [], "16x4": []}
    assert tuning.chosen(found, exact=False) == {}
    assert tuning.rank(1, SHAPES, first, last, tried, most_drift=0.03).refused is None
    missing = tuning.rank(1, SHAPES, first, None, tried)
    assert missing.refused == "production was not replayed again: the drift is not known"
    unknown = tuning.rank(1, SHAPES, segment("production", 30, positions_absent="no kernels"), first, tried)
    assert unknown.refused == "times of positions are not known: no kernels"


# Validation.


def replayed(*segments: Segment) -> Replay:
    return Replay(
        kind="run",
        status="completed",
        capture="c",
        made_at="2026-01-01T00:00:00+00:00",
        abharness="0",
        device=Device(kind="cuda", torch="2"),
        positions=["a"],
        shapes=["8x4"],
        production="production",
        tolerance=0.01,
        segments=list(segments),
    )


def served(tpot_us: float) -> serving.Serving:
    return serving.Serving(Path("run"), "baseline", 1, tpot_us * US, 400.0, 1980.0, 700.0, "m", "NVIDIA H200")


def test_predictions_stand_beside_serving_with_their_error_in_points() -> None:
    spun = {"proxy": True, "scale": 1.0}
    gpu = GpuWindow(uuid="GPU-1", samples=1, expected_samples=1, coverage=1.0, sm_clock_mhz=1500.0)
    replay = replayed(
        segment("production", 600, gpu=gpu),
        segment("fast", 400, gpu=gpu),
        segment("production", 1000, **spun),
        segment("fast", 850, **spun),
    )
    found = validation.validate(replay, "fast", served(1000), served(860))
    assert found.measured == pytest.approx(-0.14)
    assert [(one.proxy, round(one.predicted, 6)) for one in found.predictions] == [(False, -0.2), (True, -0.15)]
    assert [round(found.error_points(one), 6) for one in found.predictions] == [-6, -1]
    assert [one.clock_mhz for one in found.predictions] == [1500, None]
    with pytest.raises(UsageError, match="no segments of production and slow at 1 rows"):
        validation.predictions(replay, "slow", 1, 1e-3)


def test_records_are_read_as_they_were_written_and_of_this_version_only(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_model(path, calibrated())
    assert read_record(path, Calibration) == calibrated()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema_version": 9}))
    with pytest.raises(RecordError, match="schema version 9; this abharness reads 1"):
        read_record(path, Calibration)
    path.write_text("{}")
    with pytest.raises(RecordError):
        read_record(path, Calibration)
