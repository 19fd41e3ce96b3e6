"""`python -m pq2.bench`: what a product takes, shape by shape, in a CUDA graph, with weights that no cache holds.

    python -m pq2.bench                     the projections of a 27B decode step, M = 1: every path, and cuBLAS in bf16
    python -m pq2.bench --shape qwen3-8b    those of another shape of `pq2.generate`
    python -m pq2.bench --rows 1 16 2048    other numbers of rows
    python -m pq2.bench --tune              launches of `single`; --json FILE then makes a file for `tables/`
    python -m pq2.bench --json FILE         everything measured, as JSON

Each path multiplies by as many copies of a weight as exceed the L2 cache several times, one after the other in one graph;
the graphs of all paths of a shape are replayed in turn, so that a drift of the clocks meets all of them. A time is the
median over the replays, divided by the calls of a graph. No path is timed that does not agree with the float64 reference.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pq2 import dispatch, reference, shapes, small_gemm, switches
from pq2 import format as pq2_format
from pq2 import legacy as legacy_path
from pq2 import single as single_path
from pq2.activations import quantize_rows
from pq2.generate import byte_tokenizer
from pq2.quantize import Quantized, dequantize
from pq2.shapes import Projection

CACHE_BYTES = 240_000_000
"""Weights of a graph together: four times the 60 MB L2 cache of an H200."""
MOST_COPIES = 64
REPLAYS = 15
TOLERANCE = 1e-2
"""Relative error allowed to a path with bf16 results: their rounding is 2e-3."""
TUNE = [
    (block_n, block_g, warps)
    for block_n in (1, 2, 4, 8, 16, 32)
    for block_g in (4, 8, 16, 32)
    for warps in (1, 2, 4, 8)
    if block_n * block_g * 8 // (warps * 32 * 4) in (1, 2, 4, 8)
]
"""Launches tried: 1 to 8 loads of 16 bytes a thread."""

Call = Callable[[int], object]


TUNED_SHAPES = ("hybrid-27b", "hybrid-8b", "qwen3-8b")
"""Whose projections the tables have."""


def projections(shape: str) -> list[Projection]:
    """What a decode step of a model multiplies by."""
    config = shapes.make_config(shape, byte_tokenizer())
    return shapes.projections(shapes.matrices(shapes.meta_model(config)))


def graph_times(calls: dict[str, tuple[Call, int]], replays: int = REPLAYS) -> dict[str, list[float]]:
    """Time calls by replaying one CUDA graph a name, the names in turn.

    Args:
        calls: Name -> a function of the copy's number, and the number of copies.
        replays: Of each graph.

    Returns:
        Name -> seconds a call, one for each replay.
    """
    graphs = {}
    for name, (call, copies) in calls.items():
        call(0)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for copy in range(copies):
                call(copy)
        graphs[name] = graph
        graph.replay()
    torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(replays):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e-3 / calls[name][1])
    return times


def copies_of(nbytes: int) -> int:
    """Copies of a weight that together exceed the cache."""
    return max(2, min(MOST_COPIES, math.ceil(CACHE_BYTES / nbytes)))


def bandwidth() -> float:
    """A kernel that reads and writes 2 GB each, bytes per second: the ceiling of everything bound by memory."""
    source = torch.randn(500_000_000, device="cuda")
    target = torch.empty_like(source)
    times = graph_times({"negate": (lambda _: torch.neg(source, out=target), 2)})["negate"]
    return float(2 * source.nbytes / statistics.median(times))


def check(name: str, got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The relative error of a result.

    Raises:
        SystemExit: It is too large, or NaN.
    """
    error = float((got.double() - wanted).norm() / wanted.norm())
    if not error < TOLERANCE:
        raise SystemExit(f"pq2.bench: {name} is off by {error:.2e} against the float64 reference: not timed")
    return error


def _rows_of(weight: pq2_format.Prepared, rows: int) -> pq2_format.Prepared:
    """The first rows, for a reference that need not multiply by a whole head."""
    return pq2_format.Prepared(weight.data, weight.codes[:rows], weight.scales[:rows])


