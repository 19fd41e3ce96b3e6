"""Comparisons -> an index of them: what was asked, what came out, how much it rests on. Pure; text and pages print it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, get_args

from abharness.cells import Row
from abharness.compare import AA_CODE, Comparison
from abharness.record import Variant
from abharness.runs import CellKey

Verdict = Literal[
    "launch failed",
    "regression",
    "no verdict",
    "faster",
    "better answers",
    "no difference",
    "A/A passed",
    "A/A failed",
    "A/A not valid",
]


@dataclass(frozen=True, slots=True)
class ChiefDifference:
    """The difference to look at first.

    Attributes:
        where: Cell or workload.
        what: Metric, or `exact_match`.
        call: `better` or `worse`.
        said: The difference with its sign: `+35.26%`, or `113 -> 97 of 128`.
    """

    where: str
    what: str
    call: str
    said: str


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One comparison in the index.

    Attributes:
        created_at: When its run was made, `2026-11-30 02:03`, UTC.
        verdict: In a word or two; it says no more than the summary.
        chief: Of the decisive rows and the answers; None where nothing was called.
        launches: (completed, planned) by variant.
        codes: Why there is no verdict.
        waived: Codes of findings that the reader let pass.
        sources: Its run folders.
    """

    experiment: str
    question: str
    aa: bool
    created_at: str
    config_hash: str
    verdict: Verdict
    summary: str
    chief: ChiefDifference | None
    launches: dict[Variant, tuple[int, int]]
    codes: tuple[str, ...]
    waived: tuple[str, ...]
    sources: tuple[str, ...]
    exit_code: int


def ordered(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Runs of one experiment together, in order of time: a report that grows by a run changes nothing else."""
    return sorted(comparisons, key=lambda one: (one.experiment, one.created_at, one.sources))


def index(comparisons: Sequence[Comparison]) -> list[IndexEntry]:
    """One entry a comparison, in the order of `ordered`."""
    return [_entry(comparison) for comparison in ordered(comparisons)]


def counted(entries: Sequence[IndexEntry]) -> str:
    """All verdicts in one sentence, for example `6 runs: 1 regression, 3 no difference, 2 A/A passed`."""
    counts = Counter(entry.verdict for entry in entries)
    told = (f"{counts[word]} {word}" for word in get_args(Verdict) if counts[word])
    return f"{len(entries)} runs: {', '.join(told)}."


def _entry(comparison: Comparison) -> IndexEntry:
    return IndexEntry(
        experiment=comparison.experiment,
        question=comparison.question,
        aa=comparison.aa,
        created_at=_minute(comparison.created_at),
        config_hash=comparison.config_hash,
        verdict=verdict(comparison),
        summary=comparison.summary,
        chief=chief_difference(comparison),
        launches=comparison.launches,
        codes=comparison.codes,
        waived=tuple(dict.fromkeys(item.finding.code for item in comparison.waived)),
        sources=comparison.sources,
        exit_code=comparison.exit_code,
    )


def verdict(comparison: Comparison) -> Verdict:
    """The outcome of a comparison in a word or two."""
    if comparison.outcome == "launch failed":
        return "launch failed"
    if comparison.aa:
        if AA_CODE in comparison.codes:
            return "A/A failed"
        return "A/A passed" if comparison.outcome == "no regression" else "A/A not valid"
    if comparison.outcome != "no regression":
        return comparison.outcome
    if any(row.call == "better" for _, row in _decisive(comparison)):
        return "faster"
    return "better answers" if any(item.call == "better" for item in comparison.accuracy) else "no difference"


def _decisive(comparison: Comparison) -> list[tuple[CellKey, Row]]:
    return [(cell.key, row) for cell in comparison.cells for row in cell.rows if row.decisive]


def chief_difference(comparison: Comparison) -> ChiefDifference | None:
    """What got worse before what got better, answers before speed, then by size."""
    found: list[tuple[bool, bool, float, ChiefDifference]] = []
    for item in comparison.accuracy:
        if item.call in ("better", "worse"):
            said = f"{item.right['baseline']} -> {item.right['candidate']} of {item.num_questions}"
            size = abs(item.only_baseline - item.only_candidate)
            chief = ChiefDifference(item.workload, "exact_match", item.call, said)
            found.append((item.call == "worse", True, size, chief))
    for key, row in _decisive(comparison):
        if row.call in ("better", "worse") and row.ratio.effect is not None:
            chief = ChiefDifference(str(key), row.metric.name, row.call, f"{row.ratio.effect:+.2%}")
            found.append((row.call == "worse", False, abs(row.ratio.effect), chief))
    return max(found, key=lambda one: one[:3])[3] if found else None


def _minute(created_at: str) -> str:
    """ISO 8601 cut to the minute; as it is where it is no time."""
    try:
        return datetime.fromisoformat(created_at).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return created_at[:16]
