"""Triton's interpreter stands in for the GPU where there is none; with one, the same tests run the compiled kernels."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
