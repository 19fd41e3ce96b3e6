"""Launch values of cells -> rows -> calls: what may be said of each metric of each cell.

The sample is one launch: a cell's value in a launch is the median over its repeats, a variant's value the median over
its launches.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from abharness import metrics, stats
from abharness.gpuchecks import Condition
from abharness.record import Variant
from abharness.runs import CellKey, Launch
from abharness.spec import ExperimentSpec, Primary

Call = Literal["better", "worse", "~", "no verdict"]
Samples = dict[Variant, list[float]]
ByLaunch = dict[Variant, dict[int, float]]
"""Values by variant and launch index."""


CLOCKS_CODE = "clocks_differ"
CLOCKS_AGAINST_CODE = "clocks_against"
"""Stands with a call that clocks cannot explain: the slower variant had the higher ones."""

BY_NAME = {metric.name: metric for metric in metrics.METRICS}

NOTHING: ByLaunch = {"baseline": {}, "candidate": {}}


@dataclass(frozen=True, slots=True)
class CellFloor:
    """How far equal variants lie apart in one metric of one cell; `floors` says how it is measured.

    Attributes:
        floor: Relative change that is no more than equal variants show.
        spread: Half-range of all launch values over their median.
        source: The A/A run.
    """

    key: CellKey
    metric: str
    floor: float
    spread: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Row:
    """One metric of one cell.

    Attributes:
        samples: Launch values by variant, stored units, in launch order.
        launches: The index of the launch of each of these values.
        ratio: Effect, interval and uncorrected p.
        p: Corrected over the family of this row (see `call_cells`); None if it could not be computed.
        call: What may be said.
        notes: Reasons and remarks, for footnotes.
        decisive: It decides the verdict; the other rows describe.
        floor: What equal variants differed by in an A/A, as a relative change; None where no A/A measured this row.
        rank: Exact Mann-Whitney beside a called decisive row; it decides nothing. None elsewhere.
    """

    metric: metrics.Metric
    samples: Samples
    launches: dict[Variant, list[int]]
    ratio: stats.Ratio
    p: float | None
    call: Call
    notes: tuple[str, ...] = ()
    decisive: bool = False
    floor: CellFloor | None = None
    rank: stats.RankTest | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell with its rows.

    Attributes:
        codes: The invalidating codes found in it.
        conditions: What the GPUs did meanwhile.
    """

    key: CellKey
    kind: metrics.Kind
    rows: list[Row]
    codes: tuple[str, ...]
    conditions: tuple[Condition, ...] = ()


def launch_values(launch: Launch) -> dict[CellKey, dict[str, float]]:
    """Every metric of every cell of one launch, the median over its repeats, stored units; unknown ones are left out."""
    repeats: dict[CellKey, list[dict[str, float | None]]] = defaultdict(list)
    for record in launch.record.cells:
        key = CellKey.of(record)
        requests = launch.requests.get((key, record.repeat), [])
        repeats[key].append(metrics.cell_metrics(record, requests))
    result: dict[CellKey, dict[str, float]] = {}
    for key, tables in repeats.items():
        known = {name: [x for table in tables if (x := table[name]) is not None] for name in tables[0]}
        result[key] = {name: statistics.median(numbers) for name, numbers in known.items() if numbers}
    return result


def unknown_energy(launches: Mapping[Variant, Sequence[Launch]]) -> dict[CellKey, dict[str, str]]:
    """By cell, the energy metrics that may not be compared, each with the reason.

    That is one that some launch does not know in any of its repeats: the others alone would be another experiment. And
    all of them where the launches measured energy in different ways, which differ by more than most switches do.
    """
    found: dict[CellKey, dict[str, str]] = defaultdict(dict)
    lacking: dict[tuple[CellKey, str], list[str]] = defaultdict(list)
    bases: dict[CellKey, dict[Variant, set[str]]] = defaultdict(lambda: defaultdict(set))
    names: dict[CellKey, list[str]] = {}
    for variant, part in launches.items():
        for launch in part:
            if all(record.gpus is None for record in launch.record.cells):
                continue
            known = launch_values(launch)
            for record in launch.record.cells:
                key = CellKey.of(record)
                requests = launch.requests.get((key, record.repeat), [])
                names[key] = [name for name in metrics.ENERGY_METRICS if record.kind in BY_NAME[name].kinds]
                if (basis := metrics.energy_basis(record)) is not None:
                    bases[key][variant].add(basis)
                for name, reason in metrics.energy_unknown(record, requests).items():
                    if name not in known[key]:
                        lacking[key, name].append(f"{reason} (launch {launch.record.launch_index}-{variant}")
    for (key, name), reasons in lacking.items():
        more = f", and {len(reasons) - 1} more like it)" if len(reasons) > 1 else ")"
        found[key][name] = reasons[0] + more
    for key, by_variant in bases.items():
        if len({basis for part in by_variant.values() for basis in part}) > 1:
            told = "; ".join(f"{variant} by {' and '.join(sorted(part))}" for variant, part in by_variant.items())
            for name in names[key]:
                found[key].setdefault(name, f"energy: measured in different ways: {told}")
    return dict(found)


