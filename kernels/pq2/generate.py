"""A shape's name -> a Hugging Face model directory in PQ2: config and tokenizer, and random weights where asked for.

    python -m pq2.generate SHAPE TARGET [--weights] [--bf16] [--rotated] [--seed N] [--tokenizer DIR]

Without weights the directory is for `--load-format dummy`. The disk layout:

* `<module>.weight` of every linear layer, of the token embedding and of the head is uint8 [N, K / 128 * 34]: PQ2 blocks,
  row by row; with `--rotated` `<module>.signs`, int8 [K], lies beside it;
* modules named in `modules_to_not_convert` of `quantization_config`, and all other tensors, are bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pq2 import format as pq2_format
from pq2.checkpoints import Writer, quantization_config
from pq2.errors import Pq2Error
from pq2.quantize import random_signs
from pq2.shapes import (
    ROTATION,
    SHAPES,
    Matrix,
    check_rotation,
    make_config,
    matrices,
    meta_model,
    summary,
)

SHARD_BYTES = 1 << 29
"""A shard grows up to this, or to one tensor. Writing takes the memory of two: safetensors copies what it is given."""
HEADROOM_BYTES = 64 << 20
"""What a disk must have beyond the tensors: headers, config, tokenizer."""

END_OF_TEXT, TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class GenerateError(Pq2Error):
    """The directory cannot be made as asked."""


def byte_tokenizer() -> Any:
    """A tokenizer of 256 bytes and three special tokens, with a chat template: it needs no file and no network."""
    vocabulary = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, TURN, END_OF_TURN])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=END_OF_TEXT
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model directory.

    Raises:
        GenerateError: There is none.
    """
    if not folder.is_dir():
        raise GenerateError(f"--tokenizer {folder}: no such directory; give one that has a tokenizer, or leave it out")
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise GenerateError(f"--tokenizer {folder}: transformers finds no tokenizer there: {error}") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written: its name in the checkpoint, its bytes, and what makes it."""

    name: str
    size: int
    make: Callable[[], torch.Tensor]


def entries(model: Any, found: Sequence[Matrix], seed: int, *, rotated: bool) -> Iterator[Entry]:
    """Every tensor of the checkpoint, in the model's order.

    PQ2 weights are random and other tensors are as transformers initialises them. Each depends on the seed and its own
    name, and on nothing else.
    """
    converted = {f"{matrix.name}.weight": matrix for matrix in found if matrix.converted}
    for name, parameter in model.named_parameters():
        matrix = converted.get(name)
        if matrix is None:
            yield Entry(name, parameter.numel() * parameter.element_size(), _Fresh(model, name, _seed(seed, name)))
            continue
        blocks = functools.partial(_random_blocks, matrix.n, matrix.k, _seed(seed, name))
        yield Entry(name, matrix.weight_bytes, blocks)
        if rotated:
            # Modules that are fused read the same activations, rotated once.
            signs = functools.partial(random_signs, matrix.k, _seed(seed, f"{matrix.fused}.signs"))
            yield Entry(f"{matrix.name}.signs", matrix.k, signs)


def _random_blocks(n: int, k: int, seed: int) -> torch.Tensor:
    return pq2_format.to_blocks(pq2_format.random(n, k, seed=seed))


@dataclass(frozen=True, slots=True)
class _Fresh:
    model: Any
    name: str
    seed: int

    def __call__(self) -> torch.Tensor:
        owner, _, parameter = self.name.rpartition(".")
        module = self.model.get_submodule(owner)
        module.to_empty(device="cpu", recurse=False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            # What a norm, a decay or a convolution starts from is known to the model's class alone.
            self.model._init_weights(module)
        tensor = module.get_parameter(parameter).detach()
        module.to_empty(device="meta", recurse=False)
        return tensor


def write_weights(planned: Sequence[Entry], folder: Path) -> None:
    """Write tensors shard by shard; one shard is in memory at a time.

    Raises:
        OSError, SafetensorError: The disk is full, or does not take the files.
    """
    writer = Writer(folder, SHARD_BYTES)
    for entry in planned:
        writer.add(entry.name, entry.make())
    writer.finish()


def _seed(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed} {name}".encode())


def check_room(needed: int, folder: Path) -> None:
    """Look whether the disk has room.

    Raises:
        GenerateError: It has not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed + HEADROOM_BYTES:
        raise GenerateError(
            f"{folder}: the weights take {needed / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free; make room, "
            "choose another disk, or leave --weights out"
        )


def generate(
    name: str,
    target: Path,
    *,
    weights: bool = False,
    bf16: bool = False,
    rotated: bool = False,
    seed: int = 0,
    tokenizer: Path | None = None,
) -> str:
    """Make a model directory; it appears under its name only when it is whole.

    Args:
        name: One of `SHAPES`.
        target: The directory to make.
        weights: Write random weights.
        bf16: The same shape unquantised.
        rotated: Activations are rotated before they are quantised; random signs.
        seed: Of the weights.
        tokenizer: A directory with the tokenizer to copy; None makes one of bytes.

    Returns:
        The summary.

    Raises:
        GenerateError: It cannot be made as asked; nothing is left behind.
        ShapeError: The shape does not go with the tokenizer, the rotation, or the transformers that is installed.
    """
    if bf16 and rotated:
        raise GenerateError("--bf16 and --rotated: an unquantised model has no rotation; give one of them")
    if target.exists():
        raise GenerateError(f"{target} exists; remove it, or give another name")
    words = load_tokenizer(tokenizer) if tokenizer else byte_tokenizer()
    config = make_config(name, words)
    model = meta_model(config)
    found = matrices(model, bf16=bf16)
    if rotated:
        check_rotation(name, found)
    if not bf16:
        kept = [matrix.name for matrix in found if not matrix.converted]
        config.quantization_config = quantization_config(kept, ROTATION if rotated else None)
    planned = list(entries(model, found, seed, rotated=rotated))
    size = sum(entry.size for entry in planned)
    partial = target.with_name(f"{target.name}.partial")
    if partial.exists():
        raise GenerateError(f"{partial} exists: another run makes it, or one was killed; if none runs, remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if weights:
            check_room(size, target.parent)
        partial.mkdir()
    except OSError as error:
        raise GenerateError(f"{target} cannot be made: {error}") from error
    try:
        config.save_pretrained(partial)
        words.save_pretrained(partial)
        if weights:
            write_weights(planned, partial)
        partial.rename(target)
    except (OSError, SafetensorError) as error:
        raise GenerateError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return summary(name, config, found, size)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 where the directory was made, 2 where it could not be."""
    parser = argparse.ArgumentParser(
        prog="pq2.generate", description="Make a model directory in PQ2, of a shape, with random weights or none."
    )
    parser.add_argument("shape", choices=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("target", type=Path, metavar="TARGET", help="the directory to make")
    parser.add_argument("--weights", action="store_true", help="write random weights (else: --load-format dummy)")
    parser.add_argument("--bf16", action="store_true", help="the same shape unquantised")
    parser.add_argument("--rotated", action="store_true", help=f"rotate activations, in blocks of {ROTATION}")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="copy this one's tokenizer (else: one of bytes)")
    given = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        text = generate(
            given.shape,
            given.target,
            weights=given.weights,
            bf16=given.bf16,
            rotated=given.rotated,
            seed=given.seed,
            tokenizer=given.tokenizer,
        )
    except Pq2Error as error:
        sys.stderr.write(f"pq2.generate: error: {error}\n")
        return 2
    sys.stdout.write(f"{text}\n{given.target}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
