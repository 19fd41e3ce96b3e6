"""Called cells -> remarks on their decisive rows: drift, place in a pair, launches that stand out, the rank test beside.

Remarks are footnotes. They change no call and drop no value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from abharness import stats
from abharness.cells import Cell, Row
from abharness.record import Variant
from abharness.spec import VARIANTS, DesignSpec

Positions = Mapping[int, int]
"""Launch index -> place in time, from 0; empty where the variants come from two runs."""


def remark(cells: list[Cell], positions: Positions, design: DesignSpec) -> list[Cell]:
    """Add the remarks of every decisive row that has a valid measurement.

    A diagnostic of the order is told when it is significant, corrected over the decisive rows, and larger than
    `min_effect`.
    """
    drifts = _told(cells, lambda row: _drift(row, positions), design)
    pairs = _told(cells, lambda row: _pair(row, positions), design)
    result: list[Cell] = []
    for number, cell in enumerate(cells):
        rows: list[Row] = []
        for place, row in enumerate(cell.rows):
            if not row.decisive or row.call == "no verdict":
                rows.append(row)
                continue
            notes = list(row.notes)
            if row.call != "~":
                row = replace(row, rank=stats.rank_test(row.samples["baseline"], row.samples["candidate"]))
                notes.append(_beside(row, design))
            if trend := drifts.get((number, place)):
                notes.append(
                    f"drift: {trend.change:+.1%} from the first launch to the last (p={trend.p:.3f}, variants apart); "
                    f"find what changed over the run; {_kept_out(design)}"
                )
            elif trend := pairs.get((number, place)):
                notes.append(
                    f"place in a pair: the first launch of a pair differs from the second by {trend.change:+.1%} "
                    f"(p={trend.p:.3f}, variants apart); find what one launch leaves for the next"
                )
            notes += [text for variant in VARIANTS for text in _outliers(row, variant, design)]
            rows.append(replace(row, notes=tuple(notes)))
        result.append(replace(cell, rows=rows))
    return result


def _told(
    cells: list[Cell], measure: Callable[[Row], stats.Trend | None], design: DesignSpec
) -> dict[tuple[int, int], stats.Trend]:
    found = {
        (number, place): trend
        for number, cell in enumerate(cells)
        for place, row in enumerate(cell.rows)
        if row.decisive and row.call != "no verdict" and (trend := measure(row)) is not None
    }
    corrected = stats.holm([trend.p for trend in found.values()])
    return {
        place: replace(trend, p=p)
        for (place, trend), p in zip(found.items(), corrected, strict=True)
        if p < design.alpha and abs(trend.change) > design.min_effect
    }


def _placed(row: Row, positions: Positions) -> list[tuple[int, Variant, float]]:
    """Place in time, variant and value of every launch of a row whose place is known."""
    found = [
        (positions[index], variant, value)
        for variant in VARIANTS
        for index, value in zip(row.launches[variant], row.samples[variant], strict=True)
        if index in positions
    ]
    return sorted(found)


def _drift(row: Row, positions: Positions) -> stats.Trend | None:
    placed = _placed(row, positions)
    if not placed:
        return None
    return stats.drift([value for *_, value in placed], [side for _, side, _ in placed], [at for at, *_ in placed])


def _pair(row: Row, positions: Positions) -> stats.Trend | None:
    placed = {at: (variant, value) for at, variant, value in _placed(row, positions)}
    pairs = []
    for at in range(0, max(placed, default=-1), 2):
        first, second = placed.get(at), placed.get(at + 1)
        if first and second and first[0] != second[0]:
            pairs.append((first[1], second[1], first[0] == "baseline"))
    return stats.pair_effect(pairs)


def _kept_out(design: DesignSpec) -> str:
    if design.order == "ab":
        return "order ab counts it as a difference between the variants"
    if design.order == "random":
        return "order random keeps out only what the draw happens to balance"
    return "order abba keeps a steady drift out of the comparison"


def _beside(row: Row, design: DesignSpec) -> str:
    """The rank test beside Welch's: what the call rests on."""
    assert row.rank is not None
    assumption = "p and interval take launch values as roughly log-normal (Welch's t on their logarithms)"
    if row.rank.smallest >= design.alpha:
        counts = "+".join(str(len(row.samples[variant])) for variant in VARIANTS)
        return (
            f"{assumption}; the exact Mann-Whitney test, which does not, cannot decide: with {counts} launches its "
            f"smallest p is {row.rank.smallest:.3f}"
        )
    if row.rank.p is None:
        return f"{assumption}; launch values are tied, so the exact Mann-Whitney test does not apply"
    agrees = "agrees" if row.rank.p < design.alpha else "does not agree: the call rests on that assumption"
    return f"{assumption}; the exact Mann-Whitney test, which does not, {agrees} (p={row.rank.p:.3f}, uncorrected)"


def _outliers(row: Row, variant: Variant, design: DesignSpec) -> list[str]:
    texts = []
    for found in stats.outliers(row.samples[variant], design.min_effect):
        shown = row.samples[variant][found.index] * row.metric.display_scale
        far = "the others are equal" if found.deviations is None else f"{found.deviations:.0f} robust deviations"
        texts.append(
            f"launch {row.launches[variant][found.index]}-{variant} stands out: {shown:.4g} {row.metric.display_unit}, "
            f"{found.change:+.1%} from the median of its variant ({far}); it is kept; look for what else ran then"
        )
    return texts
