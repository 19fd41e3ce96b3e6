"""python -m pq2.convert with a Hugging Face directory: what it makes of a model, and what it says of a bad one."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from command import converted, not_converted, pq2_modules, refused, run, values
from safetensors.torch import load_file, save_file

from pq2 import convert
from pq2.format import pack, ternarize
from pq2.quantize import rotate

SMOLLM = Path.home() / ".cache/abharness/models/smollm2-135m-instruct"


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, bfloat16, untied."""
    path = tmp_path_factory.mktemp("models") / "llama"
    models.llama().to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, float32, tied, in shards."""
    path = tmp_path_factory.mktemp("models") / "qwen3"
    models.qwen3().save_pretrained(path, max_shard_size="1MB")
    return path


@pytest.fixture
def edited(llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the Llama, with tensors and config changed by the caller's function."""

    def edit(change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> Path:
        path = tmp_path / "edited"
        shutil.copytree(llama, path)
        tensors, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
        change(tensors, config)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))
        return path

    return edit


def test_a_hugging_face_model(llama: Path, tmp_path: Path) -> None:
    out = converted(llama, tmp_path / "out", "--no-tokenizer")
    assert "PQ2: 16 modules; 1 file" in out
    source, target = load_file(llama / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    assert target.keys() == source.keys()
    for name, tensor in source.items():
        expected = pack(*ternarize(tensor)) if tensor.ndim == 2 else tensor
        assert torch.equal(target[name], expected)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "pq2",
        "group_size": 128,
        "rotation_block": None,
        "modules_to_not_convert": [],
    }
    assert config == json.loads((llama / "config.json").read_text())
    # Gaussian weights: the best ternary matrix leaves about 0.436 of their norm, a little less in groups of 128.
    kinds = [line.split() for line in out.splitlines() if line.startswith(("q_proj", "down_proj", "embed_tokens"))]
    assert [len(kinds), all(0.42 < float(kind[2]) < 0.44 for kind in kinds)] == [3, True]


