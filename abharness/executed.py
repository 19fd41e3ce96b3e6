"""Traced phases -> which kernels ran in the steps that count, whether those had to, and how the variants differ; pure.

A phase counts only the steps that are what its name says: a decode phase those that decode all its rows together, a
prefill phase those that only process prompts. What a trace does not show whole is unknown, which is neither run nor
not run.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from abharness.kernels import Differing, KernelUse, differing, shorten, uses
from abharness.record import Finding, TracedPhase, Variant
from abharness.spec import VARIANTS, KernelExpectation, KernelPatterns
from abharness.timeline import Trace

NAMED_KERNELS = 5
"""Kernels that are named in a message."""

PROVING_LAUNCHES = 2
PROVING_LAUNCHES_UNSTABLE = 4
"""Launches of each variant from which kernels that differ prove something: see `PhaseKernels.proves`."""

RAN = ("kernel", "op")
"""Kinds of rows that say what a variant computes with; copies and memsets do not."""


@dataclass(frozen=True, slots=True)
class Executed:
    """What is known of one traced phase of one launch.

    Attributes:
        phase: What was sent, and when.
        traces: The kernel table of each process that ran the model; empty where `absent` says why.
        absent: Why nothing is known, or None.
    """

    phase: TracedPhase
    traces: tuple[Trace, ...] = ()
    absent: str | None = None

    @property
    def problem(self) -> str | None:
        """Why not everything that ran is known; None where it is."""
        return self.absent or next((trace.problem for trace in self.traces if trace.problem), None)

    @property
    def step_problem(self) -> str | None:
        """Why it is not known what ran in the steps that count; None where it is."""
        if self.problem:
            return self.problem
        for trace in self.traces:
            if trace.unsegmented:
                return trace.unsegmented
            if not self._uses(trace):
                wanted = f"decodes {self.phase.rows} rows" if self.phase.kind == "decode" else "only processes prompts"
                return f"none of its {len(trace.steps)} steps {wanted}"
        return None

    def by_process(self, *, every_step: bool = False) -> list[dict[str, KernelUse]]:
        """Of each process, the kernels of the steps that count, longest first; `every_step`: of the whole trace."""
        return [self._uses(trace, every_step=every_step) for trace in self.traces]

    def _uses(self, trace: Trace, *, every_step: bool = False) -> dict[str, KernelUse]:
        found = uses(trace) if every_step else uses(trace, self.phase.kind, rows=self.phase.rows)
        return {name: use for name, use in found.items() if use.kind in RAN}


def judge_kernels(executed: Sequence[Executed], expected: KernelExpectation, asked: Sequence[str]) -> list[Finding]:
    """Compare what ran in one launch with what had to.

    Args:
        executed: Its traced phases.
        expected: What had to run, and what must not have.
        asked: Names of the phases that were to be traced: what ran in one that is missing is unknown.

    Returns:
        `kernel_mismatch` (fatal) where a required kernel did not run or a forbidden one did, `kernels_unverifiable`
        where the traces cannot show it.
    """
    most = max((len(one.traces) for one in executed), default=0)
    whole = [_of_all_processes(one, most) for one in executed]
    missing = [name for name in asked if name not in {one.phase.name for one in executed}]
    judged = [_judge("any phase", whole, expected, missing, every_step=True)]
    for name, patterns in expected.phases.items():
        named = [one for one in whole if name in (one.phase.name, one.phase.kind)]
        judged += [_judge(one.phase.name, [one], patterns, (), every_step=False) for one in named]
        lacking = [phase for phase in missing if name in (phase, phase.partition("[")[0])]
        judged.append(([], [f"{phase} was not traced" for phase in lacking or ([] if named else [name])]))
    wrong, unknown = ([text for part in judged for text in part[kind]] for kind in (0, 1))
    findings = []
    if wrong:
        hint = (
            "the kernels are not those that the switch promises: look at kernels/ of the launch with `abharness trace`"
        )
        findings.append(Finding(code="kernel_mismatch", message="; ".join(wrong), hint=hint, fatal=True))
    if unknown:
        hint = "see traces/ of the launch and the server's log; trace longer (trace.steps) or other phases"
        message = f"which kernels ran is not known: {'; '.join(dict.fromkeys(unknown))}"
        findings.append(Finding(code="kernels_unverifiable", message=message, hint=hint))
    return findings


def _of_all_processes(one: Executed, most: int) -> Executed:
    """The phase; unknown in part where another phase has the tables of more processes."""
    if one.absent is not None or len(one.traces) == most:
        return one
    return replace(one, absent=f"{len(one.traces)} of {most} processes have a table")


def _judge(
    where: str, executed: Sequence[Executed], patterns: KernelPatterns, missing: Sequence[str], *, every_step: bool
) -> tuple[list[str], list[str]]:
    """What is wrong, and what is not known, of some phases together; of those that are `missing` nothing is known."""
    problems = [
        f"{one.phase.name}: {problem}"
        for one in executed
        if (problem := one.problem if every_step else one.step_problem) is not None
    ]
    problems += [f"{name} was not traced" for name in missing]
    ran = _joined(executed, every_step=every_step)
    wrong: list[str] = []
    unknown: list[str] = []
    for pattern in patterns.require:
        # Every process that runs the model must have run it.
        if ran and all(any(re.search(pattern, name) for name in names) for names in ran):
            continue
        if problems:
            unknown.append(f"{pattern!r} in {where} ({problems[0]})")
        else:
            wrong.append(f"{pattern!r} did not run in {where}; there ran {_some(ran[0])}")
    for pattern in patterns.forbid:
        found = next((name for names in ran for name in names if re.search(pattern, name)), None)
        if found is not None:
            wrong.append(f"{pattern!r} is forbidden and ran in {where}: {shorten(found)}")
        elif problems:
            unknown.append(f"{pattern!r} in {where} ({problems[0]})")
    return wrong, unknown


def _joined(executed: Sequence[Executed], *, every_step: bool) -> list[list[str]]:
    """Names by process over some phases, longest first; the nth process of every phase is the same one."""
    joined: list[list[str]] = []
    for one in executed:
        for place, found in enumerate(one.by_process(every_step=every_step)):
            if place == len(joined):
                joined.append([])
            joined[place] += [name for name in found if name not in joined[place]]
    return joined


def _some(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(shorten(name) for name in names))
    more = f", ... ({len(shown)} in all)" if len(shown) > NAMED_KERNELS else ""
    return ", ".join(shown[:NAMED_KERNELS]) + more if shown else "nothing"


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel of a traced phase; per step, the median over a variant's launches, None where it did not run."""

    name: str
    calls: dict[Variant, float | None]
    time_s: dict[Variant, float | None]


