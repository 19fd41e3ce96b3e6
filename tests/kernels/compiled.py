"""Compiles every kernel ahead of time, without a GPU, and prints what came out as one JSON object: run as a program.

The interpreter's switch is read when Triton's functions are defined, so a process that interprets cannot compile: tests run
this file as a process of its own.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from pq2 import (
    activations,
    direct,
    dispatch,
    embedding,
    launches,
    legacy,
    prefill,
    prefill_wgmma,
    ring,
    single,
    single_ring,
    small_gemm,
)

LAUNCH = dispatch.LEGACY_LAUNCH
ONE_ROW = {"BLOCK_N": LAUNCH.block_n, "BLOCK_G": LAUNCH.block_g, "G": 40}


TYPES = {
    "single_ring": "q_ptr=*i32 xs_ptr=*fp32 sums_ptr=*i32 codes_ptr=*i32 d_ptr=*fp16 out_ptr=*bf16 N=i32",
    "direct": "q_ptr=*i8 meta_ptr=*i32 codes_ptr=*u8 d_ptr=*fp16 out_ptr=*bf16 M=i32 N=i32",
    "ring": "q_ptr=*i8 meta_ptr=*i32 codes_ptr=*u8 d_ptr=*fp16 out_ptr=*bf16 M=i32 N=i32",
    "prefill": "q_ptr=*i8 xs_ptr=*fp32 codes_ptr=*u8 d_ptr=*fp16 out_ptr=*bf16 M=i32 N=i32 G=i32 stride_xs=i32 band=i32",
    "prefill_wgmma": "q_desc=i8[{BLOCK_M},128] xs_desc=fp32[1,{SCALES}] codes_ptr=*u8 d_ptr=*fp16 out_ptr=*bf16 "
    "M=i32 N=i32 G=i32 split=i32 band=i32",
    "combine": "parts_ptr=*fp32 out_ptr=*bf16 size=i32",
    "quantize": "x_ptr=*bf16 signs_ptr=*i8 q_ptr=*i8 scales_ptr=*fp32 sums_ptr=*i32 stride_x=i32 K=i32",
    "embedding": "ids_ptr=*i64 codes_ptr=*u8 d_ptr=*fp16 signs_ptr=*i8 out_ptr=*bf16 N=i32 K=i32",
    "single": "q_ptr=*i32 xs_ptr=*fp32 sums_ptr=*i32 codes_ptr=*i32 d_ptr=*fp16 out_ptr=*bf16 N=i32",
    "legacy_single": "q_ptr=*i32 xs_ptr=*fp32 codes_ptr=*i32 d_ptr=*fp16 out_ptr=*bf16 N=i32",
    "legacy": "q_ptr=*i8 xs_ptr=*fp32 sums_ptr=*i32 codes_ptr=*u8 d_ptr=*fp16 out_ptr=*bf16 M=i32 N=i32 G=i32",
    "small_gemm": "x_ptr=*bf16 w_ptr=*bf16 bias_ptr=*bf16 out_ptr=*bf16 partial_ptr=*fp32 arrived_ptr=*i32 "
    "M=i32 N=i32 K=i32 stride_x=i32 PIECES=i32",
}
"""The arguments of each kernel, as its launcher passes them; of bulk copies, the elements and the shape of a block."""


def _kernels(arch):
    """Name, kernel, its key in `TYPES`, constants, warps, and registers at most where it says so."""
    pdl = arch >= 90
    quantize = activations.pq2_quantize_kernel
    for name, left, tokens, few in (
        ("", 0, 0, False), (" rotated", 32, 0, False), (" steps", 0, 0, False), (" few", 0, 0, True),
        (" fragments", 0, 16, True),
    ):  # fmt: skip
        constants = {"LEFT": left, "RIGHT": left, "TOKENS": tokens, "STEPS": name == " steps", "PDL": pdl}
        yield f"quantize{name}", quantize, "quantize", {"GROUPS": 2 if few else 8, **constants}, 1 if few else 4
    yield "legacy_single", legacy.pq2_legacy_single_kernel, "legacy_single", ONE_ROW, LAUNCH.num_warps
    for m in (16, 32, 64, 128):
        tile = dispatch.legacy_tile(m)
        constants = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
        yield f"legacy {m}", legacy.pq2_legacy_kernel, "legacy", constants, tile.num_warps
    lookup = embedding.pq2_embedding_kernel
    yield "embedding", lookup, "embedding", {"GROUPS": 8, "LEFT": 0, "RIGHT": 0}, 4
    yield "embedding rotated", lookup, "embedding", {"GROUPS": 8, "LEFT": 32, "RIGHT": 32}, 4
    blocks = {"BLOCK_M": 16, "BLOCK_N": small_gemm.BLOCK_N, "BLOCK_K": small_gemm.BLOCK_K}
    yield "small_gemm", small_gemm.pq2_small_gemm_kernel, "small_gemm", {**blocks, "STEPS": 1, "HAS_BIAS": False}, 4
    combine = {"SPLIT": 3, "BLOCK": ring.COMBINE, "PDL": pdl}
    yield "combine", ring.pq2_combine_kernel, "combine", combine, 4
    for entry, tokens, groups in [*EXTRA, *(EXTRA_90 if arch == 90 else []), *_entries(f"sm_{arch}")]:
        kernel, *rest = _launch(entry, tokens, groups, pdl)
        yield f"{entry.path} {tokens} {groups} {tuple(entry.launch)}", kernel, entry.path, *rest


EXTRA = [
    (launches.Entry("single_ring", launches.SingleRing(4, 16, 1, 1, 3, 8)), 1, 40),
    (launches.Entry("direct", launches.Direct(16, 4, 1, 2)), 16, 9),
    (launches.Entry("ring", launches.Ring(32, 4, 1, 2, 4, 1, 1, 0, 2)), 8, 40),
    (launches.Entry("ring", launches.Ring(32, 4, 2, 5, 2, 0, 1, 0, 1)), 16, 40),
    (launches.Entry("ring", launches.Ring(32, 4, 1, 2, 6, 1, 1, 232, 2)), 8, 40),
    (launches.Entry("prefill", launches.Prefill(64, 256, 2, 4, 3, 16)), 2048, 40),
]
"""What both architectures compile, whatever their tables have."""
EXTRA_90 = [(launches.Entry("prefill_wgmma", launches.PrefillWgmma(16, 4, 12, 1, 1, 16, 1)), 16, 40)]
"""What sm_90 alone does."""


def _entries(arch):
    """Every entry of an architecture's table: the entry, its tokens, groups of a row."""
    found = {}
    for by_rows in launches.table(arch)[1].values():
        for rows, weights in by_rows.items():
            for weight, entries in weights.items():
                groups = int(weight.partition("x")[2] or 5120) // 128
                found |= dict.fromkeys((entry, min(rows, 2048), groups) for entry in entries)
    alike = {(_compiled_as(entry), rows, groups): (entry, rows, groups) for entry, rows, groups in found}
    return [one for key, one in alike.items() if one not in EXTRA]


