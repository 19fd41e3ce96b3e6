"""`abharness run` from YAML to verdict, against the fake server as a real process: the happy path and planted faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from abharness import commands
from abharness.cli import main
from abharness.progress import PlainReporter
from abharness.record import AnswerRecord, Evidence, LaunchRecord, RequestLine, RunRecord
from abharness.specload import load_spec
from abharness.storage import read_lines, read_model
from tests.conftest import FAKE_SITE, SCRATCH

QUESTIONS = Path(__file__).parent.parent / "experiments" / "data" / "grade-school-16.jsonl"

# Times long enough that a busy machine's scheduling is small beside them.
SPEC = f"""\
experiment: fake
question: Does the switch make the fake server faster?
server:
  model: some/model
  env:
    PYTHONPATH: "{FAKE_SITE}"
    FAKE_TPOT_S: "0.004"
    FAKE_PREFILL_S_PER_TOKEN: "0.003"
    FAKE_ANSWERS: "{QUESTIONS}"
    FAKE_SPEEDS: '{{"fast": 2.0}}'
    FAKE_FAULTS: '{{}}'
  ready_timeout_s: 60
variants:
  baseline: {{env: {{FAKE_SWITCH: null}}}}
  candidate: {{env: {{FAKE_SWITCH: fast}}}}
design: {{launches_per_variant: 1}}
workloads:
  - {{name: decode, kind: decode, input_len: 16, output_len: 16, max_concurrency: [1, 2], num_prompts: 4}}
  - {{name: prefill, kind: prefill, input_lens: [32], num_prompts: 3}}
  - {{name: gsm8k, kind: gsm8k, num_questions: 6, dataset: "{QUESTIONS}", max_concurrency: 2, max_tokens: 300}}
"""


def spec_file(folder: Path, **faults: Any) -> Path:
    """The spec in a file; a fault's `when` limits it to one variant."""
    path = folder / "fake.yaml"
    path.write_text(SPEC.replace("FAKE_FAULTS: '{}'", f"FAKE_FAULTS: '{json.dumps(faults)}'"))
    return path


CANDIDATE = {"FAKE_SWITCH": "fast"}


def run(folder: Path, *arguments: str, **faults: Any) -> int:
    return main(["run", str(spec_file(folder, **faults)), "-o", str(folder / "results"), *arguments])


def run_dir(folder: Path) -> Path:
    (found,) = (folder / "results" / "fake").iterdir()
    return found


def launches(folder: Path) -> list[LaunchRecord]:
    return [read_model(path, LaunchRecord) for path in sorted(run_dir(folder).glob("launches/*/launch.json"))]


