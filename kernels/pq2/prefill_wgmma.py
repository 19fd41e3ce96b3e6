"""Path `prefill` on sm_90: more rows than decoding has, by wgmma on int8, the weights decoded into its registers. Gluon.

out[m, n] = sum over groups g of xs[m, g] * d[n, g] * dot_g(w[n], q[m]): dots in int32, exact; the rest in fp32.

A program is a ring of stages in shared memory, SG groups of 128 along K each. One warp fills it with activations and their
scales (TMA), one with code bytes (cp.async), and each of CONSUMERS warpgroups multiplies 64 rows of the weight, its
operand A, with BLOCK_M tokens; warpgroups do not wait for each other. A lane finds its fragment of A in the 8 code bytes
that it read, by PRMT: four weights of -1, 0, 1 at a time, which need no sum taken back. The order `steps` of the
activations is made for that.

Every dot begins at 2^17, by a wgmma of constants, and so is positive: its bits read as fp32 are a denormal number, which a
fused multiply-add takes as it is. Sums are kept 2^-39 too small until they are stored, so terms below 1e-26 lose digits.

Reference: `reference.matmul`; test: tests/kernels/test_prefill.py. Switch: PQ2_PREFILL.
"""

from __future__ import annotations

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pq2 import plans
from pq2.compat import bulk_copy, copy_async, mbarrier_arrive
from pq2.errors import PathUnavailable
from pq2.format import GROUP, Prepared
from pq2.quantize import Steps, padded
from pq2.ring import combine
from pq2.tiles import arrive_copied, bases, decode, place

ROWS = gl.constexpr(64)
"""Rows of the weight a warpgroup: those of a wgmma."""
Q_LAYOUT = gl.NVMMASharedLayout(128, 8, 2)
XS_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)
BEGIN = gl.constexpr(float(2**17))
"""Where every dot product begins: 32 products of 64 and 64. It is more than a group's largest, so none is negative."""
DENORMAL = gl.constexpr(2.0**-149)
"""What the integer 1 is when its bits are read as fp32."""
SCALE = gl.constexpr(2.0**110)
"""What brings scaled dots back among the normal numbers."""
FEWEST_REGISTERS = 24
"""The fewest registers of a thread that a warpgroup can keep: those that copy give the others up."""


