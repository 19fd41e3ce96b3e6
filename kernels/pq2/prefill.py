"""Path `prefill`, more than 16 rows, on sm_90: int8 tensor cores, the weights decoded into registers.

out[m, n] = sum over groups g of xs[m, g] * d[n, g] * dot_g(w[n], q[m]): dots in int32, exact; the rest in fp32.

A program is a ring of stages in shared memory, one stage a group of 128 along K. One warp fills it by TMA, and each of
CONSUMERS warpgroups multiplies 64 rows of weights, its A operand, with BLOCK_M tokens. Warpgroups do not wait for each other:
while one applies scales, another has the tensor cores. A lane finds its fragment of A by PRMT, four weights at a time, in the
8 code bytes it read: the order `steps` of the activations is made for that, and words of -1, 0, 1 need no correction by sums.

An accumulator starts as the bits of 1.5 * 2^23, so its bits are the float 1.5 * 2^23 + dot: one FMA with d (fp16, so the
product with 1.5 * 2^23 is exact) takes the offset back and multiplies. CONVERT starts at zero and converts instead.

Reference: `reference.matmul_quantized`.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pq2.format import GROUP, Prepared
from pq2.quantize import Quantized

MAGIC = gl.constexpr(0x4B400000)
MAGIC_F = gl.constexpr(12582912.0)
"""1.5 * 2^23, and its bits above."""

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
    """Tile -> token tile and weight tile: GROUP_M token tiles side by side, then the next weight tile."""
    band = tile // (GROUP_M * tiles_n)
    inside = tile % (GROUP_M * tiles_n)
    width = gl.minimum(tiles_m - band * GROUP_M, GROUP_M)
    return band * GROUP_M + inside % width, inside // width


@gluon.jit
def produce(
    q_desc, codes_desc, xs_desc, ring, stride_xs, G, tiles_m, tiles_n, SPLIT: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The warp that fills the ring: a stage is a group of 128 along K."""
    q_smem, codes_smem, xs_smem, full, empty = ring
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    CONSUMERS: gl.constexpr = codes_smem.shape[0] // STAGES
    BYTES: gl.constexpr = BLOCK_M * 132 + CONSUMERS * 2048
    per = (G + SPLIT - 1) // SPLIT
    # Weights are there before the kernel that makes the activations has ended: the first ones are asked for at once.
    work = gl.program_id(0)
    tm, tn = place(work // SPLIT, tiles_m, tiles_n, GROUP_M)
    first = (work % SPLIT) * per
    early = gl.minimum(gl.minimum(first + per, G) - first, STAGES)
    for s in range(early):
        mbarrier.expect(full.index(s), BYTES)
        for c in gl.static_range(CONSUMERS):
            tma.async_copy_global_to_shared(
                codes_desc, [(tn * CONSUMERS + c) * 64, (first + s) * 32], full.index(s),
                codes_smem.index(s * CONSUMERS + c),
            )  # fmt: skip
    gdc_wait()
    step = 0
    s = 0
    phase = 1
    for work in range(gl.program_id(0), tiles_m * tiles_n * SPLIT, gl.num_programs(0)):
        tm, tn = place(work // SPLIT, tiles_m, tiles_n, GROUP_M)
        first = (work % SPLIT) * per
        for g in range(first, gl.minimum(first + per, G)):
            ready = full.index(s)
            if step >= early:
                mbarrier.wait(empty.index(s), phase)
                mbarrier.expect(ready, BYTES)
                for c in gl.static_range(CONSUMERS):
                    tma.async_copy_global_to_shared(
                        codes_desc, [(tn * CONSUMERS + c) * 64, g * 32], ready, codes_smem.index(s * CONSUMERS + c)
                    )
            tma.async_copy_global_to_shared(q_desc, [tm * BLOCK_M, g * 128], ready, q_smem.index(s))
            tma.async_copy_global_to_shared(xs_desc, [g * stride_xs + tm * BLOCK_M], ready, xs_smem.index(s))
            step += 1
            s += 1
            if s == STAGES:
                s = 0
                phase ^= 1


@gluon.jit
def advance(s, phase, STAGES: gl.constexpr):
    """The next stage, and the parity of the round it is filled in."""
    wraps = s == STAGES - 1
    return gl.where(wraps, 0, s + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def begin(which, ring, s, phase, MMA: gl.constexpr, CONVERT: gl.constexpr):
    """Wait for a stage and start the product of its group."""
    q_smem, codes_smem, xs_smem, full, empty = ring
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    CONSUMERS: gl.constexpr = codes_smem.shape[0] // q_smem.shape[0]
    mbarrier.wait(full.index(s), phase)
    a = decode(codes_smem.index(s * CONSUMERS + which).load(codes_layout()), MMA)
    b = q_smem.index(s).permute((1, 0))
    if CONVERT:
        acc = gl.zeros((64, BLOCK_M), gl.int32, MMA)
        acc = warpgroup_mma(a, b, acc, use_acc=False, is_async=True)
    else:
        acc = gl.full((64, BLOCK_M), MAGIC, gl.int32, MMA)
        acc = warpgroup_mma(a, b, acc, is_async=True)
    return acc


@gluon.jit
def end(acc, total, d, ring, s, MMA: gl.constexpr, CONVERT: gl.constexpr):
    """Wait for the product, free the stage, and add the product times both scales."""
    q_smem, codes_smem, xs_smem, full, empty = ring
    acc = warpgroup_mma_wait(0, deps=(acc,))
    xs = xs_smem.index(s).load(gl.SliceLayout(0, MMA))
    mbarrier.arrive(empty.index(s))
    d = d.to(gl.float32)
    scale = gl.broadcast(d[:, None], total)[0]
    if CONVERT:
        part = acc.to(gl.float32) * scale
    else:
        offset = gl.broadcast((d * -MAGIC_F)[:, None], total)[0]
        part = gl.fma(acc.to(gl.float32, bitcast=True), scale, offset)
    return gl.fma(part, gl.broadcast(xs[None, :], total)[0], total)


@gluon.jit
def consume(
    which, d_ptr, out_ptr, parts_ptr, done_ptr, ring, M, N, G, tiles_m, tiles_n,
    SPLIT: gl.constexpr, GROUP_M: gl.constexpr, CONVERT: gl.constexpr,
):  # fmt: skip
    """A warpgroup that multiplies 64 rows of weights, `which` of the tile's, with the tile's tokens."""
    q_smem, codes_smem, xs_smem, full, empty = ring
    STAGES: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = q_smem.shape[1]
    CONSUMERS: gl.constexpr = codes_smem.shape[0] // STAGES
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    per = (G + SPLIT - 1) // SPLIT
    row = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    col = gl.arange(0, BLOCK_M, gl.SliceLayout(0, MMA))
    s = 0
    phase = 0
    for work in range(gl.program_id(0), tiles_m * tiles_n * SPLIT, gl.num_programs(0)):
        tile = work // SPLIT
        tm, tn = place(tile, tiles_m, tiles_n, GROUP_M)
        first = (work % SPLIT) * per
        n0 = (tn * CONSUMERS + which) * 64
        d_at = d_ptr + gl.minimum(n0 + row, N - 1).to(gl.int64) * G
        total = gl.zeros((64, BLOCK_M), gl.float32, MMA)
        last = gl.minimum(first + per, G)
        d_next = gl.load(d_at + gl.minimum(first, G - 1))
        for g in range(first, last):
            d = d_next
            d_next = gl.load(d_at + gl.minimum(g + 1, G - 1))
            acc = begin(which, ring, s, phase, MMA, CONVERT)
            total = end(acc, total, d, ring, s, MMA, CONVERT)
            s, phase = advance(s, phase, STAGES)
        gdc_wait()
        n = n0 + gl.arange(0, 64, gl.SliceLayout(1, OUT))
        m = tm * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
        out_at = out_ptr + m.to(gl.int64)[None, :] * N + n[:, None]
        inside = (n < N)[:, None] & (m < M)[None, :]
        if SPLIT == 1:
            value = gl.convert_layout(total.to(out_ptr.dtype.element_ty), OUT)
            gl.store(out_at, value, mask=inside)
        else:
            piece = tile * CONSUMERS + which
            parts_at = parts_ptr + piece.to(gl.int64) * (SPLIT * 64 * BLOCK_M) + row[:, None] * BLOCK_M + col[None, :]
            gl.store(parts_at + (work % SPLIT) * (64 * BLOCK_M), total)
            gl.thread_barrier()
            if gl.atomic_add(done_ptr + piece, 1, sem="acq_rel") == SPLIT - 1:
                total = gl.zeros((64, BLOCK_M), gl.float32, MMA)
                for part in range(SPLIT):
                    total += gl.load(parts_at + part * (64 * BLOCK_M), cache_modifier=".cg")
                value = gl.convert_layout(total.to(out_ptr.dtype.element_ty), OUT)
                gl.store(out_at, value, mask=inside)
                gl.store(done_ptr + piece, 0)


@gluon.jit(do_not_specialize=["M", "G", "stride_xs"])
def pq2_prefill_kernel(
    q_desc, codes_desc, xs_desc, d_ptr, out_ptr, parts_ptr, done_ptr, M, N, G, stride_xs,
    BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, GROUP_M: gl.constexpr,
    CONVERT: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 * CONSUMERS rows of weights and BLOCK_M tokens, one warpgroup for each 64 rows and a warp that copies."""
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + CONSUMERS * 64 - 1) // (CONSUMERS * 64)
    q_smem = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, 128], q_desc.layout)
    codes_smem = gl.allocate_shared_memory(gl.uint8, [STAGES * CONSUMERS, 64, 32], codes_desc.layout)
    xs_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], xs_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=CONSUMERS)
    gdc_launch_dependents()
    ring = (q_smem, codes_smem, xs_smem, full, empty)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (consume, (0, d_ptr, out_ptr, parts_ptr, done_ptr, ring, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT)),
            (produce, (q_desc, codes_desc, xs_desc, ring, stride_xs, G, tiles_m, tiles_n, SPLIT, GROUP_M)),
        ], [1], [24])  # fmt: skip
    elif CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (0, d_ptr, out_ptr, parts_ptr, done_ptr, ring, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT)),
            (consume, (1, d_ptr, out_ptr, parts_ptr, done_ptr, ring, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT)),
            (produce, (q_desc, codes_desc, xs_desc, ring, stride_xs, G, tiles_m, tiles_n, SPLIT, GROUP_M)),
        ], [4, 1], [REGS, 24])  # fmt: skip
    elif CONSUMERS == 3:
        gl.warp_specialize([
            (consume, (0, d_ptr, out_ptr, parts_ptr, done_ptr, ring, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT)),
            (consume, (1, d_ptr, out_ptr, parts_ptr, done_ptr, ring, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT)),
            (consume, (2, d_ptr, out_ptr, parts_ptr, done_ptr, ring, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT)),
            (produce, (q_desc, codes_desc, xs_desc, ring, stride_xs, G, tiles_m, tiles_n, SPLIT, GROUP_M)),
        ], [4, 4, 1], [REGS, REGS, 24])  # fmt: skip
    elif CONSUMERS == 4:
        gl.warp_specialize([
            (consume, (0, d_ptr, out_ptr, parts_ptr, done_ptr, ring, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT)),
            (consume, (1, d_ptr, out_ptr, parts_ptr, done_ptr, ring, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT)),
            (consume, (2, d_ptr, out_ptr, parts_ptr, done_ptr, ring, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT)),
            (consume, (3, d_ptr, out_ptr, parts_ptr, done_ptr, ring, M, N, G, tiles_m, tiles_n,
                       SPLIT, GROUP_M, CONVERT)),
            (produce, (q_desc, codes_desc, xs_desc, ring, stride_xs, G, tiles_m, tiles_n, SPLIT, GROUP_M)),
        ], [4, 4, 4, 1], [REGS, REGS, REGS, 24])  # fmt: skip


_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def prefill(
    x: Quantized,
    weight: Prepared,
    out: torch.Tensor,
    block_m: int,
    consumers: int,
    stages: int,
    split: int = 1,
    group_m: int = 16,
    per_sm: int = 1,
    convert: bool = False,
    pdl: bool = False,
) -> None:
    """Any number of rows times a weight, on sm_90.

    Args:
        x: [M, K], steps order. Scales that `activations.quantize_rows` laid out are used in place, others copied.
        weight: [N, K].
        out: [M, N], written.
        block_m: Tokens a program: 32, 64 or 128.
        consumers: Warpgroups of 64 weight rows a program, 1 to 4; 1 only with per_sm above 1.
        stages: Groups in the ring; block_m * 132 + consumers * 2048 bytes each.
        split: Parts that K is cut into; their sums are added in a fixed order. Products that run at once need their own
            process: the counters of arrived parts are shared.
        group_m: Token tiles that lie side by side in the order of programs.
        per_sm: Programs a multiprocessor.
        convert: Convert dots to fp32 instead of starting accumulators at 1.5 * 2^23.
        pdl: Start before the kernel ahead has ended, and read its results when it has.
    """
    m, k = x.q.shape
    n, _ = weight.shape
    count = k // GROUP
    split = triton.cdiv(count, triton.cdiv(count, split))
    scales = x.scales.t()
    stride = scales.stride(0)
    if scales.stride(1) != 1 or stride % 4:
        # TMA starts at multiples of 16 bytes only.
        stride = triton.cdiv(m, 4) * 4
        padded = torch.empty(count, stride, dtype=torch.float32, device=out.device)
        padded[:, :m] = scales
        scales = padded
    work = triton.cdiv(m, block_m) * triton.cdiv(n, 64 * consumers)
    parts = done = x.sums
    if split > 1:
        parts = torch.empty(work * split * 64 * consumers * block_m, dtype=torch.float32, device=out.device)
        key = (out.device, work * consumers)
        if key not in _counters:
            _counters[key] = torch.zeros(work * consumers, dtype=torch.int32, device=out.device)
        done = _counters[key]
    q_desc = TensorDescriptor(x.q, [m, k], [k, 1], [block_m, 128], gl.NVMMASharedLayout(128, 8, 2))
    codes_desc = TensorDescriptor(weight.codes, [n, k // 4], [k // 4, 1], [64, 32], gl.NVMMASharedLayout(32, 8, 2))
    xs_desc = TensorDescriptor(scales, [(count - 1) * stride + m], [1], [block_m], gl.NVMMASharedLayout(0, 32, 1))
    sms = torch.cuda.get_device_properties(out.device).multi_processor_count
    # What the copying warp gives up of its registers, the others have more.
    regs = {2: 232, 3: 160, 4: 112}.get(consumers, 0)
    if per_sm > 1:
        regs = 65536 // per_sm // (128 * (consumers + 1)) // 8 * 8
    pq2_prefill_kernel[(min(work * split, per_sm * sms),)](
        q_desc, codes_desc, xs_desc, weight.scales, out, parts, done, m, n, count, stride,
        BLOCK_M=block_m, CONSUMERS=consumers, STAGES=stages, SPLIT=split, GROUP_M=group_m, CONVERT=convert, REGS=regs,
        num_warps=4, launch_pdl=pdl, **({"maxnreg": regs} if per_sm > 1 else {}),
    )  # fmt: skip
