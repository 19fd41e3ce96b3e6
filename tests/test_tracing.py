"""The traced phase, from the spec to the verdict, against the fake server: which kernels ran, and what cannot be known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from abharness.cli import main
from abharness.record import LaunchRecord
from abharness.specload import load_spec
from abharness.storage import read_model
from abharness.trace import read_kernels
from tests.conftest import FAKE_SITE

ROOT = Path(__file__).parent.parent
# Times long enough that a busy machine's scheduling is small beside them.
SPEC = f"""\
experiment: fake
server:
  model: some/model
  env:
    PYTHONPATH: "{FAKE_SITE}"
    FAKE_TPOT_S: "0.01"
    FAKE_PREFILL_S_PER_TOKEN: "0.002"
    FAKE_SPEEDS: "{{}}"
    FAKE_READS: "@READS@"
    FAKE_FAULTS: '@FAULTS@'
  serve_args: [--max-model-len, "512", --max-num-seqs, "8"]
  ready_timeout_s: 60
variants:
  baseline: {{env: {{FAKE_SWITCH: null}}}}
  candidate: {{env: {{FAKE_SWITCH: fast}}}}
design: {{launches_per_variant: @LAUNCHES@}}
workloads:
  - {{name: decode, kind: decode, input_len: 16, output_len: 8, max_concurrency: [1, 2], num_prompts: 2, num_warmups: 0}}
  - {{name: prefill, kind: prefill, input_lens: [32], num_prompts: 2, num_warmups: 0}}
"""
CANDIDATE = {"FAKE_SWITCH": "fast"}


@dataclass(frozen=True)
class Outcome:
    """A finished run."""

    code: int
    out: str
    err: str
    run: Path
    comparison: dict[str, Any]

    def launch(self, label: str) -> LaunchRecord:
        return read_model(self.run / "launches" / label / "launch.json", LaunchRecord)

    def messages(self, code: str, among: str = "seen") -> list[str]:
        return [item["finding"]["message"] for item in self.comparison[among] if item["finding"]["code"] == code]


def spec_file(folder: Path, trace: str, faults: dict[str, Any], *, reads: str = "exact", launches: int = 1) -> Path:
    path = folder / "fake.yaml"
    text = SPEC.replace("@FAULTS@", json.dumps(faults)).replace("@READS@", reads).replace("@LAUNCHES@", str(launches))
    path.write_text(text + trace)
    return path


def run(
    folder: Path, capsys: pytest.CaptureFixture[str], trace: str, fault: dict[str, Any] | None = None, **how: Any
) -> Outcome:
    path = spec_file(folder, trace, {"trace": fault} if fault else {}, **how)
    code = main(["run", str(path), "-o", str(folder / "results")])
    captured = capsys.readouterr()
    (run_dir,) = (folder / "results" / "fake").iterdir()
    comparison = json.loads((run_dir / "comparison.json").read_text())["comparisons"][0]
    return Outcome(code, captured.out, captured.err, run_dir, comparison)


def expecting(variant: str, text: str) -> str:
    return f"verify: {{expect_kernels: {{{variant}: {text}}}}}\n"


def test_each_phase_of_each_launch_is_on_record_with_its_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(tmp_path, capsys, "trace: {steps: 5}\n")
    assert done.code == 0, done.out + done.err
    for label, kernel in (("0-baseline", "plain"), ("1-candidate", "fast")):
        record = done.launch(label)
        assert [phase.name for phase in record.traces] == ["decode[1]", "decode[2]", "prefill[32]"]
        assert [phase.absent for phase in record.traces] == [None] * 3
        # After everything that was measured, and never during it.
        assert min(phase.started_s for phase in record.traces) > max(cell.ended_s for cell in record.cells)
        folder = done.run / "launches" / label
        traces = {phase.name: read_kernels(folder / phase.files[0]) for phase in record.traces}
        assert sum(step.generation_requests == 2 for step in traces["decode[2]"].steps) >= 5
        assert {row.name for row in traces["prefill[32]"].kernels.rows()} == {
            f"fake_prefill_{kernel}(float*, int)",
            "fake_norm",
        }
        assert [step.context_tokens for step in traces["prefill[32]"].steps][:2] == [32, 32]
        assert all(
            (folder / name).stat().st_size == size for phase in record.traces for name, size in phase.raw.items()
        )


def test_kernels_that_differ_are_the_proof_of_the_switch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(tmp_path, capsys, "trace: {}\n", launches=2)
    told = "decode[1], decode[2]: fake_decode_plain only in the baseline; fake_decode_fast only in the candidate"
    assert f"effect of FAKE_SWITCH: executed: {told}" in done.out
    assert done.messages("effect_unproven", "advice") == []
    section = done.out[done.out.index("CPU operators of decode[2]") :]
    assert "fake_decode_fast" in section
    assert "only in the candidate" in section
    assert "fake_norm" in section
    (phase,) = [one for one in done.comparison["kernels"] if one["name"] == "prefill[32]"]
    assert phase["only"] == {
        "baseline": ["fake_prefill_plain(float*, int)"],
        "candidate": ["fake_prefill_fast(float*, int)"],
    }


def test_kernels_of_one_launch_each_prove_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One launch a variant cannot show whether a library picks a kernel by chance; which differ is told all the same."""
    done = run(tmp_path, capsys, "trace: {decode: [1], prefill: []}\n")
    assert len(done.messages("effect_unproven", "advice")) == 1
    assert "only in the candidate" in done.out


