"""Recorded evidence of one launch -> findings. Pure: `verify` calls it at the time, `compare` again from the record.

So no verdict about an environment is read from a file: what the processes showed is on record, and what follows from it
is drawn anew. Unset, empty, "0" and "false" are four values. A witness that cannot be heard proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath

from abharness.record import EnvironmentCheck, Finding
from abharness.redaction import hidden, printable
from abharness.witnesses import ENGINE_TITLE, CacheEvidence, KernelFolder, ProbeReport, ProcessWitness

FLAG_TEXTS = frozenset({"", "0", "1", "false", "true", "no", "yes", "off", "on"})
"""Values, in lower case, that a server may read as on or off in more than one way."""

MOST_SHOWN = 8
"""Processes named one by one in a message."""


def recordable(values: Mapping[str, str | None]) -> dict[str, str | None]:
    """Names and values as they may be written: secrets hidden, bytes that are no UTF-8 escaped."""
    return {printable(name): None if value is None else hidden(name, value) for name, value in values.items()}


def role_by_title(title: str) -> str | None:
    """The role that a process of vLLM gives itself in its title (`VLLM::EngineCore`), or None."""
    return title.removeprefix(ENGINE_TITLE).split(" ")[0] if title.startswith(ENGINE_TITLE) else None


def role_of(witness: ProcessWitness) -> str:
    """What a process does in the server, by its title if it says so."""
    return role_by_title(witness.name) or witness.role


def runs_model(role: str) -> bool:
    """Whether a process of this role executes the model."""
    return role.startswith(("EngineCore", "Worker"))


def judge_check(
    check: EnvironmentCheck,
    *,
    expected: Mapping[str, str | None],
    expect_log: Sequence[str] = (),
    plugins: Sequence[str] = (),
    kernels: Sequence[KernelFolder] = (),
    caches: Mapping[str, str] | None = None,
    gpus: Sequence[str] | None = None,
    fresh_caches: bool = True,
) -> list[Finding]:
    """Say what one verification proves.

    Args:
        check: What was seen.
        expected: Declared variables as `recordable` writes them; None means must be unset.
        expect_log: Regular expressions that had to match a line of the log.
        plugins: Plugins that had to be loaded in every process that runs the model.
        kernels: Kernel folders whose copies, and no others, had to be what was imported.
        caches: Cache variable -> the launch's own directory; None where the launch has none of its own.
        gpus: UUIDs of the launch's GPUs; None where there is none.
        fresh_caches: The launch began with empty compile caches.

    Returns:
        Every doubt, fatal ones first for a launch that is under way; empty when everything declared was seen.
    """
    alive = [witness for witness in check.processes if witness.state != "gone"]
    findings = [*_unreadable(check, expected), *_tree(check, alive)]
    mismatches = _started_with(check, expected)
    findings += mismatches.values()
    # What was wrong from the start is told once.
    findings += _second_witness(check, alive, {n: v for n, v in expected.items() if n not in mismatches})
    findings += _log(check, expected, expect_log, fresh_caches=fresh_caches)
    findings += _plugins(check, alive, plugins)
    findings += _kernel_folders(check, kernels)
    findings += _caches_in_effect(check, caches or {})
    findings += _gpus(check, gpus)
    return findings


def _unverifiable(message: str, hint: str) -> Finding:
    return Finding(code="env_unverifiable", message=message, hint=hint, fatal=True)


def _unreadable(check: EnvironmentCheck, wanted: Mapping[str, str | None]) -> list[Finding]:
    return [
        _unverifiable(
            f"pid {witness.pid} ({role_of(witness)}): {witness.reason}; nothing can be said of "
            f"{', '.join(wanted) or 'its environment'}",
            "a process that renames itself overwrites its block: launch with SPT_NOENV=1",
        )
        for witness in check.processes
        if witness.state == "unreadable"
    ]


def _tree(check: EnvironmentCheck, alive: Sequence[ProcessWitness]) -> list[Finding]:
    root = check.processes[0].pid if check.processes else "?"
    if not alive:
        attached = check.when == "attached"
        return [
            _unverifiable(
                f"there is no process {root}" if attached else f"no process is left of the tree of pid {root}",
                "it has ended, or the pid is another machine's" if attached else "the server has ended",
            )
        ]
    if check.when != "attached" and not any(runs_model(role_of(witness)) for witness in alive):
        seen_roles = ", ".join(f"pid {witness.pid} {witness.name!r}" for witness in alive)
        return [
            _unverifiable(
                f"no process of the tree shows itself as the engine, by title or in the log; seen: {seen_roles}",
                "the engine has died, or runs outside the server's process tree (Ray, another host)",
            )
        ]
    return []


def _started_with(check: EnvironmentCheck, wanted: Mapping[str, str | None]) -> dict[str, Finding]:
    """By variable: those that a process was not started with as declared."""
    readable = [witness for witness in check.processes if witness.state == "ok"]
    findings = {}
    for name, value in wanted.items():
        unasked = [witness.pid for witness in readable if name not in witness.started_with]
        if unasked:
            text = f"{name}: nothing is on record of {named(check, unasked)}"
            findings[name] = _unverifiable(text, "the record is not of this configuration, or was changed")
            continue
        values = [(one, one.started_with[name]) for one in readable]
        if all(found == value for _, found in values):
            continue
        each = "; ".join(
            f"pid {witness.pid} ({role_of(witness)}) was started with {found!r}"
            if found is not None
            else f"pid {witness.pid} ({role_of(witness)}) was started without it"
            for witness, found in values
        )
        differ = "; the processes disagree" if len({found for _, found in values}) > 1 else ""
        findings[name] = _mismatch(
            name,
            value,
            f"{each}{differ}",
            "something between the declared environment and the process changed it: a wrapper script, "
            "sitecustomize, a .env file, or the server itself before it spawned its children",
        )
    return findings


def _mismatch(name: str, wanted: str | None, seen: str, hint: str) -> Finding:
    return Finding(
        code="env_mismatch",
        message=f"{name}: expected {'unset' if wanted is None else repr(wanted)}; {seen}",
        hint=hint,
        fatal=True,
    )


def reports_by_pid(check: EnvironmentCheck) -> dict[int, ProbeReport]:
    """The probe's reports about this very tree: a report of an earlier process of the same pid is none."""
    ticks = {witness.pid: witness.start_ticks for witness in check.processes}
    return {report.pid: report for report in check.probes if ticks.get(report.pid) == report.start_ticks}


