"""A GGUF file of a ternary model -> the same as a Hugging Face checkpoint: config, names, tensors, tokenizer.

The `gguf` package reads the file, transformers makes config and tokenizer of its metadata, and `gguf` maps the names of
the model that this config stands for. PQ2 tensors pass as blocks; tensors of other types are dequantised.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pq2 import gguf_types
from pq2.checkpoints import Info
from pq2.errors import FormatError
from pq2.format import check_blocks

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`general.architecture` that are converted. Others differ from transformers in more than names."""

_EXACT = {
    gguf.GGMLQuantizationType.F64: torch.float64,
    gguf.GGMLQuantizationType.F32: torch.float32,
    gguf.GGMLQuantizationType.F16: torch.float16,
    gguf.GGMLQuantizationType.BF16: torch.bfloat16,
}


class GgufSource:
    """A GGUF file in which at least one matrix is PQ2."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """Read everything but the tensors' data.

        Args:
            path: The file.
            dtype: What tensors of other quantised types become. F64, F32, F16 and BF16 stay what they are.

        Raises:
            FormatError: The file is no GGUF, is damaged, or holds what is not converted here.
        """
        self.path = path
        self.dtype = dtype
        self._pq2 = gguf_types.register()
        reader = _open(path)
        self.architecture = _architecture(reader, path)
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        if not any(tensor.tensor_type == self._pq2 for tensor in reader.tensors):
            types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
            raise FormatError(
                f"{path}: no tensor is PQ2 (type {self._pq2.value}); there are {_listed(types)}. Blocks of a GGUF "
                f"are passed on; to make a model's weights ternary, give its Hugging Face directory"
            )
        eos, tokens = (reader.get_field(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "tokens"))
        self._eos = None if eos is None else int(eos.contents())
        self._vocabulary = 0 if tokens is None else len(tokens.data)
        self.config, shapes = self._read_config(reader)
        self._names = self._map_names(shapes)
        self.infos = {name: self._info(name, shape) for name, shape in shapes.items()}
        self.blocks = frozenset(
            name for name, tensor in self._names.items() if self._tensors[tensor].tensor_type == self._pq2
        )

    def load(self, name: str) -> torch.Tensor:
        """Read a tensor: checked blocks, or floating."""
        tensor = self._tensors[self._names[name]]
        kind = tensor.tensor_type
        if kind == self._pq2:
            data = torch.from_numpy(np.array(tensor.data))
            check_blocks(data, f"{self.path}: {tensor.name}")
        elif kind in _EXACT:
            data = torch.from_numpy(np.array(tensor.data)).view(_EXACT[kind])
        else:
            data = torch.from_numpy(np.array(gguf.dequantize(tensor.data, kind))).to(self.dtype)
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(tensor.name.split(".")[-2])
        return unpermute(data, self.config[heads]) if self.architecture == "llama" and heads else data

    def copy_tokenizer(self, target: Path) -> list[str]:
        """Make the tokenizer that the file's metadata describe, through transformers.

        Raises:
            FormatError: transformers cannot, or makes one that ends texts with another token or has tokens of its own.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name)
            if (tokenizer.eos_token_id, len(tokenizer)) != (self._eos, self._vocabulary):
                raise FormatError(
                    f"it ends texts with token {tokenizer.eos_token_id} and has {len(tokenizer)} tokens, where the "
                    f"file says {self._eos} and {self._vocabulary}"
                )
            files = tokenizer.save_pretrained(target)
        except Exception as error:  # whatever it trips over, the way on is the same
            raise FormatError(
                f"{self.path}: transformers {transformers.__version__} makes no tokenizer of it ({_told(error)}); give "
                f"the directory of the original's with --tokenizer DIR, or --no-tokenizer"
            ) from error
        return sorted(Path(file).name for file in files if Path(file).is_file())

    def _read_config(self, reader: gguf.GGUFReader) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
        """The config as JSON, and the shape of every tensor of the model that it stands for."""
        try:
            config = AutoConfig.from_pretrained(self.path.parent, gguf_file=self.path.name)
            # transformers leaves the size of a head at its class's default where the file states another.
            head = reader.get_field(f"{self.architecture}.attention.key_length")
            if head is not None:
                config.head_dim = int(head.contents())
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
        except Exception as error:  # metadata of any kind may be missing or odd
            raise FormatError(
                f"{self.path}: transformers makes no {self.architecture} config of its metadata ({_told(error)})"
            ) from error
        config.architectures = [type(model).__name__]
        content = json.loads(config.to_json_string())
        content["dtype"] = str(self.dtype).removeprefix("torch.")
        tied = content["tie_word_embeddings"]
        shapes = {n: tuple(t.shape) for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
        return content, shapes

    def _map_names(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
        """Hugging Face name -> name in the file.

        Raises:
            FormatError: A tensor is left over on either side, or has another shape.
        """
        model_arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        table = gguf.get_tensor_name_map(model_arch, self.config["num_hidden_layers"])
        names = {}
        for name, shape in shapes.items():
            stem, _, leaf = name.rpartition(".")
            found = f"{table.get_name(stem)}.{leaf}"
            if found not in self._tensors:
                raise FormatError(f"{self.path}: the tensor {found} ({name}) is missing")
            have = tuple(reversed(self._tensors[found].shape.tolist()))
            if have != shape:
                raise FormatError(f"{self.path}: {found} is {list(have)}, and the metadata make {name} {list(shape)}")
            names[name] = found
        over = sorted(self._tensors.keys() - names.values())
        if over:
            raise FormatError(
                f"{self.path}: {', '.join(over[:3])}{' and more' if over[3:] else ''}: a {self.architecture} model of "
                f"transformers has no place for this, and leaving it out would change the answers"
            )
        return names

    def _info(self, name: str, shape: tuple[int, ...]) -> Info:
        tensor = self._tensors[self._names[name]]
        if tensor.tensor_type == self._pq2 and (len(shape) != 2 or not name.endswith(".weight")):
            raise FormatError(f"{self.path}: {tensor.name} is PQ2 and no weight matrix: {list(shape)}")
        exact = tensor.tensor_type in _EXACT or tensor.tensor_type == self._pq2
        if not exact and tensor.tensor_type not in gguf.quants._type_traits:
            raise FormatError(
                f"{self.path}: {tensor.name} has type {tensor.tensor_type.name}: PQ2, F64, F32, F16, BF16 and what the "
                f"gguf package dequantises are taken"
            )
        size = int(tensor.n_bytes)
        return Info(shape, size, size if exact else int(tensor.n_elements) * self.dtype.itemsize)


def unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's interleaving of the two rotary halves in the rows of a query or key projection.

    Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py, of which this is the inverse. Rows of blocks move
    whole.

    Args:
        rows: [N, ...], floating or blocks.
        heads: Heads of the projection.
    """
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _open(path: Path) -> gguf.GGUFReader:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise FormatError(f"{path}: no GGUF file: it begins with {magic!r}, not b'GGUF'")
    try:
        # A size that is read out of a damaged header overflows; the reader then fails on what it finds there.
        with np.errstate(all="ignore"):
            reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        raise FormatError(
            f"{path}: the GGUF file is cut short, damaged, or has a tensor type that the gguf package does not know "
            f"({_told(error)})"
        ) from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise FormatError(f"{path}: a big-endian GGUF file: PQ2 blocks are little-endian")
    return reader


def _architecture(reader: gguf.GGUFReader, path: Path) -> str:
    field = reader.get_field("general.architecture")
    architecture = str(field.contents()) if field is not None else "none named"
    if architecture not in ARCHITECTURES:
        raise FormatError(
            f"{path}: general.architecture is {architecture}: converted are {', '.join(ARCHITECTURES)}; others are "
            f"converted from their Hugging Face directory"
        )
    parts = reader.get_field("split.count")
    if parts is not None and int(parts.contents()) > 1:
        raise FormatError(f"{path}: one of {parts.contents()} parts: join them with llama-gguf-split --merge first")
    return architecture


def _listed(types: Counter[str]) -> str:
    return ", ".join(f"{count} of type {name}" for name, count in types.most_common())


def _told(error: Exception) -> str:
    """An error of another package, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
