"""Path `single` where it is tuned, M = 1: plane DP4A, weights through a ring in shared memory by cp.async. Gluon.

The product is that of `single.py`: (w >> 2 s) & 0x03030303 meets plane s of the activations. What differs is where things
are. A thread always has the same words of a row, whatever the row, so it keeps their activations in registers; the codes
come through a ring of tiles of ROWS rows, which begins before the kernel before this one has ended. A thread's sum begins
at 12582912 - T, as in `tiles.py`.

Reference: `reference.matmul`; test: tests/kernels/test_tiles.py. Switch: PQ2_SINGLE.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pq2.compat import commit_group, copy_async, wait_group
from pq2.errors import PathUnavailable
from pq2.format import Prepared
from pq2.quantize import Quantized
from pq2.ring import copy_layout
from pq2.tiles import START, START_BITS, power_of_two


@gluon.jit
def dp4a(a, b, c):
    """Four signed bytes of a times four of b, added to c; int32."""
    return gl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def words(x, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """[..., HALVES * 4] -> the four words of each half of a group, SHAPE ([..., HALVES]) each."""
    even, odd = gl.split(gl.reshape(x, SHAPE + (2, 2)))
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    return (
        gl.convert_layout(w0, LAYOUT, assert_trivial=True), gl.convert_layout(w1, LAYOUT, assert_trivial=True),
        gl.convert_layout(w2, LAYOUT, assert_trivial=True), gl.convert_layout(w3, LAYOUT, assert_trivial=True),
    )  # fmt: skip


@gluon.jit
def scales_of_halves(
    shared, ROWS: gl.constexpr, HALVES: gl.constexpr, LANES: gl.constexpr, WARPS_N: gl.constexpr, WARPS_K: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Scales of groups [ROWS, HALVES / 2] in shared memory -> fp32, one for each half of a group."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 1], [32 // LANES, LANES // 2, 2], [WARPS_N, WARPS_K, 1], [2, 1, 0])
    bits = shared.load(gl.SliceLayout(2, PAIRS)).to(gl.int16, bitcast=True)
    both = gl.full((ROWS, HALVES // 2, 2), 0, gl.int16, PAIRS) + bits[:, :, None]
    both = gl.convert_layout(gl.reshape(both, (ROWS, HALVES)), LAYOUT, assert_trivial=True)
    return both.to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def fill_rows(
    codes_ring, d_ring, stage, codes_at, d_at, tile, N, rows, rows_d, word, group, G: gl.constexpr, ROWS: gl.constexpr,
    HALVES: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Start to copy a tile of whole rows into a stage; beyond the weight nothing is read."""
    row = tile * ROWS + rows
    row_d = tile * ROWS + rows_d
    codes_at += row.to(gl.int64) * (G * 8)
    for c in gl.static_range(BLOCKS):
        inside = row < N
        if (c + 1) * HALVES > 2 * G:
            inside = inside & (word < (2 * G - c * HALVES) * 4)
        copy_async(codes_ring[c].index(stage), codes_at + c * HALVES * 4, mask=inside)
    copy_async(d_ring.index(stage), d_at + row_d.to(gl.int64) * G, mask=(row_d < N) & (group < G))
    commit_group()


