"""Kernel tables -> which kernels ran, how often and how long in a step, and which ran in one variant only; pure."""

from __future__ import annotations

import hashlib
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from abharness.timeline import KINDS, UNKNOWN, Kind, Phase, Trace

LABEL_WIDTH = 56
"""Characters of a kernel's name in a table; longer ones are cut in the middle."""

NAME_WIDTH = 200
"""Characters of a full name below a table."""

_WORD = re.compile(r"[A-Za-z_]\w{3,}")
_WRAPPERS = {"device_kernel", "Kernel", "Kernel2"}
"""CUTLASS's kernels that run whatever their first template argument is."""

_CALLED = re.compile(r"(\w+)\s*<")
_TYPE_AND_NAME = re.compile(r"\S+$")


@dataclass(frozen=True, slots=True)
class KernelUse:
    """How one kernel was used.

    Attributes:
        name: Its full name.
        kind: What it is.
        calls: How often it ran, outside of every step too where no phase was asked for.
        total_s: Seconds that it ran, all calls together.
        steps: In how many steps it ran; None where steps are not known.
        per_step: Calls in steps, over all steps that count; None where there is none.
        per_step_s: Seconds likewise.
        graph: Whether a CUDA graph replayed any of the calls.
    """

    name: str
    kind: Kind
    calls: int
    total_s: float
    steps: int | None
    per_step: float | None
    per_step_s: float | None
    graph: bool


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The steps of one phase.

    Attributes:
        count: How many there are.
        period_s: Median from a step's start to the next step's, on the CPU; None where no step follows one.
        busy_s: Median over the steps that ran something of the sum of its kernels' durations.
    """

    count: int
    period_s: float | None
    busy_s: float | None


@dataclass(frozen=True, slots=True)
class Differing:
    """Kernels that tell two groups of launches apart; names, sorted.

    Attributes:
        only_a: In every one of A and in none of B.
        only_b: The reverse.
        unstable: Not the same within one group: in some of its launches, not in all.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    unstable: tuple[str, ...]


def uses(trace: Trace, phase: Phase | None = None, *, rows: int | None = None) -> dict[str, KernelUse]:
    """The kernels by name, those of the longest time first.

    Args:
        trace: Where to look.
        phase: Count the rows of the steps of this phase only; None counts every row. Steps without any row, as an
            engine with nothing to do makes them, do not count as steps.
        rows: Of these, the steps that decode so many requests; None for any number.
    """
    kernels = trace.kernels
    counted = {
        step.index for step in trace.steps if phase in (None, step.phase) and rows in (None, step.generation_requests)
    }
    counted &= set(kernels.step)
    size = len(kernels.names)
    calls, graphs, kinds, inside = [0] * size, [False] * size, [0] * size, [0] * size
    total_s, inside_s = [0.0] * size, [0.0] * size
    steps: list[set[int]] = [set() for _ in range(size)]
    for row, (name, step) in enumerate(zip(kernels.name_ids, kernels.step, strict=True)):
        belongs = step in counted
        if phase is not None and not belongs:
            continue
        duration_s = kernels.duration_s[row]
        calls[name] += 1
        total_s[name] += duration_s
        graphs[name] |= bool(kernels.graph[row])
        kinds[name] = kernels.kind_ids[row]
        if belongs:
            inside[name] += 1
            inside_s[name] += duration_s
            steps[name].add(step)
    count = len(counted)
    found = [
        KernelUse(
            name=text,
            kind=KINDS[kinds[name]],
            calls=calls[name],
            total_s=total_s[name],
            steps=len(steps[name]) if count else None,
            per_step=inside[name] / count if count else None,
            per_step_s=inside_s[name] / count if count else None,
            graph=graphs[name],
        )
        for name, text in enumerate(kernels.names)
        if calls[name]
    ]
    return {use.name: use for use in sorted(found, key=lambda use: (-use.total_s, use.name))}


def step_times(trace: Trace) -> dict[Phase | None, StepTimes]:
    """Count and median times of the steps of each phase; None holds those whose phase is not known or that are empty."""
    busy_s: dict[int, float] = {}
    for index, duration_s in zip(trace.kernels.step, trace.kernels.duration_s, strict=True):
        if index != UNKNOWN:
            busy_s[index] = busy_s.get(index, 0.0) + duration_s
    periods: dict[Phase | None, list[float]] = {}
    busy: dict[Phase | None, list[float]] = {}
    for place, step in enumerate(trace.steps):
        if place + 1 < len(trace.steps):
            periods.setdefault(step.phase, []).append(trace.steps[place + 1].start_s - step.start_s)
        if step.index in busy_s:
            busy.setdefault(step.phase, []).append(busy_s[step.index])
    return {
        phase: StepTimes(count, _median(periods.get(phase)), _median(busy.get(phase)))
        for phase, count in Counter(step.phase for step in trace.steps).items()
    }


def differing(a: Sequence[Collection[str]], b: Sequence[Collection[str]]) -> Differing:
    """Compare which kernels ran.

    Args:
        a: One collection of names a launch, such as `uses` returns; a group without a launch tells nothing.
        b: The other group.
    """
    every_a, any_a = _every(a), {name for one in a for name in one}
    every_b, any_b = _every(b), {name for one in b for name in one}
    return Differing(
        only_a=tuple(sorted(every_a - any_b)) if b else (),
        only_b=tuple(sorted(every_b - any_a)) if a else (),
        unstable=tuple(sorted((any_a - every_a) | (any_b - every_b))),
    )


def _every(group: Sequence[Collection[str]]) -> set[str]:
    return set.intersection(*(set(one) for one in group)) if group else set()


