"""A captured layer as a candidate sees it, and functions by name.

A name is `module:function` or that of an entry point. What follows as `?name=value&name=value` is given to the function by
keyword: JSON where it can be read so, else text.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

GROUP = "abharness.replay"
"""Entry points of this group name functions."""

Call = Callable[[torch.Tensor], torch.Tensor]
"""Inputs [rows, K] -> results [rows, N], in the dtype of the inputs."""


class Refused(Exception):
    """What was asked for cannot be done; the text is for the user."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One captured linear layer on the device that it is replayed on.

    Attributes:
        name: The module's name in the model.
        kind: Its class in vLLM.
        method: Class of the quantisation method that multiplied when it was captured.
        n: Columns of the result.
        k: Columns of the input.
        rows: Rows of the input; 0 while weights are made, which serve all row counts.
        bias: Whether a bias is added.
        dtype: Of inputs and results.
        device: Where everything is.
        tensors: Parameters and buffers as they were after loading, by name; none where weights are made.
        copy: Which copy of the layer this is: copies keep a small model's weights from staying in the L2 cache.
    """

    name: str
    kind: str
    method: str
    n: int
    k: int
    rows: int
    bias: bool
    dtype: torch.dtype
    device: torch.device
    tensors: dict[str, torch.Tensor]
    copy: int = 0

    @property
    def shape(self) -> str:
        """`NxK`."""
        return f"{self.n}x{self.k}"


def find(text: str) -> Callable[..., Any]:
    """The function of a name, with the arguments that are given in it.

    Raises:
        Refused: There is none, or the arguments cannot be read.
    """
    name, _, query = text.partition("?")
    function = _named(name)
    if not query:
        return function
    given: dict[str, Any] = {}
    for part in query.split("&"):
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier():
            raise Refused(f"{text!r}: {part!r} is no argument; write module:function?name=value&name=value")
        try:
            given[key] = json.loads(value)
        except ValueError:
            given[key] = value
    return functools.partial(function, **given)


def _named(name: str) -> Callable[..., Any]:
    if ":" not in name:
        found = [point for point in metadata.entry_points(group=GROUP) if point.name == name]
        if not found:
            known = sorted({point.name for point in metadata.entry_points(group=GROUP)})
            others = f"there are {', '.join(known)}" if known else "none is installed"
            raise Refused(f"{name!r} is no entry point of {GROUP} ({others}); or write module:function")
        return found[0].load()  # type: ignore[no-any-return]
    module, _, path = name.partition(":")
    try:
        item: Any = importlib.import_module(module)
    except ImportError as error:
        raise Refused(f"{name!r}: cannot import {module}: {error}; bring a folder with --kernels") from error
    for part in path.split("."):
        item = getattr(item, part, None)
    if not callable(item):
        raise Refused(f"{name!r}: {module} has no function {path}")
    return item  # type: ignore[no-any-return]
