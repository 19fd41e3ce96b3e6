"""A shape's name -> its config, its weight matrices, and what a decode step multiplies by.

Which modules a model has, and their sizes, comes from the model class in transformers, so that nothing here can differ from
a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from pq2 import format as pq2_format
from pq2.errors import Pq2Error
from pq2.selection import FUSED_INTO

ROTATION = 1024
"""Weights of a block of the Walsh-Hadamard transform, along K."""

UNCONVERTED = ("in_proj_b", "in_proj_a")
"""Linear layers left as they are: two rows a head, fewer than a tile, and they set the decay of the state."""


class ShapeError(Pq2Error):
    """A model of this shape cannot be described as asked."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's sizes.

    Attributes:
        config: The class in transformers that describes such models.
        architecture: What `architectures` says.
        sizes: Arguments of that class.
        vocab_size: Tokens of the vocabulary; None takes the tokenizer's.
    """

    config: str
    architecture: str
    sizes: dict[str, Any]
    vocab_size: int | None


def _sizes(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int = 128
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def _qwen3(sizes: dict[str, Any], vocab_size: int | None = 151_936) -> Shape:
    return Shape("Qwen3Config", "Qwen3ForCausalLM", sizes | {"max_position_embeddings": 40960}, vocab_size)


def _hybrid(sizes: dict[str, Any], key_heads: int, value_heads: int, vocab_size: int | None = 248_320) -> Shape:
    """Three layers of Gated DeltaNet, then one of attention whose output has a gate, and so on."""
    linear = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads}
    linear |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    return Shape("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", sizes | linear, vocab_size)


SHAPES = {
    "qwen3-0.6b": _qwen3(_sizes(1024, 3072, 28, 16, 8)),
    "qwen3-8b": _qwen3(_sizes(4096, 12288, 36, 32, 8)),
    "qwen3-32b": _qwen3(_sizes(5120, 25600, 64, 64, 8)),
    "hybrid-8b": _hybrid(_sizes(4096, 12288, 32, 16, 4, 256), 16, 32),
    "hybrid-27b": _hybrid(_sizes(5120, 17408, 64, 24, 4, 256), 16, 48),
    "tiny": _qwen3(_sizes(256, 512, 2, 4, 2, 64), None),
    "hybrid-tiny": _hybrid(_sizes(256, 512, 4, 4, 2, 64), 2, 4, None),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix of the checkpoint.

    Attributes:
        name: The module, as in the checkpoint.
        n: Rows.
        k: Weights a row.
        embedding: Whether rows are looked up, not multiplied by.
        converted: Whether it is PQ2.
    """

    name: str
    n: int
    k: int
    embedding: bool
    converted: bool

    @property
    def fused(self) -> str:
        """The module of vLLM's that holds it."""
        parent, _, last = self.name.rpartition(".")
        return f"{parent}.{FUSED_INTO.get(last, last)}".removeprefix(".")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight on disk."""
        return self.n * pq2_format.block_rows(self.k) if self.converted else 2 * self.n * self.k


@dataclass(frozen=True, slots=True)
class Projection:
    """Matrices of one shape that vLLM multiplies by, and how often it has one.

    Attributes:
        n: Rows, of all modules that are fused.
        k: Weights a row.
        converted: Whether it is PQ2; bfloat16 otherwise.
        count: How many there are: how often a step multiplies by one.
        weight_bytes: Bytes of one.
    """

    n: int
    k: int
    converted: bool
    count: int
    weight_bytes: int


def projections(found: Sequence[Matrix]) -> list[Projection]:
    """What a step multiplies by, fused as vLLM does; the order is that of the model."""
    fused: dict[str, list[Matrix]] = {}
    for matrix in found:
        if not matrix.embedding:
            fused.setdefault(matrix.fused, []).append(matrix)
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for parts in fused.values():
        key = (sum(part.n for part in parts), parts[0].k, parts[0].converted)
        alike.setdefault(key, []).append(sum(part.weight_bytes for part in parts))
    return [Projection(*key, len(sizes), sizes[0]) for key, sizes in alike.items()]


def matrices(model: nn.Module, *, bf16: bool = False) -> list[Matrix]:
    """The weight matrices of a model: its linear layers, its token embedding and its head.

    Args:
        model: As transformers builds it; on the meta device is enough.
        bf16: None of them is PQ2.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            n, k = module.weight.shape
            converted = not bf16 and name.rpartition(".")[2] not in UNCONVERTED
            found.append(Matrix(name, n, k, isinstance(module, nn.Embedding), converted))
    return found


def make_config(name: str, tokenizer: Any) -> Any:
    """The config of a shape, without its quantisation.

    Raises:
        ShapeError: The vocabulary has no room for the tokenizer, or this transformers does not know the model.
    """
    shape = SHAPES[name]
    vocab_size = shape.vocab_size or len(tokenizer)
    if len(tokenizer) > vocab_size:
        raise ShapeError(
            f"the tokenizer has {len(tokenizer):,} tokens, and the vocabulary of {name} {vocab_size:,}; give --tokenizer "
            "one that fits, or take a larger shape"
        )
    known = getattr(transformers, shape.config, None)
    if known is None:
        raise ShapeError(
            f"{name}: transformers {transformers.__version__} has no {shape.config}; install a newer one (5.17 has it)"
        )
    return known(
        **shape.sizes,
        vocab_size=vocab_size,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        architectures=[shape.architecture],
        dtype="bfloat16",
    )


def meta_model(config: Any) -> Any:
    """The model as transformers builds it, without memory for its weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def check_rotation(name: str, found: Sequence[Matrix]) -> None:
    """Look whether every PQ2 matrix is a whole number of rotation blocks long.

    Raises:
        ShapeError: One is not.
    """
    for matrix in found:
        if matrix.converted and matrix.k % ROTATION:
            raise ShapeError(
                f"{name} cannot be rotated: K of {matrix.name} is {matrix.k}, and the rotation works on blocks of "
                f"{ROTATION}; leave --rotated out"
            )


def summary(name: str, config: Any, found: Sequence[Matrix], weights: int) -> str:
    """What was made, for people: one line a shape of projection.

    Args:
        name: The shape's.
        config: Its config.
        found: Its weight matrices.
        weights: Bytes of all tensors.
    """
    layers = getattr(config, "layer_types", None) or ()
    gdn = sum(kind == "linear_attention" for kind in layers)
    split = f" ({gdn} Gated DeltaNet, {len(layers) - gdn} attention)" if gdn else ""
    lines = [
        f"{name}: {config.num_hidden_layers} layers{split}, hidden {config.hidden_size:,}, "
        f"vocabulary {config.vocab_size:,}, {weights / 1e9:.2f} GB of tensors",
        f"{'N x K':>16}  {'count':>5}  {'type':<5} {'MB each':>9} {'GB':>7}",
    ]
    for row in projections(found):
        lines.append(
            f"{f'{row.n} x {row.k}':>16}  {row.count:>5}  {'PQ2' if row.converted else 'bf16':<5} "
            f"{row.weight_bytes / 1e6:>9.2f} {row.count * row.weight_bytes / 1e9:>7.3f}"
        )
    for embedding in (matrix for matrix in found if matrix.embedding):
        lines.append(
            f"{f'{embedding.n} x {embedding.k}':>16}  {'':>5}  {'PQ2' if embedding.converted else 'bf16':<5} "
            f"{embedding.weight_bytes / 1e6:>9.2f} {embedding.weight_bytes / 1e9:>7.3f}  embedding, looked up"
        )
    return "\n".join(lines)