def test_a_switch_that_nothing_reads_runs_the_same_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(
        tmp_path, capsys, "trace: {}\n", reads="nothing", fault={"kernels": {"decode": ["one"], "prefill": ["two"]}}
    )
    (message,) = done.messages("effect_unproven", "advice")
    assert "the same kernels ran in both (decode[1], decode[2], prefill[32])" in message
    assert done.out.count("the same kernels ran in both") == 4


def test_expected_kernels_that_ran_let_the_verdict_stand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    phases = 'phases: {decode: {require: [decode_fast]}, "prefill[32]": {require: ["prefill_fast"], forbid: [decode]}}'
    done = run(tmp_path, capsys, expecting("candidate", f"{{require: [norm], forbid: [plain], {phases}}}"))
    assert done.code == 0, done.out + done.err
    assert done.comparison["codes"] == []


@pytest.mark.parametrize(("expected", "message"), [
    ("{require: [gluon]}", "'gluon' did not run in any phase; there ran fake_"),
    ("{forbid: [decode_f]}", "'decode_f' is forbidden and ran in any phase: fake_decode_fast"),
    ("{phases: {prefill: {require: [decode_fast]}}}", "'decode_fast' did not run in prefill[32]; there ran fake_"),
    ('{phases: {"decode[2]": {forbid: [norm]}}}', "'norm' is forbidden and ran in decode[2]"),
])  # fmt: skip
def test_a_kernel_that_is_not_as_expected_ends_the_launch_and_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], expected: str, message: str
) -> None:
    done = run(tmp_path, capsys, expecting("candidate", expected))
    assert done.code == 4
    assert any(message in text for text in done.messages("kernel_mismatch")), done.messages("kernel_mismatch")
    record = done.launch("1-candidate")
    assert (record.status, len(record.cells), len(record.traces)) == ("failed", 3, 3)


@pytest.mark.parametrize(("fault", "message"), [
    ({"missing": True}, "the profiler wrote no trace"),
    ({"truncated": True}, "decode[1]: "),
    ({"garbage": True}, "decode[1]: "),
    ({"no_steps": True}, "the trace has no annotation of an engine step"),
    ({"rows_short": 1}, "none of its 17 steps decodes 1 rows"),
    ({"at": "start"}, "the server did not start its profiler: HTTP 500"),
    ({"at": "stop"}, "the server did not stop its profiler: HTTP 500"),
    ({"at": "stop", "dies": True}, "the server did not stop its profiler"),
])  # fmt: skip
def test_what_no_trace_shows_is_unknown_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: dict[str, Any], message: str
) -> None:
    expected = "trace: {decode: [1], prefill: []}\n" + expecting("candidate", "{phases: {decode: {forbid: [slow]}}}")
    done = run(tmp_path, capsys, expected, {"when": CANDIDATE, **fault})
    assert (done.code, done.comparison["codes"]) == (3, ["kernels_unverifiable"])
    assert any(message in text for text in done.messages("kernels_unverifiable")), done.messages("kernels_unverifiable")
    record = done.launch("1-candidate")
    assert (record.status, len(record.cells)) == ("completed", 3)
    code = main(["compare", str(done.run), "--allow", "kernels_unverifiable"])
    assert code == 0
    assert "kernels_unverifiable" in capsys.readouterr().out


def test_a_trace_that_fails_takes_no_verdict_away_where_none_was_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(tmp_path, capsys, "trace: {}\n", {"at": "start"})
    assert done.code == 0
    assert "baseline: the server did not start its profiler: HTTP 500" in done.out
    assert "baseline: not tried, since the profiler failed in decode[1]" in done.out
    assert "the same kernels ran in both" not in done.out


def test_a_required_kernel_must_run_in_every_process_that_runs_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = {"when": CANDIDATE, "ranks": 2, "others": ["fallback", "fake_norm"]}
    done = run(tmp_path, capsys, expecting("candidate", "{require: [decode_fast]}"), fault)
    assert (done.code, done.launch("1-candidate").status) == (4, "failed")
    assert len(done.launch("1-candidate").traces[0].files) == 2


def test_processes_are_in_the_order_of_their_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(tmp_path, capsys, "trace: {decode: [1], prefill: []}\n", {"ranks": 11, "own_names": True})
    (phase,) = done.launch("0-baseline").traces
    folder = done.run / "launches" / "0-baseline"
    ran = [{row.name for row in read_kernels(folder / file).kernels.rows()} for file in phase.files]
    assert [f"rank_{rank}" in names for rank, names in enumerate(ran)] == [True] * 11


