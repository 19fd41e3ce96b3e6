"""The quickstart on real vLLM: the managed CPU environment, a real model, and real GSM8K questions where they are.

Fewer launches and shorter cells than the quickstart itself; everything else is the same file.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from abharness.cli import main
from abharness.kernels import uses
from abharness.record import AnswerRecord, Evidence, LaunchRecord, RequestLine
from abharness.storage import read_lines, read_model
from abharness.trace import read_kernels
from tests.test_run import leftovers

ROOT = Path(__file__).parent.parent
GSM8K = Path(os.environ.get("ABHARNESS_GSM8K_DIR", ROOT.parent / "shared" / "data" / "gsm8k")) / "test.jsonl"
DATASET = GSM8K if GSM8K.exists() else ROOT / "experiments" / "data" / "grade-school-16.jsonl"

SHORTER = {
    "design.launches_per_variant": 1,
    "design.primary": "null",
    "server.ready_timeout_s": 600,  # a busy machine takes minutes to import vLLM
    "workloads.decode.max_concurrency": "[2]",
    "workloads.decode.num_prompts": 2,
    "workloads.decode.output_len": 16,
    "workloads.prefill.input_lens": "[96]",
    "workloads.prefill.num_prompts": 2,
    "workloads.gsm8k.dataset": DATASET,
    "workloads.gsm8k.num_questions": 2,
    "workloads.gsm8k.max_concurrency": 2,
    "workloads.gsm8k.max_tokens": 48,
    "trace": "{decode: [2], prefill: [96], steps: 2}",
    "verify": "{expect_kernels: {baseline: {phases: {decode: {require: [cpu_attention], forbid: [flash]}}}}}",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("real")
    overrides = [part for key, value in SHORTER.items() for part in ("--set", f"{key}={value}")]
    assert main(["run", str(ROOT / "experiments" / "quickstart.yaml"), "-o", str(folder), *overrides]) == 0
    (run,) = (folder / "quickstart").iterdir()
    return run


@pytest.mark.real
@pytest.mark.parametrize("label", ["0-baseline", "1-candidate"])
def test_a_launch_of_real_vllm_is_proven_exact_and_fresh(results: Path, label: str) -> None:
    folder = results / "launches" / label
    record = read_model(folder / "launch.json", LaunchRecord)
    evidence = read_model(folder / "evidence.json", Evidence)
    assert (record.status, record.error, record.findings) == ("completed", None, [])
    assert evidence.server_versions["vllm"].startswith("0.32.0")

    assert [check.when for check in evidence.environment] == ["before_load", "after_load"]
    threads = "1" if record.variant == "baseline" else "2"
    for check in evidence.environment:
        assert check.findings == []
        assert any(one.name.startswith("VLLM::EngineCore") for one in check.processes)
        assert {one.started_with["OMP_NUM_THREADS"] for one in check.processes if one.state == "ok"} == {threads}
        assert "unreadable" not in {one.state for one in check.processes}

    assert {cache.files_before for cache in evidence.caches} == {0}
    assert sum(cache.files_after or 0 for cache in evidence.caches) > 0
    assert evidence.default_caches_touched == []

    lines, warnings = read_lines(folder / "requests.jsonl", RequestLine)
    assert warnings == []
    assert len(lines) == 4
    for line in lines:
        assert line.request.error is None
        assert (line.request.prompt_tokens, line.request.output_tokens) == (line.input_len, line.output_len)
    assert len(record.cells) == 2
    for cell in record.cells:
        assert cell.counters is not None
        assert cell.counters.prompt_tokens == 2 * cell.input_len
        assert cell.counters.generation_tokens == 2 * cell.output_len
        assert cell.counters.prefix_cache_hits == 0

    answers, warnings = read_lines(folder / "gsm8k.jsonl", AnswerRecord)
    assert warnings == []
    assert {answer.state for answer in answers} <= {"right", "wrong", "truncated", "no_answer"}
    assert sorted(answer.doc_id for answer in answers) == sorted(record.accuracy[0].doc_ids)
    for answer in answers:
        assert answer.tokens, "log-probabilities were asked for"
        assert len(answer.tokens) == answer.output_tokens
        assert all(step.logprob is not None and step.logprob <= 0 for step in answer.tokens)


@pytest.mark.real
@pytest.mark.parametrize("label", ["0-baseline", "1-candidate"])
def test_the_trace_of_real_vllm_shows_its_operators_step_by_step(results: Path, label: str) -> None:
    folder = results / "launches" / label
    record = read_model(folder / "launch.json", LaunchRecord)
    assert [(phase.name, phase.absent, len(phase.files)) for phase in record.traces] == [
        ("decode[2]", None, 1),
        ("prefill[96]", None, 1),
    ]
    decode, prefill = (read_kernels(folder / phase.files[0]) for phase in record.traces)
    assert (decode.problem, decode.unsegmented, decode.on_device) == (None, None, False)
    assert sum(step.generation_requests == 2 and step.phase == "decode" for step in decode.steps) >= 2
    assert {step.context_tokens for step in prefill.steps if step.phase == "prefill"} == {96}
    # One call a layer and step: the model has 30.
    (attention,) = (use for name, use in uses(prefill, "prefill").items() if "cpu_attention" in name)
    assert attention.per_step == 30


@pytest.mark.real
def test_both_variants_were_given_the_same_work(results: Path) -> None:
    hashes = []
    for label in ("0-baseline", "1-candidate"):
        record = read_model(results / "launches" / label / "launch.json", LaunchRecord)
        hashes.append(
            [cell.prompts_sha256 for cell in record.cells] + [run.questions_sha256 for run in record.accuracy]
        )
    assert hashes[0] == hashes[1]


@pytest.mark.real
def test_the_real_run_compares_again_from_its_records(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(results)]) == 0
    out = capsys.readouterr().out
    assert 'switch OMP_NUM_THREADS: "1" -> "2"' in out
    assert "one launch a variant shows no spread" in out
    # Another number of threads runs the same operators: the trace says that, and proves no effect.
    assert out.count("the same kernels ran in both") >= 2


@pytest.mark.real
def test_no_real_server_is_left_running(results: Path) -> None:
    assert leftovers() == []
