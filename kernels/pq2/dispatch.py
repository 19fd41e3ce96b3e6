"""(shape, rows, switches) -> the path that runs and its launch configuration; and the counters that prove it was called.

Configurations are data: `tables/*.json`, one file a GPU architecture, made by `python -m pq2.bench --tune`. A shape that a
table does not have takes the table's default; an architecture without a table takes sm_90's, and the log says so.
"""

from __future__ import annotations

import functools
import json
import logging
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from pq2.errors import PathUnavailable
from pq2.switches import Choice

if TYPE_CHECKING:
    import torch

    from pq2.format import Prepared

logger = logging.getLogger("vllm.pq2")

CALLS = dict.fromkeys(("legacy", "single", "small_gemm", "dense", "reference"), 0)
"""Products dispatched to each path in this process. What a CUDA graph replays is counted once, when it is captured. `dense`
are small projections that vLLM's own product took, with more rows than `small_gemm` has."""


class Launch(NamedTuple):
    """A launch configuration of the one-row kernels; see `single.single`."""

    block_n: int
    block_g: int
    num_warps: int


class Tile(NamedTuple):
    """A launch configuration of `legacy.legacy`."""

    block_m: int
    block_n: int
    num_warps: int


LEGACY_LAUNCH = Launch(8, 8, 1)
"""How the older one-row kernel is launched, whatever the shape, and `single` in the set `exact`."""


@functools.cache
def table(arch: str) -> tuple[str, dict[str, list[int]]]:
    """The table for an architecture (`sm_90`): its own name, and N x K -> launch of `single`."""
    folder = resources.files("pq2") / "tables"
    own = folder / f"{arch}.json"
    name = arch if own.is_file() else "sm_90"
    return name, json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["single"]


@functools.cache
def _tell_table(arch: str) -> None:
    """Say once that an architecture has no table of its own."""
    name, _ = table(arch)
    if name != arch:
        logger.warning(
            "pq2: no launch table for %s: `single` takes %s's; python -m pq2.bench --tune finds one", arch, name
        )


def single_launch(choice: Choice, arch: str, n: int, k: int) -> Launch:
    """How `single` is launched for a weight [n, k]."""
    if choice.kernel_set == "exact":
        return LEGACY_LAUNCH
    _, rows = table(arch)
    return Launch(*rows.get(f"{n}x{k}", rows["default"]))


WARM_ROWS = (1, 2, 17, 33, 65)
"""Numbers of rows that between them run every path and tile."""


def legacy_tile(m: int) -> Tile:
    """How `legacy` is launched for m rows."""
    if m <= 16:
        return Tile(16, 64, 4)
    if m <= 32:
        return Tile(32, 64, 4)
    if m <= 64:
        return Tile(64, 64, 4)
    return Tile(128, 128, 8)


def path_for(choice: Choice, m: int) -> str:
    """The kernels' path of a product with m rows of activations.

    Raises:
        PathUnavailable: The set `reference` runs no kernels.
    """
    if choice.kernel_set == "reference":
        raise PathUnavailable(
            "the kernel set reference runs no kernels: its products go through pq2.ops.reference_linear"
        )
    return "single" if m == 1 and choice.on("single") else "legacy"


def matmul(
    x: torch.Tensor, weight: Prepared, choice: Choice, signs: torch.Tensor | None = None, rotation: int = 0
) -> torch.Tensor:
    """Activations times the transposed weight, on the path that the switches choose.

    Args:
        x: bf16, fp16 or fp32 [M, K] on a CUDA device, rows contiguous.
        weight: [N, K] on the same device.
        choice: The switches; not the set `reference`.
        signs: int8 [K], for a rotation.
        rotation: Its block size; 0 is none.

    Returns:
        [M, N] in the dtype of x.

    Raises:
        PathUnavailable: The set `reference`, or a rotation that the kernels do not have.
    """
    import torch

    from pq2 import legacy as legacy_path
    from pq2 import single as single_path
    from pq2.activations import quantize_rows

    m, _ = x.shape
    n, k = weight.shape
    path = path_for(choice, m)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    quantized = quantize_rows(x, "planes", signs, rotation)
    CALLS[path] += 1
    if path == "single":
        single_path.single(quantized, weight, out, *single_launch(choice, arch_of(x.device), n, k))
    elif m == 1:
        legacy_path.legacy_single(quantized, weight, out, *LEGACY_LAUNCH)
    else:
        legacy_path.legacy(quantized, weight, out, *legacy_tile(m))
    return out


_warm: set[tuple[object, ...]] = set()


def warm_up(
    weight: Prepared, dtype: torch.dtype, choice: Choice, signs: torch.Tensor | None = None, rotation: int = 0
) -> None:
    """Compile what any number of rows of a weight will run, so that no request waits for a compiler.

    Kernels depend on K, on whether N is a multiple of 16, and on the dtype: one weight is enough for all that are alike.
    """
    import torch

    n, k = weight.shape
    arch = arch_of(weight.data.device)
    if choice.on("single") and choice.kernel_set != "exact":
        _tell_table(arch)
    launch = single_launch(choice, arch, n, k)
    key = (k, n % 16 == 0, dtype, rotation, choice.key, launch)
    if key in _warm:
        return
    calls = dict(CALLS)
    for m in WARM_ROWS:
        matmul(torch.ones(m, k, dtype=dtype, device=weight.data.device), weight, choice, signs, rotation)
    CALLS.update(calls)
    _warm.add(key)


@functools.cache
def arch_of(device: torch.device) -> str:
    """The architecture of a device, `sm_90`; that of the interpreter's CPU tensors is sm_90 too."""
    import torch

    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
