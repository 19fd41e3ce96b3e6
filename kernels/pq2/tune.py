"""`python -m pq2.tune`: finds the entries of a launch table (`launches.py`) on this GPU.

    python -m pq2.tune --out kernels/pq2/tables/sm_90.json      every weight of the tuned shapes
    python -m pq2.tune --weights 5120x17408 --rows 8 16         some of them; others keep the entries they have
    python -m pq2.tune --rows 32 any                            rows of prefill; `any` is tuned with 2,048

Candidates are what the notes have found to matter (`NOTES.md`): how many bytes are on their way on a multiprocessor,
how many programs it holds, how many warps share a row. Each must agree with the float64 reference before it is timed.
What is timed is the product with the quantising before it, as a server runs them: an entry that leaves the next kernel
no room to begin loses by it. The best two are timed again, in turn, and the better one is taken.

Then, for decoding, in a whole step, where all weights of a model were tuned: what is best among copies of itself is not
always best between products of other shapes. A weight's best entries, and the best of those that leave half of the shared
memory to the next kernel, take its place in turn.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from pq2 import dispatch, launches, prefill_wgmma, quantize, timing
from pq2 import format as pq2_format
from pq2.bench import in_turn, projections
from pq2.errors import WrongResult
from pq2.launches import Direct, Entry, Prefill, PrefillWgmma, Ring, Single, SingleRing
from pq2.shapes import Projection

TUNED_SHAPES = ("hybrid-27b", "hybrid-8b", "qwen3-8b")
"""Whose projections the tables have."""
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, launches.ANY)
"""Numbers of rows that have entries."""
MANY = 2048
"""Rows that `any` is tuned with."""
FEW = 16
"""Rows up to here are decoding; more are what the kernels of prefill are for."""
SHARED = 227 * 1024
"""Bytes of shared memory on a multiprocessor."""
QUANTISES = 2 * 32 * 48
"""Registers of two programs that quantise few rows."""
AGAIN = 2
"""How many of the best are timed again."""
PASSES = 2
"""How often each weight's entry of a step is chosen anew."""


def candidates(arch: str, m: int, n: int, k: int, default: list[Entry], multiprocessors: int) -> list[Entry]:
    """Entries to try for m rows times a weight [n, k] on a GPU; the default of the table among them."""
    found = list(default)
    if m == 1:
        found += _singles()
    if k % 1024 == 0 and m <= FEW:
        found += _single_rings(k) if m == 1 else _rings(8 if m <= 8 else 16, k)
    if m > FEW:
        found += _prefills(m)
        if arch == "sm_90" and k % 256 == 0:
            found += _wgmmas(m, n, k, multiprocessors)
    return list(dict.fromkeys(found))


def _singles() -> Iterator[Entry]:
    for block_n in (4, 8, 16):
        for block_g in (8, 16, 32):
            for warps in (1, 2):
                if block_n * block_g * 8 // (warps * 32 * 4) in (4, 8):  # loads of 16 bytes a thread
                    yield Entry("single", Single(block_n, block_g, warps))


