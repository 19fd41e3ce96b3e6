"""Launches of two variants -> what makes a whole comparison invalid: failures, findings, order, undeclared differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from abharness.codes import CODES
from abharness.executed import judge_kernels
from abharness.facts import MEASURED_CONFIG, declared_facts, follows_from_arguments, launch_facts
from abharness.judge import judge_caches, judge_check, judge_gpu_pids
from abharness.plan import trace_shapes
from abharness.record import Failure, Finding, Variant
from abharness.reported import judge_reports
from abharness.runs import Launch, Run
from abharness.spec import VARIANTS, ExperimentSpec, kernel_name
from abharness.stats import order_correlation

MOST_NAMED = 6
"""Settings named one by one in a message."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A finding with the place it was found; `name` is what differs, for an undeclared difference."""

    where: str
    finding: Finding
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One variant of a comparison: its run, its completed launches, how many were planned."""

    variant: Variant
    run: Run
    launches: list[Launch]
    planned: int


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """A launch that did not complete, and why."""

    where: str
    variant: Variant
    failure: Failure


def failures(sides: list[Side]) -> tuple[FailedLaunch, ...]:
    """Launches on record that did not complete."""
    records = [launch.record for side in sides for launch in side.run.launches if launch.record.variant == side.variant]
    return tuple(
        FailedLaunch(f"launch {record.launch_index}-{record.variant}", record.variant, record.error)
        for record in records
        if record.error
    )


def failed_launches(sides: list[Side]) -> list[Seen]:
    """Launches that failed, were interrupted, or are not on record; first those that say why."""
    found: list[Seen] = []
    missing: list[Seen] = []
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
            missing.append(
                Seen(side.variant, Finding(code="launch_failed", message=message, hint="rerun with --resume"))
            )
    return [*found, *missing]


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
            findings += judge_gpu_pids(evidence.gpu_pids_seen, evidence.tree_pids, evidence.environment)
            if (kernels := spec.verify.expect_kernels.get(side.variant)) is not None:
                findings += judge_kernels(launch.executed, kernels, [shape.phase for shape in trace_shapes(spec)])
            for check in evidence.environment:
                again = judge_check(
                    check,
                    expected=expected,
                    expect_log=spec.verify.expect_log.get(side.variant, ()),
                    plugins=spec.plugins_of(side.variant),
                    kernels=record.kernels,
                    caches={cache.variable: cache.path for cache in evidence.caches},
                    gpus=evidence.gpu_uuids,
                )
                again += judge_reports(check, spec.verify.expect_report.get(side.variant, {}))
                findings += [*again, *check.findings]
            missing = {"before_load", "after_load"} - {check.when for check in evidence.environment}
            if missing:
                text = f"no environment verification is on record for {' and '.join(sorted(missing))}"
                findings.append(Finding(code="env_unverifiable", message=text))
            found += [Seen(where, finding) for finding in (*findings, *record.findings)]
    if spec.python_of("baseline") == spec.python_of("candidate"):
        found += _unheard([launch for side in sides for launch in side.launches])
    return [item for index, item in enumerate(found) if item not in found[:index]]


def _unheard(launches: Sequence[Launch]) -> list[Seen]:
    """Launches whose second witness is silent where it speaks in others: one interpreter loads the probe or does not."""
    asked = [
        (launch, any(check.probes for check in launch.evidence.environment))
        for launch in launches
        if all(check.probe_absent is None for check in launch.evidence.environment)
    ]
    silent = [launch.record for launch, heard in asked if not heard]
    if not silent or len(silent) == len(asked):
        return []
    message = "the probe was heard in other launches of the same interpreter, and not here"
    hint = "something keeps it out: look at PYTHONPATH and VLLM_PLUGINS of the processes, and at server.log"
    finding = Finding(code="env_unverifiable", message=message, hint=hint)
    return [Seen(f"launch {record.launch_index}-{record.variant}", finding) for record in silent]


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
    declared, had = [[*map(kernel_name, spec.kernels_of(record.variant))], [one.name for one in record.kernels]]
    if declared != had:
        text = f"kernels: declared {', '.join(declared) or 'none'}, launched with {', '.join(had) or 'none'}"
        findings.append(Finding(code="plugin_not_active", message=text, hint="the record contradicts its own spec"))
    return expected, findings


ORDER_LIMIT = 0.4
"""Correlation of variant and time from which drift and variant cannot be told apart. `ab` has 0.87 and more; `abba` has
0 at even numbers of launches and at most 0.1 at odd ones; alternating pairs all in one order have 0.45 with two launches
a variant and 0.29 with three."""


def confounded(order: Sequence[Variant]) -> float | None:
    """The correlation of variant and time of launches in this order, where it is too large to judge by; else None."""
    one, two = ([place for place, side in enumerate(order) if side == variant] for variant in VARIANTS)
    correlation = order_correlation(one, two)
    return correlation if min(len(one), len(two)) > 1 and abs(correlation) >= ORDER_LIMIT else None


def time_positions(sides: list[Side]) -> dict[int, int]:
    """Launch index -> place in time among the completed launches; empty where the variants come from two runs.

    A launch that `--resume` ran again stands where it really ran, not where it was planned.
    """
    if sides[0].run.path != sides[1].run.path:
        return {}
    records = [launch.record for side in sides for launch in side.launches]
    ordered = sorted(records, key=lambda record: (record.started_at, record.launch_index))
    return {record.launch_index: place for place, record in enumerate(ordered)}


def order_findings(sides: list[Side], spec: ExperimentSpec) -> list[Seen]:
    """Orders of launches that confound the variants with time."""
    places = time_positions(sides)
    ran = {places[launch.record.launch_index]: side.variant for side in sides for launch in side.launches if places}
    order = [ran[place] for place in sorted(ran)]
    if sides[0].run.path != sides[1].run.path:
        message = "the variants come from two runs: whatever changed between them counts as a difference"
        hint = "run both variants in one experiment"
    elif (correlation := confounded(order)) is not None:
        sequence = " ".join(variant[0] for variant in order)
        message = (
            f"design.order is {spec.design.order}, and the launches as they ran ({sequence}) correlate "
            f"variant with time: {correlation:+.2f}, limit {ORDER_LIMIT}; drift counts as a difference"
        )
        hint = "use another seed or design.order abba" if spec.design.order == "random" else "use design.order abba"
        if spec.design.order == "abba":
            hint = "launches were run again later: start a new run"
    else:
        return []
    return [Seen("order", Finding(code="order_confounded", message=message, hint=hint))]


def differences(sides: list[Side], spec: ExperimentSpec) -> list[Seen]:
    """Undeclared differences: between the variants, and between the launches of one variant."""
    launches = [launch for side in sides for launch in side.launches]
    facts = [launch_facts(launch) for launch in launches]
    declared = declared_facts(spec)
    follows: list[str] = []
    found: list[Seen] = []

    def tell(name: str, text: str, where: str) -> None:
        found.append(Seen(where, Finding(code="undeclared_difference", message=f"{name}: {text}"), name))

    if any(launch.server_info is None for launch in launches):
        found += _no_server_info(launches)
    for name in sorted(_comparable(launches, facts)):
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


def _comparable(launches: Sequence[Launch], facts: Sequence[dict[str, str]]) -> set[str]:
    """Names of facts, less those of a kind that is unknown for one of the launches: unknown is no difference.

    So it is with the power limit of each GPU.
    """
    names = {name for fact in facts for name in fact}
    if any(launch.server_info is None for launch in launches):
        names = {name for name in names if not name.startswith(("config.", "vllm_env."))}
    if not all(any(name.startswith("module.") for name in fact) for fact in facts):
        names = {name for name in names if not name.startswith(("module.", "inside.", "report."))}
    return {name for name in names if not name.startswith("power_limit.") or all(name in fact for fact in facts)}


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
    return [Seen("baseline and candidate", Finding(code="undeclared_difference", message=message), "server_info")]


def _some(values: Iterable[str | None]) -> str:
    shown = sorted("(absent)" if value is None else repr(value) for value in values)
    return " and ".join(text if len(text) <= 100 else f"{text[:100]}…" for text in shown[:3])


def identity_difference(one: Launch, other: Launch) -> str | None:
    """The first fact in which two launches differ: server, machine, or the work of a cell that both measured.

    A cell or workload that only one of them has is no difference.
    """
    ours, theirs = launch_facts(one), launch_facts(other)
    names = _comparable([one, other], [ours, theirs])
    for name in sorted(name for name in names if not MEASURED_CONFIG.search(name)):
        shared = name.split(" repeat ")[0]
        lacking = [not any(known.split(" repeat ")[0] == shared for known in facts) for facts in (ours, theirs)]
        if shared.startswith(("prompts.", "questions.")) and any(lacking):
            continue
        if ours.get(name) != theirs.get(name):
            return f"{name} is {_some([theirs.get(name)])} there and {_some([ours.get(name)])} here"
    return None
