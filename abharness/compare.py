"""Records -> Comparison: what differs between the variants, by how much, and whether that can be told from noise.

Everything is computed from the launches' raw records. The sample is one launch: a cell's value in a launch is the
median over its repeats, a variant's value the median over its launches. A change is called only if it is significant
after correction over the cells, larger than `min_effect`, and the cell is valid; otherwise it is `~`, or there is no
verdict and the codes say why.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from abharness import metrics, stats
from abharness.checks import CODES, TRUNCATION_LIMIT, check_accuracy, check_answer_totals, check_cell, check_variants
from abharness.errors import RecordError
from abharness.flips import Flip, explain_flip
from abharness.record import AnswerRecord, Finding, Variant
from abharness.runs import CellKey, Run, find_runs, read_run
from abharness.spec import VARIANTS, ExperimentSpec, Gsm8kWorkload, Primary
from abharness.validity import Seen, Side, differences, failed_launches, launch_findings, order_findings

Call = Literal["better", "worse", "~", "no verdict"]
Outcome = Literal["no regression", "regression", "no verdict", "launch failed"]

EXIT_CODES: dict[Outcome, int] = {"no regression": 0, "regression": 1, "no verdict": 3, "launch failed": 4}


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of one cell.

    Attributes:
        samples: Launch values by variant, stored units, in launch order.
        ratio: Effect, interval and uncorrected p.
        p: Corrected over the cells of this metric; None if it could not be computed.
        call: What may be said.
        notes: Reasons and remarks, for footnotes.
        decisive: It decides the verdict; the other rows describe.
    """

    metric: metrics.Metric
    samples: dict[Variant, list[float]]
    ratio: stats.Ratio
    p: float | None
    call: Call
    notes: tuple[str, ...] = ()
    decisive: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell with its rows; `codes` are the invalidating codes found in it."""

    key: CellKey
    kind: metrics.Kind
    rows: list[Row]
    codes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChangedAnswer:
    """A question whose answer differs between the variants.

    Attributes:
        flips_within: Launches of one and the same variant disagree on it too.
    """

    doc_id: int
    baseline: str
    candidate: str
    flip: Flip
    flips_within: bool


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


@dataclass(frozen=True, slots=True)
class Comparison:
    """The whole result of one experiment.

    Attributes:
        launches: (completed, planned) by variant.
        codes: Invalidating codes, each once, in order of finding.
        allowed: Waived undeclared differences.
        advice: Findings that do not invalidate.
    """

    experiment: str
    question: str
    config_hash: str
    sources: tuple[str, ...]
    launches: dict[Variant, tuple[int, int]]
    switches: dict[str, dict[Variant, str | None]]
    outcome: Outcome
    summary: str
    codes: tuple[str, ...]
    cells: list[Cell]
    accuracy: list[Accuracy]
    seen: list[Seen]
    advice: list[Seen]
    allowed: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """The process exit code this outcome leads to."""
        return EXIT_CODES[self.outcome]


def compare_folders(folders: Sequence[Path], allow: Sequence[str] = ()) -> list[Comparison]:
    """One comparison for each run found, or one across two run folders.

    Args:
        folders: Results folders or run folders. Exactly two run folders: the baseline launches of the first against
            the candidate launches of the second.
        allow: Names of undeclared differences, or `order_confounded`, to let pass; they are printed in the result.

    Raises:
        RecordError: Nothing to compare, or a record is damaged.
    """
    paths = find_runs(folders)
    if len(folders) == 2 and list(map(Path, folders)) == paths:
        first, second = read_run(paths[0]), read_run(paths[1])
        return [_compare(first, second, allow)]
    return [compare_run(path, allow) for path in paths]


def compare_run(path: Path, allow: Sequence[str] = ()) -> Comparison:
    """Compare the two variants of one run."""
    run = read_run(path)
    return _compare(run, run, allow)


def _spec(run: Run) -> ExperimentSpec:
    try:
        return ExperimentSpec.model_validate(run.record.spec)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(f"{run.path}: recorded spec: {where}: {first['msg']}") from error


def _compare(first: Run, second: Run, allow: Sequence[str]) -> Comparison:
    spec = _spec(first)
    sides = [
        Side("baseline", first, first.of("baseline"), first.record.plan.count("baseline")),
        Side("candidate", second, second.of("candidate"), second.record.plan.count("candidate")),
    ]
    cells, cell_seen = _cells(sides, spec)
    accuracy, answer_seen, floor_seen = _accuracies(sides, spec)
    whole = [
        *failed_launches(sides),
        *launch_findings(sides),
        *differences(sides, spec, allow),
        *order_findings(first, second, spec, allow),
        *floor_seen,
    ]
    invalid = [item for item in (*whole, *cell_seen, *answer_seen) if CODES[item.finding.code].invalidates]
    advice = [item for item in (*whole, *cell_seen, *answer_seen) if not CODES[item.finding.code].invalidates]
    codes = tuple(dict.fromkeys(item.finding.code for item in invalid))
    everything = any(item in invalid for item in whole)
    if everything:
        cells = [replace(cell, rows=[replace(row, call="no verdict") for row in cell.rows]) for cell in cells]
        accuracy = [replace(item, call="no verdict") for item in accuracy]
    calls = [row.call for cell in cells for row in cell.rows if row.decisive] + [item.call for item in accuracy]
    outcome: Outcome
    if "launch_failed" in codes:
        outcome = "launch failed"
    elif "worse" in calls:
        outcome = "regression"  # seen in a valid cell, it stands, whatever another cell lacks
    elif everything or not calls or "no verdict" in calls:
        outcome = "no verdict"
    else:
        outcome = "no regression"
    sources = (str(first.path),) if first.path == second.path else (str(first.path), str(second.path))
    return Comparison(
        experiment=spec.experiment,
        question=spec.question,
        config_hash=first.record.config_hash,
        sources=sources,
        launches={side.variant: (len(side.launches), side.planned) for side in sides},
        switches=spec.switches(),
        outcome=outcome,
        summary=_summary(outcome, cells, accuracy, codes),
        codes=codes,
        cells=cells,
        accuracy=accuracy,
        seen=invalid,
        advice=advice,
        allowed=tuple(allow),
        notes=_notes(sides, spec, cells),
        warnings=tuple(dict.fromkeys((*first.warnings, *second.warnings))),
    )


def _cells(sides: list[Side], spec: ExperimentSpec) -> tuple[list[Cell], list[Seen]]:
    kinds: dict[CellKey, metrics.Kind] = {}
    values: dict[CellKey, dict[str, dict[Variant, list[float]]]] = {}
    found: list[Seen] = []
    codes: dict[CellKey, list[str]] = defaultdict(list)
    for side in sides:
        for launch in side.launches:
            per_cell: dict[CellKey, list[dict[str, float | None]]] = defaultdict(list)
            for record in launch.record.cells:
                key = CellKey.of(record)
                kinds[key] = record.kind
                requests = launch.requests.get((key, record.repeat), [])
                for finding in check_cell(record, requests):
                    where = f"launch {launch.record.launch_index}-{side.variant}, {key}"
                    found.append(Seen(where, finding))
                    if CODES[finding.code].invalidates:
                        codes[key].append(finding.code)
                per_cell[key].append(metrics.cell_metrics(record, requests))
            for key, repeats in per_cell.items():
                table = values.setdefault(key, {})
                for name in repeats[0]:
                    numbers = [value for repeat in repeats if (value := repeat[name]) is not None]
                    if numbers:
                        table.setdefault(name, {v: [] for v in VARIANTS})[side.variant].append(
                            statistics.median(numbers)
                        )
    cells: list[Cell] = []
    by_name = {metric.name: metric for metric in metrics.METRICS}
    for key, table in values.items():
        by_variant = {side.variant: [launch.cells_of(key) for launch in side.launches] for side in sides}
        for finding in check_variants(by_variant):
            found.append(Seen(str(key), finding))
            if CODES[finding.code].invalidates:
                codes[key].append(finding.code)
        rows = [_row(by_name[name], samples, spec) for name, samples in table.items()]
        cells.append(Cell(key, kinds[key], rows, tuple(dict.fromkeys(codes[key]))))
    return _call(cells, spec), found


def _row(metric: metrics.Metric, samples: dict[Variant, list[float]], spec: ExperimentSpec) -> Row:
    ratio = stats.compare_ratio(
        samples["baseline"], samples["candidate"], alpha=spec.design.alpha, min_effect=spec.design.min_effect
    )
    return Row(metric, samples, ratio, None, "~")


def _call(cells: list[Cell], spec: ExperimentSpec) -> list[Cell]:
    """Correct p over the cells of each metric, leave the primary's as it is, and say what may be said."""
    primary = Primary.parse(spec.design.primary) if spec.design.primary else None
    corrected: dict[tuple[CellKey, str], float] = {}
    decisive: set[tuple[CellKey, str]] = set()
    for metric in metrics.METRICS:
        family: dict[CellKey, float] = {}
        for cell in cells:
            for row in cell.rows:
                if row.metric is not metric:
                    continue
                key = cell.key
                asked = primary is not None and metric.name == primary.metric
                if asked and primary and primary.names(key.workload, cell.kind, key.input_len, key.max_concurrency):
                    decisive.add((key, metric.name))
                    if row.ratio.p is not None:
                        corrected[key, metric.name] = row.ratio.p
                    continue
                if primary is None and metric.headline:
                    decisive.add((key, metric.name))
                if row.ratio.p is not None:
                    family[key] = row.ratio.p
        adjusted = stats.holm(list(family.values()))
        corrected |= {(key, metric.name): p for key, p in zip(family, adjusted, strict=True)}
    result: list[Cell] = []
    for cell in cells:
        rows = [
            replace(
                _called(row, corrected.get((cell.key, row.metric.name)), cell, spec),
                decisive=(cell.key, row.metric.name) in decisive,
            )
            for row in cell.rows
        ]
        result.append(replace(cell, rows=rows))
    return result


