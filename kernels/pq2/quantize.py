"""Activations: floating rows -> int8 with a scale and a sum a group, in the order a kernel reads; and the rotation.

Per token and group of 128: scale = max|x| / 127 (fp32), q = x / scale rounded half to even and clamped to +-127, T = the
sum of q. A kernel then has dot(weights, x) = scale * d * (dot(codes, q) - T), for codes of 0, 1, 2.

Orders of the 128 bytes of a group, chosen so that the kernel unpacks weights with a shift and a mask alone:

* `planes`: weight 4 * byte + s goes to s * 32 + byte. Word w of plane s meets (code word w >> 2 s) & 0x03030303.
* `fragments`: what a lane t of mma m16n8k32 holds of operand B, plane after plane. Its two words of code bytes, 8 t to
  8 t + 7, meet bytes 4 t and 16 + 4 t of a k-step. Planes go in pairs, 64 bytes each, so that a lane has 16 bytes of a
  pair: (s // 2) * 64 + t * 16 + (s % 2) * 8 + byte % 8. Rows are tiled as the kernels read them: `Fragments`.
* `steps`: four steps of 32, each the planes s % 2 and s % 2 + 2 of half of the code bytes. In that order a lane of wgmma
  m64k32 that loaded 8 code bytes finds the weights of its fragment by looking up the nibbles of a word.

Some ternary models rotate activations first: x * sign, then a normalised Walsh-Hadamard transform in Sylvester's order over
blocks along the input. The transform is its own inverse, so the embedding, whose rows are stored rotated, transforms first
and multiplies by the signs after.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from pq2.errors import FormatError
from pq2.format import CODE_BYTES, GROUP, groups

Order = Literal["natural", "planes", "fragments", "steps"]


class Quantized(NamedTuple):
    """Activations as kernels take them.

    Attributes:
        q: int8 [M, K], each group of 128 in the order asked for.
        scales: fp32 [M, K / 128].
        sums: int32 [M, K / 128], T: the sum of a group's q.
    """

    q: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor


START = 12582912
"""1.5 * 2^23: an integer of at most 2^22 added to it has the bits of a fp32 that is as much above this one."""
START_BITS = 0x4B400000
"""Its bits."""


class Fragments(NamedTuple):
    """A few rows of activations as the kernels on tensor cores take them.

    Attributes:
        q: int8 [K / 128, 2, tokens, 64], tokens 8 or 16, those beyond M never read: order `fragments`, a pair of planes of
            all tokens after the other.
        meta: int32 [K / 128, tokens, 2]: the bits of the scale, and `START_BITS` - T, where an accumulator begins.
    """

    q: torch.Tensor
    meta: torch.Tensor


class Steps(NamedTuple):
    """Many rows of activations as the kernels of prefill take them.

    Attributes:
        q: int8 [M, K], order `steps`.
        scales: fp32 [K / 128, M rounded up to a multiple of 16]: those of a group side by side, token 8 a + 2 b + c of 16
            at 4 b + 2 a + c, so that a lane of wgmma has its four in a row. Those beyond M are never used.
    """

    q: torch.Tensor
    scales: torch.Tensor


def padded(m: int) -> int:
    """Scales of a group in `Steps`."""
    return (m + 15) // 16 * 16


def scale_places(m: int) -> torch.Tensor:
    """Where the scales of m tokens are in a group's: int64 [m]."""
    token = torch.arange(m)
    return token // 16 * 16 + token % 8 // 2 * 4 + token % 16 // 8 * 2 + token % 2


def steps(quantized: Quantized) -> Steps:
    """Lay out what `quantize` gave in the order `steps`: plain PyTorch, for tests; scales beyond M are NaN."""
    m, count = quantized.scales.shape
    scales = quantized.scales.new_full((count, padded(m)), torch.nan)
    scales[:, scale_places(m)] = quantized.scales.T
    return Steps(quantized.q, scales)


def fragments(quantized: Quantized, tokens: int) -> Fragments:
    """Tile what `quantize` gave in the order `fragments`: plain PyTorch, for tests; tokens beyond M are zeros."""
    m, k = quantized.q.shape
    count = groups(k)
    q = quantized.q.new_zeros(count, 2, tokens, 64)
    q[:, :, :m] = quantized.q.reshape(m, count, 2, 64).permute(1, 2, 0, 3)
    meta = quantized.sums.new_zeros(count, tokens, 2)
    meta[:, :m, 0] = quantized.scales.T.contiguous().view(torch.int32)
    meta[:, :m, 1] = START_BITS - quantized.sums.T
    return Fragments(q, meta)


def places(order: Order) -> torch.Tensor:
    """Where weight j of a group goes: int64 [128], a permutation.

    Raises:
        FormatError: There is no such order.
    """
    j = torch.arange(GROUP)
    if order == "natural":
        return j
    byte, s = j // 4, j % 4
    if order == "planes":
        return s * CODE_BYTES + byte
    if order == "steps":
        step = s % 2 * 2 + byte // 2 % 2
        return step * 32 + byte // 4 % 2 * 16 + byte // 8 * 4 + byte % 2 * 2 + s // 2
    if order != "fragments":
        raise FormatError(f"{order!r}: orders of a group's bytes are {', '.join(get_args(Order))}")
    return s // 2 * 64 + byte // 8 * 16 + s % 2 * 8 + byte % 8


