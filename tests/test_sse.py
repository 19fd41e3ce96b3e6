"""Timed reads of a stream -> one record. Times are given, nothing here waits."""

import json
import random
from typing import Any

import pytest

from abharness.record import RequestRecord
from abharness.sse import Exchange, events, quantile, to_record
from abharness.storage import append_lines, read_lines


def record(reads: list[tuple[float, bytes]], *, status: int | None = 200, failure: str | None = None) -> RequestRecord:
    exchange = Exchange(0, submitted_s=0.0, sent_s=0.001, status=status, reads=reads, failure=failure, ended_s=9.0)
    return to_record(exchange, prompt_sha256="x", requested_input_len=8, requested_output_len=256)


def event(payload: Any) -> bytes:
    return f"data: {payload if isinstance(payload, str) else json.dumps(payload)}\n\n".encode()


def text(value: Any, reason: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": value, "finish_reason": reason, **more}]})


def chat(reason: str | None = None, **delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def usage(completion: Any, prompt: Any = 8, **more: Any) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}})


DONE = event("[DONE]")


def test_usage_counts_tokens_and_chunks_do_not():
    """D1."""
    last = chat("stop", content=" the mat.")
    r = record([(0.1, chat(content="The cat")), (0.25, chat(content=" sat on")), (0.4, last), (0.4, usage(12) + DONE)])
    assert (r.output_tokens, r.chunks, r.error) == (12, 3, None)
    assert (r.first_token_s, r.last_token_s) == (0.1, 0.4)


@pytest.mark.parametrize("last_choices", [[], [{"index": 0, "text": "", "finish_reason": None}]])
def test_trailing_usage_chunk_sets_usage_only(last_choices):
    """D3: neither TTFT nor the end of generation nor the requested length comes from the wrong place."""
    tail = event({"choices": last_choices, "usage": {"prompt_tokens": 8, "completion_tokens": 2}})
    r = record([(0.1, text("A")), (0.2, text("B", "stop")), (0.9, tail + DONE)])
    assert (r.first_token_s, r.last_token_s, r.output_tokens, r.chunks) == (0.1, 0.2, 2, 2)
    assert (r.finish_reason, r.error) == ("stop", None)
    assert r.itl_p50_s == r.itl_p99_s == r.itl_max_s == pytest.approx(0.1)


def test_role_chunk_and_comment_are_no_tokens():
    """D4."""
    r = record([(0.01, chat(role="assistant", content="")), (0.011, b": ping\n\n"), (0.85, chat("stop", content="Hi")),
                (0.9, usage(1) + DONE)])  # fmt: skip
    assert (r.first_token_s, r.chunks, r.itl_p50_s, r.error) == (0.85, 1, None, None)


def test_stream_without_a_token_has_no_ttft_and_failed():
    """D4."""
    r = record([(0.01, chat(role="assistant", content="")), (0.5, chat("stop")), (0.6, usage(0) + DONE)])
    assert r.first_token_s is None
    assert r.error == "the stream ended without a chunk with a token"


def test_reasoning_starts_the_clock_under_either_name():
    """D5."""
    r = record([(0.2, chat(reasoning="Let")), (0.3, chat(reasoning_content=" me")), (4.0, chat("stop", content="42")),
                (4.1, usage(180) + DONE)])  # fmt: skip
    assert (r.first_token_s, r.first_answer_s, r.output_tokens, r.chunks) == (0.2, 4.0, 180, 3)


def test_error_in_the_stream_fails_the_request():
    """D6 (1)."""
    r = record([(0.1, text("A")), (0.2, event({"error": {"message": "EngineCore died", "code": 500}}) + DONE)])
    assert r.error == "error in the stream: EngineCore died"


def test_stream_that_just_closes_failed():
    """D6 (2)."""
    r = record([(0.1, text("A"))])
    assert r.error == "the stream ended without a finish_reason, usage, [DONE]"
    broken = record([(0.1, text("A"))], failure="ClientPayloadError: not all data")
    assert broken.error == "ClientPayloadError: not all data"


GOOD = [(0.1, text("A")), (0.2, text("B", "length")), (0.3, usage(2)), (0.3, DONE)]


@pytest.mark.parametrize(
    ("left_out", "said"),
    [(1, "a finish_reason"), (2, "usage"), (3, "[DONE]")],
)
def test_each_missing_part_is_named(left_out, said):
    assert record(GOOD).error is None
    reads = [read for number, read in enumerate(GOOD) if number != left_out]
    assert record(reads).error == f"the stream ended without {said}"


def test_http_status_and_body_are_the_error():
    r = record([(0.1, b'{"error": {"message": "no such model"}}')], status=404)
    assert r.error == 'HTTP 404: {"error": {"message": "no such model"}}'
    assert record([], status=None, failure="refused").error == "refused"
    assert record([], status=None).error == "no response"


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (b"data: {oops\n\n", "bad JSON in the stream: {oops"),
        (b"data: [1]\n\n", "not a chunk: [1]"),
        (b'data: {"choices": 3}\n\n', 'not a chunk: {"choices": 3}'),
        (b'data: {"choices": [{"delta": "x"}]}\n\n', 'not a chunk: {"choices": [{"delta": "x"}]}'),
        (b"event: error\ndata: {}\n\n", "error in the stream: {}"),
        (b'data: {"object": "error", "message": "bad"}\n\n', "error in the stream: bad"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "bad JSON in the stream: ["),
    ],
)
def test_broken_chunk_fails_an_otherwise_good_stream(broken, said):
    r = record([(0.05, broken), *GOOD])
    assert r.error is not None
    assert r.error.startswith(said)
    assert r.output_tokens == 2


