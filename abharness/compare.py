"""Records -> Comparison: what differs between the variants, by how much, and whether that can be told from noise.

Everything is computed from the launches' raw records. The sample is one launch: a cell's value in a launch is the
median over its repeats, a variant's value the median over its launches. A change is called only if it is significant
after correction over the cells, larger than `min_effect`, larger than the A/A floor when one was measured, and the cell
is valid; otherwise it is `~`, or there is no verdict and the codes say why.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from abharness import floors, metrics, stats
from abharness.cells import (
    CLOCKS_AGAINST_CODE,
    CLOCKS_CODE,
    ByLaunch,
    Cell,
    CellFloor,
    call_cells,
    launch_values,
    unknown_energy,
)
from abharness.checks import check_cell, check_variants
from abharness.diagnostics import remark
from abharness.effects import Effect, effect_findings, effects
from abharness.errors import RecordError
from abharness.executed import PhaseKernels, compare_kernels
from abharness.floors import Floor
from abharness.gpuchecks import Condition, conditions, higher_clocked
from abharness.paired import Accuracy, compare_answers
from abharness.plan import recorded_hash
from abharness.record import Finding, Variant
from abharness.runs import CellKey, Run, find_aa_runs, find_runs, read_run
from abharness.shares import in_shares
from abharness.spec import VARIANTS, ExperimentSpec
from abharness.validity import (
    FailedLaunch,
    Seen,
    Side,
    differences,
    failed_launches,
    failures,
    launch_findings,
    order_findings,
    time_positions,
)
from abharness.waivers import Waiver, parse_waivers, quoted, stands, used, waived, watermark

Outcome = Literal["no regression", "regression", "no verdict", "launch failed"]

EXIT_CODES: dict[Outcome, int] = {"no regression": 0, "regression": 1, "no verdict": 3, "launch failed": 4}

AA_CODE = "aa_difference"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The whole result of one experiment.

    Attributes:
        created_at: When its first run was made: ISO 8601, UTC.
        launches: (completed, planned) by variant.
        failures: Launches that did not complete.
        effects: Each declared difference with what proves that the server acts on it.
        kernels: Which kernels ran in each traced phase.
        codes: Invalidating codes, each once, in order of finding.
        advice: Findings that do not invalidate.
        waived: Findings set aside by `--allow`.
        aa: The baseline ran against itself.
        floor: What an A/A measured; None for an A/B, and for an A/A that is not valid.
        everywhere: Those of `codes` that make every cell and all answers invalid.
    """

    experiment: str
    question: str
    config_hash: str
    created_at: str
    sources: tuple[str, ...]
    launches: dict[Variant, tuple[int, int]]
    failures: tuple[FailedLaunch, ...]
    switches: dict[str, dict[Variant, str | None]]
    effects: tuple[Effect, ...]
    kernels: tuple[PhaseKernels, ...]
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
    aa: bool = False
    floor: Floor | None = None
    everywhere: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """The process exit code this outcome leads to."""
        return EXIT_CODES[self.outcome]


def compare_folders(folders: Sequence[Path], allow: Sequence[str] = ()) -> list[Comparison]:
    """One comparison for each run found, or one across two run folders.

    A/A runs, among the folders and beside the runs in them, give the floor of the runs whose server, machine and
    workloads are theirs.

    Args:
        folders: Results folders or run folders. Exactly two run folders, none an A/A: the baseline launches of the
            first against the candidate launches of the second.
        allow: Findings to let pass, as `CODE` or `CODE:NAME` (see `waivers`); they are kept and printed.

    Raises:
        RecordError: Nothing to compare, or a record is damaged.
        UsageError: A waiver cannot be read, or is for a code that cannot be waived.
    """
    waivers = parse_waivers(allow)
    paths = find_runs(folders)
    aa_paths, warnings = find_aa_runs(paths)
    if len(folders) == 2 and list(map(Path, folders)) == paths and not set(paths) & set(aa_paths):
        references = [_aa_run(path, waivers) for path in aa_paths]
        first, second = read_run(paths[0]), read_run(paths[1])
        return [compare_runs(first, second, waivers, references, warnings)]

    def each(share: Sequence[Path]) -> list[Comparison]:
        references = [_aa_run(path, waivers) for path in aa_paths]
        return [compare_runs(run := read_run(path), run, waivers, references, warnings) for path in share]

    return in_shares(each, paths)