def quantize(x: torch.Tensor, order: Order = "natural") -> Quantized:
    """Quantise activations in plain PyTorch: what every quantising kernel is tested against, bit for bit.

    Args:
        x: Floating [M, K], K a multiple of 128.
        order: Order of the bytes of a group.

    Raises:
        FormatError: K does not fit, or x is no floating matrix.
    """
    if x.ndim != 2 or not x.is_floating_point():
        raise FormatError(f"activations are a floating matrix [M, K], these are {x.dtype} {list(x.shape)}")
    m, k = x.shape
    count = groups(k)
    wide = x.reshape(m, count, GROUP).to(torch.float32)
    # By a tensor: PyTorch divides CUDA tensors by a number as a product with its reciprocal, which is another rounding.
    scales = wide.abs().amax(dim=-1) / wide.new_tensor(127.0)
    # A group of zeros has scale 0 and zeros for q.
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    q = torch.round(wide / safe.unsqueeze(-1)).clamp(-127, 127).to(torch.int8)
    sums = q.sum(dim=-1, dtype=torch.int32)
    if order != "natural":
        # q[..., places[j]] = x[..., j]: gather by the inverse permutation.
        q = q[..., places(order).argsort().to(q.device)]
    return Quantized(q.reshape(m, k), scales, sums)


def dequantize(quantized: Quantized, order: Order = "natural", dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What quantised activations stand for, [M, K] in natural order."""
    m, k = quantized.q.shape
    q = quantized.q.reshape(m, groups(k), GROUP)[..., places(order).to(quantized.q.device)]
    return (q.to(dtype) * quantized.scales.to(dtype).unsqueeze(-1)).reshape(m, k)


def hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """The normalised Walsh-Hadamard transform in Sylvester's order, over blocks of the last axis; its own inverse.

    Args:
        x: Floating [..., K].
        block: A power of two that divides K.

    Raises:
        FormatError: The block does not fit.
    """
    check_rotation(x.shape[-1], block)
    shape = x.shape
    y = x.reshape(-1, block)
    step = 1
    while step < block:
        y = y.reshape(-1, block // (2 * step), 2, step)
        y = torch.stack([y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]], dim=2)
        step *= 2
    return (y.reshape(-1, block) * block**-0.5).reshape(shape)


def random_signs(k: int, seed: int) -> torch.Tensor:
    """Signs for a rotation, int8 [K] of +1 and -1; of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (k,), dtype=torch.int8, generator=generator) * 2 - 1


def rotate(x: torch.Tensor, signs: torch.Tensor, block: int) -> torch.Tensor:
    """Signs first, then the transform: what a layer's input goes through before it is quantised. Same dtype as x.

    Raises:
        FormatError: The signs are not one for each input, or the block does not fit.
    """
    _check_signs(x, signs)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return hadamard(wide * signs.to(wide.dtype), block).to(x.dtype)


def unrotate(x: torch.Tensor, signs: torch.Tensor, block: int) -> torch.Tensor:
    """The inverse of `rotate`: what rows of a rotated embedding go through after the lookup.

    Raises:
        FormatError: As for `rotate`.
    """
    _check_signs(x, signs)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (hadamard(wide, block) * signs.to(wide.dtype)).to(x.dtype)


def _check_signs(x: torch.Tensor, signs: torch.Tensor) -> None:
    # A single sign, or a row of them for each token, would broadcast and pass for a rotation.
    if signs.shape != x.shape[-1:]:
        raise FormatError(f"signs of an input of {x.shape[-1]} are [{x.shape[-1]}], these are {list(signs.shape)}")


def check_rotation(k: int, block: int, parts: int = 1, name: str = "the input") -> None:
    """Whether a rotation fits a layer and the cut that tensor parallelism makes.

    Args:
        k: Inputs of the whole layer.
        block: Size of the transform.
        parts: Tensor-parallel ranks that K is cut over.
        name: The layer, for the message.

    Raises:
        FormatError: The block is no power of two, does not divide K, or would be cut.
    """
    if block <= 0 or block & (block - 1):
        raise FormatError(f"{name}: a rotation over blocks of {block}: the size must be a power of two")
    if k % block:
        raise FormatError(f"{name}: K is {k}, which rotation blocks of {block} do not divide")
    if k % parts or (k // parts) % block:
        whole = [str(p) for p in range(1, k // block + 1) if (k // block) % p == 0]
        raise FormatError(
            f"{name}: {parts} tensor-parallel ranks would cut the rotation: K is {k} in {k // block} blocks of {block}; "
            f"ranks that cut between blocks: {', '.join(whole)}"
        )
