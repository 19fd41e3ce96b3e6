"""Closed-loop scheduling: a count of jobs and a concurrency become jobs done in order, watched by a liveness check.

Timed streams and GSM8K questions are sent the same way: each worker takes the next job of one fixed sequence as soon
as its last one ended, so that the order of submission is the same in every launch.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ALIVE_POLL_S = 0.5
"""Seconds between two liveness checks, and the pause after a job that failed in transport."""


class ServerGone(Exception):
    """The liveness check gave a reason why the server cannot answer any more."""


async def closed_loop(
    count: int, max_concurrency: int, work: Callable[[int], Awaitable[bool]], alive: Callable[[], str | None]
) -> None:
    """Run `work(0)` to `work(count - 1)`, at most `max_concurrency` at a time, started in order.

    Args:
        count: Number of jobs.
        max_concurrency: Jobs in flight.
        work: Does one job; False when the server did not answer properly, which asks for a look at `alive`.
        alive: None while the server runs, else why it does not. Called in the event loop: it must return at once.

    Raises:
        ServerGone: `alive` gave a reason; jobs in flight were cancelled.
    """
    jobs = iter(range(count))

    def check() -> None:
        reason = alive()
        if reason is not None:
            raise ServerGone(reason)

    async def worker() -> None:
        for job in jobs:
            if not await work(job):
                # A dying server refuses connections before its exit can be seen: without the pause the rest of
                # the sequence would be burned in milliseconds, as if the requests were at fault.
                await asyncio.sleep(ALIVE_POLL_S)
                check()

    async def watch() -> None:
        while True:
            await asyncio.sleep(ALIVE_POLL_S)
            check()

    watcher = asyncio.create_task(watch())
    workers = {asyncio.create_task(worker()) for _ in range(min(max_concurrency, count))}
    try:
        pending = set(workers)
        while pending:
            done, _ = await asyncio.wait({*pending, watcher}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            pending -= done
    finally:
        for task in (*workers, watcher):
            task.cancel()
        await asyncio.gather(*workers, watcher, return_exceptions=True)
