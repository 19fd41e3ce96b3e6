"""Comparison and the runs behind it -> everything that one article of the page shows, ready to be laid out. Pure.

The words and numbers are those of the other reports (`report`); what is added here is what only a page can show: plots,
answers side by side, what every witness saw.
"""

from __future__ import annotations

import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import yaml

from abharness import metrics, plots, proofs, report
from abharness.answerdiff import AnswerDiff, answer_diff
from abharness.cells import Cell, Row
from abharness.compare import Comparison
from abharness.errors import RecordError
from abharness.failures import what_happened
from abharness.paired import Accuracy
from abharness.record import AnswerRecord, RequestRecord, Variant
from abharness.runs import TELEMETRY_FILE, Launch, Run
from abharness.samples import by_gpu, read_samples
from abharness.spec import VARIANTS, ExperimentSpec
from abharness.terminal import Section
from abharness.trails import trail

PANELS = ("ttft", "tpot", "energy_per_output_token", "energy_per_prompt_token")
"""Metrics of a cell that are drawn, besides those that decide."""

MOST_DIFFS = 40
"""Changed answers shown side by side; all are in the JSON."""

MOST_TRAILS = 16
"""Launches (of one GPU each) whose clocks are drawn."""

LOG_LINES = 20
"""Last words of a failed launch."""

OF_REQUEST: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft": metrics.ttft_s,
    "tpot": metrics.tpot_s,
    "e2el": metrics.e2el_s,
    "itl": lambda request: request.itl_p50_s,
}
"""Metrics that are a median over the requests: these are drawn inside a launch; of the others, the repeats are."""

CURVES = {
    "decode": ("output_throughput", "tpot", "energy_per_output_token"),
    "prefill": ("ttft", "prefill_throughput", "energy_per_prompt_token"),
}
"""What is drawn over concurrency, or over the prompt's length."""


