"""A process in the server's environment that replays what it is told to: a JSON object a line in, one a line out.

    load      folder, capture, rows, device, maker   -> the device, copies, bytes of weights
    candidate name, function, options, by_shape, reference -> deviations of every position, from what
    capture   name, spins                            -> whether results of the graph were compared
    sustain   name, warm_s, seconds                  -> when, and the seconds of a step
    profile   name, path, replays, marked            -> positions (CPU), or the trace is at path
    drop      name                                   -> a candidate that is done with
    options   provider                               -> by shape, the options to try
    table     function, chosen                       -> text of a dispatch table with those that were chosen

Answers go to what was stdout when it began; what candidates print goes to stderr. An error that the user can mend is
`refused`; any other is `failed`, with its traceback.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch

from .layers import Refused, find
from .steps import Candidate, Inputs, Weights, cache_bytes, deviations


class Worker:
    """What was loaded, and the candidates so far; the first one is production, the ground of bit-identity."""

    def __init__(self) -> None:
        self.weights: Weights | None = None
        self.inputs: Inputs | None = None
        self.candidates: dict[str, Candidate] = {}
        self.production: list[torch.Tensor] | None = None
        self.wanted: tuple[str, list[torch.Tensor]] | None = None

    def load(self, folder: str, capture: dict[str, Any], rows: int, device: str, maker: str) -> dict[str, Any]:
        """Bring a row count of the capture to the device; weights stay there, everything else is given up."""
        self.candidates, self.production, self.wanted, self.inputs = {}, None, None, None
        gc.collect()
        if self.weights is None:
            if device == "cuda" and not torch.cuda.is_available():
                raise Refused("torch sees no CUDA device; --device cpu replays on the CPU, without graphs or clocks")
            self.weights = Weights(Path(folder), capture, torch.device("cuda:0" if device == "cuda" else device), maker)
        self.inputs = Inputs(self.weights, rows)
        return {
            **_describe(self.weights.device),
            "copies": self.inputs.copies,
            "weight_bytes": self.weights.nbytes,
        }

    def candidate(
        self, name: str, function: str, options: dict[str, Any], by_shape: dict[str, Any], reference: str | None
    ) -> dict[str, Any]:
        """Build a candidate and hold its results against the reference, before anything is timed."""
        inputs = self._inputs()
        made = Candidate(inputs, function, options, by_shape)
        if self.wanted is None:
            self.wanted = self._wanted(inputs, reference, made)
        source, wanted = self.wanted
        found = deviations(made.results, wanted, self.production)
        if self.production is None:
            self.production = made.results
        self.candidates[name] = made
        return {"reference": source, "positions": found}

    def _wanted(self, inputs: Inputs, reference: str | None, production: Candidate) -> tuple[str, list[torch.Tensor]]:
        if reference is not None:
            make, found = find(reference), []
            for layer, x in zip(inputs.layers[0], inputs.x[0], strict=True):
                found.append(make(layer)(x))
            return reference, found
        if inputs.y is not None:
            return "captured results", inputs.y[0]
        return "production", production.results

    def capture(self, name: str, spins: list[int] | None) -> dict[str, Any]:
        """Make a candidate's graph."""
        return {"compared": self._candidate(name).capture(spins)}

    def sustain(self, name: str, warm_s: float, seconds: float) -> dict[str, Any]:
        """Replay it."""
        return self._candidate(name).sustain(warm_s, seconds)

    def profile(self, name: str, path: str, replays: int, marked: bool) -> dict[str, Any]:
        """Trace it."""
        return {"positions_s": self._candidate(name).profile(Path(path), replays, marked=marked)}

    def drop(self, name: str) -> dict[str, Any]:
        """Give a candidate up."""
        self.candidates.pop(name, None)
        gc.collect()
        return {}

    def options(self, provider: str) -> dict[str, list[dict[str, Any]]]:
        """What a provider would have tried for each shape of the step."""
        suggest, found = find(provider), {}
        for layer in self._inputs().layers[0]:
            if layer.shape not in found:
                found[layer.shape] = list(suggest(layer))
        return found

    def table(self, function: str, chosen: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The text of a dispatch table for this device."""
        arch = _describe(self._inputs().device).get("arch", "cpu")
        return {"text": find(function)(arch, {int(rows): options for rows, options in chosen.items()})}

    def _inputs(self) -> Inputs:
        if self.inputs is None:
            raise Refused("nothing is loaded")
        return self.inputs

    def _candidate(self, name: str) -> Candidate:
        if name not in self.candidates:
            raise Refused(f"no candidate {name!r}")
        return self.candidates[name]


def _describe(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"device": device.type, "torch": torch.__version__}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        uuid = str(properties.uuid)
        found["name"] = properties.name
        found["uuid"] = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        found["l2_bytes"] = cache_bytes(device)
        found["arch"] = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return found


def _answer(worker: Worker, line: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
        action = getattr(worker, request.pop("do"))
        return {"done": action(**request)}
    except Refused as refusal:
        return {"refused": str(refusal)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}


def main() -> None:
    """Answer until there are no more requests."""
    answers: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a kernel or a library prints must not look like an answer
    worker = Worker()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(worker, line)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
