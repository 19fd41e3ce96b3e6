"""`vllm bench serve` against a running server: the result it saves, as data."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """What is sent: lengths in tokens, requests in flight, requests in all."""

    input_len: int
    output_len: int
    max_concurrency: int
    num_prompts: int


def bench_serve(python: str, base_url: str, model: str, tokenizer: str, shape: Shape, *, seed: int) -> dict[str, Any]:
    """Run it once, greedily, with `ignore_eos`.

    Args:
        python: Interpreter that has vLLM.
        base_url: The server's root.
        model: Its served model name.
        tokenizer: Folder of the tokeniser that turns random ids into prompts.
        shape: What to send.
        seed: Of the prompts: another one for each run, or the prefix cache answers.

    Raises:
        SystemExit: It failed, or not every request completed.
    """
    with tempfile.TemporaryDirectory() as name:
        command = [python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
        command += ["--base-url", base_url, "--model", model, "--tokenizer", tokenizer, "--dataset-name", "random"]
        command += ["--random-input-len", str(shape.input_len), "--random-output-len", str(shape.output_len)]
        command += ["--num-prompts", str(shape.num_prompts), "--max-concurrency", str(shape.max_concurrency)]
        command += ["--ignore-eos", "--disable-tqdm", "--temperature", "0", "--seed", str(seed)]
        command += ["--save-result", "--result-dir", name, "--result-filename", "result.json"]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"vllm bench serve failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads((Path(name) / "result.json").read_text())
    if result["completed"] != shape.num_prompts:
        raise SystemExit(f"vllm bench serve completed {result['completed']} of {shape.num_prompts} requests")
    return result
