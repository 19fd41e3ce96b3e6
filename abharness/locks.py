"""A file that one process holds at a time; the kernel gives it back when its holder dies, however it dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def held(path: Path, *, create: bool = True) -> Iterator[TextIO | None]:
    """Try to hold a lock file for the block.

    Whoever holds it may remove it: a lock counts only on the file that stands under its name.

    Args:
        path: The file.
        create: Make it where it is missing.

    Yields:
        The file, open for reading and writing; None when another process holds it.

    Raises:
        OSError: It cannot be opened; `FileNotFoundError` when it is missing (and is not to be made).
    """
    while True:
        # Not passed on to children: a server must not hold what its harness holds.
        number = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)
        with os.fdopen(number, "r+", encoding="utf-8", errors="replace") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            if _is_at(handle, path):
                yield handle
                return


def _is_at(handle: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False
