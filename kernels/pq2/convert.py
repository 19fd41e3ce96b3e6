"""A model -> a PQ2 model directory that vLLM serves: `python -m pq2.convert SOURCE TARGET`.

SOURCE is a Hugging Face directory, whose linear layers are made ternary (`pq2.selection` says which), or a GGUF file
whose matrices are ternary already, which pass as they are. TARGET is a new Hugging Face directory: every PQ2 matrix is
`<module>.weight`, uint8 [N, K / 128 * 34] of blocks; if it is rotated, `<module>.signs`, int8 [K] of +1 and -1, is
beside it; `quantization_config` in config.json says the rest.

Making weights ternary like this changes the model: without training for it, answers of a real one become useless. It
makes models of real shapes for measuring, and loses nothing where the weights are ternary already and not rotated here.

Exit codes: 0 done, 2 input that cannot be converted (nothing is left of TARGET), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pq2.checkpoints import (
    FLOATS,
    HfSource,
    Info,
    Source,
    Writer,
    copy_beside,
    is_tokenizer,
    quantization_config,
    write_json,
)
from pq2.errors import FormatError, PathUnavailable, Pq2Error
from pq2.format import BLOCK_BYTES, GROUP, block_rows, pack, ternarize
from pq2.quantize import random_signs, rotate
from pq2.selection import HEAD, Selection, Wishes, check_fused, check_groups, fused_with, last, select

CHUNK = 1 << 24
"""Weights made ternary at a time: what is beside them in memory is a dozen times their number of bytes."""


@dataclass(slots=True)
class Summary:
    """What a conversion did.

    Attributes:
        selection: What became PQ2 and what stayed.
        before: Bytes of all tensors in the source.
        after: Bytes of all tensors in the target.
        files: Files with weights.
        errors: Kind of module -> its number, sum of (w - ternary)^2, sum of w^2; empty where blocks just passed.
        notes: What the user should know.
    """

    selection: Selection
    before: int = 0
    after: int = 0
    files: int = 0
    errors: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def to_blocks(
    weight: torch.Tensor, signs: torch.Tensor | None, block: int | None, name: str
) -> tuple[torch.Tensor, float]:
    """Rotate a weight, if asked for, and make it ternary.

    With signs D and the transform H, y = W x = (W D H)(H D x): rows go through what activations go through. Rows of an
    embedding, too; the lookup undoes it.

    Args:
        weight: Floating [N, K].
        signs: int8 [K], or None for no rotation.
        block: Block of the rotation.
        name: The module, for messages.

    Returns:
        Blocks, uint8 [N, K / 128 * 34], and the sum of squared errors (the same before and after a rotation).

    Raises:
        FormatError: Weights that are NaN, infinite or beyond fp16.
    """
    n, k = weight.shape
    blocks = torch.empty(n, block_rows(k), dtype=torch.uint8)
    error = 0.0
    rows = max(1, CHUNK // k)
    for first in range(0, n, rows):
        part = weight[first : first + rows].to(torch.float32)
        if signs is not None and block is not None:
            part = rotate(part, signs, block)
        try:
            codes, scales = ternarize(part)
        except FormatError as caught:
            raise FormatError(f"{name}, rows from {first}: {caught}") from caught
        blocks[first : first + rows] = pack(codes, scales)
        ternary = (codes.to(torch.float32) - 1).reshape(-1, GROUP) * scales.to(torch.float32).reshape(-1, 1)
        error += float((part.reshape(-1, GROUP) - ternary).square().sum(dtype=torch.float64))
    return blocks, error


def read_signs(path: Path, modules: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """The signs of weights that are rotated already: `<module>.signs`, int8 [K], of every PQ2 module.

    Raises:
        FormatError: The file cannot be read, a module has none or one of another form, or fused modules differ.
    """
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            found = {m: file.get_tensor(f"{m}.signs") for m in modules if f"{m}.signs" in names}
    except SafetensorError as error:
        raise FormatError(f"{path}: cut short, damaged or no safetensors file ({error})") from error
    missing = [module for module in modules if module not in found]
    over = sorted(names - {f"{module}.signs" for module in modules})
    if missing or over:
        what = f"{missing[0]}.signs is missing" if missing else f"{over[0]} belongs to no PQ2 module"
        raise FormatError(
            f"{path}: {what}: it must hold <module>.signs of each of {len(modules)} PQ2 modules, nothing else"
        )
    for module, signs in found.items():
        k = modules[module][1]
        if signs.dtype != torch.int8 or tuple(signs.shape) != (k,) or not bool((signs.abs() == 1).all()):
            raise FormatError(
                f"{path}: {module}.signs must be int8 [{k}] of +1 and -1, is {signs.dtype} {list(signs.shape)}"
            )
        first = next(sibling for sibling in fused_with(module) if sibling in found)
        if not torch.equal(found[first], signs):
            raise FormatError(f"{path}: {module} and {first} have other signs: vLLM fuses them, so they must be equal")
    return found


def convert(source: Source, target: Path, arguments: argparse.Namespace) -> Summary:
    """Write a PQ2 model directory; see the module. The directory appears when it is whole.

    Raises:
        FormatError: The source cannot be converted as asked.
        OSError: The target cannot be written.
    """
    infos, tied = _without_tied_head(source)
    selection = _selected(source, infos, tied, arguments)
    block: int | None = arguments.rotation_block if source.blocks else arguments.rotate
    check_groups(selection.converted, block, arguments.tensor_parallel)
    signs = _signs(selection, source, block, arguments)
    summary = Summary(selection, before=sum(info.size for info in source.infos.values()))
    if tied and f"{HEAD}.weight" in source.infos:
        summary.notes.append(f"{HEAD}.weight equals the embedding it is tied to, and is left out")
    _check_space(target, infos, selection, rotated=block is not None)
    with _whole_or_nothing(target) as partial:
        summary.notes += _copy_beside(source, partial, arguments)
        writer = Writer(partial, arguments.max_shard_size)
        for done, name in enumerate(infos):
            _progress(done, len(infos))
            module = name.removesuffix(".weight")
            if name == f"{module}.weight" and module in selection.converted:
                writer.add(name, _blocks(source, name, module, signs.get(module), block, summary))
                if module in signs:
                    writer.add(f"{module}.signs", signs[module])
            else:
                writer.add(name, _kept(source, name))
        summary.files = writer.finish()
        summary.after = writer.total
        quantization = quantization_config(selection.kept, block)
        write_json(partial / "config.json", source.config | {"quantization_config": quantization})
    return summary


def _without_tied_head(source: Source) -> tuple[dict[str, Info], bool]:
    """The tensors to convert, and whether the head is the embedding; a copy of it is no tensor of its own."""
    text = source.config.get("text_config") or {}
    tied = bool(source.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    head = f"{HEAD}.weight"
    embedding = next((name for name in source.infos if name.endswith("embed_tokens.weight")), None)
    if not tied or head not in source.infos or embedding is None:
        return source.infos, tied
    if not torch.equal(source.load(head), source.load(embedding)):
        raise FormatError(
            f"{head} differs from {embedding}, and config.json says that they are one (tie_word_embeddings): correct "
            f"the one that is wrong"
        )
    return {name: info for name, info in source.infos.items() if name != head}, True


def _selected(source: Source, infos: dict[str, Info], tied: bool, arguments: argparse.Namespace) -> Selection:
    shapes = {name: info.shape for name, info in infos.items()}
    if not source.blocks:
        wishes = Wishes(arguments.keep, arguments.embedding, arguments.head)
        return select(shapes, tied, wishes)
    selection = Selection()
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if name in source.blocks:
            selection.converted[module] = (shape[0], shape[1])
        elif name.endswith(".weight") and len(shape) > 1:
            selection.kept[module] = "not PQ2 in the file"
    if tied and not any(last(module) == "embed_tokens" for module in selection.converted):
        selection.kept[HEAD] = "it is the embedding, which is not PQ2 in the file"
    check_fused(selection.converted, (name.removesuffix(".weight") for name in shapes))
    return selection


def _signs(
    selection: Selection, source: Source, block: int | None, arguments: argparse.Namespace
) -> dict[str, torch.Tensor]:
    if block is None:
        return {}
    if source.blocks:
        return read_signs(arguments.signs, selection.converted)
    # Of the input's width and the seed alone, so that fused layers have equal ones.
    widths = {k: random_signs(k, (k << 32) + arguments.seed) for _, k in selection.converted.values()}
    return {module: widths[k].clone() for module, (_, k) in selection.converted.items()}


def _blocks(
    source: Source, name: str, module: str, signs: torch.Tensor | None, block: int | None, summary: Summary
) -> torch.Tensor:
    weight = source.load(name)
    if name in source.blocks:
        return weight
    if weight.dtype not in FLOATS:
        raise FormatError(f"{name}: a weight to make ternary is bf16, fp16 or fp32, this is {weight.dtype}")
    blocks, error = to_blocks(weight, signs, block, module)
    count, errors, squares = summary.errors.get(last(module), (0, 0.0, 0.0))
    squares += sum(float(part.to(torch.float32).square().sum(dtype=torch.float64)) for part in weight.split(1024))
    summary.errors[last(module)] = (count + 1, errors + error, squares)
    return blocks


def _kept(source: Source, name: str) -> torch.Tensor:
    tensor = source.load(name)
    if tensor.dtype in FLOATS and not bool(torch.isfinite(tensor).all()):
        raise FormatError(f"{name}: a value is NaN or infinite: the checkpoint is damaged")
    return tensor


def _copy_beside(source: Source, partial: Path, arguments: argparse.Namespace) -> list[str]:
    if arguments.no_tokenizer:
        return ["no tokenizer, as asked for"]
    if arguments.tokenizer is not None:
        if not is_tokenizer(copy_beside(arguments.tokenizer, partial)):
            raise FormatError(f"--tokenizer {arguments.tokenizer}: there are no tokenizer files in this directory")
        return []
    if not is_tokenizer(source.copy_tokenizer(partial)):
        raise FormatError(
            "there is no tokenizer in SOURCE: name its directory with --tokenizer DIR, or give --no-tokenizer"
        )
    if source.blocks:
        return [
            "transformers made the tokenizer of the GGUF's metadata; the original's files are surer: --tokenizer DIR"
        ]
    return []


def _check_space(target: Path, infos: dict[str, Info], selection: Selection, rotated: bool) -> None:
    wanted = 0
    for name, info in infos.items():
        shape = selection.converted.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if shape is None:
            wanted += info.kept_size
        else:
            wanted += shape[0] * (shape[1] // GROUP) * BLOCK_BYTES + (shape[1] if rotated else 0)
    free = shutil.disk_usage(target.parent).free
    if free < wanted:
        raise FormatError(
            f"{target.parent}: {_size(free)} are free on this disk, and the model takes {_size(wanted)}: make room, or "
            f"choose another TARGET"
        )


@contextmanager
def _whole_or_nothing(target: Path) -> Iterator[Path]:
    """A directory beside the target that becomes the target at the end, or goes whatever happens."""
    partial = target.parent / f".{target.name}.{os.getpid()}.partial"
    partial.mkdir()
    try:
        yield partial
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _progress(done: int, count: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done + 1} of {count} tensors" + ("\n" if done + 1 == count else ""))


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.2f} {unit}"


def render(summary: Summary, source: Path, target: Path) -> str:
    """The summary as text."""
    selection = summary.selection
    ratio = summary.after / summary.before if summary.before else 1.0
    lines = [
        f"{source} -> {target}",
        f"PQ2: {len(selection.converted)} modules; {summary.files} file{'s' if summary.files > 1 else ''} of weights",
        f"bytes of tensors: {_size(summary.before)} -> {_size(summary.after)} ({ratio:.1%})",
    ]
    reasons: dict[str, list[str]] = {}
    for module, reason in selection.kept.items():
        reasons.setdefault(reason, []).append(module)
    for reason, modules in reasons.items():
        some = ", ".join(modules[:3]) + (", ..." if modules[3:] else "")
        lines.append(f"kept: {len(modules)} ({reason}): {some}")
    if summary.errors:
        lines += ["", f"{'kind':<16}{'modules':>8}  relative error of the weights, |W - ternary| / |W|"]
        for kind, (count, errors, squares) in summary.errors.items():
            relative = f"{(errors / squares) ** 0.5:.4f}" if squares else "all weights are zero"
            lines.append(f"{kind:<16}{count:>8}  {relative}")
    lines += [f"note: {note}" for note in summary.notes]
    return "\n".join(lines)


def _open(arguments: argparse.Namespace) -> Source:
    """The source that a path is, and whether the options are for its kind."""
    path: Path = arguments.source
    if not path.exists():
        raise FormatError(f"{path}: there is no such file or directory; models are not downloaded")
    if path.is_dir():
        if arguments.rotation_block is not None or arguments.signs is not None:
            raise FormatError(
                "--rotation-block and --signs are for a GGUF; a Hugging Face directory is rotated by --rotate BLOCK"
            )
        return HfSource(path)
    try:
        from pq2.gguf_source import GgufSource  # what it imports is needed for this kind of source alone
    except ImportError as error:
        raise PathUnavailable(f"{path}: a GGUF is read by the packages gguf and transformers: {error}") from error
    given = [name for name, on in (("--rotate", arguments.rotate), ("--keep", arguments.keep)) if on]
    given += [name for name, on in (("--no-embedding", not arguments.embedding), ("--head", arguments.head)) if on]
    if given or arguments.head is False:
        raise FormatError(
            f"{', '.join(given) or '--no-head'}: for a Hugging Face directory; the tensors of a GGUF are what they "
            f"are (that they are rotated is said with --rotation-block N --signs FILE)"
        )
    if (arguments.rotation_block is None) != (arguments.signs is None):
        raise FormatError(
            "--rotation-block and --signs go together: the one says how blocks are rotated, the other with which signs"
        )
    return GgufSource(path, getattr(torch, arguments.dtype))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pq2.convert", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="a Hugging Face directory with safetensors, or a .gguf file")
    add("target", type=Path, metavar="TARGET", help="the directory to make; it must not exist")
    add(
        "--max-shard-size",
        type=_bytes,
        default="2GB",
        help="size of a file of weights (and of memory taken); default 2GB",
    )
    add(
        "--tensor-parallel", type=_positive, default=1, metavar="N", help="refuse what N ranks would cut within a group"
    )
    add("--tokenizer", type=Path, metavar="DIR", help="directory to copy the tokenizer from, instead of SOURCE's")
    add("--no-tokenizer", action="store_true", help="a model without one")
    hf = parser.add_argument_group("a Hugging Face directory")
    add = hf.add_argument
    add("--keep", type=_regex, action="append", default=[], metavar="REGEX", help="modules that stay; repeatable")
    add(
        "--embedding",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make the token embedding PQ2 (default)",
    )
    add(
        "--head",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="the head (default; as the embedding if tied)",
    )
    add("--rotate", type=_positive, metavar="BLOCK", help="rotate inputs: signs, then a Hadamard transform over blocks")
    add("--seed", type=_seed, default=0, help="of the signs; default 0")
    ternary = parser.add_argument_group("a GGUF file")
    add = ternary.add_argument
    add("--rotation-block", type=_positive, metavar="N", help="its weights are rotated, over blocks of N")
    add("--signs", type=Path, metavar="FILE", help="safetensors with <module>.signs, int8 [K], of every PQ2 module")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of tensors in other quantised types")
    return parser


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*(kB|MB|GB)", text)
    if not found or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a number and a unit are wanted, kB, MB or GB, as in 2GB")
    return int(found[1]) * {"kB": 10**3, "MB": 10**6, "GB": 10**9}[found[2]]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 is wanted")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 0 to {(1 << 32) - 1} is wanted")
    return int(text)


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r}: no regular expression: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was begun is removed then, too
    target: Path = arguments.target
    try:
        if target.exists() or target.is_symlink():
            raise FormatError(f"{target}: exists already; TARGET is made anew, nothing is overwritten")
        if not target.parent.is_dir():
            raise FormatError(f"{target.parent}: there is no such directory to make TARGET in")
        if arguments.tokenizer is not None and not arguments.tokenizer.is_dir():
            raise FormatError(f"--tokenizer {arguments.tokenizer}: there is no such directory")
        summary = convert(_open(arguments), target, arguments)
    except Pq2Error as error:
        text = str(error)
    except OSError as error:
        text = f"{error.filename or target}: {error.strerror or error}; nothing is left of TARGET"
    except SafetensorError as error:  # writing: reading has its own message
        text = f"{target}: cannot be written: {error}; nothing is left of TARGET"
    except KeyboardInterrupt:
        sys.stderr.write("pq2.convert: interrupted; nothing is left of TARGET\n")
        return 130
    else:
        sys.stdout.write(render(summary, arguments.source, target) + "\n")
        return 0
    sys.stderr.write(f"pq2.convert: {text}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
