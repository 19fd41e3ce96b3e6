"""A vLLM general plugin that copies the inputs and results of linear layers out of decode steps, when it is asked to.

Without `ABHARNESS_CAPTURE` in the environment it does nothing, and imports no torch. With it, the path of a JSON
configuration, it waits for the first model that a process loads: `capture_recorder` then does the rest.

It is copied into a folder on the server's PYTHONPATH, as the probe is, with what it imports from beside it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from .capture_status import Refused, Status

VARIABLE = "ABHARNESS_CAPTURE"
FUNCTION = "process_weights_after_loading"
"""Called by vLLM's loaders (0.20 to 0.32) for a whole model, when its weights are there; it prepares them."""
_MARK = "_abharness_capture"


def register() -> None:
    """The plugin's entry point. Does nothing unasked, and nothing twice."""
    path = os.environ.get(VARIABLE)
    if not path or getattr(sys, _MARK, False):
        return
    # A child that is forked later inherits both, the mark and what is wrapped.
    setattr(sys, _MARK, True)
    config = json.loads(Path(path).read_text(encoding="utf-8"))
    status = Status(Path(config["status"]))
    try:
        _wrap_loading(config, status)
        status.write()
    except Exception as error:
        # The server goes on without a capture, and the harness tells why.
        status.fault(error)


def _wrap_loading(config: dict[str, Any], status: Status) -> None:
    """Put a function of ours in the place of vLLM's, wherever that was imported to.

    Raises:
        Refused: This vLLM has none of that name.
    """
    try:
        # The package imports every loader, each of which has taken the function by its name.
        from vllm.model_executor.model_loader import utils

        original = getattr(utils, FUNCTION)
    except (ImportError, AttributeError) as error:
        version = getattr(sys.modules.get("vllm"), "__version__", "of an unknown version")
        raise Refused(
            f"vLLM {version} has no {FUNCTION} to be told by that a model is loaded ({error})",
            "use a version from 0.20 to 0.32",
            "server",
        ) from error
    recorders: list[Any] = []

    def process_weights_after_loading(model: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        if recorders:  # a draft model, or the same model whose weights are loaded again
            return original(model, model_config, *args, **kwargs)
        from .capture_recorder import Recorder

        with _told(status):
            recorder = Recorder(config, status, model, model_config)
        recorders.append(recorder)
        with recorder.keeping_weights():
            result = original(model, model_config, *args, **kwargs)
        with _told(status):
            recorder.begin()
        return result

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm" and getattr(module, "__dict__", {}).get(FUNCTION) is original:
            setattr(module, FUNCTION, process_weights_after_loading)


class _told:  # noqa: N801  # a context manager, used as a function
    """Tells of an error on its way up; it ends the start of a server that would be launched for nothing."""

    def __init__(self, status: Status) -> None:
        self.status = status

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            self.status.fault(error)
