"""Where a run was made: host, processor, GPU, packages, git commit. Plain data for the run record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import psutil

from abharness import __version__, git
from abharness.telemetry import Gpu


def own_version() -> str:
    """Version of abharness."""
    return __version__


def collect(gpu: Gpu) -> dict[str, Any]:
    """Facts about this machine and working directory; what cannot be known is None."""
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "client_packages": {
            name: _version(name) for name in ("aiohttp", "openai", "datasets", "scipy", "nvidia-ml-py")
        },
        "gpu": gpu.describe(),
        "git": git.state(Path.cwd()),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
