"""kernels/pq2 in real vLLM on the CPU: a ternary model served through the harness."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from abharness.cli import main
from abharness.environments import resolve_python
from abharness.models import resolve_model
from abharness.record import Evidence, LaunchRecord
from abharness.storage import read_model

ROOT = Path(__file__).parent.parent

SPEC = """
experiment: pq2-cpu
question: Does a switch of kernels that are for GPUs do anything on a CPU?
server:
  model: {model}
  python: managed:cpu
  kernels: ["{kernels}"]
  serve_args: [--dtype, float32, --max-model-len, "256", --max-num-seqs, "4", --enforce-eager, --kv-cache-memory-bytes, 64M]
  env: {{TORCHDYNAMO_DISABLE: "1"}}
  ready_timeout_s: 600
variants:
  baseline: {{env: {{PQ2_KERNELS: null}}}}
  candidate: {{env: {{PQ2_KERNELS: reference}}}}
design: {{launches_per_variant: 1}}
workloads:
  - {{name: decode, kind: decode, input_len: 32, output_len: 16, max_concurrency: [2], num_prompts: 4}}
verify:
  expect_report:
    baseline: {{pq2: {{choice: "kernel set reference, .*", calls.reference: ">0", calls.legacy: "==0"}}}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small ternary model: random weights, and the tokenizer of a real one."""
    assert main(["server", "install", "cpu"]) == main(["model", "fetch", "smollm2"]) == 0
    target = tmp_path_factory.mktemp("models") / "tiny"
    python = resolve_python("managed:cpu", os.environ)
    tokenizer = resolve_model("managed:smollm2", os.environ)
    command = [python, "-m", "pq2.generate", "tiny", target, "--weights", "--tokenizer", tokenizer]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.real
def test_a_ternary_model_is_served_and_two_names_of_one_path_are_no_difference(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "pq2-cpu.yaml"
    spec.write_text(SPEC.format(model=model, kernels=ROOT / "kernels" / "pq2"), encoding="utf-8")
    assert main(["run", str(spec), "-o", str(tmp_path)]) == 3
    (run,) = (tmp_path / "pq2-cpu").iterdir()
    told = capsys.readouterr().out
    assert "No verdict: switch_not_recognised" in told
    assert "the plugin that was given it reports the same choice in both variants" in told
    hashes = set()
    for label in ("0-baseline", "1-candidate"):
        record = read_model(run / "launches" / label / "launch.json", LaunchRecord)
        evidence = read_model(run / "launches" / label / "evidence.json", Evidence)
        assert (record.status, record.error) == ("completed", None)
        [kernels] = record.kernels
        hashes.add(kernels.sha256)
        after = evidence.environment[-1]
        engines = [one for one in after.probes if one.reports.get("pq2", {}).get("calls", {}).get("reference")]
        assert len(engines) == 1  # the worker; the API server and the engine run no model
        assert engines[0].reports["pq2"]["device"] == "cpu"
        log = (run / "launches" / label / "server.log").read_text(encoding="utf-8")
        assert "pq2: none of its kernels run here" in log
    assert len(hashes) == 1