@dataclass(frozen=True, slots=True)
class AaRun:
    """An A/A run that may give a floor.

    Attributes:
        codes: Why it gives none: its invalidating codes; empty where it is valid.
        differs: It found a difference between equal variants.
    """

    run: Run
    codes: tuple[str, ...]
    differs: bool


def _aa_run(path: Path, waivers: Sequence[Waiver]) -> AaRun | str:
    """An A/A with its validity, computed from its records; a text where they cannot be read."""
    try:
        run = read_run(path)
        found = compare_runs(run, run, waivers)
    except RecordError as error:
        return f"{path} gives no floor: {error}"
    return AaRun(run, tuple(code for code in found.codes if code != AA_CODE), AA_CODE in found.codes)


def _floors(sides: list[Side], alpha: float, references: Sequence[AaRun | str]) -> tuple[list[Floor], list[str]]:
    """The floors that hold for these variants, and one note on each A/A that was looked at.

    Those of another experiment may hold too; why they do not goes without saying.
    """
    found: list[Floor] = []
    notes: list[str] = []
    group = min(len(side.launches) for side in sides)
    if sides[0].run.record.aa or not group:
        return [], []
    for reference in references:
        if isinstance(reference, str):
            notes.append(f"A/A run {reference}")
            continue
        name = f"A/A run {reference.run.path}"
        if reason := _unusable(reference, sides[0].run):
            if reference.run.record.experiment == sides[0].run.record.experiment:
                notes.append(f"{name} {reason}")
            continue
        floor = floors.measure(reference.run, group, alpha)
        found.append(floor)
        notes.append(
            f"A/A floor: {floor.launches} launches of the baseline, compared in groups of {floor.group} "
            f"({floor.source}); no change within it is called"
        )
        if reference.differs:
            notes.append(f"{name} found a difference between equal variants: be careful with what is called here")
    if not found:
        notes.append(
            "no A/A floor was measured for this server on this machine, so what equal servers differ by is not known; "
            "abharness run SPEC.yaml --aa measures it"
        )
    return found, notes


def _unusable(reference: AaRun, run: Run) -> str | None:
    """Why an A/A gives no floor for a run; None where it does."""
    if reference.codes:
        return f"gives no floor: it is not valid ({', '.join(reference.codes)})"
    if not floors.enough(reference.run):
        return "gives no floor: one launch a variant shows no spread"
    differs = floors.mismatch(run, reference.run)
    return differs and f"is not this server on this machine and gives no floor: {differs}"


def _spec(run: Run) -> ExperimentSpec:
    try:
        spec = ExperimentSpec.model_validate(run.record.spec)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RecordError(f"{run.path}: recorded spec: {where}: {first['msg']}") from error
    if run.record.spec_sha256 not in (None, recorded_hash(run.record.spec)):
        raise RecordError(
            f"{run.path}: the recorded spec is not the one that was written",
            hint="experiment.json was changed after the run: it does not say any more what was launched",
        )
    missing = [variant for variant in VARIANTS if variant not in spec.variants]
    if missing:
        raise RecordError(f"{run.path}: recorded spec: variants: no {missing[0]}")
    planned, wanted = Counter(run.record.plan), spec.design.launches_per_variant
    if any(planned[variant] != wanted for variant in VARIANTS):
        raise RecordError(
            f"{run.path}: plan: {planned['baseline']} baseline and {planned['candidate']} candidate launches, the recorded "
            f"spec has {wanted} of each"
        )
    return spec


