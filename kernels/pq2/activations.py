"""The quantising kernel: bf16, fp16 or fp32 rows [M, K] -> `quantize.Quantized`, rotated first where asked.

Reference: `quantize.quantize` (without a rotation bit for bit); test: tests/kernels/test_paths.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pq2.errors import FormatError, PathUnavailable
from pq2.format import GROUP, groups
from pq2.intrinsics import round_half_even
from pq2.quantize import Order, Quantized, check_rotation

ROTATIONS = (256, 512, 1024, 2048, 4096)
"""Rotation blocks the kernel has: products of two factors of 16 to 64, which is what its two matrix products need."""
GROUPS_PER_PROGRAM = 8


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
def pq2_quantize_kernel(
    x_ptr, signs_ptr, q_ptr, scales_ptr, sums_ptr, stride_x, K,
    GROUPS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, FRAGMENTS: tl.constexpr,
):  # fmt: skip
    """One program quantises GROUPS groups of a row; LEFT * RIGHT is the rotation block they make up, LEFT 0 is none."""
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
    tl.store(scales_ptr + m * count + group, scale, mask=inside)
    tl.store(sums_ptr + m * count + group, tl.sum(q, axis=1), mask=inside)
    j = tl.arange(0, 128)
    slot = j // 4
    if FRAGMENTS:
        slot = 4 * (slot // 8) + slot % 8 + tl.where(slot % 8 < 4, 0, 12)
    place = (j % 4) * 32 + slot
    tl.store(q_ptr + m * K + group[:, None] * 128 + place[None, :], q.to(tl.int8), mask=inside[:, None])


def quantize_rows(x: torch.Tensor, order: Order, signs: torch.Tensor | None = None, rotation: int = 0) -> Quantized:
    """Quantise activations on the GPU.

    Args:
        x: bf16, fp16 or fp32 [M, K], rows contiguous; K a multiple of 128.
        order: `planes` or `fragments`.
        signs: int8 [K] of +1 and -1, for a rotation.
        rotation: Its block size; 0 is none.

    Raises:
        FormatError: K or the rotation does not fit, or another order.
        PathUnavailable: A rotation block that the kernel does not have.
    """
    if order not in ("planes", "fragments"):
        raise FormatError(f"order {order!r}: the quantising kernel has planes and fragments")
    m, k = x.shape
    count = groups(k)
    device = x.device
    quantized = Quantized(
        torch.empty(m, k, dtype=torch.int8, device=device),
        torch.empty(m, count, dtype=torch.float32, device=device),
        torch.empty(m, count, dtype=torch.int32, device=device),
    )
    per_program, left, right = program_blocks(k, rotation)
    if m:
        pq2_quantize_kernel[(m, triton.cdiv(count, per_program))](
            x, signs if signs is not None else x, *quantized, x.stride(0), k,
            GROUPS=per_program, LEFT=left, RIGHT=right, FRAGMENTS=order == "fragments",
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return quantized


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
