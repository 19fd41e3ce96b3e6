"""A capture on a device -> the calls of a whole step by one candidate: checked, in a CUDA graph, sustained, profiled.

On a CPU there are no graphs: the calls are made one after the other, a cycle of a spin is a nanosecond, and positions are
timed by the clock around each call.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .layers import Call, Layer, Refused, find

KEPT_BYTES = 4 << 30
"""Results of a graph are kept for comparison where they take no more."""
CACHES = 4
"""A step's weights together are at least that many L2 caches; else copies of the layers follow each other."""
MOST_COPIES = 64
BATCH_S = 0.02
"""Replays are timed in batches of about that long: an event's resolution is half a microsecond."""
FOLLOWING = 3
"""Replays of a graph whose results are compared with those of calls alone."""


class Weights:
    """The layers of a capture on a device, with their tensors: in so many copies that together they exceed the L2 cache.

    Attributes:
        folder: The capture's.
        capture: What `capture.json` says.
        device: Where the tensors are.
        nbytes: Bytes of one copy.
        copies: By copy, every layer by its name; of no row count yet.
    """

    def __init__(self, folder: Path, capture: dict[str, Any], device: torch.device, maker: str) -> None:
        self.folder = folder
        self.capture = capture
        self.device = device
        make = find(maker) if capture["weights"] == "made" else None
        first = self._layers(0)
        if make is None:
            self._read(first)
        else:
            _make(first, make)
        tensors = {one.data_ptr(): one for layer in first.values() for one in layer.tensors.values()}
        self.nbytes = sum(one.nbytes for one in tensors.values())
        self.copies = [first]
        for number in range(1, copies_needed(self.nbytes, cache_bytes(device))):
            layers = self._layers(number)
            if make is None:
                for name, layer in layers.items():
                    layer.tensors.update({key: one.clone() for key, one in first[name].tensors.items()})
            else:
                _make(layers, make)
            self.copies.append(layers)
        _wait(device)

    def _layers(self, number: int) -> dict[str, Layer]:
        keys = ("name", "kind", "method", "n", "k", "bias")
        dtype = getattr(torch, self.capture["dtype"])
        return {
            entry["name"]: Layer(
                **{key: entry[key] for key in keys},
                rows=0,
                dtype=dtype,
                device=self.device,
                tensors={},
                copy=number,
            )
            for entry in self.capture["layers"]
        }

    def _read(self, layers: dict[str, Layer]) -> None:
        by_file: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
        for entry in self.capture["layers"]:
            for key, stored in entry["tensors"].items():
                by_file.setdefault(stored["file"], []).append((entry["name"], key, stored))
        for name, wanted in by_file.items():
            read: dict[str, torch.Tensor] = {}  # layers may share a tensor
            with safe_open(self.folder / name, framework="pt", device=str(self.device)) as file:
                for layer, key, stored in wanted:
                    if stored["key"] not in read:
                        read[stored["key"]] = _as_told(file.get_tensor(stored["key"]), stored)
                    layers[layer].tensors[key] = read[stored["key"]]


def _make(layers: dict[str, Layer], make: Callable[..., dict[str, torch.Tensor]]) -> None:
    for index, layer in enumerate(layers.values()):
        layer.tensors.update(make(layer, layer.copy * len(layers) + index))


def _as_told(tensor: torch.Tensor, stored: dict[str, Any]) -> torch.Tensor:
    if list(tensor.shape) != list(stored["shape"]) or str(tensor.dtype) != f"torch.{stored['dtype']}":
        raise Refused(
            f"{stored['file']}: {stored['key']} is {tensor.dtype} {list(tensor.shape)}, and the capture says "
            f"{stored['dtype']} {stored['shape']}"
        )
    return tensor


