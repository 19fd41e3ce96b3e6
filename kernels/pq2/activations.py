"""The quantising kernel: floating rows [M, K] -> `quantize.Quantized`, `Fragments` or `Steps`, rotated first where asked.

Reference: `quantize.quantize` (without a rotation bit for bit); test: tests/kernels/test_paths.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pq2 import plans, quantize
from pq2.errors import PathUnavailable
from pq2.format import GROUP, groups
from pq2.intrinsics import round_half_even
from pq2.quantize import Fragments, Quantized, Steps, check_rotation, padded

ROTATIONS = (256, 512, 1024, 2048, 4096)
"""Rotation blocks the kernel has: products of two factors of 16 to 64, which is what its two matrix products need."""
GROUPS_PER_PROGRAM = 8
FEW = 16
"""Up to so many rows a program is one warp with two groups: nothing crosses warps and so nothing waits at a barrier, and it
begins where a ring of the product before has left few registers."""
START_BITS = tl.constexpr(quantize.START_BITS)


@triton.jit
def sylvester(size: tl.constexpr):
    """The Sylvester matrix of +1 and -1, fp32 [size, size]: the parity of the bits that row and column share."""
    row = tl.arange(0, size)
    shared = row[:, None] & row[None, :]
    shared ^= shared >> 4
    shared ^= shared >> 2
    shared ^= shared >> 1
    return (1 - 2 * (shared & 1)).to(tl.float32)


@triton.jit
def joined(q, GROUPS: tl.constexpr, BYTES: tl.constexpr):
    """int8 values [GROUPS, 128] in int32 -> of each 8, those 8 / BYTES apart as a word: [GROUPS, 16, 8 / BYTES]."""
    parts = tl.reshape(q & 255, (GROUPS, 16, BYTES, 8 // BYTES))
    return tl.sum(parts << (tl.arange(0, BYTES) * 8)[None, None, :, None], axis=2)


@triton.jit
def pq2_quantize_kernel(
    x_ptr, signs_ptr, q_ptr, scales_ptr, sums_ptr, stride_x, K,
    GROUPS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TOKENS: tl.constexpr, STEPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program quantises GROUPS groups of a row; LEFT * RIGHT is the rotation block they make up, LEFT 0 is none.

    TOKENS 0 stores rows in the order `planes`, or `Steps`; 8 or 16, `Fragments` tiled for so many: scales_ptr is their meta
    then.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    m = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUPS
    count = K // 128
    if LEFT > 0:
        places = tl.arange(0, LEFT)[:, None] * RIGHT + tl.arange(0, RIGHT)[None, :]
        at = first * 128 + places
        x = tl.load(x_ptr + m * stride_x + at).to(tl.float32) * tl.load(signs_ptr + at).to(tl.float32)
        x = tl.dot(x, sylvester(RIGHT), input_precision="ieee")
        x = tl.dot(sylvester(LEFT), x, input_precision="ieee")
        # LEFT * RIGHT is a power of two; its root may not be one.
        x = x * (1.0 / tl.sqrt(tl.full([1, 1], LEFT * RIGHT, tl.float32)))
        x = tl.reshape(x, (GROUPS, 128))
    else:
        places = tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
        at = first * 128 + places
        x = tl.load(x_ptr + m * stride_x + at, mask=at < K, other=0.0).to(tl.float32)
    # The largest magnitude as the integer that its bits are: NaN is above all others there; of floats `tl.max` drops it.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1).to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full([GROUPS], 127.0, tl.float32))
    safe = tl.where(scale > 0, scale, 1.0)
    q = round_half_even(tl.div_rn(x, tl.broadcast_to(safe[:, None], (GROUPS, 128))))
    # Zero where it is NaN, as in the reference: times a scale that is then NaN or infinite, every product is NaN.
    q = tl.where(q == q, tl.minimum(tl.maximum(q, -127.0), 127.0), 0.0).to(tl.int32)
    group = first + tl.arange(0, GROUPS)
    inside = group < count
    # Bytes that belong next to each other are put together where they are, in the thread that loaded 8 values in a row:
    # lane and place of the 8.
    lane = tl.arange(0, 16)[None, :, None]
    if STEPS:
        place = m // 16 * 16 + m % 8 // 2 * 4 + m % 16 // 8 * 2 + m % 2
        tl.store(scales_ptr + group.to(tl.int64) * ((tl.num_programs(0) + 15) // 16 * 16) + place, scale, mask=inside)
        word = joined(q, GROUPS, 4)
        last = tl.arange(0, 2)[None, None, :]
        place = last * 16 + lane % 2 * 8 + lane // 2 % 2 * 4 + lane // 8 * 2 + lane // 4 % 2
        at = (m * K) // 4 + group[:, None, None] * 32 + place
        tl.store(q_ptr.to(tl.pointer_type(tl.int32)) + at, word, mask=inside[:, None, None])
        return
    half = joined(q, GROUPS, 2).to(tl.int16)
    last = tl.arange(0, 4)[None, None, :]
    if TOKENS:
        meta = (group * TOKENS + m) * 2
        tl.store(scales_ptr + meta, scale.to(tl.int32, bitcast=True), mask=inside)
        tl.store(scales_ptr + meta + 1, START_BITS - tl.sum(q, axis=1), mask=inside)
        place = last // 2 * (TOKENS * 32) + lane // 4 * 8 + last % 2 * 4 + lane % 4
        at = group[:, None, None] * (TOKENS * 64) + m * 32 + place
    else:
        tl.store(scales_ptr + m * count + group, scale, mask=inside)
        tl.store(sums_ptr + m * count + group, tl.sum(q, axis=1), mask=inside)
        at = (m * K) // 2 + group[:, None, None] * 64 + last * 16 + lane
    tl.store(q_ptr.to(tl.pointer_type(tl.int16)) + at, half, mask=inside[:, None, None])


def quantize_rows(
    x: torch.Tensor, signs: torch.Tensor | None = None, rotation: int = 0, pdl: bool = False
) -> Quantized:
    """Quantise activations on the GPU, in the order `planes`.

    Args:
        x: bf16, fp16 or fp32 [M, K], rows contiguous; K a multiple of 128.
        signs: int8 [K] of +1 and -1, for a rotation.
        rotation: Its block size; 0 is none.
        pdl: Programmatic dependent launch, which sm_90 has.

    Raises:
        FormatError: K or the rotation does not fit.
        PathUnavailable: A rotation block that the kernel does not have.
    """
    m, k = x.shape
    count = groups(k)
    quantized = Quantized(
        torch.empty(m, k, dtype=torch.int8, device=x.device),
        torch.empty(m, count, dtype=torch.float32, device=x.device),
        torch.empty(m, count, dtype=torch.int32, device=x.device),
    )
    _launch(x, signs, rotation, quantized, 0, False, pdl)
    return quantized


def quantize_steps(x: torch.Tensor, signs: torch.Tensor | None = None, rotation: int = 0, pdl: bool = False) -> Steps:
    """Quantise many rows, for the kernels of prefill; otherwise as `quantize_rows`."""
    m, k = x.shape
    found = Steps(
        torch.empty(m, k, dtype=torch.int8, device=x.device),
        torch.empty(groups(k), padded(m), dtype=torch.float32, device=x.device),
    )
    _launch(x, signs, rotation, (*found, found.scales), 0, True, pdl)
    return found


def quantize_fragments(
    x: torch.Tensor, tokens: int, signs: torch.Tensor | None = None, rotation: int = 0, pdl: bool = False
) -> Fragments:
    """Quantise at most `tokens` (8 or 16) rows for the kernels on tensor cores; otherwise as `quantize_rows`."""
    _, k = x.shape
    count = groups(k)
    found = Fragments(
        torch.empty(count, 2, tokens, 64, dtype=torch.int8, device=x.device),
        torch.empty(count, tokens, 2, dtype=torch.int32, device=x.device),
    )
    _launch(x, signs, rotation, (*found, found.meta), tokens, False, pdl)
    return found


def _launch(
    x: torch.Tensor,
    signs: torch.Tensor | None,
    rotation: int,
    results: tuple[torch.Tensor, ...],
    tokens: int,
    steps: bool,
    pdl: bool,
) -> None:
    m, k = x.shape
    per_program, left, right = program_blocks(k, rotation)
    warps = 4
    if not rotation and m <= FEW:
        per_program, warps = 2, 1
    if m:
        plans.launch(
            pq2_quantize_kernel,
            (m, triton.cdiv(groups(k), per_program)),
            (x, signs if signs is not None else x, *results, x.stride(0), k),
            {"GROUPS": per_program, "LEFT": left, "RIGHT": right, "TOKENS": tokens, "STEPS": steps, "PDL": pdl},
            x.device,
            num_warps=warps, enable_fp_fusion=False, launch_pdl=pdl,
        )  # fmt: skip


def program_blocks(k: int, rotation: int) -> tuple[int, int, int]:
    """What one program of the quantising or the lookup kernel takes: groups, and the two factors of the rotation's block.

    Args:
        k: Length of a row.
        rotation: Block of the rotation; 0 is none, and so are its factors then.

    Raises:
        FormatError: The rotation does not fit the row.
        PathUnavailable: A block that the kernels do not have.
    """
    if not rotation:
        return GROUPS_PER_PROGRAM, 0, 0
    check_rotation(k, rotation)
    if rotation not in ROTATIONS:
        raise PathUnavailable(
            f"a rotation over blocks of {rotation}: the quantising kernel has {', '.join(map(str, ROTATIONS))}; "
            "PQ2_KERNELS=reference runs any"
        )
    left = 1 << (rotation.bit_length() - 1) // 2
    return rotation // GROUP, left, rotation // left
