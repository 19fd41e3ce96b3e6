"""A thread that looks at the GPUs while a server is under load: samples, failures and compute processes out.

It never raises into the run. A look that fails is a gap, kept with NVML's words; a device that is lost is told by
`lost`, which the run asks for. What the thread costs is measured: it shares the client's interpreter.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from abharness.errors import GpuLost
from abharness.samples import Sample, by_gpu, summarise
from abharness.windows import GpuWindow, Sampling

if TYPE_CHECKING:
    from abharness.telemetry import Gpu

PIDS_INTERVAL_S = 1.0
"""Between two looks at the processes on a GPU: a process that loads a model is there for longer."""

STOP_WAIT_S = 10.0
"""Longest wait for the thread's end: a driver that hangs must not hang the run."""

KEPT_ERRORS = 20
"""Different failures that are kept in words; all are counted."""


class Sampler:
    """Samples the GPUs of one launch from `start` to `stop`.

    Attributes:
        absent: Why there is nothing to sample, or None.
        lost: What NVML said when a device was lost, or None.
        samples: Every sample so far, in order of time.
        pids: By GPU, each process with a compute context and when it was first seen, monotonic seconds.
    """

    def __init__(self, gpu: Gpu, interval_s: float) -> None:
        self.lost: str | None = None
        self.samples: list[Sample] = []
        self.pids: dict[str, dict[int, float]] = {}
        self._gpu = gpu
        self._interval_s = interval_s
        self._uuids = gpu.uuids()
        self.absent: str | None = None if self._uuids else str(gpu.describe().get("absent", "no GPU"))
        self._failures: list[tuple[float, str, str]] = []
        self._memory_before: dict[str, int] = {}
        self._cpu_s = 0.0
        self._started_s = self._ended_s = 0.0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def note_memory_before(self) -> None:
        """Remember the memory in use before a server is started: what it takes is seen against this.

        Raises:
            GpuError: A device does not answer.
        """
        self._memory_before = {uuid: self._gpu.memory_used_bytes(uuid) for uuid in self._uuids}

    def start(self) -> None:
        """Start sampling; without a GPU there is nothing to start."""
        if self._uuids:
            self._started_s = self._ended_s = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End sampling. Safe to call at any moment, and again."""
        self._stop.set()
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
            started_s=self._started_s,
            ended_s=self._ended_s,
            samples=len(self.samples),
            cpu_s=self._cpu_s,
            failures=len(self._failures),
            errors=[f"{moment:.3f} s: {text}" for text, moment in list(said.items())[:KEPT_ERRORS]],
            memory_before_bytes=self._memory_before,
            missing=self._gpu.missing(),
        )

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
            for uuid in self._uuids:
                self._look(uuid)
            if time.monotonic() >= pids_due:
                pids_due += PIDS_INTERVAL_S
                for uuid in self._uuids:
                    self._look_at_pids(uuid)
            self._cpu_s = time.thread_time()
            self._ended_s = time.monotonic()
            # A look that came too late is left out, not made up for in a burst.
            due += self._interval_s * max(1, -(-(self._ended_s - due) // self._interval_s))
            self._stop.wait(max(0.0, due - time.monotonic()))

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
