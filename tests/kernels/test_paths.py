"""Every path against the float64 reference, on fresh random inputs: interpreted without a GPU, compiled with one."""

import json

import pytest
import torch
from conftest import DEVICE, poisoned

from pq2 import activations, dispatch, embedding, launches, quantize, reference, small_gemm, switches
from pq2 import format as pq2_format
from pq2.errors import PathUnavailable
from pq2.format import Prepared

GPU = DEVICE == "cuda"
SETS = ("legacy", "exact", "tuned")
# Odd sizes first: N of no power of two, K of one group and of an odd number of groups.
SHAPES = [(5, 128), (70, 384), (33, 1152)] + ([(1000, 5120), (4097, 3968), (512, 17408)] if GPU else [])
ROWS = [2, 3, 16, 17] + ([8, 31, 33, 64, 65, 127, 512, 1000, 4096] if GPU else [])
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
TRUNCATES = 1 if GPU else 2
"""The interpreter cuts a fp32 result off where a GPU rounds it."""
BOUND = {torch.bfloat16: TRUNCATES * 2**-8, torch.float16: TRUNCATES * 2**-11, torch.float32: 2e-6}
"""Relative errors allowed: the rounding of the result, and the order of fp32 additions."""


def _choice(name: str) -> switches.Choice:
    return switches.resolve({"PQ2_KERNELS": name}, "cuda")


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(
    ("kernel_set", "m"), [*((kernel_set, 1) for kernel_set in SETS), *(("tuned", m) for m in ROWS)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_the_reference(
    kernel_set: str, shape: tuple[int, int], m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = shape
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(seed)
    weight = pq2_format.random(n, k, DEVICE, seed=seed)
    for dtype in DTYPES:
        x = torch.randn(m, k, device=DEVICE).to(dtype)
        wanted = reference.matmul(x, weight)
        with monkeypatch.context() as patched:
            poisoned(patched)
            got = dispatch.matmul(x, weight, _choice(kernel_set))
        assert got.shape == (m, n)
        assert got.dtype == dtype
        error = _error(got, wanted)
        assert error < BOUND[dtype], f"error {error:.2e}, allowed {BOUND[dtype]:.0e}, {dtype}, seed {seed}"


@pytest.mark.parametrize("m", [1, *((2, 5, 8, 9, 16) if GPU else ())])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_exact_set_gives_the_bits_of_legacy(shape: tuple[int, int], m: int) -> None:
    n, k = shape
    weight = pq2_format.random(n, k, DEVICE, seed=n)
    x = torch.randn(m, k, device=DEVICE)
    before = dict(dispatch.CALLS)
    exact = dispatch.matmul(x, weight, _choice("exact"))
    legacy = dispatch.matmul(x, weight, _choice("legacy"))
    assert torch.equal(exact, legacy)
    calls = {path: dispatch.CALLS[path] - before[path] for path in dispatch.CALLS}
    # Two kernels, not one twice.
    assert {path for path, count in calls.items() if count} == {"legacy", "single" if m == 1 else "direct"}


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("m", [*range(1, 65), 127, 128, 129, 512, 1000, 1024, 2048, 4095, 8192])
@pytest.mark.parametrize("k", [5120, 1152])
def test_every_number_of_rows(m: int, k: int) -> None:
    weight = pq2_format.random(1031, k, DEVICE, seed=m)
    x = torch.randn(m, k, device=DEVICE)
    wanted = reference.matmul(x, weight)
    before = dispatch.CALLS["prefill"]
    assert _error(dispatch.matmul(x, weight, _choice("tuned")), wanted) < BOUND[torch.float32]
    assert dispatch.CALLS["prefill"] - before == (m > 16)


def _entries() -> list[tuple[int, str, launches.Entry]]:
    """The entries of this GPU's table: rows, weight, entry."""
    by_rows = launches.table(dispatch.arch_of(torch.device(DEVICE)))[1]["tuned"]
    return [
        (min(rows, 2048), weight, entry)
        for rows, weights in by_rows.items()
        for weight, entries in weights.items()
        for entry in entries
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize(("rows", "name", "entry"), _entries() if GPU else [], ids=str)
def test_every_entry_of_the_table_is_right(rows: int, name: str, entry: launches.Entry) -> None:
    n, k = (3000, 5120) if name == "default" else map(int, name.split("x"))
    n = min(n, 20000)  # a head takes the reference long; rows enough for several tiles a program
    weight = pq2_format.random(n, k, DEVICE, seed=rows)
    for m in {rows, max(entry.kind.rows[0], rows - 3), min(rows, 130)}:
        x = torch.randn(m, k, device=DEVICE)
        out = torch.full((m, n), torch.nan, device=DEVICE)
        dispatch.run(entry, x, weight, out)
        assert _error(out, reference.matmul(x, weight)) < BOUND[torch.float32]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize(("rows", "name", "entry"), _entries() if GPU else [], ids=str)
def test_calls_that_follow_each_other_give_what_they_give_alone(rows: int, name: str, entry: launches.Entry) -> None:
    """Queued behind a long kernel, each call begins before the one before has ended; alone it never does."""
    n, k = (3000, 5120) if name == "default" else map(int, name.split("x"))
    n = min(n, 20000)
    weight = pq2_format.random(n, k, DEVICE, seed=rows)
    for m in {rows, max(entry.kind.rows[0], rows - 3)}:
        xs = [torch.randn(m, k, device=DEVICE) * 3**i for i in range(4)]
        outs = torch.full((2, 12, m, n), torch.nan, device=DEVICE)
        for number, out in enumerate(outs[0]):
            dispatch.run(entry, xs[number % 4], weight, out)
            torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        for number, out in enumerate(outs[1]):
            dispatch.run(entry, xs[number % 4], weight, out)
        assert torch.equal(outs[1], outs[0])


@pytest.mark.parametrize(("order", "m"), [("planes", 5), ("fragments", 5), ("steps", 5), ("planes", 20), ("steps", 20)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [128, 1152, 2048])
def test_the_quantising_kernel_gives_the_bits_of_the_reference(
    k: int, dtype: torch.dtype, order: quantize.Order, m: int
) -> None:
    x = (torch.randn(m, k, device=DEVICE) * torch.logspace(-3, 3, m, device=DEVICE)[:, None]).to(dtype)
    x[3, :128] = 0
    x[4, 0] = 40000.0
    wanted = quantize.quantize(x, order)
    if order == "fragments":
        got, rows = activations.quantize_fragments(x, 8), quantize.fragments(wanted, 8)
        assert torch.equal(got.q[:, :, :5], rows.q[:, :, :5])
        assert torch.equal(got.meta[:, :5], rows.meta[:, :5])
        return
    if order == "steps":
        got, rows = activations.quantize_steps(x), quantize.steps(wanted)
        assert torch.equal(got.q, rows.q)
        places = quantize.scale_places(m)
        assert torch.equal(got.scales[:, places], rows.scales[:, places])
        return
    planes = activations.quantize_rows(x)
    for name in ("q", "scales", "sums"):
        assert torch.equal(getattr(planes, name), getattr(wanted, name)), name


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter's, at inf / inf
@pytest.mark.parametrize("kernel_set", SETS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_comes_out_as_nan(value: float, kernel_set: str) -> None:
    weight = pq2_format.random(9, 384, DEVICE)
    x = torch.randn(3, 384, device=DEVICE)
    x[1, 200] = value
    got, wanted = activations.quantize_rows(x), quantize.quantize(x, "planes")
    for name in ("q", "scales", "sums"):
        torch.testing.assert_close(getattr(got, name), getattr(wanted, name), rtol=0, atol=0, equal_nan=True)
    assert dispatch.matmul(x[1:2], weight, _choice(kernel_set)).isnan().all()
    product = dispatch.matmul(x, weight, _choice(kernel_set))
    assert product[1].isnan().all()
    assert _error(product[::2], reference.matmul(x[::2], weight)) < BOUND[torch.float32]


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_rotation_spreads_what_is_not_finite_over_its_block(value: float) -> None:
    x = torch.randn(1, 512, device=DEVICE)
    x[0, 300] = value
    signs = torch.ones(512, dtype=torch.int8, device=DEVICE)
    scales = activations.quantize_rows(x, signs, 256).scales
    assert scales.isfinite().tolist() == [[True, True, False, False]]


def test_ties_round_to_even() -> None:
    x = torch.zeros(1, 128, device=DEVICE)
    x[0, :5] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5])
    q = activations.quantize_rows(x).q.reshape(4, 32)
    assert q[:, 0].tolist() == [127, 0, 2, 2]  # weights 0 to 3: byte 0 of each plane
    assert q[0, 1].item() == 0


@pytest.mark.parametrize("block", activations.ROTATIONS)
def test_rotated_activations_meet_rotated_weights(block: int) -> None:
    k = 2 * block
    x = torch.randn(3, k, device=DEVICE)
    signs = (torch.randint(0, 2, (k,), device=DEVICE) * 2 - 1).to(torch.int8)
    weight = pq2_format.random(40, k, DEVICE)
    got = dispatch.matmul(x, weight, _choice("tuned"), signs, block)
    wanted = reference.matmul(quantize.rotate(x, signs, block), weight)
    # A value next to a tie may round the other way, by one step of its group.
    assert _error(got, wanted) < 2e-3
    assert _error(dispatch.matmul(x, weight, _choice("tuned")), wanted) > 0.5  # not rotated is another product


def test_a_rotation_the_kernel_does_not_have_is_refused() -> None:
    with pytest.raises(PathUnavailable, match="blocks of 128: the quantising kernel has 256, 512"):
        activations.quantize_rows(torch.ones(1, 256, device=DEVICE), torch.ones(256, dtype=torch.int8), 128)


@pytest.mark.parametrize("m", [1, 2, 7, 16])
@pytest.mark.parametrize("shape", [(96, 640), (33, 1000), *([(96, 5120), (256, 4096)] if GPU else [])], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_product_is_the_reference_every_time(
    shape: tuple[int, int], m: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, k = shape
    x, weight = torch.randn(m, k, device=DEVICE).to(dtype), torch.randn(n, k, device=DEVICE).to(dtype)
    bias = torch.randn(n, device=DEVICE).to(dtype)
    arrived = small_gemm.counters(n, x.device)
    poisoned(monkeypatch)
    results = []
    for pieces in (40, 40, 3, 1):
        results.append(small_gemm.small_gemm(x, weight, arrived, bias, pieces))
        assert not arrived.any()  # ready for the next
        assert _error(results[-1], reference.small_gemm(x, weight) + bias.double()) < BOUND[dtype]
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [128, 1152])
def test_a_lookup_gives_the_bits_of_the_reference(k: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = pq2_format.random(37, k, DEVICE)
    ids = torch.tensor([0, 36, 5, 5], device=DEVICE)
    wanted = reference.embedding(ids, weight, dtype)
    poisoned(monkeypatch)
    got = embedding.lookup(ids, weight, dtype)
    if dtype == torch.bfloat16 and not GPU:  # cut off, not rounded
        assert _error(got, wanted.double()) < BOUND[dtype]
    else:
        assert torch.equal(got, wanted)


def test_a_rotated_lookup_is_rotated_back() -> None:
    weight = pq2_format.random(9, 512, DEVICE)
    signs = (torch.randint(0, 2, (512,), device=DEVICE) * 2 - 1).to(torch.int8)
    ids = torch.tensor([8, 0], device=DEVICE)
    wanted = quantize.unrotate(reference.embedding(ids, weight), signs, 256)
    assert _error(embedding.lookup(ids, weight, torch.float32, signs, 256), wanted) < 1e-6


@pytest.mark.parametrize("rotation", [0, 256])
def test_an_id_outside_of_the_vocabulary_has_no_row(rotation: int) -> None:
    weight = pq2_format.random(37, 256, DEVICE)
    signs = torch.ones(256, dtype=torch.int8, device=DEVICE)
    ids = torch.tensor([-1, 36, 37, 2**40], device=DEVICE)
    rows = embedding.lookup(ids, weight, torch.float32, signs, rotation)
    assert rows.isnan().all(dim=1).tolist() == [True, False, True, True]
    wanted = reference.embedding(ids[1:2], weight)
    assert _error(rows[1:2], quantize.unrotate(wanted, signs, rotation) if rotation else wanted) < 1e-6


def test_another_architectures_launch_table_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    dispatch._tell_table.cache_clear()
    monkeypatch.setattr(dispatch, "_warm", set())
    monkeypatch.setattr(dispatch.logger, "warning", lambda text, *values: told.append(text % values))
    for arch in ("sm_90", "sm_89", "sm_89"):
        monkeypatch.setattr(dispatch, "arch_of", lambda device, arch=arch: arch)
        dispatch._warm.clear()
        dispatch.warm_up(pq2_format.random(16, 128, DEVICE), torch.float32, _choice("tuned"))
    assert told == ["pq2: no launch table for sm_89: it takes sm_86's; python -m pq2.tune makes one"]


def test_every_key_of_a_table_is_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of rows that has an entry of its own is not compiled for in a request."""
    single = [{"path": "single", "block_n": 4, "block_g": 8, "num_warps": 1}]
    text = json.dumps({"tuned": {rows: {"default": single} for rows in ("1", "3", "24")}})
    monkeypatch.setattr(launches, "table", lambda arch: (arch, launches.read_table(text)))
    # What is remembered is of the real table.
    monkeypatch.setattr(dispatch, "entry_for", dispatch.entry_for.__wrapped__)
    ran = []
    monkeypatch.setattr(dispatch, "matmul", lambda x, *rest: ran.append(x.shape[0]))
    monkeypatch.setattr(dispatch, "_warm", set())
    dispatch.warm_up(pq2_format.random(48, 128, DEVICE), torch.float32, _choice("tuned"))
    assert ran == [1, 2, 4, 9, 17, 25, 33, 65]


def test_the_reference_is_not_run_by_a_kernel_under_its_name() -> None:
    before = dict(dispatch.CALLS)
    with pytest.raises(PathUnavailable, match="the kernel set reference runs no kernels"):
        dispatch.matmul(torch.ones(1, 128, device=DEVICE), pq2_format.random(4, 128, DEVICE), _choice("reference"))
    assert before == dispatch.CALLS


def test_no_rows_are_no_launch() -> None:
    weight = pq2_format.random(7, 256, DEVICE)
    assert dispatch.matmul(torch.ones(0, 256, device=DEVICE), weight, _choice("tuned")).shape == (0, 7)


def _damaged(weight: Prepared) -> Prepared:
    other = pq2_format.view(weight.data.clone(), *weight.shape)
    other.codes[0, 0] ^= 1
    return pq2_format.complete(other)


def test_one_wrong_code_is_seen() -> None:
    weight = pq2_format.random(5, 128, DEVICE)
    x = torch.randn(1, 128, device=DEVICE)
    x[0, 0] = 1  # one that is quantised to 0 would hide it
    wanted = reference.matmul(x, weight)
    assert _error(dispatch.matmul(x, _damaged(weight), _choice("tuned")), wanted) > BOUND[torch.float32]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("kernel_set", SETS)
@pytest.mark.parametrize("m", [1, 4, 64, 300])
def test_a_captured_graph_replays_with_new_inputs(kernel_set: str, m: int) -> None:
    weight = pq2_format.random(1000, 4096, DEVICE)
    x = torch.randn(m, 4096, device=DEVICE, dtype=torch.bfloat16)
    small = torch.randn(96, 4096, device=DEVICE, dtype=torch.bfloat16)
    arrived = small_gemm.counters(96, x.device)
    choice = _choice(kernel_set)
    dispatch.matmul(x, weight, choice)  # compiled before the capture
    rows = x[: small_gemm.MAX_M]
    small_gemm.small_gemm(rows, small, arrived, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dispatch.matmul(x, weight, choice)
        out_small = small_gemm.small_gemm(rows, small, arrived, None)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        out.fill_(torch.nan)
        graph.replay()
        assert _error(out, reference.matmul(x, weight)) < BOUND[torch.bfloat16]
        assert _error(out_small, reference.small_gemm(rows, small)) < BOUND[torch.bfloat16]
