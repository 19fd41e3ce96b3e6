"""PQ2_0 weights: float matrices -> ternary codes and scales -> 34-byte blocks (disk) -> the prepared layout (GPU).

A block holds 128 weights of a row: its scale `d` as fp16, then 32 code bytes. Weight j sits in byte j // 4 at bits
2 * (j % 4), and is (code - 1) * d. Codes are 0, 1 and 2; 3 is representable and refused. That is GGUF tensor type 142.

The prepared layout of a matrix [N, K] is one allocation: all code bytes [N, K / 4], row-major, then all scales
[N, K / 128], fp16. Kernels read it with wide aligned loads, which 34-byte blocks do not allow.

Everything here is plain PyTorch and runs on any device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pq2.errors import FormatError

GROUP = 128
"""Weights that share a scale, along K."""
CODE_BYTES = GROUP // 4
BLOCK_BYTES = 2 + CODE_BYTES
GGUF_TYPE = 142
"""The number of the tensor type in GGUF files; no released `gguf` package knows it."""


class Prepared(NamedTuple):
    """A weight matrix as kernels want it.

    Attributes:
        data: The one allocation, uint8 [N * K / 4 + N * K / 64].
        codes: uint8 [N, K / 4], a view of `data`.
        scales: fp16 [N, K / 128], a view of `data`.
    """

    data: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], self.codes.shape[1] * 4


def groups(k: int, what: str = "K") -> int:
    """Groups of a row of k weights.

    Raises:
        FormatError: k is no positive multiple of 128.
    """
    if k <= 0 or k % GROUP:
        raise FormatError(
            f"{what} is {k}: PQ2 stores rows in groups of {GROUP} weights, so it must be a multiple of {GROUP}"
        )
    return k // GROUP


def ternarize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest ternary matrix: for each group of 128 the codes and the scale with the least squared error.

    With |w| sorted downwards, keeping the k largest and the scale mean(|w|) over them leaves sum(w^2) - sum(|w|)^2 / k;
    the best k is found exactly. A group that is ternary already comes back as it is.

    Args:
        weight: Floating, [N, K], finite; K a multiple of 128.

    Returns:
        Codes, uint8 [N, K] of 0, 1, 2, and scales, fp16 [N, K / 128].

    Raises:
        FormatError: K does not fit, or a weight is NaN, infinite, or beyond fp16's range.
    """
    if weight.ndim != 2 or not weight.is_floating_point():
        raise FormatError(
            f"a weight to quantise must be a floating matrix [N, K], this is {weight.dtype} {list(weight.shape)}"
        )
    n, k = weight.shape
    count = groups(k)
    w = weight.reshape(n, count, GROUP).to(torch.float32)
    if not torch.isfinite(w).all():
        raise FormatError("a weight is NaN or infinite: nothing can be quantised from that")
    magnitude, order = w.abs().sort(dim=-1, descending=True, stable=True)
    total = magnitude.cumsum(dim=-1)
    kept = torch.arange(1, GROUP + 1, device=w.device, dtype=torch.float32)
    best = (total.square() / kept).argmax(dim=-1, keepdim=True)
    scale = (total.gather(-1, best) / (best + 1)).to(torch.float16)
    if not torch.isfinite(scale).all():
        raise FormatError(f"a group's scale exceeds fp16 (65504): the largest weight is {float(magnitude.max()):g}")
    # Places in the sorted order up to `best` are kept; back in the row's own order that is a mask. A group whose scale
    # rounds to zero keeps nothing.
    mask = torch.zeros_like(w, dtype=torch.bool).scatter_(-1, order, torch.arange(GROUP, device=w.device) <= best)
    mask &= scale != 0
    codes = torch.where(mask, w.sign(), 0).to(torch.int8) + 1
    return codes.reshape(n, k).to(torch.uint8), scale.squeeze(-1)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes, uint8 [..., K] of 0, 1, 2 -> four to a byte, uint8 [..., K / 4].

    Raises:
        FormatError: Another code, or a row that is no multiple of 4 long.
    """
    if codes.dtype != torch.uint8:
        raise FormatError(f"codes are uint8, these are {codes.dtype}")
    if codes.shape[-1] % 4:
        raise FormatError(f"four codes go into a byte, and a row has {codes.shape[-1]}")
    if codes.numel() and int(codes.max()) > 2:
        raise FormatError(f"code {int(codes.max())}: ternary codes are 0, 1 and 2")
    quads = codes.unflatten(-1, (codes.shape[-1] // 4, 4))
    return quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Code bytes, uint8 [..., K / 4] -> codes, uint8 [..., K]; 3 comes out as 3."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 3).flatten(-2)


def pack(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes, uint8 [N, K], and scales, fp16 [N, K / 128] -> blocks, uint8 [N, K / 128 * 34].

    Raises:
        FormatError: Shapes or types that do not fit, another code than 0, 1, 2, or a scale that is NaN or infinite.
    """
    if codes.ndim != 2:
        raise FormatError(f"codes to pack are a matrix [N, K], these are {list(codes.shape)}")
    n, k = codes.shape
    count = groups(k)
    if scales.dtype != torch.float16 or scales.shape != (n, count):
        raise FormatError(
            f"scales of a [{n}, {k}] matrix are float16 [{n}, {count}], these are {scales.dtype} {list(scales.shape)}"
        )
    _check_scales(scales)
    packed = pack_codes(codes).reshape(n, count, CODE_BYTES)
    d = scales.contiguous().view(torch.uint8).reshape(n, count, 2)
    return torch.cat([d, packed], dim=-1).reshape(n, count * BLOCK_BYTES)


