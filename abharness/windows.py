"""The records of what was seen around a measured window: the GPUs, the sampling of them, late compiling."""

from __future__ import annotations

from abharness.base import Model


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
        interval_s: Asked for.
        started_s: First sample due, seconds on the clock of the requests.
        ended_s: Last moment of sampling.
        samples: Samples taken, over all GPUs.
        cpu_s: CPU seconds that the sampling thread used: its share of the client's own cost.
        failures: Samples that failed.
        errors: NVML's words for them with the moment each was first seen, at most 20.
        memory_before_bytes: By GPU, device memory in use before the server was started.
        missing: By GPU, field -> why the device has no such reading.
    """

    interval_s: float
    started_s: float
    ended_s: float
    samples: int
    cpu_s: float
    failures: int = 0
    errors: list[str] = []
    memory_before_bytes: dict[str, int] = {}
    missing: dict[str, dict[str, str]] = {}


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