def _called(row: Row, p: float | None, cell: Cell, spec: ExperimentSpec) -> Row:
    effect = row.ratio.effect
    if cell.codes:
        return replace(row, p=p, call="no verdict", notes=cell.codes)
    if effect is None:
        return replace(row, call="no verdict", notes=(row.ratio.reason or "unknown",))
    if p is None or p >= spec.design.alpha or abs(effect) <= spec.design.min_effect:
        notes = () if row.ratio.reason is None else (row.ratio.reason,)
        return replace(row, p=p, call="~", notes=notes)
    better = (effect > 0) == row.metric.higher_is_better
    return replace(row, p=p, call="better" if better else "worse")


def _accuracies(sides: list[Side], spec: ExperimentSpec) -> tuple[list[Accuracy], list[Seen], list[Seen]]:
    """Every gsm8k workload; findings about its own answers; findings that touch the whole comparison."""
    results: list[Accuracy] = []
    own: list[Seen] = []
    floors: list[Seen] = []
    for workload in spec.workloads:
        if not isinstance(workload, Gsm8kWorkload):
            continue
        tables: dict[Variant, list[dict[int, AnswerRecord]]] = {}
        bad = False
        for side in sides:
            tables[side.variant] = []
            for launch in side.launches:
                records = launch.answers.get(workload.name, [])
                where = f"launch {launch.record.launch_index}-{side.variant}, {workload.name}"
                asked = next((run.doc_ids for run in launch.record.accuracy if run.workload == workload.name), [])
                findings = check_accuracy(records, asked)
                findings += check_answer_totals(launch.record.accuracy, workload.name, records)
                own += [Seen(where, finding) for finding in findings]
                bad = bad or any(CODES[finding.code].invalidates for finding in findings)
                tables[side.variant].append({record.doc_id: record for record in records})
        if all(tables.values()):
            result = _accuracy(workload, tables, spec)
            results.append(replace(result, call="no verdict") if bad else result)
            floors += _floor(workload, result)
    return results, own, floors


