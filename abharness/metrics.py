"""RequestRecords of one cell -> its metrics. One table says every metric's unit, direction and headline role.

Definitions follow `vllm bench serve` where it has them: `tpot` = (e2el - ttft) / (output_tokens - 1); medians and
99th percentiles are over the requests of the cell; rates are over its whole window, first submission to the end of
the last stream. Times start when the request's bytes had been sent. Failed requests are in no latency and no rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from abharness.record import CellRecord, RequestRecord

Kind = Literal["decode", "prefill"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        name: The field's standard name.
        unit: SI unit of the stored value.
        display_unit: Unit of the report.
        display_scale: Stored value times this is the displayed one.
        higher_is_better: Direction.
        kinds: Workload kinds that have it.
        headline: The one metric of these kinds that decides the verdict; the others describe.
        chief: Shown without `--all-metrics`.
    """

    name: str
    unit: str
    display_unit: str
    display_scale: float
    higher_is_better: bool
    kinds: tuple[Kind, ...]
    headline: bool = False
    chief: bool = False


METRICS: tuple[Metric, ...] = (
    Metric("output_throughput", "tok/s", "tok/s", 1, True, ("decode",), headline=True, chief=True),
    Metric("output_throughput_steady", "tok/s", "tok/s", 1, True, ("decode",), chief=True),
    Metric("prefill_throughput", "tok/s", "tok/s", 1, True, ("prefill",), headline=True, chief=True),
    Metric("total_token_throughput", "tok/s", "tok/s", 1, True, ("decode",)),
    Metric("request_throughput", "1/s", "req/s", 1, True, ("decode", "prefill")),
    Metric("ttft", "s", "ms", 1e3, False, ("decode", "prefill"), chief=True),
    Metric("ttft_p99", "s", "ms", 1e3, False, ("decode", "prefill")),
    Metric("tpot", "s", "ms", 1e3, False, ("decode",), chief=True),
    Metric("tpot_p99", "s", "ms", 1e3, False, ("decode",)),
    Metric("itl", "s", "ms", 1e3, False, ("decode",)),
    Metric("itl_p99", "s", "ms", 1e3, False, ("decode",), chief=True),
    Metric("e2el", "s", "ms", 1e3, False, ("decode", "prefill")),
    Metric("e2el_p99", "s", "ms", 1e3, False, ("decode", "prefill")),
)


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds on the monotonic clock of the requests."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


def ok(requests: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The requests that completed and may be measured."""
    return [request for request in requests if request.error is None]


def ttft_s(request: RequestRecord) -> float | None:
    """Sent to first token, seconds."""
    if request.first_token_s is None or request.sent_s is None:
        return None
    return request.first_token_s - request.sent_s


def e2el_s(request: RequestRecord) -> float | None:
    """Sent to last token, seconds."""
    if request.last_token_s is None or request.sent_s is None:
        return None
    return request.last_token_s - request.sent_s


def tpot_s(request: RequestRecord) -> float | None:
    """Time per output token after the first, seconds; None with fewer than two tokens."""
    if request.last_token_s is None or request.first_token_s is None or (request.output_tokens or 0) < 2:
        return None
    assert request.output_tokens is not None
    return (request.last_token_s - request.first_token_s) / (request.output_tokens - 1)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Linear-interpolation percentile (the method numpy defaults to); None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def steady_window(requests: Sequence[RequestRecord], max_concurrency: int) -> Window | None:
    """From the first time the asked concurrency is reached to the first time it can no longer be kept.

    Returns:
        The window, or None when the concurrency was never reached or the window is empty.
    """
    done = ok(requests)
    if len(done) < len(requests) or len(done) < max_concurrency:
        return None
    starts = sorted(request.submitted_s for request in done)
    ends = sorted(request.last_token_s for request in done if request.last_token_s is not None)
    if len(ends) < len(done):
        return None
    # The last `max_concurrency` requests to end leave slots that nothing is left to fill.
    window = Window(starts[max_concurrency - 1], ends[len(ends) - max_concurrency])
    return window if window.length_s > 0 else None


def tokens_within(request: RequestRecord, window: Window) -> float:
    """Output tokens of a request inside a window.

    The record keeps the first and last token's time and the count; the tokens between are taken as evenly spaced.
    """
    if request.first_token_s is None or request.last_token_s is None or not request.output_tokens:
        return 0.0
    inside = 1.0 if window.start_s <= request.first_token_s <= window.end_s else 0.0
    span = request.last_token_s - request.first_token_s
    if request.output_tokens == 1 or span <= 0:
        return inside * request.output_tokens
    overlap = min(window.end_s, request.last_token_s) - max(window.start_s, request.first_token_s)
    return inside + max(0.0, overlap) / span * (request.output_tokens - 1)


def cell_metrics(cell: CellRecord, requests: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Every metric of a cell's kind, in stored units; None where it cannot be known (no completed request, ...)."""
    done = ok(requests)
    wall = cell.ended_s - cell.started_s
    output = sum(request.output_tokens or 0 for request in done)
    prompt = sum(request.prompt_tokens or 0 for request in done)

    def values(of: Callable[[RequestRecord], float | None]) -> list[float]:
        return [value for value in map(of, done) if value is not None]

    def rate(amount: float, seconds: float) -> float | None:
        return amount / seconds if done and seconds > 0 else None

    def median(numbers: list[float]) -> float | None:
        return statistics.median(numbers) if numbers else None

    steady = steady_window(requests, cell.max_concurrency)
    result: dict[str, float | None] = {
        "output_throughput": rate(output, wall),
        "output_throughput_steady": rate(sum(tokens_within(r, steady) for r in done), steady.length_s)
        if steady
        else None,
        "prefill_throughput": rate(prompt, wall),
        "total_token_throughput": rate(output + prompt, wall),
        "request_throughput": rate(len(done), wall),
        "itl": median(values(lambda request: request.itl_p50_s)),
        "itl_p99": median(values(lambda request: request.itl_p99_s)),
    }
    for name, of in (("ttft", ttft_s), ("tpot", tpot_s), ("e2el", e2el_s)):
        result[name] = median(values(of))
        result[f"{name}_p99"] = percentile(values(of), 0.99)
    return {metric.name: result[metric.name] for metric in METRICS if cell.kind in metric.kinds}
