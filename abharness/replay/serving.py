"""A recorded run -> what a server did at one row count: its time a token, clock and power, and the kernels of its steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abharness.errors import UsageError
from abharness.metrics import cell_metrics
from abharness.record import CellRecord, Variant
from abharness.replay.attribution import Interval, intervals
from abharness.runs import CellKey, Launch, Run, find_runs, read_run
from abharness.timeline import Kernels, Trace
from abharness.windows import GpuWindow


@dataclass(frozen=True, slots=True)
class Serving:
    """One variant of a run while so many requests decoded.

    Attributes:
        run: Folder of the run.
        variant: Which variant.
        rows: Requests that decoded together.
        tpot_s: Seconds from one token to the next: median over launches of the median over requests.
        power_w: Mean power, watts; None where it was not sampled. The next two likewise.
        sm_clock_mhz: Median SM clock.
        power_limit_w: Median power limit.
        model: As the server had it.
        gpu_name: The card.
    """

    run: Path
    variant: Variant
    rows: int
    tpot_s: float
    power_w: float | None
    sm_clock_mhz: float | None
    power_limit_w: float | None
    model: str
    gpu_name: str | None


def open_run(folder: Path) -> Run:
    """The one run in a folder.

    Raises:
        UsageError: There are several.
        RecordError: There is none, or it is damaged.
    """
    found = find_runs([folder])
    if len(found) > 1:
        raise UsageError(f"{folder} holds {len(found)} runs", hint="give the folder of one of them")
    return read_run(found[0])


def row_counts(run: Run, variant: Variant) -> list[int]:
    """Row counts at which a variant decoded."""
    return sorted({cell.max_concurrency for launch in run.of(variant) for cell in _decode_cells(launch)})


def serving(run: Run, variant: Variant, rows: int) -> Serving:
    """What a variant did with so many rows.

    Raises:
        UsageError: The run has no such cell, or no time of it.
    """
    tpots: list[float] = []
    windows: list[GpuWindow] = []
    for launch in run.of(variant):
        found = []
        for cell in _decode_cells(launch):
            if cell.max_concurrency != rows:
                continue
            tpot = cell_metrics(cell, launch.requests.get((CellKey.of(cell), cell.repeat), []))["tpot"]
            if tpot is not None:
                found.append(tpot)
            windows += (cell.gpus_steady or cell.gpus or [])[:1]
        if found:
            tpots.append(statistics.median(found))
    if not tpots:
        counts = row_counts(run, variant)
        raise UsageError(
            f"{run.path}: no completed launch of the {variant} decoded with max_concurrency {rows}",
            hint=f"it has {', '.join(map(str, counts))}" if counts else "it has no decode workload",
        )
    first = run.of(variant)[0]
    return Serving(
        run=run.path,
        variant=variant,
        rows=rows,
        tpot_s=statistics.median(tpots),
        power_w=_median(windows, lambda window: window.power_mean_w),
        sm_clock_mhz=_median(windows, lambda window: window.sm_clock_mhz),
        power_limit_w=_median(windows, lambda window: window.power_limit_w),
        model=first.record.model,
        gpu_name=_gpu_name(run),
    )


def decode_steps(run: Run, variant: Variant, rows: int) -> list[list[Interval]]:
    """The kernels of every traced step in which so many rows decoded, and nothing else was done.

    Raises:
        UsageError: There is no trace of such steps.
    """
    found: list[list[Interval]] = []
    why = "the run was not traced"
    for launch in run.of(variant):
        for executed in launch.executed:
            if executed.phase.kind != "decode" or executed.phase.rows != rows:
                continue
            why = executed.absent or "its traces have no such step"
            for trace in executed.traces:
                found += _steps(trace, rows)
    if not found:
        raise UsageError(
            f"{run.path}: no traced step of the {variant} decodes {rows} rows: {why}",
            hint=f"run the experiment with --trace and trace.decode: [{rows}] in its spec",
        )
    return found


def _steps(trace: Trace, rows: int) -> list[list[Interval]]:
    wanted = {step.index for step in trace.steps if step.phase == "decode" and step.generation_requests == rows}
    by_step: dict[int, list[Interval]] = {index: [] for index in sorted(wanted)}
    kernels: Kernels = trace.kernels
    for place, interval in zip(kernels.step, intervals(kernels), strict=True):
        if place in by_step:
            by_step[place].append(interval)
    return [one for one in by_step.values() if one]


def _decode_cells(launch: Launch) -> list[CellRecord]:
    return [cell for cell in launch.record.cells if cell.kind == "decode"]


def _median(windows: Sequence[GpuWindow], value: Callable[[GpuWindow], float | None]) -> float | None:
    known = [one for window in windows if (one := value(window)) is not None]
    return statistics.median(known) if known else None


def _gpu_name(run: Run) -> str | None:
    gpu: Any = run.record.provenance.get("gpu") if isinstance(run.record.provenance, dict) else None
    devices = gpu.get("devices", []) if isinstance(gpu, dict) else []
    return devices[0].get("name") if devices else None