@dataclass(slots=True)
class Budget:
    """How many plots a page may still hold: what bounds its size, whatever was compared."""

    plots: int = 160
    left_out: int = 0

    def draw(self, make: Callable[[], str]) -> str | None:
        """A plot, or None when the page is full."""
        if self.plots <= 0:
            self.left_out += 1
            return None
        self.plots -= 1
        return make()


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table; `call` is the class of its last cell."""

    name: str
    baseline: str
    candidate: str
    change: str
    call: str = ""
    decisive: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with what it shows, in words."""

    title: str
    svg: str


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table with its plots."""

    title: str
    lines: list[Line]
    codes: tuple[str, ...] = ()
    figures: list[Figure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LaunchLine:
    """One launch of the table of launches."""

    label: str
    status: str
    started_at: str
    ready_s: float | None
    wall_s: float
    error: str | None
    log_tail: list[str]
    command: str


@dataclass(frozen=True, slots=True)
class Article:
    """One comparison, laid out.

    Attributes:
        anchor: Id of the article within its page.
        verdict: Class of its outcome: `regression`, `no-regression`, `no-verdict`, `launch-failed`.
        problems: What stands against a verdict, with the next steps.
        trails_absent: Why no clocks are drawn, or None.
        diffs: By workload, the changed answers side by side, each with what is told of it in a sentence.
        diffs_more: Changed answers that are not shown.
        declared: What differs by declaration: name, baseline, candidate.
        spec: The resolved spec as YAML.
    """

    anchor: str
    comparison: Comparison
    verdict: str
    counts: str
    tables: list[Table]
    footnotes: list[str]
    curves: list[Figure]
    diffs: dict[str, list[tuple[AnswerDiff, str]]]
    diffs_more: int
    declared: list[tuple[str, str, str]]
    switches: list[proofs.SwitchProof]
    facts: list[proofs.Fact]
    kernels: list[Table]
    trails: list[Figure]
    trails_absent: str | None
    problems: list[str]
    remarks: list[str]
    launches: list[LaunchLine]
    provenance: list[tuple[str, str]]
    spec: str


def article(comparison: Comparison, runs: Sequence[Run], number: int, budget: Budget) -> Article:
    """Lay one comparison out.

    Args:
        comparison: The result.
        runs: The run of the baseline and that of the candidate; one, where they are the same.
        number: Of the article within its page, from 1.
        budget: Of the page.
    """
    by_variant = {
        variant: [launch for launch in run.launches if launch.record.variant == variant]
        for variant, run in zip(VARIANTS, (runs[0], runs[-1]), strict=True)
    }
    completed = {v: [one for one in part if one.record.status == "completed"] for v, part in by_variant.items()}
    told = report.tables(comparison)
    diffs = {item.workload: list(_diffs(item, completed)) for item in comparison.accuracy if item.changed}
    spec = ExperimentSpec.model_validate(runs[0].record.spec)
    told_of = proofs.switch_proofs(spec, comparison.effects, by_variant)
    trails, absent = _trails(_in_order(by_variant), budget)
    return Article(
        anchor=f"experiment-{number}",
        comparison=comparison,
        verdict=comparison.outcome.replace(" ", "-"),
        counts=report.counts(comparison),
        tables=[
            *(
                _cell_table(cell, rows, completed, budget)
                for cell, (_, rows) in zip(comparison.cells, told.cells, strict=True)
            ),
            *(_accuracy_table(item, section) for item, section in zip(comparison.accuracy, told.accuracy, strict=True)),
        ],
        footnotes=told.footnotes,
        curves=list(_curves(comparison.cells, budget)),
        diffs=diffs,
        diffs_more=sum(max(0, len(item.changed) - MOST_DIFFS) for item in comparison.accuracy),
        declared=[
            (pair[0].name, pair[0].declared, pair[1].declared) for pair in zip(told_of[::2], told_of[1::2], strict=True)
        ],
        switches=told_of,
        facts=proofs.facts(by_variant),
        kernels=[Table(title, list(map(_line, rows))) for title, rows in told.kernels],
        trails=trails,
        trails_absent=absent,
        problems=[line.strip() for line in report.problems(comparison)],
        remarks=report.remarks(comparison),
        launches=[_launch_line(launch) for launch in _in_order(by_variant)],
        provenance=_provenance(runs),
        spec=yaml.safe_dump(runs[0].record.spec, sort_keys=False, allow_unicode=True, width=100),
    )


def _in_order(by_variant: Mapping[Variant, Sequence[Launch]]) -> list[Launch]:
    """All launches in the order of time."""
    return sorted((one for part in by_variant.values() for one in part), key=lambda one: one.record.started_at)


def _cell_table(
    cell: Cell, rows: list[list[str]], launches: Mapping[Variant, Sequence[Launch]], budget: Budget
) -> Table:
    shown = report.shown_rows(cell)
    lines = [_line(text, row.call, decisive=row.decisive) for row, text in zip(shown, rows, strict=False)]
    lines += [_line(text) for text in rows[len(shown) :]]  # what the GPUs did
    drawn = [row for row in shown if (row.decisive or row.metric.name in PANELS) and any(row.samples.values())]
    figures = []
    for row in sorted(drawn, key=lambda row: not row.decisive):
        points = _points(cell, row, launches)
        if svg := budget.draw(partial(_panel, row, points)):
            figures.append(Figure(row.metric.name, svg))
    return Table(str(cell.key), lines, cell.codes, figures)


def _line(texts: Sequence[str], call: str = "", *, decisive: bool = False) -> Line:
    name, baseline, candidate, change = texts
    return Line(name, baseline, candidate, change, {"~": "same", "no verdict": "unknown"}.get(call, call), decisive)


def _accuracy_table(item: Accuracy, section: Section) -> Table:
    title, (first, *rest) = section
    return Table(title, [_line(first, item.call, decisive=True), *map(_line, rest)])


def _panel(row: Row, points: Sequence[plots.LaunchPoints]) -> str:
    scale = row.metric.display_scale
    medians = {v: statistics.median(values) * scale for v, values in row.samples.items() if values}
    told = ", ".join(f"{variant} {value:.4g}" for variant, value in medians.items())
    about = f"{row.metric.name} of every launch; medians: {told} {row.metric.display_unit}"
    return plots.launches_plot(points, medians, unit=row.metric.display_unit, about=about)


def _points(cell: Cell, row: Row, launches: Mapping[Variant, Sequence[Launch]]) -> list[plots.LaunchPoints]:
    """Every launch that has this metric, in the order of time, with the values that its own is the median of."""
    scale = row.metric.display_scale
    found: list[tuple[str, plots.LaunchPoints]] = []
    for variant in VARIANTS:
        by_index = {one.record.launch_index: one for one in launches[variant]}
        for index, value in zip(row.launches[variant], row.samples[variant], strict=True):
            launch = by_index[index]
            inner = tuple(x * scale for x in _inside(launch, cell, row.metric.name))
            point = plots.LaunchPoints(str(index), variant, value * scale, inner)
            found.append((launch.record.started_at, point))
    return [point for _, point in sorted(found, key=lambda item: item[0])]


def _inside(launch: Launch, cell: Cell, metric: str) -> list[float]:
    records = launch.cells_of(cell.key)
    requests = [launch.requests.get((cell.key, record.repeat), []) for record in records]
    if of := OF_REQUEST.get(metric):
        return [value for part in requests for request in metrics.ok(part) if (value := of(request)) is not None]
    if len(records) < 2:
        return []
    repeats = [metrics.cell_metrics(record, part).get(metric) for record, part in zip(records, requests, strict=True)]
    return [value for value in repeats if value is not None]


def _curves(cells: Sequence[Cell], budget: Budget) -> Iterator[Figure]:
    """Each metric of `CURVES` over the concurrency, or over the prompt's length, where a workload has two or more."""
    groups: dict[tuple[str, metrics.Kind, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        key = cell.key
        shape = f"{key.input_len} + {key.output_len} tokens"
        fixed = f"at concurrency {key.max_concurrency}" if cell.kind == "prefill" else f"of {shape}"
        groups[key.workload, cell.kind, fixed].append(cell)
    for (workload, kind, fixed), group in groups.items():
        for name in CURVES[kind]:
            rows = [(_x(cell), row) for cell in group for row in cell.rows if row.metric.name == name]
            both = sorted((item for item in rows if all(item[1].samples.values())), key=lambda item: item[0])
            if len(both) < 2:
                continue
            if svg := budget.draw(partial(_curve, kind, name, both)):
                yield Figure(f"{workload} {fixed}: {name}", svg)


def _x(cell: Cell) -> int:
    return cell.key.input_len if cell.kind == "prefill" else cell.key.max_concurrency


def _curve(kind: str, name: str, rows: Sequence[tuple[int, Row]]) -> str:
    metric = rows[0][1].metric
    over = "input_len" if kind == "prefill" else "max_concurrency"
    curves = []
    for variant in VARIANTS:
        values = [[value * metric.display_scale for value in row.samples[variant]] for _, row in rows]
        medians = tuple(statistics.median(part) for part in values)
        curves.append(plots.Curve(variant, tuple(float(x) for x, _ in rows), medians, tuple(map(tuple, values))))
    return plots.curves_plot(curves, xlabel=over, unit=metric.display_unit, about=f"{name} over {over}, both variants")


def _diffs(item: Accuracy, launches: Mapping[Variant, Sequence[Launch]]) -> Iterator[tuple[AnswerDiff, str]]:
    """The changed answers side by side, of the launches that the comparison took them from: the first of each variant."""
    tables: list[dict[int, AnswerRecord]] = [
        {record.doc_id: record for record in launches[variant][0].answers.get(item.workload, [])}
        for variant in VARIANTS
    ]
    for change in item.changed[:MOST_DIFFS]:
        records = [table[change.doc_id] for table in tables]
        told = report.told_change(change).partition("; ")[2]
        yield answer_diff(records[0], records[1], change.flip, (change.baseline, change.candidate)), told


def _trails(launches: Sequence[Launch], budget: Budget) -> tuple[list[Figure], str | None]:
    """Clocks and power of every launch, or why there are none."""
    found: list[tuple[str, plots.Trail]] = []
    absent: list[str] = []
    for launch in launches:
        raw = launch.path / TELEMETRY_FILE
        label = f"launch {launch.record.launch_index}-{launch.record.variant}"
        if launch.record.sampling is None:
            absent.append(launch.evidence.gpu_absent or "no GPU was sampled")
        elif not raw.exists():
            absent.append(f"{label}: the samples are not in this record ({TELEMETRY_FILE})")
        else:
            try:
                samples = by_gpu(read_samples(raw))
            except RecordError as error:
                absent.append(str(error))
                continue
            many = len(samples) > 1
            drawn = ((uuid, trail(launch.record, part)) for uuid, part in samples.items())
            found += [(f"{label}{f', {uuid}' if many else ''}", one) for uuid, one in drawn if one is not None]
    if len(found) > MOST_TRAILS:
        absent.append(f"the first {MOST_TRAILS} of {len(found)} are drawn")
        found = found[:MOST_TRAILS]
    top_mhz = max((value for _, one in found for _, value in one.clock), default=1.0)
    limits = [one.power_limit_w for _, one in found if one.power_limit_w is not None]
    top_w = max([value for _, one in found for _, value in one.power] + limits, default=1.0)
    figures = []
    for label, one in found:
        about = f"{label}: SM clock and power over time"
        if svg := budget.draw(partial(plots.trail_plot, one, top_mhz=top_mhz, top_w=top_w, about=about)):
            figures.append(Figure(label, svg))
    return figures, "; ".join(dict.fromkeys(absent)) or None


def _launch_line(launch: Launch) -> LaunchLine:
    record = launch.record
    error = record.error
    by_hand = shlex.join(["env", *(f"{name}={value}" for name, value in sorted(record.env.items())), *record.argv])
    return LaunchLine(
        label=f"{record.launch_index}-{record.variant}",
        status=record.status,
        started_at=record.started_at,
        ready_s=record.ready_s,
        wall_s=record.wall_s,
        error=what_happened(error) if error else None,
        log_tail=error.log_tail[-LOG_LINES:] if error else [],
        command=(error.command if error else None) or by_hand,
    )


def _provenance(runs: Sequence[Run]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for run in runs:
        record = run.record
        rows += [
            ("record", str(run.path)),
            ("created", record.created_at),
            ("configuration", record.config_hash),
            ("abharness", record.abharness_version),
            ("order", " ".join(record.plan)),
            *_flat("", record.provenance),
        ]
    return rows


def _flat(prefix: str, data: Any) -> Iterator[tuple[str, str]]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), value)
    elif isinstance(data, list) and data:
        for index, value in enumerate(data):
            yield from _flat(f"{prefix}[{index}]", value)
    else:
        yield prefix, "unknown" if data is None else str(data)
