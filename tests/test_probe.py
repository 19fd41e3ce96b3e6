"""The second witness, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from abharness.hearing import hear
from abharness.probe import install
from abharness.witnesses import ProbeReport

SERVER = """
import os, sys, threading
from importlib.metadata import entry_points

# Not what else is installed here: other plugins want vLLM.
entries = entry_points(group="vllm.general_plugins", name="abharness_probe")
plugins = {entry.name: entry.load() for entry in entries}
for function in plugins.values():
    function()
for function in plugins.values():
    function()
%s
print("up", threading.active_count(), flush=True)
sys.stdin.read()
"""


def start(folder: Path, more: str = "", **env: str) -> subprocess.Popen[str]:
    """A process that loads general plugins as vLLM does (twice), does some more, and waits for the end of its input."""
    install(folder / "site")
    (folder / "probe").mkdir(exist_ok=True)
    child = subprocess.Popen(
        [sys.executable, "-c", SERVER % more],
        env={"PYTHONPATH": str(folder / "site"), "ABHARNESS_PROBE_DIR": str(folder / "probe"), **env},
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline().startswith("up")
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.communicate("", timeout=20)
    assert child.returncode == 0


def only(reports: list[ProbeReport]) -> ProbeReport:
    (report,) = reports
    return report


def test_it_answers_with_what_its_process_has_now(tmp_path: Path) -> None:
    change = "threading.Timer(0.3, os.environ.update, [{'SWITCH': 'later'}]).start()"
    child = start(tmp_path, change, SWITCH="first", MY_TOKEN="s3cr3t", EMPTY="")
    first = ProbeReport.model_validate_json((tmp_path / f"probe/{child.pid}.json").read_text())
    assert (first.reason, first.environ["SWITCH"], first.environ["EMPTY"]) == ("start", "first", "")
    while (report := only(hear(tmp_path / "probe"))).environ["SWITCH"] == "first":
        pass
    assert (report.reason, report.environ["SWITCH"], report.pid, report.ppid) == (
        "asked", "later", child.pid, os.getpid())  # fmt: skip
    assert report.environ["MY_TOKEN"].startswith("<redacted ")
    assert not any(b"s3cr3t" in path.read_bytes() for path in (tmp_path / "probe").glob("*.json"))
    assert "abharness_probe" in report.plugins
    assert (report.gpu_uuids, report.gpu_absent) == (None, "torch is not loaded in this process")
    end(child)
    assert hear(tmp_path / "probe") == [], "what has ended is no witness"


def test_a_forked_child_is_a_witness_of_its_own(tmp_path: Path) -> None:
    fork = """
if os.fork() == 0:
    os.environ["SWITCH"] = "child"
    sys.stdin.read()
    os._exit(0)
"""
    child = start(tmp_path, fork, SWITCH="parent")
    reports: list[ProbeReport] = []
    while {report.ppid == child.pid: report.environ["SWITCH"] for report in reports} != {
        False: "parent",
        True: "child",
    }:
        reports = hear(tmp_path / "probe")
    assert {report.reason for report in reports} == {"asked"}
    end(child)


@pytest.mark.parametrize("folder", ["", "missing"])
def test_unasked_or_with_nowhere_to_write_it_leaves_the_server_alone(tmp_path: Path, folder: str) -> None:
    where = str(tmp_path / folder) if folder else ""
    child = start(tmp_path, "assert threading.active_count() == 1", ABHARNESS_PROBE_DIR=where)
    end(child)
    assert list((tmp_path / "probe").iterdir()) == []


def test_a_folder_with_a_name_longer_than_a_socket_address_answers_too(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    child = start(tmp_path, "os.waitpid(os.fork() or os._exit(0), 0)", ABHARNESS_PROBE_DIR=str(deep))
    assert only(hear(deep)).reason == "asked"
    end(child)


def test_a_process_that_cannot_be_asked_says_why(tmp_path: Path) -> None:
    fork = """
import socket
def bind(self, address): raise OSError("no sockets in this folder")
socket.socket.bind = bind
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
"""
    child = start(tmp_path, fork)
    found: dict[bool, ProbeReport] = {}
    while len(found) < 2 or not all(report.deaf for report in found.values()):
        found = {report.pid == child.pid: report for report in hear(tmp_path / "probe", answer_s=0.1)}
    assert {parent: report.reason for parent, report in found.items()} == {True: "start", False: "fork"}
    assert all("no sockets in this folder" in str(report.deaf) for report in found.values())
    end(child)


def test_what_is_written_by_somebody_else_is_no_report(tmp_path: Path) -> None:
    child = start(tmp_path)
    good = json.loads((tmp_path / f"probe/{child.pid}.json").read_text())
    (tmp_path / "probe/1.json").write_text("{")
    (tmp_path / "probe/2.json").write_text(json.dumps({**good, "pid": os.getpid()}))  # of another start time
    assert only(hear(tmp_path / "probe")).pid == child.pid
    end(child)


def test_the_injected_folder_shadows_nothing(tmp_path: Path) -> None:
    install(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"abharness_probe", "abharness_probe-1.dist-info"}
