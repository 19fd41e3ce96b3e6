"""Model directories: the shapes are those they claim, the files are what vLLM and transformers read, bad input is told."""

import json
import os
import resource
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from pq2 import format as pq2_format
from pq2 import generate, shapes

KERNELS = Path(generate.__file__).parent.parent


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    if (folder / "model.safetensors").exists():
        assert not (folder / "model.safetensors.index.json").exists()
        return load_file(folder / "model.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    loaded: dict[str, torch.Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        here = load_file(folder / file)
        assert all(index["weight_map"][name] == file for name in here)
        loaded |= here
    assert set(loaded) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in loaded.values())
    return loaded


def described(name: str, **options: Any) -> tuple[Any, list[shapes.Matrix]]:
    config = shapes.make_config(name, generate.byte_tokenizer())
    return config, shapes.matrices(shapes.meta_model(config), **options)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says when it refuses; wherever that is, it exits with 2."""
    try:
        code = generate.main(arguments)
    except SystemExit as exit_:
        code = exit_.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    return captured.err


def test_the_projections_of_the_27b_hybrid() -> None:
    config, found = described("hybrid-27b")
    assert {(row.n, row.k, row.converted): row.count for row in shapes.projections(found)} == {
        (16384, 5120, True): 48,
        (5120, 6144, True): 64,
        (14336, 5120, True): 16,
        (34816, 5120, True): 64,
        (5120, 17408, True): 64,
        (248320, 5120, True): 1,
        (96, 5120, False): 48,
    }
    step = sum(row.count * row.weight_bytes for row in shapes.projections(found) if row.converted)
    assert step == pytest.approx(6.80e9, rel=1e-3)
    assert config.layer_types.count("linear_attention") == 48
    assert config.layer_types.count("full_attention") == 16


def test_the_projections_of_the_8b_hybrid() -> None:
    _, found = described("hybrid-8b")
    assert {(row.n, row.k, row.converted): row.count for row in shapes.projections(found)} == {
        (12288, 4096, True): 24,
        (4096, 4096, True): 32,
        (10240, 4096, True): 8,
        (24576, 4096, True): 32,
        (4096, 12288, True): 32,
        (248320, 4096, True): 1,
        (64, 4096, False): 24,
    }


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "intermediate"),
    [("qwen3-0.6b", 28, 1024, 3072), ("qwen3-8b", 36, 4096, 12288), ("qwen3-32b", 64, 5120, 25600)],
)
def test_a_dense_shape(name: str, layers: int, hidden: int, intermediate: int) -> None:
    _, found = described(name)
    counts = {(row.n, row.k): row.count for row in shapes.projections(found)}
    assert counts[2 * intermediate, hidden] == layers
    assert counts[hidden, intermediate] == layers
    assert counts[151_936, hidden] == 1
    assert sum(counts.values()) == 4 * layers + 1
    assert all(matrix.converted for matrix in found)


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_the_config_is_read_back(name: str, tmp_path: Path) -> None:
    generate.generate(name, tmp_path / name)
    config = transformers.AutoConfig.from_pretrained(tmp_path / name)
    assert type(config).__name__ == shapes.SHAPES[name].config
    assert config.architectures == [shapes.SHAPES[name].architecture]
    assert config.tie_word_embeddings is False
    quantization = config.quantization_config
    left = quantization.pop("modules_to_not_convert")
    assert quantization == {"quant_method": "pq2", "group_size": 128, "rotation_block": None}
    gated = [at for at, kind in enumerate(getattr(config, "layer_types", [])) if kind == "linear_attention"]
    assert sorted(left) == sorted(f"model.layers.{at}.linear_attn.in_proj_{x}" for at in gated for x in "ab")
    assert all(matrix.k % 128 == 0 for matrix in described(name)[1])
    assert not list((tmp_path / name).glob("*.safetensors"))


@pytest.mark.parametrize("name", ["tiny", "hybrid-tiny"])
def test_weights_are_blocks_and_the_rest_is_fresh(name: str, tmp_path: Path) -> None:
    generate.generate(name, tmp_path / "model", weights=True)
    loaded = tensors(tmp_path / "model")
    config, found = described(name)
    assert set(loaded) == set(shapes.meta_model(config).state_dict())
    for matrix in found:
        weight = loaded.pop(f"{matrix.name}.weight")
        if matrix.converted:
            assert weight.shape == (matrix.n, matrix.k // 128 * 34)
            pq2_format.check_blocks(weight, matrix.name)
        else:
            assert weight.dtype == torch.bfloat16
            assert weight.shape == (matrix.n, matrix.k)
            assert weight.float().std() == pytest.approx(0.02, rel=0.2)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    # Qwen3.5 stores what is added to one, but for the norm behind the gate.
    start = {"tiny": 1.0, "hybrid-tiny": 0.0}[name]
    assert torch.all(loaded["model.norm.weight"] == start)
    if name == "hybrid-tiny":
        assert torch.all(loaded["model.layers.0.linear_attn.norm.weight"] == 1)
        assert torch.all(loaded["model.layers.0.linear_attn.dt_bias"] == 1)
        decay = loaded["model.layers.0.linear_attn.A_log"].float()
        assert decay.isfinite().all()
        assert decay.std() > 0


@pytest.mark.parametrize("name", ["tiny", "hybrid-tiny"])
def test_transformers_loads_the_unquantised_twin(name: str, tmp_path: Path) -> None:
    generate.generate(name, tmp_path / "model", weights=True, bf16=True)
    assert "quantization_config" not in json.loads((tmp_path / "model" / "config.json").read_text())
    model, problems = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(problems.values()), problems
    with torch.no_grad():
        logits = model(torch.arange(40).unsqueeze(0)).logits.float()
    assert logits.isfinite().all()
    assert logits.std() > 0.1


def test_a_server_that_runs_as_somebody_else_may_read_the_weights(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        generate.generate("tiny", tmp_path / "model", weights=True)
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "model").glob("*.safetensors")} == {
        "model.safetensors": 0o644
    }


def test_the_seed_decides(tmp_path: Path) -> None:
    made = {}
    for name, seed in {"a": 0, "b": 0, "c": 1}.items():
        generate.generate("hybrid-tiny", tmp_path / name, weights=True, seed=seed)
        made[name] = tensors(tmp_path / name)
    varied = [name for name in made["a"] if not torch.equal(made["a"][name], made["c"][name])]
    assert all(torch.equal(made["a"][name], made["b"][name]) for name in made["a"])
    assert any(name.endswith("A_log") for name in varied)
    assert {name for name, tensor in made["a"].items() if tensor.dtype == torch.uint8} <= set(varied)
    gate, up = (made["a"][f"model.layers.0.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert not torch.equal(gate, up)


def test_shards_hold_what_one_file_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate.generate("tiny", tmp_path / "one", weights=True)
    monkeypatch.setattr(generate, "SHARD_BYTES", 100_000)
    generate.generate("tiny", tmp_path / "many", weights=True)
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
    ]
    assert len(files) > 2
    assert all(sum(tensor.nbytes for tensor in load_file(file).values()) <= 100_000 for file in files)
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert set(one) == set(many)
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = shapes.SHAPES["tiny"].sizes | {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16}
    wide = shapes.Shape("Qwen3Config", "Qwen3ForCausalLM", sizes, None)
    monkeypatch.setitem(shapes.SHAPES, "wide", wide)
    generate.generate("wide", tmp_path / "model", weights=True, rotated=True)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["quantization_config"]["rotation_block"] == 1024
    loaded = tensors(tmp_path / "model")
    _, found = described("wide")
    signs = {matrix.name: loaded[f"{matrix.name}.signs"] for matrix in found}
    for matrix in found:
        assert signs[matrix.name].dtype == torch.int8
        assert signs[matrix.name].shape == (matrix.k,)
        assert set(signs[matrix.name].tolist()) == {-1, 1}
    layer = "model.layers.0"
    query, key, value, out = (signs[f"{layer}.self_attn.{x}_proj"] for x in "qkvo")
    assert torch.equal(query, key)
    assert torch.equal(query, value)
    assert not torch.equal(query, out)
    assert torch.equal(signs[f"{layer}.mlp.gate_proj"], signs[f"{layer}.mlp.up_proj"])


def test_the_tokenizer_of_bytes(tmp_path: Path) -> None:
    generate.generate("tiny", tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "Zwölf Boxkämpfer, 12 箱\n\tend"
    tokens = tokenizer(text).input_ids
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text
    assert len(tokenizer) == transformers.AutoConfig.from_pretrained(tmp_path / "model").vocab_size
    turns = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert turns == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id) == "<|im_end|>"


def test_a_tokenizer_is_copied(tmp_path: Path) -> None:
    source = generate.byte_tokenizer()
    source.add_tokens(["horse"])
    source.save_pretrained(tmp_path / "source")
    generate.generate("tiny", tmp_path / "model", tokenizer=tmp_path / "source")
    copied = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert copied("horse").input_ids == [259]
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")
    assert config.vocab_size == 260
    assert config.eos_token_id == copied.eos_token_id


def test_the_command_says_what_it_made(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pq2.generate", "hybrid-27b", str(tmp_path / "deep" / "model")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(KERNELS), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["5120", "x", "17408", "64", "PQ2", "23.67", "1.515"] in rows
    assert ["96", "x", "5120", "48", "bf16", "0.98", "0.047"] in rows
    assert rows[-1] == [str(tmp_path / "deep" / "model")]
    assert (tmp_path / "deep" / "model" / "config.json").is_file()


def test_an_unknown_shape_is_told_with_those_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "qwen3-9b", str(tmp_path / "model"))
    assert "qwen3-9b" in said
    assert all(name in said for name in shapes.SHAPES)


def test_what_exists_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    assert f"{tmp_path / 'model'} exists; remove it" in refused(capsys, "tiny", str(tmp_path / "model"))
    (tmp_path / "other.partial").mkdir()
    assert "other.partial exists: another run makes it" in refused(capsys, "tiny", str(tmp_path / "other"))
    assert (tmp_path / "other.partial").is_dir()
    (tmp_path / "file").touch()
    assert "cannot be made: " in refused(capsys, "tiny", str(tmp_path / "file" / "model"))


def test_a_tokenizer_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = generate.byte_tokenizer()
    large.add_tokens([f"<{n}>" for n in range(151_936)])
    large.save_pretrained(tmp_path / "large")
    said = refused(capsys, "qwen3-0.6b", str(tmp_path / "model"), "--tokenizer", str(tmp_path / "large"))
    assert "the tokenizer has 152,195 tokens, and the vocabulary of qwen3-0.6b 151,936" in said
    assert not (tmp_path / "model").exists()


def test_a_tokenizer_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "model")
    assert "no such directory" in refused(capsys, "tiny", target, "--tokenizer", str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    assert "finds no tokenizer there" in refused(capsys, "tiny", target, "--tokenizer", str(tmp_path / "empty"))


def test_what_cannot_be_rotated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "tiny", str(tmp_path / "model"), "--rotated")
    assert "K of model.embed_tokens is 256" in said
    assert "blocks of 1024" in said
    assert "has no rotation" in refused(capsys, "tiny", str(tmp_path / "model"), "--rotated", "--bf16")


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")(10**12, 10**12, 10**8)
    monkeypatch.setattr(generate.shutil, "disk_usage", lambda _: usage)
    said = refused(capsys, "qwen3-0.6b", str(tmp_path / "model"), "--weights")
    assert "the weights take 0.20 GB and the disk has 0.10 GB free" in said
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    # Files may have 1 MB here: the config fits, the shard does not, and the write fails as on a disk that is full.
    done = subprocess.run(
        [sys.executable, "-m", "pq2.generate", "tiny", str(tmp_path / "model"), "--weights", "--bf16"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(KERNELS), os.environ.get("PYTHONPATH", "")])},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"{tmp_path / 'model'} cannot be written: " in done.stderr
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []
