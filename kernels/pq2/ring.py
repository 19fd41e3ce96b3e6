"""Path `ring`, M = 2 to 16: weights through shared memory by cp.async, in a ring of stages. Gluon.

A program takes BLOCK_N rows of the weight, then those of the next tile, as long as there are tiles: a stage holds SG steps
of WARPS_K groups, and STAGES - 1 stages are on their way while one is multiplied. The ring runs on from a tile into the
next, and begins before the kernel before this one has ended (`gdc_wait`): weights depend on nothing.

Activations are read once a program and stay: in registers, in shared memory, or their scales there and the rest in
registers (KEEP). SPLIT programs share a tile, each with a part of K, where all of K does not fit; a second kernel adds
their sums in a fixed order.

Reference: `reference.matmul`; test: tests/kernels/test_tiles.py, which runs this code with copies that land at their wait
alone. Switch: PQ2_RING.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pq2 import plans
from pq2.compat import commit_group, copy_async, wait_group
from pq2.errors import PathUnavailable
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
    power_of_two,
    q_layout,
    q_pointers,
    scales_layout,
    store_rows,
    sum_layout,
)

IN_SHARED, IN_REGISTERS, SCALES_IN_SHARED = 0, 1, 2
"""Where a program keeps the activations (KEEP)."""

COMBINE = 1024
"""Outputs a program of the kernel that adds the parts of K."""


@gluon.constexpr_function
def copy_layout(COLUMNS, VECTOR, WARPS):
    """Rows of COLUMNS elements, copied VECTOR at a time: lanes along a row first."""
    along = min(COLUMNS // VECTOR, 32)
    return gl.BlockedLayout([1, VECTOR], [32 // along, along], [WARPS, 1], [1, 0])


@gluon.jit
def fill(
    codes_ring, d_ring, stage, codes_at, d_at, tile, left, CHUNK: gl.constexpr, N, rows, rows_d, byte, group,
    BLOCK_N: gl.constexpr, WARPS_K: gl.constexpr, SG: gl.constexpr, G: gl.constexpr, STEPS: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """Start to copy SG steps of a tile, the CHUNK-th so many, into a stage; beyond the weight nothing is read."""
    row = tile * BLOCK_N + rows
    row_d = tile * BLOCK_N + rows_d
    codes_at += row.to(gl.int64) * (G * 32)
    d_at += row_d.to(gl.int64) * G
    for i in gl.static_range(SG):
        if CHUNK * SG + i < STEPS:
            inside = row < N
            if TAIL:
                inside = inside & (byte < (left - (CHUNK * SG + i) * WARPS_K) * 32)
            copy_async(codes_ring[i].index(stage), codes_at + (CHUNK * SG + i) * (WARPS_K * 32), mask=inside)
    inside_d = (row_d < N) & (group < min(SG, STEPS - CHUNK * SG) * WARPS_K)
    if TAIL:
        inside_d = inside_d & (group < left - CHUNK * (SG * WARPS_K))
    copy_async(d_ring.index(stage), d_at + CHUNK * (SG * WARPS_K), mask=inside_d)
    commit_group()


@gluon.jit(do_not_specialize=["M"])  # a number of rows that is new to a server is not compiled for
def pq2_ring_kernel(
    q_ptr, meta_ptr, codes_ptr, d_ptr, out_ptr, M, N, G: gl.constexpr, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS_K: gl.constexpr, WARPS_N: gl.constexpr, SG: gl.constexpr, STAGES: gl.constexpr, KEEP: gl.constexpr,
    SPLIT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Tiles of BLOCK_N rows, from program_id(0) on, by all tokens; program_id(1) is the part of K. out: [SPLIT, M, N]."""
    MMA: gl.constexpr = mma_layout(WARPS_K, WARPS_N)
    STEPS: gl.constexpr = (G + WARPS_K * SPLIT - 1) // (WARPS_K * SPLIT)
    CHUNKS: gl.constexpr = (STEPS + SG - 1) // SG
    TAIL: gl.constexpr = G != STEPS * WARPS_K * SPLIT
    WIDTH: gl.constexpr = power_of_two(SG * WARPS_K)
    CODES: gl.constexpr = codes_layout(WARPS_K, WARPS_N, BLOCK_N)
    SCALES: gl.constexpr = scales_layout(WARPS_K, WARPS_N, BLOCK_N)
    Q: gl.constexpr = q_layout(WARPS_K, WARPS_N, TOKENS)
    META: gl.constexpr = meta_layout(WARPS_K, WARPS_N, TOKENS)
    COPY: gl.constexpr = copy_layout(WARPS_K * 32, 16, WARPS_K * WARPS_N)
    COPY_D: gl.constexpr = copy_layout(WIDTH, 8 if WIDTH >= 8 else WIDTH, WARPS_K * WARPS_N)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Four rows of a fragment are read at once, 32 bytes of each: they are put on different banks.
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(32, 1, 4 if WARPS_K >= 4 else WARPS_K, [1, 0])
    if PDL:
        gdc_launch_dependents()
    first = gl.program_id(1) * (STEPS * WARPS_K)
    left = gl.minimum(G - first, STEPS * WARPS_K)
    rows = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))[:, None]
    byte = gl.arange(0, WARPS_K * 32, gl.SliceLayout(0, COPY))[None, :]
    rows_d = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY_D))[:, None]
    group = gl.arange(0, WIDTH, gl.SliceLayout(0, COPY_D))[None, :]
    codes_at = codes_ptr + first * 32 + byte
    d_at = d_ptr + first + group
    tile = gl.program_id(0)
    grid = gl.num_programs(0)
    # An allocation a step of the stage: the compiler puts a barrier between accesses of one allocation.
    codes_ring = ()
    for i in gl.static_range(SG):
        codes_ring = codes_ring + (gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_N, WARPS_K * 32], SWIZZLED),)
    d_ring = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_N, WIDTH], PLAIN)
    for i in gl.static_range(STAGES - 1):
        fill(
            codes_ring, d_ring, i, codes_at, d_at, tile + (i // CHUNKS) * grid, left, i % CHUNKS, N, rows, rows_d, byte,
            group, BLOCK_N, WARPS_K, SG, G, STEPS, TAIL,
        )  # fmt: skip

    COPY_Q: gl.constexpr = (
        Q if KEEP else gl.BlockedLayout([1, 1, 1, 16], [1, 1, 8, 4], [WARPS_K, 1, WARPS_N, 1], [3, 2, 1, 0])
    )
    COPY_META: gl.constexpr = (
        META
        if KEEP == 1
        else gl.BlockedLayout([1, 2, 2], [64 // TOKENS, TOKENS // 2, 1], [WARPS_K * WARPS_N, 1, 1], [2, 1, 0])
    )
    q_at, q_group, token = q_pointers(q_ptr + first * (TOKENS * 128), WARPS_K, TOKENS, COPY_Q)
    meta_at, meta_group = meta_pointers(meta_ptr + first * (TOKENS * 2), WARPS_K, TOKENS, COPY_META)
    shared_q = ()
    shared_meta = ()
    for i in gl.static_range(STEPS):
        if KEEP == 0:
            shared_q = shared_q + (
                gl.allocate_shared_memory(
                    gl.int8, [WARPS_K, 2, TOKENS, 64], gl.SwizzledSharedLayout(16, 1, 1, [3, 2, 1, 0])
                ),
            )
        if KEEP != 1:
            shared_meta = shared_meta + (
                gl.allocate_shared_memory(gl.int32, [WARPS_K, TOKENS, 2], gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0])),
            )
    if PDL:
        gdc_wait()
    kept_b = ()
    kept_columns = ()
    for i in gl.static_range(STEPS):
        # Tokens beyond M are zeros, and columns that nobody stores; groups beyond K have scale 0.
        q_inside = token < M
        meta_inside = meta_group >= 0
        if TAIL:
            q_inside = q_inside & (q_group + i * WARPS_K < left)
            meta_inside = meta_group + i * WARPS_K < left
        if KEEP == 0:
            copy_async(shared_q[i], q_at + i * (WARPS_K * TOKENS * 128), mask=q_inside)
        else:
            q = gl.load(q_at + i * (WARPS_K * TOKENS * 128), mask=q_inside, other=0)
            kept_b = kept_b + (b_fragments(q, WARPS_K, TOKENS, MMA),)
        if KEEP != 1:
            copy_async(shared_meta[i], meta_at + i * (WARPS_K * TOKENS * 2), mask=meta_inside)
        else:
            meta = gl.load(meta_at + i * (WARPS_K * TOKENS * 2), mask=meta_inside, other=0)
            kept_columns = kept_columns + (columns(meta, MMA),)
    if KEEP != 1:
        commit_group()
        wait_group(0)

    SUM: gl.constexpr = sum_layout(WARPS_K, WARPS_N, BLOCK_N)
    if WARPS_K > 1:
        shared_sum = gl.allocate_shared_memory(
            gl.float32, [WARPS_K, BLOCK_N, TOKENS], gl.SwizzledSharedLayout(1, 1, 8, [2, 1, 0])
        )
    out_ptr += gl.program_id(1).to(gl.int64) * M * N
    tiles = (N + BLOCK_N - 1) // BLOCK_N
    stage = 0
    while tile < tiles:
        total = gl.full((WARPS_K, BLOCK_N, TOKENS), 0.0, gl.float32, MMA)
        for c in gl.static_range(CHUNKS):
            wait_group(STAGES - 2)
            # All warps have read the stage before this one, so it is filled again.
            fill(
                codes_ring, d_ring, gl.where(stage == 0, STAGES - 1, stage - 1), codes_at, d_at,
                tile + ((c + STAGES - 1) // CHUNKS) * grid, left, (c + STAGES - 1) % CHUNKS, N, rows, rows_d, byte,
                group, BLOCK_N, WARPS_K, SG, G, STEPS, TAIL,
            )  # fmt: skip
            for i in gl.static_range(SG):
                if c * SG + i < STEPS:
                    codes = codes_ring[i].index(stage).load(CODES)
                    d = d_ring.index(stage).slice(i * WARPS_K, WARPS_K, dim=1).load(SCALES)
                    if KEEP == 0:
                        b = b_fragments(shared_q[c * SG + i].load(Q), WARPS_K, TOKENS, MMA)
                    else:
                        b = kept_b[c * SG + i]
                    if KEEP == 1:
                        column = kept_columns[c * SG + i]
                    else:
                        column = columns(shared_meta[c * SG + i].load(META), MMA)
                    total = multiply_add(total, codes, d, b, column, WARPS_K, BLOCK_N, TOKENS, MMA)
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        if WARPS_K > 1:
            shared_sum.store(total)
            outputs = gl.sum(shared_sum.load(SUM), axis=0)
            store_rows(out_ptr, outputs, tile * BLOCK_N, M, N, BLOCK_N, TOKENS, gl.SliceLayout(0, SUM))
        else:
            store_rows(out_ptr, gl.sum(total, axis=0), tile * BLOCK_N, M, N, BLOCK_N, TOKENS, gl.SliceLayout(0, MMA))
        tile += grid


@triton.jit(do_not_specialize=["size"])
def pq2_combine_kernel(parts_ptr, out_ptr, size, SPLIT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Add fp32 parts [SPLIT, size], the first first."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts_ptr + at, mask=at < size, other=0.0)
    for part in tl.static_range(1, SPLIT):
        parts_ptr += size
        total += tl.load(parts_ptr + at, mask=at < size, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < size)


def ring(
    x: Fragments, m: int, weight: Prepared, out: torch.Tensor, block_n: int, warps_k: int, warps_n: int, sg: int,
    stages: int, keep: int, split: int, registers: int, programs: int, pdl: bool,
) -> None:  # fmt: skip
    """A few rows of activations times a weight.

    Args:
        x: Activations, tiled for 8 or 16 tokens.
        m: How many tokens there are.
        weight: [N, K], K a multiple of 1024.
        out: [M, N], written.
        block_n: Rows of the weight a tile, 16 * warps_n at least.
        warps_k: Warps that share a row.
        warps_n: Warps that share the rows of a tile.
        sg: Steps of warps_k groups a stage.
        stages: Stages of the ring, 2 at least.
        keep: Where the activations stay: `IN_SHARED`, `IN_REGISTERS`, `SCALES_IN_SHARED`.
        split: Parts of K.
        registers: Registers of a thread at most, so that the next kernel's programs have room to begin; 0 for no limit.
        programs: Programs at most, those of all parts together.
        pdl: Programmatic dependent launch, which sm_90 has.

    Raises:
        PathUnavailable: K is no multiple of 1024: rows of scales are copied 16 bytes at a time.
    """
    n, k = weight.shape
    if k % 1024:
        raise PathUnavailable(f"ring: K is {k}, and it takes multiples of 1024")
    target = out if split == 1 else torch.empty(split, m, n, dtype=torch.float32, device=out.device)
    grid = (min(triton.cdiv(n, block_n), max(1, programs // split)), split)
    pq2_ring_kernel[grid](
        x.q, x.meta, weight.codes, weight.scales, target, m, n, k // 128,
        TOKENS=x.q.shape[2], BLOCK_N=block_n, WARPS_K=warps_k, WARPS_N=warps_n, SG=sg, STAGES=stages, KEEP=keep,
        SPLIT=split, PDL=pdl, num_warps=warps_k * warps_n, maxnreg=registers or None, enable_fp_fusion=True,
        launch_pdl=pdl,
    )  # fmt: skip
    if split > 1:
        combine(target, out, pdl)


def combine(parts: torch.Tensor, out: torch.Tensor, pdl: bool) -> None:
    """Add the fp32 parts [parts, M, N] of a product, in their order, into out [M, N]."""
    split, m, n = parts.shape
    plans.launch(
        pq2_combine_kernel,
        (triton.cdiv(m * n, COMBINE),),
        (parts, out, m * n),
        {"SPLIT": split, "BLOCK": COMBINE, "PDL": pdl},
        out.device,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