def test_a_rotated_model_has_signs_and_computes_the_same(llama: Path, tmp_path: Path) -> None:
    converted(llama, tmp_path / "out", "--no-tokenizer", "--rotate", 128, "--seed", 3)
    source, target = load_file(llama / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    modules = pq2_modules(tmp_path / "out")
    assert {name for name in target if name.endswith(".signs")} == {f"{module}.signs" for module in modules}
    by_width: dict[int, list[torch.Tensor]] = {}
    for module in modules:
        weight, signs = source[f"{module}.weight"].float(), target[f"{module}.signs"]
        assert signs.dtype == torch.int8
        assert signs.unique().tolist() == [-1, 1]
        by_width.setdefault(weight.shape[1], []).append(signs)
        assert torch.equal(target[f"{module}.weight"], pack(*ternarize(rotate(weight, signs, 128))))
        # The matrix it stands for is as near to the original as an unrotated ternary one is.
        assert 0.3 < (values(tmp_path / "out", module) - weight).norm() / weight.norm() < 0.45
    assert set(by_width) == {256, 512}
    assert all(torch.equal(signs, same[0]) for same in by_width.values() for signs in same)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["rotation_block"] == 128
    converted(llama, tmp_path / "other", "--no-tokenizer", "--rotate", 128, "--seed", 4)
    other = load_file(tmp_path / "other/model.safetensors")
    assert not torch.equal(other["lm_head.signs"], target["lm_head.signs"])


def test_shards_in_and_shards_out(qwen3: Path, tmp_path: Path) -> None:
    assert len(list(qwen3.glob("*.safetensors"))) > 1
    converted(qwen3, tmp_path / "one", "--no-tokenizer")
    converted(qwen3, tmp_path / "many", "--no-tokenizer", "--max-shard-size", "100kB")
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{k:05d}-of-00004.safetensors" for k in range(1, 5)]
    assert set(index["weight_map"].values()) == set(files)
    one = load_file(tmp_path / "one/model.safetensors")
    many = {name: tensor for file in files for name, tensor in load_file(tmp_path / "many" / file).items()}
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    # Tied: the embedding is PQ2 and there is no head of its own.
    assert "model.embed_tokens" in pq2_modules(tmp_path / "one")
    assert "lm_head.weight" not in one


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        (["--no-embedding"], ["model.embed_tokens"]),
        (["--no-head"], ["lm_head"]),
        (
            ["--keep", r"layers\.0\.mlp", "--keep", "o_proj"],
            ["o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
        ),
    ],
)
def test_what_is_kept_is_listed_and_unchanged(llama: Path, tmp_path: Path, options: list[str], kept: list[str]) -> None:
    converted(llama, tmp_path / "out", "--no-tokenizer", *options)
    listed = not_converted(tmp_path / "out")
    source, target = load_file(llama / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    matrices = {name.removesuffix(".weight") for name, tensor in source.items() if tensor.ndim == 2}
    assert set(listed) == {
        module for module in matrices if module.endswith(tuple(kept)) and "layers.1.mlp" not in module
    }
    assert pq2_modules(tmp_path / "out") == matrices - set(listed)
    assert all(torch.equal(target[f"{module}.weight"], source[f"{module}.weight"]) for module in listed)


def test_a_tied_head_stays_with_its_embedding(qwen3: Path, tmp_path: Path) -> None:
    converted(qwen3, tmp_path / "out", "--no-tokenizer", "--no-embedding")
    assert set(not_converted(tmp_path / "out")) == {"model.embed_tokens", "lm_head"}


def test_a_copy_of_a_tied_head_is_left_out(edited: Callable[..., Path], tmp_path: Path) -> None:
    def tie(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        config["tie_word_embeddings"] = True

    out = converted(edited(tie), tmp_path / "out", "--no-tokenizer")
    assert "note: lm_head.weight equals the embedding" in out
    assert "lm_head.weight" not in load_file(tmp_path / "out/model.safetensors")


def test_gates_convolutions_experts_and_towers_stay(edited: Callable[..., Path], tmp_path: Path) -> None:
    stay = {
        "model.layers.0.linear_attn.in_proj_a": (48, 256),
        "model.layers.0.linear_attn.in_proj_b": (48, 256),
        "model.layers.0.linear_attn.conv1d": (512, 1, 4),
        "model.layers.0.mlp.gate": (512, 256),
        "model.layers.0.mlp.experts.0.down_proj": (256, 512),
        "model.visual.blocks.0.attn.q_proj": (256, 256),
    }
    go = {"model.layers.0.linear_attn.in_proj_qkv": (512, 256), "model.layers.0.linear_attn.in_proj_z": (128, 256)}

    def hybrid(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors.update({f"{module}.weight": torch.randn(shape) for module, shape in (stay | go).items()})

    source = edited(hybrid)
    before = pq2_modules(source)
    out = converted(source, tmp_path / "out", "--no-tokenizer")
    assert before == set()
    assert set(not_converted(tmp_path / "out")) == set(stay)
    assert go.keys() < pq2_modules(tmp_path / "out")
    assert (
        "kept: 2 (fewer than 256 rows): model.layers.0.linear_attn.in_proj_a, model.layers.0.linear_attn.in_proj_b"
        in out
    )


def test_what_a_server_needs_beside_the_weights_is_copied(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    beside = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"]
    for name in beside:
        (source / name).write_text(f"this is {name}")
    (source / "README.md").write_text("benchmarks of the original")
    converted(source, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {*beside, "config.json", "model.safetensors"}
    assert (tmp_path / "out/tokenizer.json").read_text() == "this is tokenizer.json"
    assert {(tmp_path / "out" / name).stat().st_mode & 0o777 for name in names} == {0o666 & ~_umask()}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def set_tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    return lambda tensors, config: tensors.update({name: make(tensors[name])})


def with_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return change


DOWN = "model.layers.1.mlp.down_proj.weight"
BAD_CHECKPOINTS = {
    "NaN in a matrix": (set_tensor(DOWN, with_value(float("nan"))), [DOWN.removesuffix(".weight"), "NaN or infinite"]),
    "infinity in a matrix": (set_tensor(DOWN, with_value(float("inf"))), ["down_proj", "NaN or infinite"]),
    "beyond fp16": (set_tensor(DOWN, lambda t: t * 0 + 1e6), ["down_proj", "exceeds fp16 (65504)"]),
    "NaN in a norm": (set_tensor("model.norm.weight", with_value(float("nan"))), ["model.norm.weight", "NaN"]),
    "integers": (set_tensor(DOWN, lambda t: t.to(torch.int8)), [DOWN, "torch.int8", "bf16, fp16 or fp32"]),
    "K": (
        set_tensor(DOWN, lambda t: t[:, :500].contiguous()),
        ["down_proj: K is 500", "multiple of 128", "--keep REGEX"],
    ),
    "quantised by another method": (
        lambda tensors, config: config.update(quantization_config={"quant_method": "awq"}),
        ["config.json", "already quantised", "method awq", "convert the original"],
    ),
    "tensors of another method": (
        lambda tensors, config: tensors.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}),
        ["weight_scale", "another method"],
    ),
    "a tied head of its own": (
        lambda tensors, config: config.update(tie_word_embeddings=True),
        ["lm_head.weight differs from model.embed_tokens.weight", "tie_word_embeddings"],
    ),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_a_bad_checkpoint(case: str, edited: Callable[..., Path], tmp_path: Path) -> None:
    change, says = BAD_CHECKPOINTS[case]
    refused(edited(change), tmp_path / "out", "--no-tokenizer", says=says)


BAD_REQUESTS = {
    "rotation that does not divide": (["--rotate", 512], ["K is 256, which rotation blocks of 512 do not divide"]),
    "rotation of no power of two": (["--rotate", 96], ["blocks of 96", "power of two"]),
    "ranks that cut a group": (
        ["--tensor-parallel", 8],
        ["down_proj: 8 tensor", "cut a group of 128", "groups: 1, 2, 4"],
    ),
    "ranks that cut a rotation": (
        ["--rotate", 256, "--tensor-parallel", 2],
        ["o_proj: 2 tensor", "would cut the rotation"],
    ),
    "part of a fused layer": (["--keep", "k_proj"], ["k_proj: vLLM fuses this with", "keep the others too"]),
    "an expression that keeps nothing": (["--keep", "qkv"], ["--keep qkv", "no module"]),
    "nothing to convert": (["--keep", "."], ["nothing to convert"]),
    "options of a GGUF": (["--rotation-block", 128], ["for a GGUF", "--rotate BLOCK"]),
    "no such tokenizer": (["--tokenizer", "nowhere"], ["--tokenizer nowhere", "no such directory"]),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request(case: str, llama: Path, tmp_path: Path) -> None:
    options, says = BAD_REQUESTS[case]
    refused(llama, tmp_path / "out", *options, *([] if "--tokenizer" in options else ["--no-tokenizer"]), says=says)


def test_a_tied_head_cannot_go_another_way_than_its_embedding(qwen3: Path, tmp_path: Path) -> None:
    refused(
        qwen3, tmp_path / "out", "--no-tokenizer", "--no-head", says=["both become PQ2 or neither", "--no-embedding"]
    )


@pytest.mark.parametrize(
    "options",
    [["--keep", "("], ["--rotate", "0"], ["--max-shard-size", "2"], ["--seed", "-1"], ["--tensor-parallel", "x"]],
)
def test_an_option_that_cannot_be_read(options: list[str], tmp_path: Path) -> None:
    done = run(tmp_path, tmp_path / "out", *options)
    assert done.returncode == 2
    assert f"argument {options[0]}: " in done.stderr
    assert "Traceback" not in done.stderr


def test_paths_that_cannot_be(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    refused(tmp_path / "no", tmp_path / "out", says=[f"{tmp_path}/no: there is no such file or directory"])
    refused(llama, tmp_path / "there", says=["there: exists already"])
    refused(llama, tmp_path / "no/out", says=["no: there is no such directory"])
    refused(tmp_path / "there", tmp_path / "out", says=["config.json: there is no such file"])
    refused(llama, tmp_path / "out", says=["no tokenizer in SOURCE", "--tokenizer DIR"])
    refused(llama, tmp_path / "out", "--tokenizer", tmp_path / "there", says=["no tokenizer files in this directory"])


def test_damaged_files_of_a_checkpoint(qwen3: Path, tmp_path: Path) -> None:
    def source(name: str) -> Path:
        shutil.copytree(qwen3, tmp_path / name)
        return tmp_path / name

    shard = sorted(path.name for path in qwen3.glob("*.safetensors"))[1]
    short = source("short")
    (short / shard).write_bytes((qwen3 / shard).read_bytes()[:-1])
    refused(short, tmp_path / "out", says=[f"{short}/{shard}: cut short, damaged or no safetensors file"])
    (short / shard).write_bytes(b"hello")
    refused(short, tmp_path / "out", says=[f"{short}/{shard}: cut short, damaged or no safetensors file"])
    (short / shard).unlink()
    refused(short, tmp_path / "out", says=[f"{short}/{shard}: this shard is missing"])
    save_file({"other": torch.ones(1)}, short / shard)
    refused(short, tmp_path / "out", says=[f"{short}/{shard}: model.", "is not in it"])
    (short / "model.safetensors.index.json").write_text("{}")
    refused(short, tmp_path / "out", says=["index.json: there is no weight_map"])
    (short / "model.safetensors.index.json").unlink()
    refused(short, tmp_path / "out", says=["neither model.safetensors nor model.safetensors.index.json", ".bin"])
    (short / "config.json").write_text("{")
    refused(short, tmp_path / "out", says=["config.json: no valid JSON"])


def test_a_target_that_cannot_be_written_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = run(llama, tmp_path / "out", "--no-tokenizer", preexec_fn=small_files)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"pq2.convert: {tmp_path}/out: cannot be written: ")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 360 kB that the tensors take are known before."""
    size = sum(tensor.nbytes for tensor in _converted_tensors(llama, tmp_path).values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    says = [f"{tmp_path}: 361.31 kB are free on this disk, and the model takes 361.31 kB", "make room"]
    refused(llama, tmp_path / "out", "--no-tokenizer", "--rotate", 128, says=says)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    assert convert.main([str(llama), str(tmp_path / "out"), "--no-tokenizer", "--rotate", "128"]) == 0


def _converted_tensors(source: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    assert convert.main([str(source), str(tmp_path / "first"), "--no-tokenizer", "--rotate", "128"]) == 0
    return load_file(tmp_path / "first/model.safetensors")


def test_a_refusal_of_the_command(llama: Path, tmp_path: Path) -> None:
    done = run(llama, tmp_path / "out", "--no-tokenizer", "--rotate", 512)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("pq2.convert: lm_head: K is 256, which rotation blocks of 512")
    assert done.stderr.count("\n") == 1


def test_a_conversion_that_is_ended_leaves_nothing(qwen3: Path, tmp_path: Path) -> None:
    """SIGTERM while a tensor is read: the partial directory goes, too."""
    code = (
        "import os, signal, sys; from pq2 import convert; load = convert.HfSource.load\n"
        "def ended(self, name):\n"
        "    if 'layers.1' in name: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return load(self, name)\n"
        "convert.HfSource.load = ended\n"
        f"sys.exit(convert.main([{str(qwen3)!r}, {str(tmp_path / 'out')!r}, '--no-tokenizer']))"
    )
    before = sorted(tmp_path.iterdir())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "pq2.convert: interrupted; nothing is left of TARGET\n"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(not SMOLLM.is_dir(), reason=f"{SMOLLM} is not there: `abharness model fetch smollm2` makes it")
def test_a_real_model_whose_width_is_no_multiple_of_128(tmp_path: Path) -> None:
    refused(SMOLLM, tmp_path / "out", says=["K is 576", "must be a multiple of 128", "--keep REGEX"])
    # The layers that fit can be converted: down_proj has K = 1536.
    converted(SMOLLM, tmp_path / "out", "--no-embedding", "--keep", "self_attn|gate_proj|up_proj")
    assert pq2_modules(tmp_path / "out") == {f"model.layers.{layer}.mlp.down_proj" for layer in range(30)}
    assert len(not_converted(tmp_path / "out")) == 30 * 6 + 2
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (SMOLLM / "tokenizer.json").read_bytes()
