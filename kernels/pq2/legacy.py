"""Path `legacy`, any M: the older kernels and the baseline of every A/B.

One row: codes are decoded to the bytes -1, 0, 1 by PRMT, which looks four of them up at a time, and DP4A multiplies them.
More rows: the four planes of a code byte go through `tl.dot` one after the other, unsigned, and T takes the offset back.

Reference: `reference.matmul`; test: tests/kernels/test_paths.py. It runs wherever no switched path is on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pq2.format import Prepared
from pq2.intrinsics import INTERPRETED, dp4a, interleave, prmt
from pq2.quantize import Quantized

BYTES = tl.constexpr(0x000100FF)
"""Byte c is the weight of code c: -1, 0, 1."""


@triton.jit
def pq2_legacy_single_kernel(
    q_ptr, xs_ptr, codes_ptr, d_ptr, out_ptr, N, G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of the product, BLOCK_G groups at a time; q [4 planes of 8 words a group] and codes as int32 words."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    word = tl.arange(0, BLOCK_G * 8)
    group = tl.arange(0, BLOCK_G)
    rows = row.to(tl.int64)
    inside = row < N
    total = tl.zeros((BLOCK_N, BLOCK_G), tl.float32)
    for first in range(0, G, BLOCK_G):
        at = first * 8 + word
        codes = tl.load(
            codes_ptr + rows[:, None] * (G * 8) + at[None, :],
            mask=inside[:, None] & (at < G * 8)[None, :], other=0, eviction_policy="evict_first",
        )  # fmt: skip
        table = tl.full((BLOCK_N, BLOCK_G * 8), BYTES, tl.int32)
        dots = tl.zeros((BLOCK_N, BLOCK_G * 8), tl.int32)
        for half in tl.static_range(2):
            # Nibbles hold the codes of planes `half` and `half` + 2 in turn; looked up, then sorted by plane.
            nibbles = (codes >> (2 * half)) & 0x33333333
            low = prmt(table, nibbles & 0xFFFF)
            high = prmt(table, (nibbles >> 16) & 0xFFFF)
            for odd in tl.static_range(2):
                q = tl.load(q_ptr + (at // 8) * 32 + (half + 2 * odd) * 8 + at % 8, mask=at < G * 8, other=0)
                weights = interleave(low, high, odd)
                dots = dp4a(weights, tl.broadcast_to(q[None, :], (BLOCK_N, BLOCK_G * 8)), dots)
        here = first + group < G
        dot = tl.sum(tl.reshape(dots, (BLOCK_N, BLOCK_G, 8)), axis=2)
        xs = tl.load(xs_ptr + first + group, mask=here, other=0.0)
        d = tl.load(
            d_ptr + rows[:, None] * G + (first + group)[None, :], mask=inside[:, None] & here[None, :], other=0.0
        )
        total += dot.to(tl.float32) * (d.to(tl.float32) * xs[None, :])
    tl.store(out_ptr + row, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M"])  # a number of rows that is new to a server is not compiled for
def pq2_legacy_kernel(
    q_ptr, xs_ptr, sums_ptr, codes_ptr, d_ptr, out_ptr, M, N, G,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_M, BLOCK_N] of the product, a group of 128 at a time."""
    row_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m = row_m < M
    in_n = row_n < N
    # Rows beyond the matrix read its first one again: loads without a mask, and stores with one.
    from_m = tl.where(in_m, row_m, 0).to(tl.int64)
    from_n = tl.where(in_n, row_n, 0).to(tl.int64)
    byte = tl.arange(0, 32)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for g in range(G):
        codes = tl.load(codes_ptr + from_n[None, :] * (G * 32) + g * 32 + byte[:, None])
        dot = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for s in tl.static_range(4):
            q = tl.load(q_ptr + from_m[:, None] * (G * 128) + g * 128 + s * 32 + byte[None, :])
            plane = ((codes >> (2 * s)) & 3).to(tl.int8)
            if INTERPRETED:
                dot += tl.dot(q.to(tl.float32), plane.to(tl.float32)).to(tl.int32)
            else:
                dot = tl.dot(q, plane, dot, out_dtype=tl.int32)
        dot -= tl.load(sums_ptr + from_m * G + g)[:, None]
        xs = tl.load(xs_ptr + from_m * G + g)
        d = tl.load(d_ptr + from_n * G + g).to(tl.float32)
        total += dot.to(tl.float32) * (xs[:, None] * d[None, :])
    at = row_m.to(tl.int64)[:, None] * N + row_n[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


def legacy_single(
    x: Quantized, weight: Prepared, out: torch.Tensor, block_n: int, block_g: int, num_warps: int
) -> None:
    """One row of activations times a weight; arguments as of `single.single`."""
    n, k = weight.shape
    pq2_legacy_single_kernel[(triton.cdiv(n, block_n),)](
        x.q.view(torch.int32), x.scales, weight.codes.view(torch.int32), weight.scales, out, n, k // 128,
        BLOCK_N=block_n, BLOCK_G=block_g, num_warps=num_warps, enable_fp_fusion=True,
    )  # fmt: skip


def legacy(x: Quantized, weight: Prepared, out: torch.Tensor, block_m: int, block_n: int, num_warps: int) -> None:
    """Any number of rows times a weight.

    Args:
        x: [M, K], planes order.
        weight: [N, K].
        out: [M, N], written.
        block_m: Rows of activations a program, at least 16.
        block_n: Rows of the weight a program.
        num_warps: Warps a program.
    """
    m, k = x.q.shape
    n, _ = weight.shape
    # Programs that share rows of the weight follow each other: they find them in the L2 cache.
    pq2_legacy_kernel[(triton.cdiv(m, block_m), triton.cdiv(n, block_n))](
        x.q, x.scales, x.sums, weight.codes, weight.scales, out, m, n, k // 128,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps, enable_fp_fusion=True,
    )  # fmt: skip
