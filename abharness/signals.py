"""Signals that ask the program to end -> one KeyboardInterrupt, at a moment when nothing is half done."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def _handlers(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Install one handler for the signals that ask a program to end; only a main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def signals_interrupt() -> contextlib.AbstractContextManager[None]:
    """Make SIGTERM and SIGHUP end the block as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    return _handlers(interrupt)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back interrupts until the block is done, then deliver one."""
    asked: list[int] = []
    with _handlers(lambda number, _frame: asked.append(number)):
        yield
    if asked:
        raise KeyboardInterrupt
