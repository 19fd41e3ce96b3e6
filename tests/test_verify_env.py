"""`abharness verify-env`: running servers listed and checked, and specs checked without load."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from abharness.cli import main
from tests.conftest import FAKE_SITE, free_port
from tests.test_run import leftovers, spec_file


@contextmanager
def server(**env: str) -> Iterator[int]:
    """A running fake server of somebody else; yields its pid."""
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        str(free_port()),
    ]
    base = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(FAKE_SITE), "SPT_NOENV": "1"}
    with subprocess.Popen(
        argv, env={**base, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        try:
            assert child.stdout is not None
            while "startup complete" not in child.stdout.readline():
                assert child.poll() is None
            yield child.pid
        finally:
            child.send_signal(signal.SIGINT)
            child.communicate(timeout=20)


def verify(capsys: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["verify-env", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_the_listing_shows_every_process_with_what_it_was_started_with(capsys: Any) -> None:
    with server(VLLM_SWITCH="1", OTHER="x") as pid:
        code, found = verify(capsys)
        mine = next(one for one in found["servers"] if one["root_pid"] == pid)
        assert code in (0, 3)  # 3: another server on this machine that cannot be read
        assert len(mine["processes"]) >= 2
        assert any(one["name"].startswith("VLLM::EngineCore") for one in mine["processes"])
        for one in mine["processes"]:
            assert one["started_with"]["VLLM_SWITCH"] == "1"
            assert "OTHER" not in one["started_with"]
        assert main(["verify-env"]) == code
        out = capsys.readouterr().out
        assert f"server {pid}:" in out
        assert "VLLM_SWITCH='1'" in out
        assert "VLLM::EngineCore (renamed, environment whole)" in out


def test_the_listing_says_what_cannot_be_read_and_why(capsys: Any) -> None:
    with server(VLLM_SWITCH="1", FAKE_FAULTS='{"wipe_environ": "all"}') as pid:
        code, found = verify(capsys)
        assert code == 3
        mine = next(one for one in found["servers"] if one["root_pid"] == pid)
        engine = next(one for one in mine["processes"] if one["name"].startswith("VLLM::EngineCore"))
        assert engine["state"] == "unreadable"
        assert engine["reason"]
        assert engine["started_with"] == {}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--expect", "VLLM_SWITCH=1"], 0),
        (["--expect", "VLLM_SWITCH=1", "--expect-unset", "VLLM_GONE"], 0),
        (["--expect", "VLLM_EMPTY="], 0),
        (["--expect", "VLLM_SWITCH=0"], 4),
        (["--expect", "VLLM_SWITCH=1 "], 4),
        (["--expect-unset", "VLLM_SWITCH"], 4),
        (["--expect-unset", "VLLM_EMPTY"], 4),
        (["--expect", "VLLM_GONE="], 4),
    ],
)
def test_a_running_server_is_checked_exactly(arguments: list[str], expected: int, capsys: Any, running: int) -> None:
    code, found = verify(capsys, "--pid", str(running), *arguments)
    assert code == expected
    assert bool(found["findings"]) == bool(expected)


@pytest.fixture(scope="module")
def running() -> Iterator[int]:
    with server(VLLM_SWITCH="1", VLLM_EMPTY="") as pid:
        yield pid


def test_a_process_that_cannot_be_read_is_no_verdict(capsys: Any) -> None:
    with server(FAKE_FAULTS='{"wipe_environ": "prefix"}') as pid:
        code, found = verify(capsys, "--pid", str(pid), "--expect-unset", "VLLM_SWITCH")
    assert code == 3
    assert found["findings"][0]["code"] == "env_unverifiable"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--pid", "1"],
        ["--expect", "A=1"],
        ["--pid", "999999999", "--expect", "A=1"],
        ["--pid", "1", "--expect", "A"],
        ["--pid", "1", "--expect", "A=1", "--expect-unset", "A"],
        ["x.yaml", "--pid", "1", "--expect", "A=1"],
        ["nosuch.yaml"],
    ],
)
def test_usage_errors(arguments: list[str], capsys: Any) -> None:
    assert main(["verify-env", *arguments]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_spec_is_checked_without_load(tmp_path: Path, capsys: Any) -> None:
    code, found = verify(capsys, str(spec_file(tmp_path)))
    assert code == 0
    assert [one["variant"] for one in found["variants"]] == ["baseline", "candidate"]
    for one in found["variants"]:
        assert one["error"] is None
        assert [check["findings"] for check in one["checks"]] == [[], []]
    assert leftovers() == []


def test_a_spec_whose_switch_is_lost_on_the_way_is_told(tmp_path: Path, capsys: Any) -> None:
    lie = {"child_env": {"when": {"FAKE_SWITCH": "fast"}, "FAKE_SWITCH": "slow"}}
    assert main(["verify-env", str(spec_file(tmp_path, **lie))]) == 4
    out = capsys.readouterr().out
    assert "FAKE_SWITCH: expected 'fast'" in out
    assert "started with 'slow'" in out
    assert "NOT verified" in out


def test_a_failing_baseline_does_not_keep_the_candidate_from_being_checked(tmp_path: Path, capsys: Any) -> None:
    lie = {"child_env": {"when": {"FAKE_SWITCH": None}, "FAKE_SWITCH": "slow"}}
    code, found = verify(capsys, str(spec_file(tmp_path, **lie)))
    assert code == 4
    assert [bool(one["error"]) for one in found["variants"]] == [True, False]
