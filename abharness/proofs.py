"""Evidence of launches -> what each witness saw of each switch, and what else a verdict rests on. Pure."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from abharness.effects import Effect
from abharness.judge import reports_by_pid
from abharness.plan import kernel_text
from abharness.record import EnvironmentCheck, Variant
from abharness.reported import lines
from abharness.runs import Launch
from abharness.spec import VARIANTS, ExperimentSpec

MOST_LINES = 6
"""Log lines and the like that are shown of one kind."""


@dataclass(frozen=True, slots=True)
class SwitchProof:
    """One declared difference in one variant.

    Attributes:
        name: The variable, or `arguments`, `python` or `kernels`.
        declared: Its value, or `unset`.
        started_with: What `/proc` shows of the server's processes; for the others, what the launches were
            given.
        inside: What the probe says from inside them; empty where that is nothing the probe could say.
        effect: What shows that the server acts on it; None where nothing does.
    """

    name: str
    variant: Variant
    declared: str
    started_with: str
    inside: str
    effect: str | None


@dataclass(frozen=True, slots=True)
class Fact:
    """One more thing that was looked at; `variant` is None where both show the same."""

    name: str
    variant: Variant | None
    seen: str


def shown(value: str | None) -> str:
    """A variable's value as it is written in every report: quoted, or `unset`."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


def switch_proofs(
    spec: ExperimentSpec, effects: Sequence[Effect], launches: Mapping[Variant, Sequence[Launch]]
) -> list[SwitchProof]:
    """Everything that differs by declaration, the baseline and then the candidate, with what its witnesses show.

    Args:
        spec: What was declared.
        effects: What shows that the server acts on it.
        launches: All launches of a variant, broken ones too: what a failed one saw is why it failed.
    """
    acted = {effect.name: effect.proof for effect in effects}
    found = []
    for name, values in spec.switches().items():
        for variant in VARIANTS:
            checks = list(_checks(launches[variant]))
            started, inside = _started_with(checks, name), _inside(checks, name)
            found.append(SwitchProof(name, variant, shown(values[variant]), started, inside, acted.get(name)))
    for variant in VARIANTS:
        if spec.merged_args("baseline") != spec.merged_args("candidate"):
            own = spec.variants[variant].serve_args
            found.append(_launched("arguments", variant, shlex.join(own) or "none more", own, launches[variant], acted))
    for variant in VARIANTS:
        if spec.python_of("baseline") != spec.python_of("candidate"):
            text = spec.python_of(variant) or "the interpreter of abharness"
            found.append(_launched("python", variant, text, (), launches[variant], acted))
    for variant in VARIANTS:
        if spec.kernels_of("baseline") != spec.kernels_of("candidate"):
            text = ", ".join(spec.kernels_of(variant)) or "none"
            found.append(_launched("kernels", variant, text, (), launches[variant], acted))
    return found


def _launched(
    name: str,
    variant: Variant,
    declared: str,
    args: Sequence[str],
    launches: Sequence[Launch],
    acted: Mapping[str, str | None],
) -> SwitchProof:
    """A difference that is in the command itself: what the launches were started with is what shows it."""
    if name == "python":
        seen = Counter(launch.record.argv[0] for launch in launches)
    elif name == "kernels":
        seen = Counter(_kernel_folders([launch]) or "none" for launch in launches)
    else:
        seen = Counter("given" if set(args) <= set(launch.record.argv) else "NOT given" for launch in launches)
    return SwitchProof(name, variant, declared, _counted(seen, "no launch"), "", acted.get(name))


def facts(launches: Mapping[Variant, Sequence[Launch]]) -> list[Fact]:
    """What else was looked at: processes, log lines, plugins, caches, who used the GPUs, versions."""
    found: list[Fact] = []
    for name, of in (
        ("processes", _processes),
        ("expected log lines", _log_lines),
        ("log lines that doubt a switch", _doubts),
        ("plugins", _plugins),
        ("kernel folders", _kernel_folders),
        ("reports of plugins", _reports),
        ("compile caches", _caches),
        ("processes on the GPUs", _holders),
        ("versions", _versions),
    ):
        texts = {variant: of(launches[variant]) or "nothing on record" for variant in VARIANTS}
        if len(set(texts.values())) > 1:
            found += [Fact(name, variant, text) for variant, text in texts.items()]
        elif any(of(part) for part in launches.values()):
            found.append(Fact(name, None, texts["baseline"]))
    return found


