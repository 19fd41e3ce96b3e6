"""Calls that may wait for a disk or a terminal -> made one after the other in a thread of their own, beside the load.

A line of progress on a terminal that is stopped (Ctrl-S), or an answer on a disk that blocks for a second, would
otherwise stop the event loop, and with it the clock of every request in flight.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVarTuple

Ts = TypeVarTuple("Ts")


class Beside(Generic[*Ts]):
    """Makes calls in the order they were put; at the end of its block all of them are done."""

    def __init__(self, call: Callable[[*Ts], None]) -> None:
        self._call = call
        self._waiting: queue.SimpleQueue[tuple[*Ts] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="beside", daemon=True)

    def put(self, *arguments: *Ts) -> None:
        """Have the call made soon; returns at once.

        Raises:
            Exception: What an earlier call raised.
        """
        if self._error is not None:
            raise self._error
        self._waiting.put(arguments)

    def _run(self) -> None:
        while (arguments := self._waiting.get()) is not None:
            if self._error is None:
                try:
                    self._call(*arguments)
                except BaseException as error:  # raised again where the calls come from
                    self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.put(None)
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error
