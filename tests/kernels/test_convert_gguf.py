"""python -m pq2.convert with a GGUF file: what it makes of a ternary model, and what it says of a bad one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import models
import numpy as np
import pytest
import torch
from command import converted, not_converted, pq2_modules, refused, values
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}


@pytest.fixture(scope="session")
def ternary(tmp_path_factory: pytest.TempPathFactory) -> models.Gguf:
    return models.Gguf(models.make_ternary(models.llama(**ROPE)), "llama")


@pytest.fixture
def file(ternary: models.Gguf) -> models.Gguf:
    """A ternary Llama to be written as GGUF, for the test to change."""
    copy = object.__new__(models.Gguf)
    copy.__dict__ = ternary.__dict__ | {"tensors": dict(ternary.tensors), "fields": {}}
    return copy


@pytest.mark.parametrize(("architecture", "make"), [("llama", models.llama), ("qwen3", models.qwen3)])
def test_a_gguf_becomes_what_its_model_becomes(architecture: str, make: Any, tmp_path: Path) -> None:
    """Through GGUF and straight from Hugging Face: the same bytes, and the model's own answers."""
    model = models.make_ternary(make(**ROPE))
    model.save_pretrained(tmp_path / "hf")
    gguf_file = models.Gguf(model, architecture)
    gguf_file.tokenizer = True
    converted(tmp_path / "hf", tmp_path / "straight", "--no-tokenizer")
    converted(gguf_file.write(tmp_path / "model.gguf"), tmp_path / "through")
    straight, through = (load_file(tmp_path / d / "model.safetensors") for d in ("straight", "through"))
    assert straight.keys() == through.keys()
    assert all(torch.equal(straight[name], through[name]) for name in straight)
    assert not_converted(tmp_path / "through") == []
    config = AutoConfig.from_pretrained(tmp_path / "through")
    tied = config.tie_word_embeddings
    del config.quantization_config  # transformers has no such method
    loaded = AutoModelForCausalLM.from_config(config).float()
    state = {
        n: values(tmp_path / "through", n.removesuffix(".weight")) if t.ndim == 2 else t for n, t in through.items()
    }
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    loaded.load_state_dict(state, strict=True)
    tokens = torch.arange(20).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "through").tokenize("abaab") == ["aba", "ab"]


def test_other_types_in_a_gguf_are_dequantised_and_kept(file: models.Gguf, tmp_path: Path) -> None:
    q8, bf16 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.BF16
    values = np.random.default_rng(0).normal(size=(models.VOCAB, 256)).astype(np.float32)
    down = np.random.default_rng(1).normal(size=(256, 512)).astype(np.float32)
    file.tensors["token_embd.weight"] = (gguf.quantize(values, q8), q8)
    file.tensors["blk.0.ffn_down.weight"] = (gguf.quantize(down, bf16), bf16)
    path = file.write(tmp_path / "model.gguf")
    converted(path, tmp_path / "out", "--no-tokenizer", "--dtype", "float32")
    target = load_file(tmp_path / "out/model.safetensors")
    embedding = target["model.embed_tokens.weight"]
    assert embedding.dtype == torch.float32
    assert torch.equal(embedding, torch.from_numpy(gguf.dequantize(gguf.quantize(values, q8), q8)))
    assert torch.equal(target["model.layers.0.mlp.down_proj.weight"], torch.from_numpy(down).bfloat16())
    assert set(not_converted(tmp_path / "out")) == {"model.embed_tokens", "model.layers.0.mlp.down_proj"}


def test_a_rotated_gguf_takes_its_signs_from_a_file(file: models.Gguf, tmp_path: Path) -> None:
    path = file.write(tmp_path / "model.gguf")
    converted(path, tmp_path / "plain", "--no-tokenizer")
    shapes = {module: values(tmp_path / "plain", module).shape[1] for module in pq2_modules(tmp_path / "plain")}
    signs = {f"{module}.signs": torch.full((k,), -1, dtype=torch.int8) for module, k in shapes.items()}
    save_file(signs, tmp_path / "signs.safetensors")
    rotated = ["--no-tokenizer", "--rotation-block", 128, "--signs", tmp_path / "signs.safetensors"]
    converted(path, tmp_path / "out", *rotated)
    target = load_file(tmp_path / "out/model.safetensors")
    plain = load_file(tmp_path / "plain/model.safetensors")
    assert target.keys() == plain.keys() | signs.keys()
    assert all(torch.equal(target[name], (plain | signs)[name]) for name in target)
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["rotation_block"] == 128

    def bad(says: str, **changes: torch.Tensor | None) -> None:
        content = signs | {name.replace("__", "."): tensor for name, tensor in changes.items()}
        save_file({n: t for n, t in content.items() if t is not None}, tmp_path / "signs.safetensors")
        refused(path, tmp_path / "bad", *rotated, says=["signs.safetensors", says])

    q = "model__layers__0__self_attn__q_proj__signs"
    bad("model.layers.0.self_attn.q_proj.signs is missing", **{q: None})
    bad("must be int8 [256] of +1 and -1", **{q: torch.zeros(256, dtype=torch.int8)})
    bad("must be int8 [256] of +1 and -1", **{q: torch.ones(128, dtype=torch.int8)})
    bad("must be int8 [256] of +1 and -1", **{q: torch.ones(256)})
    bad("vLLM fuses them, so they must be equal", **{q: torch.ones(256, dtype=torch.int8)})
    bad("model.norm.signs belongs to no PQ2 module", model__norm__signs=torch.ones(256, dtype=torch.int8))


def change_blocks(name: str, at: int, value: int) -> Callable[[models.Gguf], None]:
    def change(file: models.Gguf) -> None:
        data, kind = file.tensors[name]
        data = data.copy()
        data[1, at] = value
        file.tensors[name] = (data, kind)

    return change


