"""What `abharness replay` replays of this package: functions that take a captured layer and give what computes its result.

A layer has `n`, `k`, `rows`, `bias`, `device` and `tensors`: as vLLM holds them after loading (`layers.py`), or as
`weights` makes them. A rotated layer has its signs there, but not the size of a block, which must be given:
`pq2.replaying:tuned?rotation=1024`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pq2 import dispatch, launches, switches
from pq2 import format as pq2_format
from pq2 import reference as truth
from pq2.errors import FormatError
from pq2.quantize import rotate

Call = Callable[[torch.Tensor], torch.Tensor]


def tuned(layer: Any, entry: Mapping[str, Any] | None = None, rotation: int = 0) -> Call:
    """The set `tuned`; or one entry of a table, which need not be in it.

    Raises:
        FormatError: The layer is none of PQ2's, or the entry is none.
        PathUnavailable: The device has no such kernels.
    """
    if entry is None:
        return _by_set(layer, "tuned", rotation)
    weight, signs = _weight(layer), _signs(layer, rotation)
    one = launches.read_entry(dict(entry))

    def call(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape[0], layer.n, dtype=x.dtype, device=x.device)
        dispatch.run(one, x, weight, out, signs, rotation)
        return out

    return _with_bias(layer, call)


def exact(layer: Any, rotation: int = 0) -> Call:
    """The set `exact`, bit-identical to `legacy`; errors as of `tuned`."""
    return _by_set(layer, "exact", rotation)


def legacy(layer: Any, rotation: int = 0) -> Call:
    """The older kernels; errors as of `tuned`."""
    return _by_set(layer, "legacy", rotation)


def reference(layer: Any, rotation: int = 0, columns: int | None = None) -> Call:
    """What all of them compute, in float64, on any device.

    Args:
        layer: The layer.
        rotation: Its block size.
        columns: So many of the result, from the first on: a head in float64 takes 10 GB. None is all.

    Raises:
        FormatError: The layer is none of PQ2's.
    """
    whole, signs = _weight(layer), _signs(layer, rotation)
    weight = pq2_format.Prepared(whole.data, whole.codes[:columns], whole.scales[:columns])

    def call(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return truth.matmul(wide if signs is None else rotate(wide, signs, rotation), weight)

    return _with_bias(layer, call)


def weights(layer: Any, seed: int) -> dict[str, torch.Tensor]:
    """A random ternary weight."""
    return {"weight": pq2_format.random(layer.n, layer.k, layer.device, seed).data}


def options(layer: Any) -> list[dict[str, Any]]:
    """Entries to try for a layer: all that this GPU's table has for as many rows and this K, whatever N they are for."""
    arch = dispatch.arch_of(layer.device)
    by_rows = launches.table(arch)[1]["tuned"]
    by_weight = by_rows[next(rows for rows in sorted(by_rows) if layer.rows <= rows)]
    found = []
    for name, entries in by_weight.items():
        if name == "default" or name.endswith(f"x{layer.k}"):
            found += [one for one in entries if layer.k % one.kind.k_multiple == 0]
    return [{"entry": launches.write_entry(one)} for one in dict.fromkeys(found)]


def table(arch: str, chosen: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> str:
    """An architecture's table with other entries in it, as its file.

    Args:
        arch: `sm_90`.
        chosen: Rows -> `NxK` -> what `options` gave. Rows that the table does not have become a key of it, which begins as
            what served them before.
    """
    from pq2.tune import write

    found = dict(launches.table(arch)[1])
    by_rows = {rows: dict(by_weight) for rows, by_weight in found["tuned"].items()}
    for rows, by_shape in sorted(chosen.items()):
        if by_shape and rows not in by_rows:
            by_rows[rows] = dict(by_rows[next(more for more in sorted(by_rows) if rows <= more)])
        for shape, options in by_shape.items():
            by_rows[rows][shape] = [launches.read_entry(dict(options["entry"]))]
    return write({**found, "tuned": by_rows})


def _by_set(layer: Any, kernel_set: str, rotation: int) -> Call:
    weight, signs = _weight(layer), _signs(layer, rotation)
    choice = switches.resolve({switches.KERNELS: kernel_set}, layer.device.type)
    return _with_bias(layer, lambda x: dispatch.matmul(x, weight, choice, signs, rotation))


def _with_bias(layer: Any, call: Call) -> Call:
    """As vLLM's layer adds it."""
    if not layer.bias:
        return call
    bias = layer.tensors["bias"]

    def added(x: torch.Tensor) -> torch.Tensor:
        result = call(x)
        return result + bias[: result.shape[1]]

    return added


def _weight(layer: Any) -> pq2_format.Prepared:
    data = layer.tensors.get("weight")
    if data is None or data.dtype != torch.uint8:
        found = "none" if data is None else str(data.dtype)
        raise FormatError(f"{layer.name}: a PQ2 weight is uint8, this one is {found}")
    return pq2_format.complete(pq2_format.view(data.reshape(-1), layer.n, layer.k))


def _signs(layer: Any, rotation: int) -> torch.Tensor | None:
    signs: torch.Tensor | None = layer.tensors.get("signs")
    if (signs is None) != (rotation == 0):
        said = (
            "is rotated: give ?rotation=, its block size" if signs is not None else "is not rotated: leave rotation out"
        )
        raise FormatError(f"{layer.name}: it {said}")
    return signs
