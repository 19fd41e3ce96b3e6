"""A stand-in for the process that replays, with a GPU that there is not: its clock and power follow from what is replayed.

FAKE_REPLAY, JSON, by function:
    kernels        names of what a call runs, ["mm"] if not given
    us             microseconds of a call, split evenly among its kernels
    us_last        the same from its second segment on: the machine drifted
    error          relative error of every position; null is not finite
    errors         the same by shape
    same           whether results are production's, bit for bit; true if not given
    differs        what `capture` refuses with
    dies           signal that ends the process when it is replayed
    reasons        what the driver says holds its clock
    loses          its traces lack their last kernel
    options        of a provider: what it would have tried for every shape
Options {"us": X, "error": E, "same": S} of a shape hold there. Spins bring the clock from 1500 up to 1900 MHz, and the
power from 700 W down to 400, by their share of the step. FAKE_GPU_DIR is where the fake NVML reads both.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.traces import Ran, kineto, unannotated

UUID = "GPU-11111111"
DONE: dict[str, Any] = {}


class Fake:
    def __init__(self) -> None:
        self.functions: dict[str, dict[str, Any]] = json.loads(os.environ.get("FAKE_REPLAY", "{}"))
        self.candidates: dict[str, dict[str, Any]] = {}
        self.spins: list[int] | None = None
        self.segments: dict[str, int] = {}

    def load(self, capture: dict[str, Any], rows: int, **_: Any) -> dict[str, Any]:
        by_name = {layer["name"]: f"{layer['n']}x{layer['k']}" for layer in capture["layers"]}
        self.shapes = [by_name[name] for name in capture["order"]]
        return {"device": "cuda", "name": "Fake H", "uuid": UUID, "l2_bytes": 1, "arch": "sm_90", "torch": "2.0",
                "copies": 1, "weight_bytes": 100}  # fmt: skip

    def candidate(self, name: str, function: str, by_shape: dict[str, Any], **_: Any) -> dict[str, Any]:
        told = self.functions[function]
        self.candidates[name] = {"told": told, "by_shape": by_shape}
        errors = [
            by_shape.get(shape, {}).get("error", told.get("errors", {}).get(shape, told.get("error", 0.001)))
            for shape in self.shapes
        ]
        same = [by_shape.get(shape, {}).get("same", told.get("same", True)) for shape in self.shapes]
        first = len(self.candidates) == 1
        found = [
            {"relative_error": error, "bit_identical": None if first else one}
            for error, one in zip(errors, same, strict=True)
        ]
        return {"reference": "fake:reference", "positions": found}

    def capture(self, name: str, spins: list[int] | None) -> dict[str, Any]:
        if "differs" in self.candidates[name]["told"]:
            raise ValueError(self.candidates[name]["told"]["differs"])
        self.spins = spins
        return {"compared": True}

    def times(self, name: str) -> list[float]:
        one = self.candidates[name]
        again = self.segments.get(name, 0) > 1
        us = one["told"].get("us_last", one["told"]["us"]) if again else one["told"]["us"]
        return [one["by_shape"].get(shape, {}).get("us", us) for shape in self.shapes]

    def sustain(self, name: str, warm_s: float, seconds: float) -> dict[str, Any]:
        told = self.candidates[name]["told"]
        if "dies" in told:
            os.kill(os.getpid(), told["dies"])
        self.segments[name] = self.segments.get(name, 0) + 1
        busy_s = sum(self.times(name)) * 1e-6
        spun = sum(self.spins or [])
        share = spun / 1980e6 / (busy_s + spun / 1980e6)
        clock = 1500 + 400 * share
        reasons = told.get("reasons", [])
        state = {"sm_clock_mhz": round(clock), "power_w": 700 - 300 * share, "reasons": reasons}
        Path(os.environ["FAKE_GPU_DIR"], f"{os.getpid()}.json").write_text(json.dumps(state))
        time.sleep(0.05)
        started_s = time.monotonic()
        time.sleep(seconds)
        step_s = busy_s + spun / (clock * 1e6)
        return {"started_s": started_s, "ended_s": time.monotonic(), "step_s": [step_s] * 5, "replays_a_batch": 10}

    def profile(self, name: str, path: str, replays: int, marked: bool) -> dict[str, Any]:
        kernels = self.candidates[name]["told"].get("kernels", ["mm"])
        ran = []
        for _ in range(1 if marked else replays):
            for place, us in enumerate(self.times(name)):
                if marked or (self.spins and self.spins[place]):
                    ran.append(Ran("at::cuda::(anonymous namespace)::spin_kernel(long)", 2.0))
                ran += [Ran(kernel, us / len(kernels), graph=not marked) for kernel in kernels]
        if self.candidates[name]["told"].get("loses"):
            ran = ran[:-1]
        kineto(Path(path), [unannotated(*ran)])
        return {"positions_s": None}

    def options(self, provider: str) -> dict[str, Any]:
        return dict.fromkeys(dict.fromkeys(self.shapes), self.functions[provider]["options"])

    def table(self, function: str, chosen: dict[str, Any]) -> dict[str, Any]:
        return {"text": json.dumps({function: chosen})}

    def drop(self, name: str) -> dict[str, Any]:
        return {}


def main() -> None:
    fake = Fake()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"done": getattr(fake, request.pop("do"))(**request)}
        except ValueError as error:
            answer = {"refused": str(error)}
        except KeyError as error:
            answer = {"failed": f"KeyError: {error}", "traceback": f"Traceback\nKeyError: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