def measure(projection: Projection, m: int, arch: str) -> dict[str, Any]:
    """Times of all paths for a projection and a number of rows; seconds."""
    n, k = projection.n, projection.k
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    launch = dispatch.single_launch(switches.resolve({}, "cuda"), arch, n, k)
    times, errors = _ternary_times(x, n, k, launch)
    times |= _dense_times(x, n, k)
    return {
        "n": n, "k": k, "count": projection.count, "m": m, "bytes": n * pq2_format.block_rows(k), "launch": list(launch),
        "error": errors, "s": {name: statistics.median(values) for name, values in times.items()},
        "spread": {name: [min(values), max(values)] for name, values in times.items()},
    }  # fmt: skip


def _ternary_times(
    x: torch.Tensor, n: int, k: int, launch: dispatch.Launch
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Times of the paths and of quantising x, and the paths' relative errors."""
    m = x.shape[0]
    copies = copies_of(n * pq2_format.block_rows(k))
    weights = [pq2_format.random(n, k, "cuda", seed=copy) for copy in range(copies)]
    quantized = quantize_rows(x, "planes")
    out = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
    paths: dict[str, Call] = {
        "legacy": lambda i: legacy_path.legacy(quantized, weights[i], out, *dispatch.legacy_tile(m))
    }
    if m == 1:
        older = dispatch.LEGACY_LAUNCH
        paths["legacy"] = lambda i: legacy_path.legacy_single(quantized, weights[i], out, *older)
        paths["single"] = lambda i: single_path.single(quantized, weights[i], out, *launch)
    rows = min(n, 512)
    wanted = reference.matmul_quantized(_natural(quantized), _rows_of(weights[-1], rows))
    errors = {}
    for name, call in paths.items():
        out.fill_(torch.nan)
        call(copies - 1)
        if bool(out.isnan().any()):
            raise SystemExit(f"pq2.bench: {name} left outputs of a [{n}, {k}] product unwritten")
        errors[name] = check(f"{name} {n}x{k} M={m}", out[:, :rows], wanted)
    timed = {name: (call, copies) for name, call in paths.items()}
    return graph_times(timed | {"quantize": (lambda _: quantize_rows(x, "planes"), 32)}), errors


def _dense_times(x: torch.Tensor, n: int, k: int) -> dict[str, list[float]]:
    """Times of the same product in bf16."""
    weights = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(copies_of(n * k * 2))]
    return graph_times({"cublas bf16": (lambda i: torch.nn.functional.linear(x, weights[i]), len(weights))})


def _natural(quantized: Quantized) -> Quantized:
    """Planes order back to natural order; the integers stay what they are."""
    ones = Quantized(quantized.q, torch.ones_like(quantized.scales), quantized.sums)
    return Quantized(dequantize(ones, "planes", torch.float32).to(torch.int8), quantized.scales, quantized.sums)


def measure_small(projection: Projection, m: int) -> dict[str, Any]:
    """Times of a small unquantised projection: split-K in several pieces, and vLLM's own product; seconds."""
    n, k = projection.n, projection.k
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    weights = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(MOST_COPIES)]
    arrived = small_gemm.counters(n, x.device)
    got = small_gemm.small_gemm(x, weights[0], arrived, None, small_gemm.PIECES)
    error = check(f"small_gemm M={m}", got, reference.small_gemm(x, weights[0]))

    def call_of(pieces: int) -> Call:
        return lambda copy: small_gemm.small_gemm(x, weights[copy], arrived, None, pieces)

    calls = {f"small_gemm {pieces}": (call_of(pieces), MOST_COPIES) for pieces in (5, 10, 20, 40)}
    calls["cublas bf16"] = (lambda copy: torch.nn.functional.linear(x, weights[copy]), MOST_COPIES)
    times = graph_times(calls)
    return {
        "n": n, "k": k, "count": projection.count, "m": m, "error": error,
        "s": {name: statistics.median(values) for name, values in times.items()},
    }  # fmt: skip


def with_default(best: dict[str, list[int]]) -> dict[str, list[int]]:
    """A table of launches with the default, for shapes that it does not have: the launch that is best most often."""
    counts = Counter(map(tuple, best.values()))
    return {"default": list(counts.most_common(1)[0][0]), **best}


def tune() -> dict[str, list[int]]:
    """The table of launches of `single`: the fastest for each projection of the tuned shapes."""
    best = {}
    ternary = [one for shape in TUNED_SHAPES for one in projections(shape) if one.converted]
    for n, k in dict.fromkeys((one.n, one.k) for one in ternary):
        times = _launch_times(n, k)
        ranking = sorted(times, key=times.__getitem__)
        best[f"{n}x{k}"] = list(ranking[0])
        told = ", ".join(f"{launch} {times[launch] * 1e6:.2f}" for launch in ranking[:4])
        print(f"{n}x{k}: {told} us; slowest {times[ranking[-1]] * 1e6:.2f}", flush=True)
    return with_default(best)


