"""Turns the timed reads of one streamed response into one `RequestRecord`: pure, after the traffic is over.

The load generator keeps `(time, bytes)` for every read and looks inside none of them while it is being timed. Here the
bytes become server-sent events (WHATWG HTML, section 9.2.6), the events become completion or chat chunks, and the
chunks become times and counts. Whatever the bytes are, the result is a record: a stream that does not hold together is
a failed request with the reason in `error`, never an exception and never a fast success.

The rules, with the clients' mistakes that they answer:

* An event's time is that of the read that completes it, wherever its first bytes came.
* A chunk carries a token when it has text or reasoning text, or non-empty `token_ids`, or ends a completion with
  finish reason "length": the limit was reached by a token, though its text may be held back (half a character).
* Output length is `usage.completion_tokens` and nothing else: chunks are no tokens, `max_tokens` is a wish.
* The usage chunk sets usage only. The end of generation is the last chunk that carries a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from abharness.record import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MAX_ERROR_CHARS = 300
_MAX_COUNT = 2**53  # the largest whole number that every JSON reader keeps exact


@dataclass(slots=True)
class Exchange:
    """What the client saw of one request, unparsed. Times are seconds of `time.monotonic`.

    Attributes:
        index: Position in the cell's prompt sequence.
        submitted_s: When the request was handed to the HTTP client.
        sent_s: When its bytes went to the socket; None if that never happened.
        status: HTTP status; None if no response head arrived.
        reads: Time and bytes of every read of the response body.
        failure: Why the exchange broke off (transport error, timeout, cancellation); None after a clean end.
        ended_s: When it was over.
    """

    index: int
    submitted_s: float = 0.0
    sent_s: float | None = None
    status: int | None = None
    reads: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str | None = None
    ended_s: float = 0.0


def events(reads: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes, bytes]]:
    """Split the reads of a body into server-sent events.

    Yields:
        The time of the read that completed the event, its type (empty by default) and its data. Comments, other fields
        and an event that lacks its closing blank line yield nothing.
    """
    body = b"".join(data for _, data in reads)
    read = 0
    read_end = len(reads[0][1]) if reads else 0
    place = 0
    name = b""
    lines: list[bytes] = []
    for ended_line in body.splitlines(keepends=True):
        line = ended_line.rstrip(b"\r\n")
        if line:
            if place == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            key, _, value = line.partition(b":")
            if key == b"data":
                lines.append(value.removeprefix(b" "))
            elif key == b"event":
                name = value.removeprefix(b" ")
        place += len(ended_line)
        if line:
            continue
        if lines:
            while read_end < place:
                read += 1
                read_end += len(reads[read][1])
            yield reads[read][0], name, b"\n".join(lines)
        name, lines = b"", []


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0 to 1) by linear interpolation between order statistics, Hyndman and Fan's type 7.

    Raises:
        ValueError: No values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def to_record(
    exchange: Exchange, *, prompt_sha256: str, requested_input_len: int, requested_output_len: int
) -> RequestRecord:
    """Read one exchange: when tokens came, how many the server says there were, and whether it all holds together.

    Args:
        exchange: What the client saw.
        prompt_sha256: Hash of the prompt, see `RequestRecord`.
        requested_input_len: Prompt tokens sent.
        requested_output_len: `max_tokens` sent.

    Returns:
        The record. `error` is set, and names what is wrong, unless the response was a 200 that carried a token, a
        finish reason, usage and `[DONE]`, with no error in the stream and a clean end.
    """
    stream = _Stream()
    if exchange.status == 200:
        for time_s, name, data in events(exchange.reads):
            if data == b"[DONE]":
                stream.done = True
                break
            stream.take(time_s, name, data)
    gaps = [later - earlier for earlier, later in zip(stream.token_times, stream.token_times[1:], strict=False)]
    return RequestRecord(
        index=exchange.index,
        prompt_sha256=prompt_sha256,
        requested_input_len=requested_input_len,
        requested_output_len=requested_output_len,
        submitted_s=exchange.submitted_s,
        sent_s=exchange.sent_s,
        first_token_s=stream.token_times[0] if stream.token_times else None,
        first_answer_s=stream.first_answer_s,
        last_token_s=stream.token_times[-1] if stream.token_times else None,
        prompt_tokens=stream.prompt_tokens,
        output_tokens=stream.output_tokens,
        cached_tokens=stream.cached_tokens,
        chunks=len(stream.token_times),
        itl_p50_s=quantile(gaps, 0.5) if gaps else None,
        itl_p99_s=quantile(gaps, 0.99) if gaps else None,
        itl_max_s=max(gaps) if gaps else None,
        finish_reason=stream.finish_reason,
        error=_error(exchange, stream),
    )


@dataclass(slots=True)
class _Stream:
    """What the chunks of one stream add up to."""

    token_times: list[float] = field(default_factory=list)
    first_answer_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    done: bool = False
    fault: str | None = None

    def blame(self, fault: str) -> None:
        # The first fault is the cause; what follows it in a broken stream is consequence.
        self.fault = self.fault or fault

    def take(self, time_s: float, name: bytes, data: bytes) -> None:
        try:
            payload = from_json(data)
        except ValueError:
            self.blame(f"bad JSON in the stream: {_excerpt(data)}")
            return
        if not isinstance(payload, dict):
            self.blame(f"not a chunk: {_excerpt(data)}")
            return
        if name == b"error" or payload.get("object") == "error" or payload.get("error") is not None:
            self.blame(f"error in the stream: {_error_message(payload) or _excerpt(data)}")
            return
        self._take_usage(payload.get("usage"))
        choices = payload.get("choices")
        if choices is None or choices == []:
            return
        choice = choices[0] if isinstance(choices, list) else None
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not (delta is None or isinstance(delta, dict)):
            self.blame(f"not a chunk: {_excerpt(data)}")
            return
        delta = delta or {}
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = _storable(reason)
        reasoning = bool(delta.get("reasoning") or delta.get("reasoning_content"))
        answer = bool(choice.get("text") or delta.get("content"))
        silent = bool(choice.get("token_ids")) or ("text" in choice and reason == "length")
        if answer or reasoning or silent:
            self.token_times.append(time_s)
        # A token without text counts as an answer in a completion, which has no reasoning; a chat chunk does not tell.
        if self.first_answer_s is None and (answer or (silent and "text" in choice)):
            self.first_answer_s = time_s

    def _take_usage(self, usage: Any) -> None:
        if usage is None:
            return
        if not isinstance(usage, dict):
            self.blame("usage is not an object")
            return
        details = usage.get("prompt_tokens_details")
        self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
        self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)
        if isinstance(details, dict):
            self.cached_tokens = _count(details.get("cached_tokens"), self.cached_tokens)


def _count(value: Any, otherwise: int | None) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_COUNT
    return value if good else otherwise


def _error(exchange: Exchange, stream: _Stream) -> str | None:
    if exchange.status is not None and exchange.status != 200:
        body = _excerpt(b"".join(data for _, data in exchange.reads)) or "empty body"
        return _storable(f"HTTP {exchange.status}: {body}")
    if stream.fault is not None:
        return _storable(stream.fault)
    if exchange.failure is not None:
        return _storable(exchange.failure)
    if exchange.status is None:
        return "no response"
    missing = [
        what
        for what, there in (
            ("a chunk with a token", bool(stream.token_times)),
            ("a finish_reason", stream.finish_reason is not None),
            ("usage", stream.output_tokens is not None),
            ("[DONE]", stream.done),
        )
        if not there
    ]
    return f"the stream ended without {', '.join(missing)}" if missing else None


def _error_message(payload: dict[str, Any]) -> str | None:
    error = payload.get("error", payload)
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else None


def _excerpt(data: bytes) -> str:
    return data[:_MAX_ERROR_CHARS].decode("utf-8", "replace").strip()


def _storable(text: str) -> str:
    # JSON may spell half a surrogate pair, which no UTF-8 file can hold.
    return text[:_MAX_ERROR_CHARS].encode("utf-8", "backslashreplace").decode("utf-8")
