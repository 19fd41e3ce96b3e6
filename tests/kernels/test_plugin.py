"""The plugin in processes of vLLM: registered by its entry point; its switches read, logged, reported, in the cache key."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import command
import models
import pytest
import torch

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

LOAD = """
from vllm.plugins import load_general_plugins
load_general_plugins()
"""
REPORT = """
import hashlib, json, sys
import pq2.vllm_plugin as plugin
import vllm.envs
factors = vllm.envs.compile_factors()
from vllm.model_executor.layers.quantization import get_quantization_config
print(json.dumps({
    "report": plugin.abharness_report(), "factor": factors["PQ2_CHOICE"],
    "config": get_quantization_config("pq2").__name__,
}))
"""
AS_ON_CUDA = """
from pq2 import switches
import os
switches.resolved = lambda device: switches.resolve(os.environ, "cuda")
"""
WITHOUT_TRITON = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == "triton" else find(name, *package)
"""
GENERATE = """
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, enforce_eager=True, max_num_seqs=4, seed=0,
          kv_cache_memory_bytes=1 << 26, load_format=sys.argv[2])
made = llm.generate(["hello", "abc"], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
import pq2.vllm_plugin as plugin
print(json.dumps({"ids": [list(one.outputs[0].token_ids) for one in made], "report": plugin.abharness_report()}))
"""

PROBABILITIES = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], dtype="float32", max_model_len=128, enforce_eager=True, max_num_seqs=4, seed=0,
          kv_cache_memory_bytes=1 << 26, skip_tokenizer_init=True)
ids = json.loads(sys.argv[2])
options = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
[made] = llm.generate({"prompt_token_ids": ids}, options)
places = zip(made.prompt_logprobs[1:], ids[1:], strict=True)
print(json.dumps([place[token].logprob for place, token in places]))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that brings the plugin to an interpreter, as an installed package would."""
    info = tmp_path / "site" / "pq2-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pq2\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\npq2 = pq2.vllm_plugin:register\n")
    (tmp_path / "site" / "pq2").symlink_to(KERNELS / "pq2")
    return tmp_path / "site"


def _python(site: Path, code: str, *arguments: str, **switches: str) -> subprocess.CompletedProcess[str]:
    beside = os.environ["PYTHONPATH"].split(os.pathsep)[1:]  # Triton, without the folder that has no entry point
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PQ2_", "TRITON_"))}
    environ |= {
        "PYTHONPATH": os.pathsep.join([str(site), *beside]), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TORCHDYNAMO_DISABLE": "1", **switches,
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environ, check=False, timeout=300
    )


def _last(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_loads_the_plugin_by_its_entry_point_and_it_reports(site: Path) -> None:
    done = _python(site, LOAD + REPORT, PQ2_KERNELS="reference")
    found = _last(done)
    assert found["config"] == "Pq2Config"
    assert (
        found["report"]["choice"]
        == "kernel set reference, single=off, small=off, ring=off, prefill=off, small_gemm=off"
    )
    assert found["report"]["given"] == {"PQ2_KERNELS": "reference"}
    assert set(found["report"]["calls"]) == {
        "legacy", "single", "direct", "ring", "prefill", "small_gemm", "dense", "reference",
    }  # fmt: skip


def test_the_choice_is_logged_with_the_process(site: Path) -> None:
    done = _python(site, LOAD + "import os\nprint('pid', os.getpid())")
    pid = done.stdout.split()[-1]
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "pq2: kernel set" in line]
    assert len(lines) == 1
    assert "pq2: kernel set reference, single=off, small=off, ring=off, prefill=off, small_gemm=off" in lines[0]
    assert f"pid {pid}" in lines[0]


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        ({"PQ2_SINGEL": "on"}, "PQ2_SINGEL: no such switch"),
        ({"PQ2_KERNELS": "fast"}, "PQ2_KERNELS='fast': allowed are tuned, exact, legacy, reference"),
        ({"PQ2_KERNELS": "tuned"}, "PQ2_KERNELS=tuned: these kernels run on CUDA, and this process runs on cpu"),
    ],
)
def test_a_process_with_a_bad_switch_does_not_start(site: Path, switches: dict[str, str], message: str) -> None:
    done = _python(site, LOAD, **switches)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_choice_is_in_the_key_of_the_compile_cache(site: Path) -> None:
    keys = {
        kernel_set: _last(_python(site, AS_ON_CUDA + LOAD + REPORT, PQ2_KERNELS=kernel_set))["factor"]
        for kernel_set in ("tuned", "legacy")
    }
    assert "kernel set tuned, single=on" in keys["tuned"]
    assert "kernel set legacy, single=off" in keys["legacy"]


def test_triton_is_asked_for_where_kernels_are(site: Path) -> None:
    done = _python(site, AS_ON_CUDA + WITHOUT_TRITON + LOAD, PQ2_KERNELS="legacy")
    assert done.returncode != 0
    assert "these kernels are written in Triton, which is not installed here" in done.stderr


def test_an_amd_gpu_is_not_taken_for_cuda(site: Path) -> None:
    """Both call their device type `cuda`, as PyTorch does."""
    as_rocm = """