def compare_runs(
    first: Run,
    second: Run,
    waivers: Sequence[Waiver] = (),
    references: Sequence[AaRun | str] = (),
    warnings: Sequence[str] = (),
) -> Comparison:
    """Compare the baseline of one run with the candidate of another, or of the same.

    Args:
        first: Its baseline launches count.
        second: Its candidate launches count.
        waivers: Findings to let pass.
        references: A/A runs to look at for a floor; a text stands for one that could not be read.
        warnings: Of the search for them.

    Raises:
        RecordError: The recorded spec cannot be read.
    """
    spec = _spec(first)
    sides = [
        Side("baseline", first, first.of("baseline"), first.record.plan.count("baseline")),
        Side("candidate", second, second.of("candidate"), second.record.plan.count("candidate")),
    ]
    measured, floor_notes = _floors(sides, spec.design.alpha, references)
    cells, cell_seen = _cells(sides, spec, waivers, floors.by_cell(measured))
    accuracy, answer_seen, floor_seen = compare_answers(sides, spec, floors.by_workload(measured))
    whole = [
        *failed_launches(sides),
        *launch_findings(sides, spec),
        *differences(sides, spec),
        *order_findings(sides, spec),
        *floor_seen,
    ]
    kernels = compare_kernels({side.variant: [launch.executed for launch in side.launches] for side in sides})
    acted = effects(sides, spec, kernels)
    shown = [row.call for cell in cells for row in cell.rows if row.decisive] + [item.call for item in accuracy]
    if all(side.launches for side in sides):
        whole += effect_findings(acted, kernels, difference_shown=any(call in ("better", "worse") for call in shown))
    found = [*whole, *cell_seen, *answer_seen]
    invalid = [item for item in found if stands(item, waivers)]
    accepted = [item for item in found if waived(item, waivers)]
    advice = [item for item in found if item not in invalid and item not in accepted]
    codes = tuple(dict.fromkeys(item.finding.code for item in invalid))
    everywhere = tuple(dict.fromkeys(item.finding.code for item in whole if item in invalid))
    everything = bool(everywhere)
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
    aa = first.record.aa and first.path == second.path
    if aa and not everything:
        invalid += (differing := _aa_differences(cells, accuracy, spec.design.alpha))
        if differing:
            codes = (*codes, AA_CODE)
        if differing or (outcome == "no regression" and not floors.enough(first)):
            outcome = "no verdict"
    sources = (str(first.path),) if first.path == second.path else (str(first.path), str(second.path))
    return Comparison(
        experiment=spec.experiment,
        question=spec.question,
        config_hash=first.record.config_hash,
        created_at=first.record.created_at,
        sources=sources,
        launches={side.variant: (len(side.launches), side.planned) for side in sides},
        failures=failures(sides),
        switches=spec.switches(),
        effects=tuple(acted),
        kernels=kernels,
        outcome=outcome,
        summary=(_aa_summary(outcome, codes, sides) if aa else _summary(outcome, cells, accuracy, codes))
        + watermark(marks, verdict=outcome.endswith("regression")),
        codes=codes,
        cells=cells,
        accuracy=accuracy,
        seen=invalid,
        advice=advice,
        waived=accepted,
        notes=(*_notes(sides, spec, cells), *floor_notes),
        warnings=tuple(dict.fromkeys((*unused, *first.warnings, *second.warnings, *warnings))),
        aa=aa,
        floor=_own_floor(first, codes, spec.design.alpha) if aa else None,
        everywhere=everywhere,
    )


def _cells(
    sides: list[Side],
    spec: ExperimentSpec,
    waivers: Sequence[Waiver],
    limits: Mapping[tuple[CellKey, str], CellFloor],
) -> tuple[list[Cell], list[Seen]]:
    """The cells with their calls, and what the checks of each cell saw."""
    kinds: dict[CellKey, metrics.Kind] = {}
    values: dict[CellKey, dict[str, ByLaunch]] = {}
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
                    samples = values.setdefault(key, {}).setdefault(name, {v: {} for v in VARIANTS})
                    samples[side.variant][launch.record.launch_index] = value
    done: dict[CellKey, tuple[Condition, ...]] = {}
    clocked: dict[CellKey, Variant | None] = {}
    for key in values:
        by_variant = {side.variant: [launch.cells_of(key) for launch in side.launches] for side in sides}
        done[key] = conditions(by_variant)
        clocked[key] = higher_clocked(by_variant)
        for finding in check_variants(by_variant):
            found.append(Seen(str(key), finding))
            if stands(found[-1], waivers):
                codes[key].append(finding.code)
    unknown = unknown_energy({side.variant: side.launches for side in sides})
    cells = call_cells(values, kinds, codes, spec, limits, unknown, clocked)
    cells = [replace(cell, conditions=done[cell.key]) for cell in cells]
    cells, found = _in_spite_of_clocks(cells, found)
    return remark(cells, time_positions(sides), spec.design), found


