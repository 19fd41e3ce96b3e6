"""`abharness run --json`: every line is an event of the published schema, in order, and the last says how it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from abharness.events import (
    ADAPTER,
    Event,
    Finished,
    LaunchFinished,
    LaunchStarted,
    Phase,
    Progress,
    RunStarted,
    json_schema,
)
from tests.test_run import CANDIDATE, QUICK, leftovers, spec_file

ROOT = Path(__file__).parent.parent


def command(path: Path, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-m", "abharness.cli", "run", str(path), "-o", str(path.parent / "results")),
        *("--json", *arguments),
    ]


def events(text: str) -> list[Event]:
    assert text.isascii()
    return [ADAPTER.validate_json(line) for line in text.splitlines()]


def run_json(path: Path, *arguments: str) -> tuple[int, list[Event], str]:
    done = subprocess.run(command(path, *arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, events(done.stdout), done.stderr


def names(found: Sequence[Event]) -> list[str]:
    return [one.event for one in found if one.event not in ("progress", "warning", "note")]


def test_every_line_is_an_event_in_order_and_the_last_is_finished(tmp_path: Path) -> None:
    code, found, errors = run_json(spec_file(tmp_path), *QUICK)
    assert errors == ""
    told = names(found)
    assert told[0] == "run_started"
    assert told[-1] == "finished"
    assert [one for one in told if one != "phase"] == [
        *("run_started", "launch_started", "launch_finished", "launch_started", "launch_finished", "finished")
    ]
    assert [one.time for one in found] == sorted(one.time for one in found)
    start, last = found[0], found[-1]
    assert isinstance(start, RunStarted)
    assert start.plan == ["baseline", "candidate"]
    assert start.versions["candidate"]["vllm"] == "0.32.0+fake"
    assert isinstance(last, Finished)
    # A busy machine takes the verdict away; that is told in the same words everywhere.
    assert (last.exit_code, last.error) == (code, None)
    assert {"no regression": 0, "no verdict": 3}[last.outcome] == code
    assert last.run_dir == start.run_dir
    assert last.summary is not None
    assert last.summary.startswith(("Candidate: ", "No verdict: "))
    assert [Path(path).name for path in last.files][:2] == ["comparison.json", "report.md"]
    assert all((ROOT / path).exists() for path in last.files)
    phases = [one.name for one in found if isinstance(one, Phase) and one.index == 0]
    assert phases[0] == "start"
    assert "decode input_len=16 output_len=16 x1" in phases
    assert phases[-1] == "stop"
    done = [one for one in found if isinstance(one, Progress) and one.index == 1]
    assert (done[-1].done, done[-1].total) == (4, 4)
    started = [one.left_s for one in found if isinstance(one, LaunchStarted)]
    assert started[0] is None
    assert started[1] is not None
    assert started[1] > 0


def test_resumed_what_is_on_record_is_named_and_counts_for_the_time_left(tmp_path: Path) -> None:
    path = spec_file(tmp_path)
    _, first, _ = run_json(path, *QUICK)
    start = first[0]
    assert isinstance(start, RunStarted)
    (ROOT / start.run_dir / "launches" / "1-candidate" / "launch.json").unlink()
    _, found, _ = run_json(path, *QUICK, "--resume")
    again, launch = found[0], next(one for one in found if isinstance(one, LaunchStarted))
    assert isinstance(again, RunStarted)
    assert (again.run_dir, again.on_record) == (start.run_dir, [0])
    assert (launch.index, launch.total) == (1, 2)
    assert launch.left_s is not None, "the launch on record says how long one takes"


def test_a_full_disk_under_the_events_is_told_after_the_run(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(spec_file(tmp_path), *QUICK), cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 5
    assert done.stderr.startswith("error: [Errno 28]")
    assert len(list((tmp_path / "results").rglob("comparison.json"))) == 1, "what was measured is kept"


def test_a_failed_launch_is_told_with_the_last_words_and_the_command(tmp_path: Path) -> None:
    code, found, _ = run_json(spec_file(tmp_path, die={"when": CANDIDATE, "at": "before_listen"}), *QUICK)
    failed = [one for one in found if isinstance(one, LaunchFinished)][-1]
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.kind == "ServerDied"
    assert "dying before_listen" in failed.error.log_tail[-1]
    assert "env -i " in (failed.error.command or "")
    last = found[-1]
    assert isinstance(last, Finished)
    assert (code, last.exit_code, last.outcome, last.codes[0]) == (4, 4, "launch failed", "launch_failed")


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["--set", "server.nosuch=1"], "SpecError"),
        (["--only", "nosuch"], "UsageError"),
        (["--resume"], "UsageError"),
        (["--dry-run"], "UsageError"),
        (["--set", "server.model=./nosuch"], "UsageError"),
    ],
)
def test_what_ends_a_run_before_it_starts_is_one_finished_event(
    arguments: list[str], kind: str, tmp_path: Path
) -> None:
    code, found, errors = run_json(spec_file(tmp_path), *arguments)
    last = found[-1]
    assert isinstance(last, Finished)
    assert (code, last.exit_code, last.outcome, last.run_dir) == (2, 2, "error", None)
    assert last.error is not None
    assert last.error.kind == kind
    assert last.error.message in errors, "people are told the same on stderr"
    assert "run_started" not in names(found)


@pytest.mark.parametrize("wait_for", ["launch_started", "progress"])
def test_interrupted_the_last_event_is_still_finished(wait_for: str, tmp_path: Path) -> None:
    child = subprocess.Popen(
        command(spec_file(tmp_path), "--set", "workloads.decode.num_prompts=400"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    head = []
    for line in child.stdout:
        head.append(line)
        if json.loads(line)["event"] == wait_for:
            break
    child.send_signal(signal.SIGINT)
    rest, errors = child.communicate(timeout=60)
    found = events("".join(head) + rest)
    last = found[-1]
    assert isinstance(last, Finished)
    assert (child.returncode, last.exit_code, last.outcome) == (130, 130, "interrupted"), errors
    assert names(found).count("finished") == 1
    assert leftovers() == []


def test_a_reader_that_goes_away_or_does_not_read_ends_no_run(tmp_path: Path) -> None:
    read, write = os.pipe()
    child = subprocess.Popen(
        command(spec_file(tmp_path), *QUICK), cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert b"run_started" in os.read(read, 65536)
    time.sleep(0.5)
    os.close(read)
    _, errors = child.communicate(timeout=60)
    assert errors == ""
    (comparison,) = (tmp_path / "results" / "fake").glob("*/comparison.json")
    found = json.loads(comparison.read_text())["comparisons"][0]
    assert found["launches"] == {"baseline": [1, 1], "candidate": [1, 1]}
    assert child.returncode == found["exit_code"]


def test_a_fault_of_the_harness_is_told_with_exit_code_5(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from abharness import commands
    from abharness.cli import main

    def broken(*_arguments: object, **_more: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(commands, "run", broken)
    assert main(["run", str(spec_file(tmp_path)), "--json"]) == 5
    (last,) = events(capsys.readouterr().out)
    assert isinstance(last, Finished)
    assert (last.exit_code, last.outcome) == (5, "error")
    assert last.error is not None
    assert last.error.kind == "KeyError"


def test_the_schema_describes_every_event_and_every_field() -> None:
    schema = json_schema()
    assert schema["discriminator"]["propertyName"] == "event"
    assert set(schema["discriminator"]["mapping"]) == {
        *("run_started", "launch_started", "phase", "progress", "note", "warning", "launch_finished", "finished")
    }
    for name, model in schema["$defs"].items():
        if name == "Failure":
            continue
        assert model["description"], name
        for field, described in model["properties"].items():
            assert field == "event" or "description" in described, f"{name}.{field}"
