"""What the benchmark and the tuning share: times of GPU work in CUDA graphs, memory's rate, and agreement with a reference.

A graph holds at least CALLS calls, over as many copies of a weight as exceed the L2 cache several times, so that no call
finds its weight there and the launch of the graph itself is spread thin: a graph of 6 calls of 12 us reads 15. Graphs
that are compared are replayed in turn, so that a drift of the clocks meets all of them. A time is a graph's, divided by its
calls.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch

from pq2 import format as pq2_format
from pq2 import reference
from pq2.errors import WrongResult
from pq2.quantize import Quantized

CACHE_BYTES = 240_000_000
"""Weights of a graph together: four times the 60 MB L2 cache of an H200."""
MOST_COPIES = 64
CALLS = 128
REPLAYS = 15
FOLLOWING = 16
"""Calls after each other whose result is compared with that of one alone."""
TOLERANCE = 1e-2
"""Relative error allowed to a path with bf16 results: their rounding is 2e-3."""
REFERENCE_ROWS = 512
"""Rows of a weight that a result is compared over: a reference need not multiply by a whole head."""

Call = Callable[[int], object]
"""Work on the copy with that number."""


def copies_of(nbytes: int) -> int:
    """Copies of a weight that together exceed the cache."""
    return max(2, min(MOST_COPIES, math.ceil(CACHE_BYTES / nbytes)))


def graph_times(
    calls: dict[str, tuple[Call, int]], replays: int = REPLAYS, least: int = CALLS
) -> dict[str, list[float]]:
    """Time calls by replaying one CUDA graph a name, the names in turn.

    Args:
        calls: Name -> a function of the copy's number, and the number of copies.
        replays: Of each graph.
        least: Calls of a graph, at least.

    Returns:
        Name -> seconds a call, one for each replay.
    """
    graphs = {}
    for name, (call, copies) in calls.items():
        call(0)  # compiles
        torch.cuda.synchronize()
        count = copies * math.ceil(least / copies)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(count):
                call(number % copies)
        graphs[name] = (graph, count)
        graph.replay()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(replays):
        for name, (graph, count) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e-3 / count)
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """The median of each name's times."""
    return {name: statistics.median(found) for name, found in times.items()}


def bandwidth() -> float:
    """A kernel that reads and writes 2 GB each, bytes per second: the ceiling of everything bound by memory."""
    source = torch.randn(500_000_000, device="cuda")
    target = torch.empty_like(source)
    times = graph_times({"negate": (lambda _: torch.neg(source, out=target), 2)}, least=2)["negate"]
    return float(2 * source.nbytes / statistics.median(times))


def weights(n: int, k: int) -> list[pq2_format.Prepared]:
    """Copies of a random weight, complete on the device."""
    return [pq2_format.random(n, k, "cuda", seed=copy) for copy in range(copies_of(n * pq2_format.block_rows(k)))]


def wanted(x: Quantized, weight: pq2_format.Prepared) -> torch.Tensor:
    """The float64 product of x (natural order) with the first rows of a weight."""
    return reference.matmul_quantized(x, _first_rows(weight))


def exact(activations: torch.Tensor, weight: pq2_format.Prepared) -> torch.Tensor:
    """The same from activations that are no PQ2's, float64 [M, K]: another's, as it rounds them, or those not rounded."""
    return activations @ reference.dequantize(_first_rows(weight)).T


def _first_rows(weight: pq2_format.Prepared) -> pq2_format.Prepared:
    rows = min(weight.shape[0], REFERENCE_ROWS)
    return pq2_format.Prepared(weight.data, weight.codes[:rows], weight.scales[:rows])


def deviation(got: torch.Tensor, product: torch.Tensor) -> float:
    """The relative error of a result's first columns; infinite where anything is NaN."""
    error = float((got[:, : product.shape[1]].double() - product).norm() / product.norm())
    return math.inf if bool(got.isnan().any()) or math.isnan(error) else error


def replayed(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What a call leaves when a CUDA graph of it is replayed, over NaN; on a CPU, what it returns."""
    result = call()  # compiles
    if not result.is_cuda:
        return result
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    result.fill_(torch.nan)
    graph.replay()
    return result.clone()


def relative_error(name: str, call: Callable[[], object], out: torch.Tensor, product: torch.Tensor) -> float:
    """Poison out, run a call that writes it, and compare its first columns with a float64 product.

    Then many calls after each other, in a CUDA graph: each may begin before the one before has ended, which a call alone
    never does, and a race may show only there. They must leave the same bits.

    Raises:
        WrongResult: Elements were left unwritten, it is off by more than `TOLERANCE`, or calls that follow each other leave
            something else: nothing wrong is timed.
    """
    out.fill_(torch.nan)
    call()
    if bool(out.isnan().any()):
        raise WrongResult(f"{name} left outputs unwritten, or NaN: not timed")
    error = deviation(out, product)
    if not error < TOLERANCE:
        raise WrongResult(f"{name} is off by {error:.2e} against the float64 reference: not timed")
    alone = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(FOLLOWING):
            call()
    for _ in range(3):
        graph.replay()
        if not torch.equal(out, alone):
            raise WrongResult(f"{name} gives other results when calls follow each other: not timed")
    return error
