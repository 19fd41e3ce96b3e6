"""`abharness compare` over several runs: the index that comes first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from abharness.cli import main
from abharness.compare import compare_folders
from abharness.index import chief_difference, index
from abharness.record import Failure
from tests.synthetic import Made, write_run

SLOW, FAST = (100.0, 100.4, 99.8, 100.1), (108.2, 108.9, 108.4, 108.0)


def launches(base: tuple[float, ...], other: tuple[float, ...], **fields: Any) -> dict[Any, list[Made]]:
    return {"baseline": [Made(speed=s) for s in base], "candidate": [Made(speed=s, **fields) for s in other]}


def rename(run: Path, experiment: str, created_at: str) -> None:
    path = run / "experiment.json"
    data = json.loads(path.read_text())
    data |= {"experiment": experiment, "created_at": created_at, "spec_sha256": None}
    data["spec"]["experiment"] = experiment
    path.write_text(json.dumps(data))


def results(folder: Path) -> Path:
    """Five runs of three experiments, whose folders' names say nothing of their order."""
    failed = launches(SLOW, FAST)
    failed["candidate"][3] = Made(
        status="failed", failure=Failure(kind="ServerDied", message="gone", phase="start", command="env -i A=1 x")
    )
    for name, made, experiment, day in (
        ("e", launches(SLOW, FAST), "alpha", 2),
        ("d", launches(FAST, SLOW), "alpha", 1),
        ("c", launches(SLOW, SLOW), "beta", 1),
        ("b", failed, "gamma", 1),
        ("a", launches(SLOW, FAST, prompts="other"), "gamma", 2),
    ):
        rename(write_run(folder / name, made), experiment, f"2026-01-0{day}T10:30:00+00:00")
    return folder


def test_the_index_is_sorted_by_experiment_and_time_and_names_verdict_and_chief_difference(tmp_path: Path) -> None:
    entries = index(compare_folders([results(tmp_path)]))
    assert [(entry.experiment, entry.created_at, entry.verdict) for entry in entries] == [
        ("alpha", "2026-01-01 10:30", "regression"),
        ("alpha", "2026-01-02 10:30", "faster"),
        ("beta", "2026-01-01 10:30", "no difference"),
        ("gamma", "2026-01-01 10:30", "launch failed"),
        ("gamma", "2026-01-02 10:30", "no verdict"),
    ]
    worst = entries[0].chief
    assert worst is not None
    assert (worst.where, worst.what, worst.call) == (
        "decode input_len=16 output_len=11 max_concurrency=1",
        "output_throughput",
        "worse",
    )
    assert worst.said.startswith("-7.")
    assert [entry.chief is None for entry in entries] == [False, False, True, True, True]
    assert entries[3].launches == {"baseline": (4, 4), "candidate": (3, 4)}
    assert [entry.exit_code for entry in entries] == [1, 0, 0, 4, 3]


def test_text_and_markdown_begin_with_it_and_the_reports_follow_in_its_order(tmp_path: Path, capsys: Any) -> None:
    folder = str(results(tmp_path))
    assert main(["compare", folder]) == 4, "the gravest of all"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "5 runs: 1 launch failed, 1 regression, 1 no verdict, 1 faster, 1 no difference."
    end = next(number for number, line in enumerate(lines) if line.startswith("-----"))
    shown = "\n".join(lines[:end])
    assert "4+3 of 4+4" in shown
    assert "output_throughput -7." in shown
    assert "launch_failed" in shown
    assert max(map(len, lines[:end])) <= 80
    titles = [line.split()[0] for line in lines if "baseline 4 of 4 launches" in line]
    assert titles == ["alpha", "alpha", "beta", "gamma", "gamma"]
    assert main(["compare", folder, "--format", "markdown"]) == 4
    markdown = capsys.readouterr().out.splitlines()
    assert markdown[0].startswith("**5 runs: 1 launch failed")
    assert sum(line.startswith("| regression | alpha | 2026-01-01 10:30 ") for line in markdown) == 1


def test_one_run_has_no_index(tmp_path: Path, capsys: Any) -> None:
    main(["compare", str(write_run(tmp_path / "r", launches(SLOW, FAST)))])
    assert " runs: " not in capsys.readouterr().out


def test_the_chief_difference_is_what_got_worse_answers_first(tmp_path: Path) -> None:
    wrong = {doc: f"It is {doc + 100}.\n#### {doc + 100}" for doc in range(8)}
    (comparison,) = compare_folders([write_run(tmp_path / "r", launches(SLOW, FAST, answers=wrong))])
    chief = chief_difference(comparison)
    assert chief is not None
    assert (chief.where, chief.what, chief.said, chief.call) == ("gsm8k", "exact_match", "8 -> 0 of 8", "worse")


def test_what_was_let_pass_stands_in_the_index(tmp_path: Path, capsys: Any) -> None:
    for name in ("1", "2"):
        write_run(tmp_path / name, launches(SLOW, FAST, versions={"torch": "2"}))
    assert main(["compare", str(tmp_path), "--allow", "undeclared_difference:version.torch"]) in (0, 3)
    out = capsys.readouterr().out
    assert out.split("-----")[0].count("let pass: undeclared_difference") == 2


def test_a_long_experiment_name_does_not_break_the_columns(tmp_path: Path, capsys: Any) -> None:
    for number, name in enumerate(("x" * 30, "y" * 60)):
        rename(write_run(tmp_path / str(number), launches(SLOW, FAST)), name, "2026-01-01T00:00:00+00:00")
    assert main(["compare", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.split("-----")[0]
    assert shown.count("…") == 2
    assert all(len(line) <= 80 for line in shown.splitlines())
