"""The sizes of a model's linear layers -> a capture without tensors: its weights and inputs are made by who replays it.

A file of sizes is YAML:

    name: my-model
    dtype: bfloat16
    blocks:                       # in model order
      - repeat: 36
        layers: [{name: qkv_proj, n: 6144, k: 4096}, {name: o_proj, n: 4096, k: 4096}]
      - layers: [{name: lm_head, n: 151936, k: 4096}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from abharness import yamlload
from abharness.errors import UsageError
from abharness.replay.captures import Capture, Layer, Size


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SizedLayer(_Strict):
    """One layer: its name in its block, columns of its result and of its input."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]+$")]
    n: Size
    k: Size


class Block(_Strict):
    """Layers that follow each other, so often."""

    repeat: Annotated[int, Field(ge=1, le=1000, strict=True)] = 1
    layers: Annotated[tuple[SizedLayer, ...], Field(min_length=1)]


class Sizes(_Strict):
    """The layers of a model, in its order."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    blocks: Annotated[tuple[Block, ...], Field(min_length=1)]


def _block(repeat: int, *layers: tuple[str, int, int]) -> Block:
    return Block(repeat=repeat, layers=tuple(SizedLayer(name=name, n=n, k=k) for name, n, k in layers))


_MLP_27B = (("mlp.gate_up_proj", 34816, 5120), ("mlp.down_proj", 5120, 17408))
_DELTA_27B = (("linear_attn.in_proj_qkvz", 16384, 5120), ("linear_attn.out_proj", 5120, 6144), *_MLP_27B)
_ATTENTION_27B = (("self_attn.qkv_proj", 14336, 5120), ("self_attn.o_proj", 5120, 6144), *_MLP_27B)

BUILT_IN: Mapping[str, Sizes] = {
    # Three layers of Gated DeltaNet, then one of attention: 64 layers, 257 projections with the head.
    "hybrid-27b": Sizes(
        name="hybrid-27b",
        blocks=(_block(16, *_DELTA_27B * 3, *_ATTENTION_27B), _block(1, ("lm_head", 248320, 5120))),
    ),
    "qwen3-8b": Sizes(
        name="qwen3-8b",
        blocks=(
            _block(
                36,
                ("self_attn.qkv_proj", 6144, 4096),
                ("self_attn.o_proj", 4096, 4096),
                ("mlp.gate_up_proj", 24576, 4096),
                ("mlp.down_proj", 4096, 12288),
            ),
            _block(1, ("lm_head", 151936, 4096)),
        ),
    ),
}
"""Sizes that come with abharness."""


def read_sizes(text: str) -> Sizes:
    """Sizes by a built-in name, or from a file.

    Raises:
        UsageError: There is neither, or the file does not say what sizes are.
    """
    if text in BUILT_IN:
        return BUILT_IN[text]
    path = Path(text)
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError(
            f"sizes {text!r}: no built-in name ({', '.join(BUILT_IN)}), and as a file: {reason}",
            hint="a file lists name, dtype and blocks of layers with name, n and k",
        ) from error
    located = yamlload.load(content, text)
    if located.problems:
        raise UsageError("\n".join(located.problems))
    try:
        return Sizes.model_validate(located.data)
    except ValidationError as error:
        lines = [
            f"{located.origin(item['loc']).place}: {yamlload.dotted(item['loc'])}: {item['msg']}"
            for item in error.errors()
        ]
        raise UsageError("\n".join(lines)) from error


def synthesize(sizes: Sizes, rows: Sequence[int]) -> Capture:
    """A capture of these sizes; layers are named by their place, `layers.17.mlp.down_proj`."""
    layers: list[Layer] = []
    place = 0
    for block in sizes.blocks:
        for _ in range(block.repeat):
            seen: set[str] = set()
            for one in block.layers:
                if one.name in seen:  # a block that holds several of the model's layers
                    place, seen = place + 1, set()
                seen.add(one.name)
                layers.append(Layer(name=f"{place}.{one.name}", kind="sizes", method="sizes", n=one.n, k=one.k))
            place += 1
    return Capture(
        name=sizes.name,
        source="sizes",
        weights="made",
        dtype=sizes.dtype,
        rows=tuple(rows),
        steps=0,
        order=tuple(layer.name for layer in layers),
        layers=tuple(layers),
    )
