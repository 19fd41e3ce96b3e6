"""Prompts and a concurrency -> timed streams of a server's `/v1/completions` -> one `RequestRecord` a request.

A cell is a closed loop: `max_concurrency` workers, each sending the next prompt of one fixed sequence as soon as its
last stream ended. During the cell the client does as little as it can: bodies are serialised before, the loop keeps
`(time, bytes)` for each read and looks inside after, the garbage collector is off. What it costs nevertheless is
measured (`ClientLoad`), because a client that is busy shows its own speed as the server's.

Every time is `time.monotonic()`, seconds (CLOCK_MONOTONIC on Linux: comparable between processes of one host).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from abharness.errors import LoadFailed
from abharness.prompts import prompt_hash
from abharness.record import ClientLoad, RequestRecord
from abharness.sse import Exchange, quantile, to_record
from abharness.workers import ServerGone, closed_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import SimpleNamespace

LAG_INTERVAL_S = 0.010
"""Period of the timer that measures event-loop lag."""

READ_BUFFER_BYTES = 1 << 20
"""A stream's buffer in the client: large enough that reading is never paused by flow control."""

IDLE_CONNECTION_S = 2.0
"""Longest idle time of a connection that is reused: under the 5 s after which vLLM's server closes it."""


@dataclass(frozen=True, slots=True)
class CellTraffic:
    """What one cell's traffic looked like to the client.

    Attributes:
        requests: One record per request that was started, in prompt order; those cut off by an early end are failed.
        started_s: First submission, monotonic seconds.
        ended_s: End of the last stream, monotonic seconds.
        client: How busy the client was in between.
        cut_short: Why the cell ended before its last prompt was done, or None.
    """

    requests: list[RequestRecord]
    started_s: float
    ended_s: float
    client: ClientLoad
    cut_short: str | None = None


