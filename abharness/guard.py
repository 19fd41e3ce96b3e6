"""A small process that outlives the harness -> no server that does.

A harness that is killed (SIGKILL, the kernel's OOM killer) cannot stop its server. The guard waits for that: it holds
the reading end of a pipe whose other end only the harness has. Where the pipe ends without the word that the run is
over, the harness is dead, and the guard gives back what the run held (`claims.clear_dead`).

Why not PR_SET_PDEATHSIG: it is delivered when the *thread* that started the server ends, not the process; it reaches
that one process only, not the engine and workers below it, which then lose their parent; an exec of a set-user-id
program drops it; and a signal alone returns neither shared memory nor the scratch folder.

While the harness lives the guard is blocked in one read on the standard library alone. It has a session of its own, so
that Ctrl-C and a closed terminal do not reach it, and ignores the signals that ask a program to end: asked together
with the harness, it ends when that has ended. Where the guard was killed too, the next run of this user clears up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OVER = b"over"


@contextlib.contextmanager
def guarding(scratch: Path) -> Iterator[None]:
    """Have the scratch folder of a run guarded for the block.

    Raises:
        OSError: The guard cannot be started.
    """
    package = str(Path(__file__).resolve().parent.parent)
    python_path = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH")) if part)
    guard = subprocess.Popen(
        [sys.executable, "-P", "-m", "abharness.guard", str(scratch)],
        env={**os.environ, "PYTHONPATH": python_path},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        # One that was killed meanwhile guards no more, which is no fault of the run.
        with contextlib.suppress(BrokenPipeError):
            guard.communicate(OVER)


def main(scratch: Path) -> None:
    """Wait for the end of the harness; clear up if that is not the end of the run."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == OVER:
        return
    from abharness.claims import clear_dead

    clear_dead(scratch, lambda _text: None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
