"""The records of what was seen around a measured window: the GPUs, the sampling of them, late compiling."""

from __future__ import annotations

from typing import Literal

from abharness.base import Model

PowerKind = Literal["instant", "average", "unspecified"]
"""What a power reading is: of this instant, an average over about a second, or whichever the architecture gives."""

EnergySource = Literal["counter", "integrated power"]


class GpuWindow(Model):
    """What one GPU did while a cell was measured, from the samples inside its window; None is unknown, never 0.

    Attributes:
        uuid: NVML UUID.
        samples: Samples inside the window.
        expected_samples: Whole sampling intervals that fit into it.
        coverage: `samples` over `expected_samples`.
        sm_clock_mhz: Median SM clock, MHz.
        sm_clock_mhz_min: Lowest SM clock, MHz.
        mem_clock_mhz: Median memory clock, MHz.
        power_w: Median power draw, watts, as the driver reports it (its own averaging included).
        power_mean_w: Mean of the same.
        power_kind: What the power reading is; None where power was not read, or in records from before this was kept.
        power_limit_w: Median power limit in force, watts.
        power_limit_w_min: The lowest, where it changed within the window; else None.
        power_limit_w_max: The highest, likewise.
        power_limit_changed: It changed within the window.
        energy_j: Joules in the window, by `energy_source`. To be used only where `energy_absent` is None.
        energy_integral_j: Power integrated over the window, joules.
        energy_source: Where `energy_j` comes from.
        energy_absent: Why `energy_j` may not be used, or is None. Both are None in records from before there was any.
        idle_power_w: Mean power while the server was loaded and idle (`Sampling`), watts.
        temperature_c_max: Highest temperature, degrees Celsius.
        utilization: Median share of time in which a kernel ran, 0 to 1.
        utilization_max: Highest of the same.
        memory_used_bytes_max: Most device memory in use, by anybody.
        memory_used_bytes_before: The same before the server was started.
        reasons: Share of the samples in which the driver gave each reason for its clocks; absent is 0 of them.
        missing: Field -> why the device has no such reading.
        errors: NVML's words for samples of this window that failed, each once.
    """

    uuid: str
    samples: int
    expected_samples: int
    coverage: float
    sm_clock_mhz: float | None = None
    sm_clock_mhz_min: float | None = None
    mem_clock_mhz: float | None = None
    power_w: float | None = None
    power_mean_w: float | None = None
    power_kind: PowerKind | None = None
    power_limit_w: float | None = None
    power_limit_w_min: float | None = None
    power_limit_w_max: float | None = None
    power_limit_changed: bool = False
    energy_j: float | None = None
    energy_integral_j: float | None = None
    energy_source: EnergySource | None = None
    energy_absent: str | None = None
    idle_power_w: float | None = None
    temperature_c_max: float | None = None
    utilization: float | None = None
    utilization_max: float | None = None
    memory_used_bytes_max: int | None = None
    memory_used_bytes_before: int | None = None
    reasons: dict[str, float] | None = None
    missing: dict[str, str] = {}
    errors: list[str] = []


class Sampling(Model):
    """How the GPUs of a launch were sampled; the samples themselves are in `telemetry.parquet`.

    Attributes:
        interval_s: Between two samples, as it was kept.
        asked_interval_s: As the spec has it; None where it leaves the choice.
        read_cpu_s: CPU seconds that one look at all GPUs takes: what bounds the interval from below.
        started_s: First sample due, seconds on the clock of the requests.
        ended_s: Last moment of sampling.
        samples: Samples taken, over all GPUs.
        cpu_s: CPU seconds that the sampling thread used: its share of the client's own cost.
        failures: Samples that failed.
        errors: NVML's words for them with the moment each was first seen, at most 20.
        memory_before_bytes: By GPU, device memory in use before the server was started.
        missing: By GPU, field -> why the device has no such reading.
        power_kind: By GPU, what its power reading is.
        energy_period_s: By GPU, median gap between two steps of its energy counter, measured before the load; a GPU
            whose counter was not seen to move often enough is not in it.
        idle_power_w: By GPU, mean power while the server was loaded and idle, watts; a GPU of which it is not known is
            not in it.
        idle_started_s: When that was, on the clock of the requests; None where it was not looked at.
        idle_ended_s: Its end.
    """

    interval_s: float
    asked_interval_s: float | None = None
    read_cpu_s: float | None = None
    started_s: float
    ended_s: float
    samples: int
    cpu_s: float
    failures: int = 0
    errors: list[str] = []
    memory_before_bytes: dict[str, int] = {}
    missing: dict[str, dict[str, str]] = {}
    power_kind: dict[str, PowerKind] = {}
    energy_period_s: dict[str, float] = {}
    idle_power_w: dict[str, float] = {}
    idle_started_s: float | None = None
    idle_ended_s: float | None = None


class HostLoad(Model):
    """What else the machine's CPUs did while a cell was measured.

    Attributes:
        cpus: Logical CPUs of the machine.
        other_cpus: CPU seconds a second of everything but the server's tree and the client.
        stolen_cpus: CPU seconds a second that a hypervisor gave to others.
    """

    cpus: int
    other_cpus: float
    stolen_cpus: float


class Compilation(Model):
    """What was compiled while a cell was measured, by two witnesses: the server's log, and its own compile caches.

    Attributes:
        lines: Log lines of that time which tell of compiling, at most 20, each cut to 400 characters.
        lines_total: How many there were.
        files: Files that appeared in the launch's compile caches, `VARIABLE/path`, at most 20.
        files_total: How many there were.
        not_checked: What could not be looked at, and why.
    """

    lines: list[str] = []
    lines_total: int = 0
    files: list[str] = []
    files_total: int = 0
    not_checked: list[str] = []
