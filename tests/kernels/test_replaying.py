"""The functions that `abharness replay` is given: right, of the right paths, and a table that can be read again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DEVICE

from pq2 import dispatch, launches, quantize, reference, replaying, switches
from pq2 import format as pq2_format
from pq2.errors import FormatError, PathUnavailable

GPU = DEVICE == "cuda"


def layer(n: int = 48, k: int = 256, rows: int = 1, **tensors: torch.Tensor) -> Any:
    """A layer as a replay gives it."""
    found = SimpleNamespace(
        name="mlp.down_proj", n=n, k=k, rows=rows, bias="bias" in tensors, device=torch.device(DEVICE), tensors={}
    )
    found.tensors.update(replaying.weights(found, 3) | tensors)
    return found


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs the kernels on CPU tensors; the switches ask for CUDA."""
    resolve = switches.resolve
    monkeypatch.setattr(switches, "resolve", lambda environ, device: resolve(environ, "cuda"))


@pytest.mark.parametrize("make", [replaying.tuned, replaying.exact, replaying.legacy])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_set_gives_what_the_reference_gives(make: Any, rows: int) -> None:
    one = layer(rows=rows)
    x = torch.randn(rows, one.k, device=DEVICE)
    before = dict(dispatch.CALLS)
    got, wanted = make(one)(x), replaying.reference(one)(x)
    assert wanted.dtype == torch.float64
    assert float((got.double() - wanted).norm() / wanted.norm()) < 2e-6
    path = "legacy" if (rows > 1 and not GPU) or make is replaying.legacy else "single" if rows == 1 else None
    assert path is None or dispatch.CALLS[path] == before[path] + 1


def test_a_rotation_and_a_bias_are_the_layers() -> None:
    signs = (torch.arange(256, device=DEVICE) % 3 // 2 * -2 + 1).to(torch.int8)
    bias = torch.randn(48, device=DEVICE)
    rotated = layer(signs=signs, bias=bias)
    x = torch.randn(1, 256, device=DEVICE)
    weight = pq2_format.view(rotated.tensors["weight"], 48, 256)
    wanted = reference.matmul(quantize.rotate(x, signs, 256), weight) + bias
    assert torch.equal(replaying.reference(rotated, rotation=256)(x), wanted)
    assert torch.equal(replaying.reference(rotated, rotation=256, columns=7)(x), wanted[:, :7])
    got = replaying.tuned(rotated, rotation=256)(x)
    assert float((got.double() - wanted).norm() / wanted.norm()) < 2e-6


@pytest.mark.parametrize(
    ("change", "rotation", "message"),
    [
        ({"weight": torch.zeros(48, 256)}, 0, "a PQ2 weight is uint8, this one is torch.float32"),
        ({"weight": torch.zeros(7, dtype=torch.uint8)}, 0, r"a prepared \[48, 256\] matrix is uint8 \[3264\]"),
        ({"signs": torch.ones(256, dtype=torch.int8)}, 0, r"it is rotated: give \?rotation="),
        ({}, 256, "it is not rotated: leave rotation out"),
    ],
)
def test_a_layer_that_is_not_pq2s_is_refused(change: dict[str, torch.Tensor], rotation: int, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        replaying.tuned(layer(**{name: value.to(DEVICE) for name, value in change.items()}), rotation=rotation)


def test_on_a_cpu_only_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    one = layer()
    one.device = torch.device("cpu")
    with pytest.raises(PathUnavailable, match="these kernels run on CUDA"):
        replaying.tuned(one)


@pytest.mark.parametrize("rows", [1, 4, 16, 2048])
def test_options_are_the_tables_entries_for_a_k_and_each_can_be_given(rows: int) -> None:
    one = layer(n=64, k=5120, rows=rows)
    offered = replaying.options(one)
    assert len(offered) > 1
    assert len({str(one) for one in offered}) == len(offered)
    for options in offered:
        entry = launches.read_entry(options["entry"])
        fewest, most = entry.kind.rows
        assert fewest <= rows <= most
    single = next((options for options in offered if options["entry"]["path"] == "single"), None)
    if rows == 1:
        assert single is not None
        x = torch.randn(1, 5120, device=DEVICE)
        got, wanted = replaying.tuned(one, **single)(x), replaying.reference(one)(x)
        assert float((got.double() - wanted).norm() / wanted.norm()) < 2e-6


def test_a_table_holds_what_was_chosen_and_all_that_it_held() -> None:
    before = launches.table("sm_90")[1]
    entry = launches.write_entry(launches.Entry("direct", launches.Direct(64, 2, 2, 1)))
    chosen = {4: {"5120x6144": {"entry": entry}}, 8: {"7x128": {"entry": entry}}, 16: {}}
    after = launches.read_table(replaying.table("sm_90", chosen))
    assert after["exact"] == before["exact"]
    assert set(after["tuned"]) == {*before["tuned"], 4}
    assert after["tuned"][4] == before["tuned"][8] | {"5120x6144": [launches.read_entry(entry)]}
    assert after["tuned"][8] == before["tuned"][8] | {"7x128": [launches.read_entry(entry)]}
    assert {rows: after["tuned"][rows] for rows in (1, 16)} == {rows: before["tuned"][rows] for rows in (1, 16)}
    assert launches.table("sm_90")[1] is before
