"""RequestRecords of one cell -> its metrics. One table says every metric's unit, direction and headline role.

Definitions follow `vllm bench serve` where it has them: `tpot` = (e2el - ttft) / (output_tokens - 1); medians and
99th percentiles are over the requests of the cell; rates are over its whole window, first submission to the end of
the last stream. Times start when the request's bytes had been sent. Failed requests are in no latency and no rate.

Energy is that of the GPUs that work, over the cell's window, per token; of these metrics alone it is kept why one is not
known, since a GPU's energy often is not, for reasons a person can do something about.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from abharness.gpuchecks import idle
from abharness.record import CellRecord, RequestRecord
from abharness.windows import GpuWindow

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
    Metric("energy_per_output_token", "J/tok", "mJ/tok", 1e3, False, ("decode",), chief=True),
    Metric("energy_per_output_token_steady", "J/tok", "mJ/tok", 1e3, False, ("decode",)),
    Metric("net_energy_per_output_token", "J/tok", "mJ/tok", 1e3, False, ("decode",)),
    Metric("energy_per_prompt_token", "J/tok", "mJ/tok", 1e3, False, ("prefill",), chief=True),
    Metric("net_energy_per_prompt_token", "J/tok", "mJ/tok", 1e3, False, ("prefill",)),
)

ENERGY_METRICS = tuple(metric.name for metric in METRICS if "energy" in metric.name)
"""They are there only where a GPU was sampled."""


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
    """Every metric of a cell's kind, in stored units; None where it cannot be known (no completed request, ...).

    Those of the energy are left out where no GPU was sampled; why one is None says `energy_unknown`.
    """
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
    for name, value in _energy(cell, requests).items():
        result[name] = None if isinstance(value, str) else value
    return {
        metric.name: result[metric.name] for metric in METRICS if cell.kind in metric.kinds and metric.name in result
    }


def energy_unknown(cell: CellRecord, requests: Sequence[RequestRecord]) -> dict[str, str]:
    """The energy metrics of a cell's kind that are not known, each with the reason."""
    kinds = {metric.name: metric.kinds for metric in METRICS}
    found = _energy(cell, requests)
    return {name: value for name, value in found.items() if cell.kind in kinds[name] and isinstance(value, str)}


def energy_basis(cell: CellRecord) -> str | None:
    """What a cell's energies rest on, source and kind of power, to be equal where they are compared; None for none."""
    used = {f"{gpu.energy_source}, power: {gpu.power_kind}" for gpu in _working(cell) if _usable(gpu)}
    return " and ".join(sorted(used)) or None


def _usable(gpu: GpuWindow) -> bool:
    return gpu.energy_j is not None and gpu.energy_absent is None


def _working(cell: CellRecord) -> list[GpuWindow]:
    return [gpu for gpu in cell.gpus or [] if idle(cell, gpu) is None]


def _energy(cell: CellRecord, requests: Sequence[RequestRecord]) -> dict[str, float | str]:
    """Joules per token, or why not; empty where no GPU was sampled."""
    if cell.gpus is None:
        return {}
    done = ok(requests)
    output = float(sum(request.output_tokens or 0 for request in done))
    prompt = float(sum(request.prompt_tokens or 0 for request in done))
    whole = _joules(_working(cell), cell.gpus_absent)
    net = whole if isinstance(whole, str) else _net(whole, _working(cell), cell.ended_s - cell.started_s)
    steady = steady_window(requests, cell.max_concurrency)
    steady_joules: float | str = "energy: the asked concurrency was never kept, so there is no steady window"
    steady_tokens = 0.0
    if steady is not None:
        steady_tokens = sum(tokens_within(request, steady) for request in done)
        names = {gpu.uuid for gpu in _working(cell)}
        parts = [gpu for gpu in cell.gpus_steady or [] if gpu.uuid in names]
        steady_joules = _joules(parts, None if cell.gpus_steady else "the steady window's is not on record")
    return {
        "energy_per_output_token": _per(whole, output),
        "energy_per_output_token_steady": _per(steady_joules, steady_tokens),
        "net_energy_per_output_token": _per(net, output),
        "energy_per_prompt_token": _per(whole, prompt),
        "net_energy_per_prompt_token": _per(net, prompt),
    }


def _joules(gpus: Sequence[GpuWindow], absent: str | None) -> float | str:
    """The energy of all these GPUs together, or why one's is not known."""
    if not gpus:
        return f"energy: {absent or 'no sampled GPU does the work'}"
    total = 0.0
    for gpu in gpus:
        if gpu.energy_j is None or gpu.energy_absent is not None:
            which = f" of {gpu.uuid}" if len(gpus) > 1 else ""
            return f"energy{which}: {gpu.energy_absent or 'not on record'}"
        total += gpu.energy_j
    return total


def _net(joules: float, gpus: Sequence[GpuWindow], seconds: float) -> float | str:
    """What the work cost beyond the idle power of the loaded server."""
    idle_w = 0.0
    for gpu in gpus:
        if gpu.idle_power_w is None:
            return f"energy: the idle power of {gpu.uuid} is not known"
        idle_w += gpu.idle_power_w
    net = joules - idle_w * seconds
    return net if net > 0 else f"energy: {joules:.0f} J is no more than idling takes, {idle_w * seconds:.0f} J"


def _per(joules: float | str, tokens: float) -> float | str:
    if isinstance(joules, str):
        return joules
    return joules / tokens if tokens > 0 else "energy: there are no tokens to share it"
