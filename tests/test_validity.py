"""What a comparison draws from recorded evidence: proofs are made again, and differences nobody declared are found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from abharness.cli import main
from abharness.compare import Comparison, compare_folders
from tests.synthetic import Made, write_run

FAST = [Made(speed) for speed in (120, 121, 120.5, 121.5)]
SLOW = [Made(speed) for speed in (100, 101, 100.5, 101.5)]


def edit(
    run: Path, change: Callable[[dict[str, Any]], Any], pattern: str = "*-candidate", file: str = "evidence"
) -> None:
    """Change a recorded file by hand, in every launch of the pattern."""
    for path in run.glob(f"launches/{pattern}/{file}.json"):
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))


def compared(run: Path) -> Comparison:
    (comparison,) = compare_folders([run])
    return comparison


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", {"baseline": SLOW, "candidate": FAST})


def test_the_honest_run_is_valid(good: Path) -> None:
    assert (compared(good).codes, compared(good).outcome) == ((), "no regression")


def every_process(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [process for check in data["environment"] for process in check["processes"]]


def every_report(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [report for check in data["environment"] for report in check["probes"]]


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "another value at the start": (
        lambda data: [one["started_with"].update(SWITCH="0") for one in every_process(data)],
        "env_mismatch",
        "was started with '0'",
    ),
    "another value inside": (
        lambda data: [one["environ"].update(SWITCH="0") for one in every_report(data)],
        "env_mismatch",
        "has '0' in os.environ",
    ),
    "unset inside": (
        lambda data: [one["environ"].pop("SWITCH") for one in every_report(data)],
        "env_mismatch",
        "has it unset in os.environ",
    ),
    "never asked about the switch": (
        lambda data: [one["started_with"].pop("SWITCH") for one in every_process(data)],
        "env_unverifiable",
        "nothing is on record",
    ),
    "unreadable": (
        lambda data: [one.update(state="unreadable", reason="wiped", started_with={}) for one in every_process(data)],
        "env_unverifiable",
        "wiped",
    ),
    "never looked at after the load": (lambda data: data["environment"].pop(), "env_unverifiable", "after_load"),
    "the engine did not answer": (
        lambda data: [one.update(reason="start") for one in every_report(data)],
        "env_unverifiable",
        "did not answer",
    ),
    "the engine could not be asked": (
        lambda data: [one.update(reason="start", deaf="OSError('no sockets')") for one in every_report(data)],
        "env_unverifiable",
        "OSError('no sockets')",
    ),
    "an unknown variable": (
        lambda data: data["environment"][0].update(log_doubts=["Unknown vLLM environment variable detected: SWITCH"]),
        "switch_not_recognised",
        "was delivered and not recognised",
    ),
    "compiled code from a cache": (
        lambda data: data["environment"][1].update(log_cache_loads=["Directly load the compiled graph"]),
        "compile_cache_reused",
        "loaded from a cache",
    ),
    "a filled cache": (
        lambda data: data.update(caches=[{"variable": "V", "path": "/c/v", "files_before": 3, "files_after": 4}]),
        "compile_cache_reused",
        "held 3 file(s) before",
    ),
    "an unused cache": (
        lambda data: data.update(caches=[{"variable": "V", "path": "/c/v", "files_before": 0, "files_after": 0}]),
        "compile_cache_reused",
        "none of the launch's 1 cache directories was used",
    ),
    "files older than the launch": (
        lambda data: data.update(
            caches=[{"variable": "V", "path": "/c/v", "files_before": 0, "files_after": 1, "older": ["/c/v/k"]}]
        ),
        "compile_cache_reused",
        "older than the launch",
    ),
    "a foreign process on the GPU": (
        lambda data: data["environment"][1].update(
            gpu_holders=[{"uuid": "GPU-1", "pid": 9, "name": "ray::worker", "whose": "foreign"}]
        ),
        "foreign_gpu_process",
        "ray::worker",
    ),
    "a process that visited the GPU during the load": (
        lambda data: [
            data.update(gpu_pids_seen={"GPU-1": [1, 7, 77]}, tree_pids=[7]),
            data["environment"][0].update(gpu_holders=[{"uuid": "GPU-1", "pid": 1, "name": "e", "whose": "ours"}]),
        ],
        "foreign_gpu_process",
        "pid 77 on GPU-1",
    ),
    "another GPU in use": (
        lambda data: [data.update(gpu_uuids=["GPU-1"]), *[r.update(gpu_uuids=["GPU-2"]) for r in every_report(data)]],
        "env_mismatch",
        "uses GPU-2",
    ),
}


@pytest.mark.parametrize("name", EDITS)
def test_what_the_witnesses_show_decides_whatever_was_concluded_at_the_time(name: str, good: Path) -> None:
    """The record's own list of findings is empty in each of these: the verdict must not rest on it."""
    change, code, text = EDITS[name]
    edit(good, change)
    comparison = compared(good)
    assert code in comparison.codes
    assert any(text in item.finding.message for item in comparison.seen if item.finding.code == code)
    assert comparison.outcome == "no verdict"


