"""The Gluon paths: their own source run on arrays where there is no GPU, the compiled kernels where there is one."""

from contextlib import nullcontext

import pytest
import torch
from conftest import DEVICE
from emulated import emulated

from pq2 import direct, quantize, reference, ring, single_ring
from pq2 import format as pq2_format
from pq2.errors import PathUnavailable

GPU = DEVICE == "cuda"
BOUND = 2e-6 if GPU else 1e-6


def _emulated(module, *kernels):
    return nullcontext() if GPU else emulated(module, *kernels)


def _case(m: int, n: int, k: int, seed: int = 0):
    torch.manual_seed(seed)
    weight = pq2_format.random(n, k, DEVICE, seed=seed)
    x = torch.randn(m, k, device=DEVICE)
    out = torch.full((m, n), torch.nan, device=DEVICE)
    return weight, x, out, reference.matmul(x, weight)


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def _fragments(x: torch.Tensor) -> quantize.Fragments:
    return quantize.fragments(quantize.quantize(x, "fragments"), 8 if x.shape[0] <= 8 else 16)


@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize(
    ("shape", "launch"),
    [
        ((37, 384), (16, 2, 1, 1)),  # K that the steps do not fit
        ((64, 1024), (16, 4, 1, 2)),
        ((70, 1152), (32, 4, 2, 2)),
        ((33, 128), (32, 1, 2, 4)),
        ((48, 640), (32, 1, 1, 1)),
    ],
    ids=str,
)
def test_direct(shape: tuple[int, int], launch: tuple[int, ...], m: int) -> None:
    weight, x, out, wanted = _case(m, *shape)
    with _emulated(direct, "pq2_direct_kernel"):
        direct.direct(_fragments(x), m, weight, out, *launch, pdl=GPU)
    assert _error(out, wanted) < BOUND


RINGS = [
    ((16, 4, 1, 2, 3), 1, 3),  # a tile is one stage; programs take several tiles
    ((16, 4, 1, 1, 2), 1, 100),  # two stages a tile, a program a tile
    ((32, 4, 2, 1, 4), 1, 1),  # more stages than a tile has
    ((16, 2, 1, 3, 3), 1, 2),  # the last stage of a tile is not full
    ((16, 4, 1, 1, 3), 2, 4),  # K in two parts
    ((16, 2, 1, 1, 3), 3, 6),  # and in three, which do not divide it
    ((32, 1, 2, 4, 2), 1, 2),  # one warp along K: no sum over warps
]


@pytest.mark.parametrize("keep", [ring.IN_SHARED, ring.IN_REGISTERS, ring.SCALES_IN_SHARED])
@pytest.mark.parametrize(("launch", "split", "programs"), RINGS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(2, 70, 1024), (8, 96, 2048), (13, 40, 1024), (16, 64, 2048)])
def test_ring(m: int, n: int, k: int, launch: tuple[int, ...], split: int, programs: int, keep: int) -> None:
    weight, x, out, wanted = _case(m, n, k)
    with _emulated(ring, "pq2_ring_kernel"):
        ring.ring(_fragments(x), m, weight, out, *launch, keep, split, 0, programs, pdl=GPU)
    assert _error(out, wanted) < BOUND


SINGLES = [
    ((2, 16, 1, 1, 3), 2),
    ((8, 16, 2, 1, 2), 100),
    ((4, 16, 1, 2, 4), 1),
    ((1, 32, 1, 1, 3), 5),
    ((4, 8, 1, 1, 2), 3),
]


@pytest.mark.parametrize(("launch", "programs"), SINGLES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1024), (37, 1024), (21, 3072)])
def test_single_ring(n: int, k: int, launch: tuple[int, ...], programs: int) -> None:
    weight, x, out, wanted = _case(1, n, k)
    with _emulated(single_ring, "pq2_single_ring_kernel"):
        single_ring.single_ring(quantize.quantize(x, "planes"), weight, out, *launch, programs, pdl=GPU)
    assert _error(out, wanted) < BOUND


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_nan_for_its_token_alone(value: float) -> None:
    weight, x, _, wanted = _case(3, 32, 1024)
    x[1, 300] = value
    for module, run in (
        (direct, lambda out: direct.direct(_fragments(x), 3, weight, out, 16, 4, 1, 2, pdl=GPU)),
        (ring, lambda out: ring.ring(_fragments(x), 3, weight, out, 16, 4, 1, 2, 3, 1, 1, 0, 2, pdl=GPU)),
    ):
        out = torch.zeros(3, 32, device=DEVICE)
        with _emulated(module, f"pq2_{module.__name__.rpartition('.')[2]}_kernel"):
            run(out)
        assert out[1].isnan().all()
        assert _error(out[::2], wanted[::2]) < BOUND


def test_a_k_that_copies_of_16_bytes_do_not_fit_is_refused() -> None:
    weight, x, out, _ = _case(2, 16, 1152)
    with pytest.raises(PathUnavailable, match="ring: K is 1152, and it takes multiples of 1024"):
        ring.ring(_fragments(x), 2, weight, out, 16, 4, 1, 2, 3, 1, 1, 0, 1, pdl=False)
    with pytest.raises(PathUnavailable, match="single_ring: K is 1152"):
        single_ring.single_ring(quantize.quantize(x[:1], "planes"), weight, out[:1], 2, 16, 1, 1, 3, 1, pdl=False)


@pytest.mark.skipif(GPU, reason="the emulation's own test")
@pytest.mark.parametrize("outstanding", ["STAGES - 1", "STAGES"])
def test_a_ring_that_does_not_wait_is_seen(outstanding: str) -> None:
    """The emulation catches what it is for: a wait that waits for too little."""
    import inspect
    import textwrap
    import types

    kernel = ring.pq2_ring_kernel
    source = textwrap.dedent(inspect.getsource(kernel.fn)).partition("\ndef ")[2]
    broken = source.replace("wait_group(STAGES - 2)", f"wait_group({outstanding})")
    assert broken != source
    names = dict(kernel.fn.__globals__)
    exec("def " + broken, names)
    weight, x, out, wanted = _case(4, 64, 2048)
    with emulated(ring, "pq2_ring_kernel"):
        ring.pq2_ring_kernel.kernel = types.SimpleNamespace(fn=names["pq2_ring_kernel"])
        ring.ring(_fragments(x), 4, weight, out, 16, 4, 1, 2, 3, 1, 1, 0, 2, pdl=False)
    assert not _error(out, wanted) < 0.1