def leftovers() -> list[str]:
    """Processes of this session's launches that still live: each carries the sentinel in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            env = process.environ()
            if "ABHARNESS_LAUNCH" in env and env.get("TMPDIR", "").startswith(SCRATCH):
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    assert run(folder) == 0
    return folder


def test_every_launch_is_complete_verified_and_exact(good: Path) -> None:
    records = launches(good)
    assert [record.variant for record in records] == ["baseline", "candidate"]
    for record in records:
        assert (record.status, record.error) == ("completed", None)
        assert all(cell.host is not None for cell in record.cells)
        folder = run_dir(good) / "launches" / f"{record.launch_index}-{record.variant}"
        evidence = read_model(folder / "evidence.json", Evidence)
        assert [check.when for check in evidence.environment] == ["before_load", "after_load"]
        expected = "fast" if record.variant == "candidate" else None
        for check in evidence.environment:
            assert check.findings == []
            assert {one.state for one in check.processes} == {"ok"}
            assert any(one.name.startswith("VLLM::EngineCore") for one in check.processes)
            assert {one.started_with["FAKE_SWITCH"] for one in check.processes} == {expected}
        assert all(cache.files_before == 0 for cache in evidence.caches)
        assert sum(cache.files_after or 0 for cache in evidence.caches) > 0
        assert evidence.default_caches_touched == []
        lines, warnings = read_lines(folder / "requests.jsonl", RequestLine)
        assert warnings == []
        assert len(lines) == 4 + 4 + 3
        for line in lines:
            assert line.request.error is None
            assert line.request.prompt_tokens == line.input_len
            assert line.request.output_tokens == line.output_len
        for cell in record.cells:
            assert cell.counters is not None
            requests = [
                line.request
                for line in lines
                if (line.input_len, line.max_concurrency) == (cell.input_len, cell.max_concurrency)
            ]
            assert cell.counters.prompt_tokens == sum(request.prompt_tokens or 0 for request in requests)
            assert cell.counters.generation_tokens == sum(request.output_tokens or 0 for request in requests)
            assert cell.counters.prefix_cache_hits == 0
        answers, _ = read_lines(folder / "gsm8k.jsonl", AnswerRecord)
        assert len(answers) == 6
        assert {answer.state for answer in answers} == {"right"}
        assert all(answer.tokens for answer in answers), "log-probabilities were asked for"


def test_both_variants_got_the_same_prompts_and_no_two_requests_the_same(good: Path) -> None:
    hashes = []
    for record in launches(good):
        folder = run_dir(good) / "launches" / f"{record.launch_index}-{record.variant}"
        lines, _ = read_lines(folder / "requests.jsonl", RequestLine)
        hashes.append(sorted(line.request.prompt_sha256 for line in lines))
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == len(hashes[0])


def test_the_report_shows_the_difference_and_is_on_disk(good: Path, capsys: Any) -> None:
    assert main(["compare", str(good / "results")]) == 0
    out = capsys.readouterr().out
    assert 'switch FAKE_SWITCH: unset -> "fast"' in out
    assert "0 of 6 answers differ" in out
    comparison = json.loads((run_dir(good) / "comparison.json").read_text())["comparisons"][0]
    rows = {row["metric"]["name"]: row for row in comparison["cells"][0]["rows"]}
    assert rows["tpot"]["ratio"]["effect"] < -0.3, "the fake engine is twice as fast with the switch"
    assert "| output_throughput tok/s |" in (run_dir(good) / "report.md").read_text()


def test_where_it_ran_is_on_record(good: Path) -> None:
    record = read_model(run_dir(good) / "experiment.json", RunRecord)
    assert record.spec["server"]["model"] == "some/model"
    assert record.provenance["cpu_count"] == os.cpu_count()
    assert record.plan == ["baseline", "candidate"]


def test_nothing_is_left_running(good: Path) -> None:
    assert leftovers() == []


def test_resume_runs_nothing_again_and_a_changed_spec_resumes_nothing(good: Path, capsys: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir(good).rglob("launch.json")}
    assert run(good, "--resume") == 0
    assert "launch 0-baseline is on record; skipped" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in run_dir(good).rglob("launch.json")} == before
    assert run(good, "--resume", "--set", "design.seed=1") == 2
    assert "two configurations are never mixed" in capsys.readouterr().err


def test_only_runs_one_workload_under_a_configuration_of_its_own(tmp_path: Path) -> None:
    assert run(tmp_path, "--only", "prefill") == 0
    for record in launches(tmp_path):
        assert [cell.workload for cell in record.cells] == ["prefill"]
        assert record.accuracy == []
    assert run(tmp_path, "--only", "nosuch") == 2
    assert run(tmp_path, "--only", "prefill", "--set", "design.primary=decode[1]/tpot") == 2


# One decode cell: the first request after readiness is number 1, and nothing else disturbs the count.
QUICK = ("--set", "workloads.decode.max_concurrency=1", "--set", "workloads.decode.num_warmups=0", "--only", "decode")


@pytest.mark.parametrize(
    "faults",
    [{"engine_survives": {"when": CANDIDATE, "arg": "stubborn"}}, {"ignore_signals": ["SIGINT", "SIGTERM"]}],
    ids=["C1 the engine outlives the server", "the server ignores polite signals"],
)
def test_a_server_that_does_not_end_when_asked_is_ended(faults: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, *QUICK, **faults) == 0
    assert "no difference shown" in capsys.readouterr().out
    assert leftovers() == []


def test_a_failed_launch_says_where_why_and_how_to_start_it_by_hand(tmp_path: Path) -> None:
    assert run(tmp_path, *QUICK, die={"when": CANDIDATE, "at": "after_requests", "n": 4}) == 4
    failed = launches(tmp_path)[1]
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.phase == "decode input_len=16 output_len=16 x1"
    assert "dying after_requests, as asked" in failed.error.log_tail[-1]
    assert "serve some/model" in (failed.error.command or "")


def test_a_launch_that_fails_twice_is_told_under_the_first_code(tmp_path: Path) -> None:
    pid_file = tmp_path / "stray.pid"
    baseline = {"when": {"FAKE_SWITCH": None}}
    # The first completion is the one at readiness.
    stray = {**baseline, "how": "later", "after_requests": 1, "pid_file": str(pid_file)}
    try:
        assert run(tmp_path, *QUICK, stray=stray, child_env={**baseline, "FAKE_SWITCH": "slow"}) == 4
        (failed,) = launches(tmp_path)
        assert failed.error is not None
        assert (failed.error.kind, failed.error.code) == ("TeardownError", "env_mismatch")
        assert "is still open, held by pid" in failed.error.message
        assert "before that: FAKE_SWITCH: expected unset" in failed.error.message
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_d1_d4_several_tokens_a_chunk_and_empty_chunks_change_no_count(tmp_path: Path) -> None:
    assert run(tmp_path, "--only", "decode", tokens_per_chunk=3, empty_chunks=True) == 0
    path = next(run_dir(tmp_path).glob("launches/0-*/requests.jsonl"))
    lines, _ = read_lines(path, RequestLine)
    assert {line.request.output_tokens for line in lines} == {16}
    assert {line.request.chunks for line in lines} == {6}


def test_h1_a_broken_launch_is_set_aside_and_only_it_is_run_again(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, "--only", "decode") == 0
    folder = run_dir(tmp_path) / "launches" / "1-candidate"
    (folder / "launch.json").unlink()  # what a killed harness leaves: everything but the launch record
    kept = (run_dir(tmp_path) / "launches" / "0-baseline" / "launch.json").stat().st_mtime_ns
    assert main(["compare", str(tmp_path / "results")]) == 4
    assert "rerun with --resume" in capsys.readouterr().out
    assert run(tmp_path, "--only", "decode", "--resume") == 0
    assert (folder / "launch.json").exists()
    assert (run_dir(tmp_path) / "attempts" / "1-candidate.1" / "requests.jsonl").exists()
    assert (run_dir(tmp_path) / "launches" / "0-baseline" / "launch.json").stat().st_mtime_ns == kept


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_stops_the_server_keeps_what_was_measured_and_exits_130(
    number: signal.Signals, tmp_path: Path
) -> None:
    argv = [sys.executable, "-m", "abharness.cli", "run", str(spec_file(tmp_path)), "-o", str(tmp_path / "results")]
    child = subprocess.Popen(
        [*argv, "--json", "--set", "workloads.decode.num_prompts=400"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if json.loads(line).get("name") == "decode input_len=16 output_len=16 x1":
            break
    time.sleep(1.5)
    child.send_signal(number)
    rest, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert "interrupted" in errors
    *_, ended, last = [json.loads(line) for line in rest.splitlines()]
    assert (ended["event"], ended["status"]) == ("launch_finished", "interrupted")
    assert (last["event"], last["outcome"], last["exit_code"]) == ("finished", "interrupted", 130)
    (record,) = launches(tmp_path)
    assert record.status == "interrupted"
    lines, _ = read_lines(run_dir(tmp_path) / "launches" / "0-baseline" / "requests.jsonl", RequestLine)
    done = [line for line in lines if line.request.error is None]
    assert done, "the requests that had ended are kept"
    assert leftovers() == []


def test_dry_run_prints_every_launch_and_starts_nothing(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, "--dry-run", "--set", "design.launches_per_variant=2") == 0
    out = capsys.readouterr().out
    assert "baseline candidate candidate baseline" in out
    assert out.count("--served-model-name abharness-") == 4
    assert not (tmp_path / "results").exists()


def test_a10_a_switch_exported_in_the_callers_shell_reaches_no_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SWITCH", "fast")
    monkeypatch.setenv("VLLM_LEAK", "1")
    assert run(tmp_path, "--only", "prefill") == 0
    for record in launches(tmp_path):
        assert "VLLM_LEAK" not in record.env
        assert "VLLM_LEAK" in record.not_passed
        assert ("FAKE_SWITCH" in record.env) == (record.variant == "candidate")


def test_h3_a_results_folder_that_cannot_be_written_is_told_before_any_launch(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "results").write_text("a file")
    assert run(tmp_path) == 2
    assert "choose another folder with -o" in capsys.readouterr().err


def test_a_dataset_that_is_missing_is_told_before_any_launch(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, "--set", "workloads.gsm8k.dataset=./nosuch.jsonl") == 2
    assert "nosuch.jsonl" in capsys.readouterr().err
    assert list((tmp_path / "results").rglob("launch.json")) == []


def test_a_managed_model_is_not_converted_in_an_interpreter_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("ABHARNESS_CACHE", str(tmp_path / "cache"))
    assert run(tmp_path, "--set", "server.model=managed:smollm2") == 2
    assert "abharness model fetch smollm2" in capsys.readouterr().err


def test_an_interpreter_without_vllm_is_told_before_any_launch(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "fake.yaml"
    path.write_text(SPEC.replace(str(FAKE_SITE), "/nowhere"))
    assert main(["run", str(path), "-o", str(tmp_path / "results")]) == 4
    assert "has no vLLM" in capsys.readouterr().err


def test_a_fault_of_the_harness_itself_is_a_failed_launch_never_a_completed_one(tmp_path: Path) -> None:
    class Faulty(PlainReporter):
        def phase(self, name: str) -> None:
            if name.startswith("decode"):
                raise RuntimeError("a bug")

    spec = load_spec(spec_file(tmp_path))
    with pytest.raises(RuntimeError, match="a bug"):
        commands.run(spec, os.environ, output=tmp_path / "results", resume=False, reporter=Faulty())
    (record,) = launches(tmp_path)
    assert record.status == "failed"
    assert record.error is not None
    assert (record.error.kind, record.error.message) == ("RuntimeError", "a bug")
    assert leftovers() == []


def test_secrets_never_reach_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_s3cr3t")
    path = tmp_path / "fake.yaml"
    path.write_text(SPEC.replace("FAKE_FAULTS", 'MY_API_KEY: "k3y-s3cr3t"\n    FAKE_FAULTS'))
    assert main(["run", str(path), "-o", str(tmp_path / "results"), "--only", "prefill"]) == 0
    for file in (tmp_path / "results").rglob("*"):
        if file.is_file():
            assert b"s3cr3t" not in file.read_bytes(), file