def _checks(launches: Sequence[Launch]) -> Iterator[EnvironmentCheck]:
    for launch in launches:
        yield from launch.evidence.environment


def _counted(values: Counter[str], nothing: str) -> str:
    if not values:
        return nothing
    total = values.total()
    return ", ".join(f"{value} in {count} of {total}" for value, count in values.most_common())


def _started_with(checks: Sequence[EnvironmentCheck], name: str) -> str:
    values: Counter[str] = Counter()
    for check in checks:
        for one in check.processes:
            if one.state == "ok":
                values[shown(one.started_with.get(name))] += 1
            elif one.state == "unreadable":
                values["unreadable"] += 1
    return _counted(values, "no process was read")


def _inside(checks: Sequence[EnvironmentCheck], name: str) -> str:
    values = Counter(shown(report.environ.get(name)) for check in checks for report in reports_by_pid(check).values())
    absent = dict.fromkeys(check.probe_absent for check in checks if check.probe_absent)
    return _counted(values, "; ".join(absent) or "the probe was not heard")


def _processes(launches: Sequence[Launch]) -> str:
    seen = [one for check in _checks(launches) for one in check.processes]
    states = Counter(one.state for one in seen)
    roles = ", ".join(dict.fromkeys(one.role for one in seen))
    reasons = dict.fromkeys(one.reason for one in seen if one.state == "unreadable" and one.reason)
    told = ", ".join(f"{count} {state}" for state, count in states.most_common())
    return f"{told} ({roles})" + "".join(f"; {reason}" for reason in reasons) if seen else ""


def _log_lines(launches: Sequence[Launch]) -> str:
    matches = (match for check in _checks(launches) for match in check.log_matches.items())
    return _few(list(dict.fromkeys(f"{pattern}: {line or 'no line matches'}" for pattern, line in matches)))


def _doubts(launches: Sequence[Launch]) -> str:
    return _few(list(dict.fromkeys(line for check in _checks(launches) for line in check.log_doubts)))


def _plugins(launches: Sequence[Launch]) -> str:
    found: Counter[str] = Counter()
    for check in _checks(launches):
        inside = {pid: report.plugins for pid, report in reports_by_pid(check).items()}
        for plugin, pids in check.plugins.items():
            found[plugin] += len({*pids, *(pid for pid, names in inside.items() if plugin in names)})
        for plugin, line in check.plugin_failures.items():
            found[f"{plugin} failed ({line})"] += 1
    return ", ".join(f"{plugin} in {count} readings of processes" for plugin, count in found.items())


def _kernel_folders(launches: Sequence[Launch]) -> str:
    return "; ".join(dict.fromkeys(kernel_text(folder) for launch in launches for folder in launch.record.kernels))


def _reports(launches: Sequence[Launch]) -> str:
    return _few([f"{check.when}: {line}" for check in _checks(launches) for line in lines(check)])


def _caches(launches: Sequence[Launch]) -> str:
    caches = [cache for launch in launches for cache in launch.evidence.caches]
    if not caches:
        return ""
    used = sum((cache.files_before or 0) + len(cache.older) for cache in caches)
    before = "all empty before" if not used else f"{used} files that were there before"
    after = sum(cache.files_after or 0 for cache in caches)
    touched = sum(len(launch.evidence.default_caches_touched) for launch in launches)
    places = f"{touched} files at the default places changed" if touched else "default places untouched"
    return f"{len(caches)} directories in {len(launches)} launches: {before}, {after} files after; {places}"


def _holders(launches: Sequence[Launch]) -> str:
    holders = Counter(holder.whose for check in _checks(launches) for holder in check.gpu_holders)
    foreign = dict.fromkeys(
        f"{holder.pid} {holder.name}"
        for check in _checks(launches)
        for holder in check.gpu_holders
        if holder.whose != "ours"
    )
    told = ", ".join(f"{count} {whose}" for whose, count in holders.most_common())
    return told + "".join(f"; {name}" for name in foreign)


def _versions(launches: Sequence[Launch]) -> str:
    versions = dict.fromkeys(
        ", ".join(f"{name} {version}" for name, version in sorted(launch.evidence.server_versions.items()))
        for launch in launches
        if launch.evidence.server_versions
    )
    return " | ".join(versions)


def _few(lines: list[str]) -> str:
    more = len(lines) - MOST_LINES
    return "\n".join([*lines[:MOST_LINES], *([f"and {more} more"] if more > 0 else [])])
