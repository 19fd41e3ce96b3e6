"""Two variants' answers, paired by question -> what changed, whether it is significant, and which answers they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from abharness import stats
from abharness.answers import FILTERS
from abharness.cells import Call
from abharness.checks import TRUNCATION_LIMIT, check_accuracy, check_answer_totals
from abharness.codes import CODES
from abharness.flips import Flip, explain_flip
from abharness.record import AnswerRecord, Finding, Variant
from abharness.spec import VARIANTS, ExperimentSpec, Gsm8kWorkload
from abharness.validity import Seen, Side

Answers = dict[int, AnswerRecord]
"""The answers of one launch to one workload, by question."""


@dataclass(frozen=True, slots=True)
class AnswerFloor:
    """How far the answers of equal variants lie apart; `floors` says how it is measured.

    Attributes:
        flips: Questions that any two A/A launches answer differently.
        most_changed: Most answers in which any two A/A launches differ.
        net: Difference in the number of right answers that is no more than equal variants show.
        source: The A/A run.
    """

    workload: str
    num_questions: int
    flips: tuple[int, ...]
    most_changed: int
    net: int
    source: str


@dataclass(frozen=True, slots=True)
class ChangedAnswer:
    """A question whose answer differs between the variants.

    Attributes:
        flips_within: Launches of one and the same variant disagree on it too.
        flips_in_aa: Launches of an A/A disagree on it too; None where no A/A asked these questions.
    """

    doc_id: int
    baseline: str
    candidate: str
    flip: Flip
    flips_within: bool
    flips_in_aa: bool | None = None


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One gsm8k workload.

    Attributes:
        num_questions: Questions that both variants were asked.
        right: Questions right in most launches of a variant.
        states: Counts of each answer state over all launches of a variant.
        exact_match: Right answers of every launch, by filter and variant.
        only_baseline: Right in the baseline only.
        only_candidate: Right in the candidate only.
        p: Exact McNemar on those two.
        identical_texts: Questions whose text is the same in the first launches of both variants.
        changed: Every question whose answer differs.
        flips_within: Questions on which launches of one variant disagree, by variant.
        notes: Remarks on the accuracy row, for footnotes.
        floor: What equal variants differed by in an A/A; None where no A/A asked these questions.
        codes: The invalidating codes found in its answers.
    """

    workload: str
    num_questions: int
    right: dict[Variant, int]
    states: dict[Variant, dict[str, int]]
    exact_match: dict[str, dict[Variant, list[int]]]
    only_baseline: int
    only_candidate: int
    p: float
    call: Call
    identical_texts: int
    changed: list[ChangedAnswer]
    flips_within: dict[Variant, int]
    notes: tuple[str, ...] = ()
    floor: AnswerFloor | None = None
    codes: tuple[str, ...] = ()


def compare_answers(
    sides: list[Side], spec: ExperimentSpec, floors: Mapping[str, AnswerFloor]
) -> tuple[list[Accuracy], list[Seen], list[Seen]]:
    """Every gsm8k workload; findings about its own answers; findings that touch the whole comparison.

    Args:
        sides: The variants with their launches.
        spec: Its workloads and level.
        floors: By workload, where an A/A asked the same questions.
    """
    results: list[Accuracy] = []
    own: list[Seen] = []
    touching: list[Seen] = []
    for workload in spec.workloads:
        if not isinstance(workload, Gsm8kWorkload):
            continue
        tables: dict[Variant, list[Answers]] = {}
        codes: list[str] = []
        for side in sides:
            tables[side.variant] = []
            for launch in side.launches:
                records = launch.answers.get(workload.name, [])
                where = f"launch {launch.record.launch_index}-{side.variant}, {workload.name}"
                asked = next((run.doc_ids for run in launch.record.accuracy if run.workload == workload.name), [])
                findings = check_accuracy(records, asked)
                findings += check_answer_totals(launch.record.accuracy, workload.name, records)
                own += [Seen(where, finding) for finding in findings]
                codes += [finding.code for finding in findings if CODES[finding.code].invalidates]
                tables[side.variant].append({record.doc_id: record for record in records})
        if all(tables.values()):
            result = _accuracy(workload, tables, spec, floors.get(workload.name))
            uneven = _uneven_truncation(result, tables)
            own += [Seen(workload.name, finding) for finding in uneven]
            codes += [finding.code for finding in uneven]
            call: Call = "no verdict" if codes else result.call
            results.append(replace(result, call=call, codes=tuple(dict.fromkeys(codes))))
            touching += _below_floor(workload, result)
    return results, own, touching


def asked_of_all(tables: Iterable[Answers]) -> list[int]:
    """Questions that every launch answered, in order."""
    return sorted(set.intersection(*(set(table) for table in tables)))


def mostly_right(tables: Sequence[Answers], doc_ids: Sequence[int]) -> list[int]:
    """Questions that more than half of these launches answer right."""
    return [d for d in doc_ids if sum(table[d].state == "right" for table in tables) * 2 > len(tables)]


