"""The peers of the benchmark: who is left out, and why; their weights; their kernels, compiled many at a time."""

import dataclasses
import importlib.metadata
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from conftest import DEVICE

from pq2 import ahead, bench, peers, reference, switches, timing
from pq2 import format as pq2_format
from pq2.format import Prepared
from pq2.shapes import Projection

GPU = DEVICE == "cuda"
HERE = peers.Package("pytest", "pytest", importlib.metadata.version("pytest"))
NOWHERE = peers.Package("no-such-kernels", "no_such_kernels", "1.2")


@dataclasses.dataclass(frozen=True)
class Stub(peers.Peer):
    """Multiplies in float64; off by a factor, by one weight alone, or raising, where it is asked to be."""

    factor: float = 1.0
    cannot: tuple[int, ...] = ()
    stale: bool = False

    def prepare(self, weights: Sequence[Prepared], x: torch.Tensor) -> peers.Ready:
        if weights[0].shape[0] in self.cannot:
            raise ValueError(f"N={weights[0].shape[0]} is not for me\nand more")

        def product(copy: int) -> torch.Tensor:
            print("a peer talks")
            return (reference.exact_matmul(x, weights[0 if self.stale else copy]) * self.factor).to(x.dtype)

        return peers.Ready({self.name: product}, 1000, x.double())


def stub(name: str, package: peers.Package = HERE, **more) -> Stub:
    return Stub(name, package, "bf16", 1e-2, "that is what bf16 makes", **more)


WEIGHTS = [pq2_format.random(48, 256, seed=seed) for seed in range(2)]
X = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def test_a_peer_that_is_not_installed_is_told_with_how_to_install_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = peers.Peers([stub("absent", NOWHERE), stub("fair")])
    found.begin()
    assert found.left_out == {"absent": "no-such-kernels is not installed here (pip install no-such-kernels==1.2)"}
    told = capsys.readouterr().err.splitlines()
    assert told == [f"pq2.bench: absent is left out: {found.left_out['absent']}"]
    assert found.versions == {"fair": f"pytest {HERE.version}"}
    assert list(found.products(WEIGHTS, X)) == ["fair"]


def test_another_version_than_the_one_written_for_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    found = peers.Peers([stub("later", HERE._replace(version="0.1"))])
    assert [peer.name for peer in found.here] == ["later"]
    assert f"later was written for pytest 0.1, here is {HERE.version}" in capsys.readouterr().err


def test_a_package_that_does_not_load_is_left_out_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = peers.Peers([stub("broken", HERE._replace(module="no_such_module")), stub("fair")])
    found.begin()
    assert found.left_out == {"broken": "ModuleNotFoundError: No module named 'no_such_module'"}
    assert list(found.products(WEIGHTS, X)) == ["fair"]
    assert capsys.readouterr().err.count("broken") == 1


