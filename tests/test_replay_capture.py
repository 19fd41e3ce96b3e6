"""`abharness replay capture`: what it refuses, what it tells of a failed launch, and real steps of a real server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from abharness import spec
from abharness.cli import main
from abharness.environments import resolve_python
from abharness.errors import LaunchError
from abharness.replay import capturing
from abharness.replay.captures import read_capture
from abharness.replay.inside import capture_plugin, capture_steps
from abharness.replay.records import Replay, read_record
from tests.conftest import FAKE_SITE, SCRATCH
from tests.test_run import leftovers, spec_file

ROOT = Path(__file__).parent.parent


def capture(folder: Path, *arguments: str, **faults: Any) -> int:
    return main(["replay", "capture", str(spec_file(folder, **faults)), "-o", str(folder / "captured"), *arguments])


def scratch() -> list[str]:
    return [path.name for path in Path(SCRATCH).glob("ab-*")]


# The command line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--layers", "("], "--layers '(': not a regular expression"),
        (["--rows", "0"], "--rows 0: a whole number from 1 on is expected"),
        (["--steps", "0"], "--steps 0: a whole number from 1 on"),
        (["--input-len", "3"], "--input-len 3: a whole number from 4 on"),
        (["--most-gib", "0"], "--most-gib 0: a number of GiB above 0"),
        (["--most-gib", "nan"], "--most-gib nan: a number of GiB above 0"),
        (["--rows", "64", "--input-len", "64"], "prompts must be longer than the largest row count, 64"),
        (["--set", "server.serve_args=[--max-num-seqs, '1']"], "--max-num-seqs 1 lets no more decode together"),
        (["--set", "server.serve_args=[--max_num_seqs=1]"], "--max-num-seqs 1 lets no more decode together"),
        (["--set", "server.serve_args=[--max-model-len, '320']", "--input-len", "300"],
         "300 prompt tokens and 35 decoded ones does not fit the candidate's --max-model-len 320"),
        (["--set", "server.serve_args=[-tp, '2']"], "--tensor-parallel-size 2: a capture is of a model in one process"),
        (["--set", "server.serve_args=[--pipeline-parallel-size=2]"], "--pipeline-parallel-size 2"),
        (["--set", "variants.candidate.serve_args=[-dp, '2']"], "--data-parallel-size 2"),
        (["--set", "variants.candidate.env.VLLM_PLUGINS=other"], "hint: VLLM_PLUGINS: 'other,abharness_probe,"
                                                                "abharness_capture'"),
        (["--set", "variants.candidate.env.VLLM_PLUGINS=''"], "hint: VLLM_PLUGINS: 'abharness_probe,abharness_capture'"),
        (["--set", "variants.candidate.env.PYTHONPATH=null"], "PYTHONPATH is declared as unset"),
        (["--set", "server.env.ABHARNESS_CAPTURE=x"], "ABHARNESS_CAPTURE is set by abharness"),
        (["--set", "workloads=[{name: p, kind: prefill, input_lens: [32], num_prompts: 3}]"],
         "no decode workload says how many rows a step has"),
        (["--set", "nowhere=1"], "unknown key"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_before_anything_is_made(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = scratch()
    assert capture(tmp_path, *arguments) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "captured").exists()
    assert scratch() == before


def test_the_arguments_of_the_other_variant_do_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of two faults the one that would be told first is the candidate's, and the baseline is asked for."""
    faults = ["variants.candidate.serve_args=[-dp, '2']", "variants.baseline.env.VLLM_PLUGINS=other"]
    sets = [part for fault in faults for part in ("--set", fault)]
    assert capture(tmp_path, *sets, "--variant", "candidate") == 2
    assert "candidate: --data-parallel-size 2" in capsys.readouterr().err
    assert capture(tmp_path, *sets, "--variant", "baseline") == 2
    assert "baseline: VLLM_PLUGINS='other' keeps" in capsys.readouterr().err


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "captured").mkdir()
    (tmp_path / "captured" / "mine").write_text("x")
    assert capture(tmp_path) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "captured").iterdir()] == ["mine"]
    assert main(["replay", "capture", str(spec_file(tmp_path)), "-o", str(tmp_path / "fake.yaml")]) == 2
    assert "not a folder" in capsys.readouterr().err


