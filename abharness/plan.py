"""ExperimentSpec -> Plan: the launches in order, each with its final argv and environment. Pure and printable.

What the machine contributes (interpreters, model path, port, folders, the caller's variables) comes in as a `Host`, so
the same spec and host give the same plan, and `--dry-run` prints exactly what `run` would start.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from abharness.record import Variant
from abharness.redaction import redact, redact_argv
from abharness.spec import (
    CACHE_VARIABLES,
    PROBE_PLUGIN,
    PROBE_VARIABLE,
    SENTINEL_VARIABLE,
    VARIANTS,
    DecodeWorkload,
    DesignSpec,
    ExperimentSpec,
    Gsm8kWorkload,
    PrefillWorkload,
)
from abharness.witnesses import KernelFolder

PROFILER_FLAG = "--profiler-config"

TRACE = "trace"
"""Stands for the workload's name in the shapes of traced phases."""

BASE_VARIABLES: tuple[str, ...] = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ",
    "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT",
    "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy",
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "OPENBLAS_CORETYPE",
)  # fmt: skip
"""The declared base of a server's environment: taken from the caller where set, recorded, equal in both variants."""

SWITCH_PREFIXES = (
    "VLLM", "TORCH", "PYTORCH", "TRITON", "CUDA", "CUBLAS", "CUDNN", "FLASHINFER", "NCCL", "PQ2", "INDUCTOR",
    "OMP_", "MKL_", "KMP_", "GOMP", "LD_PRELOAD", "NVIDIA", "PYTHON", "HF_", "TOKENIZERS", "RAY_",
)  # fmt: skip
"""Names that change what a server does: shown by `verify-env`, reported when the caller had one that was not passed."""


@dataclass(frozen=True, slots=True)
class Host:
    """What this machine contributes to a plan.

    Attributes:
        pythons: Interpreter of each variant.
        model: Path or hub name as the server gets it.
        port: Loopback port of every launch of the run.
        scratch: Folder for caches and temporary files, without symlinks; short, because sockets live below it.
        probe_site: Folder that brings the probe to any interpreter.
        run_token: Unique text of this run; sentinels and served model names are made from it.
        environ: The caller's environment.
        kernels: Kernel folders of each variant.
        kernel_sites: Folder that brings them to any interpreter, by variant; empty where no variant has any.
    """

    pythons: Mapping[Variant, Path]
    model: str
    port: int
    scratch: Path
    probe_site: Path
    run_token: str
    environ: Mapping[str, str]
    kernels: Mapping[Variant, tuple[KernelFolder, ...]] = field(default_factory=dict)
    kernel_sites: Mapping[Variant, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """One server lifetime to come.

    Attributes:
        index: From 0, in order of time.
        expected: Variables the processes must show; None means must be unset.
        inherited: Names in `env` that came from the caller.
        not_passed: Switch-like names the caller has and this server is not given.
        cache_dirs: Cache variable -> this launch's own directory.
        tmp_dir: `TMPDIR` of the launch.
        probe_dir: Where its processes report about themselves.
        probe_absent: Why the probe cannot be brought into it, or None.
        kernels: The kernel folders that it gets.
        trace_dir: Where its profiler writes; nothing is there unless the spec asks for a trace.
        log_path: Where it writes its log while it runs: a results folder may be on a slow disk, and a server that
            waits for its log answers late.
    """

    index: int
    variant: Variant
    argv: tuple[str, ...]
    env: Mapping[str, str]
    expected: Mapping[str, str | None]
    inherited: tuple[str, ...]
    not_passed: tuple[str, ...]
    served_model_name: str
    sentinel: str
    port: int
    cache_dirs: Mapping[str, Path]
    tmp_dir: Path
    probe_dir: Path
    probe_absent: str | None
    kernels: tuple[KernelFolder, ...]
    trace_dir: Path
    log_path: Path

    @property
    def label(self) -> str:
        """Folder name of the launch."""
        return f"{self.index}-{self.variant}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The launches of a run in order, and the hash of the configuration they come from."""

    config_hash: str
    launches: tuple[PlannedLaunch, ...]


def launch_order(design: DesignSpec) -> list[Variant]:
    """Variants in order of time.

    `abba` alternates the order within successive pairs, so that a linear drift cancels out.
    """
    count = design.launches_per_variant
    if design.order == "ab":
        return [VARIANTS[0]] * count + [VARIANTS[1]] * count
    draw = random.Random(design.seed)
    order: list[Variant] = []
    for pair in range(count):
        swap = pair % 2 == 1 if design.order == "abba" else draw.random() < 0.5
        order += reversed(VARIANTS) if swap else VARIANTS
    return order


def config_hash(spec: ExperimentSpec, kernels: Mapping[Variant, Sequence[KernelFolder]] | None = None) -> str:
    """Hash of everything that changes what is run: the spec without the question's wording, and what its kernels are.

    Args:
        spec: The experiment.
        kernels: The kernel folders of each variant: their contents count, not where they lie.
    """
    data = spec.model_dump(mode="json", exclude={"question": True, "server": {"ready_timeout_s", "kernels"}})
    for variant in data["variants"].values():
        del variant["kernels"]
    if not spec.verify.expect_report:
        del data["verify"]["expect_report"]  # so that runs of versions without this key can be resumed
    if kernels and any(kernels.values()):
        data["kernels"] = {variant: {one.name: one.sha256 for one in kernels[variant]} for variant in VARIANTS}
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]