def call_cells(
    values: Mapping[CellKey, Mapping[str, ByLaunch]],
    kinds: Mapping[CellKey, metrics.Kind],
    codes: Mapping[CellKey, Sequence[str]],
    spec: ExperimentSpec,
    floors: Mapping[tuple[CellKey, str], CellFloor],
    unknown: Mapping[CellKey, Mapping[str, str]] | None = None,
    clocked: Mapping[CellKey, Variant | None] | None = None,
) -> list[Cell]:
    """Test every metric of every cell and say what may be said.

    With `design.primary`, that row decides alone and its p is left as it is. Without, the headline rows of all cells
    decide together: one family for Holm's correction, decode and prefill alike. All other rows describe, and are one
    family too: dozens of rows with a p of their own would show equal servers as different in some row or other.

    Args:
        values: Launch values by cell, metric and variant.
        kinds: Kind of each cell.
        codes: Invalidating codes found in a cell.
        spec: Its design has the level, the least effect and the primary.
        floors: By cell and metric, where an A/A measured them.
        unknown: By cell, metrics that may not be compared, each with the reason: their rows say so.
        clocked: By cell, the variant whose GPUs ran at the higher clocks where the variants' clocks differ.
    """
    unknown = unknown or {}
    cells = []
    for key, table in values.items():
        reasons = unknown.get(key, {})
        named = _decides(key, kinds[key], spec)
        rows = [
            _row(name, table.get(name, NOTHING), key, kinds[key], spec, reasons.get(name))
            for name in BY_NAME
            if name in table or name in reasons or (name == named and kinds[key] in BY_NAME[name].kinds)
        ]
        cells.append(Cell(key, kinds[key], rows, _once(codes.get(key))))
    families: dict[bool, dict[tuple[CellKey, str], float]] = defaultdict(dict)
    for cell in cells:
        for row in cell.rows:
            if row.ratio.p is not None:
                families[row.decisive][cell.key, row.metric.name] = row.ratio.p
    corrected: dict[tuple[CellKey, str], float] = {}
    for family in families.values():
        corrected |= zip(family, stats.holm(list(family.values())), strict=True)
    result: list[Cell] = []
    for cell in cells:
        places = [(cell.key, row.metric.name) for row in cell.rows]
        rows = [
            _called(
                replace(row, p=corrected.get(place), floor=floors.get(place)), cell, spec, (clocked or {}).get(cell.key)
            )
            for row, place in zip(cell.rows, places, strict=True)
        ]
        result.append(replace(cell, rows=rows))
    return result


def _once(codes: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(codes or ()))


def _decides(key: CellKey, kind: metrics.Kind, spec: ExperimentSpec) -> str | None:
    """The metric of a cell that `design.primary` names, if it names this cell."""
    primary = Primary.parse(spec.design.primary) if spec.design.primary else None
    if primary is None or not primary.names(key.workload, kind, key.input_len, key.max_concurrency):
        return None
    return primary.metric


def _row(
    name: str, values: ByLaunch, key: CellKey, kind: metrics.Kind, spec: ExperimentSpec, unknown: str | None
) -> Row:
    metric = BY_NAME[name]
    samples = {variant: list(part.values()) for variant, part in values.items()}
    if unknown is None:
        ratio = stats.compare_ratio(samples["baseline"], samples["candidate"], alpha=spec.design.alpha)
    else:
        ratio = stats.Ratio(None, reason=unknown)
    decisive = metric.headline if spec.design.primary is None else name == _decides(key, kind, spec)
    launches = {variant: list(part) for variant, part in values.items()}
    return Row(metric, samples, launches, ratio, None, "~", decisive=decisive)


def _called(row: Row, cell: Cell, spec: ExperimentSpec, clocked: Variant | None) -> Row:
    if not cell.codes:
        return _tested(row, spec)
    if cell.codes == (CLOCKS_CODE,) and row.metric.name not in metrics.ENERGY_METRICS:
        tested = _tested(row, spec)
        slower: dict[Call, Variant] = {"better": "baseline", "worse": "candidate"}
        if clocked is not None and slower.get(tested.call) == clocked:
            return replace(tested, notes=(*tested.notes, CLOCKS_AGAINST_CODE))
    return replace(row, call="no verdict", notes=cell.codes)


def _tested(row: Row, spec: ExperimentSpec) -> Row:
    """The row with its call, as if nothing stood against its cell."""
    effect = row.ratio.effect
    if effect is None:
        return replace(row, call="no verdict", notes=(row.ratio.reason or "unknown",))
    if row.p is None or row.p >= spec.design.alpha or abs(effect) <= spec.design.min_effect:
        return replace(row, notes=() if row.ratio.reason is None else (row.ratio.reason,))
    if row.floor is not None and abs(effect) <= row.floor.floor:
        note = f"within the A/A floor: the baseline differs from itself by {row.floor.floor:.2%} ({row.floor.source})"
        return replace(row, notes=(note,))
    better = (effect > 0) == row.metric.higher_is_better
    return replace(row, call="better" if better else "worse")