def _accuracy(
    workload: Gsm8kWorkload, tables: dict[Variant, list[dict[int, AnswerRecord]]], spec: ExperimentSpec
) -> Accuracy:
    common = sorted(set.intersection(*(set(table) for part in tables.values() for table in part)))

    def most(variant: Variant, doc_id: int) -> bool:
        votes = [table[doc_id].state == "right" for table in tables[variant]]
        return sum(votes) * 2 > len(votes)

    def given(variant: Variant, doc_id: int) -> set[str]:
        return {_given(table[doc_id]) for table in tables[variant]}

    right = {variant: [doc_id for doc_id in common if most(variant, doc_id)] for variant in VARIANTS}
    lost = sorted(set(right["baseline"]) - set(right["candidate"]))
    gained = sorted(set(right["candidate"]) - set(right["baseline"]))
    p = stats.mcnemar_exact(len(lost), len(gained))
    call: Call = "~"
    if p < spec.design.alpha:
        call = "worse" if len(lost) > len(gained) else "better"
    first = {variant: tables[variant][0] for variant in VARIANTS}
    within = {variant: {d for d in common if len(given(variant, d)) > 1} for variant in VARIANTS}
    changed = [
        ChangedAnswer(
            doc_id,
            _given(first["baseline"][doc_id]),
            _given(first["candidate"][doc_id]),
            explain_flip(first["baseline"][doc_id], first["candidate"][doc_id]),
            any(doc_id in part for part in within.values()),
        )
        for doc_id in common
        if _given(first["baseline"][doc_id]) != _given(first["candidate"][doc_id])
    ]
    states = {
        variant: dict(Counter(str(table[doc_id].state) for table in tables[variant] for doc_id in common))
        for variant in VARIANTS
    }
    cut = {variant: states[variant].get("truncated", 0) for variant in VARIANTS}
    asked = {variant: len(common) * len(tables[variant]) for variant in VARIANTS}
    rates = [cut[variant] / asked[variant] if asked[variant] else 0.0 for variant in VARIANTS]
    notes: tuple[str, ...] = ()
    if abs(rates[0] - rates[1]) > TRUNCATION_LIMIT:
        told = ", ".join(f"{variant} {cut[variant]} of {asked[variant]}" for variant in VARIANTS)
        notes = (
            f"answers were cut at max_tokens at different rates: {told}; raise max_tokens before judging accuracy",
        )
    return Accuracy(
        workload=workload.name,
        num_questions=len(common),
        right={variant: len(part) for variant, part in right.items()},
        states=states,
        exact_match={
            name: {v: [sum(_matched(t[d], name) for d in common) for t in tables[v]] for v in VARIANTS}
            for name in ("strict-match", "flexible-extract")
        },
        only_baseline=len(lost),
        only_candidate=len(gained),
        p=p,
        call=call,
        identical_texts=sum(first["baseline"][d].resps == first["candidate"][d].resps for d in common),
        changed=changed,
        flips_within={variant: len(part) for variant, part in within.items()},
        notes=notes,
    )


