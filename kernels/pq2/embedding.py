"""The lookup kernel: token ids -> rows of a prepared weight, dequantised, rotated back where they are stored rotated.

Reference: `reference.embedding` (without a rotation bit for bit); test: tests/kernels/test_paths.py. It has no switch:
every kernel set but `reference` runs it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pq2.activations import program_blocks, sylvester
from pq2.format import Prepared, groups


@triton.jit
def pq2_embedding_kernel(
    ids_ptr, codes_ptr, d_ptr, signs_ptr, out_ptr, N, K,
    GROUPS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """One program makes GROUPS groups of a row; LEFT * RIGHT is the rotation block they make up, LEFT 0 is none."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + token).to(tl.int64)
    # A row of NaN for an id outside of the vocabulary: an assertion would only hold in Triton's debug mode.
    known = (row >= 0) & (row < N)
    row = tl.where(known, row, 0)
    first = tl.program_id(1) * (GROUPS * 128)
    if LEFT > 0:
        at = first + tl.arange(0, LEFT)[:, None] * RIGHT + tl.arange(0, RIGHT)[None, :]
    else:
        at = first + tl.arange(0, GROUPS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = at < K
    byte = tl.load(codes_ptr + row * (K // 4) + at // 4, mask=inside, other=0).to(tl.int32)
    d = tl.load(d_ptr + row * (K // 128) + at // 128, mask=inside, other=0.0).to(tl.float32)
    x = (((byte >> (2 * (at % 4))) & 3) - 1).to(tl.float32) * d
    if LEFT > 0:
        x = tl.dot(x, sylvester(RIGHT), input_precision="ieee")
        x = tl.dot(sylvester(LEFT), x, input_precision="ieee")
        x = x * (1.0 / tl.sqrt(tl.full([1, 1], LEFT * RIGHT, tl.float32)))
        x = x * tl.load(signs_ptr + at).to(tl.float32)
    x = tl.where(known, x, float("nan"))
    tl.store(out_ptr + token * K + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def lookup(
    ids: torch.Tensor, weight: Prepared, dtype: torch.dtype, signs: torch.Tensor | None = None, rotation: int = 0
) -> torch.Tensor:
    """Rows of an embedding on the GPU.

    Args:
        ids: Integers [T]; one outside of [0, N) gets a row of NaN.
        weight: [N, K].
        dtype: Of the result.
        signs: int8 [K] of +1 and -1, for a rotation.
        rotation: Its block size; 0 is none.

    Returns:
        [T, K].

    Raises:
        FormatError: The rotation does not fit.
        PathUnavailable: A rotation block that the kernel does not have.
    """
    n, k = weight.shape
    out = torch.empty(ids.numel(), k, dtype=dtype, device=ids.device)
    per_program, left, right = program_blocks(k, rotation)
    if ids.numel():
        pq2_embedding_kernel[(ids.numel(), triton.cdiv(groups(k), per_program))](
            ids, weight.codes, weight.scales, signs if signs is not None else weight.codes, out, n, k,
            GROUPS=per_program, LEFT=left, RIGHT=right, num_warps=4,
        )  # fmt: skip
    return out
