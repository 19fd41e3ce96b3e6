"""Replays, calibrations, rankings and validations -> text for people, in the units of the field."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

from abharness.replay.attribution import Attributed, medians
from abharness.replay.calibration import clock_remark
from abharness.replay.captures import Capture
from abharness.replay.records import Calibration, CandidateCheck, Replay, Segment
from abharness.replay.tuning import Ranking, shape_times
from abharness.replay.validation import Validated
from abharness.windows import GpuWindow

MOST_OPTIONS = 5
"""Of each shape, in a table."""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns that line up: the first to the left, the others to the right."""
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [cell.ljust(widths[at]) if at == 0 else cell.rjust(widths[at]) for at, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def capture_text(capture: Capture) -> str:
    """What is in a capture."""
    counts = capture.shapes()
    rows = [["shape", "calls"], *([shape, str(count)] for shape, count in counts.items())]
    inputs = f"{capture.steps} steps each" if capture.files else "made by who replays"
    head = (
        f"{capture.name}: {len(capture.order)} linear layers of a step, rows {_numbers(capture.rows)}\n"
        f"weights {capture.weights}, inputs {inputs}, {capture.dtype}\n"
    )
    left = "".join(f"left out: {name}: {why}\n" for name, why in capture.left_out.items())
    return head + table(rows) + left


def replay_text(replay: Replay, serving_mhz: dict[int, float] | None = None) -> str:
    """A replay: how right the candidates are, their steps, and their shapes, at each row count."""
    device = replay.device
    limit = "" if device.power_limit_w is None else f", power limit {device.power_limit_w:.0f} W"
    parts = [
        f"{replay.capture}: {len(replay.positions)} linear layers a step, on {device.name or device.kind}{limit}\n"
    ]
    parts.append("\n" + _checks(replay.checks))
    for rows in sorted({one.rows for one in replay.segments}):
        parts.append("\n" + _steps(replay, rows))
        parts.append(_shapes(replay, rows))
        parts += [f"note: {text}\n" for text in _clock_remarks(replay, rows, serving_mhz or {})]
    parts += [f"note: {text}\n" for text in replay.notes]
    if replay.status == "failed":
        parts.append(f"ended early: {replay.error}\n")
    return "".join(parts)


def _checks(checks: Sequence[CandidateCheck]) -> str:
    rows = [["candidate", "rows", "worst error", "against", "bit-identical", ""]]
    for one in checks:
        same = "" if one.bit_identical is None else "yes" if one.bit_identical else f"no ({_numbers(one.differing)})"
        error = "not finite" if one.worst_relative_error is None else f"{one.worst_relative_error:.1e}"
        rows.append([one.name, str(one.rows), error, one.reference, same, "not timed" if one.wrong else ""])
    return table(rows)


def _steps(replay: Replay, rows: int) -> str:
    found = [one for one in replay.segments if one.rows == rows]
    lines = [[f"{rows} rows", "ms a step", "p10 to p90", "vs production", "MHz", "W", "mJ a step", "limited by"]]
    for one in found:
        base = [
            other.step_s
            for other in found
            if (other.candidate, other.proxy, other.scale) == (replay.production, one.proxy, one.scale)
        ]
        change = "" if one.candidate == replay.production or not base else _change(one.step_s, statistics.mean(base))
        gpu = one.gpu
        energy = None if gpu is None or gpu.energy_absent or gpu.energy_j is None else gpu.energy_j
        spent = "" if energy is None else f"{energy / (one.ended_s - one.started_s) * one.step_s * 1e3:.1f}"
        lines.append(
            [
                one.candidate + (" with spins" if one.proxy else ""),
                f"{one.step_s * 1e3:.4f}",
                f"{one.step_p10_s * 1e3:.4f} to {one.step_p90_s * 1e3:.4f}",
                change,
                "" if gpu is None or gpu.sm_clock_mhz is None else f"{gpu.sm_clock_mhz:.0f}",
                "" if gpu is None or gpu.power_mean_w is None else f"{gpu.power_mean_w:.0f}",
                spent,
                _limits(gpu),
            ]
        )
    return table(lines)


def _limits(gpu: GpuWindow | None) -> str:
    """What the driver says holds the clock, with the share of the samples that say so."""
    if gpu is None or gpu.reasons is None:
        return ""
    found = [(share, name) for name, share in gpu.reasons.items() if name != "gpu_idle"]
    return ", ".join(f"{name} {share:.0%}" for share, name in sorted(found, reverse=True)) or "-"


def _shapes(replay: Replay, rows: int) -> str:
    timed = [one for one in replay.segments if one.rows == rows and one.positions_s is not None]
    absent = [one for one in replay.segments if one.rows == rows and one.positions_s is None]
    told = "".join(f"note: {one.candidate}: no times of positions: {one.positions_absent}\n" for one in absent)
    if not timed:
        return told
    labels = list(dict.fromkeys(_label(one) for one in timed))
    latest = {_label(one): shape_times(one, replay.shapes) for one in timed}
    lines = [["us a call", *labels]]
    for shape in dict.fromkeys(replay.shapes):
        count = replay.shapes.count(shape)
        lines.append([f"{shape} x{count}", *(f"{latest[label][shape] * 1e6:.2f}" for label in labels)])
    return table(lines) + told


def positions_text(replay: Replay, segment: Segment, steps: Sequence[Attributed]) -> str:
    """The steps of a trace by shape, beside the replay's."""
    found = medians(steps)
    traced = shape_times(segment.model_copy(update={"positions_s": list(found.positions_s)}), replay.shapes)
    replayed = shape_times(segment, replay.shapes)
    lines = [["us a call", "in the trace", "in the replay"]]
    for shape, time_s in traced.items():
        lines.append([f"{shape} x{replay.shapes.count(shape)}", f"{time_s * 1e6:.2f}", f"{replayed[shape] * 1e6:.2f}"])
    busy_s, gaps_s = sum(found.positions_s), sum(found.gaps_s)
    return table(lines) + (
        f"{len(steps)} steps; of each, {busy_s * 1e3:.4f} ms are in these layers and {gaps_s * 1e3:.4f} ms between them\n"
    )


def _label(one: Segment) -> str:
    return one.candidate + ("*" if one.proxy else "")


def _clock_remarks(replay: Replay, rows: int, serving_mhz: dict[int, float]) -> list[str]:
    found = []
    for one in replay.segments:
        if one.rows != rows or rows not in serving_mhz or one.gpu is None or one.gpu.sm_clock_mhz is None:
            continue
        remark = clock_remark(one.gpu.sm_clock_mhz, serving_mhz[rows])
        if remark is not None:
            found.append(f"{_label(one)}: {remark}")
    return found


def calibration_text(calibration: Calibration) -> str:
    """A calibration: what was replayed, what the server drew, and the scale."""
    lines = [["rows", "spins", "ms a step", "MHz", "W"]]
    for rows, one in sorted(calibration.rows.items()):
        for point in one.points:
            lines.append(
                [
                    str(rows),
                    f"x{point.scale:g}" if point.scale else "none",
                    f"{point.step_s * 1e3:.4f}",
                    f"{point.sm_clock_mhz:.0f}",
                    f"{point.power_w:.0f}",
                ]
            )
        lines.append(
            [
                str(rows),
                "serving",
                f"{one.tpot_s * 1e3:.4f}",
                f"{one.serving_clock_mhz:.0f}",
                f"{one.serving_power_w:.0f}",
            ]
        )
    remarks = "".join(
        f"{rows} rows: scale {one.scale:.3f} (by {one.matched}); {sum(one.gaps_s) * 1e3:.3f} ms of a token are outside of "
        f"these layers; {one.remark}\n"
        for rows, one in sorted(calibration.rows.items())
    )
    limit = "" if calibration.power_limit_w is None else f" at {calibration.power_limit_w:.0f} W"
    return table(lines) + remarks + f"holds for {calibration.gpu_name}{limit} and {calibration.model}\n"


def ranking_text(ranking: Ranking) -> str:
    """The options of one row count, best first."""
    moved = "" if ranking.drift is None else f" (production moved {ranking.drift:+.2%} between its segments)"
    if ranking.refused is not None:
        return f"{ranking.rows} rows: no ranking: {ranking.refused}\n"
    lines = [[f"{ranking.rows} rows", "us a call", "vs production", "bits"]]
    for shape, options in ranking.shapes.items():
        lines.append([shape, f"{ranking.production_s[shape] * 1e6:.2f}", "", ""])
        for one in options[:MOST_OPTIONS]:
            bits = "identical" if one.bit_identical else "differ"
            lines.append([f"  {_options(one.options)}", f"{one.time_s * 1e6:.2f}", f"{one.change:+.2%}", bits])
        if len(options) > MOST_OPTIONS:
            lines.append([f"  and {len(options) - MOST_OPTIONS} more"])
    return table(lines) + f"{ranking.rows} rows{moved}\n"


def _options(options: object) -> str:
    return json.dumps(options, separators=(",", ":"))


def validation_text(found: Sequence[Validated], candidate: str) -> str:
    """Replay, replay with spins, serving, side by side."""
    lines = [["rows", "way", "production ms", f"{candidate} ms", "change of a token's time", "error, points", "MHz"]]
    for one in found:
        for prediction in one.predictions:
            lines.append(
                [
                    str(one.rows),
                    "replay with spins" if prediction.proxy else "replay",
                    f"{prediction.production_s * 1e3:.4f}",
                    f"{prediction.candidate_s * 1e3:.4f}",
                    f"{prediction.predicted:+.2%}",
                    f"{one.error_points(prediction):+.2f}",
                    "" if prediction.clock_mhz is None else f"{prediction.clock_mhz:.0f}",
                ]
            )
        lines.append(
            [
                str(one.rows),
                "serving",
                f"{one.baseline.tpot_s * 1e3:.4f}",
                f"{one.candidate.tpot_s * 1e3:.4f}",
                f"{one.measured:+.2%}",
                "",
                "" if one.candidate.sm_clock_mhz is None else f"{one.candidate.sm_clock_mhz:.0f}",
            ]
        )
    return table(lines)


def _change(after: float, before: float) -> str:
    return f"{after / before - 1:+.2%}"


def _numbers(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))
