"""Secrets in many forms through a whole run: no byte of any of them on disk, on the screen or in the scratch folder."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from abharness import redaction
from abharness.cli import main
from tests.conftest import free_port
from tests.kills import Point, Scene
from tests.test_run import SPEC

MARK = "s3cr3t"
"""Part of every secret below."""

SHELL = {
    "HF_TOKEN": f"hf_{MARK}AbCdEfGhIjKlMn",
    "OPENAI_API_KEY": f"sk-{MARK}-0123456789",
    "AWS_SECRET_ACCESS_KEY": f"wJalr{MARK}/K7MDENG+bPx",
    "DBPASSWORD": f'qu"ote\\{MARK} with space',
    "MY_CREDENTIALS": f"ünï{MARK}",
    "HTTPS_PROXY": f"http://user:{MARK}pw@127.0.0.1:9",
    "GITHUB_PAT": f"{MARK}x",
}
INHERITED = [*SHELL]
DECLARED = {
    "CLIENT_SECRET": f"{MARK}-declared",
    "INDEX_URL": f"https://{MARK}tok@example.org/simple",
    "EXTRA_HEADER": f"Authorization: Bearer {MARK}.abc.def",
}
ARGUMENTS = ["--api-key", f"{MARK}-argument", f"--hf-token={MARK}-equals", "--extra",
             json.dumps({"nested": {"api_key": f"{MARK}-json"}})]  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_known", {})


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """The fake experiment with secrets everywhere; the server echoes them in its log."""
    echoed = [*SHELL.values(), *DECLARED.values(), f"args: {ARGUMENTS}", f"argument {MARK}-argument",
              urllib.parse.quote(SHELL["DBPASSWORD"], safe=""), f"{MARK}-set", "an ordinary line"]  # fmt: skip
    faults = json.dumps({"log_lines": echoed}).replace("'", "''")
    text = SPEC.replace("FAKE_FAULTS: '{}'", f"FAKE_FAULTS: '{faults}'")
    declared = "".join(f"    {name}: {json.dumps(value)}\n" for name, value in DECLARED.items())
    text = text.replace("    FAKE_TPOT_S", f"{declared}    FAKE_TPOT_S")
    text = text.replace("  ready_timeout_s", f"  inherit: {json.dumps(INHERITED)}\n"
                        f"  serve_args: {json.dumps(ARGUMENTS)}\n  ready_timeout_s")  # fmt: skip
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def scene(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for name, value in SHELL.items():
        monkeypatch.setenv(name, value)
    arguments = [str(spec), "--only", "decode", "--only", "gsm8k", "--set", f"server.env.SET_PASSWORD={MARK}-set"]
    made = Scene(tmp_path / "scene", arguments, free_port())
    yield made
    for process in made.processes():
        process.kill()


def holders(*folders: Path) -> list[str]:
    """Files with a secret in their bytes, and the line it is in."""
    found = []
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        try:
            raw = path.read_bytes()
        except OSError:
            continue
        if MARK.encode() in raw or MARK.encode() in str(path).encode():
            line = next((line for line in raw.split(b"\n") if MARK.encode() in line), b"")
            found.append(f"{path}: {line[:20000].decode(errors='replace')}")
    return found


def test_no_byte_of_a_secret_is_left_anywhere(scene: Scene) -> None:
    harness = scene.start()
    assert scene.wait_for(Point(line=r"decode .* x1$"), harness)
    # What the fake server is told to echo is no secret by itself: it stands in the probe's reports as it was given.
    scratch = [line for line in holders(scene.tmp) if MARK in re.sub(r'"FAKE_FAULTS": "([^"\\]|\\.)*"', "", line)]
    # The log is the server's own until it ends: nobody else can look into the folder.
    (private,) = scene.tmp.glob("ab-*")
    assert private.stat().st_mode & 0o777 == 0o700
    assert harness.wait(120) in (0, 1, 3), scene.said()
    assert [line for line in scratch if "/server.log: " not in line] == []
    assert holders(scene.folder) == []
    log = next(scene.folder.rglob("0-baseline/server.log")).read_text()
    assert "an ordinary line" in log
    assert "<redacted " in log
    record = json.loads(next(scene.folder.rglob("0-baseline/launch.json")).read_text())
    assert record["env"]["HF_TOKEN"].startswith("<redacted ")
    assert record["env"]["INDEX_URL"] == "https://<redacted>@example.org/simple"
    assert record["argv"][record["argv"].index("--api-key") + 1].startswith("<redacted ")


def test_a_failed_and_a_killed_launch_tell_none_either(scene: Scene, spec: Path) -> None:
    faults = json.loads(spec.read_text().split("FAKE_FAULTS: '")[1].split("'\n")[0].replace("''", "'"))
    dying = json.dumps({**faults, "die": {"at": "after_requests", "n": 3}}).replace("'", "''")
    spec.write_text(spec.read_text().replace(json.dumps(faults).replace("'", "''"), dying))
    assert scene.start().wait(120) == 4
    assert holders(scene.folder) == []
    assert "dying after_requests" in (scene.folder / "stdout.txt").read_text()
    harness = scene.start()
    assert scene.wait_for(Point(line=r"decode .* x1$"), harness)
    scene.kill(harness, guard=False)
    assert scene.wait_until_clear(60) == []
    assert scene.start("--resume").wait(120) == 4
    assert holders(scene.folder) == []


def test_what_is_printed_of_a_plan_and_of_running_servers_has_none(scene: Scene) -> None:
    scene.events = False
    plan = scene.start("--dry-run")
    assert plan.wait(60) == 0
    scene.events = True
    assert "--api-key '<redacted " in (scene.folder / "stdout.txt").read_text()
    assert holders(scene.folder) == []
    harness = scene.start("--set", "workloads.decode.num_prompts=400")
    assert scene.wait_for(Point(line=r"decode .* x1$"), harness)
    # Without the shell's variables: what is hidden is known from the processes themselves.
    env = {name: value for name, value in os.environ.items() if name not in SHELL}
    listed = subprocess.run(
        [sys.executable, "-m", "abharness.cli", "verify-env"], env=env, capture_output=True, check=False
    )
    assert b"--api-key <redacted" in listed.stdout
    assert MARK.encode() not in listed.stdout + listed.stderr
    harness.send_signal(signal.SIGINT)
    assert harness.wait(60) == 130


@pytest.mark.parametrize("assignment", [
    f"server.env.MY_TOKEN=[{MARK}-in-a-list]", f"server.env.MY_TOKEN={{a: {MARK}-in-a-map}}",
    f"server.serve_args=[--api-key {MARK}-one-text]", f"server.serve_args={{api_key: {MARK}-map}}",
    f"server.api_key={MARK}-unknown-key", f"variants.baseline.env.A_SECRET=!!int {MARK}-tagged",
    f"nowhere.password={MARK}-nowhere", f"server.env.MY_TOKEN {MARK}-no-equals",
])  # fmt: skip
def test_a_spec_that_is_refused_is_told_without_its_secrets(
    assignment: str, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(spec), "--dry-run", "--set", assignment]) == 2
    told = capsys.readouterr()
    assert "error:" in told.err
    assert MARK not in told.out + told.err


@pytest.mark.parametrize("name", [
    "HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "PGPASSWORD", "MYSQL_PWD", "GITHUB_PAT", "client-secret",
    "apiKey",    "GOOGLE_APPLICATION_CREDENTIALS_JSON", "SSH_KEY_PASSPHRASE", "NPM_AUTH", "TOKENS",
])  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert redaction.hidden(name, "x").startswith("<redacted ")


@pytest.mark.parametrize("name", ["PATH", "PWD", "TOKENIZERS_PARALLELISM", "MONKEY", "COMPASS", "AUTHOR", "KEYBOARD"])
def test_names_of_none(name: str) -> None:
    assert redaction.hidden(name, "x") == "x"


@pytest.mark.parametrize("value", ["1", "true", "EMPTY", "12345678", "baseline", "deadbeef", "/"])
def test_what_stands_everywhere_is_not_hidden_in_other_places(value: str) -> None:
    redaction.remember([value])
    assert redaction.scrub(f"a {value} b") == f"a {value} b"


def test_a_short_secret_is_not_cut_out_of_a_digest() -> None:
    redaction.remember(["hunter2"])
    assert redaction.scrub("0hunter2a hunter2.") == f"0hunter2a {redaction.hidden('PASS', 'hunter2')}."


def test_equal_secrets_are_still_seen_as_equal() -> None:
    assert redaction.redact_argv(["--api-key", "a-key"]) == redaction.redact_argv(["--api-key", "a-key"])
    assert redaction.redact_argv(["--api-key", "a-key"]) != redaction.redact_argv(["--api-key", "b-key"])