from vllm.platforms import current_platform
kind = type(current_platform)
kind.is_cuda, kind.device_type, kind.device_name = lambda self: False, "cuda", "rocm"
"""
    done = _python(site, as_rocm + LOAD, PQ2_KERNELS="legacy")
    assert done.returncode != 0
    assert "PQ2_KERNELS=legacy: these kernels run on CUDA, and this process runs on rocm" in done.stderr


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "tiny"
    subprocess.run([sys.executable, "-m", "pq2.generate", "tiny", target, "--weights"], check=True, capture_output=True)
    return target


def test_a_model_directory_is_served_by_the_reference_and_dummy_weights_are_others(site: Path, tiny: Path) -> None:
    done = _python(site, "import json, sys\n" + GENERATE, str(tiny), "auto")
    assert (done.stdout + done.stderr).count("pq2: none of its kernels run here: products go through PyTorch") == 1
    loaded = _last(done)
    assert len({tuple(ids) for ids in loaded["ids"]}) == 2  # two prompts, two answers
    calls = loaded["report"]["calls"]
    assert calls.pop("reference") > 0
    assert set(calls.values()) == {0}
    made_up = _last(_python(site, "import json, sys\n" + GENERATE, str(tiny), "dummy"))
    assert made_up["report"]["calls"]["reference"] > 0
    assert made_up["ids"] != loaded["ids"]


@pytest.mark.parametrize("tied", [True, False])
def test_a_rotated_model_is_served_with_its_signs(site: Path, tmp_path: Path, tied: bool) -> None:
    """Against transformers, with the matrices that blocks and signs stand for."""
    model = models.qwen3(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    target = tmp_path / "rotated"
    command.converted(tmp_path / "model", target, "--no-tokenizer", "--rotate", 256)
    weights = model.state_dict()
    for name in command.pq2_modules(target):
        weights[f"{name}.weight"].copy_(command.values(target, name))
    ids = torch.randint(0, models.VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        own = model.eval()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)[range(39), ids[1:]]
    served = torch.tensor(_last(_python(site, PROBABILITIES, str(target), json.dumps(ids))))
    # They differ by the quantisation of activations: by 0.012 at most. They vary by 0.25 from token to token.
    assert own.std() > 0.2
    assert (served - own).abs().max() < 0.03


def test_a_model_that_lacks_a_tensor_is_not_served(site: Path, tiny: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    [file] = broken.glob("*.safetensors")
    tensors = load_file(file)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    (broken / "model.safetensors.index.json").unlink(missing_ok=True)
    done = _python(site, "import json, sys\n" + GENERATE, str(broken), "auto")
    assert done.returncode != 0
    assert (
        "model.layers.1.self_attn.qkv_proj.weight: 128 of 512 rows, from row 256 on, are not in the check"
        in done.stderr
    )
