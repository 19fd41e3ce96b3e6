"""A/A runs -> floors: how far equal variants lie apart on this machine, and whether a run may use that.

The floor of a metric of a cell: split the launches of the A/A, all of the same baseline, into two groups as large as
the variants of the run that will use it (or halves, where the A/A has fewer launches), in every possible way; the floor
is the 1 - alpha quantile of the absolute relative difference between the groups' medians, or what the A/A's own two
halves differed by where that is more. The floor of right answers is the same quantile of the difference in the number
of questions that most launches of a group answer right. Both are computed from the raw records of the A/A each time.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from abharness import paired, stats
from abharness.cells import CellFloor, launch_values
from abharness.paired import AnswerFloor
from abharness.runs import CellKey, Launch, Run
from abharness.validity import identity_difference


@dataclass(frozen=True, slots=True)
class Floor:
    """What one A/A run measured.

    Attributes:
        source: The run's folder.
        launches: Launches of the baseline in it.
        group: Launches in each of the groups that were compared.
        cells: One entry a cell and metric.
        answers: One entry a gsm8k workload.
    """

    source: str
    launches: int
    group: int
    cells: tuple[CellFloor, ...]
    answers: tuple[AnswerFloor, ...]


def measure(run: Run, group: int, alpha: float) -> Floor:
    """The floor of an A/A run.

    Args:
        run: An A/A run with at least one completed launch of each of its halves.
        group: Launches a variant of the run that will use it.
        alpha: Share of the splits that may lie above the floor.
    """
    launches = [*run.of("baseline"), *run.of("candidate")]
    half = len(run.of("baseline"))
    group = min(group, len(launches) // 2)
    splits = stats.relabellings(len(launches), group)
    source = str(run.path)
    values: dict[tuple[CellKey, str], list[float]] = defaultdict(list)
    for launch in launches:
        for key, table in launch_values(launch).items():
            for name, value in table.items():
                values[key, name].append(value)
    cells = []
    for (key, name), found in values.items():
        # A metric that some launch lacks, or that has no ratio, has no floor.
        if len(found) == len(launches) and min(found) > 0:
            limit = stats.upper_quantile((_apart(found, *split) for split in splits), 1 - alpha)
            own = _apart(found, range(half), range(half, len(found)))
            cells.append(CellFloor(key, name, max(limit, own), stats.spread(found), source))
    answers = [_answers(launches, name, half, splits, alpha, source) for name in launches[0].answers]
    return Floor(source, len(launches), group, tuple(cells), tuple(answers))


def _apart(values: Sequence[float], first: Iterable[int], second: Iterable[int]) -> float:
    one, two = (statistics.median([values[index] for index in group]) for group in (first, second))
    return abs(two / one - 1)


def _answers(
    launches: Sequence[Launch],
    workload: str,
    half: int,
    splits: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    alpha: float,
    source: str,
) -> AnswerFloor:
    tables = [{record.doc_id: record for record in launch.answers.get(workload, [])} for launch in launches]
    asked = paired.asked_of_all(tables)

    def net(first: Iterable[int], second: Iterable[int]) -> int:
        one, two = (len(paired.mostly_right([tables[index] for index in group], asked)) for group in (first, second))
        return abs(two - one)

    limit = int(stats.upper_quantile((net(*split) for split in splits), 1 - alpha))
    pairs = itertools.combinations(tables, 2)
    return AnswerFloor(
        workload=workload,
        num_questions=len(asked),
        flips=tuple(paired.flipping(tables, asked)),
        most_changed=max((len(paired.flipping(pair, asked)) for pair in pairs), default=0),
        net=max(limit, net(range(half), range(half, len(launches)))),
        source=source,
    )


def mismatch(run: Run, aa: Run) -> str | None:
    """The first thing in which an A/A differs from the baseline of a run, or None where its floor holds for it.

    Both must have a completed launch of the baseline.
    """
    here, there = run.of("baseline")[0], aa.of("baseline")[0]
    if not here.evidence.gpu_uuids:
        for name in ("cpu", "cpu_count"):
            ours, theirs = run.record.provenance.get(name), aa.record.provenance.get(name)
            if ours != theirs:
                return f"host.{name} is {theirs!r} there and {ours!r} here"
    return identity_difference(here, there)


def by_cell(floors: Iterable[Floor]) -> dict[tuple[CellKey, str], CellFloor]:
    """The largest floor of each cell and metric."""
    found: dict[tuple[CellKey, str], CellFloor] = {}
    for item in (cell for floor in floors for cell in floor.cells):
        known = found.get((item.key, item.metric))
        if known is None or item.floor > known.floor:
            found[item.key, item.metric] = item
    return found


def by_workload(floors: Iterable[Floor]) -> dict[str, AnswerFloor]:
    """What the A/As of each workload show together: every question that flips in any, the largest differences."""
    found: dict[str, AnswerFloor] = {}
    for item in (answers for floor in floors for answers in floor.answers):
        known = found.get(item.workload)
        found[item.workload] = (
            item
            if known is None
            else replace(
                known,
                flips=tuple(sorted({*known.flips, *item.flips})),
                most_changed=max(known.most_changed, item.most_changed),
                net=max(known.net, item.net),
                source=f"{known.source}, {item.source}",
            )
        )
    return found
