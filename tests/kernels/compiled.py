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
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pq2 import activations, dispatch, embedding, legacy, single, small_gemm

LAUNCH = dispatch.LEGACY_LAUNCH
ONE_ROW = {"BLOCK_N": LAUNCH.block_n, "BLOCK_G": LAUNCH.block_g, "G": 40}


TYPES = {
    "quantize": "x_ptr=*bf16 signs_ptr=*i8 q_ptr=*i8 scales_ptr=*fp32 sums_ptr=*i32 stride_x=i32 K=i32",
    "embedding": "ids_ptr=*i64 codes_ptr=*u8 d_ptr=*fp16 signs_ptr=*i8 out_ptr=*bf16 N=i32 K=i32",
    "single": "q_ptr=*i32 xs_ptr=*fp32 sums_ptr=*i32 codes_ptr=*i32 d_ptr=*fp16 out_ptr=*bf16 N=i32",
    "legacy_single": "q_ptr=*i32 xs_ptr=*fp32 codes_ptr=*i32 d_ptr=*fp16 out_ptr=*bf16 N=i32",
    "legacy": "q_ptr=*i8 xs_ptr=*fp32 sums_ptr=*i32 codes_ptr=*u8 d_ptr=*fp16 out_ptr=*bf16 M=i32 N=i32 G=i32",
    "small_gemm": "x_ptr=*bf16 w_ptr=*bf16 bias_ptr=*bf16 out_ptr=*bf16 partial_ptr=*fp32 arrived_ptr=*i32 "
    "M=i32 N=i32 K=i32 stride_x=i32 PIECES=i32",
}
"""The arguments of each kernel, as its launcher passes them."""


def _kernels():
    """Name, kernel, its key in `TYPES`, constants, warps."""
    quantize = activations.pq2_quantize_kernel
    for name, left, fragments in (("", 0, False), (" rotated", 32, False), (" fragments", 0, True)):
        constants = {"GROUPS": 8, "LEFT": left, "RIGHT": left, "FRAGMENTS": fragments}
        yield f"quantize{name}", quantize, "quantize", constants, 4
    yield "single exact", single.pq2_single_kernel, "single", ONE_ROW, LAUNCH.num_warps
    for name, (block_n, block_g, warps) in sorted(dispatch.table("sm_90")[1].items()):
        groups = int(name.partition("x")[2] or 5120) // 128
        constants = {"BLOCK_N": block_n, "BLOCK_G": block_g, "G": groups}
        yield f"single {name}", single.pq2_single_kernel, "single", constants, warps
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


def main() -> None:
    """Compile for one architecture."""
    parser = argparse.ArgumentParser()
    parser.add_argument("arch", type=int)
    parser.add_argument("--asm", type=Path)
    arguments = parser.parse_args()
    found = {}
    for name, kernel, key, constants, warps in _kernels():
        types = dict(part.split("=") for part in TYPES[key].split())
        signature = {**types, **dict.fromkeys(constants, "constexpr")}
        order = list(kernel.arg_names)
        signature = {argument: signature[argument] for argument in order}
        aligned = {
            (order.index(argument),): [["tt.divisibility", 16]]
            for argument, kind in types.items()
            if kind.startswith("*") or argument in ("K", "stride_x")
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs={(order.index(c),): v for c, v in constants.items()},
                           attrs=aligned)  # fmt: skip
        result = triton.compile(source, target=GPUTarget("cuda", arguments.arch, 32), options={"num_warps": warps})
        ptx = result.asm["ptx"]
        if arguments.asm:
            arguments.asm.mkdir(parents=True, exist_ok=True)
            (arguments.asm / f"{name.replace(' ', '_')}.sm_{arguments.arch}.ptx").write_text(ptx, encoding="utf-8")
        # An instruction may stand behind its predicate, and behind the brace that opens inline assembly.
        lines = [re.sub(r"^\s*(\{\s*)?(@!?%p\d+\s+)?", "", line) for line in ptx.splitlines() if line.startswith("\t")]
        words = [line.split()[0] for line in lines if line.split()]
        counts = {word: words.count(word) for word in sorted(set(words)) if word[0].isalpha()}
        found[name] = {**_usage(result.asm["cubin"]), "instructions": counts}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