def _compiled_as(entry):
    """What an entry's kernel depends on: not on how many programs run at once, nor on the order of tiles."""
    launch = entry.launch
    if isinstance(launch, launches.PrefillWgmma):
        return (entry.path, *launch._replace(split=1, band=1))
    return (entry.path, *(launch if isinstance(launch, launches.Single | launches.Direct) else launch[:-1]))


def _launch(entry, tokens, groups, pdl):
    """The kernel of an entry, its constants, its warps, and registers where the entry decides on them."""
    launch = entry.launch
    if isinstance(launch, launches.Prefill):
        constants = {name.upper(): value for name, value in launch._asdict().items() if name != "band"}
        return prefill.pq2_prefill_kernel, constants, launch.warps_m * launch.warps_n
    if isinstance(launch, launches.PrefillWgmma):
        launched, consumer, copier = prefill_wgmma.registers(launch.consumers, launch.per_sm)
        constants = {"BLOCK_M": launch.block_m, "CONSUMERS": launch.consumers, "STAGES": launch.stages, "SG": launch.sg}
        constants |= {"REGISTERS": consumer, "COPY_REGISTERS": copier}
        return prefill_wgmma.pq2_prefill_wgmma_kernel, constants, 4, launched
    if isinstance(launch, launches.Single):
        constants = {"BLOCK_N": launch.block_n, "BLOCK_G": launch.block_g, "G": groups}
        return single.pq2_single_kernel, constants, launch.num_warps
    constants = {"G": groups, "PDL": pdl, "WARPS_K": launch.warps_k, "WARPS_N": launch.warps_n}
    warps = launch.warps_k * launch.warps_n
    if isinstance(launch, launches.SingleRing):
        constants |= {"ROWS": launch.rows, "LANES": launch.lanes, "STAGES": launch.stages}
        return single_ring.pq2_single_ring_kernel, constants, warps
    constants |= {"TOKENS": tokens, "BLOCK_N": launch.block_n, "SG": launch.sg}
    if isinstance(launch, launches.Direct):
        return direct.pq2_direct_kernel, constants, warps
    constants |= {"STAGES": launch.stages, "KEEP": launch.keep, "SPLIT": launch.split}
    return ring.pq2_ring_kernel, constants, warps, launch.registers


