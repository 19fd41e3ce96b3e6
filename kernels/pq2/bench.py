"""`python -m pq2.bench`: what a product takes, shape by shape and for a whole step, with weights that no cache holds.

    python -m pq2.bench                         the projections of a 27B decode step, a few rows and many
    python -m pq2.bench --shape qwen3-8b        those of another shape of `pq2.generate`
    python -m pq2.bench --rows 1 16 2048        other numbers of rows
    python -m pq2.bench --json FILE --plot FILE   everything measured, as JSON; a roofline, as SVG
    python -m pq2.bench --peers humming-w2a8      of the kernels of others (`peers.py`) these alone; or none

Implementations are `pq2`, the tuned set, or what the switches in the environment make of it; `pq2-legacy`, the older
kernels; `cublas-bf16`; and the peers that are installed. All are timed in one run, in CUDA graphs (`timing.py`), on
activations that are quantised already; `NAME+quantise` is NAME with quantising. A step is one graph of all its products,
in turn; who lacks a product has no step. No path is timed that does not agree with its float64 reference. What is measured
is in FILE after every number of rows.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pq2 import ahead, dispatch, launches, plans, reference, shapes, small_gemm, switches, timing
from pq2 import format as pq2_format
from pq2 import legacy as legacy_path
from pq2 import peers as others
from pq2.activations import quantize_rows
from pq2.errors import PathUnavailable, SwitchError, WrongResult
from pq2.generate import byte_tokenizer
from pq2.peers import Peers
from pq2.quantize import quantize
from pq2.shapes import Projection
from pq2.timing import Call

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048)
FEW = 16
"""Rows up to here are decoding: a step's time is told; beyond it is the arithmetic."""
LAUNCHES = 300
LONG = 512
"""From so many rows on, graphs are short and replayed less often: a product is long enough."""
LONG_REPLAYS = 5
NONE = "-"
"""In a table: not measured."""
OURS = ("pq2", "pq2-legacy", "pq2+quantise")


def projections(shape: str) -> list[Projection]:
    """What a decode step of a model multiplies by."""
    config = shapes.make_config(shape, byte_tokenizer())
    return shapes.projections(shapes.matrices(shapes.meta_model(config)))


def in_turn(step: Sequence[Projection]) -> list[int]:
    """The order of a step: indices of projections, each as often as a step has it, spread evenly."""
    places = [((i + 0.5) / one.count, number) for number, one in enumerate(step) for i in range(one.count)]
    return [number for _, number in sorted(places)]


def multiplied(step: Sequence[Projection], m: int) -> list[Projection]:
    """What m rows are multiplied by: a prompt's head multiplies its last row alone."""
    return [one for one in step if m <= FEW or one.count > 1]


def products_of(step: Sequence[Projection], rows: Sequence[int]) -> list[ahead.Product]:
    """N, K and the number of rows of everything that is measured."""
    return [(one.n, one.k, m) for m in rows for one in multiplied(step, m)]