def flipping(tables: Sequence[Answers], doc_ids: Sequence[int]) -> list[int]:
    """Questions on which any two of these launches disagree."""
    return [d for d in doc_ids if len({given_answer(table[d]) for table in tables}) > 1]


def _accuracy(
    workload: Gsm8kWorkload, tables: dict[Variant, list[Answers]], spec: ExperimentSpec, floor: AnswerFloor | None
) -> Accuracy:
    common = asked_of_all(table for part in tables.values() for table in part)
    right = {variant: mostly_right(tables[variant], common) for variant in VARIANTS}
    lost = sorted(set(right["baseline"]) - set(right["candidate"]))
    gained = sorted(set(right["candidate"]) - set(right["baseline"]))
    p = stats.mcnemar_exact(len(lost), len(gained))
    call: Call = "~"
    if p < spec.design.alpha:
        call = "worse" if len(lost) > len(gained) else "better"
    first = {variant: tables[variant][0] for variant in VARIANTS}
    within = {variant: flipping(tables[variant], common) for variant in VARIANTS}
    changed = [
        ChangedAnswer(
            doc_id,
            given_answer(first["baseline"][doc_id]),
            given_answer(first["candidate"][doc_id]),
            explain_flip(first["baseline"][doc_id], first["candidate"][doc_id]),
            any(doc_id in part for part in within.values()),
            None if floor is None else doc_id in floor.flips,
        )
        for doc_id in common
        if given_answer(first["baseline"][doc_id]) != given_answer(first["candidate"][doc_id])
    ]
    states = {
        variant: dict(Counter(str(table[doc_id].state) for table in tables[variant] for doc_id in common))
        for variant in VARIANTS
    }
    notes: list[str] = []
    if floor is not None and call != "~" and abs(len(lost) - len(gained)) <= floor.net:
        call = "~"
        notes.append(f"within the A/A floor: equal variants differ by up to {floor.net} right answers ({floor.source})")
    if floor is not None and 0 < len(changed) <= floor.most_changed:
        notes.append(
            f"not attributable to the change: two launches of the baseline differ in up to {floor.most_changed} answers "
            f"({floor.source})"
        )
    return Accuracy(
        workload=workload.name,
        num_questions=len(common),
        right={variant: len(part) for variant, part in right.items()},
        states=states,
        exact_match={
            name: {v: [sum(_matched(t[d], name) for d in common) for t in tables[v]] for v in VARIANTS}
            for name in FILTERS
        },
        only_baseline=len(lost),
        only_candidate=len(gained),
        p=p,
        call=call,
        identical_texts=sum(first["baseline"][d].resps == first["candidate"][d].resps for d in common),
        changed=changed,
        flips_within={variant: len(part) for variant, part in within.items()},
        notes=tuple(notes),
        floor=floor,
    )


def _uneven_truncation(result: Accuracy, tables: Mapping[Variant, Sequence[Answers]]) -> list[Finding]:
    """An answer that was cut is neither right nor wrong: where one variant has more of them, they decide the test."""
    cut = {variant: result.states[variant].get("truncated", 0) for variant in VARIANTS}
    asked = {variant: result.num_questions * len(tables[variant]) for variant in VARIANTS}
    rates = [cut[variant] / asked[variant] if asked[variant] else 0.0 for variant in VARIANTS]
    if abs(rates[0] - rates[1]) <= TRUNCATION_LIMIT:
        return []
    told = ", ".join(f"{variant} {cut[variant]} of {asked[variant]}" for variant in VARIANTS)
    return [
        Finding(
            code="truncation_differs",
            message=f"answers were cut at max_tokens at different rates: {told} (limit {TRUNCATION_LIMIT:.0%} apart)",
            hint="raise max_tokens; if the answers still do not end, the model lost its end-of-turn token",
        )
    ]


def _matched(record: AnswerRecord, name: str) -> bool:
    extraction = record.extractions.get(name)
    return bool(extraction and extraction.exact_match)


def given_answer(record: AnswerRecord) -> str:
    """The answer as a person would read it: the number found, or why there is none."""
    if record.state in ("truncated", "no_answer", "error"):
        return record.state
    extraction = record.extractions.get(record.filter)
    return (extraction.value if extraction else None) or "no_answer"


def _below_floor(workload: Gsm8kWorkload, result: Accuracy) -> list[Seen]:
    if workload.min_exact_match is None:
        return []
    found: list[Seen] = []
    for variant in VARIANTS:
        share = result.right[variant] / result.num_questions if result.num_questions else 0.0
        if share < workload.min_exact_match:
            message = (
                f"{variant} answers {result.right[variant]} of {result.num_questions} right ({share:.0%}), "
                f"the floor is {workload.min_exact_match:.0%}"
            )
            hint = "its speed is not reported as a gain; look at its answers for garbled text"
            found.append(Seen(workload.name, Finding(code="accuracy_below_floor", message=message, hint=hint)))
    return found
