"""A ready server -> traced phases: short load under vLLM's torch profiler, after everything that is measured.

A trace that cannot be taken loses nothing: the phase says why, and the launch goes on.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from abharness import endpoints
from abharness.errors import AbharnessError, LoadFailed
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
    for shape in trace_shapes(load.spec):
        enter(f"trace {shape.phase}")
        phases.append(_phase(shape, load, planned.trace_dir, folder))
    return phases


def _phase(shape: Shape, load: Load, written_to: Path, folder: Path) -> TracedPhase:
    started_s = time.monotonic()
    files: list[str] = []
    raw: dict[str, int] = {}
    absent: str | None = None
    try:
        # A phase that failed may have left something: it is not this phase's.
        left = set(written_to.glob("*"))
        started_s = _profiled(shape, load)
        new = sorted(path for path in written_to.glob("*.trace.json*") if path not in left)
        for rank, path in enumerate(_kept(new, folder / TRACES_DIR, shape.phase)):
            raw[str(path.relative_to(folder))] = path.stat().st_size
            table = folder / KERNELS_DIR / f"{shape.phase}.{rank}.parquet"
            table.parent.mkdir(exist_ok=True)
            write_kernels(table, read_trace(path))
            files.append(str(table.relative_to(folder)))
        if not files:
            absent = f"the profiler wrote no trace to {written_to}"
    except AbharnessError as error:
        absent = str(error)
    if absent:
        load.run.reporter.note(f"trace {shape.phase}: {absent}")
    return TracedPhase(
        name=shape.phase,
        kind=shape.kind,
        input_len=shape.input_len,
        output_len=shape.output_len,
        requests=shape.num_prompts,
        rows=shape.max_concurrency if shape.kind == "decode" else None,
        started_s=started_s,
        ended_s=time.monotonic(),
        files=files,
        raw=raw,
        absent=absent,
    )


def _profiled(shape: Shape, load: Load) -> float:
    """Send the phase's requests twice, the second time under the profiler.

    Returns:
        When the profiler was started, monotonic seconds.

    Raises:
        LoadFailed: A request failed, or the profiler did not answer.
    """
    _send(shape, load, "warm-up")
    started_s = time.monotonic()
    endpoints.profile(load.base_url, "start", timeout_s=PROFILER_TIMEOUT_S)
    try:
        _send(shape, load, "traced")
    except BaseException:
        with contextlib.suppress(LoadFailed):  # the first error is the one to tell
            endpoints.profile(load.base_url, "stop", timeout_s=PROFILER_TIMEOUT_S)
        raise
    endpoints.profile(load.base_url, "stop", timeout_s=PROFILER_TIMEOUT_S)
    return started_s


def _send(shape: Shape, load: Load, part: str) -> None:
    sent = load.next_prompts(shape, shape.num_prompts, part, shape.input_len)
    traffic = load.drive(shape, sent, shape.output_len)
    failed = [request.error for request in traffic.requests if request.error]
    if failed:
        raise LoadFailed(f"{len(failed)} of {len(sent)} requests failed: {failed[0]}")


def _kept(written: list[Path], traces: Path, phase: str) -> list[Path]:
    """Move the profiler's files to the launch's folder, one a process; their names begin with its rank."""
    kept = []
    for rank, path in enumerate(written):
        traces.mkdir(exist_ok=True)
        kept.append(traces / f"{phase}.{rank}{'.json.gz' if path.suffix == '.gz' else '.json'}")
        shutil.move(path, kept[-1])
    return kept
