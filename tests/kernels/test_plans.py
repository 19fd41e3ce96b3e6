"""Launch plans: when a kernel that was launched is called directly, and with what."""

from typing import Any

import pytest
import torch
from conftest import DEVICE

from pq2 import format as pq2_format
from pq2 import plans, prefill, quantize, reference


class Compiled:
    """Stands in for what Triton compiled."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *everything: self.calls.append(("plan", grid, everything))


class Kernel:
    """Stands in for a function of Triton's: launching it gives what was compiled."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> Compiled:
            self.calls.append(("launch", grid, arguments, named))
            return Compiled(self.calls)

        return launch


BYTES = torch.zeros(64, dtype=torch.uint8)
CPU = torch.device("cpu")


def test_a_launch_like_one_before_calls_what_was_compiled_then() -> None:
    kernel = Kernel()
    for m in (33, 35):
        plans.launch(kernel, (m,), (BYTES, m), {"A": 4, "B": 8}, CPU, num_warps=2)
    assert kernel.calls == [
        ("launch", (33, 1, 1), (BYTES, 33), {"A": 4, "B": 8, "num_warps": 2}),
        ("plan", (35, 1, 1), (BYTES, 35, 4, 8)),  # constants too: everything that the kernel has
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"arguments": (BYTES, 1)},
        {"arguments": (BYTES, 48)},
        {"arguments": (BYTES, 2**31 + 1)},
        {"arguments": (BYTES[1:], 33)},
        {"arguments": (BYTES.view(torch.int8), 33)},
        {"constants": {"A": 5}},
        {"device": torch.device("meta")},
        {"num_warps": 4},
    ],
    ids=str,
)
def test_what_is_not_alike_is_launched(other: dict[str, Any]) -> None:
    kernel = Kernel()
    same: dict[str, Any] = {"arguments": (BYTES, 33), "constants": {"A": 4}, "device": CPU, "num_warps": 2}
    for given in (same, {**same, **other}, same, {**same, **other}):
        plans.launch(kernel, (1,), **given)
    assert [kind for kind, *_ in kernel.calls] == ["launch", "launch", "plan", "plan"]


def test_without_plans_triton_launches() -> None:
    kernel = Kernel()
    plans.launch(kernel, (1,), (BYTES,), {}, CPU)
    with plans.without():
        plans.launch(kernel, (1,), (BYTES,), {}, CPU)
    plans.launch(kernel, (1,), (BYTES,), {}, CPU)
    assert [kind for kind, *_ in kernel.calls] == ["launch", "launch", "plan"]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="no CUDA device")
def test_a_plan_computes_what_triton_s_launcher_does() -> None:
    weight = pq2_format.random(130, 512, DEVICE)
    for m in (17, 18, 32, 33, 48, 64):
        x = torch.randn(m, 512, device=DEVICE)
        steps = quantize.steps(quantize.quantize(x, "steps"))
        results = []
        for _ in range(2):
            results.append(torch.full((m, 130), torch.nan, device=DEVICE))
            prefill.prefill(steps, weight, results[-1], 32, 64, 1, 4, 3, 1)
        with plans.without():
            results.append(torch.full((m, 130), torch.nan, device=DEVICE))
            prefill.prefill(steps, weight, results[-1], 32, 64, 1, 4, 3, 1)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        assert float((results[0].double() - reference.matmul(x, weight)).abs().max()) < 1e-3
