"""A ready server -> traced phases: short load under vLLM's torch profiler, after everything that is measured.

A trace that cannot be taken loses nothing: the phase says why, and the launch goes on.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from abharness import endpoints
from abharness.errors import AbharnessError, LoadFailed, ProfilerFailed
from abharness.load import Load
from abharness.plan import PlannedLaunch, Shape, trace_shapes
from abharness.record import TracedPhase
from abharness.runs import KERNELS_DIR, TRACES_DIR
from abharness.trace import read_trace, write_kernels

PROFILER_TIMEOUT_S = 300.0
"""Longest wait for the profiler: at its end it writes its files, which takes seconds for thousands of kernels."""


def trace_launch(load: Load, planned: PlannedLaunch, folder: Path, enter: Callable[[str], None]) -> list[TracedPhase]:
    """Trace every phase that the spec asks for.

    Args:
        load: The launch's load, which is over.
        planned: The launch.
        folder: Its folder; tables go to `kernels/`, the profiler's files to `traces/`.
        enter: Told the name of each phase that begins.

    Returns:
        One record a phase, also for those that could not be traced.
    """
    phases: list[TracedPhase] = []
    failed_in: str | None = None
    for shape in trace_shapes(load.spec):
        enter(f"trace {shape.phase}")
        started_s = time.monotonic()
        tables = _Tables(folder)
        absent: str | None = None
        try:
            if failed_in is not None:
                # One that hangs would hang for minutes in every phase.
                raise LoadFailed(f"not tried, since the profiler failed in {failed_in}")
            tables.fill(shape, load, planned.trace_dir)
        except (AbharnessError, OSError) as error:
            absent = str(error)
            failed_in = failed_in or (shape.phase if isinstance(error, ProfilerFailed) else None)
        if absent:
            load.run.reporter.warn(f"trace {shape.phase}: {absent}")
        phases.append(
            TracedPhase(
                name=shape.phase,
                kind=shape.kind,
                input_len=shape.input_len,
                output_len=shape.output_len,
                requests=shape.num_prompts,
                rows=shape.max_concurrency if shape.kind == "decode" else None,
                started_s=started_s,
                ended_s=time.monotonic(),
                files=tables.files,
                raw=tables.raw,
                absent=absent,
            )
        )
    return phases


class _Tables:
    """What came of one phase: kernel tables and the profiler's own files with their sizes, as far as it got."""

    def __init__(self, folder: Path) -> None:
        self.files: list[str] = []
        self.raw: dict[str, int] = {}
        self._folder = folder

    def fill(self, shape: Shape, load: Load, written_to: Path) -> None:
        """Trace the phase.

        Raises:
            AbharnessError: A request, the profiler or the reading of its files failed.
            OSError: A file could not be moved or written.
        """
        # A phase that failed may have left something: it is not this phase's.
        left = set(written_to.glob("*"))
        _profile(shape, load)
        new = sorted((path for path in written_to.glob("*.trace.json*") if path not in left), key=_by_rank)
        if not new:
            raise LoadFailed(f"the profiler wrote no trace to {written_to}")
        for rank, path in enumerate(_kept(new, self._folder / TRACES_DIR, shape.phase)):
            self.raw[str(path.relative_to(self._folder))] = path.stat().st_size
            table = self._folder / KERNELS_DIR / f"{shape.phase}.{rank}.parquet"
            table.parent.mkdir(exist_ok=True)
            write_kernels(table, read_trace(path))
            self.files.append(str(table.relative_to(self._folder)))


def _profile(shape: Shape, load: Load) -> None:
    """Send the phase's requests twice, the second time under the profiler.

    Raises:
        LoadFailed: A request failed.
        ProfilerFailed: The profiler did not answer.
    """
    _send(shape, load, "warm-up")
    endpoints.profile(load.base_url, "start", timeout_s=PROFILER_TIMEOUT_S)
    try:
        _send(shape, load, "traced")
    except BaseException:
        with contextlib.suppress(ProfilerFailed):  # the first error is the one to tell
            endpoints.profile(load.base_url, "stop", timeout_s=PROFILER_TIMEOUT_S)
        raise
    endpoints.profile(load.base_url, "stop", timeout_s=PROFILER_TIMEOUT_S)


def _send(shape: Shape, load: Load, part: str) -> None:
    sent = load.next_prompts(shape, shape.num_prompts, part, shape.input_len)
    traffic = load.drive(shape, sent, shape.output_len)
    failed = [request.error for request in traffic.requests if request.error]
    if failed:
        raise LoadFailed(f"{len(failed)} of {len(sent)} requests failed: {failed[0]}")


def _by_rank(path: Path) -> list[int]:
    """Sorts by the rank that a file's name begins with, as a number: 10 comes behind 9."""
    return [int(number) for number in re.findall(r"\d+", path.name)]


def _kept(written: list[Path], traces: Path, phase: str) -> list[Path]:
    """Move the profiler's files to the launch's folder, one a process; their names begin with its rank."""
    kept = []
    for rank, path in enumerate(written):
        traces.mkdir(exist_ok=True)
        kept.append(traces / f"{phase}.{rank}{'.json.gz' if path.suffix == '.gz' else '.json'}")
        shutil.move(path, kept[-1])
    return kept
