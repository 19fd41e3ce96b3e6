"""A thread that looks at the GPUs while a server is under load: samples, failures and compute processes out.

Before the load it measures, on the idle server, what the samples rest on: how often the energy counter moves, what a
look costs, and the power of the device that is loaded and idle. It never raises into the run. A look that fails is a
gap, kept with NVML's words; a device that is lost is told by `lost`, which the run asks for. What the thread costs is
measured: it shares the client's interpreter.
"""

from __future__ import annotations

import statistics
import threading
import time
from itertools import pairwise
from typing import TYPE_CHECKING

from abharness import energy
from abharness.errors import GpuLost
from abharness.samples import Sample, by_gpu, summarise
from abharness.windows import GpuWindow, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from abharness.telemetry import Gpu

PIDS_INTERVAL_S = 1.0
"""Between two looks at the processes on a GPU: a process that loads a model is there for longer."""

STOP_WAIT_S = 10.0
"""Longest wait for the thread's end: a driver that hangs must not hang the run."""

KEPT_ERRORS = 20
"""Different failures that are kept in words; all are counted."""

CALIBRATION_S = 0.6
"""Time in which the energy counter's steps are looked for: six of 0.1 s, the longest period known."""

MOST_CALIBRATION_S = 1.5
"""Longest time for that, where the counter has not moved often enough until then."""

CALIBRATION_LOOKS = 3
"""Looks whose median cost counts: the first is dearer than the others."""

CALIBRATION_POLL_S = 0.003
"""Between two looks at the counter meanwhile: small beside every period known, 10 ms and more."""

LEAST_GAPS = 2
"""Gaps between steps of the counter from which a period is told."""

IDLE_S = 1.0
"""Time in which the idle power is measured: with both ends on a step of the counter, off by less than 1.5%."""

STEP_WAIT_S = 0.3
"""Longest wait for the step of the counter that ends it."""

AVERAGING_S = 1.0
"""What an average of power may look back on: that much at the beginning of the idle time is left out."""

CPU_SHARE = 0.05
"""Share of one core that sampling may take: the interval is at least what a look costs over this."""

DEFAULT_INTERVAL_S = 0.1
"""Where the spec leaves the choice and the counter's period is not known."""

INTERVAL_BOUNDS_S = (0.05, 0.2)
"""Where the spec leaves the choice: no more often than the clocks need it, no less often than a short cell does."""

LOOK_WAIT_S = 1.0
"""Longest wait for a look that is asked for."""


