"""A mock OpenAI server for measuring clients: pre-rendered chunks of the size vLLM sends, as fast as they go out.

Run as a process of its own, `python mock_server.py --pace-s 0`: it prints its port, then serves until it is killed.
`GET /first_writes` returns, for each streamed request, the CLOCK_MONOTONIC seconds at which its first chunk was handed
to the socket, keyed by the first four tokens of its prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

MODEL = "mock"
HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 01 Jan 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
FIRST_WRITES: dict[str, float] = {}


def framed(payload: dict[str, Any] | str) -> bytes:
    """One server-sent event as one HTTP chunk, as uvicorn writes it."""
    text = payload if isinstance(payload, str) else json.dumps(payload, separators=(",", ":"))
    event = f"data: {text}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


def chunk(finish_reason: str | None, usage: dict[str, int] | None) -> bytes:
    """One token's chunk with the fields of vLLM 0.32."""
    body: dict[str, Any] = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1767225600,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": " token",
                "logprobs": None,
                "finish_reason": finish_reason,
                "stop_reason": None,
                "prompt_token_ids": None,
                "token_ids": None,
            }
        ],
    }
    if usage is not None:
        body["usage"] = usage
    return framed(body)


def usage_of(prompt_len: int, count: int) -> dict[str, int]:
    return {"prompt_tokens": prompt_len, "total_tokens": prompt_len + count, "completion_tokens": count}


BURST = 8
"""Events a write at full speed: a write is a system call, and with one an event the mock would be the slow side."""

RENDERED: dict[tuple[int, int, bool], list[bytes]] = {}


def rendered(prompt_len: int, count: int, running: bool) -> list[bytes]:
    """The chunks of a whole stream; the last one holds the usage chunk, `[DONE]` and the end of the body."""
    key = (prompt_len, count, running)
    if key not in RENDERED:
        chunks = [
            chunk("length" if n == count else None, usage_of(prompt_len, n) if running else None)
            for n in range(1, count + 1)
        ]
        usage = framed(
            {
                "id": "cmpl-0123456789abcdef0123456789abcdef",
                "object": "text_completion",
                "created": 1767225600,
                "model": MODEL,
                "choices": [],
                "usage": usage_of(prompt_len, count),
            }
        )
        RENDERED[key] = [*chunks, usage + framed("[DONE]") + b"0\r\n\r\n"]
    return RENDERED[key]


class Connection(asyncio.Protocol):
    """One client connection; requests on it come one after another."""

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s
        self.buffer = b""
        self.resume = asyncio.Event()
        self.resume.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def pause_writing(self) -> None:
        self.resume.clear()

    def resume_writing(self) -> None:
        self.resume.set()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, end, body = self.buffer.partition(b"\r\n\r\n")
        if not end:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(body) < length:
            return
        self.buffer = body[length:]
        path = head.split(b" ", 2)[1].decode()
        if path == "/v1/completions":
            self.task = asyncio.get_running_loop().create_task(self.stream(json.loads(body[:length])))
        elif path == "/first_writes":
            self.answer(FIRST_WRITES)
        else:
            self.answer({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    def answer(self, payload: Any) -> None:
        body = json.dumps(payload).encode()
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )

    async def stream(self, request: dict[str, Any]) -> None:
        prompt = request["prompt"]
        running = bool((request.get("stream_options") or {}).get("continuous_usage_stats"))
        chunks = rendered(len(prompt), request["max_tokens"], running)
        self.transport.write(HEAD)
        if self.pace_s:
            await asyncio.sleep(self.pace_s)
        if isinstance(prompt, list):
            FIRST_WRITES[",".join(map(str, prompt[:4]))] = time.monotonic()
        due_s = time.monotonic()
        step = 1 if self.pace_s else BURST
        for start in range(0, len(chunks), step):
            self.transport.write(b"".join(chunks[start : start + step]))
            due_s += self.pace_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()) if self.pace_s else 0.0)
            if not self.resume.is_set():
                await self.resume.wait()


async def serve(pace_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Connection(pace_s), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pace-s", type=float, default=0.0, help="seconds between chunks; 0: as fast as possible")
    asyncio.run(serve(parser.parse_args().pace_s))