def _second_witness(
    check: EnvironmentCheck, alive: Sequence[ProcessWitness], wanted: Mapping[str, str | None]
) -> list[Finding]:
    if check.when == "attached" or not alive:
        return []
    reports = reports_by_pid(check)
    if not reports:
        why = check.probe_absent or "it was brought into the launch, and no process of the server reported"
        return [
            Finding(
                code="one_witness",
                message=f"the probe was not heard: {why}; the environment is proven by /proc alone, which does not show "
                "what a process changes after its start",
                hint="let abharness set PYTHONPATH, and name abharness_probe where VLLM_PLUGINS is declared",
            )
        ]
    findings = []
    silent = [one for one in alive if runs_model(role_of(one)) and one.pid not in reports]
    if silent:
        findings.append(
            _unverifiable(
                f"the probe reports from {named(check, reports)} but not from "
                f"{', '.join(f'pid {one.pid} ({role_of(one)})' for one in silent[:MOST_SHOWN])}",
                "general plugins were not loaded there: what runs the model is not what was set up",
            )
        )
    mute = [report for report in reports.values() if report.reason != "asked"]
    mute = [report for report in mute if any(one.pid == report.pid for one in alive)]
    if mute:
        why = "".join(sorted({f"; it cannot be asked: {report.deaf}" for report in mute if report.deaf is not None}))
        findings.append(
            _unverifiable(
                f"the probe did not answer in {named(check, [report.pid for report in mute])}{why}; its report is from "
                "the start of the process, and a later change would not show",
                "see server.log" if why else "the process hangs or is very busy; see server.log",
            )
        )
    for name, value in wanted.items():
        values = {pid: report.environ.get(name) for pid, report in reports.items()}
        if all(found == value for found in values.values()):
            continue
        roles = {witness.pid: role_of(witness) for witness in check.processes}
        each = "; ".join(
            f"pid {pid} ({roles[pid]}) has {'it unset' if found is None else repr(found)} in os.environ"
            for pid, found in sorted(values.items())
        )
        findings.append(
            _mismatch(
                name,
                value,
                f"in the processes themselves: {each}",
                "code inside the server changed it after the start: vLLM itself (it sets some variables for its workers), "
                "a plugin, sitecustomize or a .env file; find it and declare the value that is in effect",
            )
        )
    return findings


def named(check: EnvironmentCheck, pids: Iterable[int]) -> str:
    """Processes of a check in words: the first few one by one, and how many more."""
    roles = {witness.pid: role_of(witness) for witness in check.processes}
    chosen = sorted(pids)
    more = f" and {len(chosen) - MOST_SHOWN} more" if len(chosen) > MOST_SHOWN else ""
    return ", ".join(f"pid {pid} ({roles.get(pid, 'process')})" for pid in chosen[:MOST_SHOWN]) + more