def test_compare_draws_the_proof_again_from_the_kernel_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(tmp_path, capsys, expecting("candidate", "{require: [decode_fast]}"))
    assert done.code == 0
    for table in (done.run / "launches" / "1-candidate" / "kernels").iterdir():
        table.unlink()
    assert main(["compare", str(done.run)]) == 3
    out = capsys.readouterr().out
    assert "kernels_unverifiable" in out
    assert "cannot be read" in out


def test_a_phase_that_is_gone_from_the_record_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(tmp_path, capsys, expecting("candidate", "{forbid: [slow], phases: {decode: {require: [decode_fast]}}}"))
    assert done.code == 0
    path = done.run / "launches" / "1-candidate" / "launch.json"
    record = json.loads(path.read_text())
    del record["traces"][1]
    path.write_text(json.dumps(record))
    assert main(["compare", str(done.run)]) == 3
    out = capsys.readouterr().out
    assert "'slow' in any phase (decode[2] was not traced)" in out
    assert "; decode[2] was not traced" in out


def test_a_process_without_a_table_in_one_phase_leaves_that_phase_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(tmp_path, capsys, expecting("candidate", "{phases: {prefill: {forbid: [slow]}}}"), {"ranks": 2})
    assert done.code == 0
    path = done.run / "launches" / "1-candidate" / "launch.json"
    record = json.loads(path.read_text())
    del record["traces"][2]["files"][1]
    path.write_text(json.dumps(record))
    assert main(["compare", str(done.run)]) == 3
    assert "1 of 2 processes have a table" in capsys.readouterr().out


def test_a_trace_without_device_activity_says_nothing_about_a_gpu(tmp_path: Path) -> None:
    gpu_dir = tmp_path / "gpu"
    gpu_dir.mkdir()
    path = spec_file(tmp_path, expecting("candidate", "{require: [decode_fast]}"), {"trace": {"cpu_only": True}})
    path.write_text(
        path.read_text().replace('    FAKE_TPOT_S: "0.01"', f'    FAKE_TPOT_S: "0.02"\n    FAKE_GPU_DIR: "{gpu_dir}"')
    )
    device = {"uuid": "GPU-1", "name": "Fake H", "used": 2**20, "pids": [], "limit_mw": 700_000}
    environ = {
        **os.environ, "PYTHONPATH": f"{ROOT / 'tests' / 'fake_nvml'}:{ROOT}", "FAKE_GPU_DIR": str(gpu_dir),
        "FAKE_NVML": json.dumps([device]),
    }  # fmt: skip
    command = [sys.executable, "-m", "abharness.cli", "run", str(path), "-o", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "kernels_unverifiable: launch 1-candidate: which kernels ran is not known" in done.stdout
    assert "no device activity, and the launch had a GPU" in done.stdout


def test_the_option_asks_for_a_trace_of_the_extremes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = spec_file(tmp_path, "", {})
    assert main(["run", str(path), "--dry-run"]) == 0
    assert "--profiler-config" not in capsys.readouterr().out
    assert main(["run", str(path), "--trace", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "--profiler-config" in out
    assert out[out.index("traced after them") :].split("\n")[1:4] == [
        "  decode[1] (16 prompt tokens a request)",
        "  decode[2] (16 prompt tokens a request)",
        "  prefill[32] (32 prompt tokens a request)",
    ]


@pytest.mark.parametrize(("text", "message"), [
    ("trace: {decode: [], prefill: []}\n", "trace: nothing would be traced"),
    ("trace: {decode: [2, 2]}\n", "trace.decode: give each once"),
    ("trace: {decode: [9]}\n", "trace: decode[9] needs 9 rows in one step, --max-num-seqs is 8"),
    ("trace: {prefill: [600]}\n", "trace: prefill[600] needs 601 tokens a request, --max-model-len is 512"),
    ("trace: {step: 3}\n", "trace.step: unknown key; allowed here: decode, prefill, input_len, steps"),
    (expecting("candidate", '{phases: {"decode[16]": {require: [x]}}}'), "no such phase is traced; there are decode"),
    (expecting("candidate", "{phases: {deocde: {require: [x]}}}"), "verify.expect_kernels.candidate.phases.deocde"),
    (expecting("candidate", '{require: ["("]}'), "verify.expect_kernels.candidate.require[0]: not a regular expression"),
    (expecting("candidate", "{requires: [x]}"), "unknown key; allowed here: require, forbid, phases"),
])  # fmt: skip
def test_a_trace_that_cannot_be_taken_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert main(["run", str(spec_file(tmp_path, text, {})), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_an_aa_expects_of_both_what_is_expected_of_the_baseline(tmp_path: Path) -> None:
    spec = load_spec(spec_file(tmp_path, expecting("baseline", "{require: [plain]}"), {})).against_itself()
    assert spec.verify.expect_kernels["candidate"].require == ("plain",)


def test_verify_env_says_that_it_checks_no_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = spec_file(tmp_path, expecting("candidate", "{require: [decode_fast]}"), {})
    assert main(["verify-env", str(path)]) == 0
    assert "not checked: expect_kernels: kernels are traced under load" in capsys.readouterr().out
