"""A run -> two files in the Go benchmark format, for `benchstat baseline.txt candidate.txt`.

The launch is the sample, so a line is a launch and cell: `BenchmarkDecode/workload=decode/.../max_concurrency=16 32
597.5 output_throughput-tok/s 0.2212 ttft-sec`, the number after the name being its requests. Units are SI, the name of
the metric before them; `Unit` lines say which way is better. A cell that is not valid stands under a `codes:` line, which
benchstat prints above a table of its own.

The format: golang.org/design/14313-benchmark-format and package golang.org/x/perf/benchfmt.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from abharness.cells import launch_values
from abharness.exported import Document, Exported, file_name
from abharness.metrics import METRICS, Metric
from abharness.record import Variant
from abharness.runs import CellKey, Launch
from abharness.spec import VARIANTS

_UNITS = {"s": "sec", "1/s": "req/s"}

SHARE_RIGHT = "exact_match-share"
SHARE_CUT = "truncated-share"


def documents(exported: Exported) -> Iterator[Document]:
    """A file for each variant, with everything else equal: benchstat keeps lines apart whose configuration differs."""
    for variant in VARIANTS:
        yield Document(PurePosixPath(exported.folder, f"{variant}.txt"), text(exported, variant))


def unit(metric: Metric) -> str:
    """The unit of a metric in this format, which has one meaning in a file: `ttft-sec`."""
    return f"{metric.name}-{_UNITS.get(metric.unit, metric.unit)}"


def text(exported: Exported, variant: Variant) -> str:
    """The file of one variant."""
    launches = [launch for launch in exported.launches() if launch.record.variant == variant]
    lines = [
        f"experiment: {_one_line(exported.run.record.experiment)}",
        f"model: {_one_line(launches[0].record.model if launches else 'unknown')}",
    ]
    lines += [f"Unit {unit(one)} better={'higher' if one.higher_is_better else 'lower'}" for one in METRICS]
    lines += [f"Unit {SHARE_RIGHT} better=higher", f"Unit {SHARE_CUT} better=lower"]
    by_codes: dict[str, list[str]] = {"": []}
    for launch in launches:
        for codes, line in (*_cells(exported, launch), *_answers(exported, launch)):
            by_codes.setdefault(codes, []).append(line)
    lines += ["", *by_codes.pop("")]
    for codes, part in by_codes.items():
        lines += ["", f"codes: {codes}", "", *part]
    return "\n".join(lines) + "\n"


def _cells(exported: Exported, launch: Launch) -> Iterator[tuple[str, str]]:
    by_name = {metric.name: metric for metric in METRICS}
    kinds = {CellKey.of(cell): cell.kind for cell in launch.record.cells}
    for key, values in launch_values(launch).items():
        if not values:
            continue
        count = sum(len(requests) for (one, _), requests in launch.requests.items() if one == key)
        name = (
            f"Benchmark{kinds[key].capitalize()}/workload={file_name(key.workload)}/input_len={key.input_len}"
            f"/output_len={key.output_len}/max_concurrency={key.max_concurrency}"
        )
        measured = " ".join(f"{value!r} {unit(by_name[metric])}" for metric, value in values.items())
        yield " ".join(exported.codes(key)), f"{name} {max(1, count)} {measured}"


def _answers(exported: Exported, launch: Launch) -> Iterator[tuple[str, str]]:
    for workload, answers in launch.answers.items():
        right = sum(answer.state == "right" for answer in answers) / len(answers)
        cut = sum(answer.state == "truncated" for answer in answers) / len(answers)
        yield (
            " ".join(exported.answer_codes(workload)),
            f"BenchmarkGsm8k/workload={file_name(workload)}/num_questions={len(answers)} {len(answers)} "
            f"{right!r} {SHARE_RIGHT} {cut!r} {SHARE_CUT}",
        )


def _one_line(value: str) -> str:
    return " ".join(value.split()) or "unknown"
