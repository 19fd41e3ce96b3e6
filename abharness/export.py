"""Recorded runs -> a folder of files in the formats that others' tools read; all of it is written, or nothing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from abharness import benchfmt, benchserve, exported, lmeval, longcsv
from abharness.errors import RecordError, UsageError
from abharness.exported import Document, Exported
from abharness.runs import find_runs, read_run
from abharness.storage import write_text_atomic

FORMATS = ("csv", "benchfmt", "vllm-bench", "lm-eval")


@dataclass(frozen=True, slots=True)
class Written:
    """What an export wrote.

    Attributes:
        files: Relative to its folder.
        left_out: What is not in it, each with the reason.
    """

    files: tuple[PurePosixPath, ...]
    left_out: tuple[str, ...]


def export(folders: Sequence[Path], target: Path, formats: Sequence[str] = ()) -> Written:
    """Write the launches of every run at or below some folders.

    Args:
        folders: Results folders or run folders.
        target: Folder of the export, new or empty.
        formats: Of `FORMATS`; none means all.

    Raises:
        UsageError: The target holds something.
        RecordError: Nothing to export, or a record is damaged.
        OSError: It cannot be written; the target is then as it was.
    """
    _check_target(target)
    runs = [exported.make(read_run(path)) for path in find_runs(folders)]
    left_out = [text for one in runs for text in one.left_out]
    if not any(True for one in runs for _ in one.launches()):
        raise RecordError("nothing to export: no launch completed", hint="; ".join(left_out) or None)
    files: dict[PurePosixPath, None] = {}
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that it can take its place; the name of a link is not what is replaced.
    place = target.resolve()
    beside = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
    try:
        for document in _documents(runs, [name for name in FORMATS if not formats or name in formats]):
            path = _free(document.path, files)
            files[path] = None
            (beside / path).parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(beside / path, document.text)
        beside.chmod(0o755)
        beside.replace(place)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return Written(tuple(files), tuple(left_out))


def _check_target(target: Path) -> None:
    hint = "name a new or empty folder with --to; nothing is overwritten"
    if target.exists() and not target.is_dir():
        raise UsageError(f"--to {target}: not a folder", hint=hint)
    if target.is_dir() and any(target.iterdir()):
        raise UsageError(f"--to {target}: not empty", hint=hint)


_BY_RUN: dict[str, Callable[[Exported], Iterator[Document]]] = {
    "benchfmt": benchfmt.documents,
    "vllm-bench": benchserve.documents,
    "lm-eval": lmeval.documents,
}


def _documents(runs: Sequence[Exported], formats: Sequence[str]) -> Iterator[Document]:
    for name in formats:
        parts = longcsv.documents(runs) if name == "csv" else (d for one in runs for d in _BY_RUN[name](one))
        yield from (Document(PurePosixPath(name, document.path), document.text) for document in parts)


def _free(path: PurePosixPath, taken: Container[PurePosixPath]) -> PurePosixPath:
    """A path that no other file has: two names of a record may be equal after the cleaning."""
    number, free = 2, path
    while free in taken:
        free = path.with_name(f"{path.stem}.{number}{path.suffix}")
        number += 1
    return free
