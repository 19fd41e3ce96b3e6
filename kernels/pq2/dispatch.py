"""(shape, rows, switches) -> the path that runs and its launch configuration; and the counters that prove it was called.

Configurations are data (`launches.py`): the first entry of a table that is switched on and takes the shape is run, and
`legacy` where there is none.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from pq2 import launches
from pq2.errors import PathUnavailable
from pq2.launches import ANY, Direct, Entry, Prefill, PrefillWgmma, Ring, Single, SingleRing
from pq2.switches import Choice

if TYPE_CHECKING:
    import torch

    from pq2.format import Prepared
    from pq2.quantize import Fragments, Quantized, Steps

logger = logging.getLogger("vllm.pq2")

CALLS = dict.fromkeys(("legacy", "single", "direct", "ring", "prefill", "small_gemm", "dense", "reference"), 0)
"""Products dispatched to each path in this process. What a CUDA graph replays is counted once, when it is captured. `dense`
are small projections that vLLM's own product took, with more rows than `small_gemm` has."""


class Tile(NamedTuple):
    """A launch configuration of `legacy.legacy`."""

    block_m: int
    block_n: int
    num_warps: int


LEGACY_LAUNCH = Single(8, 8, 1)
"""How the older one-row kernel is launched, whatever the shape, and `single` in the set `exact`."""


@functools.cache
def _tell_table(arch: str) -> None:
    """Say once that an architecture has no table of its own."""
    name, _ = launches.table(arch)
    if name != arch:
        logger.warning("pq2: no launch table for %s: it takes %s's; python -m pq2.tune makes one", arch, name)


WARM_ROWS = (1, 2, 9, 17, 33, 65)
"""Numbers of rows that between them run every tile of `legacy`, and `direct` and `ring` for 8 and for 16 tokens."""


def legacy_tile(m: int) -> Tile:
    """How `legacy` is launched for m rows."""
    if m <= 16:
        return Tile(16, 64, 4)
    if m <= 32:
        return Tile(32, 64, 4)
    if m <= 64:
        return Tile(64, 64, 4)
    return Tile(128, 128, 8)


def _table_set(choice: Choice) -> str:
    """Which part of a table holds: a path that is switched on in the set `legacy` is the one that users get by default."""
    return "exact" if choice.kernel_set == "exact" else "tuned"


@functools.lru_cache(maxsize=4096)
def entry_for(choice: Choice, arch: str, m: int, n: int, k: int) -> Entry | None:
    """How m rows times a weight [n, k] are multiplied; None is `legacy`.

    Raises:
        PathUnavailable: The set `reference` runs no kernels.
    """
    from pq2.intrinsics import INTERPRETED

    if choice.kernel_set == "reference":
        raise PathUnavailable(
            "the kernel set reference runs no kernels: its products go through pq2.ops.reference_linear"
        )
    for entry in launches.candidates(arch, _table_set(choice), m, n, k):
        kind = entry.kind
        fewest, most = kind.rows
        if not choice.on(kind.switch) or k % kind.k_multiple or not fewest <= m <= most:
            continue
        if kind.gluon and INTERPRETED.value:
            continue  # only tests interpret, and they run Gluon's kernels by other means
        return entry
    return None


def matmul(
    x: torch.Tensor, weight: Prepared, choice: Choice, signs: torch.Tensor | None = None, rotation: int = 0
) -> torch.Tensor:
    """Activations times the transposed weight, on the path that the switches choose.

    Args:
        x: bf16, fp16 or fp32 [M, K] on a CUDA device, rows contiguous.
        weight: [N, K] on the same device. Its bytes are read before kernels that were launched earlier have ended: whoever
            wrote them has waited for that (`format.complete`).
        choice: The switches; not the set `reference`.
        signs: int8 [K], for a rotation.
        rotation: Its block size; 0 is none.

    Returns:
        [M, N] in the dtype of x.

    Raises:
        PathUnavailable: The set `reference`, or a rotation that the kernels do not have.
    """
    import torch

    m, _ = x.shape
    n, k = weight.shape
    arch = arch_of(x.device)
    entry = entry_for(choice, arch, m, n, k)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    CALLS["legacy" if entry is None else entry.counter] += 1
    if entry is None:
        _legacy(x, weight, out, signs, rotation)
    else:
        run(entry, x, weight, out, signs, rotation)
    return out