def _matched(record: AnswerRecord, name: str) -> bool:
    extraction = record.extractions.get(name)
    return bool(extraction and extraction.exact_match)


def _given(record: AnswerRecord) -> str:
    """The answer as a person would read it: the number found, or why there is none."""
    if record.state in ("truncated", "no_answer", "error"):
        return record.state
    extraction = record.extractions.get(record.filter)
    return (extraction.value if extraction else None) or "no_answer"


def _floor(workload: Gsm8kWorkload, result: Accuracy) -> list[Seen]:
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


def _summary(outcome: Outcome, cells: list[Cell], accuracy: list[Accuracy], codes: tuple[str, ...]) -> str:
    """The verdict in one sentence."""
    if outcome in ("no verdict", "launch failed"):
        reason = ", ".join(codes) if codes else "some cells could not be judged"
        return f"No verdict: {reason}."
    headline = [row for cell in cells for row in cell.rows if row.decisive]
    better = sum(row.call == "better" for row in headline)
    worse = sum(row.call == "worse" for row in headline)
    parts: list[str] = []
    if headline:
        parts.append(f"faster in {better}, slower in {worse}, no difference shown in {len(headline) - better - worse}"
                     f" of {len(headline)} cells")  # fmt: skip
    for item in accuracy:
        word = {"worse": "answers got worse", "better": "answers got better"}.get(item.call, "no accuracy change shown")
        parts.append(f"{word} ({len(item.changed)} of {item.num_questions} answers differ)")
    return f"Candidate: {'; '.join(parts)}." if parts else "Nothing was measured."


def _notes(sides: list[Side], spec: ExperimentSpec, cells: list[Cell]) -> tuple[str, ...]:
    notes: list[str] = []
    least = min(len(side.launches) for side in sides)
    if 0 < least < 4:
        notes.append(
            f"n={least} launches a variant: intervals are wide, and with bimodal noise a call at this n is false more "
            f"often than alpha says; use launches_per_variant 4 or more for a decision"
        )
    unclear = [
        row.ratio for cell in cells for row in cell.rows if row.decisive and row.call == "~" and row.p is not None
    ]
    if unclear:
        needed = [ratio.launches_needed for ratio in unclear]
        many = f"{max(n for n in needed if n)}" if all(needed) else f"more than {stats.MOST_LAUNCHES}"
        shown = [ratio.detectable for ratio in unclear]
        reach = f"about {max(d for d in shown if d):.0%} and more" if all(shown) else "none that would be believable"
        notes.append(
            f"~ means no difference shown. At the noise of the noisiest such cell, n={least} shows differences of {reach} "
            f"(80% power, before correction); {spec.design.min_effect:.0%} would take {many} launches a variant"
        )
    return tuple(notes)