def recorded_hash(spec: Mapping[str, Any]) -> str:
    """Hash of a spec as it stands on record, secrets hidden: it shows whether the record was changed since."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()


def build_plan(spec: ExperimentSpec, host: Host) -> Plan:
    """Resolve every launch of an experiment."""
    launches = [plan_launch(spec, host, index, variant) for index, variant in enumerate(launch_order(spec.design))]
    return Plan(config_hash(spec, host.kernels), tuple(launches))


def plan_launch(spec: ExperimentSpec, host: Host, index: int, variant: Variant) -> PlannedLaunch:
    """Resolve one launch."""
    sentinel = f"{host.run_token}-{index}"
    served_model_name = f"abharness-{sentinel}"
    home = host.scratch / str(index)
    cache_dirs = {name: home / folder for name, folder in CACHE_VARIABLES.items()}
    declared = spec.merged_env(variant)
    wanted = [name for name in (*BASE_VARIABLES, *spec.server.inherit) if name in host.environ]
    inherited = tuple(sorted({name for name in wanted if name not in declared}))
    # The sentinel stands first: a title written over the arguments runs into the environment from that side.
    env = {SENTINEL_VARIABLE: sentinel, **{name: host.environ[name] for name in inherited}}
    env |= {
        # Renamed processes keep their environment block readable.
        "SPT_NOENV": "1",
        PROBE_VARIABLE: str(home / "probe"),
        # Gives /server_info, which tells the resolved configuration; it changes nothing but routes.
        "VLLM_SERVER_DEV_MODE": "1",
        "TMPDIR": str(home / "tmp"),
        "PYTHONUNBUFFERED": "1",
        # vLLM would otherwise report its usage over the network while it is being measured.
        "VLLM_NO_USAGE_STATS": "1",
    }
    env |= {name: str(path) for name, path in cache_dirs.items()}
    env |= {name: value for name, value in declared.items() if value is not None}
    for name, value in declared.items():
        if value is None:
            env.pop(name, None)
    absent = _probe_absent(declared)
    # Both variants get a folder where one has kernels, so that their paths do not differ.
    sites = [host.kernel_sites.get(variant), host.probe_site if absent is None else None]
    if any(sites):
        env["PYTHONPATH"] = os.pathsep.join(str(part) for part in (env.get("PYTHONPATH"), *sites) if part)
    expected = {**declared, **({"PYTHONPATH": env["PYTHONPATH"]} if declared.get("PYTHONPATH") is not None else {})}
    if "PATH" not in declared:
        env["PATH"] = f"{host.pythons[variant].parent}:{env.get('PATH', '/usr/bin:/bin')}"
    not_passed = sorted(n for n in host.environ if n.startswith(SWITCH_PREFIXES) and n not in env and n not in declared)
    argv = (
        str(host.pythons[variant]), "-m", "vllm.entrypoints.cli.main", "serve", host.model,
        "--host", "127.0.0.1", "--port", str(host.port), "--served-model-name", served_model_name,
        *spec.merged_args(variant), *_profiler_args(spec, home / "traces"),
    )  # fmt: skip
    return PlannedLaunch(
        index=index,
        variant=variant,
        argv=argv,
        env=env,
        expected=expected,
        inherited=inherited,
        not_passed=tuple(not_passed),
        served_model_name=served_model_name,
        sentinel=sentinel,
        port=host.port,
        cache_dirs=cache_dirs,
        tmp_dir=home / "tmp",
        probe_dir=home / "probe",
        probe_absent=absent,
        kernels=host.kernels.get(variant, ()),
        trace_dir=home / "traces",
        log_path=home / "server.log",
    )


def _profiler_args(spec: ExperimentSpec, folder: Path) -> tuple[str, ...]:
    """Makes the profiler available to a launch that is to be traced.

    vLLM makes the profiler only when it is first started, so the measured load runs without it.
    """
    if spec.traced is None:
        return ()
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(folder),
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
    }
    return (PROFILER_FLAG, json.dumps(config))


def _probe_absent(declared: Mapping[str, str | None]) -> str | None:
    """Why the declared environment keeps the probe out, or None."""
    if "PYTHONPATH" in declared and declared["PYTHONPATH"] is None:
        return "PYTHONPATH is declared as unset"
    named = declared.get("VLLM_PLUGINS")
    if named is not None and PROBE_PLUGIN not in named.split(","):
        return f"VLLM_PLUGINS={named!r} does not name {PROBE_PLUGIN}"
    return None


def default_caches(env: Mapping[str, str]) -> list[Path]:
    """Where a server with this environment would keep compiled code if the cache variables were not honoured."""
    home = Path(env.get("HOME", "/root"))
    user = env.get("USER") or env.get("LOGNAME") or "root"
    caches = [home / ".cache", *([Path(env["XDG_CACHE_HOME"])] if env.get("XDG_CACHE_HOME") else [])]
    below = [cache / name for cache in caches for name in ("vllm", "flashinfer", "torch_extensions", "torch/inductor")]
    own = [home / ".triton", home / ".nv/ComputeCache"]
    return [*below, *own, Path(tempfile.gettempdir()) / f"torchinductor_{user}"]


@dataclass(frozen=True, slots=True)
class Shape:
    """One cell or traced phase to run: a workload's name with one of its shapes."""

    workload: str
    kind: Literal["decode", "prefill"]
    input_len: int
    output_len: int
    max_concurrency: int
    num_prompts: int
    num_warmups: int
    repeats: int

    @property
    def label(self) -> str:
        """Text that names the cell and seeds its prompts."""
        return f"{self.workload} input_len={self.input_len} output_len={self.output_len} x{self.max_concurrency}"

    @property
    def phase(self) -> str:
        """Name of a traced phase: `decode[16]` decodes 16 rows, `prefill[2048]` processes prompts of 2,048 tokens."""
        return f"{self.kind}[{self.max_concurrency if self.kind == 'decode' else self.input_len}]"