def unpack(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks, uint8 [N, K / 128 * 34] -> codes, uint8 [N, K], and scales, fp16 [N, K / 128]; see `check_blocks`."""
    codes, scales = _split(blocks)
    return unpack_codes(codes), scales


def check_blocks(blocks: torch.Tensor, name: str = "weight") -> None:
    """Look at every block of a tensor that came from outside.

    Raises:
        FormatError: A row is not a whole number of blocks, a scale is NaN or infinite, or a code is 3.
    """
    codes, scales = _split(blocks, name)
    _check_scales(scales, name)
    # Both bits of a pair set is code 3: the high bit shifted onto the low one meets it.
    bad = codes & codes >> 1 & 0x55
    if bool(bad.any()):
        row = int(bad.any(dim=-1).nonzero()[0])
        raise FormatError(
            f"{name}: row {row} has code 3: ternary codes are 0, 1 and 2 (damaged, or another 2-bit format)"
        )


def block_rows(k: int) -> int:
    """Bytes of a row of k weights in blocks."""
    return groups(k) * BLOCK_BYTES


def prepare(blocks: torch.Tensor) -> Prepared:
    """Blocks, uint8 [N, K / 128 * 34] -> the prepared layout, on the same device."""
    codes, scales = _split(blocks)
    prepared = empty(codes.shape[0], codes.shape[1] * 4, blocks.device)
    prepared.codes.copy_(codes)
    prepared.scales.copy_(scales)
    return complete(prepared)


def complete(prepared: Prepared) -> Prepared:
    """Wait until a matrix that was just written is there.

    Kernels read weights before those that were launched earlier have ended, which the order of a stream does not cover.
    """
    if prepared.data.is_cuda:
        torch.cuda.synchronize(prepared.data.device)
    return prepared


def empty(n: int, k: int, device: torch.device | str = "cpu") -> Prepared:
    """An uninitialised matrix in the prepared layout."""
    return view(torch.empty(n * groups(k) * BLOCK_BYTES, dtype=torch.uint8, device=device), n, k)


def view(data: torch.Tensor, n: int, k: int) -> Prepared:
    """The parts of a prepared allocation, as views of it.

    Args:
        data: uint8 [N * K / 4 + N * K / 64].
        n: Rows.
        k: Weights a row.

    Raises:
        FormatError: The allocation has another size.
    """
    count = groups(k)
    if data.dtype != torch.uint8 or data.ndim != 1 or data.numel() != n * count * BLOCK_BYTES:
        raise FormatError(
            f"a prepared [{n}, {k}] matrix is uint8 [{n * count * BLOCK_BYTES}], this is {data.dtype} {list(data.shape)}"
        )
    cut = n * count * CODE_BYTES
    return Prepared(data, data[:cut].view(n, count * CODE_BYTES), data[cut:].view(torch.float16).view(n, count))


def to_blocks(prepared: Prepared) -> torch.Tensor:
    """The prepared layout -> blocks: the inverse of `prepare`."""
    n, k = prepared.shape
    count = groups(k)
    d = prepared.scales.contiguous().view(torch.uint8).reshape(n, count, 2)
    return torch.cat([d, prepared.codes.reshape(n, count, CODE_BYTES)], dim=-1).reshape(n, count * BLOCK_BYTES)


def random(n: int, k: int, device: torch.device | str = "cpu", seed: int = 0) -> Prepared:
    """A random ternary matrix: codes uniform over 0, 1, 2, scales such that a row's dot product with unit noise is about 1.

    Made on the device, in the memory of the result plus one group of rows: a head of 248,320 x 5,120 takes no float copy.
    """
    prepared = empty(n, k, device)
    generator = torch.Generator(device=prepared.data.device).manual_seed(seed)
    rows = max(1, (1 << 26) // k)
    spread = (1.5 / k) ** 0.5  # a ternary code has variance 2/3
    for first in range(0, n, rows):
        part = prepared.codes[first : first + rows]
        codes = torch.randint(0, 3, (part.shape[0], k), dtype=torch.uint8, device=part.device, generator=generator)
        part.copy_(pack_codes(codes))
        scales = prepared.scales[first : first + rows]
        noise = torch.rand(scales.shape, device=scales.device, generator=generator)
        scales.copy_(spread * (0.75 + 0.5 * noise))
    return complete(prepared)


def _split(blocks: torch.Tensor, name: str = "weight") -> tuple[torch.Tensor, torch.Tensor]:
    if blocks.dtype != torch.uint8 or blocks.ndim != 2 or blocks.shape[1] == 0 or blocks.shape[1] % BLOCK_BYTES:
        raise FormatError(
            f"{name}: PQ2 blocks are uint8 [N, K / {GROUP} * {BLOCK_BYTES}], this is {blocks.dtype} {list(blocks.shape)}"
        )
    n, count = blocks.shape[0], blocks.shape[1] // BLOCK_BYTES
    whole = blocks.reshape(n, count, BLOCK_BYTES)
    scales = whole[..., :2].contiguous().view(torch.float16).reshape(n, count)
    return whole[..., 2:].reshape(n, count * CODE_BYTES), scales


def _check_scales(scales: torch.Tensor, name: str = "weight") -> None:
    bad = ~torch.isfinite(scales)
    if bool(bad.any()):
        row, group = (int(index) for index in bad.nonzero()[0])
        raise FormatError(
            f"{name}: the scale of row {row}, group {group} is {float(scales[row, group])}: it must be finite"
        )
