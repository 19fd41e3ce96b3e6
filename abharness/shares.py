"""Work on many items -> their results in order, shared out over the CPUs by forking.

Only a process with a single thread is forked: a lock that another thread holds at that moment would never be opened in
the child. Everywhere else, and for few items, the work is done here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

LEAST = 16
"""Items that are worth a process of their own."""

MOST = 8
"""Processes: what they read comes from one disk."""


def in_shares(work: Callable[[Sequence[T]], list[R]], items: Sequence[T]) -> list[R]:
    """`work` on all items, in as many shares as there are CPUs for them.

    Args:
        work: Gives a result for each item; it runs in a forked process for all shares but the first, so what it changes
            stays there, and its results and errors are pickled.
        items: Independent of each other.

    Raises:
        BaseException: What `work` raised, of the earliest share in which it raised anything.
    """
    count = min(len(items) // LEAST, len(os.sched_getaffinity(0)), MOST) if _one_thread() else 1
    if count < 2:
        return work(items)
    bounds = [len(items) * part // count for part in range(count + 1)]
    shares = [items[low:high] for low, high in pairwise(bounds)]
    children: list[tuple[int, int]] = []
    try:
        for share in shares[1:]:
            children.append(_start(work, share))
        results = work(shares[0])
        for child in children:
            results += _result(child)
    finally:
        for pid, pipe in children:
            with contextlib.suppress(OSError):
                os.close(pipe)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # our own child, not waited for yet: the number is still its own
            os.waitpid(pid, 0)
    return results


def _one_thread() -> bool:
    try:
        return len(list(Path("/proc/self/task").iterdir())) == 1
    except OSError:
        return False


def _start(work: Callable[[Sequence[T]], list[R]], share: Sequence[T]) -> tuple[int, int]:
    """A child at work on a share, and the end of the pipe that its outcome comes out of."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    # In the child: nothing of the parent's may run on from here, whatever happens.
    try:
        with os.fdopen(into, "wb") as pipe:
            pickle.dump(_outcome(work, share), pipe)
    finally:
        os._exit(0)


def _outcome(work: Callable[[Sequence[T]], list[R]], share: Sequence[T]) -> tuple[list[R] | None, BaseException | None]:
    try:
        return work(share), None
    except BaseException as error:
        return None, error


def _result(child: tuple[int, int]) -> list[Any]:
    with os.fdopen(child[1], "rb", closefd=False) as pipe:
        try:
            results, error = pickle.load(pipe)  # noqa: S301 - our own child wrote it
        except (EOFError, pickle.UnpicklingError) as broken:
            raise ChildProcessError(
                "a process that shared the work died before it was done: out of memory?"
            ) from broken
    if error is not None:
        raise error
    assert isinstance(results, list)
    return results