def _in_spite_of_clocks(cells: list[Cell], found: list[Seen]) -> tuple[list[Cell], list[Seen]]:
    """Clocks that differ become advice where every decisive row of their cell could be called in spite of them."""
    called = {
        cell.key
        for cell in cells
        if any(row.decisive for row in cell.rows)
        and all(CLOCKS_AGAINST_CODE in row.notes for row in cell.rows if row.decisive)
    }
    told = [
        replace(item, finding=item.finding.model_copy(update={"code": CLOCKS_AGAINST_CODE, "hint": None}))
        if item.finding.code == CLOCKS_CODE and item.where in {str(key) for key in called}
        else item
        for item in found
    ]
    return [replace(cell, codes=()) if cell.key in called else cell for cell in cells], told


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
        unjudged = sum(row.call == "no verdict" for row in headline)
        shown = len(headline) - better - worse - unjudged
        parts.append(f"faster in {better}, slower in {worse}, no difference shown in {shown}"
                     f"{f', no verdict in {unjudged}' if unjudged else ''} of {len(headline)} cells")  # fmt: skip
    for item in accuracy:
        word = {"worse": "answers got worse", "better": "answers got better"}.get(item.call, "no accuracy change shown")
        within = max(item.flips_within.values(), default=0)
        equal = f", and up to {within} between launches of one variant" if within else ""
        parts.append(f"{word} ({len(item.changed)} of {item.num_questions} answers differ{equal})")
    return f"Candidate: {'; '.join(parts)}." if parts else "Nothing was measured."


def _notes(sides: list[Side], spec: ExperimentSpec, cells: list[Cell]) -> tuple[str, ...]:
    notes: list[str] = []
    least = min(len(side.launches) for side in sides)
    if 0 < least < 4:
        risk = ""
        if least == 2:
            risk = (
                ", and where a server's clocks are in one of two states for a whole launch, up to 12% of equal variants "
                "are called different"
            )
        notes.append(
            f"n={least} launches a variant: intervals are wide{risk}; use launches_per_variant 4 or more for a decision"
        )
    noises = [
        row.ratio.noise
        for cell in cells
        for row in cell.rows
        if row.decisive and row.call == "~" and row.ratio.noise is not None
    ]
    if noises:
        alpha, effect = spec.design.alpha, spec.design.min_effect
        needed = stats.launches_needed(max(noises), effect, alpha)
        many = f"more than {stats.MOST_LAUNCHES}" if needed is None else f"{needed}"
        smallest = "none at all"
        if shown := stats.detectable_effect(max(noises), least, alpha):
            smallest = f"about {shown:.{0 if shown >= 0.1 else 1}%}"
        notes.append(
            f"~ means that no difference was shown, not that there is none. Smallest difference that n={least} launches a "
            f"variant would mostly show (80% power, before correction) in the noisiest cell so marked: {smallest}; for "
            f"{effect:.0%} it takes {many} launches a variant"
        )
    return tuple(notes)


def _aa_differences(cells: list[Cell], accuracy: list[Accuracy], alpha: float) -> list[Seen]:
    """What an A/A called: a difference between variants that are one and the same."""
    hint = (
        f"the variants are the same server: what differs is the machine or the order. With alpha {alpha:g} an A/A does "
        f"this by chance up to {alpha:.0%} of the time: run it again; if it differs again, believe no A/B of this machine"
    )

    def differs(where: str, message: str) -> Seen:
        return Seen(where, Finding(code=AA_CODE, message=message, hint=hint))

    called = ("better", "worse")
    found = [
        differs(str(cell.key), f"{row.metric.name} of the second variant is {row.ratio.effect:+.2%} (p={row.p:.3f})")
        for cell in cells
        for row in cell.rows
        if row.decisive and row.call in called
    ]
    for item in accuracy:
        if item.call in called:
            right = " and ".join(str(item.right[variant]) for variant in VARIANTS)
            found.append(differs(item.workload, f"{right} of {item.num_questions} answers are right (p={item.p:.3f})"))
    return found


def _aa_summary(outcome: Outcome, codes: tuple[str, ...], sides: list[Side]) -> str:
    counts = "+".join(str(len(side.launches)) for side in sides)
    if AA_CODE in codes:
        return f"A/A failed: {counts} launches of one and the same server differ."
    if outcome in ("no verdict", "launch failed"):
        reason = "one launch a variant shows no spread" if len(sides[0].launches) == 1 else "no cell could be judged"
        return f"A/A not valid, no floor: {', '.join(codes) or reason}."
    return f"A/A passed: no difference between {counts} launches of the baseline."


def _own_floor(run: Run, codes: tuple[str, ...], alpha: float) -> Floor | None:
    """What an A/A found, for its own report."""
    if set(codes) - {AA_CODE} or not floors.enough(run):
        return None
    return floors.measure(run, min(len(run.of(variant)) for variant in VARIANTS), alpha)
