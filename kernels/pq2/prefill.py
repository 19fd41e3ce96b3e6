"""Path `prefill`, more than 16 rows: int8 tensor cores, the weights decoded into registers.

out[m, n] = sum over groups g of xs[m, g] * d[n, g] * dot_g(w[n], q[m]): dots in int32, exact; the rest in fp32.

On sm_90 a program is a ring of stages in shared memory, one stage a group of 128 along K. One warp fills it with activations
and their scales (TMA), one with code bytes (cp.async; TMA is slow with rows of 32 bytes), and each of CONSUMERS warpgroups
multiplies 64 rows of weights, its A operand, with BLOCK_M tokens. Warpgroups do not wait for each other: while one applies
scales, another has the tensor cores. A lane finds its fragment of A by PRMT, four weights at a time, in the 8 code bytes it
read: the order `steps` of the activations is made for that, and words of -1, 0, 1 need no correction by sums.

An accumulator starts as the bits of 1.5 * 2^23, so its bits are the float 1.5 * 2^23 + dot: one FMA with d (fp16, so the
product with 1.5 * 2^23 is exact) takes the offset back and multiplies, where a conversion would be one more instruction.

On sm_80 to sm_89 the same product goes through mma m16n8k32 in a plain loop.

Reference: `reference.matmul_quantized`; test: tests/kernels/test_prefill.py.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pq2.format import GROUP, Prepared
from pq2.quantize import Quantized

ROWS = 64
"""Rows of the weight a warpgroup: those of a wgmma."""
MAGIC = gl.constexpr(0x4B400000)
MAGIC_F = gl.constexpr(12582912.0)
"""1.5 * 2^23, and its bits."""

DECODE = gl.constexpr("""{
.reg .b32 low, high, table;
mov.b32 table, 0x000100FF;
and.b32 low, $4, 0x33333333;
shr.u32 high, $4, 2;
and.b32 high, high, 0x33333333;
prmt.b32 $0, table, 0, low;
prmt.b32 $2, table, 0, high;
shr.u32 low, low, 16;
shr.u32 high, high, 16;
prmt.b32 $1, table, 0, low;
prmt.b32 $3, table, 0, high;
}""")
"""A word of 16 codes -> four words of weights, by the step they belong to; byte c of the table is the weight of code c."""


@gluon.constexpr_function
def codes_layout():
    """Code bytes [64, 32] of a warpgroup: a lane has 8 bytes of a row, where its fragments of A lie."""
    regs = [[0, 1], [0, 2], [0, 4], [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[16, 0], [32, 0]], [], [64, 32])


@gluon.jit
def decode(codes, MMA: gl.constexpr):
    """Code bytes [64, 32] -> the operand A of a group, int8 [64, 128] in the order `steps`; no byte leaves its lane."""
    a, b, c, d = gl.inline_asm_elementwise(
        DECODE, "=&r,=&r,=&r,=&r,r", [codes], dtype=(gl.int8, gl.int8, gl.int8, gl.int8), is_pure=True, pack=4
    )
    x = gl.join(gl.join(a, b), gl.join(c, d))
    x = gl.permute(gl.reshape(x, (64, 4, 2, 4, 2, 2)), (0, 5, 4, 2, 1, 3))
    return gl.convert_layout(gl.reshape(x, (64, 128)), gl.DotOperandLayout(0, MMA, 4), assert_trivial=True)


@gluon.jit
def place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """The token tile and the weight tile of a tile: bands of GROUP_M token tiles, so that neighbours meet in the L2 cache."""
    band = tile // (GROUP_M * tiles_n)
    inside = tile % (GROUP_M * tiles_n)
    width = gl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    return band * GROUP_M + inside % width, inside // width


@gluon.jit
def advance(s, phase, by, STAGES: gl.constexpr):
    """The stage `by` after s, and the parity of the round it is filled in."""
    after = s + by
    wraps = after >= STAGES
    return gl.where(wraps, after - STAGES, after), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def produce(
    q_desc, codes_desc, xs_desc, ring, stride_xs, G, tiles_m, tiles_n,
    SPLIT: gl.constexpr, GROUP_M: gl.constexpr, COPIER: gl.constexpr, ROW_TILES: gl.constexpr,
):  # fmt: skip
    """The warp that asks for activations and their scales."""
    q_smem, codes_smem, xs_smem, full, empty = ring
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    BYTES: gl.constexpr = BLOCK_M * 132 + (0 if COPIER else ROW_TILES * 2048)
    per = (G + SPLIT - 1) // SPLIT
    gdc_wait()
    s = 0
    phase = 1
    for work in range(gl.program_id(0), tiles_m * tiles_n * SPLIT, gl.num_programs(0)):
        tm, tn = place(work // SPLIT, tiles_m, tiles_n, GROUP_M)
        first = (work % SPLIT) * per
        for g in range(first, gl.minimum(first + per, G)):
            mbarrier.wait(empty.index(s), phase)
            ready = full.index(s)
            mbarrier.expect(ready, BYTES)
            tma.async_copy_global_to_shared(q_desc, [tm * BLOCK_M, g * 128], ready, q_smem.index(s))
            tma.async_copy_global_to_shared(xs_desc, [g * stride_xs + tm * BLOCK_M], ready, xs_smem.index(s))
            if not COPIER:
                for c in gl.static_range(ROW_TILES):
                    tma.async_copy_global_to_shared(
                        codes_desc, [(tn * ROW_TILES + c) * 64, g * 32], ready, codes_smem.index(s * ROW_TILES + c)
                    )
            s, phase = advance(s, phase, 1, STAGES)


@gluon.jit
def copy_codes(
    codes_ptr, ring, N, G, tiles_m, tiles_n, SPLIT: gl.constexpr, GROUP_M: gl.constexpr, ROW_TILES: gl.constexpr,
):  # fmt: skip
    """The warp that copies code bytes. Weights are there before the kernel that makes the activations has ended."""
    q_smem, codes_smem, xs_smem, full, empty = ring
    STAGES: gl.constexpr = q_smem.shape[0]
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [1, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, COPY))
    byte = gl.arange(0, 32, gl.SliceLayout(0, COPY))
    per = (G + SPLIT - 1) // SPLIT
    s = 0
    phase = 1
    for work in range(gl.program_id(0), tiles_m * tiles_n * SPLIT, gl.num_programs(0)):
        tm, tn = place(work // SPLIT, tiles_m, tiles_n, GROUP_M)
        first = (work % SPLIT) * per
        # Rows beyond the matrix read its last one again; what comes of them is not stored.
        from_row = codes_ptr + (tn * (ROW_TILES * 64)).to(gl.int64) * (G * 32)
        last_row = N - 1 - tn * (ROW_TILES * 64)
        for g in range(first, gl.minimum(first + per, G)):
            mbarrier.wait(empty.index(s), phase)
            for c in gl.static_range(ROW_TILES):
                at = (gl.minimum(row + c * 64, last_row) * (G * 32)).to(gl.uint32)
                async_copy.async_copy_global_to_shared(
                    codes_smem.index(s * ROW_TILES + c), (from_row + g * 32) + (at[:, None] + byte[None, :].to(gl.uint32))
                )
            async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            s, phase = advance(s, phase, 1, STAGES)


@gluon.jit
def fragments(piece, s, phase, ring, ROW_TILES: gl.constexpr, MMA: gl.constexpr):
    """Wait for a stage; the operand A of its group."""
    q_smem, codes_smem, xs_smem, full, empty = ring
    mbarrier.wait(full.index(s), phase)
    return decode(codes_smem.index(s * ROW_TILES + piece).load(codes_layout()), MMA)


@gluon.jit
def multiply(a, s, ring, MMA: gl.constexpr, CONVERT: gl.constexpr):
    """Start the product of a group."""
    q_smem, codes_smem, xs_smem, full, empty = ring
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    b = q_smem.index(s).permute((1, 0))
    if CONVERT:
        acc = gl.zeros((64, BLOCK_M), gl.int32, MMA)
        acc = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
    else:
        acc = gl.full((64, BLOCK_M), MAGIC, gl.int32, MMA)
        acc = warpgroup_mma(a, b, acc, is_async=True)
    return acc


@gluon.jit
def times_d(acc, d, CONVERT: gl.constexpr):
    """The dots of a group times the weights' scales, fp32."""
    if CONVERT:
        part = acc.to(gl.float32)
        part = part * gl.broadcast(d[:, None], part)[0]
    else:
        part = acc.to(gl.float32, bitcast=True)
        # The product with d is exact: fp16 has 11 bits and 1.5 * 2^23 has 2.
        offset = gl.broadcast((d * -MAGIC_F)[:, None], part)[0]
        part = gl.fma(part, gl.broadcast(d[:, None], part)[0], offset)
    return part