def _usage(cubin: bytes) -> dict[str, int]:
    """Registers and local memory (spills) of a cubin, as the toolkit's own tool says."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    if found is None:
        raise SystemExit(f"cuobjdump says nothing of registers: {text}")
    return dict(zip(("registers", "stack", "shared", "local"), map(int, found.groups()), strict=True))


def _block(kind):
    """The type of a descriptor for bulk copies, from `i8[128,128]`."""
    element, _, shape = kind[:-1].partition("[")
    rows, columns = map(int, shape.split(","))
    layout = gl.NVMMASharedLayout(128 if element == "i8" else 0, 8 if element == "i8" else 32, 2)
    return f"tensordesc<{element}[{rows}, {columns}],{layout!r}>"


def _compile(arch, asm, name, kernel, key, constants, warps, registers=None):
    """Compile one kernel: what it uses, and how often each instruction occurs in its PTX."""
    text = TYPES[key].format(**constants, SCALES=max(constants.get("BLOCK_M", 0), 32))
    types = dict(part.split("=") for part in text.split())
    types = {name: _block(kind) if "[" in kind else kind for name, kind in types.items()}
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    order = list(kernel.arg_names)
    signature = {argument: signature[argument] for argument in order}
    aligned = {
        (order.index(argument),): [["tt.divisibility", 16]]
        for argument, kind in types.items()
        if kind.startswith("*") or argument in ("K", "stride_x")
    }
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(fn=kernel, signature=signature, constexprs={(order.index(c),): v for c, v in constants.items()},
                  attrs=aligned)  # fmt: skip
    options = {"num_warps": warps, "enable_fp_fusion": True, **({"maxnreg": registers} if registers else {})}
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = result.asm["ptx"]
    if asm:
        asm.mkdir(parents=True, exist_ok=True)
        (asm / f"{re.sub('[^a-z0-9_]+', '_', name)}.sm_{arch}.ptx").write_text(ptx, encoding="utf-8")
    # An instruction may stand behind its predicate, and behind the brace that opens inline assembly.
    lines = [
        re.sub(r"^\s*(\{\s*)?(\.reg[^;]*;\s*)?(@!?%p\d+\s+)?", "", line)
        for line in ptx.splitlines()
        if line.startswith("\t")
    ]
    words = [part.split()[0] for line in lines for part in line.split(";") if part.split()]
    counts = {word: words.count(word) for word in sorted(set(words)) if word[0].isalpha()}
    return {**_usage(result.asm["cubin"]), "warps": warps, "dynamic": result.metadata.shared, "instructions": counts}


def main() -> None:
    """Compile for one architecture, in as many processes as there are processors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", type=int)
    parser.add_argument("--asm", type=Path)
    parser.add_argument("--only", default="", help="names that contain it")
    arguments = parser.parse_args()
    wanted = [number for number, one in enumerate(_kernels(arguments.arch)) if arguments.only in one[0]]
    jobs = [(arguments.arch, arguments.asm, number) for number in wanted]
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        json.dump(dict(pool.map(_numbered, jobs)), sys.stdout)


def _numbered(job):
    """One kernel by its number: kernels themselves do not travel between processes."""
    arch, asm, number = job
    name, *rest = list(_kernels(arch))[number]
    return name, _compile(arch, asm, name, *rest)


if __name__ == "__main__":
    main()
