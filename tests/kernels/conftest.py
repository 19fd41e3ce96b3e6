"""Triton's interpreter stands in for the GPU where there is none; with one, the same tests run the compiled kernels."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated holds NaN, or the worst integers: an element that nobody writes is seen."""
    plain = torch.empty

    def empty(*size, **kwargs):
        made = plain(*size, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made.fill_(torch.iinfo(made.dtype).max)

    monkeypatch.setattr(torch, "empty", empty)
