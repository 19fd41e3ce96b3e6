"""Running servers -> what each of their processes was started with, as text or JSON, for `abharness verify-env`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from abharness import judge, procfs, verify
from abharness.errors import UsageError
from abharness.plan import SWITCH_PREFIXES
from abharness.record import EnvironmentCheck
from abharness.redaction import printable, redact
from abharness.reported import lines as report_lines
from abharness.witnesses import ProcessWitness


@dataclass(frozen=True, slots=True)
class ServerView:
    """One running server: its command line and its processes with their switch variables."""

    root_pid: int
    command: str
    processes: list[ProcessWitness]


def running_servers() -> list[ServerView]:
    """Every vLLM server that this user runs on this machine."""
    views: list[ServerView] = []
    for tree in procfs.find_vllm_servers(os.getuid()):
        command = " ".join(procfs.command_line(tree.root.pid)) or procfs.title(tree.root.pid)
        views.append(ServerView(tree.root.pid, printable(command), [_witness(one) for one in tree.processes]))
    return views


def _witness(one: procfs.Process) -> ProcessWitness:
    read = procfs.read_environ(one.pid)
    switches = {name: value for name, value in read.variables.items() if name.startswith(SWITCH_PREFIXES)}
    return ProcessWitness(
        pid=one.pid,
        ppid=one.ppid,
        start_ticks=one.start_ticks,
        name=printable(procfs.title(one.pid))[:80],
        state=read.state,
        reason=read.reason,
        started_with=dict(sorted(redact(switches).items())),
        renamed=procfs.renamed(one),
        layout_checked=read.layout_checked if read.state == "ok" else None,
    )


def parse_expectations(expect: Sequence[str], expect_unset: Sequence[str]) -> dict[str, str | None]:
    """`NAME=VALUE` and `NAME` arguments -> expected values; None must be unset.

    Raises:
        UsageError: No `=`, an empty name, or a name given twice.
    """
    expected: dict[str, str | None] = {}
    for text in expect:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--expect {text}: expected NAME=VALUE", hint="NAME= means set and empty")
        _once(expected, name)
        expected[name] = value
    for name in expect_unset:
        if not name or "=" in name:
            raise UsageError(f"--expect-unset {name}: expected a variable's name")
        _once(expected, name)
        expected[name] = None
    return expected


def _once(expected: Mapping[str, str | None], name: str) -> None:
    if name in expected:
        raise UsageError(f"{name} is expected twice; give it once")


def check_running(pid: int, expected: Mapping[str, str | None]) -> EnvironmentCheck:
    """Check the process tree of a running server.

    Raises:
        UsageError: There is no such process.
    """
    if procfs.process(pid) is None:
        raise UsageError(f"there is no process {pid}", hint="abharness verify-env without arguments lists servers")
    values = {name: value for name, value in expected.items() if value is not None}
    return verify.attached_check(pid, values, [name for name in expected if name not in values])


def servers_text(views: Sequence[ServerView]) -> str:
    """The listing of `abharness verify-env`."""
    if not views:
        return "no vLLM server of this user is running here\n"
    lines: list[str] = []
    for view in views:
        lines += [f"server {view.root_pid}: {view.command}"]
        for one in view.processes:
            lines.append(f"  {one.pid} {one.name}{_title_note(one)}")
            if one.state != "ok":
                lines.append(f"    {one.state}: {one.reason}")
            elif not one.started_with:
                lines.append("    started with no switch variable")
            lines += [f"    {name}={value!r}" for name, value in one.started_with.items()]
    return "\n".join(lines) + "\n"


def check_text(label: str, check: EnvironmentCheck) -> str:
    """One check as a table: variable, expected, what each process was started with."""
    lines = [label]
    reports = judge.reports_by_pid(check)
    for name, value in check.expected.items():
        lines.append(f"  {name}: expected {_shown(value)}")
        for one in check.processes:
            if one.state != "ok":
                lines.append(f"    {one.pid} {one.name}: {one.state}: {one.reason}")
            else:
                now = f", has now {_shown(reports[one.pid].environ.get(name))}" if one.pid in reports else ""
                then = _shown(one.started_with.get(name))
                lines.append(f"    {one.pid} {one.name}: started with {then}{now}{_title_note(one)}")
    for pattern, line in check.log_matches.items():
        lines.append(f"  log {pattern!r}: {line[:160] if line else 'no line matches'}")
    for plugin, pids in check.plugins.items():
        inside = {pid for pid, report in reports.items() if plugin in report.plugins}
        loaded = [f"{one.pid} {one.name}" for one in check.processes if one.pid in {*pids, *inside}]
        lines.append(f"  plugin {plugin}: loaded in {', '.join(loaded) or 'no process'}")
    lines += [f"  plugin {line}" for line in report_lines(check)]
    lines += [f"  {finding.code}: {finding.message}" for finding in check.findings]
    lines.append("  NOT verified" if any(finding.fatal for finding in check.findings) else "  verified")
    return "\n".join(lines) + "\n"


def _title_note(one: ProcessWitness) -> str:
    return " (renamed, environment whole)" if one.renamed and one.state == "ok" else ""


def _shown(value: str | None) -> str:
    return "unset" if value is None else repr(value)