@gluon.jit
def accumulate(part, s, ring, total):
    """Add a group, its dots times d already, times the activations' scales; the stage is free after that."""
    q_smem, codes_smem, xs_smem, full, empty = ring
    xs = xs_smem.index(s).load(gl.SliceLayout(0, part.type.layout))
    mbarrier.arrive(empty.index(s))
    return gl.fma(part, gl.broadcast(xs[None, :], part)[0], total)


@gluon.jit
def consume(
    which, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
    SPLIT: gl.constexpr, GROUP_M: gl.constexpr, CONVERT: gl.constexpr, AHEAD: gl.constexpr, ROW_TILES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies 64 rows of weights with the tile's tokens.

    It is the `which`th of the tile's rows, or, where all have the same rows, takes every CONSUMERS-th group.
    """
    q_smem, codes_smem, xs_smem, full, empty = ring
    totals_smem, given, taken = exchange
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    STRIDE: gl.constexpr = CONSUMERS // ROW_TILES
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    XS: gl.constexpr = gl.SliceLayout(0, MMA)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    piece = which if ROW_TILES > 1 else 0
    turn = which if STRIDE > 1 else 0
    per = (G + SPLIT - 1) // SPLIT
    row = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    col = gl.arange(0, BLOCK_M, XS)
    step = 0
    round = 0
    for work in range(gl.program_id(0), tiles_m * tiles_n * SPLIT, gl.num_programs(0)):
        tile = work // SPLIT
        tm, tn = place(tile, tiles_m, tiles_n, GROUP_M)
        first = (work % SPLIT) * per
        last = gl.minimum(first + per, G)
        n0 = (tn * ROW_TILES + piece) * 64
        d_at = d_ptr + gl.minimum(n0 + row, N - 1).to(gl.int64) * G
        total = gl.zeros((64, BLOCK_M), gl.float32, MMA)
        s = (step + turn) % STAGES
        phase = ((step + turn) // STAGES) & 1
        step += last - first
        d = gl.load(d_at + gl.minimum(first + turn, G - 1))
        begin = first + turn
        if AHEAD:
            # Two groups at a time: the second is decoded while the first is multiplied, which is scaled while the second is.
            gl.static_assert(STRIDE == 1)
            for pair in range((last - first) // 2):
                s_next, phase_next = advance(s, phase, 1, STAGES)
                scale = d.to(gl.float32)
                scale_next = gl.load(d_at + begin + 1)
                d = gl.load(d_at + gl.minimum(begin + 2, G - 1))
                acc = multiply(fragments(piece, s, phase, ring, ROW_TILES, MMA), s, ring, MMA, CONVERT)
                a = fragments(piece, s_next, phase_next, ring, ROW_TILES, MMA)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                part = times_d(acc, scale, CONVERT)
                acc = multiply(a, s_next, ring, MMA, CONVERT)
                total = accumulate(part, s, ring, total)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                total = accumulate(times_d(acc, scale_next.to(gl.float32), CONVERT), s_next, ring, total)
                s, phase = advance(s_next, phase_next, 1, STAGES)
                begin += 2
        for g in range(begin, last, STRIDE):
            scale = d.to(gl.float32)
            d = gl.load(d_at + gl.minimum(g + STRIDE, G - 1))
            acc = multiply(fragments(piece, s, phase, ring, ROW_TILES, MMA), s, ring, MMA, CONVERT)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            total = accumulate(times_d(acc, scale, CONVERT), s, ring, total)
            s, phase = advance(s, phase, STRIDE, STAGES)
        if STRIDE > 1:
            # The others hand their sums to the first one, which adds them in order.
            if which > 0:
                mbarrier.wait(taken, (round & 1) ^ 1)
                totals_smem.index(which - 1).store(total)
                mbarrier.arrive(given)
            else:
                mbarrier.wait(given, round & 1)
                for other in gl.static_range(STRIDE - 1):
                    total += totals_smem.index(other).load(MMA)
                mbarrier.arrive(taken)
            round += 1
        if STRIDE == 1 or which == 0:
            gdc_wait()
            n = n0 + gl.arange(0, 64, gl.SliceLayout(1, OUT))
            m = tm * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
            out_at = out_ptr + m.to(gl.int64)[None, :] * N + n[:, None]
            inside = (n < N)[:, None] & (m < M)[None, :]
            if SPLIT == 1:
                gl.store(out_at, gl.convert_layout(total.to(out_ptr.dtype.element_ty), OUT), mask=inside)
            else:
                # Whoever comes last adds the parts, in their order: the result does not depend on who that is.
                place_of = tile * ROW_TILES + piece
                parts_at = parts_ptr + place_of.to(gl.int64) * (SPLIT * 64 * BLOCK_M)
                parts_at += row[:, None] * BLOCK_M + col[None, :]
                gl.store(parts_at + (work % SPLIT) * (64 * BLOCK_M), total)
                gl.thread_barrier()
                if gl.atomic_add(done_ptr + place_of, 1, sem="acq_rel") == SPLIT - 1:
                    total = gl.zeros((64, BLOCK_M), gl.float32, MMA)
                    for part in range(SPLIT):
                        total += gl.load(parts_at + part * (64 * BLOCK_M), cache_modifier=".cg")
                    gl.store(out_at, gl.convert_layout(total.to(out_ptr.dtype.element_ty), OUT), mask=inside)
                    gl.store(done_ptr + place_of, 0)


@gluon.jit(do_not_specialize=["M", "G", "stride_xs"])
def pq2_prefill_kernel(
    q_desc, codes_desc, xs_desc, codes_ptr, d_ptr, out_ptr, parts_ptr, done_ptr, M, N, G, stride_xs,
    BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr, ROW_TILES: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    GROUP_M: gl.constexpr, CONVERT: gl.constexpr, AHEAD: gl.constexpr, COPIER: gl.constexpr, REGS: gl.constexpr,
    REGS_COPY: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 * ROW_TILES rows of weights and BLOCK_M tokens, in SPLIT parts along K; see the module."""
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + ROW_TILES * 64 - 1) // (ROW_TILES * 64)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 1, [1, 0])
    TOTALS: gl.constexpr = gl.SwizzledSharedLayout(2, 4, 8, [1, 0])
    q_smem = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, 128], q_desc.layout)
    if COPIER:
        codes_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * ROW_TILES, 64, 32], PLAIN)
    else:
        codes_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * ROW_TILES, 64, 32], codes_desc.layout)
    xs_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], xs_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        # One arrival is the copying of activations; 32 are those of the lanes that copy code bytes.
        mbarrier.init(full.index(s), count=33 if COPIER else 1)
        mbarrier.init(empty.index(s), count=ROW_TILES)
    given = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if CONSUMERS > ROW_TILES:
        totals_smem = gl.allocate_shared_memory(gl.float32, [CONSUMERS - 1, 64, BLOCK_M], TOTALS)
        mbarrier.init(given, count=CONSUMERS - 1)
        mbarrier.init(taken, count=1)
    else:
        totals_smem = xs_smem
    ring = (q_smem, codes_smem, xs_smem, full, empty)
    exchange = (totals_smem, given, taken)
    gdc_launch_dependents()
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (0, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (produce, (q_desc, codes_desc, xs_desc, ring, stride_xs, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, COPIER, ROW_TILES)),
            (copy_codes, (codes_ptr, ring, N, G, tiles_m, tiles_n, SPLIT, GROUP_M, ROW_TILES)),
        ], [1, 1], [REGS_COPY, REGS_COPY])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (consume, (1, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (produce, (q_desc, codes_desc, xs_desc, ring, stride_xs, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, COPIER, ROW_TILES)),
            (copy_codes, (codes_ptr, ring, N, G, tiles_m, tiles_n, SPLIT, GROUP_M, ROW_TILES)),
        ], [4, 1, 1], [REGS, REGS_COPY, REGS_COPY])  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (consume, (0, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (consume, (1, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (consume, (2, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (produce, (q_desc, codes_desc, xs_desc, ring, stride_xs, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, COPIER, ROW_TILES)),
            (copy_codes, (codes_ptr, ring, N, G, tiles_m, tiles_n, SPLIT, GROUP_M, ROW_TILES)),
        ], [4, 4, 1, 1], [REGS, REGS, REGS_COPY, REGS_COPY])  # fmt: skip
    elif CONSUMERS == 4:
        gl.warp_specialize([
            (consume, (0, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (consume, (1, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (consume, (2, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (consume, (3, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (produce, (q_desc, codes_desc, xs_desc, ring, stride_xs, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, COPIER, ROW_TILES)),
            (copy_codes, (codes_ptr, ring, N, G, tiles_m, tiles_n, SPLIT, GROUP_M, ROW_TILES)),
        ], [4, 4, 4, 1, 1], [REGS, REGS, REGS, REGS_COPY, REGS_COPY])  # fmt: skip
    elif CONSUMERS == 6:
        gl.warp_specialize([
            (consume, (0, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (consume, (1, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (consume, (2, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (consume, (3, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (consume, (4, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (consume, (5, d_ptr, out_ptr, parts_ptr, done_ptr, ring, exchange, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT, AHEAD, ROW_TILES, CONSUMERS)),
            (produce, (q_desc, codes_desc, xs_desc, ring, stride_xs, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, COPIER, ROW_TILES)),
            (copy_codes, (codes_ptr, ring, N, G, tiles_m, tiles_n, SPLIT, GROUP_M, ROW_TILES)),
        ], [4, 4, 4, 4, 4, 1, 1], [REGS, REGS, REGS, REGS, REGS, REGS_COPY, REGS_COPY])  # fmt: skip


_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def prefill(
    x: Quantized,
    weight: Prepared,
    out: torch.Tensor,
    block_m: int,
    consumers: int,
    stages: int,
    split: int = 1,
    row_tiles: int = 0,
    group_m: int = 16,
    per_sm: int = 1,
    convert: bool = False,
    ahead: bool = False,
    copier: bool = True,
    pdl: bool = False,
) -> None:
    m, k = x.q.shape
    n, _ = weight.shape
    count = k // GROUP
    row_tiles = row_tiles or consumers
    split = triton.cdiv(count, triton.cdiv(count, split))
    scales = x.scales.t()
    stride = scales.stride(0)
    if scales.stride(1) != 1 or stride % 4:
        stride = triton.cdiv(m, 4) * 4
        padded = torch.empty(count, stride, dtype=torch.float32, device=out.device)
        padded[:, :m] = scales
        scales = padded
    work = triton.cdiv(m, block_m) * triton.cdiv(n, 64 * row_tiles)
    parts = done = x.sums
    if split > 1:
        parts = torch.empty(work * split * 64 * row_tiles * block_m, dtype=torch.float32, device=out.device)
        key = (out.device, work * row_tiles)
        if key not in _counters:
            _counters[key] = torch.zeros(work * row_tiles, dtype=torch.int32, device=out.device)
        done = _counters[key]
    q_desc = TensorDescriptor(x.q, [m, k], [k, 1], [block_m, 128], gl.NVMMASharedLayout(128, 8, 2))
    codes_desc = TensorDescriptor(weight.codes, [n, k // 4], [k // 4, 1], [64, 32], gl.NVMMASharedLayout(32, 8, 2))
    xs_desc = TensorDescriptor(scales, [(count - 1) * stride + m], [1], [block_m], gl.NVMMASharedLayout(0, 32, 1))
    sms = torch.cuda.get_device_properties(out.device).multi_processor_count
    groups = consumers + 1
    launch = 65536 // per_sm // (groups * 128) // 8 * 8
    copy = 24 if consumers != 2 else 40
    regs = min((launch * groups - copy) // consumers // 8 * 8, 240)
    pq2_prefill_kernel[(min(work * split, per_sm * sms),)](
        q_desc, codes_desc, xs_desc, weight.codes, weight.scales, out, parts, done, m, n, count, stride,
        BLOCK_M=block_m, CONSUMERS=consumers, ROW_TILES=row_tiles, STAGES=stages, SPLIT=split, GROUP_M=group_m,
        CONVERT=convert, AHEAD=ahead, COPIER=copier, REGS=regs, REGS_COPY=copy,
        num_warps=4, launch_pdl=pdl, maxnreg=min(launch, 248),
    )  # fmt: skip
