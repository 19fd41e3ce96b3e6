"""GPU samples of a launch -> what a page draws: clocks and power over time, windows, what held the clocks down. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from abharness.gpuchecks import POWER_CAP, THROTTLE_REASONS
from abharness.plots import Span, Trail
from abharness.record import LaunchRecord
from abharness.samples import Sample

MOST_POINTS = 240
"""Buckets of a series; each gives its lowest and highest sample, so that no dip is lost to the picture."""


def trail(record: LaunchRecord, samples: Sequence[Sample]) -> Trail | None:
    """One GPU over one launch; None where nothing was sampled.

    Args:
        record: The launch: its cells are the windows.
        samples: Of this GPU, in order of time.
    """
    if not samples:
        return None
    start = samples[0].t_s

    def held_by(names: Sequence[str]) -> tuple[Span, ...]:
        return _spans(samples, lambda sample: any(name in (sample.reasons or ()) for name in names), start)

    limits = [sample.power_limit_w for sample in samples if sample.power_limit_w is not None]
    return Trail(
        variant=record.variant,
        clock=_series(samples, "sm_clock_mhz", start),
        power=_series(samples, "power_w", start),
        windows=tuple(Span(begin - start, end - start, label) for begin, end, label in _windows(record)),
        capped=held_by([POWER_CAP]),
        throttled=held_by(THROTTLE_REASONS),
        power_limit_w=limits[-1] if limits else None,
    )


def _windows(record: LaunchRecord) -> Iterator[tuple[float, float, str]]:
    for cell in record.cells:
        shape = cell.input_len if cell.kind == "prefill" else cell.max_concurrency
        yield cell.started_s, cell.ended_s, f"{cell.workload}[{shape}]"
    for asked in record.accuracy:
        yield asked.started_s, asked.ended_s, asked.workload


def _series(samples: Sequence[Sample], field: str, start: float) -> tuple[tuple[float, float], ...]:
    known = [(s.t_s - start, float(value)) for s in samples if (value := getattr(s, field)) is not None]
    if len(known) <= 2 * MOST_POINTS:
        return tuple(known)
    kept: list[tuple[float, float]] = []
    for bucket in range(MOST_POINTS):
        part = known[bucket * len(known) // MOST_POINTS : (bucket + 1) * len(known) // MOST_POINTS]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return tuple(kept)


def _spans(samples: Sequence[Sample], limited: Callable[[Sample], bool], start: float) -> tuple[Span, ...]:
    """Stretches of samples in a row of which all are limited, each up to the next sample."""
    spans: list[Span] = []
    since: float | None = None
    for sample in samples:
        held = limited(sample)
        if held and since is None:
            since = sample.t_s
        elif not held and since is not None:
            spans.append(Span(since - start, sample.t_s - start))
            since = None
    if since is not None:
        spans.append(Span(since - start, samples[-1].t_s - start))
    return tuple(spans)
