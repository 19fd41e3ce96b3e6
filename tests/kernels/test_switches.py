"""The switches: exact values, nothing unknown, nothing that cannot run; the same answer ever after."""

import pytest

from pq2 import switches
from pq2.errors import PathUnavailable, SwitchError


def test_unset_is_tuned_on_cuda_and_the_reference_on_a_cpu() -> None:
    assert (
        switches.resolve({}, "cuda").key == "kernel set tuned, single=on, small=on, ring=on, prefill=on, small_gemm=on"
    )
    assert switches.resolve({}, "cpu").key == (
        "kernel set reference, single=off, small=off, ring=off, prefill=off, small_gemm=off"
    )


@pytest.mark.parametrize(
    ("given", "paths"),
    [
        ({"PQ2_KERNELS": "legacy"}, set()),
        ({"PQ2_KERNELS": "exact"}, {"single", "small"}),
        ({"PQ2_KERNELS": "tuned", "PQ2_SINGLE": "off"}, {"small", "ring", "prefill", "small_gemm"}),
        ({"PQ2_KERNELS": "legacy", "PQ2_RING": "on"}, {"ring"}),
        ({"PQ2_KERNELS": "legacy", "PQ2_PREFILL": "on"}, {"prefill"}),
        ({"PQ2_KERNELS": "legacy", "PQ2_SMALL_GEMM": "on"}, {"small_gemm"}),
    ],
)
def test_an_override_beats_the_set(given: dict[str, str], paths: set[str]) -> None:
    choice = switches.resolve(given, "cuda")
    assert choice.paths == paths
    assert dict(choice.given) == given


@pytest.mark.parametrize("name", switches.NAMES)
@pytest.mark.parametrize("value", ["", "1", "true", "ON", "on ", "Tuned", "none"])
def test_a_value_that_is_not_known_exactly_is_refused(name: str, value: str) -> None:
    with pytest.raises(SwitchError, match=f"{name}={value!r}: allowed are .*leave it unset"):
        switches.resolve({name: value}, "cuda")


def test_a_misspelt_switch_is_refused() -> None:
    with pytest.raises(SwitchError, match=r"PQ2_SINGEL: no such switch; switches are PQ2_KERNELS, PQ2_SINGLE"):
        switches.resolve({"PQ2_SINGEL": "on", "PATH": "/bin"}, "cuda")


@pytest.mark.parametrize(
    "given", [{"PQ2_KERNELS": "tuned"}, {"PQ2_KERNELS": "legacy"}, {"PQ2_SINGLE": "on"}, {"PQ2_SMALL_GEMM": "on"}]
)
def test_what_cannot_run_on_a_cpu_raises_there(given: dict[str, str]) -> None:
    name, value = next(iter(given.items()))
    with pytest.raises(
        PathUnavailable, match=f"{name}={value}: these kernels run on CUDA, and this process runs on cpu"
    ):
        switches.resolve(given, "cpu")


def test_off_and_reference_hold_on_a_cpu() -> None:
    given = {"PQ2_KERNELS": "reference", "PQ2_SINGLE": "off"}
    assert switches.resolve(given, "cpu").key == (
        "kernel set reference, single=off, small=off, ring=off, prefill=off, small_gemm=off"
    )


@pytest.mark.parametrize("path", ["ring", "prefill"])
def test_the_exact_set_has_no_path_that_adds_in_another_order(path: str) -> None:
    name = switches.variable(path)
    with pytest.raises(SwitchError, match=f"{name}=on: it adds in another order than the older kernels"):
        switches.resolve({"PQ2_KERNELS": "exact", name: "on"}, "cuda")
    assert path not in switches.resolve({"PQ2_KERNELS": "exact", name: "off"}, "cuda").paths


def test_the_reference_has_no_paths() -> None:
    with pytest.raises(SwitchError, match="PQ2_SINGLE=on: the set reference runs no kernels"):
        switches.resolve({"PQ2_KERNELS": "reference", "PQ2_SINGLE": "on"}, "cuda")


def test_switches_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in switches.NAMES:
        monkeypatch.delenv(name, raising=False)
    switches.resolved.cache_clear()
    first = switches.resolved("cuda")
    monkeypatch.setenv("PQ2_KERNELS", "legacy")
    assert switches.resolved("cuda") is first
    switches.resolved.cache_clear()