def _log(
    check: EnvironmentCheck, wanted: Mapping[str, str | None], expect_log: Sequence[str], *, fresh_caches: bool
) -> list[Finding]:
    findings = []
    for name in wanted:
        whole = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])")
        line = next((line for line in check.log_doubts if whole.search(line)), None)
        if line is not None:
            findings.append(
                Finding(
                    code="switch_not_recognised",
                    message=f"{name} was delivered and not recognised; the server's log: {line[:200]!r}",
                    hint="this vLLM does not read it (renamed, removed, misspelt), so both variants run the same path; "
                    "if a plugin reads it, give it a name that does not begin with VLLM_",
                    fatal=True,
                )
            )
    for pattern in expect_log:
        line = check.log_matches.get(pattern)
        if line is None or not re.search(pattern, line):
            findings.append(
                Finding(
                    code="switch_not_recognised",
                    message=f"no line of the server's log matches the expected {pattern!r}",
                    hint="the switch had no effect, or the line is not logged at this VLLM_LOGGING_LEVEL",
                    fatal=True,
                )
            )
    if fresh_caches and check.log_cache_loads:
        findings.append(
            Finding(
                code="compile_cache_reused",
                message="compiled code was loaded from a cache in a launch that began with empty ones "
                f"({len(check.log_cache_loads)} line(s), the first: {check.log_cache_loads[0][:200]!r})",
                hint="the server keeps a cache in a place the launch does not redirect; the code in it may have been "
                "compiled for the other variant",
                fatal=True,
            )
        )
    return findings


def _plugins(check: EnvironmentCheck, alive: Sequence[ProcessWitness], plugins: Sequence[str]) -> list[Finding]:
    # vLLM loads general plugins once a process and swallows what fails; the processes that run the model count.
    needed = {witness.pid: role_of(witness) for witness in alive if runs_model(role_of(witness))}
    reports = reports_by_pid(check)
    findings = []
    for plugin in plugins:
        pids = {*check.plugins.get(plugin, []), *(pid for pid, one in reports.items() if plugin in one.plugins)}
        failed = check.plugin_failures.get(plugin)
        missing = sorted(pid for pid in needed if pid not in pids)
        if failed is None and needed and not missing:
            continue
        findings.append(
            Finding(
                code="plugin_not_active",
                message=f"plugin {plugin}: "
                + (f"the log says {failed[:200]!r}; " if failed else "")
                + f"seen loaded in {named(check, pids) or 'no process'}, "
                f"not in {named(check, missing) or 'a process that runs the model'}",
                hint="it is not installed for this interpreter, not named in VLLM_PLUGINS, or failed on import; "
                "abharness_probe in VLLM_PLUGINS reports what is loaded, and vLLM logs it with VLLM_LOGGING_LEVEL=DEBUG",
                fatal=True,
            )
        )
    return findings


def _kernel_folders(check: EnvironmentCheck, kernels: Sequence[KernelFolder]) -> list[Finding]:
    """A package of the same name elsewhere on the path may have been imported in the stead of the copy."""
    findings = []
    for folder in kernels:
        copy = PurePath(folder.site) / folder.name
        files = {pid: report.plugin_files.get(folder.name) for pid, report in reports_by_pid(check).items()}
        others = {pid: file for pid, file in files.items() if file and not PurePath(file).is_relative_to(copy)}
        if others:
            findings.append(
                Finding(
                    code="plugin_not_active",
                    message=f"kernels {folder.name}: {named(check, others)} imported {sorted(others.values())[0]}, not the "
                    f"run's copy of {folder.path}",
                    hint="a package of this name comes first on the server's path: look at the declared PYTHONPATH",
                    fatal=True,
                )
            )
    return findings


def _caches_in_effect(check: EnvironmentCheck, caches: Mapping[str, str]) -> list[Finding]:
    """A server may move a cache (vLLM puts Inductor's below its own root), but not out of the launch's folder."""
    if not caches:
        return []
    roots = {PurePath(path).parent for path in caches.values()}
    findings = []
    for pid, report in sorted(reports_by_pid(check).items()):
        in_effect = [(f"os.environ[{name!r}]", report.environ.get(name)) for name in caches]
        in_effect += [(f"the cache of {name} in use", path) for name, path in report.cache_dirs.items()]
        outside = [
            f"{what} is {path!r}" if path is not None else f"{what} is unset"
            for what, path in in_effect
            if path is None or not any(PurePath(path).is_relative_to(root) for root in roots)
        ]
        if outside:
            findings.append(
                Finding(
                    code="compile_cache_reused",
                    message=f"{named(check, [pid])}: {'; '.join(outside[:3])}: not below this launch's own folder "
                    f"{sorted(map(str, roots))[0]}",
                    hint="the server keeps compiled code where another launch finds it: look for what moves the cache",
                    fatal=True,
                )
            )
    return findings


