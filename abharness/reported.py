"""What plugins report of themselves -> whether it is what was expected, and in what the variants differ. Pure.

A plugin's module may have `abharness_report() -> dict`, which the probe calls in every process (kernels/README.md). Three
of its keys have a meaning of their own: `choice`, what this process runs; `given`, the switches that it was given, which
proves no more than their delivery; `calls`, counters, which no two processes have equal.
"""

from __future__ import annotations

import json
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from abharness.judge import MOST_SHOWN, named, reports_by_pid, role_of, runs_model
from abharness.record import EnvironmentCheck, Finding
from abharness.witnesses import ProbeReport, ProcessWitness

CHOICE = "choice"
GIVEN = "given"
CALLS = "calls"

Expected = Mapping[str, Mapping[str, str]]
"""Plugin -> dotted key -> condition."""

_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_COMPARISON = re.compile(rf"({'|'.join(_SIGNS)})\s*(-?\d{{1,18}}(?:\.\d{{1,18}})?)")


def is_comparison(condition: str) -> bool:
    """Whether a condition is about a number; one about a text is a regular expression."""
    return condition[:1] in ("=", "!", "<", ">")


def condition_problem(condition: str) -> str | None:
    """Why a condition cannot be checked, or None."""
    if is_comparison(condition):
        if _COMPARISON.fullmatch(condition):
            return None
        return f"{condition!r} is no comparison with a number; allowed are {', '.join(f'{sign}N' for sign in _SIGNS)}"
    try:
        re.compile(condition)
    except (re.error, OverflowError, RecursionError) as error:
        return f"not a regular expression: {error}"
    return None


def without_counts(expected: Expected) -> dict[str, dict[str, str]]:
    """What can be expected of a server without load: numbers count what the load does."""
    return {
        plugin: {key: condition for key, condition in conditions.items() if not is_comparison(condition)}
        for plugin, conditions in expected.items()
    }


def model_processes(check: EnvironmentCheck) -> list[ProcessWitness]:
    """The processes that execute the model: the workers, and the engines where those have no workers."""
    alive = [one for one in check.processes if one.state != "gone" and runs_model(role_of(one))]
    return [one for one in alive if role_of(one).startswith("Worker")] or alive


def judge_reports(check: EnvironmentCheck, expected: Expected) -> list[Finding]:
    """Say whether plugins report what was expected of them after the load, in every process that executes the model.

    Args:
        check: What was seen.
        expected: What had to be reported.

    Returns:
        Every doubt, fatal; empty before the load and where all was met.
    """
    if check.when != "after_load":
        return []
    reports = reports_by_pid(check)
    findings = []
    for plugin, conditions in expected.items():
        silent: dict[str, list[int]] = defaultdict(list)
        unmet: dict[str, list[int]] = defaultdict(list)
        for one in model_processes(check):
            report = reports.get(one.pid)
            why = _silence(check, report, plugin)
            if report is None or why is not None:
                silent[why or ""].append(one.pid)
                continue
            flat = dict(_flat(report.reports[plugin]))
            for key, condition in conditions.items():
                text = _unmet(flat, key, condition)
                if text is not None:
                    unmet[f"{key}: expected {condition!r}, {text}"].append(one.pid)
        findings += [
            Finding(
                code="env_unverifiable",
                message=f"plugin {plugin}: a report was expected, and there is none from {named(check, pids)}: {why}",
                hint="its module needs a function abharness_report(), and the probe must be loaded beside it",
                fatal=True,
            )
            for why, pids in silent.items()
        ]
        findings += [
            Finding(
                code="switch_not_recognised",
                message=f"plugin {plugin} reports {text} in {named(check, pids)}",
                hint="what ran is not what was asked for: see reports in evidence.json, and the plugin's own log lines",
                fatal=True,
            )
            for text, pids in unmet.items()
        ]
    return findings


def _silence(check: EnvironmentCheck, report: ProbeReport | None, plugin: str) -> str | None:
    """Why a process says nothing of a plugin, or None where it does."""
    if report is None:
        return check.probe_absent or "the probe was not heard there"
    if report.reason != "asked":
        return "the probe did not answer there"
    if plugin in report.report_faults:
        return f"it failed to report: {report.report_faults[plugin]}"
    if plugin not in report.reports:
        loaded = plugin in report.plugins
        return "it is loaded and has no abharness_report()" if loaded else "it is not loaded there"
    return None


def _unmet(flat: Mapping[str, Any], key: str, condition: str) -> str | None:
    """In what a report does not meet a condition, or None where it does."""
    if key not in flat:
        return f"and it has no such key (it has {', '.join(sorted(flat)[:MOST_SHOWN]) or 'none'})"
    value = flat[key]
    comparison = _COMPARISON.fullmatch(condition)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if comparison:
        met = number and _SIGNS[comparison[1]](value, float(comparison[2]))
    else:
        # A number is compared: 12 is no text, and `1.*` would match both 1 and 100.
        met = not number and not isinstance(value, list | dict) and re.fullmatch(condition, _text(value)) is not None
    return None if met else f"and it is {json.dumps(value, ensure_ascii=False)[:200]}"


def choices(checks: Sequence[EnvironmentCheck]) -> dict[str, set[str]]:
    """Of each plugin, what it says it runs in the processes that execute the model: more than one where they disagree."""
    found: dict[str, set[str]] = defaultdict(set)
    for plugin, report in _heard(checks):
        if CHOICE in report:
            found[plugin].add(_text(report[CHOICE]))
    return dict(found)


def given(checks: Sequence[EnvironmentCheck]) -> dict[str, set[str]]:
    """Of each plugin that says what it was given, the names of these switches."""
    found: dict[str, set[str]] = defaultdict(set)
    for plugin, report in _heard(checks):
        if isinstance(report.get(GIVEN), dict):
            found[plugin] |= set(report[GIVEN])
    return dict(found)


def identity(checks: Sequence[EnvironmentCheck]) -> dict[str, str]:
    """What reports say of a launch by `PLUGIN.key`: equal in all launches of a variant.

    Without the counters, and without what was given: the environment itself is compared.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for plugin, report in _heard(checks):
        for key, value in _flat({name: part for name, part in report.items() if name not in (CALLS, GIVEN)}):
            found[f"{plugin}.{key}"].add(_text(value))
    return {name: " and ".join(sorted(values)) for name, values in found.items()}


def lines(check: EnvironmentCheck) -> list[str]:
    """What each process that executes the model reports, one line a plugin."""
    reports = reports_by_pid(check)
    told = []
    for one in model_processes(check):
        report = reports.get(one.pid)
        if report is None:
            continue
        for plugin, data in report.reports.items():
            values = ", ".join(f"{key}={_text(value)}" for key, value in _flat(data))
            told.append(f"{plugin} in {one.pid} {role_of(one)} reports {values}")
        for plugin, fault in report.report_faults.items():
            told.append(f"{plugin} in {one.pid} {role_of(one)} failed to report: {fault}")
    return told


def _heard(checks: Sequence[EnvironmentCheck]) -> Iterator[tuple[str, dict[str, Any]]]:
    for check in checks:
        reports = reports_by_pid(check)
        for one in model_processes(check):
            if one.pid in reports:
                yield from reports[one.pid].reports.items()


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values by dotted key; an empty mapping is a value."""
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)
