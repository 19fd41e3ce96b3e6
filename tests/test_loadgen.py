"""Timed cells against a scripted server, and what the checks make of them."""

import gc
import signal
import time

import pytest

from abharness.checks import check_cell
from abharness.errors import LoadFailed
from abharness.loadgen import CellFailed, CellInterrupted, run_cell
from abharness.prompts import build_prompts, combined_hash, prompt_hash, prompts_hash
from abharness.record import CellRecord, ClientLoad, RequestRecord, ServerCounters
from tests.benchmarks.loadgen import main as benchmark
from tests.scripted_server import Answer, ScriptedServer, completion_stream, json_answer, sse

PROMPTS = build_prompts(range(100, 400), seed=0, label="t", num_prompts=8, input_len=16, first_ordinal=0)


def cell(server, **options):
    defaults = {
        "base_url": server.url,
        "served_model": "m",
        "prompts": PROMPTS,
        "output_len": 3,
        "max_concurrency": 2,
        "request_timeout_s": 30.0,
        "alive": lambda: None,
    }
    return run_cell(**(defaults | options))


def answer_as_asked(path, body):
    return completion_stream(body["max_tokens"], len(body["prompt"]), pause_s=0.01)


def test_a_cell_sends_every_prompt_in_order_and_keeps_its_concurrency(monkeypatch):
    """D12: submission and sending are kept apart from the first token. A proxy of the shell is not used."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    progress = []
    with ScriptedServer(answer_as_asked) as server:
        traffic = cell(server, on_progress=lambda done, of: progress.append((done, of)))
    # Two in flight may overtake each other on the wire, and no more than that.
    order = [PROMPTS.index(body["prompt"]) for _, body in server.requests]
    assert sorted(order) == list(range(8))
    assert all(abs(number - place) < 2 for place, number in enumerate(order))
    assert server.most_in_flight == 2
    assert progress == [(n, 8) for n in range(1, 9)]
    assert [r.index for r in traffic.requests] == list(range(8))
    assert [r.prompt_sha256 for r in traffic.requests] == [prompt_hash(p) for p in PROMPTS]
    for r in traffic.requests:
        assert r.error is None
        assert traffic.started_s <= r.submitted_s <= r.sent_s < r.first_token_s < r.last_token_s <= traffic.ended_s
        assert (r.prompt_tokens, r.output_tokens, r.requested_input_len, r.requested_output_len) == (16, 3, 16, 3)
        assert r.finish_reason == "length"
    assert traffic.cut_short is None
    assert traffic.client.chunks_per_s > 0
    assert 0 < traffic.client.cpu_share < 1.5


def test_the_body_fixes_the_output_length_and_asks_for_usage():
    """D9."""
    with ScriptedServer(answer_as_asked) as server:
        cell(server, seed=7)
        cell(server)
    path, body = server.requests[0]
    assert path == "/v1/completions"
    assert body["model"] == "m"
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["temperature"]) == (3, 3, True, 0)
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["skip_special_tokens"] is False
    assert body["seed"] == 7
    assert "seed" not in server.requests[-1][1]


def test_ttft_and_end_are_those_of_the_token_chunks():
    """D3, D4, over a socket: pauses before the first token and before the usage chunk are on the right side."""
    steps = [
        *sse({"choices": [{"index": 0, "text": "", "finish_reason": None}]}),
        0.3,
        *sse({"choices": [{"index": 0, "text": "A", "finish_reason": None}]}),
        *sse({"choices": [{"index": 0, "text": "B", "finish_reason": "stop"}]}),
        0.3,
        *sse({"choices": [], "usage": {"prompt_tokens": 16, "completion_tokens": 2}}, "[DONE]"),
    ]
    with ScriptedServer(lambda path, body: Answer(steps)) as server:
        traffic = cell(server, prompts=PROMPTS[:1])
    (r,) = traffic.requests
    assert r.error is None
    assert r.output_tokens == 2
    assert r.first_token_s - r.sent_s >= 0.2
    assert traffic.ended_s - r.last_token_s >= 0.2


def test_failed_requests_are_kept_and_the_cell_goes_on():
    """D6: a status, a broken connection, a stream that stalls, each with its own reason."""
    cut = completion_stream(3, 16)

    def script(path, body):
        index = PROMPTS.index(body["prompt"])
        if index == 0:
            return json_answer({"error": {"message": "prompt too long"}}, status=400)
        if index == 1:
            return Answer(cut.steps[:2], whole=False)
        if index == 2:
            return Answer([*cut.steps[:2], 30.0])
        return completion_stream(3, 16)

    with ScriptedServer(script) as server:
        traffic = cell(server, request_timeout_s=0.5)
    errors = [r.error for r in traffic.requests]
    assert errors[0] == 'HTTP 400: {"error": {"message": "prompt too long"}}'
    assert "ClientPayloadError" in errors[1]
    assert errors[2] == "no end of the stream within 0.5 s"
    assert errors[3:] == [None] * 5
    assert traffic.requests[2].first_token_s is not None
    assert "3 of 8 requests failed" in check(traffic.requests, output_len=3, input_len=16)[0].message


def test_a_server_that_dies_ends_the_cell_with_everything_measured():
    """The exit is noticed a moment after connections break: the rest of the sequence must not be burned meanwhile."""
    state = {"dead": False, "polls": 0}

    def script(path, body):
        index = PROMPTS.index(body["prompt"])
        if index < 2:
            return completion_stream(3, 16)
        if index == 3:  # sent when the first two have ended
            state["dead"] = True
            server.close_port()
        return completion_stream(3, 16, pause_s=5.0)

    def alive():
        state["polls"] += state["dead"]
        return "exit code 1" if state["polls"] > 1 else None

    with ScriptedServer(script) as server, pytest.raises(CellFailed, match="exit code 1") as raised:
        cell(server, alive=alive)
    assert isinstance(raised.value, LoadFailed)
    traffic = raised.value.traffic
    assert traffic.cut_short == "exit code 1"
    assert [r.error for r in traffic.requests[:2]] == [None, None]
    assert 4 <= len(traffic.requests) < len(PROMPTS)
    assert all(r.error for r in traffic.requests[2:])


def test_a_silent_server_that_died_ends_the_cell():
    """C4: the streams hang, only the process is gone."""
    with ScriptedServer(lambda path, body: Answer([60.0])) as server, pytest.raises(CellFailed) as raised:
        cell(server, alive=lambda: "EngineCore is gone")
    assert [r.error for r in raised.value.traffic.requests] == ["cut off: the cell ended early"] * 2


def test_ctrl_c_ends_the_cell_with_everything_measured():
    def interrupt(done, of):
        if done == 3:
            signal.raise_signal(signal.SIGINT)

    with ScriptedServer(answer_as_asked) as server, pytest.raises(KeyboardInterrupt) as raised:
        cell(server, on_progress=interrupt, max_concurrency=1)
    assert isinstance(raised.value, CellInterrupted)
    traffic = raised.value.traffic
    assert traffic.cut_short == "interrupted"
    assert [r.error for r in traffic.requests[:3]] == [None] * 3
    assert len(traffic.requests) < len(PROMPTS)


def test_the_garbage_collector_is_off_during_a_cell_and_back_after():
    during = []
    with ScriptedServer(answer_as_asked) as server:
        cell(server, on_progress=lambda done, of: during.append(gc.isenabled()))
        assert gc.isenabled()
        assert gc.get_freeze_count() == 0
        gc.disable()
        try:
            cell(server, prompts=PROMPTS[:1])
            assert not gc.isenabled()
        finally:
            gc.enable()
    assert not any(during)


def test_a_blocked_loop_shows_as_lag():
    """D12: a client that cannot keep up is seen in its own numbers."""
    with ScriptedServer(answer_as_asked) as server:
        traffic = cell(server, on_progress=lambda done, of: time.sleep(0.2))
    assert traffic.client.loop_lag_p99_s > 0.1


def test_a_cell_needs_work():
    with pytest.raises(ValueError, match="a prompt and a worker"):
        run_cell(base_url="http://127.0.0.1:1", served_model="m", prompts=[], output_len=1, max_concurrency=1,
                 request_timeout_s=1, alive=lambda: None)  # fmt: skip


# The checks, on records made up for them.

IDLE = ClientLoad(cpu_share=0.1, loop_lag_p50_s=0.0005, loop_lag_p99_s=0.002, chunks_per_s=100.0)


def request(**fields):
    good = {
        "index": 0,
        "prompt_sha256": "x",
        "requested_input_len": 1024,
        "requested_output_len": 256,
        "submitted_s": 0.0,
        "sent_s": 0.001,
        "first_token_s": 0.1,
        "last_token_s": 0.1 + 255 * 0.01,
        "prompt_tokens": 1024,
        "output_tokens": 256,
        "chunks": 256,
        "finish_reason": "length",
    }
    return RequestRecord(**(good | fields))


def check(requests, *, client=IDLE, counters=None, kind="decode", input_len=1024, output_len=256):
    record = CellRecord(workload="w", kind=kind, input_len=input_len, output_len=output_len, max_concurrency=2, repeat=0,
                        started_s=min((r.submitted_s for r in requests), default=0.0),
                        ended_s=max((r.last_token_s or r.submitted_s for r in requests), default=9.0),
                        prompts_sha256=combined_hash(r.prompt_sha256 for r in requests),
                        client=client, counters=counters)  # fmt: skip
    # What these records leave out is said not to be checked: tests/test_window.py.
    return [finding for finding in check_cell(record, requests) if finding.code != "not_checked"]


def test_a_good_cell_has_no_findings():
    assert check([request(index=n) for n in range(4)]) == []


def test_short_outputs_are_counted():
    """D9."""
    requests = [request(), request(), request(output_tokens=31, finish_reason="stop"), request()]
    (finding,) = check(requests)
    assert finding.code == "output_tokens_mismatch"
    assert finding.message.startswith("short outputs: 1 of 4 ")
    assert "31 to 31 tokens instead of 256" in finding.message
    assert "stop x 1" in finding.message
    assert not finding.fatal
    (longer,) = check([request(output_tokens=300)])
    assert longer.message.startswith("outputs of another length: 1 of 1")


def test_prompt_lengths_are_the_servers():
    """D10."""
    (finding,) = check([request(prompt_tokens=1041), request(prompt_tokens=1019), request()])
    assert finding.code == "prompt_tokens_mismatch"
    assert "1019 to 1041 prompt tokens instead of 1024 in 2 of 3" in finding.message


def test_failed_requests_are_grouped():
    """D6."""
    failed = [request(error="refused", output_tokens=None, prompt_tokens=None)] * 3
    (finding,) = check([*failed, request(error="HTTP 500: x", output_tokens=3), request()])
    assert finding.code == "incomplete_requests"
    assert finding.message == "4 of 5 requests failed: 3 x refused; 1 x HTTP 500: x"
    (empty,) = check([])
    assert empty.message == "no request was sent"


@pytest.mark.parametrize(
    ("client", "kind", "said"),
    [
        ({"cpu_share": 0.9}, "prefill", "0.90 of a core"),
        ({"loop_lag_p50_s": 0.0125}, "prefill", "12.5 ms late (median; limit 10% of a median TTFT of 100.0 ms"),
        ({"loop_lag_p50_s": 0.0021}, "decode", "2.1 ms late (median; limit 10% of a median TPOT of 10.0 ms"),
    ],
)
def test_a_busy_client_is_named(client, kind, said):
    """D12."""
    (finding,) = check([request()], client=IDLE.model_copy(update=client), kind=kind)
    assert finding.code == "client_bound"
    assert said in finding.message


def test_lag_under_every_limit_is_fine():
    """D12: the millisecond of the timer itself does not count; a prefill cell has no TPOT to distort."""
    assert check([request()], client=IDLE.model_copy(update={"loop_lag_p50_s": 0.0019})) == []
    late = IDLE.model_copy(update={"loop_lag_p50_s": 0.005})
    assert check([request()], client=late, kind="prefill") == []
    assert [finding.code for finding in check([request()], client=late)] == ["client_bound"]


def test_prefix_cache_hits_over_one_percent():
    """D8: counters first, usage where there are none, and nothing where neither is known."""
    counters = ServerCounters(prefix_cache_queries=16_384, prefix_cache_hits=164)
    (finding,) = check([request()], counters=counters)
    assert finding.code == "prefix_cache_hits"
    assert "164 of 16384" in finding.message
    assert check([request()], counters=ServerCounters(prefix_cache_queries=16_384, prefix_cache_hits=163)) == []
    assert (
        check([request(cached_tokens=1024)], counters=ServerCounters(prefix_cache_queries=5, prefix_cache_hits=0)) == []
    )
    (by_usage,) = check([request(cached_tokens=512)], counters=ServerCounters(prompt_tokens=1024))
    assert "512 of 1024 prompt tokens came from the prefix cache by usage" in by_usage.message
    assert check([request()], counters=None) == []


# Prompts.


def test_prompts_depend_on_seed_and_label_only():
    """D8, D10: the same set for both variants, on any machine."""
    options = {"num_prompts": 3, "input_len": 32, "first_ordinal": 5}
    prompts = build_prompts(range(1000), seed=0, label="decode/512/0", **options)
    assert prompts == build_prompts(range(1000), seed=0, label="decode/512/0", **options)
    assert [len(p) for p in prompts] == [32] * 3
    assert prompts_hash(prompts) == "d40c00991b213f7cf233cd2b1dd2cf7db6cf88906da19de8ed5f74f3e7e179ee"
    for other in ({"seed": 1, "label": "decode/512/0"}, {"seed": 0, "label": "decode/512/1"}):
        changed = build_prompts(range(1000), **other, **options)
        assert all(a[4:] != b[4:] for a, b in zip(prompts, changed, strict=True))


def test_no_two_prompts_of_a_launch_share_their_first_tokens():
    """D8: warm-ups, repeats and lengths drawn apart, one run of ordinals."""
    seen = set()
    ordinal = 0
    for label, count, length in (("warm-up", 3, 64), ("decode/0", 500, 64), ("decode/0", 500, 64), ("prefill", 9, 4)):
        for prompt in build_prompts(range(300), seed=0, label=label, num_prompts=count, input_len=length,
                                    first_ordinal=ordinal):  # fmt: skip
            seen.add(tuple(prompt[:4]))
        ordinal += count
    assert len(seen) == ordinal


@pytest.mark.parametrize(
    ("pool", "options", "said"),
    [
        (range(199), {}, "199 distinct token ids"),
        ([*range(300), 0], {}, "300 distinct token ids"),
        (range(300), {"input_len": 3}, "input_len 3 is too short"),
        (range(300), {"first_ordinal": 300**4 - 1}, "do not fit"),
        (range(300), {"first_ordinal": -1}, "do not fit"),
    ],
)
def test_prompts_that_cannot_be_unique_are_refused(pool, options, said):
    """D8."""
    defaults = {"seed": 0, "label": "x", "num_prompts": 2, "input_len": 16, "first_ordinal": 0}
    with pytest.raises(LoadFailed, match=said):
        build_prompts(pool, **(defaults | options))


def test_prompt_hash_is_that_of_the_comma_joined_ids():
    # printf 1,2,3 | sha256sum
    assert prompt_hash([1, 2, 3]) == "8a6ae15122001229edb8866f56e342af12ae8187203c3e3b33931743e7c0c48d"


def test_the_benchmark_runs_in_small(capsys):
    benchmark(["--streams", "2", "--chunks", "8", "--waves", "1", "--rounds", "1", "--pace-s", "0.001"])
    out = capsys.readouterr().out
    assert "abharness, timed window" in out
    assert "skipped: no --vllm-python" in out
    assert "TTFT error" in out