@dataclass(frozen=True, slots=True)
class PhaseKernels:
    """One traced phase of both variants.

    Attributes:
        name: Of the phase.
        on_device: False: there was no device activity, and the rows are operators of the CPU.
        launches: By variant, launches whose trace shows the phase.
        unknown: By variant, why some of its launches do not; each once.
        busy_s: By variant, time of all kernels of a step together, seconds: the median over its launches.
        rows: Every kernel, longest first.
        only: By variant, the kernels that ran in each of its launches and in none of the other's, longest first.
        unstable: Kernels that ran in some launches of a variant and not in others.
    """

    name: str
    on_device: bool
    launches: dict[Variant, int]
    unknown: dict[Variant, tuple[str, ...]]
    busy_s: dict[Variant, float | None]
    rows: tuple[KernelRow, ...]
    only: dict[Variant, tuple[str, ...]]
    unstable: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether some kernel tells the variants apart."""
        return any(self.only.values())

    @property
    def proves(self) -> bool:
        """Whether the difference is one of the variants, and not of launches.

        A kernel that a library picks by chance in each launch would tell two variants of n launches apart once in
        2^(2n-1) times. Two launches of each are needed to see that none is picked so, and four where some are.
        """
        needed = PROVING_LAUNCHES if not self.unstable else PROVING_LAUNCHES_UNSTABLE
        return self.compared and self.differs and min(self.launches.values()) >= needed

    @property
    def compared(self) -> bool:
        """Whether both variants show what they ran, in every one of their launches."""
        return all(self.launches.values()) and not any(self.unknown.values())


def compare_kernels(sides: Mapping[Variant, Sequence[Sequence[Executed]]]) -> tuple[PhaseKernels, ...]:
    """Compare what ran in the traced phases.

    Args:
        sides: By variant, of each launch its phases.
    """
    names = dict.fromkeys(one.phase.name for launches in sides.values() for phases in launches for one in phases)
    return tuple(_phase(name, sides) for name in names)


def _phase(name: str, sides: Mapping[Variant, Sequence[Sequence[Executed]]]) -> PhaseKernels:
    shown: dict[Variant, list[dict[str, KernelUse]]] = {}
    unknown: dict[Variant, tuple[str, ...]] = {}
    on_device = True
    for variant in VARIANTS:
        of_launches = [next((one for one in phases if one.phase.name == name), None) for phases in sides[variant]]
        problems = ["not traced" if one is None else one.step_problem for one in of_launches]
        known = [one for one, problem in zip(of_launches, problems, strict=True) if one is not None and not problem]
        on_device = on_device and all(trace.on_device for one in known for trace in one.traces)
        shown[variant] = [_over_processes(one) for one in known]
        unknown[variant] = tuple(dict.fromkeys(problem for problem in problems if problem))
    told: Differing = differing(shown["baseline"], shown["candidate"])
    every = dict.fromkeys(kernel for launches in shown.values() for found in launches for kernel in found)
    rows = [
        KernelRow(
            kernel,
            {variant: _median(shown[variant], kernel, "per_step") for variant in VARIANTS},
            {variant: _median(shown[variant], kernel, "per_step_s") for variant in VARIANTS},
        )
        for kernel in every
    ]
    rows.sort(key=lambda row: -max(time or 0.0 for time in row.time_s.values()))
    busy = {
        variant: [sum(use.per_step_s or 0.0 for use in found.values()) for found in shown[variant]]
        for variant in VARIANTS
    }
    return PhaseKernels(
        name=name,
        on_device=on_device,
        launches={variant: len(shown[variant]) for variant in VARIANTS},
        unknown=unknown,
        busy_s={variant: statistics.median(part) if part else None for variant, part in busy.items()},
        rows=tuple(rows),
        only={
            "baseline": tuple(row.name for row in rows if row.name in told.only_a),
            "candidate": tuple(row.name for row in rows if row.name in told.only_b),
        },
        unstable=told.unstable,
    )


def _over_processes(one: Executed) -> dict[str, KernelUse]:
    """The kernels of one launch: those of its first process, and what only others ran."""
    found: dict[str, KernelUse] = {}
    for part in one.by_process():
        found = {**part, **found}
    return found


def _median(launches: Sequence[Mapping[str, KernelUse]], kernel: str, field: str) -> float | None:
    known = [value for found in launches if kernel in found and (value := getattr(found[kernel], field)) is not None]
    return statistics.median(known) if known else None
