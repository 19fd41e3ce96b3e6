"""Records -> Comparison: what differs between the variants, by how much, and whether that can be told from noise.

Everything is computed from the launches' raw records. The sample is one launch: a cell's value in a launch is the
median over its repeats, a variant's value the median over its launches. A change is called only if it is significant
after correction over the cells, larger than `min_effect`, and the cell is valid; otherwise it is `~`, or there is no
verdict and the codes say why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from abharness import metrics, stats
from abharness.cells import Cell, Samples, call_cells, launch_values
from abharness.checks import check_cell
from abharness.errors import RecordError
from abharness.paired import Accuracy, compare_answers
from abharness.plan import recorded_hash
from abharness.record import Variant
from abharness.runs import CellKey, Run, find_runs, read_run
from abharness.spec import VARIANTS, ExperimentSpec
from abharness.validity import Seen, Side, differences, failed_launches, launch_findings, order_findings
from abharness.waivers import Waiver, parse_waivers, quoted, stands, used, waived, watermark

Outcome = Literal["no regression", "regression", "no verdict", "launch failed"]

EXIT_CODES: dict[Outcome, int] = {"no regression": 0, "regression": 1, "no verdict": 3, "launch failed": 4}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The whole result of one experiment.

    Attributes:
        launches: (completed, planned) by variant.
        codes: Invalidating codes, each once, in order of finding.
        advice: Findings that do not invalidate.
        waived: Findings set aside by `--allow`.
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
    waived: list[Seen]
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
        allow: Findings to let pass, as `CODE` or `CODE:NAME` (see `waivers`); they are kept and printed.

    Raises:
        RecordError: Nothing to compare, or a record is damaged.
        UsageError: A waiver cannot be read, or is for a code that cannot be waived.
    """
    waivers = parse_waivers(allow)
    paths = find_runs(folders)
    if len(folders) == 2 and list(map(Path, folders)) == paths:
        first, second = read_run(paths[0]), read_run(paths[1])
        return [_compare(first, second, waivers)]
    return [compare_run(path, waivers) for path in paths]


def compare_run(path: Path, waivers: Sequence[Waiver] = ()) -> Comparison:
    """Compare the two variants of one run."""
    run = read_run(path)
    return _compare(run, run, waivers)


def _spec(run: Run) -> ExperimentSpec:
    try:
        spec = ExperimentSpec.model_validate(run.record.spec)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(f"{run.path}: recorded spec: {where}: {first['msg']}") from error
    if recorded_hash(run.record.spec) != run.record.config_hash:
        raise RecordError(
            f"{run.path}: the recorded spec is not that of configuration {run.record.config_hash}",
            hint="experiment.json was changed after the run: it does not say any more what was launched",
        )
    missing = [variant for variant in VARIANTS if variant not in spec.variants]
    if missing:
        raise RecordError(f"{run.path}: recorded spec: variants: no {missing[0]}")
    return spec


def _compare(first: Run, second: Run, waivers: Sequence[Waiver]) -> Comparison:
    spec = _spec(first)
    sides = [
        Side("baseline", first, first.of("baseline"), first.record.plan.count("baseline")),
        Side("candidate", second, second.of("candidate"), second.record.plan.count("candidate")),
    ]
    cells, cell_seen = _cells(sides, spec, waivers)
    accuracy, answer_seen, floor_seen = compare_answers(sides, spec)
    whole = [
        *failed_launches(sides),
        *launch_findings(sides),
        *differences(sides, spec),
        *order_findings(first, second, spec),
        *floor_seen,
    ]
    found = [*whole, *cell_seen, *answer_seen]
    invalid = [item for item in found if stands(item, waivers)]
    accepted = [item for item in found if waived(item, waivers)]
    advice = [item for item in found if item not in invalid and item not in accepted]
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
    marks = used(waivers, accepted)
    unused = [f"{quoted(waiver)} matched nothing in this comparison" for waiver in waivers if waiver not in marks]
    sources = (str(first.path),) if first.path == second.path else (str(first.path), str(second.path))
    return Comparison(
        experiment=spec.experiment,
        question=spec.question,
        config_hash=first.record.config_hash,
        sources=sources,
        launches={side.variant: (len(side.launches), side.planned) for side in sides},
        switches=spec.switches(),
        outcome=outcome,
        summary=_summary(outcome, cells, accuracy, codes) + watermark(marks, verdict=outcome.endswith("regression")),
        codes=codes,
        cells=cells,
        accuracy=accuracy,
        seen=invalid,
        advice=advice,
        waived=accepted,
        notes=_notes(sides, spec, cells),
        warnings=tuple(dict.fromkeys((*unused, *first.warnings, *second.warnings))),
    )


def _cells(sides: list[Side], spec: ExperimentSpec, waivers: Sequence[Waiver]) -> tuple[list[Cell], list[Seen]]:
    """The cells with their calls, and what the checks of each cell saw."""
    kinds: dict[CellKey, metrics.Kind] = {}
    values: dict[CellKey, dict[str, Samples]] = {}
    found: list[Seen] = []
    codes: dict[CellKey, list[str]] = defaultdict(list)
    for side in sides:
        for launch in side.launches:
            for record in launch.record.cells:
                key = CellKey.of(record)
                kinds[key] = record.kind
                requests = launch.requests.get((key, record.repeat), [])
                for finding in check_cell(record, requests):
                    where = f"launch {launch.record.launch_index}-{side.variant}, {key}"
                    found.append(Seen(where, finding))
                    if stands(found[-1], waivers):
                        codes[key].append(finding.code)
            for key, table in launch_values(launch).items():
                for name, value in table.items():
                    samples = values.setdefault(key, {}).setdefault(name, {v: [] for v in VARIANTS})
                    samples[side.variant].append(value)
    return call_cells(values, kinds, codes, spec), found


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