def test_a_missing_folder_and_a_missing_spec_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["replay", "capture", "x.yaml"])
    assert "-o" in capsys.readouterr().err
    assert main(["replay", "capture", str(tmp_path / "x.yaml"), "-o", str(tmp_path / "captured")]) == 2
    assert "cannot read" in capsys.readouterr().err


# Launches that come to nothing


@pytest.fixture
def known(tmp_path: Path) -> list[str]:
    """A fake vLLM that has the function by which the plugin is told of a model, and loads none."""
    site = tmp_path / "site"
    shutil.copytree(FAKE_SITE, site, ignore=shutil.ignore_patterns("__pycache__"))
    for path in site.rglob("*.py"):  # they find what they run from where they lie
        path.write_text(path.read_text().replace("__file__", repr(str(FAKE_SITE / path.relative_to(site)))))
    loader = site / "vllm" / "model_executor" / "model_loader"
    loader.mkdir(parents=True)
    (loader.parent / "__init__.py").touch()
    (loader / "__init__.py").touch()
    (loader / "utils.py").write_text("def process_weights_after_loading(model, model_config, target_device): pass\n")
    return ["--rows", "2", "--set", f"server.env.PYTHONPATH={site}"]


def test_a_launch_that_fails_is_exit_4_and_leaves_nothing(
    tmp_path: Path, known: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = scratch()
    assert capture(tmp_path, *known, die={"at": "before_listen", "code": 3}) == 4
    assert "error: the candidate's launch failed: ServerDied in phase start" in capsys.readouterr().err
    assert not (tmp_path / "captured").exists()
    assert (scratch(), leftovers()) == (before, [])


def test_a_plugin_that_was_not_loaded_where_the_model_runs_is_told(
    tmp_path: Path, known: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert capture(tmp_path, *known, plugin_api_server_only=[capturing.PLUGIN]) == 4
    told = capsys.readouterr().err
    assert "error: the candidate's launch failed: VerificationFailed" in told
    assert capturing.PLUGIN in told
    assert not (tmp_path / "captured").exists()


def test_a_server_that_loads_no_model_as_it_is_known_is_told(
    tmp_path: Path, known: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert capture(tmp_path, *known) == 4
    assert "error: no model to capture: no process with the plugin loaded one (of 2 with it)" in capsys.readouterr().err
    assert not (tmp_path / "captured").exists()


def test_a_vllm_without_the_function_is_told_and_an_empty_folder_stays_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "captured").mkdir()
    assert capture(tmp_path, "--rows", "2", "--variant", "baseline") == 4
    told = capsys.readouterr().err
    assert "the capture failed in the server: vLLM 0.32.0+fake has no process_weights_after_loading" in told
    assert "hint: use a version from 0.20 to 0.32" in told
    assert list((tmp_path / "captured").iterdir()) == []
    assert leftovers() == []


WISH = capturing.Wish("", (2, 4), 2, 64, "copy", 2**30)


def said(**cells: dict[str, Any]) -> dict[str, Any]:
    files = {rows[1:]: f"rows-{rows[1:]}.safetensors" for rows, cell in cells.items() if cell["steps"] == 2}
    return {
        "pid": 1,
        "fault": None,
        "model": {"files": files, "cells": {rows[1:]: cell for rows, cell in cells.items()}},
    }


def test_too_few_steps_are_told_with_what_was_seen() -> None:
    whole = {"steps": 2, "seen": {}, "discarded": {}}
    short = {"steps": 1, "seen": {"a step of 3 rows": 7}, "discarded": {"3 calls, not the 4": 2}}
    assert capturing.result([said(r2=whole, r4=whole)], WISH)["files"]["4"] == "rows-4.safetensors"
    with pytest.raises(LaunchError) as raised:
        capturing.result([{"pid": 2, "fault": None, "model": None}, said(r2=whole, r4=short)], WISH)
    assert str(raised.value) == (
        "1 of 2 decode steps of 4 rows were captured; seen besides: 7 x a step of 3 rows; discarded: 2 x 3 calls, not the 4"
    )


@pytest.mark.parametrize("models", [0, 2])
def test_no_model_and_several_are_none(models: int) -> None:
    whole = {"steps": 2, "seen": {}, "discarded": {}}
    with pytest.raises(LaunchError, match="no model to capture"):
        capturing.result([said(r2=whole, r4=whole)] * models, WISH)


# The plugin


def test_without_its_variable_it_does_nothing_and_imports_nothing(tmp_path: Path) -> None:
    capturing.install(tmp_path)
    code = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "(plugin,) = [one for one in entry_points(group='vllm.general_plugins') if one.name == 'abharness_capture']\n"
        "plugin.load()()\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))\n"
        "print('abharness_capture.capture_recorder' in sys.modules, hasattr(sys, '_abharness_capture'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    modules, rest = done.stdout.splitlines()
    assert set(eval(modules)) <= {"__main__", "abharness_capture"}
    assert rest == "False False"


def test_its_names_are_those_of_the_spec() -> None:
    assert capture_plugin.VARIABLE == spec.CAPTURE_VARIABLE
    assert spec.CAPTURE_VARIABLE in spec.OWNED_VARIABLES


UNTOLD = "a step of which the attention metadata (SimpleNamespace) does not tell whether it decodes"


class Lengths(list[int]):
    def tolist(self) -> list[int]:
        return list(self)


def meta(**fields: Any) -> dict[str, Any]:
    return {"layer.0": SimpleNamespace(**fields), "layer.1": SimpleNamespace(**fields)}


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        (meta(max_query_len=1, num_actual_tokens=2, seq_lens=Lengths([65, 80])), None),
        (meta(max_query_len=1, num_actual_tokens=2, num_decode_tokens=0, seq_lens=Lengths([65, 80])), None),
        (meta(num_prefills=0, num_prefill_tokens=0, num_decodes=2, num_actual_tokens=2), None),
        (meta(num_prefills=0, num_decodes=2), None),
        (None, capture_steps.DUMMY),
        ([meta(max_query_len=1)], "a step in microbatches"),
        ({}, "a step of which the attention metadata (none) does not tell whether it decodes"),
        (meta(num_actual_tokens=2), UNTOLD),
        (meta(max_query_len=1), UNTOLD),
        (meta(max_query_len=2, num_actual_tokens=2), capture_steps.PROMPTS),
        (meta(max_query_len=1, num_actual_tokens=2, seq_lens=Lengths([64, 80])), capture_steps.PROMPTS),
        (meta(num_prefills=1, num_decodes=1, num_actual_tokens=2), capture_steps.PROMPTS),
        (meta(num_prefills=0, num_decodes=1, num_spec_decodes=1, num_actual_tokens=2), capture_steps.SPECULATIVE),
        (meta(num_prefills=0, num_decodes=1, num_actual_tokens=2), "a step of 1 rows"),
        (meta(max_query_len=1, num_actual_tokens=3), "a step of 3 rows"),
        ({"attention": SimpleNamespace(max_query_len=1, num_actual_tokens=2),
          "recurrent": SimpleNamespace(num_prefills=1, num_decodes=1, num_actual_tokens=2)}, capture_steps.PROMPTS),
    ],
)  # fmt: skip
def test_a_decode_step_is_known_by_the_attention_metadata(metadata: Any, told: str | None) -> None:
    assert capture_steps.decode_problem(metadata, 2, 64) == told