class Inputs:
    """The calls of a step at one row count: layers with their inputs.

    Attributes:
        device: Where everything is.
        layers: By copy, the layer of every position.
        x: By copy, the input of every position.
        y: By copy, the result that the server had there; None where inputs are made.
    """

    def __init__(self, weights: Weights, rows: int) -> None:
        capture = weights.capture
        self.device = weights.device
        self.layers: list[list[Layer]] = []
        for copy in weights.copies:
            of_rows = {name: replace(layer, rows=rows) for name, layer in copy.items()}
            self.layers.append([of_rows[name] for name in capture["order"]])
        self.x: list[list[torch.Tensor]] = []
        self.y: list[list[torch.Tensor]] | None = None
        file = capture["files"].get(str(rows))
        if file is None:
            generator = torch.Generator(device=self.device).manual_seed(rows)
            for layers in self.layers:
                noise = [torch.randn(rows, one.k, generator=generator, device=self.device) for one in layers]
                self.x.append([x.to(one.dtype) for x, one in zip(noise, layers, strict=True)])
        else:
            self.y = []
            with safe_open(weights.folder / file, framework="pt", device=str(self.device)) as tensors:
                for number, layers in enumerate(self.layers):
                    step = number % capture["steps"]
                    self.x.append([tensors.get_tensor(f"{place}.x.{step}") for place in range(len(layers))])
                    self.y.append([tensors.get_tensor(f"{place}.y.{step}") for place in range(len(layers))])
        _wait(self.device)

    @property
    def copies(self) -> int:
        """How often the step is repeated, with other weights, before it begins anew."""
        return len(self.layers)


def cache_bytes(device: torch.device) -> int:
    """Size of the L2 cache; 0 where that is not known."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def copies_needed(weight_bytes: int, cache: int) -> int:
    """Copies of a step's weights that together are `CACHES` caches."""
    return min(MOST_COPIES, max(1, math.ceil(CACHES * cache / weight_bytes))) if weight_bytes else 1


