"""Ground truth: what a PQ2 product is, in float64 and plain PyTorch. Every path is tested against this file.

`matmul` is what the kernels compute: activations quantised to int8, exact integer dot products, both scales. `exact_matmul`
is what they approximate: the same weights with the activations as they are.
"""

from __future__ import annotations

import torch

from pq2.format import GROUP, Prepared, groups, unpack_codes
from pq2.quantize import Quantized, quantize


def dequantize(weight: Prepared, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The matrix that a prepared weight stands for, [N, K]."""
    n, k = weight.shape
    signs = unpack_codes(weight.codes).to(dtype) - 1
    return (signs.reshape(n, groups(k), GROUP) * weight.scales.to(dtype).unsqueeze(-1)).reshape(n, k)


def matmul(x: torch.Tensor, weight: Prepared) -> torch.Tensor:
    """X quantised, times the transposed weight: float64 [M, N].

    Args:
        x: Floating [M, K].
        weight: [N, K].
    """
    return matmul_quantized(quantize(x), weight)


def matmul_quantized(quantized: Quantized, weight: Prepared) -> torch.Tensor:
    """The same from activations quantised already, in natural order: float64 [M, N].

    Integer dot products of a group stay below 2^14 * 2, exact in float64; the scales are applied and summed there.
    """
    m, k = quantized.q.shape
    n, _ = weight.shape
    count = groups(k)
    q = quantized.q.reshape(m, count, GROUP).to(torch.float64)
    signs = unpack_codes(weight.codes).reshape(n, count, GROUP).to(torch.float64) - 1
    total = torch.zeros(m, n, dtype=torch.float64, device=q.device)
    for g in range(count):  # one group at a time: all dot products at once would take [groups, M, N]
        scales = torch.outer(quantized.scales[:, g].to(torch.float64), weight.scales[:, g].to(torch.float64))
        total += (q[:, g] @ signs[:, g].T) * scales
    return total


def exact_matmul(x: torch.Tensor, weight: Prepared) -> torch.Tensor:
    """X as it is, times the transposed weight: float64 [M, N]; its distance to `matmul` is the quantisation's error."""
    return x.to(torch.float64) @ dequantize(weight).T


def small_gemm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """An unquantised projection: float64 [M, N] from x [M, K] and weight [N, K]."""
    return x.to(torch.float64) @ weight.to(torch.float64).T


def embedding(ids: torch.Tensor, weight: Prepared, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rows of an embedding, [T, K]: exact in fp32 and above.

    Args:
        ids: Integers [T].
        weight: [N, K].
        dtype: Of the result; computed in fp32 below it.
    """
    wide = torch.promote_types(dtype, torch.float32)
    rows = Prepared(weight.data, weight.codes[ids], weight.scales[ids])
    return dequantize(rows, wide).to(dtype)