def _legacy(x: torch.Tensor, weight: Prepared, out: torch.Tensor, signs: torch.Tensor | None, rotation: int) -> None:
    from pq2 import legacy as legacy_path
    from pq2.activations import quantize_rows

    m, _ = x.shape
    quantized = quantize_rows(x, signs, rotation)
    if m == 1:
        legacy_path.legacy_single(quantized, weight, out, *LEGACY_LAUNCH)
    else:
        legacy_path.legacy(quantized, weight, out, *legacy_tile(m))


def run(
    entry: Entry,
    x: torch.Tensor,
    weight: Prepared,
    out: torch.Tensor,
    signs: torch.Tensor | None = None,
    rotation: int = 0,
) -> None:
    """Quantise x and multiply it, by one entry of a table; arguments as of `matmul`, and out [M, N], written."""
    multiply(entry, quantized_for(entry, x, signs, rotation), x.shape[0], weight, out)


def quantized_for(
    entry: Entry, x: torch.Tensor, signs: torch.Tensor | None = None, rotation: int = 0
) -> Quantized | Fragments | Steps:
    """Activations as the path of an entry takes them."""
    from pq2.activations import quantize_fragments, quantize_rows, quantize_steps

    pdl = dependent_launch(x.device)
    if isinstance(entry.launch, Single | SingleRing):
        return quantize_rows(x, signs, rotation, pdl)
    if isinstance(entry.launch, Prefill | PrefillWgmma):
        return quantize_steps(x, signs, rotation, pdl)
    return quantize_fragments(x, 8 if x.shape[0] <= 8 else 16, signs, rotation, pdl)


def multiply(entry: Entry, x: Any, m: int, weight: Prepared, out: torch.Tensor) -> None:
    """The product alone: activations of m rows, as `quantized_for` gave them, times a weight, into out."""
    from pq2 import direct, prefill, prefill_wgmma, ring, single, single_ring

    launch = entry.launch
    pdl = dependent_launch(out.device)
    if isinstance(launch, Single):
        single.single(x, weight, out, *launch)
    elif isinstance(launch, SingleRing):
        programs = launch.per_sm * multiprocessors(out.device)
        single_ring.single_ring(x, weight, out, *launch[:-1], programs, pdl)
    elif isinstance(launch, Direct):
        direct.direct(x, m, weight, out, *launch, pdl)
    elif isinstance(launch, Ring):
        ring.ring(x, m, weight, out, *launch[:-1], launch.per_sm * multiprocessors(out.device), pdl)
    elif isinstance(launch, Prefill):
        prefill.prefill(x, weight, out, *launch)
    else:
        prefill_wgmma.prefill_wgmma(x, weight, out, *launch, multiprocessors(out.device), pdl)


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
    if choice.paths and choice.kernel_set != "exact":
        _tell_table(arch)
    by_rows = launches.table(arch)[1].get(_table_set(choice), {})
    # And the first number of rows of each key of the table: that is another entry.
    warm_rows = sorted({*WARM_ROWS, *(rows + 1 for rows in by_rows if rows != ANY)})
    entries = tuple(entry_for(choice, arch, m, n, k) for m in warm_rows)
    key = (k, n % 16 == 0, dtype, rotation, choice.key, entries)
    if key in _warm:
        return
    calls = dict(CALLS)
    for m in warm_rows:
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


@functools.cache
def dependent_launch(device: torch.device) -> bool:
    """Whether a device has programmatic dependent launch."""
    import torch

    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (9, 0))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a device; 1 of the CPU's."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