def _single_rings(k: int) -> Iterator[Entry]:
    halves = k // 64
    for lanes, warps_n, warps_k in ((16, 1, 1), (16, 2, 1), (16, 4, 1), (16, 1, 2), (32, 1, 1), (32, 1, 2)):
        blocks = -(-halves // (lanes * warps_k))
        if blocks * lanes * warps_k > 1.21 * halves or blocks > 9:  # lanes without work; registers
            continue
        for rows in (32 // lanes * warps_n, 64 // lanes * warps_n):
            tile = rows * k * 17 // 64
            for stages in (3, 4, 6):
                for warps in (6, 8, 12):
                    per_sm = warps // (warps_n * warps_k)
                    if per_sm and tile * (stages - 1) * per_sm > 40_000 and tile * stages * per_sm < 200_000:
                        yield Entry("single_ring", SingleRing(rows, lanes, warps_n, warps_k, stages, per_sm))


def _rings(tokens: int, k: int) -> Iterator[Entry]:
    groups = k // 128
    for warps_k, split, keep, per_sm in itertools.product((4, 8), (1, 2, 3), (1, 2), (2, 3, 4)):
        steps = -(-groups // (warps_k * split))
        needed = steps * (12 if keep == 1 else 8) * (tokens // 8) + 44
        threads = 32 * warps_k * per_sm
        # With fewer registers a thread there is room for a program that quantises.
        limits = [(registers // threads // 8 * 8) for registers in (65536 - QUANTISES, 65536)]
        limit = next((limit for limit in limits if 0.6 * limit < needed <= limit + 16), None)
        if limit is None or steps * warps_k * split > 1.1 * groups:
            continue
        limit = limit if limit < 255 else 0
        for block_n, sg, stages in itertools.product((16, 32), (2, 3, 4, 6), (3, 4, 6)):
            chunks = -(-steps // sg)
            flying = per_sm * (stages - 1) * block_n * sg * warps_k * 34
            if chunks * sg <= 1.25 * steps and 36_000 < flying < 104_000:
                yield Entry("ring", Ring(block_n, warps_k, 1, sg, stages, keep, split, limit, per_sm))


def _prefills(m: int) -> Iterator[Entry]:
    for block_m, block_n, warps_m, warps_n in ((32, 128, 1, 4), (64, 128, 2, 4), (128, 128, 2, 4), (64, 256, 2, 4)):
        if block_m <= max(2 * m, 32):
            yield Entry("prefill", Prefill(block_m, block_n, warps_m, warps_n, 3, 16))


def _wgmmas(m: int, n: int, k: int, multiprocessors: int) -> Iterator[Entry]:
    for block_m, consumers, per_sm in (
        (32, 4, 1), (32, 2, 2), (32, 3, 2), (32, 1, 3), (32, 1, 4), (64, 4, 1), (64, 2, 2), (64, 1, 3), (64, 3, 1),
        (128, 2, 1), (128, 3, 1),
    ):  # fmt: skip
        wide = m > 128 and block_m >= 64
        if not wide and not m / 4 <= block_m < max(2 * m, 32):
            continue
        _, registers, _ = prefill_wgmma.registers(consumers, per_sm)
        # Two groups a stage where dots and sums, weights and addresses fit: always faster than one.
        sg = 2 if 3 * block_m // 2 + 48 <= registers else 1
        stage = sg * (block_m * 132 + consumers * 2048)
        stages = min(16, (SHARED // per_sm - consumers * block_m * 128 - 4096 * sg - 2048) // stage)
        tiles = -(-m // block_m) * -(-n // (64 * consumers))
        for split in (1, 2, 3, 4, 6) if m <= 256 else (1,):
            # Parts are as many as programs fit at once, about; and longer than the ring, or its programs only wait.
            crowded = split > 1 and tiles * split > 2 * per_sm * multiprocessors
            if stages >= 2 and not crowded and (split == 1 or k // 128 // split >= 6):
                yield Entry("prefill_wgmma", PrefillWgmma(block_m, consumers, stages, sg, split, 16, per_sm))


def _kernel(entry: Entry, m: int, k: int) -> tuple[object, ...]:
    """What an entry compiles for m rows and a K: prefill's kernels do not depend on them, nor on how many parts K has."""
    launch = entry.launch
    if isinstance(launch, PrefillWgmma):
        return (entry.path, launch._replace(split=min(launch.split, 2)))
    if isinstance(launch, Prefill):
        return (entry.path, launch)
    return (entry, m, k)


def _compile(job: tuple[Entry, int, int]) -> str | None:
    """In a process of its own: run an entry once, which leaves its kernel in the cache. What went wrong, or None."""
    entry, m, k = job
    try:
        weight = pq2_format.view(torch.zeros(64 * (k // 4 + k // 64), dtype=torch.uint8, device="cuda"), 64, k)
        x = torch.zeros(m, k, dtype=torch.bfloat16, device="cuda")
        dispatch.run(entry, x, weight, torch.empty(m, 64, dtype=torch.bfloat16, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{entry}: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    return None


def best(n: int, k: int, m: int, entries: list[Entry]) -> tuple[Entry, dict[Entry, float]]:
    """The fastest of some entries for m rows times a weight, and the time of each, seconds."""
    copies = timing.weights(n, k)
    x = torch.randn(m, k, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    product = timing.wanted(quantize.quantize(x), copies[-1])
    calls: dict[str, tuple[timing.Call, int]] = {}
    for entry in entries:

        def call(copy: int, entry: Entry = entry) -> None:
            dispatch.run(entry, x, copies[copy], out)

        try:
            timing.relative_error(str(entry), functools.partial(call, len(copies) - 1), out, product)
        except WrongResult as wrong:  # it is told, and others may be right
            print(f"pq2.tune: {wrong}", flush=True)
            continue
        calls[str(entry)] = (call, len(copies))
    if not calls:
        raise WrongResult(f"no entry for M={m} {n}x{k} is right")
    named = {str(entry): entry for entry in entries}
    times = timing.medians(timing.graph_times(calls, replays=3, least=timing.CALLS // 2))
    ranking = sorted(times, key=times.__getitem__)[:AGAIN]
    again = timing.medians(timing.graph_times({name: calls[name] for name in ranking}, replays=25))
    return named[min(again, key=again.__getitem__)], {named[name]: time for name, time in (times | again).items()}


def held(entry: Entry, k: int) -> int:
    """Bytes of shared memory that the rings of an entry take on a multiprocessor, about."""
    launch = entry.launch
    if isinstance(launch, SingleRing):
        return launch.rows * k * 17 // 64 * launch.stages * launch.per_sm
    if isinstance(launch, Ring):
        return launch.stages * launch.block_n * launch.sg * launch.warps_k * 34 * launch.per_sm
    return 0


def alternatives(ranking: Sequence[Entry], k: int) -> list[Entry]:
    """What to try in a step, of entries from the fastest on."""
    light = [entry for entry in ranking if held(entry, k) <= SHARED // 2]
    return list(dict.fromkeys([*ranking[:6], *light[:3]]))


class Step:
    """The products of a decode step, each with the quantising before it."""

    def __init__(self, ternary: Sequence[Projection], m: int) -> None:
        self.order = in_turn(ternary)
        self.weights = [timing.weights(one.n, one.k) for one in ternary]
        self.x = [torch.randn(m, one.k, dtype=torch.bfloat16, device="cuda") for one in ternary]
        self.out = [torch.empty(m, one.n, dtype=torch.bfloat16, device="cuda") for one in ternary]

    def by(self, entries: Sequence[Entry]) -> timing.Call:
        """The whole step, by an entry for each weight."""

        def run(_: int) -> None:
            used = [0] * len(entries)
            for number in self.order:
                copies = self.weights[number]
                dispatch.run(entries[number], self.x[number], copies[used[number] % len(copies)], self.out[number])
                used[number] += 1

        return run


def in_step(step: Step, entries: Sequence[Entry], tried: Sequence[list[Entry]]) -> tuple[list[Entry], float, float]:
    """Better entries for a step, and its seconds with those given and with those found: one weight's at a time."""
    found = list(entries)
    before = after = 0.0
    for _ in range(PASSES):
        for number, options in enumerate(tried):
            others = {str(entry): entry for entry in [found[number], *options]}
            calls = {name: (step.by([*found[:number], one, *found[number + 1 :]]), 1) for name, one in others.items()}
            times = timing.medians(timing.graph_times(calls, replays=9, least=1))
            before = before or times[str(found[number])]
            name = min(times, key=times.__getitem__)
            found[number], after = others[name], times[name]
    return found, before, after


def weight(text: str) -> tuple[int, int]:
    """`NxK`, as the command takes it."""
    n, _, k = text.partition("x")
    if not (n.isdecimal() and k.isdecimal() and int(n) > 0 and int(k) > 0 and int(k) % pq2_format.GROUP == 0):
        raise argparse.ArgumentTypeError(f"{text!r}: a weight is NxK, such as 5120x6144, K a multiple of 128")
    return int(n), int(k)


def rows(text: str) -> int:
    """A number of rows that tables have, as the command takes it."""
    named = {launches.rows_name(m): m for m in ROWS}
    if text not in named:
        raise argparse.ArgumentTypeError(f"{text!r}: tables have entries for {', '.join(named)} rows")
    return named[text]


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    found = argparse.ArgumentParser(
        prog="python -m pq2.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--weights", type=weight, nargs="+", metavar="NxK", help="default: those of the tuned shapes")
    found.add_argument("--rows", type=rows, nargs="+", default=list(ROWS), metavar="M", help="default: all")
    found.add_argument("--out", type=Path, metavar="FILE", help="where to write the table; default: print it")
    return found


def main() -> int:
    """The command."""
    arguments = parser().parse_args()
    if not torch.cuda.is_available():
        print("pq2.tune: needs a CUDA device: nothing is measured on a CPU", file=sys.stderr)
        return 2
    arch = dispatch.arch_of(torch.device("cuda", 0))
    multiprocessors = dispatch.multiprocessors(torch.device("cuda", 0))
    _, table = launches.table(arch)
    tuned = table["tuned"]
    wanted = {
        (key, n, k): candidates(arch, min(key, MANY), n, k, _default(tuned, key), multiprocessors)
        for key in arguments.rows
        for n, k in arguments.weights or _weights(key)
    }
    jobs = {
        _kernel(entry, min(key, MANY), k): (entry, min(key, MANY), k)
        for (key, _, k), entries in wanted.items()
        for entry in entries
    }
    workers = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = zip(jobs, pool.map(_compile, jobs.values()), strict=True)
        failed = {kernel: error for kernel, error in results if error}
    print(f"{len(jobs)} kernels, {len(failed)} of them do not run here", flush=True)
    for error in list(failed.values())[:5]:
        print(f"  {error}")

    def keep(key: int, n: int, k: int, chosen: Entry) -> None:
        tuned.setdefault(key, {"default": [chosen]})[f"{n}x{k}"] = [chosen]
        if arguments.out:  # what was found is not lost to a later failure
            arguments.out.write_text(write(table), encoding="utf-8")

    rankings: dict[tuple[int, int, int], list[Entry]] = {}
    for (key, n, k), entries in wanted.items():
        m = min(key, MANY)
        chosen, times = best(n, k, m, [entry for entry in entries if _kernel(entry, m, k) not in failed])
        ranking = rankings[key, n, k] = sorted(times, key=times.__getitem__)
        told = ", ".join(f"{entry.path}{tuple(entry.launch)} {times[entry] * 1e6:.2f}" for entry in ranking[:3])
        print(f"M={m} {n}x{k}: {told} us; slowest {times[ranking[-1]] * 1e6:.2f}", flush=True)
        keep(key, n, k, chosen)
    for key in filter(lambda key: key <= FEW, arguments.rows):
        for shape in TUNED_SHAPES:
            ternary = [one for one in projections(shape) if one.converted]
            if all((key, one.n, one.k) in rankings for one in ternary):
                alone = [tuned[key][f"{one.n}x{one.k}"][0] for one in ternary]
                tried = [alternatives(rankings[key, one.n, one.k], one.k) for one in ternary]
                found, before, after = in_step(Step(ternary, key), alone, tried)
                print(
                    f"M={key} a step of {shape}: {before * 1e3:.3f} ms, {after * 1e3:.3f} ms by these entries",
                    flush=True,
                )
                for one, entry in zip(ternary, found, strict=True):
                    print(f"  {one.n}x{one.k}: {entry.path}{tuple(entry.launch)}")
                    keep(key, one.n, one.k, entry)
    if not arguments.out:
        print(write(table))
    return 0


def _weights(rows: int) -> list[tuple[int, int]]:
    """The weights of the tuned shapes; of prefill without heads, which a prompt's last row alone is multiplied by."""
    ternary = [one for shape in TUNED_SHAPES for one in projections(shape) if one.converted]
    return list(dict.fromkeys((one.n, one.k) for one in ternary if rows <= FEW or one.count > 1))


def _default(tuned: dict[int, launches.Weights], key: int) -> list[Entry]:
    return [entry for entry in tuned.get(key, {"default": []})["default"] if isinstance(entry.launch, Single | Direct)]


def write(table: launches.Table) -> str:
    """A table as its file: an entry a line."""
    lines = ["{"]
    for kernel_set, by_rows in table.items():
        lines.append(f' "{kernel_set}": {{')
        for key, weights in sorted(by_rows.items()):
            lines.append(f'  "{launches.rows_name(key)}": {{')
            for weight, entries in weights.items():
                found = json.dumps([launches.write_entry(entry) for entry in entries])
                lines.append(f'   "{weight}": {found},')
            lines[-1] = lines[-1].removesuffix(",")
            lines.append("  },")
        lines[-1] = "  }"
        lines.append(" },")
    lines[-1] = " }"
    return "\n".join([*lines, "}"]) + "\n"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WrongResult as wrong:
        sys.exit(f"pq2.tune: {wrong}")
