"""Runs -> two CSV files in long form: one row a launch, cell and metric, and one row a launch and question.

A text out of a record may be anything, a model's answer above all, and a spreadsheet takes a cell that begins with `=`,
`+`, `-` or `@` for a formula, which may run programs. Such a text gets an apostrophe in front, as spreadsheets
themselves mark text; numbers are left as they are. Python's `csv` and pandas read the files as they stand.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from abharness.answers import conclusion
from abharness.cells import launch_values
from abharness.exported import Document, Exported
from abharness.metrics import METRICS, energy_unknown
from abharness.paired import given_answer
from abharness.runs import CellKey, Launch

PLACE = ("experiment", "run", "launch", "variant", "workload")
METRIC_COLUMNS = (
    *PLACE, "kind", "input_len", "output_len", "max_concurrency", "repeats", "metric", "unit", "value", "unknown",
    "better", "valid", "codes",
)  # fmt: skip
ANSWER_COLUMNS = (
    *PLACE, "doc_id", "question", "target", "answer", "state", "exact_match", "filter", "finish_reason",
    "prompt_tokens", "output_tokens", "e2el_s", "reply", "valid", "codes",
)  # fmt: skip

# Half- and full-width; a tab or line end before one is skipped by some.
_FORMULA = re.compile(r"[=+\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def documents(exported: Sequence[Exported]) -> Iterator[Document]:
    """`metrics.csv` and, where questions were asked, `answers.csv`, with the rows of all runs."""
    yield Document(PurePosixPath("metrics.csv"), _table(METRIC_COLUMNS, _metric_rows(exported)))
    answers = list(_answer_rows(exported))
    if answers:
        yield Document(PurePosixPath("answers.csv"), _table(ANSWER_COLUMNS, answers))


def cell_text(value: Any) -> Any:
    """A value as it may stand in a cell: a text that a spreadsheet would compute is marked as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return f"'{value}"
    return value


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([cell_text(value) for value in row] for row in rows)
    return out.getvalue()


def _place(one: Exported, launch: Launch, workload: str) -> list[Any]:
    record = launch.record
    return [one.run.record.experiment, str(one.run.path), record.launch_index, record.variant, workload]


def _metric_rows(exported: Sequence[Exported]) -> Iterator[list[Any]]:
    for one in exported:
        for launch in one.launches():
            for key, values in launch_values(launch).items():
                cells = launch.cells_of(key)
                reasons = _unknown(launch, key)
                codes = one.codes(key)
                shape = [cells[0].kind, key.input_len, key.output_len, key.max_concurrency, len(cells)]
                for metric in METRICS:
                    if cells[0].kind in metric.kinds and (metric.name in values or metric.name in reasons):
                        value = values.get(metric.name)
                        better = "higher" if metric.higher_is_better else "lower"
                        yield [
                            *_place(one, launch, key.workload), *shape, metric.name, metric.unit,
                            None if value is None else repr(value),
                            reasons[metric.name] if value is None else None, better, not codes, " ".join(codes),
                        ]  # fmt: skip


def _unknown(launch: Launch, key: CellKey) -> dict[str, str]:
    """The metrics of a cell that some repeat may lack, with a reason."""
    kind = launch.cells_of(key)[0].kind
    found = {m.name: "not known of this launch" for m in METRICS if kind in m.kinds and "energy" not in m.name}
    for cell in launch.cells_of(key):
        found |= energy_unknown(cell, launch.requests.get((key, cell.repeat), []))
    return found


def _answer_rows(exported: Sequence[Exported]) -> Iterator[list[Any]]:
    for one in exported:
        for launch in one.launches():
            for workload, answers in launch.answers.items():
                codes = one.answer_codes(workload)
                for answer in answers:
                    yield [
                        *_place(one, launch, workload), answer.doc_id, answer.doc.get("question"),
                        conclusion(answer.target), given_answer(answer), answer.state,
                        answer.exact_match, answer.filter, answer.finish_reason, answer.prompt_tokens,
                        answer.output_tokens, answer.e2el_s, answer.resps[0][0], not codes, " ".join(codes),
                    ]  # fmt: skip
