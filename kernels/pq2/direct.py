"""Path `direct`, M = 2 to 16: code bytes from global memory straight into A fragments of mma m16n8k32. Gluon.

A program takes BLOCK_N rows of the weight; each warp along K loads SG groups at a time, with nothing between memory and its
fragments, and as many warps as fit hide what memory takes. It needs neither room in shared memory nor a K of more than one
group, so it runs where `ring` does not.

With WARPS_K = 1 the groups of a row are added one after the other, as `legacy` adds them: the results are bit-identical.

Reference: `reference.matmul`; test: tests/kernels/test_tiles.py. Switch: PQ2_SMALL.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pq2.format import Prepared
from pq2.quantize import Fragments
from pq2.tiles import (
    b_fragments,
    codes_layout,
    columns,
    meta_layout,
    meta_pointers,
    mma_layout,
    multiply_add,
    q_layout,
    q_pointers,
    scales_layout,
    store_rows,
    sum_layout,
)


@gluon.jit
def load_steps(
    codes_at, d_at, first, byte, group, SG: gl.constexpr, WARPS_K: gl.constexpr, G: gl.constexpr, TAIL: gl.constexpr
):
    """Code bytes and scales of SG steps, from group `first` on."""
    found = ()
    for i in gl.static_range(SG):
        at = first + i * WARPS_K
        if TAIL:
            codes = gl.load(codes_at + at * 32, mask=byte < (G - at) * 32, other=0)
            d = gl.load(d_at + at, mask=group < G - at, other=0.0)
        else:
            codes = gl.load(codes_at + at * 32)
            d = gl.load(d_at + at)
        found = found + ((codes, d),)
    return found


@gluon.jit
def add_steps(
    total, steps, first, M, q_at, meta_at, q_group, meta_group, token, SG: gl.constexpr, WARPS_K: gl.constexpr,
    BLOCK_N: gl.constexpr, TOKENS: gl.constexpr, G: gl.constexpr, TAIL: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Multiply SG steps by their activations and add them to total."""
    for i in gl.static_range(SG):
        at = first + i * WARPS_K
        q_inside = token < M
        meta_inside = meta_group >= 0
        if TAIL:
            q_inside = q_inside & (q_group + at < G)
            meta_inside = meta_group + at < G
        q = gl.load(q_at + at * (TOKENS * 128), mask=q_inside, other=0)
        meta = gl.load(meta_at + at * (TOKENS * 2), mask=meta_inside, other=0)
        b = b_fragments(q, WARPS_K, TOKENS, MMA)
        total = multiply_add(
            total, steps[i][0], steps[i][1], b, columns(meta, MMA), WARPS_K, BLOCK_N, TOKENS, MMA
        )  # fmt: skip
    return total


@gluon.jit(do_not_specialize=["M"])  # a number of rows that is new to a server is not compiled for
def pq2_direct_kernel(
    q_ptr, meta_ptr, codes_ptr, d_ptr, out_ptr, M, N, G: gl.constexpr, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS_K: gl.constexpr, WARPS_N: gl.constexpr, SG: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BLOCK_N rows by all tokens; out [M, N]."""
    MMA: gl.constexpr = mma_layout(WARPS_K, WARPS_N)
    CODES: gl.constexpr = codes_layout(WARPS_K, WARPS_N, BLOCK_N)
    SCALES: gl.constexpr = scales_layout(WARPS_K, WARPS_N, BLOCK_N)
    TAIL: gl.constexpr = G % (WARPS_K * SG) != 0
    if PDL:
        gdc_launch_dependents()
    first_row = gl.program_id(0) * BLOCK_N
    row = first_row + gl.arange(0, BLOCK_N, gl.SliceLayout(1, CODES))[:, None]
    row_d = first_row + gl.arange(0, BLOCK_N, gl.SliceLayout(1, SCALES))[:, None]
    byte = gl.arange(0, WARPS_K * 32, gl.SliceLayout(0, CODES))[None, :]
    group = gl.arange(0, WARPS_K, gl.SliceLayout(0, SCALES))[None, :]
    # Rows beyond the weight read its first one again: loads without a mask, and stores with one.
    codes_at = codes_ptr + gl.where(row < N, row, 0).to(gl.int64) * (G * 32) + byte
    d_at = d_ptr + gl.where(row_d < N, row_d, 0).to(gl.int64) * G + group
    q_at, q_group, token = q_pointers(q_ptr, WARPS_K, TOKENS, q_layout(WARPS_K, WARPS_N, TOKENS))
    meta_at, meta_group = meta_pointers(meta_ptr, WARPS_K, TOKENS, meta_layout(WARPS_K, WARPS_N, TOKENS))
    total = gl.full((WARPS_K, BLOCK_N, TOKENS), 0.0, gl.float32, MMA)
    ahead = load_steps(codes_at, d_at, 0, byte, group, SG, WARPS_K, G, TAIL)
    if PDL:
        gdc_wait()
    total = add_steps(
        total, ahead, 0, M, q_at, meta_at, q_group, meta_group, token, SG, WARPS_K, BLOCK_N, TOKENS, G, TAIL, MMA
    )  # fmt: skip
    for first in range(SG * WARPS_K, G, SG * WARPS_K):
        steps = load_steps(codes_at, d_at, first, byte, group, SG, WARPS_K, G, TAIL)
        total = add_steps(
            total, steps, first, M, q_at, meta_at, q_group, meta_group, token, SG, WARPS_K, BLOCK_N, TOKENS, G, TAIL, MMA
        )  # fmt: skip
    if WARPS_K > 1:
        SUM: gl.constexpr = sum_layout(WARPS_K, WARPS_N, BLOCK_N)
        shared_sum = gl.allocate_shared_memory(
            gl.float32, [WARPS_K, BLOCK_N, TOKENS], gl.SwizzledSharedLayout(1, 1, 8, [2, 1, 0])
        )
        shared_sum.store(total)
        outputs = gl.sum(shared_sum.load(SUM), axis=0)
        store_rows(out_ptr, outputs, first_row, M, N, BLOCK_N, TOKENS, gl.SliceLayout(0, SUM))
    else:
        store_rows(out_ptr, gl.sum(total, axis=0), first_row, M, N, BLOCK_N, TOKENS, gl.SliceLayout(0, MMA))


def direct(
    x: Fragments, m: int, weight: Prepared, out: torch.Tensor, block_n: int, warps_k: int, warps_n: int, sg: int,
    pdl: bool,
) -> None:  # fmt: skip
    """A few rows of activations times a weight.

    Args:
        x: Activations, tiled for 8 or 16 tokens.
        m: How many tokens there are.
        weight: [N, K].
        out: [M, N], written.
        block_n: Rows of the weight a program, 16 * warps_n at least.
        warps_k: Warps that share a row.
        warps_n: Warps that share the rows of a tile.
        sg: Groups that a warp loads at a time.
        pdl: Programmatic dependent launch, which sm_90 has.
    """
    n, k = weight.shape
    pq2_direct_kernel[(triton.cdiv(n, block_n),)](
        x.q, x.meta, weight.codes, weight.scales, out, m, n, k // 128,
        TOKENS=x.q.shape[2], BLOCK_N=block_n, WARPS_K=warps_k, WARPS_N=warps_n, SG=sg, PDL=pdl,
        num_warps=warps_k * warps_n, enable_fp_fusion=True, launch_pdl=pdl,
    )  # fmt: skip
