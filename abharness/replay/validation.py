"""A replay's prediction of the change of a token's time, beside a serving A/B of the same switch; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from abharness.errors import UsageError
from abharness.replay.records import Replay, Segment
from abharness.replay.serving import Serving


@dataclass(frozen=True, slots=True)
class Prediction:
    """One way to predict the change of a token's time at one row count.

    Attributes:
        rows: Row count.
        proxy: Whether spins stood for what lies between the layers.
        production_s: Seconds of a step of the layers in production; spins are in it with `proxy`.
        candidate_s: The same for the candidate.
        predicted: Change of the time a token takes, as a fraction: the difference of the two over serving's time.
        clock_mhz: SM clock of the candidate's replay; None where it is not known.
    """

    rows: int
    proxy: bool
    production_s: float
    candidate_s: float
    predicted: float
    clock_mhz: float | None


@dataclass(frozen=True, slots=True)
class Validated:
    """One row count, three ways.

    Attributes:
        rows: Row count.
        baseline: What the server did with production.
        candidate: And with the candidate.
        measured: Change of the time a token takes there, as a fraction.
        predictions: From the replay without spins, and with them.
    """

    rows: int
    baseline: Serving
    candidate: Serving
    measured: float
    predictions: Sequence[Prediction]

    def error_points(self, prediction: Prediction) -> float:
        """Predicted less measured, in percentage points."""
        return (prediction.predicted - self.measured) * 100


def predictions(replay: Replay, candidate: str, rows: int, tpot_s: float) -> list[Prediction]:
    """What a replay says of a candidate at a row count: without spins, with them, whichever it has.

    Raises:
        UsageError: It has neither.
    """
    found = []
    for proxy in (False, True):
        before = _segments(replay, replay.production, rows, proxy=proxy)
        after = _segments(replay, candidate, rows, proxy=proxy)
        if before and after:
            old, new = (sum(one.step_s for one in some) / len(some) for some in (before, after))
            clocks = [one.gpu.sm_clock_mhz for one in after if one.gpu and one.gpu.sm_clock_mhz is not None]
            clock = sum(clocks) / len(clocks) if clocks else None
            found.append(Prediction(rows, proxy, old, new, (new - old) / tpot_s, clock))
    if not found:
        names = sorted({one.candidate for one in replay.segments})
        raise UsageError(
            f"the replay has no segments of {replay.production} and {candidate} at {rows} rows",
            hint=f"it has {', '.join(names)} at {', '.join(map(str, replayed_rows(replay)))} rows",
        )
    return found


def replayed_rows(replay: Replay) -> list[int]:
    """Row counts of a replay."""
    return sorted({one.rows for one in replay.segments})


def _segments(replay: Replay, candidate: str, rows: int, *, proxy: bool) -> list[Segment]:
    return [one for one in replay.segments if (one.candidate, one.rows, one.proxy) == (candidate, rows, proxy)]


def validate(replay: Replay, candidate: str, baseline: Serving, changed: Serving) -> Validated:
    """Put a replay's predictions beside what two variants of a run did at the same row count."""
    measured = changed.tpot_s / baseline.tpot_s - 1
    found = predictions(replay, candidate, baseline.rows, baseline.tpot_s)
    return Validated(baseline.rows, baseline, changed, measured, found)