def test_a_product_that_is_right_comes_with_its_error_and_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    timed = peers.Peers([stub("fair")]).products(WEIGHTS, X)["fair"]
    assert 0 < timed.rel_err < 2**-8
    assert (timed.copies, timed.nbytes, timed.against) == (2, 1000, "bf16")
    assert torch.equal(timed.call(0), reference.exact_matmul(X, WEIGHTS[0]).to(torch.bfloat16))
    # From the line above: what it says when it is checked is no result.
    assert capsys.readouterr().out == "a peer talks\n"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (stub("bad", cannot=(48,)), "ValueError: N=48 is not for me"),
        (stub("bad", factor=1.02), "PathUnavailable: bad is off by 2.0"),
        (stub("bad", factor=float("nan")), "PathUnavailable: bad is off by inf"),
        (stub("bad", stale=True), "PathUnavailable: bad is off by 1."),
    ],
    ids=["raises", "wrong", "NaN", "multiplies by another copy"],
)
def test_a_peer_that_raises_or_is_wrong_is_left_out_of_that_product_alone(
    bad: Stub, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = peers.Peers([bad, stub("fair")])
    assert list(found.products(WEIGHTS, X)) == ["fair"]
    assert list(found.left_out) == ["bad 48x256 M=3"]
    told = found.left_out["bad 48x256 M=3"]
    assert told.startswith(reason)
    assert ("1e-02 is allowed: that is what bf16 makes" in told) == (not bad.cannot)
    assert f"pq2.bench: bad 48x256 M=3 is left out: {told}\n" in capsys.readouterr().err
    another = [pq2_format.random(64, 256)]
    assert ("bad" in found.products(another, X)) == (bad.factor == 1)


class OnCpu(bench.Product):
    """A product whose own kernels are not run, beside peers that are."""

    def __init__(self, projection: Projection, m: int, arch: str, others: peers.Peers) -> None:
        self.n, self.k, self.m, self.count = projection.n, projection.k, m, projection.count
        self.bytes, self.entry, self.dense = self.n * pq2_format.block_rows(self.k), None, [None]
        self.weights = [pq2_format.random(self.n, self.k)]
        self.own_errors = dict.fromkeys((*bench.OURS, "cublas-bf16"), 1e-3)
        self.peers = others.products(self.weights, torch.randn(m, self.k).to(torch.bfloat16))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark with clocks and kernels that are none."""
    monkeypatch.setattr(bench, "Product", OnCpu)
    monkeypatch.setattr(bench, "launch_times", lambda product: dict.fromkeys(product.calls(), 1e-6))
    monkeypatch.setattr(timing, "bandwidth", lambda: 4e12)
    monkeypatch.setattr(timing, "graph_times", lambda calls, *_, **__: {name: [2e-6] for name in calls})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")


def measure(others: list[peers.Peer], rows: Sequence[int], saved: list[dict] | None = None) -> dict:
    def save(found: dict) -> None:
        (saved if saved is not None else []).append({"rows": list(found["rows"]), "step_ms": dict(found["step_ms"])})

    return bench.measure("tiny", rows, "sm_90", peers.Peers(others), save)


@pytest.mark.usefixtures("on_cpu")
def test_a_benchmark_goes_on_without_those_who_cannot_and_who_lacks_a_product_has_no_step() -> None:
    shapes = {(one.n, one.k) for one in bench.projections("tiny")}
    some = next(iter(shapes))[0]
    saved: list[dict] = []
    found = measure([stub("absent", NOWHERE), stub("partly", cannot=(some,)), stub("fair")], [1, 16, 32], saved)
    measured = {name: {(r["n"], r["k"]) for r in found["rows"] if r["impl"] == name} for name in ("partly", "fair")}
    assert measured["fair"] == shapes
    assert measured["partly"] == {one for one in shapes if one[0] != some}
    assert found["step_ms"].keys() == {*bench.OURS, "cublas-bf16", "fair"}
    assert found["prefill_tflops"].keys() <= {*bench.OURS, "cublas-bf16", "fair", "partly"}
    assert found["peers"] == dict.fromkeys(("partly", "fair"), f"pytest {HERE.version}")
    assert "absent" in found["peers_left_out"]
    assert any(name.startswith(f"partly {some}x") for name in found["peers_left_out"])
    row = next(r for r in found["rows"] if r["impl"] == "fair")
    assert row["tb_s"] == pytest.approx(1000 / 2e-6 / 1e12)
    assert (row["against"], row["path"]) == ("bf16", None)
    assert 0 < row["rel_err"] < 2**-8
    assert len(saved) == 4  # after each number of rows, and at the end


@pytest.mark.usefixtures("on_cpu")
def test_a_fault_takes_nothing_back_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = bench.step_times

    def faulty(products, step):
        if products[0].m == 16:
            raise RuntimeError("the GPU is gone")
        return steps(products, step)

    monkeypatch.setattr(bench, "step_times", faulty)
    saved: list[dict] = []
    with pytest.raises(RuntimeError, match="the GPU is gone"):
        measure([stub("fair")], [1, 16], saved)
    assert {row["m"] for row in saved[-1]["rows"]} == {1, 16}
    assert saved[-1]["step_ms"]["fair"].keys() == {"1"}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(bench.main(arguments))
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_what_the_command_cannot_do_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(peers, "ALL", (stub("gemlite-a16w2", HERE), stub("humming-w2a8", NOWHERE)))
    assert "--peers takes names, or all, or none" in refused(["--peers", "all", "gemlite-a16w2"], capsys)
    assert "invalid choice: 'gemlite'" in refused(["--peers", "gemlite"], capsys)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "humming-w2a8: no-such-kernels is not installed" in refused(["--peers", "humming-w2a8"], capsys)
    for name, value, said in (("PQ2_KERNELS", "reference", "runs no kernels"), ("PQ2_SINGEL", "on", "no such switch")):
        with monkeypatch.context() as switched:
            switched.setenv(name, value)
            switches.resolved.cache_clear()
            assert said in refused([], capsys)
    switches.resolved.cache_clear()


def test_the_roofline_has_a_panel_for_one_row_and_for_sixteen_with_every_peer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the roofline is drawn by matplotlib")
    rows = [
        {"impl": name, "m": m, "us": 10.0 * n, "tb_s": 1.0}
        for name in ("pq2", *peers.NAMES) for m in (1, 16) for n in (1, 2)
    ]  # fmt: skip
    bench.plot({"gpu": "a GPU", "copy_tb_s": 4.0, "rows": rows}, tmp_path / "drawn.svg")
    drawn = (tmp_path / "drawn.svg").read_text()
    assert all(drawn.count(f"<!-- {name} -->") == 1 for name in ("pq2", *peers.NAMES, "M=1", "M=16"))


# What they multiply by.


def test_humming_is_given_the_ternary_values() -> None:
    weight = pq2_format.random(6, 256)
    words = peers.humming_words(weight)
    assert (words.dtype, tuple(words.shape)) == (torch.int32, (6, 16))
    # Weight j of a word is at bits 2 j; an unsigned code stands for code - 2.
    shifts = 2 * torch.arange(16, dtype=torch.int32)
    codes = (words.unsqueeze(-1) >> shifts & 3).reshape(6, 256)
    assert torch.equal(codes.int() - 2, pq2_format.unpack_codes(weight.codes).int() - 1)


def test_rescaled_activations_are_values_times_scales() -> None:
    q = torch.tensor([[1, -2, 3, 4]], dtype=torch.int8)
    assert peers.rescaled(q, torch.tensor([[2.0, 0.5]])).tolist() == [[2.0, -4.0, 1.5, 2.0]]
    assert peers.rescaled(q, torch.tensor([[2.0]])).tolist() == [[2.0, -4.0, 6.0, 8.0]]


GEMLITE_ON_A_CPU = """
import types, torch, triton
from triton.backends.compiler import GPUTarget
from pq2 import format, peers, reference
target = lambda: GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(types.SimpleNamespace(get_current_target=target))
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
weight = format.random(40, 256)
layer = peers.ALL[-1].layer(weight)
packed = layer.W_q.T.unsqueeze(-1)
codes = (packed >> 2 * torch.arange(16, dtype=torch.int32) & 3).reshape(40, 256)
values = (codes - layer.zeros).double() * layer.scales.T.double().repeat_interleave(128, dim=1)
rounded = format.Prepared(weight.data, weight.codes, weight.scales.to(torch.bfloat16))
assert torch.equal(values, reference.dequantize(rounded))
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("gemlite") is None, reason="gemlite is not installed")
def test_gemlite_is_given_the_ternary_values_and_the_scales_in_bf16() -> None:
    done = subprocess.run([sys.executable, "-c", GEMLITE_ON_A_CPU], capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("m", [1, 3, 16, 100, 512])
@pytest.mark.parametrize("peer", peers.ALL, ids=lambda peer: peer.name)
def test_every_peer_multiplies_by_our_weights(peer: peers.Peer, m: int) -> None:
    if importlib.util.find_spec(peer.package.module) is None:
        pytest.skip(f"{peer.package.name} is not installed")
    found = peers.Peers([peer])
    weights = [pq2_format.random(1024, 2048, "cuda", seed=seed) for seed in range(2)]
    x = torch.randn(m, 2048, dtype=torch.bfloat16, device="cuda")
    products = found.products(weights, x)
    assert not found.left_out
    quantises = {f"{peer.name}+quantise"} if "w2a8" in peer.name else set()
    assert products.keys() == {peer.name} | quantises
    for name, timed in products.items():
        for copy, weight in enumerate(weights):  # each copy by its own weight
            error = timing.deviation(timed.call(copy), timing.exact(x.double(), weight))
            assert error < max(peer.tolerance, 2 * peers.QUANTISING), (name, copy, error)
        assert timed.nbytes / (1024 * 2048) == pytest.approx(2.125 / 8, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
def test_hummings_own_packing_gives_our_words() -> None:
    ops = pytest.importorskip("humming.ops", reason="humming-kernels is not installed")
    weight = pq2_format.random(64, 512, "cuda")
    signs = pq2_format.unpack_codes(weight.codes).int() - 1
    assert torch.equal(ops.pack_weight(signs + 2, 2), peers.humming_words(weight))


# Compiled before they are launched.


def test_what_does_not_compile_ahead_is_told_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Neither shape nor machine is for it: without humming it does not load, without a GPU it has no device, and N is odd.
    assert ahead.compile_all([peers.ALL[0], stub("fair")], [(17, 128, 1)]) > 0
    assert "pq2.bench: not compiled: " in capsys.readouterr().err
    assert ahead.compile_all([stub("fair")], [(17, 128, 1)]) == 0

    def broken(*_) -> list[str]:
        raise OSError("no processes")

    monkeypatch.setattr(ahead, "compile_gemlite", broken)
    assert ahead.compile_all([stub("fair")], [(17, 128, 1)]) == 1
    assert "pq2.bench: not compiled: OSError: no processes" in capsys.readouterr().err


def test_gemlites_candidates_are_compiled_once_for_rows_that_share_them() -> None:
    step = [Projection(256, 512, True, 2, 0), Projection(1024, 256, True, 1, 0)]
    products = bench.products_of(step, [1, 2, 4, 8, 16, 512, 2048])
    jobs = [product for _, product in ahead.gemlite_jobs([peers.ALL[-1]], products)]
    assert sorted(m for n, _, m in jobs if n == 256) == [1, 4, 8, 16, 2048]
    assert sorted(m for n, _, m in jobs if n == 1024) == [1, 4, 8, 16]  # a head is not multiplied by a prompt


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_humming_is_launched_as_its_table_of_defaults_says(kind: str) -> None:
    tune = pytest.importorskip("humming.tune", reason="humming-kernels is not installed")
    peer = next(one for one in peers.ALL if getattr(one, "inputs", {}).get("dtype") == kind)
    config = peer.layer(pq2_format.random(5120, 6144, "cuda")).humming_config
    table = tune.get_heuristics_config(config, device=torch.device("cuda", 0))
    for m in (*bench.ROWS, 4096):
        [entry] = [entry for fewer, most, entry in table if fewer < m <= most]
        assert entry == tune.get_heuristics_config(config, shape_m=m, device=torch.device("cuda", 0)), m
