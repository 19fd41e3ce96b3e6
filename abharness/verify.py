"""What was declared against what is observed: pids, expected values and log text in, an `EnvironmentCheck` out.

Two witnesses are heard here: `/proc/<pid>/environ` of every process of the server's tree (what it was *started with*),
and the server's log. Every doubt is a finding: a block that cannot be read whole is `env_unverifiable`, never "unset";
a value other than the declared one is `env_mismatch`; a variable that arrived and that the server says it does not know
is `switch_not_recognised`. Unset, empty, "0" and "false" are four different values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from abharness import procfs
from abharness.record import EnvironmentCheck, Finding, ProcessWitness
from abharness.redaction import hidden, printable

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
FLAG_TEXTS = frozenset({"", "0", "1", "false", "true", "no", "yes", "off", "on"})


@dataclass(frozen=True, slots=True)
class LogCheck:
    """What the log says about the declared things.

    Attributes:
        matches: Each expected pattern with the first line that matched, or None.
        roles: Process id to role, from the line prefixes.
    """

    matches: dict[str, str | None]
    roles: dict[int, str]
    findings: list[Finding]


def check_environment(
    *,
    when: Literal["before_load", "after_load"],
    root_pid: int,
    expected: Mapping[str, str | None],
    sentinel: tuple[str, str],
    log_text: str,
    expect_log: Sequence[str] = (),
    plugins: Sequence[str] = (),
    loaded_plugins: Mapping[int, Collection[str]] | None = None,
    known: Iterable[tuple[int, int]] = (),
    fresh_caches: bool = True,
) -> EnvironmentCheck:
    """Verify one launch: every process of its tree, and its log.

    Args:
        when: Before or after the load.
        root_pid: The server process we started.
        expected: Declared variables; None means must be unset.
        sentinel: Name and value of the variable that only this launch has; a block without it proves nothing.
        log_text: The server's log so far.
        expect_log: Regular expressions, each of which must match a line of the log.
        plugins: Plugins that must be loaded in the engine and in every worker.
        loaded_plugins: Process id to names of plugins loaded there, as reported from inside those processes.
        known: `(pid, start_ticks)` of processes seen in the tree earlier: they are checked though re-parented.
        fresh_caches: The launch began with empty compile caches, so nothing can have been loaded from one.

    Returns:
        The check; its findings are empty when everything declared was seen.
    """
    log = check_log(log_text, names=expected, expect_log=expect_log, fresh_caches=fresh_caches)
    everything = {one.pid: one for one in [*procfs.tree(root_pid), *procfs.carrying(*sentinel)]}
    for pid, ticks in known:
        seen = procfs.process(pid)
        if seen is not None and seen.start_ticks == ticks:
            everything.setdefault(pid, seen)
    witnesses = [_witness(everything[pid], expected, sentinel) for pid in sorted(everything)]
    roles = {witness.pid: _role(witness, log.roles, root_pid) for witness in witnesses}
    findings = _judge(witnesses, roles, expected)
    alive = [witness for witness in witnesses if witness.state != "gone"]
    if not alive:
        findings.append(_unverifiable(f"no process is left of the tree of pid {root_pid}", "the server has ended"))
    elif not any(_runs_model(roles[witness.pid]) for witness in alive):
        seen_roles = ", ".join(f"pid {witness.pid} {witness.name!r}" for witness in alive)
        findings.append(
            _unverifiable(
                f"no process of the tree shows itself as the engine, by title or in the log; seen: {seen_roles}",
                "the engine has died, or runs outside the server's process tree (Ray, another host)",
            )
        )
    plugin_roles, plugin_findings = _check_plugins(plugins, log_text, log.roles, alive, roles, loaded_plugins or {})
    return EnvironmentCheck(
        when=when,
        expected=_recordable(expected),
        processes=witnesses,
        log_matches=log.matches,
        plugins=plugin_roles,
        findings=[*findings, *log.findings, *plugin_findings],
    )


def attached_check(pid: int, expect: Mapping[str, str], expect_unset: Sequence[str] = ()) -> EnvironmentCheck:
    """Verify the environment of a server that somebody else started: its whole tree, without a sentinel.

    Args:
        pid: The server's topmost process.
        expect: Variables with the exact values they must have.
        expect_unset: Variables that must not be set.
    """
    expected: dict[str, str | None] = {**expect, **dict.fromkeys(expect_unset)}
    witnesses = [_witness(one, expected, None) for one in procfs.tree(pid)]
    roles = {witness.pid: _role(witness, {}, pid) for witness in witnesses}
    findings = _judge(witnesses, roles, expected)
    if all(witness.state == "gone" for witness in witnesses):
        findings.append(_unverifiable(f"there is no process {pid}", "it has ended, or the pid is another machine's"))
    return EnvironmentCheck(when="attached", expected=_recordable(expected), processes=witnesses, findings=findings)


def check_log(
    log_text: str,
    *,
    names: Iterable[str],
    expect_log: Sequence[str] = (),
    fresh_caches: bool = True,
) -> LogCheck:
    """Read a server's log for what bears on the declared variables.

    Args:
        log_text: The log, colours and all.
        names: Declared variables; a line that calls one of them unknown or ignored is a finding.
        expect_log: Regular expressions, each searched for in every line.
        fresh_caches: Whether a line about a compiled graph loaded from a cache is a finding.
    """
    lines = [ANSI.sub("", line) for line in log_text.splitlines()]
    findings: list[Finding] = []
    doubtful = [line for line in lines if VARIABLE_WORDS.search(line) and NOT_KNOWN.search(line)]
    for name in names:
        whole = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])")
        line = next((line for line in doubtful if whole.search(line)), None)
        if line is not None:
            findings.append(
                Finding(
                    code="switch_not_recognised",
                    message=f"{name} was delivered and not recognised; the server's log: {line.strip()[:200]!r}",
                    hint="this vLLM does not read it (renamed, removed, misspelt), so both variants run the same path; "
                    "if a plugin reads it, give it a name that does not begin with VLLM_",
                    fatal=True,
                )
            )
    matches: dict[str, str | None] = {}
    for pattern in expect_log:
        compiled = re.compile(pattern)
        matches[pattern] = next((line.strip()[:400] for line in lines if compiled.search(line)), None)
        if matches[pattern] is None:
            findings.append(
                Finding(
                    code="switch_not_recognised",
                    message=f"no line of the server's log ({len(lines)} lines) matches the expected {pattern!r}",
                    hint="the switch had no effect, or the line is not logged at this VLLM_LOGGING_LEVEL",
                    fatal=True,
                )
            )
    loaded = [line for line in lines if CACHE_LOADED.search(line)]
    if fresh_caches and loaded:
        findings.append(
            Finding(
                code="compile_cache_reused",
                message=f"compiled code was loaded from a cache in a launch that began with empty ones "
                f"({len(loaded)} line(s), the first: {loaded[0].strip()[:200]!r})",
                hint="the server keeps a cache in a place the launch does not redirect; the code in it may have been "
                "compiled for the other variant",
                fatal=True,
            )
        )
    roles: dict[int, str] = {}
    for line in lines:
        prefix = PREFIX.match(line)
        if prefix:
            roles[int(prefix["pid"])] = prefix["role"]
    return LogCheck(matches, roles, findings)


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
    one: procfs.Process, expected: Mapping[str, str | None], sentinel: tuple[str, str] | None
) -> ProcessWitness:
    read = procfs.read_environ(one.pid)
    state, reason = read.state, read.reason
    if state != "gone" and procfs.start_ticks(one.pid) != one.start_ticks:
        state, reason = "gone", "the process has ended"
    if state == "ok" and sentinel is not None:
        name, value = sentinel
        found = read.variables.get(name)
        if found != value:
            what = "is missing" if found is None else f"is {found!r}"
            state, reason = "unreadable", f"the sentinel {name}={value} {what}: this is not the block that was launched"
    started_with = {name: read.variables.get(name) for name in expected} if state == "ok" else {}
    return ProcessWitness(
        pid=one.pid,
        ppid=one.ppid,
        start_ticks=one.start_ticks,
        name=procfs.title(one.pid),
        state=state,
        reason=reason,
        started_with=_recordable(started_with),
        renamed=procfs.renamed(one),
        layout_checked=read.layout_checked if state == "ok" else None,
    )


def _recordable(values: Mapping[str, str | None]) -> dict[str, str | None]:
    return {printable(name): None if value is None else hidden(name, value) for name, value in values.items()}


def _role(witness: ProcessWitness, logged: Mapping[int, str], root_pid: int) -> str:
    if witness.name.startswith(procfs.ENGINE_TITLE):
        return witness.name.removeprefix(procfs.ENGINE_TITLE).split(" ")[0]
    if witness.pid in logged:
        return logged[witness.pid]
    return "server" if witness.pid == root_pid else "process"


def _runs_model(role: str) -> bool:
    return role.startswith(("EngineCore", "Worker"))


def _unverifiable(message: str, hint: str) -> Finding:
    return Finding(code="env_unverifiable", message=message, hint=hint, fatal=True)


def _judge(
    witnesses: Sequence[ProcessWitness], roles: Mapping[int, str], expected: Mapping[str, str | None]
) -> list[Finding]:
    findings = [
        _unverifiable(
            f"pid {witness.pid} ({roles[witness.pid]}): {witness.reason}; nothing can be said of "
            f"{', '.join(expected) or 'its environment'}",
            "a process that renames itself overwrites its block: launch with SPT_NOENV=1",
        )
        for witness in witnesses
        if witness.state == "unreadable"
    ]
    readable = [witness for witness in witnesses if witness.state == "ok"]
    for name, wanted in _recordable(expected).items():
        values = [(witness, witness.started_with[name]) for witness in readable]
        if all(found == wanted for _, found in values):
            continue
        each = "; ".join(
            f"pid {witness.pid} ({roles[witness.pid]}) was started with {found!r}"
            if found is not None
            else f"pid {witness.pid} ({roles[witness.pid]}) was started without it"
            for witness, found in values
        )
        differ = "; the processes disagree" if len({found for _, found in values}) > 1 else ""
        findings.append(
            Finding(
                code="env_mismatch",
                message=f"{name}: expected {'unset' if wanted is None else repr(wanted)}; {each}{differ}",
                hint="something between the declared environment and the process changed it: a wrapper script, "
                "sitecustomize, a .env file, or the server itself before it spawned its children",
                fatal=True,
            )
        )
    return findings


def _check_plugins(
    plugins: Sequence[str],
    log_text: str,
    logged_roles: Mapping[int, str],
    alive: Sequence[ProcessWitness],
    roles: Mapping[int, str],
    reported: Mapping[int, Collection[str]],
) -> tuple[dict[str, list[str]], list[Finding]]:
    # vLLM loads general plugins once a process and swallows what fails; the processes that run the model count.
    lines = [ANSI.sub("", line) for line in log_text.splitlines()]
    needed = {witness.pid: roles[witness.pid] for witness in alive if _runs_model(roles[witness.pid])}
    prefixed = [(int(prefix["pid"]), line) for line in lines if (prefix := PREFIX.match(line))]
    all_listed = {pid for pid, line in prefixed if "All plugins in this group will be loaded" in line}
    everywhere: dict[str, list[str]] = {}
    findings: list[Finding] = []
    for plugin in plugins:
        pids = {pid for pid, names in reported.items() if plugin in names}
        loading = re.compile(rf"\bLoading plugin {re.escape(plugin)}\s*$")
        listing = re.compile(rf"\] - {re.escape(plugin)} -> ")
        failing = re.compile(rf"\bFailed to load plugin {re.escape(plugin)}\s*$")
        failed = next((line.strip() for line in lines if failing.search(line)), None)
        pids |= {pid for pid, line in prefixed if loading.search(line) or (pid in all_listed and listing.search(line))}
        names = {pid: roles.get(pid, logged_roles.get(pid, "process")) for pid in pids}
        everywhere[plugin] = sorted(set(names.values()))
        missing = [f"pid {pid} ({role})" for pid, role in sorted(needed.items()) if pid not in pids]
        if failed is None and needed and not missing:
            continue
        loaded_in = ", ".join(f"pid {pid} ({role})" for pid, role in sorted(names.items())) or "no process"
        findings.append(
            Finding(
                code="plugin_not_active",
                message=f"plugin {plugin}: "
                + (f"the log says {failed[:200]!r}; " if failed else "")
                + f"seen loaded in {loaded_in}, not in {', '.join(missing) or 'a process that runs the model'}",
                hint="it is not installed for this interpreter, not named in VLLM_PLUGINS, or failed on import; vLLM "
                "logs what it loads only with VLLM_LOGGING_LEVEL=DEBUG, and abharness_probe in VLLM_PLUGINS reports it",
                fatal=True,
            )
        )
    return everywhere, findings