def test_a_launch_that_was_not_given_what_the_spec_declares(good: Path) -> None:
    edit(good, lambda data: data["env"].update(SWITCH="2"), file="launch")
    comparison = compared(good)
    assert "env_mismatch" in comparison.codes
    assert "declared '1', launched with '2'" in str(comparison.seen)


def test_a_mig_slice_is_the_same_device_however_its_uuid_is_written(good: Path) -> None:
    """CUDA gives its 16 bytes without a prefix, and the probe writes those as a whole GPU's."""

    def on_a_slice(data: dict[str, Any]) -> None:
        data.update(gpu_uuids=["MIG-1"])
        for report in every_report(data):
            report.update(gpu_uuids=["GPU-1"])

    edit(good, on_a_slice, pattern="*")
    assert "env_mismatch" not in compared(good).codes


def test_without_the_probe_the_run_stands_on_one_witness_and_says_so(good: Path) -> None:
    edit(good, lambda data: [check.update(probes=[]) for check in data["environment"]], pattern="*")
    comparison = compared(good)
    assert (comparison.codes, comparison.outcome) == ((), "no regression")
    assert {item.finding.code for item in comparison.advice} == {"one_witness"}


def test_a_probe_that_is_silent_in_one_variant_only_is_no_proof_of_it(good: Path) -> None:
    edit(good, lambda data: [check.update(probes=[]) for check in data["environment"]])
    assert compared(good).codes == ("env_unverifiable",)
    edit(good, lambda data: [check.update(probe_absent="VLLM_PLUGINS") for check in data["environment"]])
    assert compared(good).codes == (), "it was kept out by what the variant declares, and the record says so"


# Undeclared differences.


def names(comparison: Comparison) -> list[str]:
    return [
        item.finding.message.split(": ")[0] for item in comparison.seen if item.finding.code == "undeclared_difference"
    ]


def test_a_variable_that_only_one_variants_processes_have(good: Path) -> None:
    edit(good, lambda data: [one.update(undeclared={"LEAK": "1"}) for one in every_process(data)])
    edit(good, lambda data: [one["environ"].update(LEAK="1") for one in every_report(data)])
    assert names(compared(good)) == ["env.LEAK"]


def test_a_variable_set_inside_one_variant_only(good: Path) -> None:
    edit(good, lambda data: [one["environ"].update(SET_BY_CODE="1") for one in every_report(data)])
    assert names(compared(good)) == ["inside.SET_BY_CODE"]
    assert "1 in EngineCore" in str(compared(good).seen)


def test_what_the_server_sets_for_itself_follows_from_declared_arguments(tmp_path: Path) -> None:
    """torch sets variables of its own where it compiles; a wrapper's variable is still nobody's declared difference."""
    arguments = "variants.candidate.serve_args=[--x]"
    run = write_run(tmp_path / "run", {"baseline": SLOW, "candidate": FAST}, arguments)
    edit(run, lambda data: data.update(argv=[*data["argv"], "--x"]), file="launch")
    assert compared(run).codes == ()
    edit(run, lambda data: [one["environ"].update(SET_BY_CODE="1") for one in every_report(data)])
    assert compared(run).codes == ()
    assert "inside.SET_BY_CODE" in str(compared(run).advice)
    edit(run, lambda data: [one.update(undeclared={"LEAK": "1"}) for one in every_process(data)])
    edit(run, lambda data: [one["environ"].update(LEAK="1") for one in every_report(data)])
    assert names(compared(run)) == ["env.LEAK"]


def test_another_build_in_one_variant(good: Path) -> None:
    other = {"vllm": {"version": "1", "file": "/elsewhere/vllm"}}
    edit(good, lambda data: [one.update(modules=other) for one in every_report(data)])
    assert names(compared(good)) == ["module.vllm"]


def info(run: Path, pattern: str, config: dict[str, Any], env: dict[str, Any] | None = None) -> None:
    for path in run.glob(f"launches/{pattern}/server_info.json"):
        path.write_text(json.dumps({"vllm_config": config, "vllm_env": env or {}}))


def test_resolved_configuration_that_nobody_declared(good: Path) -> None:
    info(good, "*-baseline", {"cache": {"dtype": "auto", "port": 1}, "deep": {"a": {"b": [1]}}})
    info(good, "*-candidate", {"cache": {"dtype": "fp8", "port": 2}, "deep": {"a": {"b": [1]}}})
    assert names(compared(good)) == ["config.cache.dtype"]


def test_a_switch_that_the_server_reads_is_proven_and_the_report_says_so(good: Path, capsys: Any) -> None:
    assert [effect.proof for effect in compared(good).effects] == [None]
    info(good, "*-baseline", {}, {"SWITCH": False})
    info(good, "*-candidate", {}, {"SWITCH": True})
    comparison = compared(good)
    assert comparison.codes == ()
    assert comparison.effects[0].proof == "the server reads it as false and true"
    assert main(["compare", str(good)]) == 0
    assert "effect of SWITCH: the server reads it as false and true" in capsys.readouterr().out