@pytest.mark.real
def test_the_recorder_in_the_server_s_environment(tmp_path: Path) -> None:
    assert main(["server", "install", "cpu"]) == 0
    capturing.install(tmp_path / "site")
    (tmp_path / "checks").mkdir()
    script = ROOT / "tests" / "capture_checks.py"
    python = resolve_python("managed:cpu", os.environ)
    done = subprocess.run(
        [python, script, tmp_path / "site", tmp_path / "checks"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok check_") == script.read_text().count("\ndef check_")


# A real server

LINEAR = """
import json, sys, torch
from safetensors import safe_open
folder = sys.argv[1]
capture = json.load(open(f"{folder}/capture.json"))
layers = {layer["name"]: layer for layer in capture["layers"]}
def read(file, key):
    with safe_open(f"{folder}/{file}", "pt") as opened:
        return opened.get_tensor(key)
checked = 0
for rows, file in capture["files"].items():
    with safe_open(f"{folder}/{file}", "pt") as opened:
        assert len(list(opened.keys())) == 2 * capture["steps"] * len(capture["order"])
    for position, name in enumerate(capture["order"]):
        layer = layers[name]
        tensors = {key: read(one["file"], one["key"]) for key, one in layer["tensors"].items()}
        for key, one in layer["tensors"].items():
            assert list(tensors[key].shape) == one["shape"] and str(tensors[key].dtype) == f"torch.{one['dtype']}"
        inputs = []
        for step in range(capture["steps"]):
            x, y = read(file, f"{position}.x.{step}"), read(file, f"{position}.y.{step}")
            assert x.shape == (int(rows), layer["k"]) and y.shape == (int(rows), layer["n"])
            assert str(x.dtype) == str(y.dtype) == f"torch.{capture['dtype']}"
            bias = tensors["bias"].float() if layer["bias"] else None
            exact = torch.nn.functional.linear(x.float(), tensors["weight"].float(), bias)
            # bfloat16 has 8 bits: half of its last one is 2**-9 of a value.
            torch.testing.assert_close(y.float(), exact, rtol=2**-7, atol=2**-7 * exact.abs().max().item())
            inputs.append(x)
            checked += 1
        # The first layer's input is made of the token alone, and a small model says the same one again.
        assert position == 0 or not torch.equal(inputs[0], inputs[1]), name
        assert position == 0 or not torch.equal(inputs[0][0], inputs[0][1]), name
print(checked)
"""

BFLOAT16 = (
    'server.serve_args=[--dtype, bfloat16, --max-model-len, "1024", --max-num-seqs, "8", --kv-cache-memory-bytes, 256M]'
)
REAL = ["--set", BFLOAT16, "--set", "server.ready_timeout_s=600"]
QUICKSTART = str(ROOT / "experiments" / "quickstart.yaml")


@pytest.mark.real
def test_every_product_of_a_real_server_s_steps_can_be_done_again_from_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "captured"
    assert main(["replay", "capture", QUICKSTART, "-o", str(folder), "--rows", "2", "--rows", "5", *REAL]) == 0
    assert "121 linear layers of a step, rows 2, 5" in capsys.readouterr().out
    found = read_capture(folder)
    assert (found.rows, found.steps, found.weights, found.left_out) == ((2, 5), 2, "copied", {})
    blocks = [f"model.layers.{block}.{name}" for block in range(30) for name in (
        "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")]  # fmt: skip
    assert list(found.order) == [*blocks, "lm_head"]
    # 9 heads of 64 for queries, 3 for keys and 3 for values; two products of 1,536 columns.
    assert found.shapes() == {"960x576": 30, "576x576": 30, "3072x576": 30, "576x1536": 30, "49152x576": 1}
    assert {layer.kind for layer in found.layers} == {
        "QKVParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear", "ParallelLMHead"}  # fmt: skip
    assert found.server["eager"] is True
    assert "--enforce-eager" in found.server["argv"]  # type: ignore[operator]
    assert found.server["versions"]["vllm"].startswith("0.32.0")  # type: ignore[index]
    done = subprocess.run(
        [resolve_python("managed:cpu", os.environ), "-c", LINEAR, folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["484"]
    assert leftovers() == []

    # And what was captured can be replayed, from the files alone.
    cpu = ["--python", "managed:cpu", "--device", "cpu", "--seconds", "0.1", "--rows", "5"]
    assert main(["replay", "run", str(folder), *cpu, "-o", str(tmp_path / "results")]) == 0
    (record,) = tmp_path.glob("results/*/*/replay.json")
    replay = read_record(record, Replay)
    (check,) = replay.checks
    assert (check.reference, check.wrong) == ("captured results", None)
    assert check.worst_relative_error is not None
    assert check.worst_relative_error < 5e-3  # the rounding of bfloat16
    assert replay.positions == list(found.order)


@pytest.mark.real
def test_a_real_server_that_cannot_be_captured_as_asked_is_ended_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "captured"
    assert main(["replay", "capture", QUICKSTART, "-o", str(folder), "--rows", "2", "--most-gib", "0.1", *REAL]) == 2
    assert "more than --most-gib 0.1" in capsys.readouterr().err
    assert not folder.exists()
    assert leftovers() == []


def test_the_exchange_is_json_that_the_plugin_reads(tmp_path: Path) -> None:
    exchange = capturing.Exchange(tmp_path / "x")
    exchange.begin(WISH, tmp_path / "out")
    config = json.loads(exchange.config.read_text())
    assert (config["rows"], config["output"], config["status"]) == ([2, 4], str(tmp_path / "out"), str(tmp_path / "x"))
    exchange.arm(4)
    assert (tmp_path / "x" / "armed").read_text() == "4\n"
    exchange.arm(None)
    assert not (tmp_path / "x" / "armed").exists()
    assert exchange.heard() == []
