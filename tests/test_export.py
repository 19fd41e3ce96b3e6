"""Records in the formats of others' tools: the right values under their keys, and nothing looks valid that is not."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.json
import pytest

from abharness import arguments, export
from abharness.cli import main
from abharness.environments import list_managed
from abharness.metrics import METRICS
from abharness.record import Failure, Finding
from tests import gobench
from tests.synthetic import Made, write_run

ROOT = Path(__file__).parents[1]
TWO = "design.launches_per_variant=2"
LAUNCHES: dict[Any, list[Made]] = {
    "baseline": [Made(speed=100.0), Made(speed=110.0)],
    "candidate": [Made(speed=120.0), Made(speed=130.0)],
}


def exported(tmp_path: Path, launches: dict[Any, list[Made]] = LAUNCHES, *more: str) -> Path:
    run = write_run(tmp_path / "results" / "made" / "20260101T000000Z-0", launches, TWO)
    assert main(["export", str(run), "--to", str(tmp_path / "out"), *more]) == 0
    return tmp_path / "out"


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_formats_of_the_command_line_are_those_there_are() -> None:
    assert arguments.EXPORT_FORMATS == export.FORMATS


def test_every_file_is_named_on_stdout_and_readable_by_others(tmp_path: Path, capsys: Any) -> None:
    out = exported(tmp_path)
    told = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(told) == sorted(path for path in out.rglob("*") if path.is_file())
    assert {path.relative_to(out).parts[0] for path in told} == set(export.FORMATS)
    assert (out.stat().st_mode & 0o777, told[0].stat().st_mode & 0o777) == (0o755, 0o644)
    assert [path.name for path in out.parent.iterdir() if path.name.startswith(".")] == []


def test_only_the_formats_that_are_asked_for(tmp_path: Path) -> None:
    out = exported(tmp_path, LAUNCHES, "--format", "csv", "--format", "benchfmt")
    assert sorted(path.name for path in out.iterdir()) == ["benchfmt", "csv"]


def test_csv_has_the_launch_values_that_compare_tests(tmp_path: Path, capsys: Any) -> None:
    out = exported(tmp_path)
    capsys.readouterr()
    main(["compare", str(tmp_path / "results"), "--format", "json"])
    (comparison,) = json.loads(capsys.readouterr().out)["comparisons"]
    table = rows(out / "csv" / "metrics.csv")
    units = {metric.name: metric.unit for metric in METRICS}
    for row in comparison["cells"][0]["rows"]:
        for variant, samples in row["samples"].items():
            found = [one for one in table if (one["metric"], one["variant"]) == (row["metric"]["name"], variant)]
            assert [float(one["value"]) for one in found] == samples
            assert {one["unit"] for one in found} == {units[row["metric"]["name"]]}
            assert {one["valid"] for one in found} == {"true"}
    unknown = [one for one in table if not one["value"]]
    assert unknown
    assert all(one["unknown"] for one in unknown)


def test_csv_has_a_row_for_each_launch_and_question(tmp_path: Path) -> None:
    launches = {**LAUNCHES, "candidate": [Made(answers={3: "#### 4"}), Made()]}
    table = rows(exported(tmp_path, launches) / "csv" / "answers.csv")
    assert len(table) == 4 * 8
    wrong = [one for one in table if one["state"] != "right"]
    assert [(one["launch"], one["doc_id"], one["target"], one["answer"], one["reply"]) for one in wrong] == [
        ("1", "3", "3", "4", "#### 4")
    ]


@pytest.mark.parametrize(
    ("reply", "cell"),
    [
        ("=HYPERLINK(\"http://x\")\n#### 1", "'=HYPERLINK(\"http://x\")\n#### 1"),
        ("+1+cmd|' /C calc'!A0", "'+1+cmd|' /C calc'!A0"),
        ("@SUM(1)", "'@SUM(1)"),
        ("-1+1", "'-1+1"),
        ("\t=1", "'\t=1"),
        ("＝1", "'＝1"),
        ("-5", "-5"),
        ("it is =1", "it is =1"),
    ],
)  # fmt: skip
def test_no_text_of_a_record_is_a_formula_in_a_spreadsheet(tmp_path: Path, reply: str, cell: str) -> None:
    out = exported(tmp_path, {**LAUNCHES, "baseline": [Made(answers={1: reply}), Made()]}, "--format", "csv")
    (row,) = [one for one in rows(out / "csv" / "answers.csv") if (one["launch"], one["doc_id"]) == ("0", "1")]
    assert row["reply"] == cell


def test_vllm_bench_json_by_hand(tmp_path: Path) -> None:
    """At speed 100 a request of 11 tokens takes 0.11 s, a tenth of it to the first token; four run one after the other."""
    out = exported(tmp_path, {**LAUNCHES, "baseline": [Made(speed=100, requests={3: {"error": "cut"}}), Made()]})
    (path,) = (out / "vllm-bench" / "made").glob("*/0-baseline/decode-in16-out11-c1-r0.json")
    data = json.loads(path.read_text())
    assert (data["completed"], data["failed"], data["num_prompts"]) == (3, 1, 4)
    assert (data["total_input_tokens"], data["total_output_tokens"]) == (48, 33)
    assert data["duration"] == pytest.approx(0.44)
    assert data["output_throughput"] == pytest.approx(33 / 0.44)
    assert data["median_ttft_ms"] == pytest.approx(11)
    assert data["mean_tpot_ms"] == pytest.approx(9.9)
    assert data["p99_e2el_ms"] == pytest.approx(110)
    assert data["std_ttft_ms"] == pytest.approx(0, abs=1e-9)
    assert data["mean_itl_ms"] == pytest.approx(9.9)
    assert data["p99_itl_ms"] is None  # a record does not hold all gaps
    assert data["errors"] == ["", "", "", "cut"]
    assert (data["date"], data["request_rate"], data["max_concurrency"]) == ("20260101-000000", "inf", 1)


def test_every_key_is_one_that_vllm_bench_serve_writes(tmp_path: Path) -> None:
    sources = [
        path
        for one in list_managed(os.environ)
        for path in one.path.glob("lib/*/site-packages/vllm/benchmarks/serve.py")
    ]
    if not sources:
        pytest.skip("no managed server environment is installed, so vLLM's source is not at hand")
    source = sources[0].read_text()
    out = exported(tmp_path, LAUNCHES, "--format", "vllm-bench")
    data = json.loads(next(out.rglob("*.json")).read_text())
    of_times = re.compile(r"(?:mean|median|std|p99)_(ttft|tpot|itl|e2el)_ms")
    for key in data.keys() - {"abharness"}:
        times = of_times.fullmatch(key)
        assert f'process_one_metric("{times[1]}"' in source if times else f'"{key}"' in source, key


def test_benchfmt_by_the_rules_of_the_format(tmp_path: Path) -> None:
    out = exported(tmp_path)
    (baseline,) = out.glob("benchfmt/made/*/baseline.txt")
    files = [gobench.parse(path.read_text()) for path in (baseline, baseline.with_name("candidate.txt"))]
    for file in files:
        assert {unit for line in file.lines for unit in line.values} <= file.better.keys()
        assert (file.better["ttft-sec"], file.better["output_throughput-tok/s"]) == ("lower", "higher")
        # benchstat makes a table of each configuration: one that differs between the files would compare nothing.
        assert [line.config for line in file.lines] == [{"experiment": "made", "model": "m"}] * 4
    assert {line.name for line in files[0].lines} == {line.name for line in files[1].lines}
    speeds = [[line.values["output_throughput-tok/s"] for line in file.lines[::2]] for file in files]
    assert speeds == [pytest.approx([100, 110]), pytest.approx([120, 130])]
    assert [line.iterations for line in files[0].lines] == [4, 8, 4, 8]


@pytest.mark.skipif(
    shutil.which("benchstat") is None, reason="benchstat is not installed (golang.org/x/perf/cmd/benchstat)"
)
def test_benchstat_reads_it(tmp_path: Path) -> None:
    out = exported(tmp_path)
    files = sorted(map(str, out.glob("benchfmt/made/*/*.txt")))
    done = subprocess.run(["benchstat", *files], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "output_throughput-tok/s" in done.stdout
    assert "Decode/workload=decode" in done.stdout


def test_lm_eval_files_as_its_readers_find_them(tmp_path: Path) -> None:
    launches = {**LAUNCHES, "baseline": [Made(answers={2: "It is 2.", 5: "so it goes..."}), Made()]}
    out = exported(tmp_path, launches)
    (folder,) = (out / "lm-eval" / "made").glob("*/0-baseline")
    samples, results = next(folder.glob("samples_*")), next(folder.glob("results_*"))
    # lm_eval.utils: the task is between the first and the last underscore, the time after the last.
    name = samples.name
    assert name[name.find("_") + 1 : name.rfind("_")] == "gsm8k"
    assert name[name.rfind("_") + 1 :].removesuffix(".jsonl") == results.name.partition("_")[2].removesuffix(".json")
    # The reader under `datasets`, which lm-eval loads samples with, wants one type a key.
    table = pyarrow.json.read_json(samples).to_pylist()
    assert len(table) == 8 * 2
    by_filter = {(one["doc_id"], one["filter"]): one["exact_match"] for one in table}
    assert by_filter[2, "flexible-extract"] == 1.0
    assert by_filter[2, "strict-match"] == 0.0
    assert by_filter[5, "strict-match"] is None  # cut: neither right nor wrong
    assert {"doc", "target", "arguments", "resps", "filtered_resps", "doc_hash", "prompt_hash", "target_hash"} <= table[
        0
    ].keys()
    data = json.loads(results.read_text())
    assert data["results"]["gsm8k"]["exact_match,flexible-extract"] == pytest.approx(7 / 8)
    assert data["results"]["gsm8k"]["exact_match,strict-match"] == pytest.approx(6 / 8)
    assert data["configs"]["gsm8k"]["metric_list"][0]["metric"] == "exact_match"
    assert (data["results"]["gsm8k"]["sample_len"], data["n-samples"]["gsm8k"]["effective"]) == (8, 8)
    assert (data["config"]["model_args"], data["n-shot"]) == ("model=m", {"gsm8k": 0})


def texts(out: Path) -> dict[str, str]:
    return {
        name: "".join(path.read_text() for path in sorted((out / name).rglob("*")) if path.is_file())
        for name in export.FORMATS
    }


def test_a_cell_that_is_not_valid_says_so_in_every_format(tmp_path: Path) -> None:
    busy = {**LAUNCHES, "candidate": [Made(client={"cpu_share": 0.95}), Made()]}
    out = exported(tmp_path, busy)
    table = rows(out / "csv" / "metrics.csv")
    assert {(one["valid"], one["codes"]) for one in table} == {("false", "client_bound")}
    assert {one["valid"] for one in rows(out / "csv" / "answers.csv")} == {"true"}
    for path in out.glob("benchfmt/made/*/*.txt"):
        lines = gobench.parse(path.read_text()).lines
        assert [line.config.get("codes") for line in lines if line.name.startswith("BenchmarkDecode")] == [
            "client_bound"
        ] * 2
        assert [line.config.get("codes") for line in lines if line.name.startswith("BenchmarkGsm8k")] == [None] * 2
    for path in (out / "vllm-bench").rglob("*.json"):
        assert json.loads(path.read_text())["abharness"]["codes"] == ["client_bound"]
        assert json.loads(path.read_text())["abharness"]["valid"] is False


def test_what_makes_a_whole_comparison_invalid_is_everywhere(tmp_path: Path) -> None:
    stranger = Finding(code="foreign_gpu_process", message="pid 1 used the GPU")
    out = exported(tmp_path, {**LAUNCHES, "candidate": [Made(findings=[stranger]), Made()]})
    assert {name: "foreign_gpu_process" in text for name, text in texts(out).items()} == dict.fromkeys(
        export.FORMATS, True
    )
    assert {one["valid"] for one in rows(out / "csv" / "answers.csv")} == {"false"}


def test_a_failed_launch_is_left_out_and_named(tmp_path: Path, capsys: Any) -> None:
    died = Made(status="failed", failure=Failure(kind="ServerDied", message="it died", phase="decode"))
    out = exported(tmp_path, {**LAUNCHES, "candidate": [died, Made()]})
    assert "launch 1-candidate is left out: failed in phase decode: it died" in capsys.readouterr().err
    assert {one["launch"] for one in rows(out / "csv" / "metrics.csv")} == {"0", "2", "3"}
    assert sorted(path.name for path in (out / "vllm-bench" / "made").glob("*/*")) == [
        "0-baseline",
        "2-candidate",
        "3-baseline",
    ]


def test_nothing_to_export_is_an_error_and_makes_no_folder(tmp_path: Path, capsys: Any) -> None:
    died = Made(status="failed", failure=Failure(kind="ServerDied", message="it died", phase="start"))
    run = write_run(tmp_path / "r", {"baseline": [died], "candidate": []}, TWO)
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 2
    assert "no launch completed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", LAUNCHES, TWO)
    kept = tmp_path / "out" / "mine.txt"
    kept.parent.mkdir()
    kept.write_text("x")
    assert main(["export", str(run), "--to", str(kept.parent)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert main(["export", str(run), "--to", str(kept)]) == 2
    assert [path.name for path in kept.parent.iterdir()] == ["mine.txt"]
    kept.unlink()
    assert main(["export", str(run), "--to", str(kept.parent)]) == 0


def test_names_in_a_record_cannot_leave_the_folder(tmp_path: Path) -> None:
    run = write_run(tmp_path / "deep" / "er" / "r", LAUNCHES, TWO)
    for path, old, new in [
        (run / "experiment.json", '"experiment": "made",\n "question"', '"experiment": "../../../evil",\n "question"'),
        *((one, '"workload": "decode"', '"workload": "../../../evil/x"') for one in run.glob("launches/*/*.json*")),
        *((one, '"workload": "gsm8k"', '"workload": "/evil\\u0000"') for one in run.glob("launches/*/*.json*")),
        *((one, '"started_at": "2026', '"started_at": "../../evil/2026') for one in run.glob("launches/*/launch.json")),
    ]:
        path.write_text(path.read_text().replace(old, new))
    before = sorted(tmp_path.rglob("*"))
    assert main(["export", str(run), "--to", str(tmp_path / "deep" / "er" / "out")]) == 0
    new = [path for path in sorted(tmp_path.rglob("*")) if path not in before]
    assert new
    assert all(path.is_relative_to(tmp_path / "deep" / "er" / "out") for path in new)
    assert any("evil" in path.name for path in new)


def test_two_names_that_are_one_after_the_cleaning_are_two_files(tmp_path: Path) -> None:
    for part in ("a", "b"):
        write_run(tmp_path / part / "20260101T000000Z-0", LAUNCHES, TWO)
    assert main(["export", str(tmp_path / "a"), str(tmp_path / "b"), "--to", str(tmp_path / "out")]) == 0
    names = sorted(path.name for path in (tmp_path / "out" / "benchfmt").rglob("*.txt"))
    assert names == ["baseline.2.txt", "baseline.txt", "candidate.2.txt", "candidate.txt"]


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", LAUNCHES, TWO)
    command = f"ulimit -f 8; exec {sys.executable} -m abharness.cli export {run} --to {tmp_path / 'out'}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert "File too large" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r"]


def test_published_records_export_whole(tmp_path: Path) -> None:
    assert main(["export", str(ROOT / "results"), "--to", str(tmp_path / "out")]) == 0
    found = rows(tmp_path / "out" / "csv" / "metrics.csv")
    assert {"graphs", "attention", "quickstart"} <= {one["experiment"] for one in found}
    for path in (tmp_path / "out" / "benchfmt").rglob("*.txt"):
        assert gobench.parse(path.read_text()).lines