class Sampler:
    """Samples the GPUs of one launch from `start` to `stop`.

    Attributes:
        absent: Why there is nothing to sample, or None.
        lost: What NVML said when a device was lost, or None.
        samples: Every sample so far, in order of time.
        pids: By GPU, each process with a compute context and when it was first seen, monotonic seconds.
    """

    def __init__(self, gpu: Gpu, interval_s: float | None) -> None:
        """A sampler of these GPUs.

        Args:
            gpu: The GPUs of the launch.
            interval_s: Seconds between two samples, as asked for: it is kept, since the clocks are sampled at it too, but
                for a look that would cost more than `CPU_SHARE` of a core. A counter that moves less often only repeats
                its value. None: as often as the energy counter moves, within `INTERVAL_BOUNDS_S`.
        """
        self.lost: str | None = None
        self.samples: list[Sample] = []
        self.pids: dict[str, dict[int, float]] = {}
        self._gpu = gpu
        self._asked_interval_s = interval_s
        self._interval_s = interval_s or DEFAULT_INTERVAL_S
        self._uuids = gpu.uuids()
        self.absent: str | None = None if self._uuids else str(gpu.describe().get("absent", "no GPU"))
        self._failures: list[tuple[float, str, str]] = []
        self._memory_before: dict[str, int] = {}
        self._counter: dict[str, list[energy.Point]] = {uuid: [] for uuid in self._uuids}
        self._energy_period_s: dict[str, float] = {}
        self._idle_power_w: dict[str, float] = {}
        self._idle: tuple[float, float] | None = None
        self._read_cpu_s: float | None = None
        self._cpu_s = 0.0
        self._started_s = self._ended_s = self._looked_s = 0.0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def note_memory_before(self) -> None:
        """Remember the memory in use before a server is started: what it takes is seen against this.

        Raises:
            GpuError: A device does not answer.
        """
        self._memory_before = {uuid: self._gpu.memory_used_bytes(uuid) for uuid in self._uuids}

    def start(self) -> None:
        """Calibrate on the idle server, then start sampling; without a GPU there is nothing to start."""
        if self._uuids:
            self.calibrate()
            self._started_s = self._ended_s = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
            self._thread.start()

    def calibrate(self) -> None:
        """Measure what a look costs and how often each energy counter moves, and fix the interval by it.

        Takes `CALIBRATION_S`, up to `MOST_CALIBRATION_S` where a counter moves seldom, and no more than
        `CALIBRATION_LOOKS` looks where no device has one.
        """

        def gaps(uuid: str) -> list[float]:
            steps = energy.steps_of(self._counter[uuid])
            return [later[0] - earlier[0] for earlier, later in pairwise(steps)]

        def done(started_s: float) -> bool:
            waited_s = time.monotonic() - started_s
            known = all(len(gaps(uuid)) >= LEAST_GAPS for uuid, readings in self._counter.items() if readings)
            return waited_s >= (CALIBRATION_S if known else MOST_CALIBRATION_S)

        self._read_cpu_s = statistics.median(self._cost_of_a_look() for _ in range(CALIBRATION_LOOKS))
        self._poll(done)
        for uuid in self._uuids:
            if len(found := gaps(uuid)) >= LEAST_GAPS:
                self._energy_period_s[uuid] = statistics.median(found)
        period = max(self._energy_period_s.values(), default=DEFAULT_INTERVAL_S)
        low, high = INTERVAL_BOUNDS_S
        wanted = self._asked_interval_s or min(high, max(low, period))
        self._interval_s = max(wanted, self._read_cpu_s / CPU_SHARE)

    def idle(self, alive: Callable[[], str | None]) -> None:
        """Measure the power of the GPUs while the loaded server idles, for `IDLE_S` from a step of the energy counter.

        By the energy counter where there is one; else the mean of the power readings. To be called after `start` and
        before the load; returns at once where nothing is sampled or the server is gone.

        Args:
            alive: Why the load cannot go on, or None; returns at once.
        """
        if self._thread is None:
            return
        first_steps = [steps[0][0] for readings in self._counter.values() if (steps := energy.steps_of(readings))]
        begun = min(first_steps, default=self._started_s)
        until = max(first_steps, default=self._started_s + AVERAGING_S) + IDLE_S
        while time.monotonic() < until:
            if alive() is not None or self.lost is not None:
                return
            time.sleep(min(0.05, max(0.0, until - time.monotonic())))
        seen = {uuid: len(energy.steps_of(readings)) for uuid, readings in self._counter.items() if readings}

        def stepped(started_s: float) -> bool:
            moved = [len(energy.steps_of(self._counter[uuid])) > count for uuid, count in seen.items()]
            return all(moved) or time.monotonic() - started_s >= STEP_WAIT_S

        self._poll(stepped)
        self._idle = begun, time.monotonic()
        kinds = self._gpu.power_kinds()
        for uuid in self._uuids:
            power_w = energy.idle_power_w(self._counter[uuid], IDLE_S)
            if power_w is None:
                lead_s = 0.0 if kinds.get(uuid) == "instant" else AVERAGING_S
                power_w = self._mean_power_w(uuid, begun + lead_s)
            if power_w is not None:
                self._idle_power_w[uuid] = power_w

    def stop(self) -> None:
        """End sampling. Safe to call at any moment, and again."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_WAIT_S)

    def sampling(self) -> Sampling | None:
        """How it went so far; None when nothing was sampled for want of a GPU or of a start."""
        if self._thread is None:
            return None
        said: dict[str, float] = {}
        for moment, uuid, text in list(self._failures):
            said.setdefault(f"{uuid}: {text}", moment)
        return Sampling(
            interval_s=self._interval_s,
            asked_interval_s=self._asked_interval_s,
            read_cpu_s=self._read_cpu_s,
            started_s=self._started_s,
            ended_s=self._ended_s,
            samples=len(self.samples),
            cpu_s=self._cpu_s,
            failures=len(self._failures),
            errors=[f"{moment:.3f} s: {text}" for text, moment in list(said.items())[:KEPT_ERRORS]],
            memory_before_bytes=self._memory_before,
            missing=self._gpu.missing(),
            power_kind=self._gpu.power_kinds(),
            energy_period_s=self._energy_period_s,
            idle_power_w=self._idle_power_w,
            idle_started_s=self._idle[0] if self._idle else None,
            idle_ended_s=self._idle[1] if self._idle else None,
        )

    def look_now(self) -> None:
        """Look at the GPUs once now, so that the end of a window that is here has a sample close by.

        Returns when that is done, and in any case after `LOOK_WAIT_S`.
        """
        asked = time.monotonic()
        self._wake.set()
        while self._thread is not None and self._thread.is_alive() and self._looked_s < asked:
            if time.monotonic() - asked > LOOK_WAIT_S:
                return
            time.sleep(0.002)

    def windows(self, started_s: float, ended_s: float) -> list[GpuWindow] | None:
        """What each GPU did in a window that is over; None when nothing is sampled."""
        sampling = self.sampling()
        if sampling is None:
            return None
        failed = [one for one in list(self._failures) if started_s <= one[0] <= ended_s]
        errors = {uuid: list(dict.fromkeys(text for _, of, text in failed if of == uuid)) for uuid in self._uuids}
        samples = by_gpu(list(self.samples))
        return summarise({uuid: samples.get(uuid, []) for uuid in self._uuids}, sampling, started_s, ended_s, errors)

    def _run(self) -> None:
        due = self._started_s
        pids_due = due
        while not self._stop.is_set() and self.lost is None:
            self._wake.clear()
            began = time.monotonic()
            for uuid in self._uuids:
                self._look(uuid)
            self._looked_s = began
            if time.monotonic() >= pids_due:
                pids_due += PIDS_INTERVAL_S
                for uuid in self._uuids:
                    self._look_at_pids(uuid)
            self._cpu_s = time.thread_time()
            self._ended_s = time.monotonic()
            if self._ended_s >= due:
                # A look that came too late is left out, not made up for in a burst.
                due += self._interval_s * max(1, -(-(self._ended_s - due) // self._interval_s))
            if not self._stop.is_set():
                self._wake.wait(max(0.0, due - time.monotonic()))

    def _cost_of_a_look(self) -> float:
        """CPU seconds of this thread for one look at every GPU."""
        before = time.thread_time()
        for uuid in self._uuids:
            try:
                self._gpu.read(uuid)
            except Exception as error:  # a gap, as under load
                self._fail(time.monotonic(), uuid, error)
        return time.thread_time() - before

    def _poll(self, done: Callable[[float], bool]) -> None:
        """Look at the energy counters alone, every `CALIBRATION_POLL_S`, until it is `done` (given when it began)."""
        started_s = time.monotonic()
        polled = [uuid for uuid in self._uuids if "energy_j" not in self._gpu.missing().get(uuid, {})]
        while polled and not done(started_s):
            for uuid in list(polled):
                moment = time.monotonic()
                try:
                    joules = self._gpu.energy_j(uuid)
                except Exception as error:  # as for a look
                    self._fail(moment, uuid, error)
                    joules = None
                if joules is None:
                    polled.remove(uuid)
                else:
                    self._counter[uuid].append((moment, joules))
            time.sleep(CALIBRATION_POLL_S)

    def _mean_power_w(self, uuid: str, since_s: float) -> float | None:
        readings = [one.power_w for one in list(self.samples) if one.uuid == uuid and one.t_s >= since_s]
        known = [value for value in readings if value is not None]
        return statistics.fmean(known) if known else None

    def _look(self, uuid: str) -> None:
        moment = time.monotonic()
        try:
            reading = self._gpu.read(uuid)
        except Exception as error:  # a gap in the record, whatever it was: the run goes on
            self._fail(moment, uuid, error)
            return
        values = {name: getattr(reading, name) for name in reading.__slots__}
        self.samples.append(Sample(**values, t_s=moment, uuid=uuid))

    def _look_at_pids(self, uuid: str) -> None:
        moment = time.monotonic()
        try:
            for pid in self._gpu.compute_pids(uuid):
                self.pids.setdefault(uuid, {}).setdefault(pid, moment)
        except Exception as error:  # as above
            self._fail(moment, uuid, error)

    def _fail(self, moment: float, uuid: str, error: Exception) -> None:
        self._failures.append((moment, uuid, str(error)))
        if isinstance(error, GpuLost):
            self.lost = str(error)
