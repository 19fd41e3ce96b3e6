"""A launch that fails: which, why, the server's last words, and a command that really starts the same server again."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from abharness.cli import main
from abharness.failures import command_lines
from abharness.record import LaunchRecord
from abharness.storage import read_model
from tests.test_run import CANDIDATE, QUICK, launches, run, run_dir, spec_file


def printed_command(out: str) -> str:
    """The command of the report, as somebody would copy it."""
    block = out[out.index("the command that starts its server by hand") :].split("\n", 1)[1]
    lines = []
    for line in block.splitlines():
        lines.append(line)
        if not line.endswith("\\"):
            break
    return "\n".join(lines)


def by_hand(command: str) -> subprocess.CompletedProcess[str]:
    """Run it in a shell that has what looks like a secret: a name that ends in TOKEN does."""
    base = {name: value for name, value in os.environ.items() if name not in ("FAKE_FAULTS", "FAKE_SWITCH")}
    base["FAKE_PREFILL_S_PER_TOKEN"] = "0.003"
    return subprocess.run(["bash", "-c", command], env=base, capture_output=True, text=True, timeout=30, check=False)


def test_the_printed_command_reproduces_the_failure(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, *QUICK, die={"when": CANDIDATE, "at": "before_listen", "code": 7}) == 4
    told = capsys.readouterr()
    assert "launch 2/2 candidate: failed: ServerDied in phase start: the server exited with status 7" in told.err
    assert "| (APIServer pid=" in told.err
    assert "dying before_listen, as asked" in told.err
    assert "launch 1-candidate, the server's last words" in told.out
    command = printed_command(told.out)
    assert command.startswith("mkdir -p ")
    again = by_hand(command)
    assert again.returncode == 7, again.stderr
    assert "dying before_listen, as asked" in again.stdout + again.stderr
    assert "fake kernels: FAKE_SWITCH=fast" in again.stdout + again.stderr, "with the switch of this launch"
    recorded = launches(tmp_path)[1].error
    assert recorded is not None
    assert by_hand(recorded.command or "").returncode == 7, "and so does the one line of the record"
    assert main(["compare", str(run_dir(tmp_path))]) == 4
    assert printed_command(capsys.readouterr().out) == command, "compare prints it again"


def test_odd_values_come_back_exactly_and_secrets_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hush-1")
    monkeypatch.setenv("HTTP_PROXY", "http://me:hush-2@127.0.0.1:9")
    path = spec_file(tmp_path, die={"at": "before_listen", "code": 7})
    odd = "a 'b' \"c\" $HOME `id` \\ \x1b[31m\nsecond --flag \u202e"
    path.write_text(
        path.read_text().replace("  ready_timeout_s", "    ODD: " + json.dumps(odd) + "\n  ready_timeout_s")
    )
    assert main(["run", str(path), "-o", str(tmp_path / "results"), *QUICK]) == 4
    told = capsys.readouterr()
    command = printed_command(told.out)
    assert 'HF_TOKEN="${HF_TOKEN:?}"' in command
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", told.out + told.err)
    written = b"".join(one.read_bytes() for one in (tmp_path / "results").rglob("*") if one.is_file())
    for text in (told.out, told.err, written.decode("utf-8", "replace")):
        assert "hush" not in text
    show = re.sub(
        r"  \S*python3? -m vllm.*", "  python3 -c 'import os; print(repr(os.environ))'", command, flags=re.DOTALL
    )
    again = by_hand(show)
    assert again.returncode == 0, again.stderr
    assert repr(odd) in again.stdout
    assert "hush-1" in again.stdout, "from the shell it is run in"
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN" in by_hand(show).stderr, "where it is not set the shell refuses"


def test_a_taken_port_says_who_has_it(tmp_path: Path, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        assert run(tmp_path, *QUICK, "--set", f"server.port={port}") == 4
    told = capsys.readouterr()
    assert f"port {port} on 127.0.0.1 is taken by pid {os.getpid()}" in told.err
    assert "next: stop it, or give the experiment another port" in told.err


def test_a_server_that_is_not_ready_in_time_says_so_with_its_last_words(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, *QUICK, "--set", "server.ready_timeout_s=2", slow_start_s=100) == 4
    told = capsys.readouterr()
    assert "ServerNotReady in phase start: no completion within 2 s: nothing listens on the port" in told.err
    assert "raise server.ready_timeout_s" in told.err
    assert "raise server.ready_timeout_s" in told.out, "the next step is that of the failure"


def test_what_a_launch_that_never_was_proves_is_nothing(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, *QUICK, child_env={"FAKE_SWITCH": "slow"}) == 4
    told = capsys.readouterr()
    assert "VerificationFailed (env_mismatch) in phase verify before_load" in told.err
    assert "env_mismatch: launch 0-baseline: FAKE_SWITCH: expected unset" in told.out
    assert "delivered" not in told.out


def test_launches_that_failed_in_one_way_are_told_once(tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, *QUICK, "--set", "design.launches_per_variant=2", die={"at": "before_listen"}) == 4
    out = capsys.readouterr().out
    failed = [read_model(path, LaunchRecord) for path in run_dir(tmp_path).glob("launches/*/launch.json")]
    assert len(failed) >= 3
    assert out.count("the server's last words") == 2, "once a variant"


def test_verify_env_tells_it_too_and_names_no_folder_that_is_gone(tmp_path: Path, capsys: Any) -> None:
    path = spec_file(tmp_path, die={"when": CANDIDATE, "at": "before_listen", "code": 7})
    assert main(["verify-env", str(path)]) == 4
    told = capsys.readouterr()
    assert "dying before_listen, as asked" in told.out
    assert by_hand(printed_command(told.out)).returncode == 7
    assert "record: " not in told.err
    assert "launch 1/1 candidate: failed" in told.err


def test_command_lines_of_an_old_or_odd_record_are_still_its_words() -> None:
    for command in ("true", "mkdir -p a b && cd a && env -i A=1 B='c  d' p --x 'y  z' --w", "unbalanced 'quote"):
        lines = command_lines(command)
        assert "\n".join(lines).replace("\\\n", "").split() == command.split()
