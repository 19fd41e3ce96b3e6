"""One trace, or two side by side, as text or JSON, for `abharness trace`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from abharness.errors import UsageError
from abharness.kernels import Differing, KernelUse, cut, differing, step_times, table, uses
from abharness.timeline import Phase, Trace

_PROFILERS = {"kineto": "torch profiler", "nsys": "Nsight Systems"}
_ONLY_LIMIT = 20
"""Kernels of one file only that the text names; the JSON has all."""


def text(paths: Sequence[Path], traces: Sequence[Trace], phase: Phase | None, top: int) -> str:
    """What `abharness trace` prints.

    Raises:
        UsageError: A phase is asked for and a trace has no steps.
    """
    used = _uses(paths, traces, phase)
    marks = ["a: ", "b: "] if len(traces) > 1 else [""]
    lines: list[str] = []
    for mark, path, trace in zip(marks, paths, traces, strict=False):
        lines += [f"{mark}{path}", *(f"  {line}" for line in _head(trace))]
    which = f"{_rows(traces[0])} of {phase} steps" if phase else f"all {_rows(traces[0])}"
    lines += ["", which, *table(used[0], used[1] if len(used) > 1 else None, top)]
    if len(traces) > 1:
        lines += ["", *_difference(traces, used)]
    return "\n".join(lines) + "\n"


def as_json(paths: Sequence[Path], traces: Sequence[Trace], phase: Phase | None) -> str:
    """The same for machines: every kernel with its full name, seconds, None where not known.

    Raises:
        UsageError: A phase is asked for and a trace has no steps.
    """
    used = _uses(paths, traces, phase)
    body: dict[str, Any] = {
        "phase": phase,
        "files": [
            {
                "path": str(path),
                "source": trace.source,
                "problem": trace.problem,
                "unsegmented": trace.unsegmented,
                "on_device": trace.on_device,
                "repaired": trace.repaired,
                "rows": len(trace.kernels),
                "steps": {str(name or "other"): asdict(times) for name, times in step_times(trace).items()},
                "kernels": [asdict(use) for use in one.values()],
            }
            for path, trace, one in zip(paths, traces, used, strict=True)
        ],
    }
    if len(traces) > 1:
        refusal = _incomparable(traces, used)
        found = None if refusal else _differing(used)
        body["only_a"] = found and found.only_a
        body["only_b"] = found and found.only_b
        body["not_compared"] = refusal
        body["caution"] = _caution(traces)
    return json.dumps(body, indent=2, allow_nan=False) + "\n"


def _uses(paths: Sequence[Path], traces: Sequence[Trace], phase: Phase | None) -> list[dict[str, KernelUse]]:
    for path, trace in zip(paths, traces, strict=True):
        if phase and trace.unsegmented:
            raise UsageError(f"{path} has no {phase} steps: {trace.unsegmented}", hint="leave --phase out")
    return [uses(trace, phase) for trace in traces]


def _head(trace: Trace) -> list[str]:
    whole = "whole" if trace.problem is None else f"NOT whole: {trace.problem}"
    lines = [f"{_PROFILERS[trace.source]}, {len(trace.kernels)} {_rows(trace)}, {whole}"]
    if trace.repaired:
        lines.append(f"{trace.repaired} events were not valid JSON as written and could be read after all")
    if not trace.on_device:
        lines.append("no device activity: the rows are CPU operators, their times without the operators they called")
    if trace.unsegmented:
        lines.append(f"no steps: {trace.unsegmented}")
    for phase, times in step_times(trace).items():
        period = f"{times.period_s * 1e3:.3f} ms from one's start to the next" if times.period_s is not None else ""
        busy = f"{times.busy_s * 1e3:.3f} ms of {_rows(trace)} in one" if times.busy_s is not None else ""
        medians = ", ".join(part for part in (period, busy) if part)
        lines.append(f"{phase or 'other'} steps: {times.count}" + (f"; medians: {medians}" if medians else ""))
    return lines


def _rows(trace: Trace) -> str:
    return "kernels and copies" if trace.on_device else "operators"


def _differing(used: Sequence[Mapping[str, KernelUse]]) -> Differing:
    return differing(used[:1], used[1:])


def _difference(traces: Sequence[Trace], used: Sequence[Mapping[str, KernelUse]]) -> list[str]:
    refusal = _incomparable(traces, used)
    if refusal:
        return [f"which ones only one file has is not told: {refusal}"]
    found = _differing(used)
    lines: list[str] = []
    for mark, names, one in (("a", found.only_a, used[0]), ("b", found.only_b, used[1])):
        lines.append(f"only in {mark}: {len(names) or 'none'}")
        for name in sorted(names, key=lambda name: -one[name].total_s)[:_ONLY_LIMIT]:
            lines.append(f"  {one[name].calls} x {cut(name)}")
        if len(names) > _ONLY_LIMIT:
            lines.append(f"  and {len(names) - _ONLY_LIMIT} more (--json names all)")
    caution = _caution(traces)
    return [*lines, f"caution: {caution}"] if caution else lines


def _incomparable(traces: Sequence[Trace], used: Sequence[Mapping[str, KernelUse]]) -> str | None:
    if traces[0].on_device != traces[1].on_device:
        return "one holds kernels and the other CPU operators"
    for mark, one in zip("ab", used, strict=True):
        if not one:
            return f"{mark} has nothing to compare"
    return None


def _caution(traces: Sequence[Trace]) -> str | None:
    broken = [mark for mark, trace in zip("ab", traces, strict=True) if trace.problem]
    if broken:
        return f"{' and '.join(broken)} not whole: what is absent may have run"
    if traces[0].source != traces[1].source:
        return "two profilers: the same kernel may have two names"
    return None