class CellFailed(LoadFailed):
    """The server went away during a cell.

    Attributes:
        traffic: Everything measured until then.
    """

    def __init__(self, message: str, traffic: CellTraffic, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.traffic = traffic


class CellInterrupted(KeyboardInterrupt):
    """Ctrl-C during a cell.

    Attributes:
        traffic: Everything measured until then.
    """

    def __init__(self, traffic: CellTraffic) -> None:
        super().__init__("interrupted")
        self.traffic = traffic


def run_cell(
    *,
    base_url: str,
    served_model: str,
    prompts: Sequence[Sequence[int]],
    output_len: int | Sequence[int],
    max_concurrency: int,
    request_timeout_s: float,
    alive: Callable[[], str | None],
    on_progress: Callable[[int, int], None] | None = None,
    seed: int | None = None,
) -> CellTraffic:
    """Drive one cell to its end.

    Args:
        base_url: The server's root, for example `http://127.0.0.1:8000`.
        served_model: The `--served-model-name`.
        prompts: Token ids of each prompt, in order of submission.
        output_len: Tokens to generate, exactly: sent as `max_tokens` and `min_tokens` with `ignore_eos`. One number for
            all, or one for each prompt.
        max_concurrency: Requests kept in flight.
        request_timeout_s: Longest time from a request's submission to the end of its stream.
        alive: None while the server runs, else why it does not. Called twice a second in the timed loop: it must
            return at once (a `poll()`, no scan).
        on_progress: Called with requests ended and requests in all, in the timed loop.
        seed: Sampling seed to send. Decoding is greedy: leave it out unless the sampler is under test.

    Returns:
        The traffic. Failed requests are in it, with their `error`.

    Raises:
        CellFailed: `alive` gave a reason; carries the traffic so far.
        CellInterrupted: Ctrl-C; carries the traffic so far.
    """
    if not prompts or max_concurrency < 1:
        raise ValueError("a cell needs a prompt and a worker")
    lengths = [output_len] * len(prompts) if isinstance(output_len, int) else list(output_len)
    bodies = [_body(served_model, prompt, n, seed) for prompt, n in zip(prompts, lengths, strict=True)]
    hashes = [prompt_hash(prompt) for prompt in prompts]
    meter = _Meter()
    exchanges: list[Exchange] = []

    def traffic(cut_short: str | None) -> CellTraffic:
        requests = [
            to_record(
                exchange,
                prompt_sha256=hashes[exchange.index],
                requested_input_len=len(prompts[exchange.index]),
                requested_output_len=lengths[exchange.index],
            )
            for exchange in exchanges
        ]
        started_s = min((exchange.submitted_s for exchange in exchanges), default=meter.started_s)
        ended_s = max((exchange.ended_s for exchange in exchanges), default=meter.started_s)
        chunks = sum(request.chunks for request in requests)
        return CellTraffic(requests, started_s, ended_s, meter.client_load(chunks), cut_short)

    try:
        with _collector_off():
            asyncio.run(
                _drive(
                    url=f"{base_url.rstrip('/')}/v1/completions",
                    bodies=bodies,
                    exchanges=exchanges,
                    max_concurrency=max_concurrency,
                    request_timeout_s=request_timeout_s,
                    alive=alive,
                    on_progress=on_progress,
                    meter=meter,
                )
            )
        return traffic(None)
    except ServerGone as gone:
        raise CellFailed(
            f"the server went away after {len(exchanges)} of {len(prompts)} requests were sent: {gone}",
            traffic(str(gone)),
            hint="the end of the server's log says why",
        ) from None
    except KeyboardInterrupt as interrupt:
        raise CellInterrupted(traffic("interrupted")) from interrupt


def _body(served_model: str, prompt: Sequence[int], output_len: int, seed: int | None) -> bytes:
    body: dict[str, Any] = {
        "model": served_model,
        "prompt": list(prompt),
        "max_tokens": output_len,
        "min_tokens": output_len,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        # A special token has no text otherwise, and a chunk without text does not say whether it carries a token.
        "skip_special_tokens": False,
        # A running count would tell, but the server would spend time on it in every chunk.
        "stream_options": {"include_usage": True},
    }
    if seed is not None:
        body["seed"] = seed
    return json.dumps(body, separators=(",", ":")).encode()


async def _drive(
    *,
    url: str,
    bodies: Sequence[bytes],
    exchanges: list[Exchange],
    max_concurrency: int,
    request_timeout_s: float,
    alive: Callable[[], str | None],
    on_progress: Callable[[int, int], None] | None,
    meter: _Meter,
) -> None:
    monotonic = time.monotonic
    ended = 0

    async def sent(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
        # aiohttp writes head and body in one call, right after it announces the body.
        context.trace_request_ctx.sent_s = monotonic()

    trace = aiohttp.TraceConfig()
    trace.on_request_chunk_sent.append(sent)

    async def send(index: int) -> bool:
        nonlocal ended
        exchange = Exchange(index)
        exchanges.append(exchange)
        exchange.submitted_s = monotonic()
        try:
            async with (
                asyncio.timeout(request_timeout_s),
                session.post(url, data=bodies[index], trace_request_ctx=exchange) as response,
            ):
                exchange.status = response.status
                read = response.content.readany
                keep = exchange.reads.append
                while data := await read():
                    keep((monotonic(), data))
        except TimeoutError:
            exchange.failure = f"no end of the stream within {request_timeout_s:g} s"
        except (aiohttp.ClientError, OSError) as error:
            exchange.failure = f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            exchange.failure = "cut off: the cell ended early"
            raise
        finally:
            exchange.ended_s = monotonic()
        ended += 1
        if on_progress is not None:
            on_progress(ended, len(bodies))
        return exchange.failure is None and exchange.status == 200

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
        trace_configs=[trace],
        read_bufsize=READ_BUFFER_BYTES,
        auto_decompress=False,
    ) as session:
        meter.start(asyncio.get_running_loop())
        try:
            await closed_loop(len(bodies), max_concurrency, send, alive)
        finally:
            meter.stop()


class _Meter:
    """Measures the client during a cell: CPU time, wall time, and how late a periodic timer of its loop fires."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        self._cpu_s = 0.0
        self._wall_s = 0.0
        self._lags_s = [0.0]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._lags_s.clear()
        self._loop = loop
        self._cpu_started_s = time.process_time()
        self.started_s = time.monotonic()
        self._arm()

    def stop(self) -> None:
        self._timer.cancel()
        # The pending timer counts as far as it is overdue: a loop blocked at the end of a cell is seen too.
        self._lags_s.append(max(0.0, time.monotonic() - self._due_s))
        self._wall_s = time.monotonic() - self.started_s
        self._cpu_s = time.process_time() - self._cpu_started_s

    def client_load(self, chunks: int) -> ClientLoad:
        wall_s = self._wall_s or math.inf
        return ClientLoad(
            cpu_share=self._cpu_s / wall_s,
            loop_lag_p50_s=quantile(self._lags_s, 0.5),
            loop_lag_p99_s=quantile(self._lags_s, 0.99),
            chunks_per_s=chunks / wall_s,
        )

    def _arm(self) -> None:
        self._due_s = time.monotonic() + LAG_INTERVAL_S
        self._timer = self._loop.call_later(LAG_INTERVAL_S, self._fire)

    def _fire(self) -> None:
        self._lags_s.append(max(0.0, time.monotonic() - self._due_s))
        self._arm()


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    """Keep the garbage collector out of a timed window: a full collection stops the loop for tens of milliseconds."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
