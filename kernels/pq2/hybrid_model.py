"""The model class that `pq2.hybrid` registers: vLLM's Qwen3.5 decoder -> a text-only model whose embedding may be PQ2.

Imports vLLM's model code: only processes that build or inspect the model import this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import IsHybrid
from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration
from vllm.model_executor.models.utils import maybe_prefix

from pq2.errors import FormatError
from pq2.layers import NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class PQ2Qwen3_5ForCausalLM(Qwen3_5ForCausalLM, IsHybrid):  # noqa: N801 -- vLLM's name, prefixed
    """Text-only Qwen3.5.

    Every linear layer of vLLM's class but the convolution asks the quantisation config for its method, under its full name.
    Its token embedding does not, so it is built again here, with the config, where that is PQ2.

    The sizes and types of the recurrent state are those of the multimodal class, which wraps the same decoder: vLLM 0.23
    has them there only.
    """

    get_mamba_state_dtype_from_config = Qwen3_5ForConditionalGeneration.__dict__["get_mamba_state_dtype_from_config"]
    get_mamba_state_shape_from_config = Qwen3_5ForConditionalGeneration.__dict__["get_mamba_state_shape_from_config"]
    get_mamba_state_copy_func = Qwen3_5ForConditionalGeneration.__dict__["get_mamba_state_copy_func"]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if self.quant_config is None or self.quant_config.get_name() != NAME:
            return
        embedding = VocabParallelEmbedding(
            self.config.vocab_size,
            self.config.hidden_size,
            quant_config=self.quant_config,
            prefix=maybe_prefix(prefix, "model.embed_tokens"),
        )
        if isinstance(embedding.quant_method, UnquantizedEmbeddingMethod):
            return
        if self.config.tie_word_embeddings:
            # The head of a tied model is the embedding itself, in vLLM 0.23 the very object.
            raise FormatError(
                "tie_word_embeddings is true and model.embed_tokens is PQ2: the hybrid model serves a PQ2 embedding only "
                "beside a head of its own; write lm_head.weight and set tie_word_embeddings to false, or list "
                "model.embed_tokens and lm_head in modules_to_not_convert"
            )
        self.model.embed_tokens = embedding

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """As vLLM's class does; it skips, in vLLM 0.23, what the model has no place for.

        Raises:
            FormatError: The checkpoint has signs of a rotation, and its config has none.
        """
        loaded: set[str] = super().load_weights(self._checked(weights))
        return loaded

    def _checked(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name.endswith(".signs") and not getattr(self.quant_config, "rotation", 0):
                raise FormatError(
                    f"{name}: the checkpoint is rotated, and rotation_block of its quantization_config is null: set it to "
                    "the size of the rotation's blocks"
                )
            yield name, tensor
