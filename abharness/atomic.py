"""A file that is written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_TEMPORARY = re.compile(r"\..+\.(json|md|html|parquet)\.[a-z0-9_]{8}")


def unfinished(folder: Path) -> list[Path]:
    """Temporary files that a writer which was killed left beside what it was to replace."""
    return [path for path in folder.iterdir() if _TEMPORARY.fullmatch(path.name)]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`; at the end of the block it is synced and takes its place.

    Raises:
        OSError: With the path in it; an existing file is untouched, as it is where the block raises anything.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
