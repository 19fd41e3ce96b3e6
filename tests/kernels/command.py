"""python -m pq2.convert as the tests call it, and what they look at in its target."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pq2 import convert
from pq2.format import check_blocks, unpack
from pq2.quantize import unrotate


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pq2.convert", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, **options)


def converted(*arguments: object) -> str:
    done = run(*arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def refused(*arguments: object, says: list[str]) -> None:
    """One message, exit code 2, and the folder of TARGET as it was. In this process: quicker than a command."""
    target = Path(str(arguments[1]))
    before = sorted(target.parent.iterdir()) if target.parent.is_dir() else None
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = convert.main([str(argument) for argument in arguments])
    assert (code, out.getvalue()) == (2, "")
    message = err.getvalue()
    assert message.startswith("pq2.convert: ")
    assert message.count("\n") == 1, message
    for words in says:
        assert words in message
    assert before == (sorted(target.parent.iterdir()) if target.parent.is_dir() else None)


def values(directory: Path, name: str) -> torch.Tensor:
    """What a PQ2 module of a converted model stands for, rotation undone: float32 [N, K]."""
    tensors = load_file(directory / "model.safetensors")
    block = json.loads((directory / "config.json").read_text())["quantization_config"]["rotation_block"]
    check_blocks(tensors[f"{name}.weight"])
    codes, scales = unpack(tensors[f"{name}.weight"])
    weight = (codes.float() - 1) * scales.float().repeat_interleave(128, dim=1)
    return weight if block is None else unrotate(weight, tensors[f"{name}.signs"], block)


def pq2_modules(directory: Path) -> set[str]:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return {n.removesuffix(".weight") for n in sorted(file.keys()) if file.get_slice(n).get_dtype() == "U8"}


def not_converted(directory: Path) -> list[str]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