class Candidate:
    """The calls of a step by one function, or by one for each shape.

    Attributes:
        calls: By copy, the call of every position.
        results: What each position of the first copy gives when it is called alone.
    """

    def __init__(self, inputs: Inputs, function: str, options: dict[str, Any], by_shape: dict[str, Any]) -> None:
        make = find(function)
        self.inputs = inputs
        self.calls: list[list[Call]] = []
        for layers in inputs.layers:
            made: dict[str, Call] = {}
            for layer in layers:
                if layer.name not in made:
                    try:
                        made[layer.name] = make(layer, **(options | by_shape.get(layer.shape, {})))
                    except Exception as error:  # somebody else's function: whatever it raises is what it says
                        raise Refused(
                            f"{function}: {layer.name} [{layer.shape}]: {type(error).__name__}: {error}"
                        ) from error
            self.calls.append([made[layer.name] for layer in layers])
        self.results = self.alone(0)
        self._replay: Callable[[], object] | None = None

    def alone(self, copy: int) -> list[torch.Tensor]:
        """Every position's result, each call finished before the next begins.

        Raises:
            Refused: A result has another shape or dtype than the layer's.
        """
        found = []
        for layer, call, x in zip(self.inputs.layers[copy], self.calls[copy], self.inputs.x[copy], strict=True):
            result = call(x)
            _wait(self.inputs.device)
            if result.shape != (layer.rows, layer.n) or not result.is_floating_point():
                raise Refused(
                    f"{layer.name}: the result is {result.dtype} {list(result.shape)}; expected floating "
                    f"[{layer.rows}, {layer.n}]"
                )
            found.append(result.clone())
        return found

    def capture(self, spins: Sequence[int] | None) -> bool:
        """Make the graph of the whole step, all copies of it; spins are cycles before each position.

        Returns:
            Whether its results were compared with those of calls alone; too large ones are not kept.

        Raises:
            Refused: They differ: calls that follow each other must give what they give alone.
        """
        inputs = self.inputs
        size = sum(result.nbytes for result in self.results) * inputs.copies
        kept: list[torch.Tensor] | None = [] if size <= KEPT_BYTES else None

        def step() -> None:
            if kept is not None:
                kept.clear()
            for copy in range(inputs.copies):
                for place, call in enumerate(self.calls[copy]):
                    if spins is not None and spins[place] > 0:
                        _spin(inputs.device, spins[place])
                    result = call(inputs.x[copy][place])
                    if kept is not None:
                        kept.append(result)

        if inputs.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            self._replay = graph.replay
        else:
            self._replay = step
        if kept is None:
            return False
        for _ in range(FOLLOWING):
            self._replay()
            _wait(inputs.device)
            for place, (result, alone) in enumerate(zip(kept, self.results, strict=False)):
                if not torch.equal(result, alone):
                    raise Refused(
                        f"{inputs.layers[0][place].name}: it gives other results when calls follow each other: not timed"
                    )
        return True

    def sustain(self, warm_s: float, seconds: float) -> dict[str, Any]:
        """Replay without a pause: first for `warm_s`, unmeasured, then for `seconds`.

        Returns:
            When it began and ended, seconds of the monotonic clock, and the seconds of a step, batch by batch.
        """
        replay, steps = self._made(), self.inputs.copies
        took = _timed(self.inputs.device, replay, 1)
        took = _timed(self.inputs.device, replay, 3) / 3
        count = max(1, round(BATCH_S / max(took, 1e-9)))
        warm_until = time.monotonic() + warm_s
        while time.monotonic() < warm_until:
            _timed(self.inputs.device, replay, count)
        times: list[float] = []
        started_s = time.monotonic()
        pending: list[tuple[Any, Any]] = []
        while time.monotonic() - started_s < seconds:
            if self.inputs.device.type == "cuda":
                # One batch is always queued behind the one that is timed: the device never waits.
                pending.append(_queued(replay, count))
                if len(pending) > 1:
                    times.append(_elapsed(*pending.pop(0)) / count / steps)
            else:
                times.append(_timed(self.inputs.device, replay, count) / count / steps)
        times += [_elapsed(*pair) / count / steps for pair in pending]
        return {"started_s": started_s, "ended_s": time.monotonic(), "step_s": times, "replays_a_batch": count}

    def profile(self, path: Path, replays: int, *, marked: bool) -> list[float] | None:
        """A trace of replays, or of one step whose positions are told apart by a spin before each.

        Returns:
            On a CPU the seconds of each position; None where the trace was written.
        """
        device = self.inputs.device
        if device.type != "cuda":
            return self._clocked(replays)
        replay = None if marked else self._made()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            if replay is None:
                for call, x in zip(self.calls[0], self.inputs.x[0], strict=True):
                    _spin(device, 1)
                    call(x)
            else:
                for _ in range(replays):
                    replay()
            _wait(device)
        profiler.export_chrome_trace(str(path))
        return None

    def _clocked(self, replays: int) -> list[float]:
        rounds: list[list[float]] = []
        for _ in range(replays):
            for copy in range(self.inputs.copies):
                times = []
                for call, x in zip(self.calls[copy], self.inputs.x[copy], strict=True):
                    began = time.perf_counter()
                    call(x)
                    times.append(time.perf_counter() - began)
                rounds.append(times)
        return [statistics.median(times) for times in zip(*rounds, strict=True)]

    def _made(self) -> Callable[[], object]:
        if self._replay is None:
            raise Refused("the graph was not made yet")
        return self._replay


def deviations(
    results: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], production: Sequence[torch.Tensor] | None
) -> list[dict[str, Any]]:
    """Hold every position's result against what is wanted, of which columns may be missing, and against production's.

    Returns:
        For each, `relative_error` (None where the result is not finite) and `bit_identical` (None without a production).
    """
    found = []
    for place, (result, product) in enumerate(zip(results, wanted, strict=True)):
        columns = result[:, : product.shape[1]].double()
        size = float(product.double().norm())
        error = float((columns - product.double()).norm()) / (size or 1.0)
        broken = not math.isfinite(error) or bool(result.isnan().any())
        same = None if production is None else torch.equal(result, production[place])
        found.append({"relative_error": None if broken else error, "bit_identical": same})
    return found


def _queued(replay: Callable[[], object], count: int) -> tuple[Any, Any]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        replay()
    end.record()
    return start, end


def _elapsed(start: Any, end: Any) -> float:
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _timed(device: torch.device, replay: Callable[[], object], count: int) -> float:
    if device.type == "cuda":
        return _elapsed(*_queued(replay, count))
    began = time.perf_counter()
    for _ in range(count):
        replay()
    return time.perf_counter() - began


def _spin(device: torch.device, cycles: int) -> None:
    if device.type == "cuda":
        torch.cuda._sleep(cycles)
        return
    until = time.perf_counter_ns() + cycles
    while time.perf_counter_ns() < until:
        pass


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