class Product:
    """A projection's weights and activations, and the calls that multiply them."""

    def __init__(self, projection: Projection, m: int, arch: str, peers: Peers) -> None:
        self.n, self.k, self.m, self.count = projection.n, projection.k, m, projection.count
        self.bytes = self.n * pq2_format.block_rows(self.k)
        self.weights = timing.weights(self.n, self.k)
        self.dense = [
            torch.randn(self.n, self.k, dtype=torch.bfloat16, device="cuda")
            for _ in range(timing.copies_of(self.n * self.k * 2))
        ]
        self.x = torch.randn(m, self.k, dtype=torch.bfloat16, device="cuda")
        self.out = torch.empty(m, self.n, dtype=torch.bfloat16, device="cuda")
        self.entry = dispatch.entry_for(switches.resolved("cuda"), arch, m, self.n, self.k)
        self.planes = quantize_rows(self.x)
        self.quantized = dispatch.quantized_for(self.entry, self.x) if self.entry else self.planes
        self.own_errors = self.errors()
        self.peers = peers.products(self.weights, self.x)

    def _legacy(self, copy: int) -> None:
        weight = self.weights[copy]
        if self.m == 1:
            legacy_path.legacy_single(self.planes, weight, self.out, *dispatch.LEGACY_LAUNCH)
        else:
            legacy_path.legacy(self.planes, weight, self.out, *dispatch.legacy_tile(self.m))

    def _tuned(self, copy: int) -> None:
        if self.entry is None:
            self._legacy(copy)
        else:
            dispatch.multiply(self.entry, self.quantized, self.m, self.weights[copy], self.out)

    def _whole(self, copy: int) -> None:
        if self.entry is None:
            quantize_rows(self.x)
            self._legacy(copy)
        else:
            dispatch.run(self.entry, self.x, self.weights[copy], self.out)

    def calls(self) -> dict[str, tuple[Call, int]]:
        """Name -> a call on a copy, and the number of copies."""
        copies = len(self.weights)
        return {
            "pq2": (self._tuned, copies),
            "pq2-legacy": (self._legacy, copies),
            "pq2+quantise": (self._whole, copies),
            "cublas-bf16": (lambda copy: torch.nn.functional.linear(self.x, self.dense[copy]), len(self.dense)),
        } | {name: (peer.call, peer.copies) for name, peer in self.peers.items()}

    def errors(self) -> dict[str, float]:
        """The relative error of ours, and of cuBLAS against its own operands."""
        last = len(self.weights) - 1
        product = timing.wanted(quantize(self.x), self.weights[last])
        found = {}
        for name, call in (("pq2", self._tuned), ("pq2-legacy", self._legacy), ("pq2+quantise", self._whole)):
            label = f"{name} {self.n}x{self.k} M={self.m}"
            found[name] = timing.relative_error(label, functools.partial(call, last), self.out, product)
        rows = slice(0, timing.REFERENCE_ROWS)
        dense = self.x.double() @ self.dense[0][rows].double().T
        got = torch.nn.functional.linear(self.x, self.dense[0])[:, rows]
        found["cublas-bf16"] = float((got.double() - dense).norm() / dense.norm())
        return found

    def measure(self) -> list[dict[str, Any]]:
        """A row of the results for each implementation."""
        least, replays = (timing.CALLS, timing.REPLAYS) if self.m < LONG else (4, LONG_REPLAYS)
        times = timing.medians(timing.graph_times(self.calls(), replays, least))
        rows = []
        for name, seconds in times.items():
            nbytes, error, against = self._facts(name)
            rows.append({
                "impl": name, "n": self.n, "k": self.k, "m": self.m, "us": seconds * 1e6,
                "tb_s": nbytes / seconds / 1e12, "rel_err": error, "against": against, "path": self._path(name),
            })  # fmt: skip
        return rows

    def _facts(self, name: str) -> tuple[int, float, str]:
        """Bytes of the weight, the relative error, and the activations of the product it is compared with."""
        if name in self.peers:
            peer = self.peers[name]
            return peer.nbytes, peer.rel_err, peer.against
        if name in OURS:
            return self.bytes, self.own_errors[name], "quantised per 128"
        return 2 * self.n * self.k, self.own_errors[name], "bf16"

    def _path(self, name: str) -> str | None:
        if name not in ("pq2", "pq2+quantise"):
            return None
        return "legacy" if self.entry is None else f"{self.entry.path}{tuple(self.entry.launch)}"


def step_times(products: Sequence[Product], step: Sequence[Projection]) -> dict[str, float]:
    """Seconds of a whole step, one graph an implementation that has all products: each as often as the step has it."""
    order = in_turn(step)
    calls = [product.calls() for product in products]
    names = [name for name in calls[0] if all(name in has for has in calls)]

    def whole(name: str) -> Call:
        def run(_: int) -> None:
            used = [0] * len(calls)
            for number in order:
                call, copies = calls[number][name]
                call(used[number] % copies)
                used[number] += 1

        return run

    replays = timing.REPLAYS if products[0].m < LONG else LONG_REPLAYS
    return timing.medians(timing.graph_times({name: (whole(name), 1) for name in names}, replays, least=1))


def launch_times(product: Product) -> dict[str, float]:
    """Seconds of the CPU that a call takes, without a graph: the median of many, the GPU never far behind.

    `NAME, by Triton` is NAME without launch plans (`plans.py`).
    """
    calls = product.calls()
    found = {name: _launch_time(*call) for name, call in calls.items()}
    with plans.without():
        for name in ("pq2", "pq2+quantise"):
            found[f"{name}, by Triton"] = _launch_time(*calls[name])
    return found


def _launch_time(call: Call, copies: int) -> float:
    taken = []
    for number in range(LAUNCHES):
        begin = time.perf_counter()
        call(number % copies)
        taken.append(time.perf_counter() - begin)
        if number % 20 == 19:
            torch.cuda.synchronize()
    return statistics.median(taken)


