"""The paths of prefill: their own source run on arrays where there is no GPU, the compiled kernels where there is one."""

import inspect
import textwrap
from contextlib import nullcontext

import pytest
import torch
from conftest import DEVICE
from emulated import Timing, emulated

from pq2 import format as pq2_format
from pq2 import prefill, prefill_wgmma, quantize, reference
from pq2.errors import PathUnavailable

GPU = DEVICE == "cuda"
BOUND = 2e-6 if GPU else 1e-6
TIMINGS = [Timing(late, seed) for late in (True, False) for seed in (1, 2)]


def _case(m: int, n: int, k: int):
    torch.manual_seed(m)
    weight = pq2_format.random(n, k, DEVICE, seed=n)
    x = torch.randn(m, k, device=DEVICE)
    buffer = torch.full((m * n + 4096,), torch.nan, device=DEVICE)
    return weight, x, buffer[: m * n].view(m, n), buffer[m * n :], reference.matmul(x, weight)


def _steps(x: torch.Tensor) -> quantize.Steps:
    return quantize.steps(quantize.quantize(x, "steps"))


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


TILES = [(32, 32, 1, 2, 2, 3), (16, 64, 2, 1, 3, 1), (64, 32, 2, 2, 4, 16)]
SIZES = [(33, 72, 256), (17, 40, 1152), (70, 130, 384), (5, 33, 128)]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_tiles_of_mma(m: int, n: int, k: int, tile: tuple[int, ...]) -> None:
    weight, x, out, beyond, wanted = _case(m, n, k)
    with nullcontext() if GPU else emulated(prefill, "pq2_prefill_kernel"):
        prefill.prefill(_steps(x), weight, out, *tile)
    assert _error(out, wanted) < BOUND
    assert beyond.isnan().all()


RINGS = [
    ((32, 2, 4, 1, 1, 3, 1), 2),  # programs take several tiles
    ((32, 1, 2, 1, 1, 16, 2), 1),
    ((16, 3, 3, 2, 1, 1, 1), 100),  # two groups a stage, a program a tile
    ((32, 2, 8, 1, 3, 16, 1), 3),  # K in three parts, more stages than a part has
    ((64, 4, 2, 1, 2, 2, 1), 5),
]


@pytest.mark.parametrize("timing", TIMINGS if not GPU else TIMINGS[:1], ids=str)
@pytest.mark.parametrize(("launch", "programs"), RINGS, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(33, 72, 256), (17, 260, 1280), (70, 130, 512)])
@pytest.mark.skipif(GPU and torch.cuda.get_device_capability() < (9, 0), reason="no wgmma on this GPU")
def test_rings_of_wgmma(m: int, n: int, k: int, launch: tuple[int, ...], programs: int, timing: Timing) -> None:
    weight, x, out, beyond, wanted = _case(m, n, k)
    with nullcontext() if GPU else emulated(prefill_wgmma, "pq2_prefill_wgmma_kernel", timing=timing):
        prefill_wgmma.prefill_wgmma(_steps(x), weight, out, *launch, programs, pdl=GPU)
    assert _error(out, wanted) < BOUND
    assert beyond.isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_nan_for_its_token_alone(value: float) -> None:
    weight, x, out, _, wanted = _case(18, 70, 256)
    x[1, 200] = value
    with nullcontext() if GPU else emulated(prefill, "pq2_prefill_kernel"):
        prefill.prefill(_steps(x), weight, out, *TILES[0])
    assert out[1].isnan().all()
    assert _error(out[2:], wanted[2:]) < BOUND


def test_a_k_that_stages_do_not_fit_is_refused() -> None:
    weight, x, out, _, _ = _case(17, 64, 384)
    with pytest.raises(PathUnavailable, match="K is 384, and with 2 groups a stage it takes multiples of 256"):
        prefill_wgmma.prefill_wgmma(_steps(x), weight, out, 32, 2, 4, 2, 1, 1, 1, 1, pdl=False)


def test_a_ring_of_one_stage_is_refused() -> None:
    weight, x, out, _, _ = _case(17, 64, 256)
    with pytest.raises(PathUnavailable, match="a ring has 2 stages at least"):
        prefill_wgmma.prefill_wgmma(_steps(x), weight, out, 32, 2, 1, 1, 1, 1, 1, 1, pdl=False)


def test_registers_fit_a_multiprocessor() -> None:
    for consumers in (1, 2, 3, 4, 6):
        for per_sm in (1, 2, 3):
            launched, consumer, copier = prefill_wgmma.registers(consumers, per_sm)
            assert 128 * (consumers + 1) * launched * per_sm <= 65536
            assert consumers * consumer + copier <= launched * (consumers + 1)
            assert min(launched, consumer, copier) >= 24
            assert consumer % 8 == copier % 8 == launched % 8 == 0


BREAKS = {
    "a stage is given back before its products are there": (
        "consume", {"if step > first:": "if True:", "gl.where(stage == 0, STAGES, stage) - 1": "stage",
                    "if first < steps:": "if False:"}, False,
    ),
    "a stage is given back before the scales that were asked for are used": (
        "consume", {"xs = gl.perm": "release(empty.index(stage)) if i == SG - 1 else None\n                xs = gl.perm",
                    "if step > first:": "if False:", "if first < steps:": "if False:"}, False,
    ),
    "a stage is read before it is there": ("consume", {"mbarrier.wait(full.index(stage), phase)": ""}, False),
    "a stage is filled before it was given back": (
        "copy_activations", {"mbarrier.wait(empty.index(stage), phase)": ""}, False,
    ),
    "activations come with too few bytes": ("copy_activations", {"BLOCK_M * 128": "BLOCK_M * 124"}, True),
    "code bytes do not arrive": ("copy_codes", {"arrive_copied(full.index(stage))": ""}, True),
    "the ring does not wrap": ("copy_codes", {"stage, phase = advance(stage, phase, STAGES)": ""}, True),
}  # fmt: skip
"""What is broken: the function, what stands there instead of its text, and whether the program then waits for ever."""


@pytest.mark.skipif(GPU, reason="the emulation's own test")
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_ring_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, changes, stuck = BREAKS[name]
    jitted = getattr(prefill_wgmma, function)
    source = textwrap.dedent(inspect.getsource(jitted.fn)).partition("\ndef ")[2]
    for text, other in changes.items():
        assert text in source
        source = source.replace(text, other)
    names = dict(jitted.fn.__globals__)
    exec("def " + source, names)
    monkeypatch.setattr(jitted, "fn", names[function])
    weight, x, out, _, wanted = _case(33, 130, 1280)
    seen = [_goes_wrong(x, weight, out.fill_(torch.nan), wanted, timing) for timing in TIMINGS]
    assert all(seen) if stuck else any(seen)


def _goes_wrong(x: torch.Tensor, weight, out: torch.Tensor, wanted: torch.Tensor, timing: Timing) -> bool:
    try:
        with emulated(prefill_wgmma, "pq2_prefill_wgmma_kernel", timing=timing):
            prefill_wgmma.prefill_wgmma(_steps(x), weight, out, 32, 2, 2, 1, 1, 1, 1, 2, pdl=False)
    except AssertionError as error:
        return "wait for barriers" in str(error) or "more arrivals" in str(error)
    return not _error(out, wanted) < 1e-3