def shapes(workload: DecodeWorkload | PrefillWorkload) -> list[Shape]:
    """The cells of a workload, in the order they are run."""
    if isinstance(workload, DecodeWorkload):
        return [
            Shape(
                workload.name,
                "decode",
                workload.input_len,
                workload.output_len,
                concurrency,
                workload.num_prompts or 2 * concurrency,
                concurrency if workload.num_warmups is None else workload.num_warmups,
                workload.repeats,
            )
            for concurrency in workload.max_concurrency
        ]
    return [
        Shape(
            workload.name,
            "prefill",
            input_len,
            1,
            workload.max_concurrency,
            workload.num_prompts,
            workload.num_warmups,
            workload.repeats,
        )
        for input_len in workload.input_lens
    ]


DEFAULT_TRACE_LEN = 128
"""Prompt tokens of traced decode phases where no workload says how many."""

TRACE_MARGIN_STEPS = 8
"""Decode steps of a traced request beyond those asked for: requests that are sent together do not start in one step."""

TRACED_PREFILLS = 2
"""Prompts of a traced prefill phase."""


def trace_shapes(spec: ExperimentSpec) -> list[Shape]:
    """The phases of the trace a spec asks for, decode first; none where it asks for no trace."""
    trace = spec.traced
    if trace is None:
        return []
    decode = [workload for workload in spec.workloads if isinstance(workload, DecodeWorkload)]
    lens = [n for workload in spec.workloads if isinstance(workload, PrefillWorkload) for n in workload.input_lens]
    rows = [n for workload in decode for n in workload.max_concurrency]
    rows = rows or [workload.max_concurrency for workload in spec.workloads if isinstance(workload, Gsm8kWorkload)]
    input_len = trace.input_len or (decode[0].input_len if decode else DEFAULT_TRACE_LEN)
    lens = lens or [input_len]
    output_len = trace.steps + TRACE_MARGIN_STEPS
    traced_rows = sorted({min(rows), max(rows)} if rows else ()) if trace.decode is None else trace.decode
    traced_lens = sorted({min(lens), max(lens)}) if trace.prefill is None else trace.prefill
    shapes = [Shape(TRACE, "decode", input_len, output_len, many, many, many, 1) for many in traced_rows]
    return [*shapes, *(Shape(TRACE, "prefill", length, 1, 1, TRACED_PREFILLS, 1, 1) for length in traced_lens)]