def measure_small(projection: Projection, m: int) -> dict[str, Any]:
    """Times of a small unquantised projection: split-K in several pieces, and vLLM's own product; microseconds."""
    n, k = projection.n, projection.k
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    weights = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") for _ in range(timing.MOST_COPIES)]
    arrived = small_gemm.counters(n, x.device)
    got = small_gemm.small_gemm(x, weights[0], arrived, None, small_gemm.PIECES)
    wanted = reference.small_gemm(x, weights[0])
    error = float((got.double() - wanted).norm() / wanted.norm())

    def call_of(pieces: int) -> Call:
        return lambda copy: small_gemm.small_gemm(x, weights[copy], arrived, None, pieces)

    calls = {f"small_gemm {pieces}": (call_of(pieces), timing.MOST_COPIES) for pieces in (5, 10, 20, 40)}
    calls["cublas-bf16"] = (lambda copy: torch.nn.functional.linear(x, weights[copy]), timing.MOST_COPIES)
    times = timing.medians(timing.graph_times(calls))
    return {
        "n": n, "k": k, "count": projection.count, "m": m, "rel_err": error,
        "us": {name: seconds * 1e6 for name, seconds in times.items()},
    }  # fmt: skip


def measure(
    shape: str, rows: Sequence[int], arch: str, peers: Peers, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Everything, for the projections of a shape and some numbers of rows; saved after each of them."""
    ceiling = timing.bandwidth()
    everything = projections(shape)
    step = [one for one in everything if one.converted]
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "arch": arch, "shape": shape,
        "switches": switches.resolved("cuda").key, "table": launches.table(arch)[0], "copy_tb_s": ceiling / 1e12,
        "floor_ms": sum(one.count * one.n * pq2_format.block_rows(one.k) for one in step) / ceiling * 1e3,
        "counts": {f"{one.n}x{one.k}": one.count for one in step},
        "peers": peers.versions, "peers_left_out": peers.left_out,
        "rows": [], "step_ms": {}, "prefill_tflops": {}, "launch_us": {}, "small": [],
    }  # fmt: skip
    peers.begin()
    ahead.compile_all(peers.here, products_of(step, rows))
    try:
        for m in rows:
            here = multiplied(step, m)
            products = [Product(one, m, arch, peers) for one in here]
            for product in products:
                found["rows"] += product.measure()
            for name, seconds in step_times(products, here).items():
                if m <= FEW:
                    found["step_ms"].setdefault(name, {})[str(m)] = seconds * 1e3
                else:
                    operations = sum(2 * m * one.n * one.k * one.count for one in here)
                    found["prefill_tflops"].setdefault(name, {})[str(m)] = operations / seconds / 1e12
            for name, seconds in launch_times(products[0]).items():
                found["launch_us"].setdefault(name, {})[str(m)] = seconds * 1e6
            print(f"M={m} done", file=sys.stderr, flush=True)
            del products
            save(found)
        found["small"] = [
            measure_small(one, m) for m in rows if m <= small_gemm.MAX_M for one in everything if not one.converted
        ]
    finally:  # a fault of the GPU ends it, but takes nothing back
        save(found)
    return found


def table_lines(found: dict[str, Any]) -> list[str]:
    """The results as Markdown."""
    lines = [
        f"{found['gpu']}, copy {found['copy_tb_s']:.2f} TB/s; a step's weights at that rate: {found['floor_ms']:.2f} ms"
    ]
    names = list(dict.fromkeys(row["impl"] for row in found["rows"]))
    parts = [("step, ms", "step_ms", ".3f"), ("prefill, TFLOP/s", "prefill_tflops", ".0f")]
    for title, key, form in (*parts, ("CPU of a call, us", "launch_us", ".1f")):
        by_name = found[key]
        if by_name:
            columns = list(dict.fromkeys(m for by_m in by_name.values() for m in by_m))
            lines += ["", f"| {title} | {' | '.join(f'M={m}' for m in columns)} |", "|" + "---|" * (len(columns) + 1)]
            for name, by_m in by_name.items():
                cells = [format(by_m[m], form) if m in by_m else NONE for m in columns]
                lines.append(f"| {name} | {' | '.join(cells)} |")
    for m in dict.fromkeys(row["m"] for row in found["rows"]):
        lines += ["", f"| M={m}, us | a step has | floor | {' | '.join(names)} |", "|" + "---|" * (len(names) + 3)]
        for weight, count in found["counts"].items():
            here = {r["impl"]: r for r in found["rows"] if r["m"] == m and f"{r['n']}x{r['k']}" == weight}
            if here:
                floor = here["pq2"]["us"] * here["pq2"]["tb_s"] / found["copy_tb_s"]
                cells = [f"{here[name]['us']:.2f}" if name in here else NONE for name in names]
                lines.append(f"| {weight} | {count} | {floor:.2f} | {' | '.join(cells)} |")
    for small in found["small"]:
        told = ", ".join(f"{name} {us:.2f}" for name, us in small["us"].items())
        lines += ["", f"{small['n']}x{small['k']}, bf16, M={small['m']}: {told} us"]
    for name, reason in found.get("peers_left_out", {}).items():
        lines += ["", f"{name} is left out: {reason}"]
    return lines


PLOTTED = (1, 16)
"""Numbers of rows that have a roofline."""
DRAWN = {
    "pq2": ("o-", "C0"), "pq2-legacy": ("o:", "C0"), "humming-w2a8": ("s-", "C1"), "humming-w2a8-g128": ("D:", "C1"),
    "humming-w2a16": ("^-", "C2"), "gemlite-a16w2": ("v-", "C3"),
}  # fmt: skip
"""Marker, line and colour of each."""


def plot(found: dict[str, Any], path: Path) -> None:
    """The roofline: bytes a second of a product's weight over the bytes it has, a panel for each of a few rows."""
    from matplotlib import figure

    measured = {row["m"] for row in found["rows"]}
    panels = [m for m in PLOTTED if m in measured] or [min(measured)]
    drawn = figure.Figure(figsize=(2 + 4.5 * len(panels), 4.5), layout="constrained")
    for m, axes in zip(panels, drawn.subplots(1, len(panels), sharey=True, squeeze=False)[0], strict=True):
        for name, (style, colour) in DRAWN.items():
            rows = sorted(
                (row["us"] * row["tb_s"], row["tb_s"]) for row in found["rows"] if (row["impl"], row["m"]) == (name, m)
            )
            if rows:
                axes.plot(*zip(*rows, strict=True), style, color=colour, label=name, linewidth=1, markersize=4)
        axes.axhline(found["copy_tb_s"], color="grey", linestyle="--", label="copy")
        axes.set(xscale="log", xlabel="MB of weight", title=f"M={m}")
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    drawn.axes[0].set_ylabel("TB/s")
    drawn.suptitle(f"{found['gpu']}: a product alone")
    drawn.legend(*_labels(drawn.axes), loc="outside right upper", fontsize="small")
    drawn.savefig(path)


def _labels(panels: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """What a legend for all panels has: each label once."""
    by_label = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    return list(by_label.values()), list(by_label)


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    found = argparse.ArgumentParser(
        prog="python -m pq2.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--shape", choices=list(shapes.SHAPES), default="hybrid-27b", help="default: hybrid-27b")
    found.add_argument(
        "--rows", type=int, nargs="+", default=list(ROWS), metavar="M", help=f"default: {' '.join(map(str, ROWS))}"
    )
    found.add_argument(
        "--peers", nargs="+", default=["all"], choices=[*others.NAMES, "all", "none"], metavar="NAME",
        help=f"of {', '.join(others.NAMES)}; all (default): those that are installed; none",
    )  # fmt: skip
    found.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    found.add_argument("--plot", type=Path, metavar="FILE", help="draw the roofline there (needs matplotlib)")
    return found


def asked(names: Sequence[str]) -> Peers:
    """The peers that the command asks for.

    Raises:
        PathUnavailable: One that is asked for by its name is not installed.
    """
    if names == ["all"]:
        return Peers()
    found = Peers([peer for peer in others.ALL if peer.name in names])
    if found.left_out:
        raise PathUnavailable("; ".join(f"{name}: {reason}" for name, reason in found.left_out.items()))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    command = parser()
    given = command.parse_args(arguments)
    if len(given.peers) > 1 and {"all", "none"} & set(given.peers):
        command.error("--peers takes names, or all, or none")
    if not torch.cuda.is_available():
        return refuse("needs a CUDA device: nothing is measured on a CPU")
    if given.plot and importlib.util.find_spec("matplotlib") is None:
        return refuse("--plot needs matplotlib: install it here, or leave the option out")
    try:
        if switches.resolved("cuda").kernel_set == "reference":
            return refuse(f"{switches.KERNELS}=reference runs no kernels, so there is nothing to measure")
        peers = asked(given.peers)
    except (PathUnavailable, SwitchError) as error:
        return refuse(str(error))

    def save(found: dict[str, Any]) -> None:
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    torch.manual_seed(0)
    try:
        found = measure(given.shape, given.rows, dispatch.arch_of(torch.device("cuda", 0)), peers, save)
    except WrongResult as wrong:
        return refuse(str(wrong), status=1)
    print("\n".join(table_lines(found)))
    if given.plot:
        plot(found, given.plot)
    return 0


def refuse(why: str, status: int = 2) -> int:
    """Say on standard error why nothing is measured: the exit status."""
    print(f"pq2.bench: {why}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
