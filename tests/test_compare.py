"""From records to a verdict, through the command line: what is called, what is withheld, and why."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from abharness.cells import call_cells
from abharness.cli import main
from abharness.record import Failure, Finding, ServerCounters
from abharness.runs import CellKey
from tests.synthetic import Made, spec, write_run

SLOW = [100.0, 100.4, 99.7, 100.1]
FAST = [108.2, 108.9, 107.8, 108.4]


def variants(baseline: list[float], candidate: list[float], **of_candidate: Any) -> dict[Any, list[Made]]:
    return {
        "baseline": [Made(speed=speed) for speed in baseline],
        "candidate": [Made(speed=speed, **of_candidate) for speed in candidate],
    }


def compare(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    code = main(["compare", *map(str, arguments), "--format", "json"])
    comparisons = json.loads(capsys.readouterr().out)["comparisons"]
    return code, comparisons[-1]


def headline(comparison: dict[str, Any]) -> dict[str, Any]:
    rows = comparison["cells"][0]["rows"]
    return next(row for row in rows if row["metric"]["name"] == "output_throughput")


def test_a_faster_candidate_is_called_with_size_interval_and_p(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", variants(SLOW, FAST))
    code, found = compare(capsys, run)
    assert code == 0
    assert found["outcome"] == "no regression"
    row = headline(found)
    assert row["call"] == "better"
    assert row["ratio"]["effect"] == pytest.approx(108.3 / 100.05 - 1, rel=1e-3)
    assert row["ratio"]["low"] < row["ratio"]["effect"] < row["ratio"]["high"]
    assert row["p"] < 0.001


def test_a_slower_candidate_is_a_regression_with_exit_1(tmp_path: Path, capsys: Any) -> None:
    code, found = compare(capsys, write_run(tmp_path / "r", variants(FAST, SLOW)))
    assert (code, found["outcome"], headline(found)["call"]) == (1, "regression", "worse")


def test_the_primary_decides_alone(tmp_path: Path, capsys: Any) -> None:
    """Its p is uncorrected, and its row is shown though it is not a chief one."""
    run = write_run(tmp_path / "r", variants(FAST, SLOW), "design.primary=decode/e2el_p99")
    code, found = compare(capsys, run)
    rows = {row["metric"]["name"]: row for row in found["cells"][0]["rows"]}
    assert [name for name, row in rows.items() if row["decisive"]] == ["e2el_p99"]
    assert (code, rows["e2el_p99"]["call"]) == (1, "worse")
    assert rows["e2el_p99"]["p"] == rows["e2el_p99"]["ratio"]["p"]
    main(["compare", str(run)])
    assert "e2el_p99 ms" in capsys.readouterr().out


def test_no_difference_prints_a_tilde_and_withholds_the_percentage(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", variants(SLOW, [100.3, 99.8, 100.2, 99.9]))
    assert main(["compare", str(run)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("output_throughput "))
    assert "~ (p=" in line
    assert "%" not in line.split("~")[1]


def test_a_significant_change_below_min_effect_is_not_called(tmp_path: Path, capsys: Any) -> None:
    tiny = variants([100.0, 100.01, 99.99, 100.0], [100.5, 100.51, 100.49, 100.5])
    code, found = compare(capsys, write_run(tmp_path / "r", tiny))
    assert (code, headline(found)["call"]) == (0, "~")
    assert headline(found)["p"] < 0.001
    code, found = compare(capsys, write_run(tmp_path / "s", tiny, "design.min_effect=0.001"))
    assert headline(found)["call"] == "better"


def test_one_launch_a_variant_shows_medians_and_says_what_is_missing(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", variants([100.0], [120.0]), "design.launches_per_variant=1")
    assert main(["compare", str(run)]) == 0
    out = capsys.readouterr().out
    assert "one launch a variant shows no spread" in out
    assert "+20" not in out


# Every row: what is wrong with the candidate's launches, the code it must end in.
LIES: dict[str, tuple[dict[str, Any], str]] = {
    "D9 candidate answers shorter": (
        {"requests": {2: {"output_tokens": 3, "finish_reason": "stop"}}},
        "output_tokens_mismatch",
    ),
    "D10 prompts of another length": ({"requests": {1: {"prompt_tokens": 17}}}, "prompt_tokens_mismatch"),
    "D6 faster because it fails": ({"requests": {0: {"error": "500"}}}, "incomplete_requests"),
    "D8 prefix cache hits": (
        {"counters": ServerCounters(prefix_cache_queries=64, prefix_cache_hits=32)},
        "prefix_cache_hits",
    ),
    "D12 client at its limit": ({"client": {"cpu_share": 0.97}}, "client_bound"),
    "H5 other package versions": ({"versions": {"torch": "2"}}, "undeclared_difference"),
    "A10 another variable differs": ({"env": {"LEAK": "1"}}, "undeclared_difference"),
    "D10 other prompts": ({"prompts": "other"}, "undeclared_difference"),
    "not verified at all": ({"verified": False}, "env_unverifiable"),
    "B1 compiled code from a cache": (
        {"findings": [Finding(code="compile_cache_reused", message="default location written")]},
        "compile_cache_reused",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_planted_fault_gives_no_verdict_with_its_code(lie: str, tmp_path: Path, capsys: Any) -> None:
    change, expected = LIES[lie]
    code, found = compare(capsys, write_run(tmp_path / "r", variants(SLOW, FAST, **change)))
    assert code == 3
    assert expected in found["codes"]
    assert headline(found)["call"] == "no verdict"
    assert main(["compare", str(tmp_path / "r")]) == 3
    out = capsys.readouterr().out
    assert f"{expected}: launch " in out or f"{expected}: baseline and candidate" in out
    assert "  next: " in out


def test_counters_that_could_not_be_read_are_not_checked_and_not_zero(tmp_path: Path, capsys: Any) -> None:
    code, found = compare(capsys, write_run(tmp_path / "r", variants(SLOW, FAST, counters=None)))
    assert (code, found["codes"]) == (0, [])


def test_launches_of_one_variant_that_differ_among_themselves_are_no_sample(tmp_path: Path, capsys: Any) -> None:
    launches = variants(SLOW, FAST)
    launches["candidate"][2].versions = {"vllm": "2"}
    code, found = compare(capsys, write_run(tmp_path / "r", launches))
    assert (code, found["codes"]) == (3, ["undeclared_difference"])
    assert "differs between launches of the candidate" in found["seen"][0]["finding"]["message"]


def test_g1_order_ab_is_confounded(tmp_path: Path, capsys: Any) -> None:
    code, found = compare(capsys, write_run(tmp_path / "r", variants(SLOW, FAST), "design.order=ab"))
    assert (code, found["codes"]) == (3, ["order_confounded"])


def test_h5_two_runs_are_compared_across_and_everything_that_differs_is_listed(tmp_path: Path, capsys: Any) -> None:
    one = write_run(tmp_path / "a", variants(SLOW, FAST), provenance={"cpu": "x", "gpu": "H100"})
    two = write_run(tmp_path / "b", variants(SLOW, FAST), provenance={"cpu": "x", "gpu": "H200"})
    code, found = compare(capsys, one, two)
    assert code == 3
    assert found["sources"] == [str(one), str(two)]
    messages = [item["finding"]["message"] for item in found["seen"]]
    assert any("host.gpu" in message and "H100" in message and "H200" in message for message in messages)
    assert not any("host.cpu" in message for message in messages)


def test_two_runs_can_be_compared_when_the_confounding_is_accepted_and_printed(tmp_path: Path, capsys: Any) -> None:
    one = write_run(tmp_path / "a", variants(SLOW, SLOW))
    two = write_run(tmp_path / "b", variants(FAST, FAST))
    assert compare(capsys, one, two)[0] == 3
    assert main(["compare", str(one), str(two), "--allow", "order_confounded"]) == 0
    out = capsys.readouterr().out
    assert "waived: order_confounded: order: the variants come from two runs" in out
    assert "+8.2" in out


def test_a_missing_or_failed_launch_is_exit_4_and_the_rest_is_shown(tmp_path: Path, capsys: Any) -> None:
    launches = variants(SLOW, FAST)
    launches["candidate"][3] = Made(
        status="failed", failure=Failure(kind="ServerDied", message="exit 1", phase="start", hint="look at the log")
    )
    code, found = compare(capsys, write_run(tmp_path / "r", launches))
    assert (code, found["outcome"]) == (4, "launch failed")
    assert found["launches"] == {"baseline": [4, 4], "candidate": [3, 4]}
    assert "ServerDied in phase start" in found["seen"][0]["finding"]["message"]
    assert len(headline(found)["samples"]["candidate"]) == 3
    launches["candidate"].pop()
    code, _ = compare(capsys, write_run(tmp_path / "s", launches))
    assert code == 4


def wrong(*doc_ids: int) -> dict[int, str]:
    return {doc_id: f"It is {doc_id + 100}.\n#### {doc_id + 100}" for doc_id in doc_ids}


def test_changed_answers_are_listed_with_where_they_diverge(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", variants(SLOW, FAST, answers=wrong(3)))
    code, found = compare(capsys, run)
    assert code == 0
    accuracy = found["accuracy"][0]
    assert (accuracy["only_baseline"], accuracy["only_candidate"], accuracy["call"]) == (1, 0, "~")
    change = accuracy["changed"][0]
    assert (change["doc_id"], change["baseline"], change["candidate"]) == (3, "3", "103")
    assert change["flip"]["position"] == len("It is ")
    main(["compare", str(run)])
    out = capsys.readouterr().out
    assert "1 of 8 answers differ" in out
    assert "[1] " in out
    assert "question 3: 3 against 103; diverges at token 6" in out


def test_e11_flips_between_launches_of_one_variant_are_counted_and_named(tmp_path: Path, capsys: Any) -> None:
    launches = variants(SLOW, FAST)
    launches["baseline"][1].answers = wrong(5)
    launches["candidate"][0].answers = wrong(5)
    _, found = compare(capsys, write_run(tmp_path / "r", launches))
    accuracy = found["accuracy"][0]
    assert accuracy["flips_within"] == {"baseline": 1, "candidate": 1}
    assert accuracy["changed"][0]["flips_within"] is True
    assert found["summary"].endswith("(1 of 8 answers differ, and up to 1 between launches of one variant).")
    assert accuracy["only_baseline"] == accuracy["only_candidate"] == 0, "most launches answered it right"


def test_answers_that_got_worse_are_a_regression_however_fast(tmp_path: Path, capsys: Any) -> None:
    code, found = compare(capsys, write_run(tmp_path / "r", variants(SLOW, FAST, answers=wrong(*range(8)))))
    assert (code, found["accuracy"][0]["call"]) == (1, "worse")
    assert found["accuracy"][0]["p"] == pytest.approx(2 / 256)


@pytest.mark.parametrize("field", ["state", "extractions"])
def test_what_the_record_concluded_from_an_answer_is_concluded_again(field: str, tmp_path: Path, capsys: Any) -> None:
    """A file that calls wrong answers right is not believed, and the difference is told."""
    run = write_run(tmp_path / "r", variants(SLOW, FAST, answers=wrong(*range(8))))
    for path in run.glob("launches/*-candidate/gsm8k.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            line["state"], line["exact_match"] = "right", 1.0
            if field == "extractions":
                line["extractions"]["flexible-extract"] |= {"value": str(line["doc_id"]), "exact_match": True}
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, found = compare(capsys, run)
    assert (code, found["accuracy"][0]["call"]) == (1, "worse")
    assert any("8 answers are scored otherwise than recorded" in warning for warning in found["warnings"])


def test_an_answer_without_a_gold_number_or_a_reply_is_missing(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", variants(SLOW, FAST))
    path = run / "launches/0-baseline/gsm8k.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["target"] = "no number"
    lines[1]["resps"] = []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, found = compare(capsys, run)
    assert (code, found["codes"]) == (3, ["incomplete_requests"])
    assert "incomplete 6/8" in found["seen"][0]["finding"]["message"]


def test_b3_speed_below_the_accuracy_floor_is_no_gain(tmp_path: Path, capsys: Any) -> None:
    garbled = variants(SLOW, FAST, answers=dict.fromkeys(range(8), "the the the 4 4 4"))
    run = write_run(tmp_path / "r", garbled, "workloads.gsm8k.min_exact_match=0.5")
    code, found = compare(capsys, run)
    assert code == 3
    assert found["codes"] == ["accuracy_below_floor"]
    assert headline(found)["call"] == "no verdict"


def test_h1_incomplete_answers_are_labelled_and_only_common_questions_paired(tmp_path: Path, capsys: Any) -> None:
    code, found = compare(capsys, write_run(tmp_path / "r", variants(SLOW, FAST, drop_answers=3)))
    assert code == 3
    assert "incomplete_requests" in found["codes"]
    assert "incomplete 5/8" in found["seen"][0]["finding"]["message"]
    assert found["accuracy"][0]["num_questions"] == 5
    assert headline(found)["call"] == "better", "the answers' fault says nothing about the decode cell"


def test_h1_a_half_written_last_line_is_dropped_with_a_warning(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", variants(SLOW, FAST))
    path = run / "launches" / "0-baseline" / "gsm8k.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    code, found = compare(capsys, run)
    assert code == 3
    assert any("gsm8k.jsonl:8: line dropped" in warning for warning in found["warnings"])
    assert "incomplete 7/8" in found["seen"][0]["finding"]["message"]


@pytest.mark.parametrize("damage", ["lost", "doubled"])
def test_h1_a_lost_or_doubled_request_line_makes_its_cell_no_verdict(damage: str, tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", variants(SLOW, FAST))
    path = run / "launches" / "0-baseline" / "requests.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1] if damage == "lost" else [*lines, lines[0]]))
    code, found = compare(capsys, run)
    assert (code, found["codes"]) == (3, ["incomplete_requests"])
    assert headline(found)["call"] == "no verdict"


def test_e6_variants_that_are_cut_at_different_rates_are_flagged(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", variants(SLOW, FAST, answers={0: "so 12*4=48. Then 48..."}))
    main(["compare", str(run)])
    out = capsys.readouterr().out
    assert "cut at max_tokens at different rates: baseline 0 of 32, candidate 4 of 32" in out


def test_e6_truncated_answers_are_shown_apart(tmp_path: Path, capsys: Any) -> None:
    cut = {0: "so 12*4=48. Then 48...", 1: "thinking about 1..."}
    run = write_run(tmp_path / "r", variants(SLOW, FAST, answers=cut))
    code, found = compare(capsys, run)
    assert (code, found["codes"]) == (3, ["truncation_differs"])
    assert found["accuracy"][0]["call"] == "no verdict"
    assert found["accuracy"][0]["states"]["candidate"]["truncated"] == 8
    assert [item["finding"]["code"] for item in found["advice"]] == ["accuracy_truncated"] * 4
    main(["compare", str(run)])
    assert "truncated" in capsys.readouterr().out


@pytest.mark.parametrize("bare", ["NaN", "Infinity", "-Infinity"])
def test_h2_nan_and_infinity_in_an_old_file_are_missing_values(bare: str, tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", variants(SLOW, FAST))
    path = run / "launches" / "0-baseline" / "launch.json"
    data = json.loads(path.read_text())
    data["ready_s"] = math.nan
    path.write_text(json.dumps(data).replace("NaN", bare))
    code, _ = compare(capsys, run)
    assert code == 0


def test_results_folder_prints_every_run_and_exits_with_the_gravest(tmp_path: Path, capsys: Any) -> None:
    write_run(tmp_path / "made" / "1", variants(SLOW, FAST))
    write_run(tmp_path / "made" / "2", variants(FAST, SLOW))
    assert main(["compare", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("made  baseline 4 of 4 launches") == 2


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda run: (run / "experiment.json").write_text("{"), "not JSON"),
        (lambda run: (run / "experiment.json").write_text('{"schema_version": 99}'), "schema version 99"),
        (lambda run: (run / "experiment.json").write_text("[]"), "a JSON object was expected"),
        (lambda run: (run / "launches/0-baseline/launch.json").write_bytes(b"\xff"), "launch.json"),
        (lambda run: (run / "launches/0-baseline/launch.json").write_text("{}"), "launch.json: "),
    ],
)
def test_a_damaged_record_is_named_not_guessed(damage: Any, expected: str, tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", variants(SLOW, FAST))
    damage(run)
    assert main(["compare", str(run)]) == 2
    assert expected in capsys.readouterr().err


def test_nothing_to_compare_is_a_usage_error(tmp_path: Path, capsys: Any) -> None:
    assert main(["compare", str(tmp_path)]) == 2
    assert main(["compare", str(tmp_path / "no")]) == 2
    assert "no run here" in capsys.readouterr().err


def test_markdown_escapes_what_a_model_wrote(tmp_path: Path, capsys: Any) -> None:
    hostile = {3: "<script>|\n#### 77"}
    run = write_run(tmp_path / "r", variants(SLOW, FAST, answers=hostile))
    assert main(["compare", str(run), "--format", "markdown"]) == 0
    out = capsys.readouterr().out
    assert "| output_throughput tok/s |" in out
    assert "<script>" not in out


def test_the_published_records_still_compare(capsys: Any) -> None:
    published = Path(__file__).parent.parent / "results"
    assert main(["compare", str(published)]) in (0, 1, 3), "a published record is readable and complete"
    assert "quickstart  baseline 2 of 2 launches, candidate 2 of 2 launches" in capsys.readouterr().out


def test_rows_that_describe_are_corrected_together_over_all_metrics() -> None:
    """Equal servers have a small p in one of dozens of rows: by itself it must not read as a difference."""
    base, other = [100.0, 101.0, 100.5, 101.5], [102.0, 103.0, 102.6, 103.4]
    table = {
        name: {"baseline": dict(enumerate(base)), "candidate": dict(enumerate(shifted))}
        for name, shifted in {
            "output_throughput": other,
            "tpot": other,
            "ttft": base,
            "itl": base,
            "e2el": base,
        }.items()
    }
    key = CellKey("decode", 16, 11, 1)
    (cell,) = call_cells({key: table}, {key: "decode"}, {}, spec("design.alpha=0.01"), {})  # type: ignore[arg-type]
    rows = {row.metric.name: row for row in cell.rows}
    alone = rows["output_throughput"]
    assert (alone.decisive, alone.p, alone.call) == (True, alone.ratio.p, "better")
    assert rows["tpot"].ratio.p == alone.ratio.p
    assert rows["tpot"].p == pytest.approx(4 * (alone.p or 0))
    assert (rows["tpot"].call, rows["ttft"].call) == ("~", "~")
