"""Path `small_gemm`, M = 1 to 16: small unquantised projections (96 x 5120, bf16), split along K over the whole GPU.

Such a matrix has too few rows to keep the GPU busy, so programs take pieces of K each. They leave partial sums in fp32; the
last one to arrive at a block of outputs adds them up, in the order of the pieces and not of arrival: the result is the same
every time. Reference: `reference.small_gemm`; test: tests/kernels/test_paths.py. Switch: PQ2_SMALL_GEMM.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pq2.intrinsics import INTERPRETED

MAX_M = 16
MAX_N = 256
"""Rows of a weight up to which splitting K pays: with more there are programs enough without."""
BLOCK_N = 32
BLOCK_K = 128
PIECES = 20
"""Pieces of K aimed at. On an H200 a 96 x 5120 product at M = 1 takes 4.4 us in 20 pieces, 4.8 and 7.1 in 10 and 40."""


@triton.jit(do_not_specialize=["M"])  # a number of rows that is new to a server is not compiled for
def pq2_small_gemm_kernel(
    x_ptr, w_ptr, bias_ptr, out_ptr, partial_ptr, arrived_ptr, M, N, K, stride_x, PIECES,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A block of BLOCK_N outputs from STEPS * BLOCK_K of K; `arrived` counts the pieces of a block, and is left at zero."""
    block = tl.program_id(0)
    piece = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k = piece * (STEPS * BLOCK_K) + tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(STEPS):
        x = tl.load(x_ptr + m[:, None] * stride_x + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(w_ptr + n[None, :] * K + k[:, None], mask=(n < N)[None, :] & (k < K)[:, None], other=0.0)
        if INTERPRETED:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
        k += BLOCK_K
    whole = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None] * N + n[None, :]
    tl.store(partial_ptr + piece * (M * N) + at, total, mask=whole)
    # Every thread's partial sums must be written before the one that counts says so.
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel")
    if before == PIECES - 1:
        tl.debug_barrier()
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for other in range(PIECES):
            # Past the L1 cache, which does not see what other multiprocessors write.
            total += tl.load(partial_ptr + other * (M * N) + at, mask=whole, other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            total += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=whole)
        tl.store(arrived_ptr + block, 0)


def fits(m: int, n: int) -> bool:
    """Whether the path takes a product of m rows with a weight of n rows."""
    return 1 <= m <= MAX_M and n <= MAX_N


def counters(n: int, device: torch.device) -> torch.Tensor:
    """What a weight of n rows needs beside itself: int32 zeros, a counter a block; one weight, one stream at a time."""
    return torch.zeros(triton.cdiv(n, BLOCK_N), dtype=torch.int32, device=device)


def small_gemm(
    x: torch.Tensor, weight: torch.Tensor, arrived: torch.Tensor, bias: torch.Tensor | None, pieces: int = PIECES
) -> torch.Tensor:
    """Rows of activations times an unquantised weight.

    Args:
        x: bf16, fp16 or fp32 [M, K], M of 1 to 16, rows contiguous.
        weight: Same dtype, [N, K], contiguous.
        arrived: The weight's `counters`.
        bias: [N], or None.
        pieces: Pieces of K to aim at.

    Returns:
        [M, N], same dtype.
    """
    m, k = x.shape
    n = weight.shape[0]
    steps = max(1, k // (pieces * BLOCK_K))
    count = triton.cdiv(k, steps * BLOCK_K)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    partial = torch.empty(count, m, n, dtype=torch.float32, device=x.device)
    pq2_small_gemm_kernel[(triton.cdiv(n, BLOCK_N), count)](
        x, weight, bias if bias is not None else x, out, partial, arrived, m, n, k, x.stride(0), count,
        BLOCK_M=16, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STEPS=steps, HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out
