"""The custom operators that vLLM's compiled model calls: opaque to torch.compile, which so specialises on no token count.

Each decides when it runs, by rows and switches, which path does the work, and counts it. Annotations are not postponed
here: torch reads the operators' schemas off them.
"""

import torch
from torch.library import Library
from torch.nn import functional

from pq2 import dispatch, reference
from pq2 import format as pq2_format
from pq2.quantize import dequantize, quantize, rotate, unrotate
from pq2.switches import Choice

_LIBRARY = Library("pq2", "FRAGMENT")
_choice: Choice | None = None


def _chosen() -> Choice:
    if _choice is None:
        raise RuntimeError("pq2.ops was used before the plugin registered it: load vLLM's general plugins first")
    return _choice


def _prepared(weight: torch.Tensor, k: int) -> pq2_format.Prepared:
    return pq2_format.view(weight.view(-1), weight.shape[0], k)


def linear(x: torch.Tensor, weight: torch.Tensor, signs: torch.Tensor | None, k: int, rotation: int) -> torch.Tensor:
    """Activations [M, K] times a weight in the prepared layout, uint8 [N, K / 128 * 34]; [M, N] in the dtype of x."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return dispatch.matmul(x, _prepared(weight, k), _chosen(), signs, rotation)


def _linear_fake(
    x: torch.Tensor, weight: torch.Tensor, signs: torch.Tensor | None, k: int, rotation: int
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def reference_linear(x: torch.Tensor, dense: torch.Tensor, signs: torch.Tensor | None, rotation: int) -> torch.Tensor:
    """The same in PyTorch, from a dense fp32 copy of the weight [N, K]: the numbers of the kernels, at fp32's rounding."""
    dispatch.CALLS["reference"] += 1
    wide = x.to(torch.float32)
    if rotation and signs is not None:
        wide = rotate(wide, signs, rotation)
    return functional.linear(dequantize(quantize(wide), dtype=torch.float32), dense).to(x.dtype)


def _reference_linear_fake(
    x: torch.Tensor, dense: torch.Tensor, signs: torch.Tensor | None, rotation: int
) -> torch.Tensor:
    return x.new_empty((x.shape[0], dense.shape[0]))


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, signs: torch.Tensor | None, k: int, rotation: int, dtype: torch.dtype
) -> torch.Tensor:
    """Rows [T, K] of an embedding in the prepared layout."""
    prepared = _prepared(weight, k)
    if _chosen().kernel_set == "reference":
        rows = reference.embedding(ids, prepared, torch.float32)
        return (unrotate(rows, signs, rotation) if rotation and signs is not None else rows).to(dtype)
    from pq2.embedding import lookup

    return lookup(ids.contiguous(), prepared, dtype, signs, rotation)


def _embedding_fake(
    ids: torch.Tensor, weight: torch.Tensor, signs: torch.Tensor | None, k: int, rotation: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty((ids.shape[0], k), dtype=dtype, device=ids.device)


def small_linear(
    x: torch.Tensor, weight: torch.Tensor, arrived: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """A small unquantised projection: split along K for few rows, PyTorch's product for more.

    `arrived` are the weight's counters, zero before and after.
    """
    from pq2 import small_gemm

    if not small_gemm.fits(x.shape[0], weight.shape[0]):
        dispatch.CALLS["dense"] += 1
        return functional.linear(x, weight, bias)
    dispatch.CALLS["small_gemm"] += 1
    x = x if x.stride(-1) == 1 else x.contiguous()
    return small_gemm.small_gemm(x, weight, arrived, bias)


def _small_linear_fake(
    x: torch.Tensor, weight: torch.Tensor, arrived: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def register(choice: Choice) -> None:
    """Make the operators known to torch, once a process, and fix the switches that they run by."""
    from vllm.utils.torch_utils import direct_register_custom_op

    global _choice
    if _choice is not None:
        return
    _choice = choice
    for function, fake in (
        (linear, _linear_fake),
        (reference_linear, _reference_linear_fake),
        (embedding, _embedding_fake),
        (small_linear, _small_linear_fake),
    ):
        direct_register_custom_op(function.__name__, function, fake_impl=fake, target_lib=_LIBRARY)
