"""Path `prefill`, more rows than decoding has: tiles in two dimensions by mma m16n8k32 on int8. Gluon.

out[m, n] = sum over groups g of xs[m, g] * d[n, g] * dot_g(w[n], q[m]): dots in int32, exact; the rest in fp32.

A program multiplies BLOCK_N rows of the weight, operand A, with BLOCK_M tokens, a group of 128 along K at a time, through a
ring of stages in shared memory that cp.async fills. A lane finds its fragments of A in the 8 code bytes that it read
(`tiles.decode`). On sm_90 `prefill_wgmma` does the same with wgmma.

Reference: `reference.matmul`; test: tests/kernels/test_prefill.py. Switch: PQ2_PREFILL.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from pq2 import plans
from pq2.compat import commit_group, copy_async, wait_group
from pq2.format import Prepared
from pq2.quantize import Steps
from pq2.tiles import bases, decode, place


@gluon.constexpr_function
def codes_layout(WARPS_N, WARPS_M, BLOCK_N):
    """Code bytes [BLOCK_N, 32]: 8 of a row a lane, where its fragments of A lie; warps that share rows have the same."""
    registers = [[0, 1], [0, 2], [0, 4], [8, 0], *bases(BLOCK_N // (16 * WARPS_N), [16 * WARPS_N, 0])]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    warps = bases(WARPS_M, [0, 0]) + bases(WARPS_N, [16, 0])
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [BLOCK_N, 32])


@gluon.jit
def fill(rings, stage, group, G, q_at, xs_at, codes_at, stride_xs):
    """Ask for a group: activations, their scales and code bytes. Groups beyond K are asked for as an empty commit."""
    q_ring, xs_ring, codes_ring = rings
    if group < G:
        copy_async(q_ring.index(stage), q_at + group * 128)
        copy_async(xs_ring.index(stage), xs_at + group * stride_xs)
        copy_async(codes_ring.index(stage), codes_at + group * 32)
    commit_group()


@gluon.jit(do_not_specialize=["M", "G", "stride_xs", "band"])
def pq2_prefill_kernel(
    q_ptr, xs_ptr, codes_ptr, d_ptr, out_ptr, M, N, G, stride_xs, band, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS_M: gl.constexpr, WARPS_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of the weight by BLOCK_M tokens; out [M, N]."""
    WARPS: gl.constexpr = WARPS_M * WARPS_N
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_N, WARPS_M], [16, 8])
    COPY_Q: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [WARPS, 1], [1, 0])
    COPY_CODES: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [WARPS, 1], [1, 0])
    COPY_XS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, WARPS], [0, 1])
    tile_m, tile_n = place(gl.program_id(0), (M + BLOCK_M - 1) // BLOCK_M, (N + BLOCK_N - 1) // BLOCK_N, band)
    first_m = tile_m * BLOCK_M
    first_n = tile_n * BLOCK_N
    # Rows beyond either matrix read its last one again; what comes of them is not stored.
    q_row = gl.minimum(first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY_Q)), M - 1)
    q_at = q_ptr + q_row.to(gl.int64)[:, None] * (G * 128) + gl.arange(0, 128, gl.SliceLayout(0, COPY_Q))[None, :]
    token = gl.minimum(first_m + gl.arange(0, BLOCK_M, COPY_XS), M - 1)
    xs_at = xs_ptr + (token // 16 * 16 + token % 8 // 2 * 4 + token % 16 // 8 * 2 + token % 2)
    code_row = gl.minimum(first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY_CODES)), N - 1)
    byte = gl.arange(0, 32, gl.SliceLayout(0, COPY_CODES))
    codes_at = codes_ptr + code_row.to(gl.int64)[:, None] * (G * 32) + byte[None, :]
    row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, MMA))
    d_at = d_ptr + gl.minimum(first_n + row, N - 1).to(gl.int64) * G
    q_ring = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_M, 128], gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
    xs_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    codes_ring = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_N, 32], gl.SwizzledSharedLayout(16, 1, 1, [1, 0]))
    rings = (q_ring, xs_ring, codes_ring)
    for stage in gl.static_range(STAGES - 1):
        fill(rings, stage, stage, G, q_at, xs_at, codes_at, stride_xs)
    total = gl.zeros((BLOCK_N, BLOCK_M), gl.float32, MMA)
    stage = 0
    for group in range(G):
        d = gl.load(d_at + group).to(gl.float32)
        wait_group(STAGES - 2)
        # All warps have read the stage before this one, so it is filled again.
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        fill(rings, before, group + STAGES - 1, G, q_at, xs_at, codes_at, stride_xs)
        a = decode(codes_ring.index(stage).load(codes_layout(WARPS_N, WARPS_M, BLOCK_N)), BLOCK_N, MMA)
        b = q_ring.index(stage).permute((1, 0)).load(gl.DotOperandLayout(1, MMA, 4))
        dot = mma_v2(a, b, gl.zeros((BLOCK_N, BLOCK_M), gl.int32, MMA))
        xs = xs_ring.index(stage).load(gl.SliceLayout(0, MMA))
        scaled = dot.to(gl.float32) * gl.broadcast(d[:, None], total)[0]
        total = gl.fma(scaled, gl.broadcast(xs[None, :], total)[0], total)
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OUT))
    m = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
    value = gl.convert_layout(total.to(out_ptr.dtype.element_ty), OUT)
    gl.store(out_ptr + m.to(gl.int64)[None, :] * N + n[:, None], value, mask=(n < N)[:, None] & (m < M)[None, :])


def prefill(
    x: Steps, weight: Prepared, out: torch.Tensor, block_m: int, block_n: int, warps_m: int, warps_n: int,
    stages: int, band: int,
) -> None:  # fmt: skip
    """Any number of rows times a weight.

    Args:
        x: [M, K].
        weight: [N, K].
        out: [M, N], written.
        block_m: Tokens a program, 8 * warps_m at least.
        block_n: Rows of the weight a program, 16 * warps_n at least.
        warps_m: Warps that share the tokens of a tile.
        warps_n: Warps that share its rows.
        stages: Groups in the ring, 2 at least: block_m * 132 + block_n * 32 bytes each.
        band: Token tiles that follow each other with the same rows of the weight.
    """
    m, k = x.q.shape
    n, _ = weight.shape
    plans.launch(
        pq2_prefill_kernel,
        (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),),
        (x.q, x.scales, weight.codes, weight.scales, out, m, n, k // 128, x.scales.shape[1], band),
        {"BLOCK_M": block_m, "BLOCK_N": block_n, "WARPS_M": warps_m, "WARPS_N": warps_n, "STAGES": stages},
        out.device,
        num_warps=warps_m * warps_n,
        enable_fp_fusion=True,
    )
