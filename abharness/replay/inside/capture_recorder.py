"""A loaded model -> the inputs and results of its linear layers in decode steps, and their weights, in files.

A step begins with a forward pass of the model and lasts until the next one: the head is called between the two, when
there is no forward context any more. Only while the harness says so (file `armed`, which names a row count) are steps
taken: what vLLM runs by itself, to warm up, can look like a decode step in everything.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from .capture_files import GIB, Files, dtype_name, nbytes, plain, same
from .capture_status import Refused, Status
from .capture_steps import decode_problem

FUNCTION = "process_weights_after_loading"
"""Of a layer's method here; a loader's function of the same name calls it for every layer."""

ARMED = "armed"
"""File beside the status that names the row count of the moment."""
DTYPES = ("bfloat16", "float16", "float32")
SHOWN = 6
"""Names of layers in a message."""


@dataclass
class Call:
    """One call of a layer in a step: copies of what went in and what came out."""

    name: str
    x: torch.Tensor
    y: torch.Tensor
    bias: bool


@dataclass
class Cell:
    """What was seen while the steps of one row count were asked for.

    Attributes:
        steps: Whole steps.
        seen: Forward passes that are none, by what they are.
        discarded: Steps that were begun and are not whole, by the reason.
    """

    steps: list[list[Call]] = field(default_factory=list)
    accepted: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    discarded: Counter[str] = field(default_factory=Counter)


class Recorder:
    """The capture of one model."""

    def __init__(self, config: dict[str, Any], status: Status, model: torch.nn.Module, model_config: Any) -> None:
        self.config = config
        self.status = status
        self.model = model
        self.dtype = dtype_name(model_config.dtype)
        self.files = Files(Path(config["output"]), config["most_bytes"])
        self.layers: dict[str, torch.nn.Module] = {}
        self.names: dict[int, str] = {}
        self.left_out: dict[str, str] = {}
        self.cells = {rows: Cell() for rows in config["rows"]}
        self.order: list[str] | None = None
        self.described: dict[str, dict[str, Any]] = {}
        self.row_files: dict[int, str] = {}
        self._as_loaded: dict[str, dict[str, torch.Tensor]] = {}
        self._context: Any = None
        self._rows: int | None = None
        self._calls: list[Call] | None = None
        self._inside = False
        self._ended = False
        self._choose()

    # What is captured

    def _choose(self) -> None:
        """Find the layers.

        Raises:
            Refused: There is none, or this process has a part of the model only.
        """
        distributed = torch.distributed
        world = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        if self.dtype not in DTYPES or world > 1:
            found = f"it runs in {world} processes" if world > 1 else f"its dtype is {self.dtype}"
            raise Refused(
                f"this server cannot be captured: {found}",
                f"serve it on one GPU (tensor parallel size 1), with a dtype of {', '.join(DTYPES)}",
                "server",
            )
        wanted = re.compile(self.config["layers"])
        every: dict[int, list[str]] = {}
        for name, module in self.model.named_modules(remove_duplicate=False):
            every.setdefault(id(module), []).append(name)
        present: list[str] = []
        for name, module in self.model.named_modules():
            aliases = every[id(module)]
            # An embedding that is the head as well has the head's name, too.
            head = isinstance(module, ParallelLMHead) or (
                isinstance(module, VocabParallelEmbedding) and len(aliases) > 1
            )
            linear = isinstance(module, LinearBase) or head
            method = getattr(module, "quant_method", None)
            if not linear and (not callable(getattr(method, "apply", None)) or not _holds_numbers(module)):
                continue
            if isinstance(module, VocabParallelEmbedding) and not head:
                continue
            if linear:
                present.append(name)
            if not any(wanted.search(alias) for alias in aliases):
                continue
            if not linear:
                self.left_out[name] = f"{type(module).__name__} is no linear layer"
            elif not callable(getattr(method, "apply", None)):
                self.left_out[name] = "it has no quantisation method that multiplies"
            elif getattr(module, "tp_size", 1) != 1:
                self.left_out[name] = f"it is one part of {module.tp_size}"
            else:
                self.layers[name] = module
                self.names[id(module)] = name
        if not self.layers:
            raise Refused(
                f"--layers {self.config['layers']!r} matches no linear layer of the model; it has {_some(present)}",
                "give a regular expression that is found in one of these names",
                "usage",
            )

    @contextlib.contextmanager
    def keeping_weights(self) -> Iterator[None]:
        """While weights are prepared: keep those of which nothing is left.

        vLLM packs weights for CPUs into objects of its own, and leaves an empty parameter.
        """
        methods = {id(layer.quant_method): layer.quant_method for layer in self.layers.values()}
        wrapped = [method for method in methods.values() if callable(getattr(method, FUNCTION, None))]
        for method in wrapped:
            self._wrap(method, FUNCTION, self._prepared)
        try:
            yield
        finally:
            for method in wrapped:
                del vars(method)[FUNCTION]

    def _prepared(self, original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.names.get(id(layer))
        before = {key: tensor.data for key, tensor in _tensors(layer).items()} if name is not None else {}
        result = original(layer, *args, **kwargs)
        if name is not None and not _holds_numbers(layer) and any(tensor.numel() for tensor in before.values()):
            self._as_loaded[name] = before
        return result

    def _wrap(self, method: Any, attribute: str, by: Callable[..., Any]) -> None:
        """An attribute of the object in place of its class's method: it stays of its class, and may have many layers."""
        original = getattr(method, attribute)

        def wrapped(layer: Any, *args: Any, **kwargs: Any) -> Any:
            return by(original, layer, *args, **kwargs)

        setattr(method, attribute, wrapped)

    def begin(self) -> None:
        """Weights are prepared: look whether there is room, and listen.

        Raises:
            Refused: It would be too much.
        """
        for name, layer in list(self.layers.items()):
            if self.config["weights"] == "copy" and not self._weights(name):
                self._leave_out(name, f"{type(layer.quant_method).__name__} leaves no tensors after loading")
        self._check_room()
        methods = {id(layer.quant_method): layer.quant_method for layer in self.layers.values()}
        for method in methods.values():
            self._wrap(method, "apply", self._called)
        # The layers asked for may all be called outside of the model's forward pass, as the head is.
        self.model.register_forward_pre_hook(lambda *_: self._guarded(self._look))
        self._tell()

    def _weights(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of a layer that hold numbers."""
        return self._as_loaded.get(name) or (_tensors(self.layers[name]) if _holds_numbers(self.layers[name]) else {})

    def _check_room(self) -> None:
        weights = 0
        if self.config["weights"] == "copy":
            tensors = {same(one): one for name in self.layers for one in self._weights(name).values() if one.numel()}
            weights = sum(map(nbytes, tensors.values()))
        element = torch.finfo(getattr(torch, self.dtype)).bits // 8
        columns = sum(sum(_columns(layer)) for layer in self.layers.values())
        activations = sum(self.config["rows"]) * self.config["steps"] * columns * element
        told = f"{weights / GIB:.2f} GiB of weights, {activations / GIB:.2f} GiB of inputs and results"
        hint = "capture fewer layers (--layers), rows or steps, or --weights made"
        if weights + activations > self.config["most_bytes"]:
            most = self.config["most_bytes"] / GIB
            raise Refused(f"{told}: more than --most-gib {most:g}", f"{hint}; or raise --most-gib", "usage")
        free = shutil.disk_usage(self.files.folder).free
        if weights + activations > free:
            raise Refused(
                f"{told}: {self.files.folder} has {free / GIB:.2f} GiB free", f"{hint}; or free some", "usage"
            )

    def _leave_out(self, name: str, why: str) -> None:
        self.left_out[name] = why
        del self.names[id(self.layers.pop(name))]

    # Steps

    def _guarded(self, action: Callable[..., Any], *args: Any) -> Any:
        """A fault of ours ends the capture, never the server."""
        if self._ended:
            return None
        try:
            return action(*args)
        except Exception as error:
            self._ended = True
            self._calls = None
            self.status.fault(error)
            return None

    def _look(self) -> None:
        """See whether a forward pass has begun."""
        try:
            context = get_forward_context()
        except AssertionError:  # outside of one: what is called now belongs to the one before
            return
        if context is self._context:
            return
        self._end_step()
        self._context = context
        rows = self._armed()
        if rows is None or self.cells[rows].accepted == self.config["steps"]:
            return
        problem = decode_problem(getattr(context, "attn_metadata", None), rows, self.config["input_len"])
        if problem is None:
            self._rows, self._calls = rows, []
        else:
            self.cells[rows].seen[problem] += 1
            self._tell()

    def _armed(self) -> int | None:
        try:
            rows = int((self.status.folder / ARMED).read_text(encoding="ascii"))
        except FileNotFoundError:
            return None
        return rows if rows in self.cells else None

    def _called(self, original: Callable[..., Any], layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        name = self.names.get(id(layer))
        if name is None or self._ended or self._inside:
            return original(layer, x, *args, **kwargs)
        self._guarded(self._look)
        if self._calls is None:
            return original(layer, x, *args, **kwargs)
        bias = args[0] if args else kwargs.get("bias")
        # Copied before: what comes in may be changed in place.
        copied = self._guarded(self._input, name, layer, x, bias)
        self._inside = True  # a method that calls another one of this layer has called it once
        try:
            y = original(layer, x, *args, **kwargs)
        finally:
            self._inside = False
        if copied is not None:
            self._guarded(self._output, name, copied, y, bias is not None)
        return y

    def _input(self, name: str, layer: Any, x: Any, bias: Any) -> torch.Tensor | None:
        if bias is not None and bias is not getattr(layer, "bias", None):
            self._leave_out(name, "the bias that is added is no tensor of the layer")
            return None
        return self._copy(name, x, "input")

    def _output(self, name: str, x: torch.Tensor, y: Any, bias: bool) -> None:
        copied = self._copy(name, y, "result")
        if copied is not None and self._calls is not None:
            self._calls.append(Call(name, x, copied, bias))

    def _copy(self, name: str, value: Any, what: str) -> torch.Tensor | None:
        """A copy as a matrix of the step's rows; a layer that has none is left out from here on."""
        why = None
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            why = f"its {what} is no matrix"
        elif dtype_name(value.dtype) != self.dtype:
            why = f"its {what} is {dtype_name(value.dtype)}, the model {self.dtype}"
        elif value.numel() != self._rows * value.shape[-1]:
            why = f"its {what} has {value.numel() // value.shape[-1]} rows in a step of {self._rows}"
        if why is None:
            return plain(value).reshape(self._rows, -1)
        self._leave_out(name, why)
        if self._calls is not None:
            self._calls = [call for call in self._calls if call.name != name]
        return None

    def _end_step(self) -> None:
        calls, rows = self._calls, self._rows
        self._calls = self._rows = None
        if calls is None or rows is None:
            return
        cell = self.cells[rows]
        names = [call.name for call in calls]
        if not calls:
            cell.discarded["none of the layers was called"] += 1
        elif self.order is None:
            self._describe(calls)
            self.order = names
        if self.order is not None and calls:
            first = [(name, self.described[name]["k"], self.described[name]["n"]) for name in self.order]
            if [(call.name, call.x.shape[1], call.y.shape[1]) for call in calls] == first:
                cell.steps.append(calls)
                cell.accepted += 1
            else:
                cell.discarded[f"{len(names)} calls, not the {len(self.order)} of the first step in their order"] += 1
        if cell.steps and cell.accepted == self.config["steps"]:
            self._write_rows(rows, cell)
        self._tell()

    # Files

    def _describe(self, calls: list[Call]) -> None:
        """The layers that a step calls, from the first one, and their weights."""
        called = {call.name: call for call in calls}
        stored: dict[str, dict[str, dict[str, Any]]] = {}
        if self.config["weights"] == "copy":
            stored = self.files.save_weights({name: self._weights(name) for name in called})
        for name, call in called.items():
            layer = self.layers[name]
            self.described[name] = {
                "name": name,
                "kind": type(layer).__name__,
                "method": type(layer.quant_method).__name__,
                "n": call.y.shape[1],
                "k": call.x.shape[1],
                "bias": call.bias,
                "tensors": stored.get(name, {}),
                "loaded": name in stored and name in self._as_loaded,
            }
        self._as_loaded.clear()

    def _write_rows(self, rows: int, cell: Cell) -> None:
        tensors = {}
        for number, calls in enumerate(cell.steps):
            for position, call in enumerate(calls):
                tensors[f"{position}.x.{number}"] = call.x
                tensors[f"{position}.y.{number}"] = call.y
        name = f"rows-{rows}.safetensors"
        self.files.save(name, tensors)
        self.row_files[rows] = name
        cell.steps = []

    def _tell(self) -> None:
        order = self.order or []
        never = {name: "not called in a decode step" for name in self.layers if name not in self.described}
        self.status.data["model"] = {
            "dtype": self.dtype,
            "order": order,
            "layers": list(self.described.values()),
            "files": {str(rows): name for rows, name in self.row_files.items()},
            "left_out": {**self.left_out, **(never if order else {})},
            "cells": {
                str(rows): {"steps": cell.accepted, "seen": dict(cell.seen), "discarded": dict(cell.discarded)}
                for rows, cell in self.cells.items()
            },
        }
        self.status.write()


def _tensors(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _holds_numbers(layer: torch.nn.Module) -> bool:
    """Whether a layer has a parameter or buffer with elements, besides a bias."""
    return any(tensor.numel() for name, tensor in _tensors(layer).items() if name.rpartition(".")[2] != "bias")


def _columns(layer: torch.nn.Module) -> tuple[int, int]:
    """Columns of a layer's input and result, before it was ever called."""
    pairs = (("embedding_dim", "num_embeddings_per_partition"), ("input_size", "output_size"))
    for k, n in pairs:
        if hasattr(layer, k) and hasattr(layer, n):
            return int(getattr(layer, k)), int(getattr(layer, n))
    return 0, 0


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN])
    return f"{shown}, ... ({len(names)} in all)" if len(names) > SHOWN else shown or "none"
