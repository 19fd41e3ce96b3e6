"""A folder -> the commit that is checked out there, and whether anything differs from it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def state(folder: Path) -> dict[str, Any] | None:
    """`commit` and `dirty` of the repository that a folder lies in; None where there is none."""
    commit = _ask(folder, "rev-parse", "HEAD")
    status = _ask(folder, "status", "--porcelain")
    return None if commit is None else {"commit": commit.strip(), "dirty": bool(status)}


def state_of_files(folder: Path, files: Iterable[str]) -> dict[str, Any] | None:
    """The same of a folder alone: dirty where one of its files is changed, missing, or not in the commit.

    Args:
        folder: Below the repository's root.
        files: What counts, by names relative to the folder: a file that git ignores is no part of the commit.
    """
    commit = _ask(folder, "rev-parse", "HEAD")
    changed = _ask(folder, "diff", "--name-only", "HEAD", "--", ".")
    tracked = _ask(folder, "ls-files", "-z", "--", ".")
    if commit is None:
        return None
    dirty = changed is None or tracked is None or bool(changed) or not set(files) <= set(tracked.split("\0"))
    return {"commit": commit.strip(), "dirty": dirty}


def _ask(folder: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *args],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
