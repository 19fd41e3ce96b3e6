"""What was declared against what is observed: pids, expected values and log text in, an `EnvironmentCheck` out.

Three witnesses are heard: `/proc/<pid>/environ` of every process of the server's tree (what it was *started with*), the
probe's reports from inside those processes (what they have *now*), and the server's log. What they show is recorded;
`judge` says what follows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from abharness import procfs
from abharness.judge import FLAG_TEXTS, judge_check, recordable, role_by_title
from abharness.record import EnvironmentCheck, Finding
from abharness.reported import Expected, judge_reports
from abharness.witnesses import GpuHolder, KernelFolder, ProbeReport, ProcessWitness

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# vLLM prefixes the lines of each process: "(EngineCore_DP0 pid=1234) INFO 11-29 17:21:01 [core.py:107] ...".
PREFIX = re.compile(r"^\s*\((?P<role>[A-Za-z]\w*) pid=(?P<pid>\d+)\)")
NOT_KNOWN = re.compile(
    r"unknown|unrecogni[sz]ed|not recogni[sz]ed|unsupported|not supported|no longer (?:supported|used|read)"
    r"|has no effect|\bignor(?:ed|ing)\b",
    re.IGNORECASE,
)
VARIABLE_WORDS = re.compile(r"env(?:ironment)?[ _-]?var", re.IGNORECASE)
CACHE_LOADED = re.compile(r"Directly load (?:the compiled graph|AOT compilation)")
LINE_KEPT = 400
"""Characters of a log line that go into the record."""
LINES_KEPT = 50
"""Lines of one kind that go into the record."""


@dataclass(frozen=True, slots=True)
class LogFacts:
    """What a server's log says that bears on the declared things; lines are cut to 400 characters.

    Attributes:
        matches: Each expected pattern with the first line that matched, or None.
        doubts: Lines that call an environment variable unknown, unsupported or ignored.
        cache_loads: Lines about compiled code loaded from a cache.
        roles: Process id to role, from the line prefixes.
        plugins: Each plugin asked for with the processes whose lines show it as loaded.
        plugin_failures: Each plugin asked for that failed to load, with that line.
    """

    matches: dict[str, str | None]
    doubts: list[str]
    cache_loads: list[str]
    roles: dict[int, str]
    plugins: dict[str, list[int]]
    plugin_failures: dict[str, str]


def check_environment(
    *,
    when: Literal["before_load", "after_load"],
    root_pid: int,
    launched: Mapping[str, str],
    expected: Mapping[str, str | None],
    sentinel: tuple[str, str],
    log_text: str,
    expect_log: Sequence[str] = (),
    other_log: Sequence[str] = (),
    plugins: Sequence[str] = (),
    kernels: Sequence[KernelFolder] = (),
    expect_report: Expected | None = None,
    known: Iterable[tuple[int, int]] = (),
    probes: Sequence[ProbeReport] = (),
    probe_absent: str | None = None,
    caches: Mapping[str, str] | None = None,
    gpu_pids: Mapping[str, Collection[int]] | None = None,
    fresh_caches: bool = True,
) -> EnvironmentCheck:
    """Verify one launch: every process of its tree, by every witness there is.

    Args:
        when: Before or after the load.
        root_pid: The server process we started.
        launched: The whole environment it was launched with.
        expected: Declared variables; None means must be unset.
        sentinel: Name and value of the variable that only this launch has; a block without it proves nothing.
        log_text: The server's log so far.
        expect_log: Regular expressions, each of which must match a line of the log.
        other_log: Those of the other variant: looked for and recorded, since what both log proves nothing.
        plugins: Plugins that must be loaded in the engine and in every worker.
        kernels: Kernel folders that the launch was given.
        expect_report: What plugins must report after the load.
        known: `(pid, start_ticks)` of processes seen in the tree earlier: they are checked though re-parented.
        probes: What the probe reports from inside the processes.
        probe_absent: Why the probe was not brought into the launch, or None.
        caches: Cache variable -> the launch's own directory.
        gpu_pids: GPU UUID -> processes with a compute context there, as the driver numbers them; None without a GPU.
        fresh_caches: The launch began with empty compile caches, so nothing can have been loaded from one.

    Returns:
        The check; its findings are empty when everything declared was seen.
    """
    log = read_log(log_text, expect_log=[*expect_log, *other_log], plugins=plugins)
    everything = {one.pid: one for one in [*procfs.tree(root_pid), *procfs.carrying(*sentinel)]}
    for pid, ticks in known:
        seen = procfs.process(pid)
        if seen is not None and seen.start_ticks == ticks:
            everything.setdefault(pid, seen)
    order = sorted(everything, key=lambda pid: (pid != root_pid, pid))
    # A wrapper may have sorted the environment anew; where it has not, the sentinel comes first in every block.
    first = next(iter(procfs.read_environ(root_pid).variables), None) == sentinel[0]
    witnesses = [
        _witness(everything[pid], expected, sentinel, launched, log.roles, root_pid, sentinel_first=first)
        for pid in order
    ]
    check = EnvironmentCheck(
        when=when,
        expected=recordable(expected),
        processes=witnesses,
        probes=list(probes),
        probe_absent=probe_absent,
        gpu_holders=_holders(gpu_pids or {}, everything),
        log_matches=log.matches,
        log_doubts=log.doubts,
        log_cache_loads=log.cache_loads,
        plugins=log.plugins,
        plugin_failures=log.plugin_failures,
    )
    findings = judge_check(
        check,
        expected=check.expected,
        expect_log=expect_log,
        plugins=plugins,
        kernels=kernels,
        caches=caches,
        gpus=list(gpu_pids) if gpu_pids else None,
        fresh_caches=fresh_caches,
    )
    findings += judge_reports(check, expect_report or {})
    return check.model_copy(update={"findings": findings})


def attached_check(pid: int, expect: Mapping[str, str], expect_unset: Sequence[str] = ()) -> EnvironmentCheck:
    """Verify the environment of a server that somebody else started: its whole tree, without a sentinel.

    Args:
        pid: The server's topmost process.
        expect: Variables with the exact values they must have.
        expect_unset: Variables that must not be set.
    """
    expected: dict[str, str | None] = {**expect, **dict.fromkeys(expect_unset)}
    witnesses = [_witness(one, expected, None, None, {}, pid) for one in procfs.tree(pid)]
    check = EnvironmentCheck(when="attached", expected=recordable(expected), processes=witnesses)
    return check.model_copy(update={"findings": judge_check(check, expected=check.expected)})


def read_log(log_text: str, *, expect_log: Sequence[str] = (), plugins: Sequence[str] = ()) -> LogFacts:
    """Read a server's log for what bears on the declared things.

    Args:
        log_text: The log, colours and all.
        expect_log: Regular expressions, each searched for in every line.
        plugins: Names of general plugins to look for.
    """
    lines = [ANSI.sub("", line).strip() for line in log_text.splitlines()]
    matches: dict[str, str | None] = {}
    for pattern in expect_log:
        compiled = re.compile(pattern)
        matches[pattern] = next((line for line in lines if compiled.search(line)), None)
    prefixed = [(int(prefix["pid"]), prefix["role"], line) for line in lines if (prefix := PREFIX.match(line))]
    # With VLLM_PLUGINS unset vLLM lists what it will load; with it set it names what it loads.
    all_listed = {pid for pid, _, line in prefixed if "All plugins in this group will be loaded" in line}
    loaded: dict[str, list[int]] = {}
    failures: dict[str, str] = {}
    for plugin in plugins:
        loading = re.compile(rf"\bLoading plugin {re.escape(plugin)}$")
        listing = re.compile(rf"\] - {re.escape(plugin)} -> ")
        failing = re.compile(rf"\bFailed to load plugin {re.escape(plugin)}$")
        pids = {
            pid for pid, _, line in prefixed if loading.search(line) or (pid in all_listed and listing.search(line))
        }
        loaded[plugin] = sorted(pids)
        failed = next((line[:LINE_KEPT] for line in lines if failing.search(line)), None)
        if failed is not None:
            failures[plugin] = failed
    doubts = [line for line in lines if VARIABLE_WORDS.search(line) and NOT_KNOWN.search(line)]
    cache_loads = [line for line in lines if CACHE_LOADED.search(line)]
    return LogFacts(
        matches=matches,
        doubts=[line[:LINE_KEPT] for line in doubts[:LINES_KEPT]],
        cache_loads=[line[:LINE_KEPT] for line in cache_loads[:LINES_KEPT]],
        roles={pid: role for pid, role, _ in prefixed},
        plugins=loaded,
        plugin_failures=failures,
    )


def suspicious_values(baseline_env: Mapping[str, str | None], candidate_env: Mapping[str, str | None]) -> list[Finding]:
    """Advice on variables that differ only as flag texts: servers read "0" and "false" in more than one way.

    Args:
        baseline_env: Declared variables of the baseline; None or missing means unset.
        candidate_env: The same of the candidate.
    """
    findings = []
    for name in sorted({*baseline_env, *candidate_env}):
        one, other = baseline_env.get(name), candidate_env.get(name)
        if one is None or other is None or one == other:
            continue
        if one.lower() in FLAG_TEXTS and other.lower() in FLAG_TEXTS:
            findings.append(
                Finding(
                    code="truthiness_risk",
                    message=f"{name} differs only as {one!r} against {other!r}: code that tests whether it is set "
                    "takes both as on, code that compares with '1' takes 'true' as off",
                    hint=f"give the baseline `{name}: null` (must be unset), or an expect_log line that differs",
                )
            )
    return findings


def _witness(
    one: procfs.Process,
    expected: Mapping[str, str | None],
    sentinel: tuple[str, str] | None,
    launched: Mapping[str, str] | None,
    logged: Mapping[int, str],
    root_pid: int,
    *,
    sentinel_first: bool = False,
) -> ProcessWitness:
    read = procfs.read_environ(one.pid)
    renamed = procfs.renamed(one)
    state, reason = read.state, read.reason
    if state != "gone" and procfs.start_ticks(one.pid) != one.start_ticks:
        state, reason = "gone", "the process has ended"
    if state == "ok" and sentinel is not None:
        name, value = sentinel
        found = read.variables.get(name)
        if found != value:
            what = "is missing" if found is None else f"is {found!r}"
            state, reason = "unreadable", f"the sentinel {name}={value} {what}: this is not the block that was launched"
        elif renamed and sentinel_first and next(iter(read.variables)) != name:
            state, reason = (
                "unreadable",
                f"the block does not begin with {name} as it was launched: a title runs into it",
            )
    started_with = {name: read.variables.get(name) for name in expected} if state == "ok" else {}
    undeclared: dict[str, str | None] = {}
    if state == "ok" and launched is not None:
        names = {*launched, *read.variables} - {*expected}
        undeclared = {n: read.variables.get(n) for n in sorted(names) if read.variables.get(n) != launched.get(n)}
    title = procfs.title(one.pid)
    return ProcessWitness(
        pid=one.pid,
        ppid=one.ppid,
        start_ticks=one.start_ticks,
        name=title,
        state=state,
        reason=reason,
        started_with=recordable(started_with),
        role=_role(title, one.pid, logged, root_pid),
        undeclared=recordable(undeclared),
        renamed=renamed,
        layout_checked=read.layout_checked if state == "ok" else None,
    )


def _role(title: str, pid: int, logged: Mapping[int, str], root_pid: int) -> str:
    return role_by_title(title) or logged.get(pid) or ("server" if pid == root_pid else "process")


def _holders(gpu_pids: Mapping[str, Collection[int]], tree: Collection[int]) -> list[GpuHolder]:
    """Who has a context on the GPUs; a number that cannot be a GPU process of this machine is another namespace's."""
    holders = []
    for uuid, pids in gpu_pids.items():
        for pid in sorted(pids):
            whose: Literal["ours", "foreign", "unknown"] = "unknown"
            if pid in tree:
                whose = "ours"
            elif procfs.uses_gpu(pid):
                whose = "foreign"
            name = "cannot be seen from here" if whose == "unknown" else procfs.title(pid)
            holders.append(GpuHolder(uuid=uuid, pid=pid, name=name, whose=whose))
    return holders
