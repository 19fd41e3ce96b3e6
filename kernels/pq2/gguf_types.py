"""GGUF tensor type 142 -> the `gguf` package's own tables, so that its reader, writer and dequantiser take PQ2 tensors.

No released `gguf` package knows the type. The file format itself is the package's business: nothing is parsed here.
"""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf import quants

from pq2.errors import FormatError
from pq2.format import BLOCK_BYTES, GGUF_TYPE, GROUP, pack, ternarize, unpack

NAME = "PQ2_0"


def register() -> gguf.GGMLQuantizationType:
    """Teach the package the type; a second call changes nothing.

    Returns:
        The member, for `GGUFWriter.add_tensor(..., raw_dtype=...)` and to compare `ReaderTensor.tensor_type` with.

    Raises:
        FormatError: This `gguf` package has another type under the number 142.
    """
    types = gguf.GGMLQuantizationType
    known = types._value2member_map_.get(GGUF_TYPE)
    if known is None:
        # An enumeration cannot be subclassed once it has members, and the package looks types up by number in this one.
        known = int.__new__(types, GGUF_TYPE)
        known._name_ = NAME
        known._value_ = GGUF_TYPE
        known.__objclass__ = types
        type.__setattr__(types, NAME, known)
        types._member_map_[NAME] = known
        types._value2member_map_[GGUF_TYPE] = known
        types._member_names_.append(NAME)
    size = gguf.GGML_QUANT_SIZES.setdefault(known, (GROUP, BLOCK_BYTES))
    if size != (GROUP, BLOCK_BYTES):
        raise FormatError(
            f"this gguf package knows tensor type {GGUF_TYPE} as {known.name}, {size[0]} weights in {size[1]} bytes; "
            f"PQ2 is {GROUP} in {BLOCK_BYTES}: install a gguf package of another version (0.19 works)"
        )
    if known not in quants._type_traits:
        _add_conversion(known)
    return known


def _add_conversion(member: gguf.GGMLQuantizationType) -> None:
    """`gguf.dequantize` and `gguf.quantize` for the type: subclasses of the package's base enter its table."""
    base = vars(quants)["__Quant"]

    class Pq2(base, qtype=member):  # type: ignore[valid-type, misc, call-arg]
        """Blocks of 128 weights, [count, 128] fp32 <-> [count, 34] uint8."""

        @classmethod
        def quantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
            packed: np.ndarray = pack(*ternarize(torch.from_numpy(np.ascontiguousarray(blocks)))).numpy()
            return packed

        @classmethod
        def dequantize_blocks(cls, blocks: np.ndarray) -> np.ndarray:
            codes, scales = unpack(torch.from_numpy(np.array(blocks)))
            weights: np.ndarray = ((codes.to(torch.float32) - 1) * scales.to(torch.float32)).numpy()
            return weights
