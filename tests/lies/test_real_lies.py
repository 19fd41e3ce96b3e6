"""Three lies told to real vLLM, each in the first launch, so that a run ends with it; and their honest twin.

The lies end before any load; the twin's load is one cell of one request. The environment and the model are the
quickstart's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from abharness.cli import main
from abharness.environments import resolve_python
from abharness.record import Evidence
from abharness.storage import read_model
from tests.lies.battery import Outcome, judged, merged
from tests.test_run import leftovers

pytestmark = pytest.mark.real

SWITCH = "MY_KERNEL"
PLUGIN = """\
import os

def register():
    if os.environ.get("{switch}") == "1":
        os.environ["{switch}"] = "{value}"
"""


@pytest.fixture(scope="module")
def cpu_python() -> Path:
    """The interpreter of the managed environment, and the managed model: made where they are not there yet."""
    assert main(["server", "install", "cpu"]) == 0
    assert main(["model", "fetch", "smollm2"]) == 0
    return resolve_python("managed:cpu", os.environ)


def tell(folder: Path, python: Path, over: dict[str, Any], *, dropped: str = "", plugin_sets: str = "1") -> Outcome:
    """Run an experiment whose interpreter is a wrapper and whose server has a plugin.

    Args:
        folder: The test's own.
        python: The real interpreter.
        over: What is merged over the spec.
        dropped: Variable that the wrapper renames before it serves.
        plugin_sets: What the plugin sets the switch to where it is "1": "1" changes nothing.
    """
    site, wrapper = folder / "site", folder / "python"
    (site / "my_kernels-1.0.dist-info").mkdir(parents=True)
    info = site / "my_kernels-1.0.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nmy_kernels = my_kernels:register\n")
    (site / "my_kernels.py").write_text(PLUGIN.format(switch=SWITCH, value=plugin_sets))
    renaming = f'env -u {dropped} {dropped}S="${dropped}" ' if dropped else ""
    wrapper.write_text(
        f'#!/bin/sh\ncase " $* " in *" serve "*) exec {renaming}{python} "$@" ;; esac\nexec {python} "$@"\n'
    )
    wrapper.chmod(0o755)
    spec = {
        "experiment": "lie",
        "server": {
            "model": "managed:smollm2",
            "python": str(wrapper),
            "serve_args": [
                "--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "2",
                "--kv-cache-memory-bytes", "64M",
            ],
            "env": {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(site)},
            "ready_timeout_s": 600,
        },
        "variants": {"baseline": {"env": {SWITCH: "1"}}, "candidate": {"env": {SWITCH: None}}},
        "design": {"launches_per_variant": 1},
        "workloads": [{
            "name": "decode", "kind": "decode", "input_len": 16, "output_len": 8, "max_concurrency": 1,
            "num_prompts": 1, "num_warmups": 0,
        }],
    }  # fmt: skip
    path = folder / "lie.yaml"
    path.write_text(json.dumps(merged(spec, over)))
    results = folder / "results"
    exit_code = main(["run", str(path), "-o", str(results)])
    return judged(exit_code, "", "", [str(results)], folder)


def seen(outcome: Outcome, code: str) -> str:
    """Everything that was found under a code, in a lie that ended the run in its first launch."""
    assert outcome.comparison is not None
    assert (outcome.exit_code, leftovers()) == (4, [])
    assert outcome.run is not None
    assert [path.name for path in (outcome.run / "launches").iterdir()] == ["0-baseline"]
    assert not (outcome.run / "launches" / "0-baseline" / "requests.jsonl").exists()
    return " ".join(
        item["finding"]["message"] for item in outcome.comparison["seen"] if item["finding"]["code"] == code
    )


def test_the_honest_twin_passes(tmp_path: Path, cpu_python: Path) -> None:
    outcome = tell(tmp_path, cpu_python, {})
    assert (outcome.exit_code, outcome.codes) == (0, [])
    assert leftovers() == []
    assert outcome.run is not None
    evidence = read_model(outcome.run / "launches" / "0-baseline" / "evidence.json", Evidence)
    for check in evidence.environment:
        assert {one.started_with[SWITCH] for one in check.processes if one.state == "ok"} == {"1"}


def test_a_wrapper_that_renames_the_switch(tmp_path: Path, cpu_python: Path) -> None:
    outcome = tell(tmp_path, cpu_python, {}, dropped=SWITCH)
    assert f"{SWITCH}: expected '1'; " in seen(outcome, "env_mismatch")
    assert "was started without it" in seen(outcome, "env_mismatch")


def test_a_variable_that_vllm_does_not_know(tmp_path: Path, cpu_python: Path) -> None:
    variants = {"baseline": {"env": {"VLLM_NO_SUCH_SWITCH": "1"}}, "candidate": {"env": {"VLLM_NO_SUCH_SWITCH": None}}}
    outcome = tell(tmp_path, cpu_python, {"variants": variants})
    assert "VLLM_NO_SUCH_SWITCH was delivered and not recognised" in seen(outcome, "switch_not_recognised")


def test_a_switch_that_is_changed_inside_the_engine(tmp_path: Path, cpu_python: Path) -> None:
    """What /proc shows is right, and the engine runs with another value."""
    outcome = tell(tmp_path, cpu_python, {}, plugin_sets="0")
    message = seen(outcome, "env_mismatch")
    assert SWITCH in message
    assert "'0'" in message
