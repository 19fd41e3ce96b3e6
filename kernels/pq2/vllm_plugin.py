"""The vLLM general plugin: quantisation config, custom operators and model classes, by the switches of this process.

vLLM calls `register` in every process. It reads the switches, logs the choice with the process id, makes it part of the key
of vLLM's compile cache, and registers. `abharness_report` tells the same, with the counters of each path, to who asks.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from typing import Any

from pq2 import __version__, dispatch, switches
from pq2.errors import PathUnavailable

CACHE_FACTOR = "PQ2_CHOICE"
"""A name of vLLM's table of variables that no environment sets: its value is the resolved choice."""

_registered: tuple[switches.Choice, str] | None = None


def register() -> None:
    """The entry point; once a process, whatever calls it again.

    Raises:
        SwitchError: A PQ2_* variable that is unknown, or has an unknown value.
        PathUnavailable: The switches ask for what cannot run here.
    """
    global _registered
    if _registered is not None:
        return
    import vllm.envs
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import current_platform

    device = "cuda" if current_platform.is_cuda() else str(current_platform.device_name)
    choice = switches.resolved(device)
    if choice.kernel_set != "reference" and importlib.util.find_spec("triton") is None:
        raise PathUnavailable(
            f"{choice.key}: these kernels are written in Triton, which is not installed here; install it, or set "
            f"{switches.KERNELS}=reference"
        )
    _say(f"pq2: {choice.key} (version {__version__}, {device}, pid {os.getpid()})")
    vllm.envs.environment_variables[CACHE_FACTOR] = lambda: f"pq2 {__version__}: {choice.key}"

    from pq2 import hybrid, ops
    from pq2.layers import NAME, Pq2Config

    ops.register(choice)
    Pq2Config.choice = choice
    register_quantization_config(NAME)(Pq2Config)
    hybrid.register()
    _registered = (choice, device)


def _say(text: str) -> None:
    """Log a line; vLLM's API server loads plugins before it configures its log, so there the line is written as it is."""
    logger = logging.getLogger("vllm.pq2")
    if logger.hasHandlers():
        logger.info(text)
    else:
        print(text, file=sys.stderr, flush=True)


def abharness_report() -> dict[str, Any]:
    """What this process runs: the choice, the device, the variables that were given, and the products of each path so far.

    Counts are of calls from Python: what a CUDA graph replays is counted once, when it is captured.
    """
    if _registered is None:
        return {"choice": None}
    choice, device = _registered
    return {
        "version": __version__,
        "choice": choice.key,
        "device": device,
        "given": dict(choice.given),
        "calls": dict(dispatch.CALLS),
    }
