"""A/A runs: the baseline against itself, its floor, and who may use it; on runs made of numbers and on the fake server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from abharness import commands
from abharness.cli import main
from abharness.plan import config_hash
from abharness.progress import PlainReporter
from abharness.record import Failure, LaunchRecord, RunRecord, Variant
from abharness.report import render
from abharness.specload import load_spec, parse_spec
from abharness.storage import read_model
from tests.synthetic import SPEC, Made, write_run
from tests.test_run import QUESTIONS, spec_file

STEADY = [100.0, 100.4, 99.7, 100.1]
NOISY = [100.0, 108.0, 95.0, 104.0]


def wrong(*doc_ids: int) -> dict[int, str]:
    return {doc_id: f"It is {doc_id + 100}.\n#### {doc_id + 100}" for doc_id in doc_ids}


def launches(baseline: list[float], candidate: list[float], **of_all: Any) -> dict[Any, list[Made]]:
    return {
        "baseline": [Made(speed=speed, **of_all) for speed in baseline],
        "candidate": [Made(speed=speed, **of_all) for speed in candidate],
    }


def compare(capsys: Any, *arguments: Any) -> tuple[int, dict[str, Any]]:
    code = main(["compare", *map(str, arguments), "--format", "json"])
    return code, json.loads(capsys.readouterr().out)["comparisons"][-1]


def report(capsys: Any, *arguments: Any) -> str:
    main(["compare", *map(str, arguments)])
    return str(capsys.readouterr().out)


def headline(comparison: dict[str, Any]) -> dict[str, Any]:
    return next(row for row in comparison["cells"][0]["rows"] if row["decisive"])


def test_an_aa_that_finds_nothing_passes_and_prints_its_floor(tmp_path: Path, capsys: Any) -> None:
    made = launches(STEADY, STEADY[::-1])
    made["candidate"][1].answers = wrong(5)
    run = write_run(tmp_path / "r", made, aa=True)
    assert main(["compare", str(run)]) == 0
    out = capsys.readouterr().out
    assert "made A/A, the baseline against itself  baseline 4 of 4 launches" in out
    assert "A/A passed: no difference between 4+4 launches of the baseline." in out
    assert "floor: decode input_len=16 output_len=11 max_concurrency=1 output_throughput 0.40% (± 0.35%)" in out
    assert "floor: gsm8k 1 of 8 questions flip (5); two launches differ in up to 1" in out
    assert "no A/A floor was measured" not in out
    assert "switch" not in out


def test_the_floor_is_the_quantile_of_the_differences_of_all_balanced_halves(tmp_path: Path, capsys: Any) -> None:
    """Two launches a half: six splits in both orders, so the floor is the largest of their differences."""
    run = write_run(tmp_path / "r", launches([100, 102], [104, 101]), "design.launches_per_variant=2", aa=True)
    _, found = compare(capsys, run)
    floor = next(one for one in found["floor"]["cells"] if one["metric"] == "output_throughput")
    assert floor["floor"] == pytest.approx(103 / 100.5 - 1)
    assert (found["floor"]["launches"], found["floor"]["group"]) == (4, 2)


def test_an_aa_that_finds_a_difference_fails_and_says_what_differs(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", launches(STEADY, [s * 1.08 for s in STEADY]), aa=True)
    assert main(["compare", str(run)]) == 3
    out = capsys.readouterr().out
    assert "A/A failed: 4+4 launches of one and the same server differ." in out
    assert (
        "aa_difference: decode input_len=16 output_len=11 max_concurrency=1: output_throughput of the second variant "
        "is +8.00%" in out
    )
    assert "next: the variants are the same server" in out


def test_what_an_aa_found_is_never_above_its_floor(tmp_path: Path, capsys: Any) -> None:
    """Of 70 splits its own is the most extreme, and so above their 95% quantile."""
    aa = write_run(tmp_path / "aa", launches(STEADY, [s * 1.08 for s in STEADY]), aa=True)
    floor = next(one for one in compare(capsys, aa)[1]["floor"]["cells"] if one["metric"] == "output_throughput")
    assert floor["floor"] == pytest.approx(0.08)


def test_an_aa_whose_answers_got_worse_fails(tmp_path: Path, capsys: Any) -> None:
    made = launches(STEADY, STEADY)
    for one in made["candidate"]:
        one.answers = wrong(*range(8))
    run = write_run(tmp_path / "r", made, aa=True)
    code, found = compare(capsys, run)
    assert (code, found["codes"]) == (3, ["aa_difference"])
    assert "aa_difference: gsm8k: 8 and 0 of 8 answers are right" in report(capsys, run)


def test_an_aa_that_is_not_valid_gives_no_floor(tmp_path: Path, capsys: Any) -> None:
    made = launches(STEADY, STEADY)
    made["candidate"][0].versions = {"vllm": "2"}
    run = write_run(tmp_path / "r", made, aa=True)
    code, found = compare(capsys, run)
    assert (code, found["floor"], found["codes"]) == (3, None, ["undeclared_difference"])
    assert "A/A not valid, no floor: undeclared_difference" in report(capsys, run)


def test_an_aa_of_one_launch_a_variant_could_find_nothing_and_says_so(tmp_path: Path, capsys: Any) -> None:
    aa = write_run(tmp_path / "aa", launches([100], [130]), "design.launches_per_variant=1", aa=True)
    code, found = compare(capsys, aa)
    assert (code, found["floor"]) == (3, None)
    assert "A/A not valid, no floor: one launch a variant shows no spread." in report(capsys, aa)
    run = write_run(tmp_path / "ab", launches(STEADY, [s * 1.05 for s in STEADY]))
    assert f"A/A run {aa} gives no floor: one launch a variant shows no spread" in report(capsys, run)


def test_a_waiver_holds_for_the_aa_too(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "ab", launches(STEADY, [s * 1.05 for s in STEADY]))
    made = launches(STEADY, STEADY)
    made["baseline"][0].env = {"SEEN": "1"}
    write_run(tmp_path / "aa", made, aa=True)
    assert "gives no floor: it is not valid (undeclared_difference)" in report(capsys, run)
    assert headline(compare(capsys, run, "--allow", "undeclared_difference:env.SEEN")[1])["floor"] is None, (
        "nor is it the run's baseline"
    )
    made["baseline"][0].env = {}
    made["candidate"][0].env = {"SEEN": "1"}
    write_run(tmp_path / "aa2", made, aa=True)
    assert headline(compare(capsys, run, "--allow", "undeclared_difference:env.SEEN")[1])["floor"] is not None


def test_a_change_within_the_floor_is_not_called_and_names_the_aa(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "ab", launches(STEADY, [s * 1.05 for s in STEADY]))
    assert headline(compare(capsys, run)[1])["call"] == "better"
    assert "no A/A floor was measured for this server on this machine" in report(capsys, run)
    aa = write_run(tmp_path / "aa", launches(NOISY, NOISY[::-1]), aa=True)
    code, found = compare(capsys, run)
    row = headline(found)
    assert (code, row["call"]) == (0, "~")
    assert row["floor"]["floor"] > row["ratio"]["effect"] > 0.04
    out = report(capsys, run)
    assert f"within the A/A floor: the baseline differs from itself by {row['floor']['floor']:.2%} ({aa})" in out
    assert f"note: A/A floor: 8 launches of the baseline, compared in groups of 4 ({aa})" in out
    assert "no A/A floor was measured" not in out


def test_a_change_above_the_floor_is_called(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "ab", launches(STEADY, [s * 1.05 for s in STEADY]))
    write_run(tmp_path / "aa", launches(STEADY, STEADY[::-1]), aa=True)
    row = headline(compare(capsys, run)[1])
    assert row["call"] == "better"
    assert 0 < row["floor"]["floor"] < 0.01


def test_the_floor_is_computed_from_the_raw_records_of_the_aa(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "ab", launches(STEADY, [s * 1.05 for s in STEADY]))
    aa = write_run(tmp_path / "aa", launches(STEADY, STEADY[::-1]), aa=True)
    (aa / "comparison.json").write_text('{"floor": 1.0}')
    assert headline(compare(capsys, run)[1])["call"] == "better"
    record = aa / "launches" / "1-candidate" / "launch.json"
    data = json.loads(record.read_text())
    data["cells"][0]["ended_s"] *= 2
    record.write_text(json.dumps(data))
    assert headline(compare(capsys, run)[1])["floor"]["floor"] > 0.001


def test_the_groups_are_as_large_as_the_variants_that_use_the_floor(tmp_path: Path, capsys: Any) -> None:
    """A median of two launches scatters more than one of four."""
    one = write_run(tmp_path / "1", launches(STEADY, STEADY))
    two = write_run(tmp_path / "2", launches(STEADY[:2], STEADY[:2]), "design.launches_per_variant=2")
    write_run(tmp_path / "aa", launches(NOISY, NOISY[::-1]), aa=True)
    small, large = (headline(compare(capsys, run)[1])["floor"]["floor"] for run in (one, two))
    assert small < large
    assert "compared in groups of 2" in report(capsys, two)


# Every row: how the A/A differs from the run, what the note must say of it.
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another processor": ({}, {"provenance": {"cpu": "y"}}, "host.cpu is 'y' there and 'x' here"),
    "another vLLM": ({"versions": {"vllm": "2"}}, {}, "version.vllm is '2' there and '1' here"),
    "another environment": ({"env": {"INHERITED": "2"}}, {}, "env.INHERITED is '2' there and (absent) here"),
    "another model": ({"model": "other"}, {}, "model is 'other' there and 'm' here"),
    "other prompts": ({"prompts": "q"}, {}, "prompts.decode"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_an_aa_of_something_else_is_not_used_and_the_first_difference_is_named(
    case: str, tmp_path: Path, capsys: Any
) -> None:
    of_launch, of_run, expected = OTHERS[case]
    run = write_run(tmp_path / "ab", launches(STEADY, [s * 1.05 for s in STEADY]))
    aa = write_run(tmp_path / "aa", launches(NOISY, NOISY[::-1], **of_launch), aa=True, **of_run)
    assert headline(compare(capsys, run)[1])["floor"] is None
    out = report(capsys, run)
    assert f"A/A run {aa} is not this server on this machine and gives no floor: {expected}" in out
    assert "abharness run SPEC.yaml --aa measures it" in out


@pytest.mark.parametrize("same_server", [True, False])
def test_an_aa_of_another_experiment_is_used_where_it_is_this_server_and_else_not_mentioned(
    same_server: bool, tmp_path: Path, capsys: Any
) -> None:
    run = write_run(tmp_path / "one" / "ab", launches(STEADY, [s * 1.05 for s in STEADY]))
    other = {} if same_server else {"model": "other"}
    aa = write_run(tmp_path / "two" / "aa", launches(NOISY, NOISY[::-1], **other), "experiment=another", aa=True)
    out = report(capsys, run, aa.parent)
    assert (f"A/A floor: 8 launches of the baseline, compared in groups of 4 ({aa})" in out) == same_server
    assert "is not this server" not in out


def test_an_aa_that_failed_gives_no_floor_and_the_note_says_why(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "ab", launches(STEADY, [s * 1.05 for s in STEADY]))
    made = launches(NOISY, NOISY[::-1])
    made["baseline"][2].status = "failed"
    made["baseline"][2].failure = Failure(kind="ServerDied", message="gone", phase="start")
    aa = write_run(tmp_path / "aa", made, aa=True)
    out = report(capsys, run)
    assert f"A/A run {aa} gives no floor: it is not valid (launch_failed)" in out


def test_an_aa_of_one_workload_gives_a_floor_for_that_one(tmp_path: Path, capsys: Any) -> None:
    """As after `run --aa --only decode`: the answers have no floor, the cell has one."""
    run = write_run(tmp_path / "ab", launches(STEADY, [s * 1.05 for s in STEADY], answers={}))
    aa = write_run(tmp_path / "aa", launches(NOISY, NOISY[::-1]), aa=True)
    for path in aa.glob("launches/*/launch.json"):
        data = json.loads(path.read_text())
        data["accuracy"] = []
        path.write_text(json.dumps(data))
        path.with_name("gsm8k.jsonl").unlink()
    record = aa / "experiment.json"
    data = json.loads(record.read_text())
    data["spec"]["workloads"] = data["spec"]["workloads"][:1]
    data["spec_sha256"] = None
    record.write_text(json.dumps(data))
    _, found = compare(capsys, run)
    assert headline(found)["floor"] is not None
    assert found["accuracy"][0]["floor"] is None


def test_an_aa_in_another_folder_is_used_when_it_is_given(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "one" / "ab", launches(STEADY, [s * 1.05 for s in STEADY]))
    aa = write_run(tmp_path / "two" / "aa", launches(NOISY, NOISY[::-1]), aa=True)
    assert main(["compare", str(run), str(aa)]) == 0
    out = capsys.readouterr().out
    assert "within the A/A floor" in out
    assert "made A/A, the baseline against itself" in out
    assert "order_confounded" not in out, "an A/A and a run are two results, not two halves of one"


def test_a_results_folder_lists_an_aa_as_what_it_is(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path / "made" / "1", launches(STEADY, STEADY[::-1]), aa=True)
    write_run(tmp_path / "made" / "2", launches(STEADY, [s * 1.05 for s in STEADY]))
    out = report(capsys, tmp_path)
    assert out.count("made A/A, the baseline against itself  ") == 1
    assert out.count('switch SWITCH: unset -> "1"') == 1


def test_an_aa_beside_is_named_as_the_run_is_relative_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write_run(tmp_path / "ab", launches(STEADY, STEADY))
    aa = write_run(tmp_path / "aa", launches(STEADY, STEADY[::-1]), aa=True)
    monkeypatch.chdir(tmp_path)
    assert "in groups of 4 (aa)" in report(capsys, "ab")
    monkeypatch.chdir(tmp_path / "ab")
    assert f"in groups of 4 ({aa})" in report(capsys, ".")


def test_a_damaged_run_beside_is_a_warning_and_no_obstacle(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "ab", launches(STEADY, [s * 1.05 for s in STEADY]))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "experiment.json").write_text("{")
    assert "warning: not looked at for an A/A floor: " in report(capsys, run)
    aa = write_run(tmp_path / "aa", launches(STEADY, STEADY), aa=True)
    (aa / "launches" / "0-baseline" / "launch.json").write_text("{")
    out = report(capsys, run)
    assert f"A/A run {aa} gives no floor: " in out
    assert "not JSON" in out


def test_a_changed_answer_that_the_aa_flips_too_is_marked_and_not_attributed(tmp_path: Path, capsys: Any) -> None:
    made = launches(STEADY, STEADY)
    for one in made["candidate"]:
        one.answers = wrong(3)
    run = write_run(tmp_path / "ab", made)
    assert "flips it too" not in report(capsys, run)
    flipping = launches(STEADY, STEADY[::-1])
    flipping["candidate"][0].answers = wrong(3, 6)
    aa = write_run(tmp_path / "aa", flipping, aa=True)
    out = report(capsys, run)
    assert "question 3: 3 against 103; diverges at token 6" in out
    assert "the A/A flips it too" in out
    assert f"not attributable to the change: two launches of the baseline differ in up to 2 answers ({aa})" in out


def test_a_changed_answer_that_the_aa_does_not_flip_is_marked_so(tmp_path: Path, capsys: Any) -> None:
    made = launches(STEADY, STEADY)
    for one in made["candidate"]:
        one.answers = wrong(3)
    run = write_run(tmp_path / "ab", made)
    write_run(tmp_path / "aa", launches(STEADY, STEADY[::-1]), aa=True)
    out = report(capsys, run)
    assert "the A/A does not flip it" in out
    assert "not attributable" not in out


def test_a_loss_of_answers_within_what_the_aa_loses_is_not_called(tmp_path: Path, capsys: Any) -> None:
    made = launches(STEADY, STEADY)
    for one in made["candidate"]:
        one.answers = wrong(*range(7))
    run = write_run(tmp_path / "ab", made)
    assert compare(capsys, run)[0] == 1
    unstable = launches(STEADY, STEADY[::-1])
    for one in unstable["candidate"]:
        one.answers = wrong(*range(8))
    write_run(tmp_path / "aa", unstable, aa=True)
    code, found = compare(capsys, run)
    assert (code, found["accuracy"][0]["call"]) == (0, "~")
    out = report(capsys, run)
    assert "within the A/A floor: equal variants differ by up to 8 right answers" in out
    assert "found a difference between equal variants: be careful" in out


def test_the_candidate_of_an_aa_is_the_baseline_with_what_is_expected_of_it() -> None:
    text = SPEC + 'verify: {expect_log: {baseline: ["b"], candidate: ["c"]}, plugins: {candidate: [p]}}\n'
    spec = parse_spec(text, "made.yaml")
    aa = spec.against_itself()
    assert (spec.is_aa, aa.is_aa) == (False, True)
    assert aa.switches() == {}
    assert aa.verify.expect_log == {"baseline": ("b",), "candidate": ("b",)}
    assert aa.verify.plugins == {}
    assert config_hash(aa) != config_hash(spec)


FEW = ("--only", "prefill", "--only", "gsm8k", "--set", "design.min_effect=0.9")


def test_run_aa_goes_through_the_whole_pipeline_and_the_next_run_uses_its_floor(tmp_path: Path, capsys: Any) -> None:
    spec, results = spec_file(tmp_path), tmp_path / "results"
    arguments = ["run", str(spec), "-o", str(results), *FEW, "--set", "design.launches_per_variant=2"]
    assert main([*arguments, "--aa", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "A/A        the baseline runs against itself" in out
    assert "FAKE_SWITCH=fast" not in out
    assert not results.exists()

    assert main([*arguments, "--aa"]) == 0
    out = capsys.readouterr().out
    assert "A/A passed: no difference between 2+2 launches of the baseline." in out
    assert "floor: gsm8k 0 of 6 questions flip" in out
    (aa,) = (results / "fake").iterdir()
    record = read_model(aa / "experiment.json", RunRecord)
    assert record.aa
    assert record.plan == ["baseline", "candidate", "candidate", "baseline"]
    made = [read_model(path, LaunchRecord) for path in sorted(aa.glob("launches/*/launch.json"))]
    assert all("FAKE_SWITCH" not in one.env and one.status == "completed" for one in made)
    assert json.loads((aa / "comparison.json").read_text())["comparisons"][0]["floor"]["launches"] == 4

    before = {path: path.stat().st_mtime_ns for path in aa.rglob("launch.json")}
    assert main([*arguments, "--aa", "--resume"]) == 0
    assert {path: path.stat().st_mtime_ns for path in aa.rglob("launch.json")} == before
    capsys.readouterr()
    assert main([*arguments, "--resume"]) == 2, "an A/A is not the A/B of the same spec"

    assert main([*arguments]) == 0
    assert f"A/A floor: 4 launches of the baseline, compared in groups of 2 ({aa})" in capsys.readouterr().out


def test_an_aa_on_servers_that_are_not_equal_fails(tmp_path: Path, capsys: Any) -> None:
    """Something outside the declared configuration changes with the variant: the file the answers come from."""
    answers = tmp_path / "answers.jsonl"

    class Meddler(PlainReporter):
        def launch(self, index: int, total: int, variant: Variant) -> None:
            super().launch(index, total, variant)
            text = QUESTIONS.read_text()
            answers.write_text(text if variant == "baseline" else text.replace("#### ", "#### 7"))

    path = spec_file(tmp_path)
    path.write_text(path.read_text().replace(f'FAKE_ANSWERS: "{QUESTIONS}"', f'FAKE_ANSWERS: "{answers}"'))
    spec = load_spec(path, ["design.min_effect=0.9", "workloads.gsm8k.num_questions=8"]).against_itself()
    spec = spec.model_copy(update={"workloads": spec.workloads[2:]})
    done = commands.run(spec, os.environ, output=tmp_path / "results", resume=False, reporter=Meddler())
    assert done.comparison.exit_code == 3
    text = render([done.comparison], "text")
    assert "A/A failed: 1+1 launches of one and the same server differ." in text
    assert "aa_difference: gsm8k: 8 and 0 of 8 answers are right (p=0.008)" in text
