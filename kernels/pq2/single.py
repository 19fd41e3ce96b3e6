"""Path `single`, M = 1: plane DP4A. Codes are masked out of their words, never decoded.

Word w of a group's 8 code words holds 16 weights. (w >> 2 s) & 0x03030303 are those that plane s of the activations meets,
byte for byte, so a DP4A a word and plane makes the whole product; T, the sum of a group's activations, takes the codes'
offset of one back. A product of a group is an exact integer; the scales and the sum over groups are fp32, in an order that
depends on BLOCK_N, BLOCK_G and the number of warps alone, as that of `legacy` does.

Reference: `reference.matmul`; test: tests/kernels/test_paths.py. Switch: PQ2_SINGLE.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pq2.format import Prepared
from pq2.intrinsics import dp4a
from pq2.quantize import Quantized


@triton.jit
def pq2_single_kernel(
    q_ptr, xs_ptr, sums_ptr, codes_ptr, d_ptr, out_ptr, N, G: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
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
        dots = tl.zeros((BLOCK_N, BLOCK_G * 8), tl.int32)
        for s in tl.static_range(4):
            q = tl.load(q_ptr + (at // 8) * 32 + s * 8 + at % 8, mask=at < G * 8, other=0)
            plane = (codes >> (2 * s)) & 0x03030303
            dots = dp4a(plane, tl.broadcast_to(q[None, :], (BLOCK_N, BLOCK_G * 8)), dots)
        here = first + group < G
        dot = tl.sum(tl.reshape(dots, (BLOCK_N, BLOCK_G, 8)), axis=2)
        dot -= tl.load(sums_ptr + first + group, mask=here, other=0)[None, :]
        xs = tl.load(xs_ptr + first + group, mask=here, other=0.0)
        d = tl.load(
            d_ptr + rows[:, None] * G + (first + group)[None, :], mask=inside[:, None] & here[None, :], other=0.0
        )
        total += dot.to(tl.float32) * (d.to(tl.float32) * xs[None, :])
    tl.store(out_ptr + row, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=inside)


def single(x: Quantized, weight: Prepared, out: torch.Tensor, block_n: int, block_g: int, num_warps: int) -> None:
    """One row of activations times a weight.

    Args:
        x: M = 1, planes order.
        weight: [N, K].
        out: [1, N], written.
        block_n: Rows of the weight a program; a power of two.
        block_g: Groups at a time; a power of two.
        num_warps: Warps a program.
    """
    n, k = weight.shape
    pq2_single_kernel[(triton.cdiv(n, block_n),)](
        x.q.view(torch.int32), x.scales, x.sums, weight.codes.view(torch.int32), weight.scales, out, n, k // 128,
        BLOCK_N=block_n, BLOCK_G=block_g, num_warps=num_warps, enable_fp_fusion=True,
    )  # fmt: skip
