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
from abharness.record import Variant
from abharness.runs import CellKey, Launch
from abharness.spec import ExperimentSpec, Primary

Call = Literal["better", "worse", "~", "no verdict"]
Samples = dict[Variant, list[float]]


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
    samples: Samples
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


def call_cells(
    values: Mapping[CellKey, Mapping[str, Samples]],
    kinds: Mapping[CellKey, metrics.Kind],
    codes: Mapping[CellKey, Sequence[str]],
    spec: ExperimentSpec,
) -> list[Cell]:
    """Test every metric of every cell and say what may be said.

    Args:
        values: Launch values by cell, metric and variant.
        kinds: Kind of each cell.
        codes: Invalidating codes found in a cell.
        spec: Its design has the level, the least effect and the primary.
    """
    by_name = {metric.name: metric for metric in metrics.METRICS}
    cells: list[Cell] = []
    for key, table in values.items():
        rows = [_row(by_name[name], samples, spec) for name, samples in table.items()]
        cells.append(Cell(key, kinds[key], rows, tuple(dict.fromkeys(codes.get(key, ())))))
    return _call(cells, spec)


def _row(metric: metrics.Metric, samples: Samples, spec: ExperimentSpec) -> Row:
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
