"""Tensors -> safetensors files: each written whole or not at all, all of them together within a bound."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .capture_status import Refused

FILE_BYTES = 2**30
"""Most bytes of a file of weights; a single tensor that is larger has a file of its own."""
GIB = 2**30


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return int(tensor.numel() * tensor.element_size())


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`."""
    return str(dtype).removeprefix("torch.")


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in the memory of the host, of no class of vLLM's."""
    return tensor.data.as_subclass(torch.Tensor).to("cpu", copy=True).contiguous()


class Files:
    """The files of a capture.

    Attributes:
        written: Bytes of tensors so far.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self.written = 0

    def save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write one file.

        Raises:
            Refused: It would be more than was allowed.
        """
        size = sum(map(nbytes, tensors.values()))
        if self.written + size > self.most_bytes:
            raise Refused(
                f"{name} would make it {(self.written + size) / GIB:.2f} GiB, --most-gib is {self.most_bytes / GIB:g}",
                "capture fewer layers (--layers), rows or steps, or raise --most-gib",
                "usage",
            )
        self.written += size
        part = self.folder / f".{name}.part"
        try:
            save_file(tensors, part)
            part.chmod(0o644)
            part.replace(self.folder / name)
        finally:
            part.unlink(missing_ok=True)

    def save_weights(self, layers: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, dict[str, dict[str, Any]]]:
        """Write the tensors of layers, those that several share once.

        Returns:
            Layer -> name of the tensor -> where it is.
        """
        stored: dict[tuple[Any, ...], dict[str, Any]] = {}
        found: dict[str, dict[str, dict[str, Any]]] = {}
        batch: dict[str, torch.Tensor] = {}
        number = 1
        for layer, tensors in layers.items():
            found[layer] = {}
            for name, tensor in tensors.items():
                key = same(tensor) if tensor.numel() else (layer, name)
                if key not in stored:
                    if batch and sum(map(nbytes, batch.values())) + nbytes(tensor) > FILE_BYTES:
                        self.save(f"weights-{number:05}.safetensors", batch)
                        number, batch = number + 1, {}
                    batch[f"{layer}/{name}"] = plain(tensor)
                    stored[key] = {
                        "file": f"weights-{number:05}.safetensors",
                        "key": f"{layer}/{name}",
                        "shape": list(tensor.shape),
                        "dtype": dtype_name(tensor.dtype),
                    }
                found[layer][name] = stored[key]
        if batch:
            self.save(f"weights-{number:05}.safetensors", batch)
        return found


def same(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory, read in the same way."""
    return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