def _gpus(check: EnvironmentCheck, gpus: Sequence[str] | None) -> list[Finding]:
    findings = []
    # Where the driver names processes of ours by our numbers, a number that is none of ours is somebody's all the same.
    strangers = {"foreign", "unknown"} if any(one.whose == "ours" for one in check.gpu_holders) else {"foreign"}
    foreign = [holder for holder in check.gpu_holders if holder.whose in strangers]
    if foreign:
        each = "; ".join(f"pid {one.pid} ({one.name}) on {one.uuid}" for one in foreign[:MOST_SHOWN])
        findings.append(
            Finding(
                code="foreign_gpu_process",
                message=f"outside the verified process tree, on the launch's GPU: {each}",
                hint="stop it, or use another GPU; if it is a worker of this server (Ray), its environment was never "
                "verified: run the server without Ray",
                fatal=True,
            )
        )
    if check.gpu_holders and not any(holder.whose == "ours" for holder in check.gpu_holders) and not foreign:
        findings.append(
            Finding(
                code="not_checked",
                message=f"the driver names {len(check.gpu_holders)} process(es) on the GPU by numbers that are none of "
                "this machine's processes: whether they are all of this server cannot be known",
                hint="the driver counts in another pid namespace: run outside the container, or share its namespace",
            )
        )
    for pid, report in sorted(reports_by_pid(check).items()):
        checked = {_bare(uuid) for uuid in gpus or ()}
        strange = [uuid for uuid in report.gpu_uuids or [] if gpus is not None and _bare(uuid) not in checked]
        if strange:
            findings.append(
                _mismatch(
                    "CUDA_VISIBLE_DEVICES",
                    ", ".join(gpus or ()),
                    f"{named(check, [pid])} uses {', '.join(strange)}",
                    "the server runs on another GPU than the one that was checked and sampled",
                )
            )
    return findings


def _bare(uuid: str) -> str:
    """A device's UUID without its prefix: CUDA's of a MIG slice comes without one."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def judge_gpu_pids(
    seen: Mapping[str, Sequence[int]], tree_pids: Sequence[int], checks: Sequence[EnvironmentCheck]
) -> list[Finding]:
    """Say whether somebody else was on the GPUs during the load, also one who left before it ended.

    Args:
        seen: GPU UUID -> every process that had a compute context there, as the driver numbers them.
        tree_pids: Every process that was ever seen in the server's tree.
        checks: The launch's verifications: they tell whether the driver counts as this machine does.
    """
    same_numbers = any(holder.whose == "ours" for check in checks for holder in check.gpu_holders)
    ours = {*tree_pids, *(one.pid for check in checks for one in check.processes)}
    strange = [(uuid, pid) for uuid, pids in seen.items() for pid in pids if pid not in ours]
    if not strange or not same_numbers:
        return []
    each = ", ".join(f"pid {pid} on {uuid}" for uuid, pid in strange[:MOST_SHOWN])
    return [
        Finding(
            code="foreign_gpu_process",
            message=f"{len(strange)} process(es) outside the server's tree used its GPU during the load: {each}",
            hint="find out what it was, and keep it off this GPU",
        )
    ]


def judge_caches(caches: Sequence[CacheEvidence], defaults_touched: Sequence[str]) -> list[Finding]:
    """Say whether the caches were a launch's own: empty before, used after, default locations untouched."""
    findings: list[Finding] = []

    def tell(message: str, hint: str) -> None:
        findings.append(Finding(code="compile_cache_reused", message=message, hint=hint))

    filled = [cache for cache in caches if cache.files_before]
    if filled:
        tell(
            f"{filled[0].variable}={filled[0].path} held {filled[0].files_before} file(s) before the launch",
            "a launch must compile afresh; rerun it",
        )
    if caches and not any(cache.files_after for cache in caches):
        tell(
            f"none of the launch's {len(caches)} cache directories was used",
            "the server keeps its caches elsewhere: look for code that overrides the cache variables",
        )
    older = [(cache, path) for cache in caches for path in cache.older]
    if older:
        cache, path = older[0]
        tell(
            f"{len(older)} file(s) in the launch's cache directories are older than the launch, for example {path} in "
            f"{cache.variable}",
            "something filled the caches before the server compiled: a wrapper script, or a server that copies them",
        )
    if defaults_touched:
        tell(
            f"{len(defaults_touched)} file(s) below the default cache locations changed during the launch, "
            f"for example {defaults_touched[0]}",
            "the server ignores a cache variable, or another program compiled meanwhile: look at the files",
        )
    return findings
