"""The fake server's profiler: what it was sent between start and stop -> a trace as vLLM's torch profiler writes it."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

STEP_US = 100.0


class Profiler:
    """One server's profiler.

    Attributes:
        folder: Where traces go, or None where the server was started without a profiler.
    """

    def __init__(self, flags: dict[str, str], fault: dict[str, Any], kernel: str) -> None:
        config = json.loads(flags.get("--profiler-config") or "{}")
        self.folder = Path(config["torch_profiler_dir"]) if config.get("profiler") == "torch" else None
        self._fault = fault
        self._kernel = kernel
        self._requests: list[tuple[int, int]] | None = None
        self._written = 0

    def start(self) -> None:
        self._requests = []

    def request(self, prompt_tokens: int, output_tokens: int) -> None:
        """Note one completion; it is forgotten while nothing is profiled."""
        if self._requests is not None:
            self._requests.append((prompt_tokens, output_tokens))

    def stop(self) -> None:
        """Write the trace."""
        if self._requests is None or self.folder is None or self._fault.get("missing"):
            return
        requests, self._requests = self._requests, None
        self._written += 1
        self.folder.mkdir(parents=True, exist_ok=True)
        for rank in range(int(self._fault.get("ranks", 1))):
            raw = json.dumps(
                {"schemaVersion": 1, "traceEvents": self._events(requests, rank), "traceName": "fake"}
            ).encode()
            if self._fault.get("truncated"):
                raw = raw[: len(raw) * 2 // 3]
            path = self.folder / f"rank{rank}.{self._written:019d}.pt.trace.json.gz"
            path.write_bytes(b"not a trace" if self._fault.get("garbage") else gzip.compress(raw, 1))

    def _steps(self, requests: list[tuple[int, int]]) -> list[tuple[str, str]]:
        """Annotation and kind of each step: all requests prefill together and decode together, as far as each goes."""
        if all(output == 1 for _, output in requests):
            steps = [(f"execute_context_1({prompt})_generation_0(0)", "prefill") for prompt, _ in requests]
        else:
            tokens = sum(prompt for prompt, _ in requests)
            steps = [(f"execute_context_{len(requests)}({tokens})_generation_0(0)", "prefill")]
            for done in range(1, max(output for _, output in requests)):
                rows = sum(output > done for _, output in requests) - int(self._fault.get("rows_short", 0))
                steps.append((f"execute_context_0(0)_generation_{rows}({rows})", "decode"))
        return [*steps, ("execute_context_0(0)_generation_0(0)", "idle")]

    def _events(self, requests: list[tuple[int, int]], rank: int) -> list[dict[str, Any]]:
        on_gpu = "FAKE_GPU_DIR" in os.environ and not self._fault.get("cpu_only")
        events: list[dict[str, Any]] = []
        correlation = 0
        for place, (name, kind) in enumerate(self._steps(requests)):
            at = 1e9 + place * STEP_US
            if not self._fault.get("no_steps"):
                events.append(_event("user_annotation", name, at, 50.0))
            if kind == "idle":
                continue
            ran = self._fault.get("kernels", {}).get(kind) or [f"fake_{kind}_{self._kernel}(float*, int)", "fake_norm"]
            if rank and "others" in self._fault:
                ran = self._fault["others"]
            if self._fault.get("own_names"):
                ran = [*ran, f"rank_{rank}"]
            for order, kernel in enumerate(ran):
                correlation += 1
                start = at + 1 + order * 10
                if on_gpu:
                    launch = "cudaGraphLaunch" if kind == "decode" else "cudaLaunchKernel"
                    events.append(_event("cuda_runtime", launch, start, 1.0, correlation=correlation))
                    where = {"device": 0, "stream": 7, "correlation": correlation}
                    events.append({**_event("kernel", kernel, start + 5, 4.0), "pid": 0, "tid": 7, "args": where})
                else:
                    events.append(_event("cpu_op", kernel, start, 4.0))
        return events


def _event(category: str, name: str, at: float, long: float, **arguments: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 900, "tid": 900, "ts": at, "dur": long, "args": arguments}
