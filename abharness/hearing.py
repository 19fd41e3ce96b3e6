"""Asking the second witness: a launch's probe folder in, one fresh `ProbeReport` a process out.

The processes answer on their own sockets (see `probe`). A report that is not an answer to this question is handed over
as what it is: written at the start of its process.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from pathlib import Path

from pydantic import ValidationError

from abharness.probe import short_path
from abharness.procfs import process
from abharness.witnesses import ProbeReport

ANSWER_S = 10.0
"""Longest wait for an answer: a process that runs the model may hold the interpreter for seconds."""
POLL_S = 0.02


def hear(folder: Path, answer_s: float = ANSWER_S) -> list[ProbeReport]:
    """Ask every process that has reported into a folder, and read what they write.

    Args:
        folder: `ABHARNESS_PROBE_DIR` of the launch.
        answer_s: How long to wait for the slowest, seconds.

    Returns:
        The reports of the processes that are still there, by pid; those that did not answer have another `reason`
        than `asked`.
    """
    nonce = secrets.token_hex(8)
    waiting = {path for path in folder.glob("*.sock") if _ask(path, nonce)} if folder.is_dir() else set()
    deadline = time.monotonic() + answer_s
    while True:
        reports = _read(folder)
        answered = {report.pid for report in reports if report.nonce == nonce}
        waiting = {path for path in waiting if int(path.stem) not in answered and process(int(path.stem)) is not None}
        if not waiting or time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return [
        report if report.nonce == nonce else report.model_copy(update={"reason": _unasked(report)})
        for report in reports
        if (seen := process(report.pid)) is not None and seen.start_ticks == report.start_ticks
    ]


def _unasked(report: ProbeReport) -> str:
    # An answer to an earlier question is as old as a report from the start, for this one.
    return "start" if report.reason == "asked" else report.reason


def _ask(path: Path, nonce: str) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, short_path(path) as address:
            sender.settimeout(1.0)
            sender.sendto(nonce.encode("ascii"), address)
    except OSError:
        return False  # its process has ended
    return True


def _read(folder: Path) -> list[ProbeReport]:
    reports = []
    for path in sorted(folder.glob("*.json")):
        try:
            reports.append(ProbeReport.model_validate(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, ValidationError):
            continue  # a damaged report is none: its process then counts as silent
    return sorted(reports, key=lambda report: report.pid)
