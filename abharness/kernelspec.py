"""What a spec asks of kernel folders and of plugins' reports -> its faults, in words; nothing is looked up on disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from abharness.reported import condition_problem
from abharness.spec import PROBE_PLUGIN, VARIANTS, ExperimentSpec, kernel_name

Path = tuple[str | int, ...]
Tell = Callable[[Path, str], None]

TAKEN = frozenset(
    {
        "vllm", "torch", "triton", "transformers", "numpy", "flashinfer", "flash_attn", "xformers", "tokenizers",
        "safetensors", "huggingface_hub", "gguf", "kernels", "pydantic", "fastapi", "uvicorn", "openai", "ray", "zmq",
        "setproctitle", "setuptools", "pip", "abharness", PROBE_PLUGIN,
    }
)  # fmt: skip
"""Packages that a server is made of: a folder of such a name would be imported in their stead."""


def check_kernels(spec: ExperimentSpec, tell: Tell) -> None:
    """Names of kernel folders, and whether the environment lets vLLM load them."""
    _check_names(spec.server.kernels, ("server", "kernels"), tell)
    for variant in VARIANTS:
        _check_names(spec.variants[variant].kernels or (), ("variants", variant, "kernels"), tell)
    told: set[Path] = set()
    for variant in VARIANTS:
        env, names = spec.merged_env(variant), [kernel_name(folder) for folder in spec.kernels_of(variant)]
        reports = bool(spec.verify.expect_report.get(variant))
        wanted = [*names, *([PROBE_PLUGIN] if reports else [])]
        if not wanted:
            continue
        why = "kernels" if names else "verify.expect_report"
        for variable in ("PYTHONPATH", "VLLM_PLUGINS"):
            own = variable in spec.variants[variant].env
            path: Path = ("variants", variant, "env", variable) if own else ("server", "env", variable)
            if variable not in env or path in told:
                continue
            value = env[variable]
            if variable == "PYTHONPATH" and value is None:
                tell(
                    path, f"must be unset by this spec, but {why} needs it to bring {', '.join(wanted)}; remove it here"
                )
                told.add(path)
            if variable == "VLLM_PLUGINS" and value is not None:
                named = [part for part in value.split(",") if part]
                missing = [name for name in wanted if name not in named]
                if missing:
                    whole = ",".join([*named, *missing])
                    tell(
                        path,
                        f"{value!r} does not name {', '.join(missing)}, which {why} needs: vLLM would not load it; write "
                        f'"{whole}", or remove it (vLLM then loads every plugin)',
                    )
                    told.add(path)


def _check_names(folders: Sequence[str], path: Path, tell: Tell) -> None:
    seen: dict[str, int] = {}
    for index, folder in enumerate(folders):
        name = kernel_name(folder)
        if not name.isidentifier():
            tell(
                (*path, index),
                f"{folder!r}: {name!r} cannot be the name of a package, and the folder's name is that; allowed are "
                "letters, digits and underscores, no digit first",
            )
        elif name in TAKEN or name in sys.stdlib_module_names:
            tell((*path, index), f"{folder!r}: a package {name!r} would stand in for the one of that name; rename it")
        elif name in seen:
            tell(
                (*path, index), f"{folder!r}: {name!r} is already the name of {folders[seen[name]]!r}; name one of them"
            )
        seen.setdefault(name, index)


def check_reports(spec: ExperimentSpec, tell: Tell) -> None:
    """Conditions of `verify.expect_report`."""
    for variant, plugins in spec.verify.expect_report.items():
        for plugin, conditions in plugins.items():
            for key, text in conditions.items():
                problem = condition_problem(text)
                if problem:
                    tell(("verify", "expect_report", variant, plugin, key), problem)
