"""One GGUF file of a small Llama model into a Hugging Face directory that a server loads: float32, tokenizer, template.

Runs by itself in the server's interpreter, which has torch, transformers, tokenizers and gguf; imports nothing of ours:

    python gguf_to_hf.py MODEL.gguf NEW_DIRECTORY --prompt "..." --expect WORD

The tensors are dequantised and the tokenizer rebuilt here, and not by transformers' own GGUF loader, since transformers
5.19 refuses to save a model that it loaded so; the weights are equal to that loader's to the last bit. float32 holds
every dequantised value exactly. The directory is believed only after it was loaded again from disk and the model's
greedy answer to the prompt held the expected word.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

# llama.cpp's tensor names (gguf-py, constants.py) in front, transformers' Llama names behind.
MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL: never produced from text, never shown

ROUND_TRIPS = (
    "Hello, world!",
    " leading and  double  spaces ",
    "12345.67 + 8 = 12353.67",
    "line one\n\n\tline two",
    "naïve café – 東京 🚀",
)


def read_config(fields: dict[str, Any], tensor_names: set[str]) -> LlamaConfig:
    """The architecture, from the file's `llama.*` keys.

    Raises:
        ValueError: The file holds another architecture.
    """
    if fields["general.architecture"] != "llama":
        raise ValueError(f"architecture {fields['general.architecture']!r}: only 'llama' is converted")
    return LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 9),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings="output.weight" not in tensor_names,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def hf_name(name: str) -> str:
    """Transformers' name of one of llama.cpp's tensors.

    Raises:
        KeyError: It has none.
    """
    stem = name.removesuffix(".weight")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
    return f"{MODEL_NAMES[stem]}.weight"


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the two rotary halves in the rows of a query or key projection.

    Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py, of which this is the inverse.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """Every tensor under transformers' name, dequantised to float32."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[-2]
        if part in heads:
            values = unpermute(values, heads[part])
        weights[hf_name(tensor.name)] = torch.from_numpy(np.array(values, dtype=np.float32))
    return weights


def read_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer with its special tokens and chat template.

    Raises:
        ValueError: The file names another kind, or has no chat template.
    """
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer kind {fields['tokenizer.ggml.pre']!r}: only 'smollm' is converted")
    if not fields.get("tokenizer.chat_template"):
        raise ValueError("the file has no chat template")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    # What "smollm" stands for in llama.cpp (llama-vocab.cpp): digits one by one, then GPT-2's split.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    backend.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer


def convert(gguf: Path, directory: Path) -> None:
    """Write the directory: config, weights, tokenizer, chat template, generation config."""
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = read_config(fields, {tensor.name for tensor in reader.tensors})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # strict: a tensor that is missing, or that the model has no place for, ends it; a tied head is in the file once.
    weights = read_weights(reader, config)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, strict=True, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(directory)
    read_tokenizer(fields).save_pretrained(directory)


def check(directory: Path, prompt: str, expected: str) -> str:
    """Load the directory as a server would and let the model answer.

    Returns:
        The greedy answer.

    Raises:
        ValueError: The tokenizer does not round-trip, or the answer does not hold the expected word.
    """
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for text in ROUND_TRIPS:
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
        if back != text:
            raise ValueError(f"tokenizer does not round-trip: {text!r} became {back!r}")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    answer: str = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    if expected not in answer:
        raise ValueError(f"the converted model answers {prompt!r} with {answer!r}, without {expected!r}")
    return answer


def main() -> None:
    """Convert, check, and say what the model answered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prompt", required=True, help="question that the converted model is asked")
    parser.add_argument("--expect", required=True, help="word that its greedy answer must hold")
    arguments = parser.parse_args()
    convert(arguments.gguf, arguments.directory)
    answer = check(arguments.directory, arguments.prompt, arguments.expect)
    sys.stdout.write(f"answer: {answer}\n")


if __name__ == "__main__":
    main()
