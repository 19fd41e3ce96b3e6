"""The energy of a window: when it is known, why it is not, and how the sampler measures what it rests on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from abharness import sampler as sampler_module
from abharness.energy import Conditions, Energy, idle_power_w, of_window, steps_of
from abharness.errors import GpuError
from abharness.sampler import Sampler
from abharness.samples import Reading, Sample, read_samples, summarise, write_samples
from abharness.windows import GpuWindow, PowerKind, Sampling

INSTANT = Conditions(interval_s=0.1, period_s=0.1, power_kind="instant")


def series(
    of: Callable[[float], float], started_s: float, ended_s: float, every_s: float = 0.1
) -> list[tuple[float, float]]:
    count = round((ended_s - started_s) / every_s)
    return [(started_s + index * every_s, of(started_s + index * every_s)) for index in range(count + 1)]


def at(power_w: float, start_j: float = 9000.0) -> Callable[[float], float]:
    return lambda moment: start_j + power_w * moment


def flat(power_w: float) -> Callable[[float], float]:
    return lambda moment: power_w


def measured(length_s: float = 5.0, conditions: Conditions = INSTANT, **lists: Any) -> Energy:
    """A window that starts at 1 s, of a device at 400 W; `counter` and `power` replace what is read."""
    around = {"counter": series(at(400), 0, length_s + 2), "power": series(flat(400), 0, length_s + 2), **lists}
    return of_window(around["counter"], around["power"], 1.0, 1.0 + length_s, conditions)


def test_counter_and_integrated_power_of_an_even_load() -> None:
    found = measured()
    assert found.energy_j == pytest.approx(2000)
    assert found.integral_j == pytest.approx(2000)
    assert (found.source, found.absent) == ("counter", None)


def test_the_ends_of_a_window_lie_between_samples() -> None:
    counter, power = series(at(400), 0.05, 4.05), series(flat(400), 0.05, 4.05)
    found = of_window(counter, power, 1.0, 3.5, INSTANT)
    assert found.energy_j == pytest.approx(1000)
    assert found.integral_j == pytest.approx(1000)


def test_f4_a_window_of_few_counter_periods_has_no_energy() -> None:
    found = measured(0.52)
    assert found.energy_j is None
    assert found.absent == (
        "window of 0.52 s is shorter than 2.0 s, 20 of the counter's update periods: its energy would be uncertain by more "
        "than 5%"
    )
    assert measured(0.52, Conditions(interval_s=0.05, period_s=0.02, power_kind="instant")).absent is None


@pytest.mark.parametrize("length_s", [0.008, 0.03])
def test_f4_a_window_within_one_step_is_neither_nothing_nor_a_step(length_s: float) -> None:
    found = measured(length_s)
    assert (found.energy_j, found.source) == (None, None)
    assert "shorter" in str(found.absent)


def test_an_unmeasured_period_is_the_longest_known() -> None:
    assert "shorter than 2.0 s" in str(measured(1.9, Conditions(interval_s=0.1)).absent)
    assert measured(2.1, Conditions(interval_s=0.1)).absent is None


def test_a_window_of_few_samples_has_no_energy_however_often_the_counter_moves() -> None:
    rare = Conditions(interval_s=0.5, period_s=0.02, power_kind="instant")
    found = of_window(series(at(400), 0, 6, 0.5), series(flat(400), 0, 6, 0.5), 1.0, 5.0, rare)
    assert "shorter than 5.0 s, 10 of the sampling intervals" in str(found.absent)


def test_f4_a_counter_that_goes_back_is_a_reset_and_no_energy() -> None:
    counter = [(t, joules if t < 3 else joules - 10_000) for t, joules in series(at(400), 0, 7)]
    found = measured(counter=counter)
    assert found.energy_j is None
    assert str(found.absent).startswith("counter reset: it went from 10160.00 J to 200.00 J")


@pytest.mark.parametrize("moment", [1.0, 6.0])
def test_a_reset_between_the_samples_around_an_end_counts(moment: float) -> None:
    """The reading before the start and the one after the end take part in the interpolation."""
    counter = [(t, j if t < moment + 0.01 else j - 1000) for t, j in series(at(400), 0.05, 7.05)]
    found = measured(counter=counter, power=[])
    assert str(found.absent).startswith("counter reset")


def test_a_reset_far_from_the_window_does_not_matter() -> None:
    counter = [(t, j if t >= 0.5 else j + 1000) for t, j in series(at(400), 0, 7)]
    assert measured(counter=counter).absent is None


def test_a_counter_that_stands_still_is_no_energy_of_nothing() -> None:
    found = measured(counter=series(flat(9000), 0, 7))
    assert (found.energy_j, found.source) == (None, None)
    assert found.absent == "the energy counter stood still at 9000.00 J for 5.00 s"
    assert found.integral_j == pytest.approx(2000)


def test_f3_counter_and_integrated_power_that_disagree_are_both_kept_and_withheld() -> None:
    found = measured(counter=series(at(187 / 5), 0, 7), power=series(flat(327 / 5), 0, 7))
    assert found.energy_j == pytest.approx(187)
    assert found.integral_j == pytest.approx(327)
    assert found.absent == "counter 187 J, integrated power 327 J: 43% apart, limit 10%"


@pytest.mark.parametrize(("factor", "withheld"), [(0.91, False), (0.89, True), (1.10, False), (1.13, True)])
def test_they_may_be_a_tenth_apart(factor: float, withheld: bool) -> None:
    found = measured(power=series(flat(400 * factor), 0, 7))
    assert (found.absent is not None) == withheld


@pytest.mark.parametrize(
    ("kept", "where"),
    [
        (lambda t: t >= 1.25, "start"),
        (lambda t: t <= 5.95, "end"),
        (lambda t: 1.25 <= t <= 5.75, "start and end"),
        (lambda t: not 0.75 < t < 1.15, "start"),
    ],
)  # fmt: skip
def test_gaps_at_the_ends_of_a_window(kept: Callable[[float], bool], where: str) -> None:
    found = measured(counter=[point for point in series(at(400), 0, 7) if kept(point[0])])
    assert found.energy_j is None
    assert f"around the {where} of the window: at most 2 intervals of 0.1 s apart" in str(found.absent)


def test_one_missed_sample_at_an_end_is_no_gap() -> None:
    assert measured(counter=[point for point in series(at(400), 0, 7) if abs(point[0] - 1) > 0.05]).absent is None


def test_a_counter_needs_no_samples_in_the_middle() -> None:
    middle = [point for point in series(at(400), 0, 7) if not 2 < point[0] < 5]
    found = measured(counter=middle, power=[(t, 400.0) for t, _ in middle])
    assert found.energy_j == pytest.approx(2000)
    assert (found.integral_j, found.absent) == (None, None)


def test_f1_without_a_counter_integrated_power_is_the_energy() -> None:
    without = Conditions(interval_s=0.1, no_counter="Not Supported", power_kind="unspecified")
    found = of_window([], series(flat(180), 0, 62), 1.0, 61.0, without)
    assert found.energy_j == pytest.approx(10_800)
    assert (found.source, found.absent) == ("integrated power", None)


@pytest.mark.parametrize(
    ("kind", "length_s", "least"),
    [("instant", 1.9, 2), ("average", 9.9, 10), ("unspecified", 9.9, 10)],
)
def test_f2_integrated_power_needs_a_window_that_fits_its_kind(kind: PowerKind, length_s: float, least: int) -> None:
    without = Conditions(interval_s=0.1, power_kind=kind, no_counter="Not Supported")
    found = measured(length_s, without, counter=[])
    assert (found.energy_j, found.source) == (None, None)
    assert found.integral_j == pytest.approx(400 * length_s)
    assert f"needs a window of {least} s ({kind} power), this one has {length_s:.2f} s" in str(found.absent)
    assert measured(least + 0.1, without, counter=[]).source == "integrated power"


def test_f2_integrated_power_of_few_samples_is_no_energy() -> None:
    without = Conditions(interval_s=0.1, power_kind="instant", no_counter="Not Supported")
    some = [point for point in series(flat(400), 0, 7) if not 2 < point[0] < 4]
    found = measured(conditions=without, counter=[], power=some)
    assert (found.energy_j, found.integral_j) == (None, None)
    assert "needs 90% of the samples" in str(found.absent)


def test_f1_neither_counter_nor_power_is_unknown_with_the_reason() -> None:
    found = measured(
        conditions=Conditions(interval_s=0.1, no_counter="shared", no_power="shared"), counter=[], power=[]
    )
    assert found == Energy(absent="neither energy counter nor power: shared")
    found = measured(conditions=Conditions(interval_s=0.1, no_counter="Not Supported"), counter=[], power=[])
    assert "Not Supported; not sampled" in str(found.absent)


def test_power_of_nothing_is_no_energy() -> None:
    without = Conditions(interval_s=0.1, power_kind="instant", no_counter="Not Supported")
    found = measured(conditions=without, counter=[], power=series(flat(0), 0, 7))
    assert found.energy_j is None
    assert "no device draws nothing" in str(found.absent)


def stepped(power_w: float, period_s: float = 0.1) -> Callable[[float], float]:
    return lambda moment: 9000 + power_w * period_s * (moment // period_s)


def test_idle_power_is_taken_from_step_to_step() -> None:
    """3 ms between two looks: where the ends fell by chance, a step of 5% would be lost or won."""
    readings = series(stepped(125), 0.05, 2.33, 0.003)
    assert idle_power_w(readings, 2.0) == pytest.approx(125, rel=0.005)
    assert idle_power_w(readings, 2.5) is None
    assert idle_power_w(series(flat(9000), 0, 3, 0.003), 2.0) is None
    assert idle_power_w([*readings, (2.334, 1.0)], 2.0) is None
    assert idle_power_w([], 2.0) is None


def test_a_step_that_was_not_watched_has_no_moment() -> None:
    assert steps_of([(0.0, 1.0), (0.01, 2.0), (0.9, 3.0), (0.91, 3.0)]) == [(0.01, 2.0)]


class Clock:
    """Time that passes only where somebody sleeps, or works."""

    def __init__(self) -> None:
        self.now = self.cpu = 0.0
        self._lock = threading.Lock()

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.cpu

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


class ScriptedGpu:
    """Devices at an even power on a clock of the test."""

    def __init__(
        self, clock: Clock, uuids: Sequence[str] = ("GPU-1",), *, period_s: float = 0.1, power_w: float = 125.0
    ) -> None:
        self.clock, self.period_s, self.power_w = clock, period_s, power_w
        self.names = list(uuids)
        self.look_s = 0.0
        self.no_counter = False
        self.stands = False
        self.error: Exception | None = None
        self.kind: PowerKind = "instant"

    def uuids(self) -> list[str]:
        return self.names

    def memory_used_bytes(self, uuid: str) -> int:
        return 0

    def compute_pids(self, uuid: str) -> list[int]:
        return []

    def energy_j(self, uuid: str) -> float | None:
        if self.error:
            raise self.error
        if self.no_counter:
            return None
        return 5.0 if self.stands else stepped(self.power_w, self.period_s)(self.clock.now)

    def read(self, uuid: str) -> Reading:
        if self.error:
            raise self.error
        self.clock.cpu += self.look_s
        return Reading(1980, 2619, self.power_w, 40, 0.0, 0, (), self.energy_j(uuid), 700)

    def power_kinds(self) -> dict[str, PowerKind]:
        return dict.fromkeys(self.names, self.kind)

    def missing(self) -> dict[str, dict[str, str]]:
        return {uuid: {"energy_j": "Not Supported"} for uuid in self.names} if self.no_counter else {}

    def describe(self) -> dict[str, Any]:
        return {} if self.names else {"absent": "no GPU"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    fake = SimpleNamespace(monotonic=made.monotonic, sleep=made.sleep, thread_time=made.thread_time)
    monkeypatch.setattr(sampler_module, "time", fake)
    return made


def sampled(
    gpu_: ScriptedGpu, interval_s: float | None = 0.1, alive: Callable[[], str | None] = lambda: None
) -> Sampling:
    one = Sampler(gpu_, interval_s)
    one.start()
    try:
        one.idle(alive)
    finally:
        one.stop()
    found = one.sampling()
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("asked", "period_s", "look_s", "effective"),
    [
        (None, 0.1, 0.0, 0.1),
        (None, 0.02, 0.0, 0.05),
        (None, 0.15, 0.0, 0.15),
        (None, 0.4, 0.0, 0.2),
        (0.5, 0.1, 0.0, 0.5),
        (0.02, 0.1, 0.0, 0.02),
        (0.02, 0.1, 0.01, 0.2),
        (None, 0.1, 0.01, 0.2),
    ],
)
def test_the_interval_is_as_asked_or_as_the_counter_moves_but_takes_no_more_than_a_twentieth_of_a_core(
    asked: float | None, period_s: float, look_s: float, effective: float, clock: Clock
) -> None:
    device = ScriptedGpu(clock, period_s=period_s)
    device.look_s = look_s
    found = sampled(device, asked)
    assert found.energy_period_s["GPU-1"] == pytest.approx(period_s, abs=0.004)
    assert found.interval_s == pytest.approx(effective, abs=0.004)
    assert found.asked_interval_s == asked
    assert found.read_cpu_s == pytest.approx(look_s)


def test_the_power_of_the_idle_server_is_on_record_with_its_time(clock: Clock) -> None:
    found = sampled(ScriptedGpu(clock, ["GPU-1", "GPU-2"]))
    assert found.idle_power_w == pytest.approx({"GPU-1": 125, "GPU-2": 125}, rel=0.01)
    assert found.idle_started_s is not None
    assert found.idle_ended_s is not None
    assert found.idle_ended_s - found.idle_started_s >= 1
    assert found.power_kind == {"GPU-1": "instant", "GPU-2": "instant"}


@pytest.mark.parametrize("fault", ["no_counter", "stands"])
def test_without_a_counter_that_moves_the_idle_power_is_the_mean_of_the_readings(fault: str, clock: Clock) -> None:
    device = ScriptedGpu(clock, power_w=110)
    setattr(device, fault, True)
    found = sampled(device, None)
    assert found.energy_period_s == {}
    assert found.interval_s == 0.1
    assert found.idle_power_w == {"GPU-1": 110}


def test_what_cannot_be_read_is_no_idle_power(clock: Clock) -> None:
    device = ScriptedGpu(clock)
    device.error = GpuError("Unknown Error")
    found = sampled(device)
    assert (found.idle_power_w, found.energy_period_s) == ({}, {})
    assert found.failures > 0


def test_nothing_is_waited_for_without_a_gpu_or_a_server(clock: Clock) -> None:
    before = clock.now
    absent = Sampler(ScriptedGpu(clock, []), None)
    absent.start()
    absent.idle(lambda: None)
    assert clock.now == before
    found = sampled(ScriptedGpu(clock), alive=lambda: "it died")
    assert clock.now - before < 2
    assert (found.idle_power_w, found.idle_started_s) == ({}, None)


def sample(t_s: float, **values: Any) -> Sample:
    fields: dict[str, Any] = {
        "sm_clock_mhz": 1980, "mem_clock_mhz": 2619, "power_w": 400.0, "temperature_c": 40, "utilization": 1.0,
        "memory_used_bytes": 0, "reasons": (), "energy_j": 9000 + 400 * t_s, "power_limit_w": 700.0,
    }  # fmt: skip
    return Sample(**{**fields, **values}, t_s=t_s, uuid="GPU-1")


def window(samples: Sequence[Sample], started_s: float = 1.0, ended_s: float = 6.0, **of_sampling: Any) -> GpuWindow:
    fields = {"interval_s": 0.1, "started_s": 0, "ended_s": 7, "samples": len(samples), "cpu_s": 0, **of_sampling}
    (found,) = summarise({"GPU-1": samples}, Sampling.model_validate(fields), started_s, ended_s, {})
    return found


def test_a_window_tells_energy_power_and_limit() -> None:
    sampling = {"power_kind": {"GPU-1": "instant"}, "idle_power_w": {"GPU-1": 120}, "energy_period_s": {"GPU-1": 0.1}}
    found = window([sample(index / 10) for index in range(71)], **sampling)
    assert found.energy_j == pytest.approx(2000)
    assert (found.energy_source, found.energy_absent, found.power_kind) == ("counter", None, "instant")
    assert (found.power_mean_w, found.idle_power_w) == (400, 120)
    assert (found.power_limit_w, found.power_limit_changed) == (700, False)
    assert (found.power_limit_w_min, found.power_limit_w_max) == (None, None)


def test_g3_samples_from_before_a_window_say_nothing_about_it() -> None:
    found = window([sample(index / 10) for index in range(10)])
    assert (found.samples, found.power_mean_w, found.power_limit_w, found.sm_clock_mhz) == (0, None, None, None)
    assert found.energy_j is None
    assert "around the start and end of the window" in str(found.energy_absent)


def test_a_power_limit_that_changes_within_a_window_is_seen() -> None:
    found = window([sample(index / 10, power_limit_w=700.0 if index < 50 else 500.0) for index in range(71)])
    assert found.power_limit_changed
    assert (found.power_limit_w, found.power_limit_w_min, found.power_limit_w_max) == (700, 500, 700)


def test_samples_written_before_there_was_an_energy_can_be_read(tmp_path: Path) -> None:
    import pyarrow.parquet

    path = tmp_path / "telemetry.parquet"
    write_samples(path, [sample(index / 10) for index in range(71)])
    table = pyarrow.parquet.read_table(path)
    assert read_samples(path)[3].energy_j == pytest.approx(9120)
    pyarrow.parquet.write_table(table.drop_columns(["energy_j", "power_limit_w"]), path)
    old = read_samples(path)
    assert {(one.energy_j, one.power_limit_w) for one in old} == {(None, None)}
    found = window(old)
    assert (found.energy_j, found.power_limit_w, found.power_kind) == (None, None, None)
    assert "no energy counter (not sampled)" in str(found.energy_absent)