def as_float(name: str) -> Callable[[models.Gguf], None]:
    return lambda file: file.tensors.update({name: (gguf.dequantize(*file.tensors[name]), None)})


def all_q8(file: models.Gguf) -> None:
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, (data, kind) in file.tensors.items():
        if kind is models.PQ2:
            file.tensors[name] = (gguf.quantize(gguf.dequantize(data, kind), q8), q8)


def pq2_norm(file: models.Gguf) -> None:
    data, kind = file.tensors["blk.0.attn_q.weight"]
    file.tensors["output_norm.weight"] = (data[0], kind)


BAD_GGUF = {
    "code 3": (change_blocks("blk.1.ffn_up.weight", 5, 0b11), ["blk.1.ffn_up.weight", "row 1", "code 3"]),
    # The second byte of a scale: 0x7c.. is infinite or NaN.
    "a scale that is not finite": (
        change_blocks("output.weight", 1, 0x7C),
        ["output.weight", "row 1, group 0", "finite"],
    ),
    "no PQ2": (all_q8, ["no tensor is PQ2 (type 142)", "16 of type Q8_0", "Hugging Face directory"]),
    "a part of a fused layer": (as_float("blk.0.attn_k.weight"), ["layers.0.self_attn.k_proj: vLLM fuses this with"]),
    "a PQ2 norm": (pq2_norm, ["output_norm.weight is PQ2 and no weight matrix: [256]"]),
    "a missing tensor": (
        lambda file: file.tensors.pop("blk.1.ffn_norm.weight"),
        ["blk.1.ffn_norm.weight", "is missing"],
    ),
    "a tensor too many": (
        lambda file: file.tensors.update({"rope_freqs.weight": (np.ones(32, np.float32), None)}),
        ["rope_freqs.weight", "no place for this"],
    ),
    "another shape": (
        lambda file: file.tensors.update({"output_norm.weight": (np.ones(128, np.float32), None)}),
        ["output_norm.weight is [128]", "model.norm.weight [256]"],
    ),
    "another architecture": (
        lambda file: setattr(file, "architecture", "falcon"),
        ["general.architecture is falcon", "llama, qwen2, qwen3"],
    ),
    "one part of several": (lambda file: file.fields.update({"split.count": 3}), ["one of 3 parts", "--merge"]),
    "big-endian": (lambda file: setattr(file, "endianess", gguf.GGUFEndian.BIG), ["big-endian"]),
}


@pytest.mark.parametrize("case", BAD_GGUF)
def test_a_bad_gguf(case: str, file: models.Gguf, tmp_path: Path) -> None:
    change, says = BAD_GGUF[case]
    change(file)
    path = file.write(tmp_path / "model.gguf")
    refused(path, tmp_path / "out", "--no-tokenizer", says=[f"{path}: ", *says] if "fused" not in case else says)


def test_a_damaged_gguf(file: models.Gguf, tmp_path: Path) -> None:
    path = file.write(tmp_path / "model.gguf")
    whole = path.read_bytes()
    for length in (len(whole) - 1000, 2000, 30):
        path.write_bytes(whole[:length])
        refused(path, tmp_path / "out", says=[f"{path}: the GGUF file is cut short, damaged"])
    place = whole.index(b"output.weight") + len("output.weight") + 4 + 2 * 8  # number of dimensions, two of them
    assert whole[place : place + 4] == (142).to_bytes(4, "little")
    path.write_bytes(whole[:place] + (143).to_bytes(4, "little") + whole[place + 4 :])
    refused(path, tmp_path / "out", says=["143", "a tensor type that the gguf package does not know"])
    path.write_bytes(b"PK\3\4" + whole[4:])
    refused(path, tmp_path / "out", says=[f"{path}: no GGUF file: it begins with b'PK"])
    path.write_bytes(b"")
    refused(path, tmp_path / "out", says=[f"{path}: no GGUF file: it begins with b''"])


def test_packages_that_read_a_gguf_are_named(
    file: models.Gguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file.write(tmp_path / "model.gguf")
    monkeypatch.delitem(sys.modules, "pq2.gguf_source", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(path, tmp_path / "out", says=["read by the packages gguf and transformers", "gguf"])


def test_requests_that_a_gguf_does_not_take(file: models.Gguf, tmp_path: Path) -> None:
    path = file.write(tmp_path / "model.gguf")
    refused(
        path, tmp_path / "out", "--rotate", 128, says=["--rotate: for a Hugging Face directory", "--rotation-block"]
    )
    refused(path, tmp_path / "out", "--no-head", says=["--no-head: for a Hugging Face directory"])
    refused(path, tmp_path / "out", "--rotation-block", 128, says=["--rotation-block and --signs go together"])
    refused(path, tmp_path / "out", says=["makes no tokenizer of it", "--tokenizer DIR"])


@pytest.mark.parametrize(("end", "has"), [("<|endoftext|>", "297 and has 300"), ("</s>", "300 and has 301")])
def test_a_tokenizer_that_is_not_the_files_is_refused(
    end: str, has: str, file: models.Gguf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some versions of transformers take the end of text that their class knows, or add it."""
    file.tokenizer = True
    path = file.write(tmp_path / "model.gguf")
    make = AutoTokenizer.from_pretrained

    def with_another_end(*arguments: Any, **options: Any) -> Any:
        tokenizer = make(*arguments, **options)
        tokenizer.add_special_tokens({"eos_token": end})
        return tokenizer

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", with_another_end)
    says = [f"ends texts with token {has} tokens, where the file says 299 and 300", "--tokenizer DIR"]
    refused(path, tmp_path / "out", says=says)