def kernel_text(folder: KernelFolder) -> str:
    """A kernel folder in words: name, the beginning of its hash, and the commit that it is or is not."""
    commit = "in no repository" if folder.git_commit is None else f"commit {folder.git_commit[:12]}"
    return f"{folder.name} {folder.sha256[:12]} ({commit}{' and changes' if folder.git_dirty else ''})"


def describe(spec: ExperimentSpec, plan: Plan) -> str:
    """The plan as `--dry-run` prints it."""
    lines = [
        f"experiment {spec.experiment}  config {plan.config_hash}",
        f"order      {' '.join(launch.variant for launch in plan.launches)}  ({spec.design.order})",
    ]
    if spec.is_aa:
        lines.append("A/A        the baseline runs against itself")
    for name, values in spec.switches().items():
        shown = "   ".join(
            f"{variant}: {'(must be unset)' if value is None else json.dumps(value)}"
            for variant, value in values.items()
        )
        lines.append(f"switch     {name}   {shown}")
    for variant, folders in {launch.variant: launch.kernels for launch in plan.launches}.items():
        lines += [f"kernels    {variant}: {kernel_text(folder)} from {folder.path}" for folder in folders]
    for launch in plan.launches:
        lines += ["", f"launch {launch.label}", f"  command  {shlex.join(redact_argv(launch.argv))}", "  environment"]
        lines += [f"    {name}={value}" for name, value in sorted(redact(launch.env).items())]
        if launch.not_passed:
            lines.append(f"  not passed on from this shell: {', '.join(launch.not_passed)}")
    lines += ["", "workloads of every launch, in this order"]
    lines += [f"  {workload.model_dump_json(exclude_none=True)}" for workload in spec.workloads]
    if traced := trace_shapes(spec):
        lines += ["", "traced after them, in this order"]
        lines += [f"  {shape.phase} ({shape.input_len} prompt tokens a request)" for shape in traced]
    return "\n".join(lines) + "\n"
