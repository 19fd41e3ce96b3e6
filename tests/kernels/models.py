"""Tiny random models for the tests of the converter: as transformers save them, and as llama.cpp's converter would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from pq2 import gguf_types
from pq2.format import pack, ternarize

PQ2 = gguf_types.register()
VOCAB = 300
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-17,  # a float32, which is what a GGUF stores
    "head_dim": 64,
}
# Written by hand: the converter has these from the gguf package.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SHAPE | changes)))


def qwen3(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**(SHAPE | {"tie_word_embeddings": True} | changes)))


def make_ternary(model: PreTrainedModel) -> PreTrainedModel:
    """Every matrix of the model becomes its nearest ternary one, in float32; norms become something other than ones."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                codes, scales = ternarize(parameter)
                parameter.copy_((codes.float() - 1) * scales.float().repeat_interleave(128, dim=1))
            else:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return model


def gguf_name(name: str) -> str:
    stem, _, leaf = name.rpartition(".")
    parts = stem.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"blk.{parts[2]}.{GGUF_NAMES['.'.join(parts[3:])]}.{leaf}"
    return f"{GGUF_NAMES[stem]}.{leaf}"


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to the rows of Llama's query and key projections (LlamaModel.permute)."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class Gguf:
    """A GGUF file to be: tensors by name with their types, which a test may change, and metadata."""

    def __init__(self, model: PreTrainedModel, architecture: str) -> None:
        self.architecture = architecture
        self.config = model.config
        self.fields: dict[str, int] = {}
        self.tensors: dict[str, tuple[Any, gguf.GGMLQuantizationType | None]] = {}
        self.tokenizer = False
        self.endianess = gguf.GGUFEndian.LITTLE
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            if architecture == "llama" and ".q_proj." in name:
                tensor = permuted(tensor, self.config.num_attention_heads)
            if architecture == "llama" and ".k_proj." in name:
                tensor = permuted(tensor, self.config.num_key_value_heads)
            if tensor.ndim == 2:
                self.tensors[gguf_name(name)] = (pack(*ternarize(tensor)).numpy(), PQ2)
            else:
                self.tensors[gguf_name(name)] = (tensor.numpy(), None)

    def write(self, path: Path) -> Path:
        writer = gguf.GGUFWriter(path, self.architecture, endianess=self.endianess)
        writer.add_vocab_size(self.config.vocab_size)
        writer.add_context_length(self.config.max_position_embeddings)
        writer.add_embedding_length(self.config.hidden_size)
        writer.add_block_count(self.config.num_hidden_layers)
        writer.add_feed_forward_length(self.config.intermediate_size)
        writer.add_head_count(self.config.num_attention_heads)
        writer.add_head_count_kv(self.config.num_key_value_heads)
        writer.add_key_length(self.config.head_dim)
        writer.add_value_length(self.config.head_dim)
        writer.add_rope_dimension_count(self.config.head_dim)
        writer.add_rope_freq_base(5000.0)
        writer.add_layer_norm_rms_eps(self.config.rms_norm_eps)
        for key, value in self.fields.items():
            writer.add_uint16(key, value)
        if self.tokenizer:
            control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
            tokens = ["a", "b", "ab", "aba", *(f"t{index}" for index in range(4, VOCAB - 3)), *control]
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("qwen2")
            writer.add_token_list(tokens)
            writer.add_token_types([gguf.TokenType.NORMAL] * (VOCAB - 3) + [gguf.TokenType.CONTROL] * 3)
            writer.add_token_merges(["a b", "ab a"])
            writer.add_eos_token_id(VOCAB - 1)
        for name, (data, kind) in self.tensors.items():
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