def test_what_belongs_to_a_launch_alone_is_no_difference(good: Path) -> None:
    for path in good.glob("launches/*"):
        data = json.loads((path / "launch.json").read_text())
        own, port = data["served_model_name"], data["port"]
        config = {"model": {"name": own, "url": f"http://127.0.0.1:{port}"}, "x": {"dp_rpc_port": int(own[-1])}}
        info(good, path.name, config)
    assert compared(good).codes == ()


def test_kv_cache_size_follows_and_is_told(good: Path) -> None:
    info(good, "*-baseline", {"cache_config": {"num_gpu_blocks": 100}})
    info(good, "*-candidate", {"cache_config": {"num_gpu_blocks": 99}})
    comparison = compared(good)
    assert comparison.codes == ()
    assert [item.finding.code for item in comparison.advice] == ["follows"]


def test_configuration_on_record_in_one_variant_only(good: Path) -> None:
    for path in good.glob("launches/*-candidate/server_info.json"):
        path.unlink()
    assert names(compared(good)) == ["server_info"]


# Effects.


def test_flag_texts_without_a_difference_and_without_proof_give_no_verdict(tmp_path: Path) -> None:
    """A5: where "0" is read as set, both variants are the same server."""
    flags = ("variants.baseline.env.SWITCH='0'",)
    same = write_run(tmp_path / "a", {"baseline": [Made(env={"SWITCH": "0"})] * 4, "candidate": [Made()] * 4}, *flags)
    comparison = compared(same)
    assert (comparison.codes, comparison.outcome) == (("truthiness_risk",), "no verdict")
    slow = [Made(one.speed, env={"SWITCH": "0"}) for one in SLOW]
    differ = write_run(tmp_path / "b", {"baseline": slow, "candidate": FAST}, *flags)
    assert compared(differ).codes == (), "two servers of different speed are not the same server"
    info(same, "*-baseline", {}, {"SWITCH": False})
    info(same, "*-candidate", {}, {"SWITCH": True})
    assert compared(same).codes == (), "the server itself says how it reads the two"


def test_an_expected_line_proves_an_effect_where_it_was_seen(tmp_path: Path, capsys: Any) -> None:
    expected = "verify.expect_log.candidate=['kernel on']"
    run = write_run(tmp_path / "run", {"baseline": SLOW, "candidate": FAST}, expected)
    assert [effect.proof for effect in compared(run).effects] == [None]
    assert "switch_not_recognised" in compared(run).codes
    edit(run, lambda data: [check.update(log_matches={"kernel on": "INFO kernel on"}) for check in data["environment"]])
    assert compared(run).codes == ()
    main(["compare", str(run)])
    assert "effect of SWITCH: expected log lines seen (candidate)" in capsys.readouterr().out


def test_a_difference_is_its_own_proof_of_an_effect(good: Path, capsys: Any) -> None:
    main(["compare", str(good)])
    assert "effect of SWITCH: no log line or setting shows it; the difference does" in capsys.readouterr().out


def test_no_difference_without_proof_of_an_effect_is_told_as_such(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"baseline": [Made()] * 4, "candidate": [Made()] * 4})
    comparison = compared(run)
    assert comparison.codes == ()
    assert "effect_unproven" in {item.finding.code for item in comparison.advice}


def test_two_interpreters_are_one_build_only_where_both_said_what_they_import(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"baseline": SLOW, "candidate": FAST}, "variants.candidate.python=/other/python")
    edit(run, lambda data: data.update(argv=["/other/python", *data["argv"][1:]]), file="launch")
    assert compared(run).codes == ("switch_not_recognised",)
    edit(run, lambda data: [check.update(probes=[]) for check in data["environment"]], pattern="*")
    assert compared(run).codes == (), "unknown is not the same"
    assert [(effect.name, effect.proof) for effect in compared(run).effects] == [("SWITCH", None), ("python", None)]


def test_an_expected_line_that_the_other_variant_logs_too_proves_nothing(tmp_path: Path) -> None:
    """A9: a line that says that something was found, not that it is used, stands in both logs."""
    run = write_run(
        tmp_path / "run", {"baseline": SLOW, "candidate": FAST}, "verify.expect_log.candidate=['kernel on']"
    )
    line = {"kernel on": "INFO kernel on"}
    edit(run, lambda data: [check.update(log_matches=line) for check in data["environment"]])
    edit(
        run, lambda data: [check.update(log_matches={"kernel on": None}) for check in data["environment"]], "*-baseline"
    )
    assert compared(run).effects[0].proof == "expected log lines seen (candidate)"
    edit(run, lambda data: [check.update(log_matches=line) for check in data["environment"]], "*-baseline")
    assert compared(run).effects[0].proof is None
