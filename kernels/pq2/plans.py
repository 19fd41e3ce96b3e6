"""Launch plans: a kernel that was launched before is called directly, without what Triton's launcher does at every launch.

At each launch Triton binds the arguments, finds out what each is specialised for (its dtype, an address or a number that is
a multiple of 16, the number 1) and looks up the kernel that was compiled for that. A plan is that compiled kernel, kept
under the same facts.

Test: tests/kernels/test_plans.py; on a GPU the tests of every path go through plans too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_plans: dict[tuple[Any, ...], Any] = {}
_on = True


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    device: torch.device,
    **options: Any,
) -> None:
    """Launch a kernel on the current stream.

    Args:
        kernel: A function of Triton or Gluon, whose arguments come before its constants.
        grid: Programs; up to three numbers.
        arguments: Its arguments, in order: tensors, integers and descriptors of bulk copies.
        constants: Its constants, in order. Descriptors' blocks follow from them.
        device: The current device, where the tensors are.
        **options: Options of the launch, such as `num_warps`.
    """
    grid = (*grid, *(1,) * (3 - len(grid)))
    if not _on:
        kernel[grid](*arguments, **constants, **options)
        return
    key = (
        kernel, device, *constants.values(), *options.values(),
        *[
            (a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor)
            # Integers are 32 bits wide where they fit; which of them a kernel is not specialised for makes no matter here.
            else (a == 1, a % 16 == 0, a < 1 << 31) if isinstance(a, int)
            else a.base.dtype
            for a in arguments
        ],
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        compiled = kernel[grid](*arguments, **constants, **options)
        if compiled is not None:  # nothing is compiled for the interpreter
            _plans[key] = compiled
    else:
        plan[grid](*arguments, *constants.values())


@contextmanager
def without() -> Iterator[None]:
    """Launch by Triton's own launcher: what plans are compared with."""
    global _on
    _on = False
    try:
        yield
    finally:
        _on = True
