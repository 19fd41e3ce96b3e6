"""Was something compiled inside a measured window? The server's log and the launch's own compile caches, as they grow.

The two witnesses are independent: a log line depends on its wording and on the log level, a new file in a cache does
not; a kernel kept in memory only leaves the line alone. Both are looked at outside the timed window.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from abharness.windows import Compilation

if TYPE_CHECKING:
    from collections.abc import Mapping

LOG_LINES: tuple[str, ...] = (
    # vLLM's monitor of Triton, CuTe DSL and TileLang (jit_monitor.py); by default once a kernel, not once a compilation
    r"(compilation|autotuning) during inference",
    # vLLM's torch.compile backend (backends.py, decorators.py, monitor.py)
    r"Compiling a graph for",
    r"Cache the graph of compile range",
    r"Dynamo bytecode transform time",
    r"torch\.compile (takes|took) ",
    r"saved AOT compiled function",
    # CUDA graphs (gpu_model_runner.py, cudagraph_utils.py, cuda_graph.py)
    r"Capturing CUDA graphs",
    r"Capturing a cudagraph",
    r"Graph capturing finished",
    # torch: recompiling after a guard failed, templates tried against each other, extensions built
    r"Recompiling function",
    r"torch\._dynamo hit config\.",
    r"AUTOTUNE \w+\(",
    r"AUTOTUNE benchmarking takes",
    r"Building extension module",
    # Triton's autotuner where it prints (vLLM makes it do so), FlashInfer's tuner and its builds with ninja
    r"Triton autotuning for function",
    r"\[Auto[Tt]uner\]:? (Tuning|Autotuning process starts)",
    r"Loading JIT ops: ",
    r"^\[\d+/\d+\] .*\b(nvcc|g\+\+|c\+\+|clang)",
)
"""Regular expressions of log lines that tell of compiling, from the sources of these projects."""

CACHES: dict[str, tuple[str, ...]] = {
    "VLLM_CACHE_ROOT": ("torch_compile_cache", "deep_gemm"),
    "TORCHINDUCTOR_CACHE_DIR": ("",),
    "TRITON_CACHE_DIR": ("",),
    "FLASHINFER_WORKSPACE_BASE": ("",),
    "CUDA_CACHE_PATH": ("",),
    "TORCH_EXTENSIONS_DIR": ("",),
}
"""Cache variable -> the folders below it that hold compiled code."""

KEPT = 20
LINE_LENGTH = 400
LOG_LIMIT_BYTES = 16 * 2**20
WALK_LIMIT = 200_000
_PATTERN = re.compile("|".join(f"(?:{pattern})" for pattern in LOG_LINES))
_PASSING = re.compile(r"\.(lock|tmp|log)$|(^|[./_-])tmp[._-]|~$")
"""Files that come and go, or that are no code."""


class Watch:
    """What the log and the caches of one launch held at one moment, to be compared with a later one."""

    def __init__(self, log_path: Path, cache_dirs: Mapping[str, Path]) -> None:
        self._log_path = log_path
        self._cache_dirs = cache_dirs
        self._not_checked: list[str] = []
        self._files = self._look()
        self._offset = _size(log_path)

    def ended(self) -> Compilation:
        """What was added since."""
        lines = self._lines()
        new = sorted(self._look() - self._files)
        return Compilation(
            lines=[line[:LINE_LENGTH] for line in lines[:KEPT]],
            lines_total=len(lines),
            files=new[:KEPT],
            files_total=len(new),
            not_checked=list(dict.fromkeys(self._not_checked)),
        )

    def _lines(self) -> list[str]:
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._offset)
                raw = log.read(LOG_LIMIT_BYTES)
                left = log.seek(0, os.SEEK_END) - self._offset - len(raw)
        except OSError as error:
            self._not_checked.append(f"the server's log: {error}")
            return []
        if left > 0:
            self._not_checked.append(f"the server's log beyond {LOG_LIMIT_BYTES} bytes of one window ({left} more)")
        # Progress bars end their lines with a carriage return; splitlines knows both.
        return [line.strip() for line in raw.decode("utf-8", "replace").splitlines() if _PATTERN.search(line)]

    def _look(self) -> set[str]:
        found: set[str] = set()
        for variable, folders in CACHES.items():
            top = self._cache_dirs.get(variable)
            for part in folders if top is not None else ():
                for folder, _, names in os.walk(Path(top or "", part)):
                    below = os.path.relpath(folder, top)
                    paths = (os.path.normpath(f"{variable}/{below}/{name}") for name in names)
                    found.update(path for path in paths if not _PASSING.search(path))
                    if len(found) > WALK_LIMIT:
                        self._not_checked.append(f"compile caches beyond {WALK_LIMIT} files")
                        return found
        return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
