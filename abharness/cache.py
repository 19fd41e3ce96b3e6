"""Where managed folders live and how one is built: cache root, lock, disk check, logged subprocess.

A leaf beside `errors`: server environments and models are both folders under one cache root that are built once, by one
process at a time, from a subprocess whose whole output is kept and whose last lines become the error.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from abharness.errors import InstallError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

TAIL_LINES = 15

# Variables that would make a child interpreter import from outside its own environment.
_FOREIGN_IMPORTS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def home_dir(environ: Mapping[str, str]) -> Path:
    """The user's home: `$HOME`, else the password database."""
    return Path(environ["HOME"]) if environ.get("HOME") else Path.home()


def expand_user(text: str, environ: Mapping[str, str]) -> Path:
    """A path with a leading `~/` replaced by the user's home, made absolute; symbolic links stay.

    An interpreter in a virtual environment is a link to another one: resolved, it would lose its packages.
    """
    if text == "~" or text.startswith("~/"):
        return home_dir(environ) / text[2:]
    return Path(text).absolute()


def cache_root(environ: Mapping[str, str]) -> Path:
    """Root of everything managed: `$ABHARNESS_CACHE`, else `$XDG_CACHE_HOME/abharness`, else `~/.cache/abharness`.

    An empty variable counts as unset, and so does a relative `XDG_CACHE_HOME` (XDG base directory specification).
    """
    if environ.get("ABHARNESS_CACHE"):
        return expand_user(environ["ABHARNESS_CACHE"], environ)
    xdg = environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if Path(xdg).is_absolute() else home_dir(environ) / ".cache"
    return base / "abharness"


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment less what would make a child interpreter import from outside its own environment."""
    return {name: value for name, value in environ.items() if name not in _FOREIGN_IMPORTS}


@contextlib.contextmanager
def building(folder: Path, progress: Callable[[str], None]) -> Iterator[int]:
    """Hold the one lock of a managed folder, `.<name>.lock` beside it, while changing the folder.

    Waits for another holder, saying so. The kernel gives the lock back when its holders are dead, so that a killed
    build blocks nobody for longer than the command it had started lives.

    Yields:
        The lock's file descriptor, for `run_logged`.

    Raises:
        InstallError: For whatever the file system refuses, inside the block too.
    """
    path = folder.parent / f".{folder.name}.lock"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress(f"another process is building {folder}; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield handle.fileno()
    except OSError as error:
        raise InstallError(
            f"{error.filename or folder}: {error.strerror}",
            hint="set ABHARNESS_CACHE to a folder that you can write, on a disk with space",
        ) from error


def require_disk(folder: Path, needed_bytes: int) -> None:
    """Refuse to start a build that the disk cannot hold.

    Args:
        folder: Where it will be built; need not exist.
        needed_bytes: Free bytes wanted on its filesystem.

    Raises:
        InstallError: With both numbers.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise InstallError(
            f"{folder} needs {needed_bytes / 1e9:.1f} GB, {existing} has {free_bytes / 1e9:.1f} GB free",
            hint="free some space, or set ABHARNESS_CACHE to a folder on a larger disk",
        )


def run_logged(
    argv: Sequence[str | Path], *, environ: Mapping[str, str], log: Path, lock: int, on_line: Callable[[str], None]
) -> tuple[int, list[str]]:
    """Run one command to its end, both its streams appended to a log file.

    Args:
        argv: The command.
        environ: Its whole environment.
        log: File that the command line and every output line are appended to.
        lock: What `building` gave. The command holds it too: where this process is killed, pip may live on and go on
            writing, and nobody may build in its folder until it has ended.
        on_line: Called with each output line, without its end.

    Returns:
        Exit status, and the last `TAIL_LINES` lines that are not blank.

    Raises:
        InstallError: The command cannot be started.
    """
    command = [str(part) for part in argv]
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        try:
            process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                cwd=log.parent,
                pass_fds=[lock],
            )
        except OSError as error:
            raise InstallError(f"{command[0]} cannot be started: {error.strerror}") from error
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                line = raw.rstrip()
                out.write(line + "\n")
                if line:
                    tail.append(line)
                    on_line(line)
            status = process.wait()
        finally:
            # An interrupt must not leave pip writing into a folder whose lock is about to be given back.
            if process.poll() is None:
                process.terminate()
                process.wait()
            process.stdout.close()
        out.write(f"exit status {status}\n")
    return status, list(tail)
