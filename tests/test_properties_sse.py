"""The stream reader on any bytes in any pieces: always a record, and the same one however the bytes were cut."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from abharness.record import RequestRecord
from abharness.sse import Exchange, events, quantile, to_record
from abharness.storage import append_lines, read_lines

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("choices", "usage", "error", "object", "text", "delta", "finish_reason", "token_ids", "content", "reasoning",
        "prompt_tokens", "completion_tokens", "prompt_tokens_details", "cached_tokens", "message")  # fmt: skip
chunk_like = st.recursive(
    json_values,
    lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, max_size=4) | st.lists(inner, max_size=2),
    max_leaves=10,
)


def exchange(reads: list[tuple[float, bytes]], status: int | None = 200, failure: str | None = None) -> Exchange:
    return Exchange(0, submitted_s=0.0, sent_s=0.1, status=status, reads=reads, failure=failure, ended_s=9.0)


def record(reads: list[tuple[float, bytes]], status: int | None = 200, failure: str | None = None) -> RequestRecord:
    return to_record(exchange(reads, status, failure), prompt_sha256="x", requested_input_len=8, requested_output_len=4)


def storable(one: RequestRecord, folder: Path) -> bool:
    path = folder / "requests.jsonl"
    path.unlink(missing_ok=True)
    append_lines(path, [one])
    return read_lines(path, RequestRecord) == ([one], [])


def pieces(body: bytes, cuts: list[int]) -> list[tuple[float, bytes]]:
    places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    return [(float(end), body[start:end]) for start, end in pairwise(places)] or [(0.0, b"")]


@given(st.lists(st.binary(max_size=40), max_size=6), st.sampled_from([None, 200, 500]), st.none() | st.text(max_size=9))
def test_any_bytes_make_a_record_that_can_be_stored(
    tmp_path_factory: Any, bodies: list[bytes], status: int | None, failure: str | None
) -> None:
    one = record([(float(i), body) for i, body in enumerate(bodies)], status, failure)
    assert one.error is not None or (one.first_token_s is not None and one.output_tokens is not None)
    assert storable(one, tmp_path_factory.getbasetemp())


@given(st.lists(chunk_like, max_size=4))
@example([{"choices": [{"text": "a", "finish_reason": "length"}], "usage": {"completion_tokens": 10**5000}}])
@example([{"usage": {"completion_tokens": 2**70}}])
@example([{"choices": [{"text": "a", "finish_reason": "\ud800"}]}])
def test_any_chunks_make_a_record_that_can_be_stored(tmp_path_factory: Any, chunks: list[Any]) -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)  # only to write the chunks: a server is not bound by Python's limit
    try:
        body = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    finally:
        sys.set_int_max_str_digits(limit)
    one = record([(1.0, body)])
    assert storable(one, tmp_path_factory.getbasetemp())
    assert one.output_tokens is None or one.output_tokens >= 0


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=8), st.sampled_from(["\n", "\r\n", "\r"]),
       st.lists(st.integers(0, 10_000), max_size=12), st.booleans())  # fmt: skip
def test_a_stream_cut_anywhere_reads_as_the_whole_one(
    texts: list[str], end: str, cuts: list[int], ensure_ascii: bool
) -> None:
    chunks: list[Any] = [{"choices": [{"text": part, "finish_reason": None}]} for part in texts]
    chunks[-1]["choices"][0]["finish_reason"] = "length"
    chunks.append({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": len(texts)}})
    payloads = [json.dumps(chunk, ensure_ascii=ensure_ascii) for chunk in chunks] + ["[DONE]"]
    body = "".join(f": comment{end}data: {payload}{end}{end}" for payload in payloads).encode()
    whole = record([(float(len(body)), body)])
    cut = record(pieces(body, cuts))
    assert (whole.error, whole.chunks, whole.output_tokens) == (None, len(texts), len(texts))
    timeless = {"first_token_s", "first_answer_s", "last_token_s", "itl_p50_s", "itl_p99_s", "itl_max_s"}
    assert cut.model_dump(exclude=timeless) == whole.model_dump(exclude=timeless)
    assert cut.first_token_s is not None
    assert cut.last_token_s is not None
    assert 0 < cut.first_token_s <= cut.last_token_s <= len(body)


@given(st.binary(max_size=120), st.lists(st.integers(0, 200), max_size=8))
def test_any_bytes_cut_anywhere_are_the_same_events_in_time(body: bytes, cuts: list[int]) -> None:
    whole = [event[1:] for event in events([(0.0, body)])]
    cut = list(events(pieces(body, cuts)))
    assert [event[1:] for event in cut] == whole
    times = [event[0] for event in cut]
    assert times == sorted(times)


@given(st.integers(0, 400), st.lists(st.integers(0, 10_000), max_size=6))
def test_a_stream_that_ends_early_is_never_a_fast_success(keep: int, cuts: list[int]) -> None:
    chunks = [{"choices": [{"text": "ab", "finish_reason": reason}]} for reason in (None, None, "length")]
    payloads = [json.dumps(chunk) for chunk in chunks]
    payloads += [json.dumps({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 3}}), "[DONE]"]
    body = "".join(f"data: {payload}\n\n" for payload in payloads).encode()
    kept = body[: min(keep, len(body) - 1)]
    assert record(pieces(kept, cuts)).error


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=20), st.floats(0, 1))
def test_a_quantile_lies_between_the_extremes(values: list[float], q: float) -> None:
    found = quantile(values, q)
    assert min(values) - 1e-3 <= found <= max(values) + 1e-3
    assert quantile(values, 0) == min(values)
    assert quantile(values, 1) == max(values)