def table(uses_a: Mapping[str, KernelUse], uses_b: Mapping[str, KernelUse] | None = None, top: int = 15) -> list[str]:
    """The kernels of the longest time as lines of text, of one trace or of two side by side.

    Calls and time are per step where steps are known on every side, else over the whole trace. Below stand the full
    names of those that would look alike.
    """
    sides = [uses_a] if uses_b is None else [uses_a, uses_b]
    names = list(dict.fromkeys(name for side in sides for name in side))
    if not names:
        return ["no kernel"]
    by_step = all(use.per_step is not None for side in sides for use in side.values())
    sums = [sum(_seconds(use, by_step) for use in side.values()) for side in sides]
    longest = {name: max(_seconds(side[name], by_step) for side in sides if name in side) for name in names}
    shown = sorted(names, key=lambda name: (-longest[name], name))[:top]
    labelled = labels(names)
    per = "/step" if by_step else ""
    titles = [f"calls{per}", f"us{per}", "share"]
    heads = [""] if uses_b is None else ["a ", "b "]
    rows = [["kernel", *(head + title for head in heads for title in titles), ""]]
    for name in shown:
        cells = [labelled[name]]
        for side, whole_s in zip(sides, sums, strict=True):
            cells += _cells(side.get(name), by_step, whole_s)
        rows.append([*cells, "graph" if any(name in side and side[name].graph for side in sides) else ""])
    rest = len(names) - len(shown)
    if rest:
        cells = [f"{rest} more"]
        for side, whole_s in zip(sides, sums, strict=True):
            left = [use for name, use in side.items() if name not in shown]
            left_s = sum(_seconds(use, by_step) for use in left)
            cells += [
                _number(sum(_calls(use, by_step) for use in left)),
                f"{left_s * 1e6:.1f}",
                _share(left_s, whole_s),
            ]
        rows.append([*cells, ""])
    whole = ["all"]
    for side, whole_s in zip(sides, sums, strict=True):
        whole += [_number(sum(_calls(use, by_step) for use in side.values())), f"{whole_s * 1e6:.1f}", ""]
    lines = _aligned([*rows, [*whole, ""]])
    return lines + [f"{labelled[name]} = {cut(name)}" for name in shown if labelled[name] != shorten(name)]


def labels(names: Iterable[str], width: int = LABEL_WIDTH) -> dict[str, str]:
    """Short names for display, all different.

    Those that shorten alike get in brackets the first word that not all of them have, and a digest of the full name
    behind `#`, which is the same in every table.
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(cut(shorten(name), width), []).append(name)
    found: dict[str, str] = {}
    for label, group in alike.items():
        if len(group) == 1:
            found[group[0]] = label
            continue
        words = {name: _WORD.findall(name) for name in group}
        common = set.intersection(*(set(some) for some in words.values()))
        for name in group:
            own = next((f"[{word}]" for word in words[name] if word not in common), "")
            digest = hashlib.sha256(name.encode()).hexdigest()[:6]
            found[name] = f"{cut(label + own, width - 7)}#{digest}"
    return found


def shorten(name: str) -> str:
    """A demangled C++ name without return type, template arguments and parameters; others as they are.

    A kernel that only wraps another gets that one's name in brackets.
    """
    if "(" not in name or name.startswith(("Memcpy", "Memset")):
        return name
    text = name.replace("(anonymous namespace)", "{anonymous}")
    kept: list[str] = []
    depth = brackets = 0
    for place, character in enumerate(text):
        before = "".join(kept[-8:])
        if depth and character in "()":
            brackets += 1 if character == "(" else -1
        elif brackets:
            pass  # a comparison inside template arguments stands in brackets: ((8)>(0))
        elif character == "<" and not before.endswith("operator"):
            depth += 1
        elif character == ">" and depth and text[place - 1] != "-":
            depth -= 1
        elif character == "(" and not depth and kept and not before.endswith("operator"):
            break
        elif not depth:
            kept.append(character)
    found = _TYPE_AND_NAME.search("".join(kept).strip())
    if not found or depth:
        return name
    short = found[0].replace("{anonymous}::", "")
    return short + _wrapped(name) if short.rpartition("::")[2] in _WRAPPERS else short


def _wrapped(name: str) -> str:
    """What a wrapper kernel runs, in brackets: the first of its template arguments that says it."""
    arguments = name.partition("<")[2]
    inner = next((word for word in _CALLED.findall(arguments) if not word.startswith("enable_sm")), None)
    return f"[{inner}]" if inner else ""


def _seconds(use: KernelUse, by_step: bool) -> float:
    return (use.per_step_s or 0.0) if by_step else use.total_s


def _calls(use: KernelUse, by_step: bool) -> float:
    return (use.per_step or 0.0) if by_step else use.calls


def _cells(use: KernelUse | None, by_step: bool, whole_s: float) -> list[str]:
    if use is None:
        return ["-", "-", "-"]
    seconds = _seconds(use, by_step)
    return [_number(_calls(use, by_step)), f"{seconds * 1e6:.1f}", _share(seconds, whole_s)]


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.2f}"


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s:.1%}" if whole_s else "-"


def cut(text: str, width: int = NAME_WIDTH) -> str:
    """A text of at most this many characters, shortened in its middle."""
    if len(text) <= width:
        return text
    tail = (width - 3) // 3
    return f"{text[: width - 3 - tail]}...{text[-tail:]}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1], strict=True)),
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return lines


def _median(values: Sequence[float] | None) -> float | None:
    return statistics.median(values) if values else None
