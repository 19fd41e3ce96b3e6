"""The index of several comparisons -> text and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from abharness.compare import Comparison
from abharness.index import IndexEntry, Verdict, counted, index
from abharness.redaction import screen_safe
from abharness.spec import VARIANTS
from abharness.terminal import TABLE_WIDTH, Look, Role, cells, paint, statement

VERDICT_ROLES: dict[Verdict, Role] = {
    "launch failed": "bad",
    "regression": "bad",
    "A/A failed": "bad",
    "no verdict": "unknown",
    "A/A not valid": "unknown",
    "faster": "good",
    "better answers": "good",
    "A/A passed": "good",
    "no difference": "strong",
}

_WIDTHS = (14, 20, 29)
"""Columns of verdict, experiment and run; launches take the rest of the 80."""


def text(comparisons: Sequence[Comparison], look: Look) -> list[str]:
    """Two or more lines a run: its verdict and what it rests on, then what to look at."""
    entries = index(comparisons)
    lines = [*statement(counted(entries), look, role="strong"), ""]
    lines.append(paint(_line("verdict", "experiment", "run (UTC, configuration)", "launches"), "quiet", look))
    for entry in entries:
        name = _cut(screen_safe(entry.experiment), _WIDTHS[1])
        run = screen_safe(f"{entry.created_at} {entry.config_hash}")
        line = _line(entry.verdict, name, run, _launches(entry))
        word = paint(entry.verdict, VERDICT_ROLES[entry.verdict], look)
        lines.append(word + line[len(entry.verdict) :])
        for told in _told(entry):
            lines += statement(f"{' ' * (_WIDTHS[0] + 2)}{told}", replace(look, width=TABLE_WIDTH))
    return lines


def markdown(comparisons: Sequence[Comparison], escape: Callable[[str], str]) -> str:
    """One table row a run."""
    entries = index(comparisons)
    lines = [f"**{escape(counted(entries))}**", ""]
    lines += ["| verdict | experiment | run (UTC, configuration) | launches | |", "| --- | --- | --- | --- | --- |"]
    for entry in entries:
        run = f"{entry.created_at} {entry.config_hash}"
        shown = [entry.verdict, entry.experiment, run, _launches(entry), "; ".join(_told(entry))]
        lines.append(f"| {' | '.join(map(escape, shown))} |")
    return "\n".join(lines)


def _line(*parts: str) -> str:
    *columns, last = parts
    padded = [part + " " * (width - cells(part)) for part, width in zip(columns, _WIDTHS, strict=True)]
    return "  ".join([*padded, last])


def _told(entry: IndexEntry) -> list[str]:
    """What to look at: the chief difference, what takes the verdict away, what was let pass."""
    told = []
    if entry.chief is not None:
        chief = entry.chief
        told.append(f"{chief.what} {chief.said} {chief.call}, {chief.where}")
    if entry.codes:
        told.append(", ".join(entry.codes))
    if entry.waived:
        told.append(f"let pass: {', '.join(entry.waived)}")
    return told


def _launches(entry: IndexEntry) -> str:
    """Completed launches of both variants, and how many were planned where some are missing: `3+4 of 4+4`."""
    done, planned = ("+".join(str(entry.launches[variant][which]) for variant in VARIANTS) for which in (0, 1))
    return done if done == planned else f"{done} of {planned}"


def _cut(name: str, width: int) -> str:
    """A name in a width, its middle left out where it is longer."""
    if cells(name) <= width:
        return name
    head, tail = name[: width // 2], name[-(width // 2 - 1) :]
    while cells(head) + cells(tail) + 1 > width and head and tail:
        head, tail = head[:-1], tail[1:]
    return f"{head}…{tail}"