def test_token_without_text_counts_when_the_server_says_so():
    """Half a character, or a special token: vLLM sends a chunk with empty text."""
    by_ids = record([(0.1, text("", token_ids=[7])), (0.2, text("é", "length", token_ids=[8])), (0.3, usage(2) + DONE)])
    assert (by_ids.first_token_s, by_ids.first_answer_s, by_ids.chunks) == (0.1, 0.1, 2)

    only = record([(0.2, text("", "length")), (0.3, usage(1) + DONE)])
    assert (only.first_token_s, only.last_token_s, only.chunks, only.error) == (0.2, 0.2, 1, None)
    nothing_said = record([(0.1, text("")), (0.2, text("B", "length")), (0.3, usage(2) + DONE)])
    assert nothing_said.first_token_s == 0.2


def test_cached_tokens_are_kept_apart():
    r = record([*GOOD[:2], (0.3, usage(2, prompt_tokens_details={"cached_tokens": 5})), (0.4, DONE)])
    assert (r.prompt_tokens, r.cached_tokens) == (8, 5)
    assert record(GOOD).cached_tokens is None


@pytest.mark.parametrize("count", [True, -1, "2", 2.5, None])
def test_a_count_that_is_none_is_no_output_length(count):
    r = record([*GOOD[:2], (0.3, usage(count)), (0.4, DONE)])
    assert r.output_tokens is None
    assert r.error == "the stream ended without usage"


def test_the_read_that_completes_an_event_gives_its_time():
    first, second = text("A"), text("B", "length")
    r = record([(0.1, first[:9]), (0.2, first[9:-1]), (0.3, first[-1:] + second[:5]), (0.4, second[5:] + usage(2)),
                (0.5, DONE)])  # fmt: skip
    assert (r.first_token_s, r.last_token_s, r.error) == (0.3, 0.4, None)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_every_split_of_the_bytes_gives_the_same_events(line_end):
    """Comments, fields of other names, no space after the colon, data on several lines."""
    body = (
        "\ufeffdata: [1]\n\n: ping\n\nid: 7\nevent: note\ndata:é\ndata:  x\n\nretry: 1\n\ndata\n\ndata: lost".encode()
    )
    body = body.replace(b"\n", line_end)
    expected = [(b"", b"[1]"), (b"note", "é\n x".encode()), (b"", b"")]
    for size in range(1, len(body) + 1):
        reads = [(float(start), body[start : start + size]) for start in range(0, len(body), size)]
        found = list(events(reads))
        assert [(name, data) for _, name, data in found] == expected
        place = body.index(b"[1]") + 3 + 2 * len(line_end) - 1
        assert found[0][0] == place // size * size


def test_no_bytes_ever_raise_and_every_record_can_be_stored(tmp_path):
    draw = random.Random(20)
    pieces = [
        text("A"),
        text("B", "length"),
        usage(2),
        DONE,
        text("B", "length") + usage(2) + DONE,
        usage(10**30),
        text("x", "\\ud800"),
        event({"error": "\ud800"}),
        b'data: {"choices":[{"finish_reason":"\\ud800"}],"usage":[1]}\n\n',
        b"data: \xff\xfe\n\n",
        b'data: {"usage":{"completion_tokens":1e999}}\n\n',
        b'data: {"choices":[[]]}\n\n',
        b'data: {"choices":[{"text":{"a":1},"token_ids":5}]}\n\n',
        b"data: null\n\n",
        b"event: error\r\n",
        b"\xef\xbb\xbf",
        b"\r",
        b"\x00",
    ]
    records = []
    for _ in range(2000):
        body = bytearray(b"".join(draw.choices(pieces, k=draw.randrange(6))))
        for _ in range(draw.choice([0, 0, 1, 5])):
            if body:
                body[draw.randrange(len(body))] = draw.randrange(256)
        cuts = sorted(draw.choices(range(len(body) + 1), k=3))
        parts = [bytes(body[a:b]) for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
        reads = [(float(n), part) for n, part in enumerate(parts) if part]
        records.append(record(reads, status=draw.choice([200, 200, 200, 500, None])))
    assert {r.error is None for r in records} == {True, False}
    append_lines(tmp_path / "requests.jsonl", records)
    again, warnings = read_lines(tmp_path / "requests.jsonl", RequestRecord)
    assert (again, warnings) == (records, [])


def test_quantile_interpolates():
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert quantile([7.0], 0.99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


@pytest.mark.parametrize("count", [2**53 + 1, 2**70])
def test_a_count_that_no_reader_keeps_exact_is_no_count(count: int) -> None:
    r = record([(0.1, text("A", "stop")), (0.2, usage(count) + DONE)])
    assert (r.output_tokens, r.error) == (None, "the stream ended without usage")