@gluon.jit
def pq2_single_ring_kernel(
    q_ptr, xs_ptr, sums_ptr, codes_ptr, d_ptr, out_ptr, N, G: gl.constexpr, ROWS: gl.constexpr, LANES: gl.constexpr,
    WARPS_N: gl.constexpr, WARPS_K: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Tiles of ROWS rows, from program_id(0) on. q [4 planes of 8 words a group] and codes as int32 words."""
    HALVES: gl.constexpr = LANES * WARPS_K
    BLOCKS: gl.constexpr = (2 * G + HALVES - 1) // HALVES
    WIDTH: gl.constexpr = power_of_two(BLOCKS * HALVES // 2)
    WORDS: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [WARPS_N, WARPS_K], [1, 0])
    SUMS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LANES, LANES], [WARPS_N, WARPS_K], [1, 0])
    ACROSS: gl.constexpr = gl.SliceLayout(0, SUMS)
    COPY_D: gl.constexpr = copy_layout(WIDTH, 8, WARPS_N * WARPS_K)
    if PDL:
        gdc_launch_dependents()
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, WORDS))[:, None]
    word = gl.arange(0, HALVES * 4, gl.SliceLayout(0, WORDS))
    half = gl.arange(0, HALVES, ACROSS)
    rows_d = gl.arange(0, ROWS, gl.SliceLayout(1, COPY_D))[:, None]
    group = gl.arange(0, WIDTH, gl.SliceLayout(0, COPY_D))[None, :]
    codes_at = codes_ptr + word[None, :]
    d_at = d_ptr + group
    tile = gl.program_id(0)
    grid = gl.num_programs(0)
    # An allocation a block of columns: the compiler puts a barrier between accesses of one allocation.
    codes_ring = ()
    for c in gl.static_range(BLOCKS):
        codes_ring = codes_ring + (
            gl.allocate_shared_memory(gl.int32, [STAGES, ROWS, HALVES * 4], gl.SwizzledSharedLayout(4, 1, 1, [1, 0])),
        )
    d_ring = gl.allocate_shared_memory(gl.float16, [STAGES, ROWS, WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for i in gl.static_range(STAGES - 1):
        fill_rows(
            codes_ring, d_ring, i, codes_at, d_at, tile + i * grid, N, rows, rows_d, word[None, :], group, G, ROWS, HALVES,
            BLOCKS,
        )  # fmt: skip
    if PDL:
        gdc_wait()
    kept = ()
    for c in gl.static_range(BLOCKS):
        at = c * HALVES * 4 + word
        inside = c * HALVES + half < 2 * G
        planes = ()
        for s in gl.static_range(4):
            q = gl.load(q_ptr + (at // 8) * 32 + s * 8 + at % 8, mask=at < G * 8, other=0)
            planes = planes + (words(q, (HALVES,), ACROSS),)
        total_of_group = gl.load(sums_ptr + (c * HALVES + half) // 2, mask=inside, other=0)
        # T is taken back once, by the first half of a group.
        start = START_BITS - gl.where(half % 2 == 0, total_of_group, 0)
        scale = gl.load(xs_ptr + (c * HALVES + half) // 2, mask=inside, other=0.0)
        kept = kept + ((planes, start, scale),)
    tiles = (N + ROWS - 1) // ROWS
    stage = 0
    while tile < tiles:
        wait_group(STAGES - 2)
        fill_rows(
            codes_ring, d_ring, gl.where(stage == 0, STAGES - 1, stage - 1), codes_at, d_at, tile + (STAGES - 1) * grid, N,
            rows, rows_d, word[None, :], group, G, ROWS, HALVES, BLOCKS,
        )  # fmt: skip
        total = gl.full((ROWS, HALVES), 0.0, gl.float32, SUMS)
        for c in gl.static_range(BLOCKS):
            codes = words(codes_ring[c].index(stage).load(WORDS), (ROWS, HALVES), SUMS)
            dot = gl.full((ROWS, HALVES), 0, gl.int32, SUMS) + kept[c][1][None, :]
            for i in gl.static_range(4):
                for s in gl.static_range(4):
                    activations = gl.full((ROWS, HALVES), 0, gl.int32, SUMS) + kept[c][0][s][i][None, :]
                    dot = dp4a((codes[i] >> (2 * s)) & 0x03030303, activations, dot)
            shared_d = d_ring.index(stage).slice(c * HALVES // 2, HALVES // 2, dim=1)
            d = scales_of_halves(shared_d, ROWS, HALVES, LANES, WARPS_N, WARPS_K, SUMS)
            total += (dot.to(gl.float32, bitcast=True) - START) * (d * kept[c][2][None, :])
        outputs = gl.sum(total, axis=1)
        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
        gl.store(out_ptr + row, outputs.to(out_ptr.dtype.element_ty), mask=row < N)
        tile += grid
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)


def single_ring(
    x: Quantized, weight: Prepared, out: torch.Tensor, rows: int, lanes: int, warps_n: int, warps_k: int, stages: int,
    programs: int, pdl: bool,
) -> None:  # fmt: skip
    """One row of activations times a weight.

    Args:
        x: M = 1, planes order.
        weight: [N, K], K a multiple of 1024.
        out: [1, N], written.
        rows: Rows of the weight a tile, 32 / lanes * warps_n at least; a power of two.
        lanes: Lanes that share a row: 2 to 32, a power of two.
        warps_n: Warps that share the rows of a tile.
        warps_k: Warps that share a row.
        stages: Tiles of the ring, 2 at least.
        programs: Programs at most.
        pdl: Programmatic dependent launch, which sm_90 has.

    Raises:
        PathUnavailable: K is no multiple of 1024: rows of scales are copied 16 bytes at a time.
    """
    n, k = weight.shape
    if k % 1024:
        raise PathUnavailable(f"single_ring: K is {k}, and it takes multiples of 1024")
    pq2_single_ring_kernel[(min(triton.cdiv(n, rows), programs),)](
        x.q.view(torch.int32), x.scales, x.sums, weight.codes.view(torch.int32), weight.scales, out, n, k // 128,
        ROWS=rows, LANES=lanes, WARPS_N=warps_n, WARPS_K=warps_k, STAGES=stages, PDL=pdl, num_warps=warps_n * warps_k,
        enable_fp_fusion=True, launch_pdl=pdl,
    )  # fmt: skip
