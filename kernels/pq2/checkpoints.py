"""A Hugging Face directory or a GGUF file -> config, tensors by their names, tokenizer; and the files of a PQ2 directory.

Tensors are read one at a time and written shard by shard, so that a large model needs little memory.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pq2.errors import FormatError
from pq2.format import GROUP

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
# What other methods of quantisation store beside or instead of a weight.
_QUANTIZED = re.compile(r"\.(qweight|qzeros|g_idx|weight_packed|weight_scale|weight_scale_inv|weight_scale_2|absmax)$")
# What a server reads beside weights and config; a README or an evaluation of the original says nothing about the copy.
_BESIDE = re.compile(
    r"(tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|generation_config|preprocessor_config|"
    r"processor_config|video_preprocessor|spiece|sentencepiece|tekken|LICENSE|NOTICE).*|"
    r".*\.(tiktoken|jinja|py)|.*bpe\.model"
)


class Info(NamedTuple):
    """A tensor before it is read.

    Attributes:
        shape: Its shape; of PQ2 blocks, the shape of the matrix, [N, K].
        size: Bytes it has in the source.
        kept_size: Bytes it has in the target if it stays as it is.
    """

    shape: tuple[int, ...]
    size: int
    kept_size: int


class Source(Protocol):
    """A checkpoint to convert.

    Attributes:
        config: Content of the config.json of the target, without its quantization_config.
        infos: Every tensor by its Hugging Face name.
        blocks: Names of tensors that are PQ2 blocks already.
    """

    config: dict[str, Any]
    infos: dict[str, Info]
    blocks: frozenset[str]

    def load(self, name: str) -> torch.Tensor:
        """Read a tensor: floating, or uint8 [N, K / 128 * 34] where it is one of `blocks`."""
        ...

    def copy_tokenizer(self, target: Path) -> list[str]:
        """Put what a server reads beside the weights into a directory; the names of the files."""
        ...


class HfSource:
    """A Hugging Face directory with safetensors, one file or several with an index."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = _read_json(directory / "config.json", "a Hugging Face directory has one")
        self.blocks: frozenset[str] = frozenset()
        _refuse_quantized_config(self.config, directory)
        self._handles: dict[str, Any] = {}
        # safetensors lists names in an order of its own, another one each time.
        self._files = dict(sorted(self._find().items(), key=lambda item: _natural(item[0])))
        self.infos: dict[str, Info] = {}
        for name, file in self._files.items():
            part = self._open(file).get_slice(name)
            size = _BYTES.get(part.get_dtype())
            if size is None:
                raise FormatError(
                    f"{directory / file}: {name} has data type {part.get_dtype()}, which is not known here"
                )
            shape = tuple(part.get_shape())
            for length in shape:
                size *= length
            self.infos[name] = Info(shape, size, size)
        other = next((name for name in self.infos if _QUANTIZED.search(name)), None)
        if other:
            raise FormatError(
                f"{directory}: the tensor {other} says that this checkpoint is quantised by another method: convert "
                f"the original, in bf16, fp16 or fp32"
            )

    def load(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        try:
            return self._open(self._files[name]).get_tensor(name)
        except SafetensorError as error:
            raise FormatError(f"{self.directory / self._files[name]}: {name}: {error}") from error

    def copy_tokenizer(self, target: Path) -> list[str]:
        """Copy what a server reads beside the weights."""
        return copy_beside(self.directory, target)

    def _find(self) -> dict[str, str]:
        """Tensor -> file."""
        index = self.directory / INDEX
        if index.exists():
            listed = _read_json(index, "the index of the shards").get("weight_map")
            if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
                raise FormatError(f"{index}: there is no weight_map, the table of tensors and their files")
            names = {file: self._names(file) for file in sorted(set(listed.values()))}
            for name, file in listed.items():
                if name not in names[file]:
                    raise FormatError(f"{self.directory / file}: {name} is not in it, and {INDEX} says it is")
            return listed
        if (self.directory / SINGLE).exists():
            return dict.fromkeys(self._names(SINGLE), SINGLE)
        raise FormatError(
            f"{self.directory}: neither {SINGLE} nor {INDEX} is there; weights in other files (.bin, .pt) are not "
            f"read: save them as safetensors first"
        )

    def _names(self, file: str) -> set[str]:
        return set(self._open(file).keys())

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            path = self.directory / file
            if not path.is_file():
                raise FormatError(f"{path}: this shard is missing; {INDEX} names it")
            try:
                self._handles[file] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise FormatError(f"{path}: cut short, damaged or no safetensors file ({error})") from error
        return self._handles[file]


class Writer:
    """Tensors -> model.safetensors, or shards of a size with their index."""

    def __init__(self, directory: Path, shard_bytes: int) -> None:
        self.directory = directory
        self.shard_bytes = shard_bytes
        self.total = 0
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor; it is on disk when its shard is full, or after `finish`."""
        if self._pending and self._pending_bytes + tensor.nbytes > self.shard_bytes:
            self._write()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes
        self.total += tensor.nbytes

    def finish(self) -> int:
        """Write what is left and give the files their names; how many files there are."""
        self._write()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self.directory / SINGLE)
            return 1
        places = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._part(index).rename(self.directory / file)
            places.update(dict.fromkeys(names, file))
        write_json(self.directory / INDEX, {"metadata": {"total_size": self.total}, "weight_map": places})
        return count

    def _write(self) -> None:
        path = self._part(len(self._shards))
        path.touch()
        mode = path.stat().st_mode
        save_file(self._pending, path, metadata={"format": "pt"})
        # safetensors makes files that only their owner reads; a server may run as somebody else.
        path.chmod(mode)
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def _part(self, index: int) -> Path:
        return self.directory / f"part-{index}.safetensors"


def quantization_config(kept: Iterable[str], rotation_block: int | None) -> dict[str, Any]:
    """What config.json of a PQ2 model says; `layers.Pq2Config` reads it.

    Args:
        kept: Modules whose weights are ordinary tensors.
        rotation_block: Size of the rotation; None is none.
    """
    return {
        "quant_method": "pq2",
        "group_size": GROUP,
        "rotation_block": rotation_block,
        "modules_to_not_convert": list(kept),
    }


def copy_beside(directory: Path, target: Path) -> list[str]:
    """Copy tokenizer, chat template, generation config, licence: files a server or a reader needs beside the weights.

    Returns:
        Names of the files.
    """
    names = sorted(path.name for path in directory.iterdir() if path.is_file() and _BESIDE.fullmatch(path.name))
    for name in names:
        shutil.copyfile(directory / name, target / name)
    return names


def is_tokenizer(names: Iterable[str]) -> bool:
    """Whether a tokenizer is among the files."""
    return any(re.match(r"(tokenizer|vocab|spiece|sentencepiece|tekken)|.*\.(tiktoken|model)$", name) for name in names)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as transformers does."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _natural(name: str) -> list[tuple[int, str]]:
    """A key by which layer 2 comes before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _read_json(path: Path, what: str) -> dict[str, Any]:
    if not path.is_file():
        raise FormatError(f"{path}: there is no such file; {what}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path}: no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{path}: a JSON object is wanted, this is {type(content).__name__}")
    return content


def _refuse_quantized_config(config: dict[str, Any], directory: Path) -> None:
    for part in (config, config.get("text_config") or {}):
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                method = part[key].get("quant_method", "unnamed") if isinstance(part[key], dict) else "unnamed"
                raise FormatError(
                    f"{directory / 'config.json'}: already quantised ({key}, method {method}): convert the original, "
                    f"in bf16, fp16 or fp32"
                )
