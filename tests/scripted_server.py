"""A small HTTP server in a thread that answers with exact bytes, pauses and breaks, and keeps what it was asked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

Step = bytes | float
"""Bytes to send as one HTTP chunk, or seconds to wait."""


@dataclass
class Answer:
    """What the server does with one request.

    Attributes:
        steps: The body, piece by piece.
        whole: End the body properly; False: just close the connection.
    """

    steps: Sequence[Step] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    whole: bool = True


def json_answer(payload: Any, status: int = 200) -> Answer:
    return Answer([json.dumps(payload).encode()], status, "application/json")


def sse(*payloads: dict[str, Any] | str) -> list[Step]:
    """Events, each with its own HTTP chunk."""
    return [f"data: {p if isinstance(p, str) else json.dumps(p)}\n\n".encode() for p in payloads]


def completion_stream(output_len: int, prompt_len: int, pause_s: float = 0.0) -> Answer:
    """A stream as vLLM sends it: a chunk a token, usage, [DONE]."""
    steps: list[Step] = []
    for n in range(1, output_len + 1):
        reason = "length" if n == output_len else None
        steps += [pause_s, *sse({"choices": [{"index": 0, "text": f" t{n}", "finish_reason": reason}]})]
    usage = {"prompt_tokens": prompt_len, "completion_tokens": output_len}
    return Answer([*steps, *sse({"choices": [], "usage": usage}, "[DONE]")])


class ScriptedServer:
    """Answers each request with what `script(path, body)` returns; use as a context manager.

    Attributes:
        requests: Path and decoded body of every request, in order of arrival.
        most_in_flight: The largest number of requests that were being answered at once.
    """

    def __init__(self, script: Callable[[str, Any], Answer]) -> None:
        self.script = script
        self.requests: list[tuple[str, Any]] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close_port(self) -> None:
        """Refuse new connections and drop the open ones, as a dead server does."""
        self._loop.call_soon_threadsafe(self._drop)

    def _drop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        self._drop()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client left, or the test is over
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        path = head.split(" ", 2)[1]
        lengths = [line.partition(":")[2] for line in head.lower().split("\r\n") if line.startswith("content-length:")]
        raw = await reader.readexactly(int(lengths[0])) if lengths else b""
        body = json.loads(raw) if raw else None
        self.requests.append((path, body))
        answer = self.script(path, body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._answer(answer, writer.write, writer.drain)
        finally:
            self.in_flight -= 1

    async def _answer(
        self, answer: Answer, write: Callable[[bytes], None], drain: Callable[[], Awaitable[None]]
    ) -> bool:
        write(
            f"HTTP/1.1 {answer.status} scripted\r\ncontent-type: {answer.content_type}\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )
        for step in answer.steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                write(b"%x\r\n%s\r\n" % (len(step), step))
                await drain()
        if answer.whole:
            write(b"0\r\n\r\n")
            await drain()
        return answer.whole