def _launch_times(n: int, k: int) -> dict[tuple[int, int, int], float]:
    """Median time of each launch tried, seconds; all must agree with `legacy`."""
    copies = copies_of(n * pq2_format.block_rows(k))
    weights = [pq2_format.random(n, k, "cuda", seed=copy) for copy in range(copies)]
    quantized = quantize_rows(torch.randn(1, k, dtype=torch.bfloat16, device="cuda"), "planes")
    out = torch.empty(1, n, dtype=torch.float32, device="cuda")
    legacy_path.legacy_single(quantized, weights[0], out, *dispatch.LEGACY_LAUNCH)
    wanted = out.double()

    def call_of(launch: tuple[int, int, int]) -> Call:
        return lambda i: single_path.single(quantized, weights[i], out, *launch)

    with ThreadPoolExecutor() as pool:  # the assembler, a process of its own, takes most of a compilation
        list(pool.map(lambda launch: call_of(launch)(0), TUNE))
    calls = {}
    for launch in TUNE:
        out.fill_(torch.nan)
        call_of(launch)(0)
        check(f"single {launch}", out, wanted)
        calls[str(launch)] = (call_of(launch), copies)
    times = graph_times(calls, replays=5)
    return {launch: statistics.median(times[str(launch)]) for launch in TUNE}


def table_lines(results: list[dict[str, Any]], ceiling: float) -> list[str]:
    """The results as a Markdown table, with the whole step's times below: seconds become microseconds here."""
    lines = []
    for m in sorted({result["m"] for result in results}):
        rows = [result for result in results if result["m"] == m]
        names = list(rows[0]["s"])
        lines += [f"M = {m}, us a product", "", f"| N x K | count | floor | {' | '.join(names)} |"]
        lines += ["|" + "---|" * (len(names) + 3)]
        for result in rows:
            floor = result["bytes"] / ceiling
            cells = " | ".join(f"{result['s'][name] * 1e6:.2f}" for name in names)
            lines.append(f"| {result['n']} x {result['k']} | {result['count']} | {floor * 1e6:.2f} | {cells} |")
        total = {name: sum(result["s"][name] * result["count"] for result in rows) * 1e3 for name in names}
        floor = sum(result["bytes"] * result["count"] for result in rows) / ceiling * 1e3
        calls = sum(result["count"] for result in rows)
        lines.append(f"| step, ms | {calls} | {floor:.3f} | {' | '.join(f'{total[name]:.3f}' for name in names)} |")
        lines.append("")
    return lines


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    found = argparse.ArgumentParser(
        prog="python -m pq2.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--shape", choices=list(shapes.SHAPES), default="hybrid-27b", help="default: hybrid-27b")
    found.add_argument("--rows", type=int, nargs="+", default=[1], metavar="M", help="rows of activations (default: 1)")
    found.add_argument(
        "--tune", action="store_true", help="find launch configurations of `single`, and print the table"
    )
    found.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    return found


def main() -> int:
    """The command."""
    arguments = parser().parse_args()
    if not torch.cuda.is_available():
        print("pq2.bench: needs a CUDA device: nothing is measured on a CPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    arch = dispatch.arch_of(torch.device("cuda", 0))
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "arch": arch}
    if arguments.tune:
        found["single"] = tune()
        print(json.dumps(found["single"], indent=2))
    else:
        ceiling = bandwidth()
        step = projections(arguments.shape)
        results = [measure(one, m, arch) for m in arguments.rows for one in step if one.converted]
        few = [m for m in arguments.rows if m <= small_gemm.MAX_M]
        small = [measure_small(one, m) for m in few for one in step if not one.converted]
        found |= {"shape": arguments.shape, "bytes_per_s": ceiling, "products": results, "small": small}
        print(f"{found['device']}, memory {ceiling / 1e12:.2f} TB/s\n")
        print("\n".join(table_lines(results, ceiling)))
        for result in small:
            told = ", ".join(f"{name} {seconds * 1e6:.2f}" for name, seconds in result["s"].items())
            print(f"{result['n']} x {result['k']}, bf16, M = {result['m']}: {told} us")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
