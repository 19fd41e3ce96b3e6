"""The switches: PQ2_* variables of the environment -> the paths of this process, read once.

| variable | values | unset |
|---|---|---|
| PQ2_KERNELS | tuned, exact, legacy, reference | tuned on CUDA, reference on a CPU |
| PQ2_SINGLE | on, off | as the kernel set has it |
| PQ2_SMALL | on, off | as the kernel set has it |
| PQ2_RING | on, off | as the kernel set has it |
| PQ2_PREFILL | on, off | as the kernel set has it |
| PQ2_SMALL_GEMM | on, off | as the kernel set has it |

Values are exact texts; anything else raises, and so does any other PQ2_* variable: a misspelt switch must not pass for one
that is set. What cannot run on a device raises there. Nothing falls back.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

from pq2.errors import PathUnavailable, SwitchError

PREFIX = "PQ2_"
KERNELS = "PQ2_KERNELS"
SETS = ("tuned", "exact", "legacy", "reference")
PATHS = ("single", "small", "ring", "prefill", "small_gemm")
"""Paths with a switch of their own; `legacy` and `reference` are what is left when they are off. `small` is `direct`."""
VALUES = ("on", "off")

IN_SET: dict[str, frozenset[str]] = {
    "tuned": frozenset(PATHS),
    # Bit-identical to legacy: the table's entries for this set are launched so that they add in its order.
    "exact": frozenset({"single", "small"}),
    "legacy": frozenset(),
    "reference": frozenset(),
}


def variable(path: str) -> str:
    """The switch of a path."""
    return PREFIX + path.upper()


NAMES = (KERNELS, *(variable(path) for path in PATHS))


@dataclass(frozen=True, slots=True)
class Choice:
    """What this process runs.

    Attributes:
        kernel_set: One of `SETS`.
        paths: The switched paths that are on.
        given: The variables that were set, as they were.
    """

    kernel_set: str
    paths: frozenset[str]
    given: tuple[tuple[str, str], ...]

    def on(self, path: str) -> bool:
        """Whether a switched path is on."""
        return path in self.paths

    @property
    def key(self) -> str:
        """The whole choice as one text: what is logged, reported, and part of vLLM's compile-cache key."""
        parts = [f"{path}={'on' if path in self.paths else 'off'}" for path in PATHS]
        return f"kernel set {self.kernel_set}, {', '.join(parts)}"


def resolve(environ: Mapping[str, str], device: str) -> Choice:
    """Read the switches.

    Args:
        environ: Where the variables are.
        device: `cuda` or `cpu`: what the model runs on.

    Raises:
        SwitchError: An unknown variable or value.
        PathUnavailable: A path was asked for that cannot run on the device.
    """
    given = {name: value for name, value in sorted(environ.items()) if name.startswith(PREFIX)}
    unknown = [name for name in given if name not in NAMES]
    if unknown:
        raise SwitchError(f"{', '.join(unknown)}: no such switch; switches are {', '.join(NAMES)}")
    default = "tuned" if device == "cuda" else "reference"
    kernel_set = _value(given, KERNELS, SETS) or default
    overrides = {path: _value(given, variable(path), VALUES) for path in PATHS}
    paths = frozenset(
        path for path in PATHS if (overrides[path] or ("on" if path in IN_SET[kernel_set] else "off")) == "on"
    )
    if kernel_set == "reference" and device == "cuda" and paths:
        on = ", ".join(f"{variable(path)}=on" for path in PATHS if path in paths)
        raise SwitchError(f"{on}: the set reference runs no kernels; choose another {KERNELS}, or leave it unset")
    for path in ("ring", "prefill"):
        if kernel_set == "exact" and path in paths:
            raise SwitchError(
                f"{variable(path)}=on: it adds in another order than the older kernels, so it has no place in the set "
                f"exact; choose another {KERNELS}, or leave it unset"
            )
    if device != "cuda":
        asked = [f"{KERNELS}={kernel_set}"] if kernel_set != "reference" else []
        asked += [f"{variable(path)}=on" for path in PATHS if path in paths and overrides[path]]
        if asked:
            raise PathUnavailable(
                f"{', '.join(asked)}: these kernels run on CUDA, and this process runs on {device}; leave the switches "
                f"unset, or set {KERNELS}=reference"
            )
    return Choice(kernel_set, paths, tuple(given.items()))


@functools.cache
def resolved(device: str) -> Choice:
    """The choice of this process: read at the first call, the same ever after."""
    return resolve(os.environ, device)


def _value(given: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str | None:
    value = given.get(name)
    if value is not None and value not in allowed:
        raise SwitchError(f"{name}={value!r}: allowed are {', '.join(allowed)} (exactly so), or leave it unset")
    return value