@gluon.constexpr_function
def codes_layout():
    """Code bytes [64, 32] of a warpgroup: a lane has 8 bytes of a row, where its fragments of A lie."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 32])


@gluon.constexpr_function
def xs_layout(BLOCK_M):
    """Scales [BLOCK_M] as they lie: a lane has four in a row of each 16, those of its columns of an accumulator."""
    registers = [[1], [2], *bases(BLOCK_M // 16, [16])]
    return gl.DistributedLinearLayout(registers, [[4], [8], [0], [0], [0]], [[0], [0]], [], [BLOCK_M])


@gluon.constexpr_function
def worker(consumer, copier, CONSUMERS):
    """What each of the program's parts has, beside the first: warpgroups that multiply, then the two warps that copy."""
    return [consumer] * (CONSUMERS - 1) + [copier] * 2


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next stage, and the parity of the round it is filled in."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def copy_activations(q_desc, xs_desc, ring, steps, tiles_m, tiles_n, split, band):
    """The warp that asks for activations and their scales."""
    q_ring, xs_ring, _, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    SG: gl.constexpr = q_ring.shape[0] // STAGES
    BLOCK_M: gl.constexpr = q_ring.shape[1]
    per = (steps + split - 1) // split
    gdc_wait()
    stage = 0
    phase = 1
    for work in range(gl.program_id(0), tiles_m * tiles_n * split, gl.num_programs(0)):
        tile_m = place(work // split, tiles_m, tiles_n, band)[0]
        first = (work % split) * per
        for step in range(first, gl.minimum(first + per, steps)):
            mbarrier.wait(empty.index(stage), phase)
            ready = full.index(stage)
            mbarrier.expect(ready, SG * (BLOCK_M * 128 + xs_ring.shape[2] * 4))
            for i in gl.static_range(SG):
                group = step * SG + i
                slot = stage * SG + i
                bulk_copy(q_desc, [tile_m * BLOCK_M, group * 128], ready, q_ring.index(slot))
                bulk_copy(xs_desc, [group, tile_m * BLOCK_M], ready, xs_ring.index(slot))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def copy_codes(codes_ptr, ring, N, G, steps, tiles_m, tiles_n, split, band):
    """The warp that copies code bytes. Weights are there before the kernel that makes the activations has ended."""
    q_ring, _, codes_ring, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    SG: gl.constexpr = q_ring.shape[0] // STAGES
    CONSUMERS: gl.constexpr = codes_ring.shape[0] // q_ring.shape[0]
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [1, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    byte = gl.arange(0, 32, gl.SliceLayout(0, COPY))
    per = (steps + split - 1) // split
    stage = 0
    phase = 1
    for work in range(gl.program_id(0), tiles_m * tiles_n * split, gl.num_programs(0)):
        tile_n = place(work // split, tiles_m, tiles_n, band)[1]
        first = (work % split) * per
        # Rows beyond the weight read its last one again; what comes of them is not stored.
        tile_at = codes_ptr + (tile_n * (CONSUMERS * ROWS)).to(gl.int64) * (G * 32)
        last_row = N - 1 - tile_n * (CONSUMERS * ROWS)
        for step in range(first, gl.minimum(first + per, steps)):
            mbarrier.wait(empty.index(stage), phase)
            for c in gl.static_range(CONSUMERS):
                row_at = (gl.minimum(row + c * ROWS, last_row) * (G * 32))[:, None] + byte[None, :]
                for i in gl.static_range(SG):
                    slot = (stage * SG + i) * CONSUMERS + c
                    copy_async(codes_ring.index(slot), tile_at + (step * SG + i) * 32 + row_at)
            arrive_copied(full.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def release(barrier):
    """Each thread says for itself that it has read a stage; the barrier counts the threads.

    It has when what it read has been used, and not before: what a warp has asked of shared memory may still be queued
    behind copies of code bytes while the stage is filled again. So a stage is released in the step after its own.
    """
    mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def load_scales(d_at, step, SG: gl.constexpr):
    """The weight's scales of a step's groups."""
    found = ()
    for i in gl.static_range(SG):
        found = found + (gl.load(d_at + (step * SG + i)),)
    return found


@gluon.jit
def consume(which, begin, d_ptr, out_ptr, ring, M, N, G, steps, tiles_m, tiles_n, split, band):
    """The warpgroup that multiplies the tile's rows of the weight from 64 * which on."""
    q_ring, xs_ring, codes_ring, full, empty = ring
    STAGES: gl.constexpr = full.shape[0]
    SG: gl.constexpr = q_ring.shape[0] // STAGES
    CONSUMERS: gl.constexpr = codes_ring.shape[0] // q_ring.shape[0]
    BLOCK_M: gl.constexpr = q_ring.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    # Eight lanes have 8 rows of a token: 32 bytes in fp32, which is stored as it lies; half as much is put together first.
    WIDE: gl.constexpr = out_ptr.dtype.element_ty == gl.float32
    OUT: gl.constexpr = MMA if WIDE else gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    per = (steps + split - 1) // split
    row = gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
    stage = 0
    phase = 0
    for work in range(gl.program_id(0), tiles_m * tiles_n * split, gl.num_programs(0)):
        tile_m, tile_n = place(work // split, tiles_m, tiles_n, band)
        part = work % split
        first = part * per
        first_row = (tile_n * CONSUMERS + which) * ROWS
        d_at = d_ptr + gl.minimum(first_row + row, N - 1).to(gl.int64) * G
        total = gl.zeros((ROWS, BLOCK_M), gl.float32, MMA)
        d = load_scales(d_at, gl.minimum(first, steps - 1), SG)
        for step in range(first, gl.minimum(first + per, steps)):
            coming = load_scales(d_at, gl.minimum(step + 1, steps - 1), SG)
            mbarrier.wait(full.index(stage), phase)
            if step > first:
                release(empty.index(gl.where(stage == 0, STAGES, stage) - 1))
            # The products of all groups are under way before the first is scaled.
            dots = ()
            for i in gl.static_range(SG):
                slot = stage * SG + i
                dot = gl.zeros((ROWS, BLOCK_M), gl.int32, MMA)
                same = begin.index(i)  # of its own: two that are alike would be made one, and copied
                dot = warpgroup_mma(
                    same.slice(0, ROWS), same.slice(0, BLOCK_M).permute((1, 0)), dot, use_acc=False, is_async=True
                )
                a = decode(codes_ring.index(slot * CONSUMERS + which).load(codes_layout()), ROWS, MMA)
                dots = dots + (warpgroup_mma(a, q_ring.index(slot).permute((1, 0)), dot, is_async=True),)
            for i in gl.static_range(SG):
                if i < SG - 1:
                    dots = warpgroup_mma_wait(SG - 1 - i, deps=dots)
                    dot = dots[0]
                    dots = dots[1:]
                else:
                    dot = warpgroup_mma_wait(0, deps=dots)
                stored = xs_ring.index(stage * SG + i).reshape((xs_ring.shape[2],)).slice(0, BLOCK_M)
                stored = stored.load(xs_layout(BLOCK_M))
                xs = gl.permute(gl.reshape(stored, (BLOCK_M // 16, 4, 2, 2)), (0, 2, 1, 3))
                xs = gl.convert_layout(gl.reshape(xs, (BLOCK_M,)), gl.SliceLayout(0, MMA), assert_trivial=True)
                scale = gl.broadcast(d[i].to(gl.float32)[:, None], total)[0]
                scaled = gl.fma(dot.to(gl.float32, bitcast=True), scale * SCALE, scale * -(BEGIN * SCALE * DENORMAL))
                total = gl.fma(scaled, gl.broadcast(xs[None, :], total)[0], total)
            d = coming
            stage, phase = advance(stage, phase, STAGES)
        if first < steps:
            release(empty.index(gl.where(stage == 0, STAGES, stage) - 1))
        total *= 1 / (SCALE * DENORMAL)
        gdc_wait()  # the kernel before may still read what is written over here
        n = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
        m = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
        out_at = out_ptr + (part * M + m).to(gl.int64)[None, :] * N + n[:, None]
        value = gl.convert_layout(total.to(out_ptr.dtype.element_ty), OUT)
        gl.store(out_at, value, mask=(n < N)[:, None] & (m < M)[None, :])


@gluon.jit(do_not_specialize=["M", "G", "split", "band"])
def pq2_prefill_wgmma_kernel(
    q_desc, xs_desc, codes_ptr, d_ptr, out_ptr, M, N, G, split, band, BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr, SG: gl.constexpr, REGISTERS: gl.constexpr, COPY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 * CONSUMERS rows of the weight and BLOCK_M tokens; out [split, M, N]."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 1, [1, 0])
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + CONSUMERS * ROWS - 1) // (CONSUMERS * ROWS)
    steps = G // SG
    q_ring = gl.allocate_shared_memory(gl.int8, [STAGES * SG, BLOCK_M, 128], q_desc.layout)
    # Scales of 32 tokens at least: bulk copies go to multiples of 128 bytes.
    xs_ring = gl.allocate_shared_memory(gl.float32, [STAGES * SG, 1, xs_desc.block_shape[1]], xs_desc.layout)
    codes_ring = gl.allocate_shared_memory(gl.uint8, [STAGES * SG * CONSUMERS, ROWS, 32], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The warp that asks for activations arrives once, each lane of the one that copies code bytes for itself.
        mbarrier.init(full.index(stage), count=33)
        mbarrier.init(empty.index(stage), count=128 * CONSUMERS)
    FILL: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [4, 1], [1, 0])
    begin = gl.allocate_shared_memory(gl.int8, [SG, 128, 32], gl.NVMMASharedLayout(32, 8, 2))
    for i in gl.static_range(SG):
        begin.index(i).store(gl.full((128, 32), 64, gl.int8, FILL))
    fence_async_shared()
    ring = (q_ring, xs_ring, codes_ring, full, empty)
    gdc_launch_dependents()
    parts = ()
    for which in gl.static_range(CONSUMERS):
        parts = parts + (which,)
    gl.warp_specialize(
        [
            (consume, (which, begin, d_ptr, out_ptr, ring, M, N, G, steps, tiles_m, tiles_n, split, band))
            for which in parts
        ]
        + [
            (copy_activations, (q_desc, xs_desc, ring, steps, tiles_m, tiles_n, split, band)),
            (copy_codes, (codes_ptr, ring, N, G, steps, tiles_m, tiles_n, split, band)),
        ],
        worker(4, 1, CONSUMERS),
        worker(REGISTERS, COPY_REGISTERS, CONSUMERS),
    )


def prefill_wgmma(
    x: Steps, weight: Prepared, out: torch.Tensor, block_m: int, consumers: int, stages: int, sg: int, split: int,
    band: int, per_sm: int, multiprocessors: int, pdl: bool,
) -> None:  # fmt: skip
    """Any number of rows times a weight, on sm_90.

    Args:
        x: [M, K].
        weight: [N, K], K a multiple of 128 * sg.
        out: [M, N], written.
        block_m: Tokens a tile: 16, 32, 64 or 128.
        consumers: Warpgroups of a program, 64 rows of the weight each.
        stages: Stages of the ring, 2 at least: sg * (block_m * 132 + consumers * 2048) bytes each.
        sg: Groups a stage, whose products are under way together.
        split: Parts of K.
        band: Token tiles that follow each other with the same rows of the weight.
        per_sm: Programs a multiprocessor.
        multiprocessors: How many the GPU has.
        pdl: Programmatic dependent launch.

    Raises:
        PathUnavailable: K does not fit, or the ring is too short.
    """
    m, k = x.q.shape
    n, _ = weight.shape
    if k % (GROUP * sg):
        raise PathUnavailable(
            f"prefill_wgmma: K is {k}, and with {sg} groups a stage it takes multiples of {GROUP * sg}"
        )
    if stages < 2:
        raise PathUnavailable(
            "prefill_wgmma: a ring has 2 stages at least: one is given back when the next one is there"
        )
    target = out if split == 1 else torch.empty(split, m, n, dtype=torch.float32, device=out.device)
    programs = min(triton.cdiv(m, block_m) * triton.cdiv(n, 64 * consumers) * split, per_sm * multiprocessors)
    launched, consumer, copier = registers(consumers, per_sm)
    plans.launch(
        pq2_prefill_wgmma_kernel,
        (programs,),
        (
            TensorDescriptor(x.q, [m, k], [k, 1], [block_m, 128], Q_LAYOUT),
            TensorDescriptor(x.scales, [k // GROUP, padded(m)], [padded(m), 1], [1, max(block_m, 32)], XS_LAYOUT),
            weight.codes, weight.scales, target, m, n, k // GROUP, split, band,
        ),
        {"BLOCK_M": block_m, "CONSUMERS": consumers, "STAGES": stages, "SG": sg, "REGISTERS": consumer,
         "COPY_REGISTERS": copier},
        out.device,
        num_warps=4, maxnreg=launched, enable_fp_fusion=True, launch_pdl=pdl,
    )  # fmt: skip
    if split > 1:
        combine(target, out, pdl)


@functools.cache
def registers(consumers: int, per_sm: int) -> tuple[int, int, int]:
    """Registers of a thread: when a program is launched; then of one that multiplies, and of one that copies."""
    launched = min(65536 // per_sm // (128 * (consumers + 1)) // 8 * 8, 248)
    everything = launched * (consumers + 1)
    consumer = min((everything - FEWEST_REGISTERS) // consumers // 8 * 8, 240)
    return launched, consumer, min(everything - consumers * consumer, 240)
