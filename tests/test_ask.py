"""Questions, readiness and the server's own endpoints, against a scripted server."""

import signal

import pytest

from abharness.ask import ask, first_completion, list_models
from abharness.endpoints import counters_delta, read_counters, token_pool
from abharness.errors import LoadFailed
from abharness.record import ServerCounters, TokenStep
from tests.scripted_server import Answer, ScriptedServer, json_answer


def completion(text="ok", reason="stop", model="m", **choice):
    return json_answer({
        "model": model,
        "choices": [{"index": 0, "text": text, "finish_reason": reason, **choice}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    })  # fmt: skip


def chat(message, reason="stop", **choice):
    return json_answer({
        "choices": [{"index": 0, "message": message, "finish_reason": reason, **choice}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 300},
    })  # fmt: skip


def put(server, prompts, **options):
    arrived = []
    defaults = {
        "base_url": server.url,
        "served_model": "m",
        "prompts": prompts,
        "max_tokens": 64,
        "max_concurrency": 2,
        "request_timeout_s": 30.0,
        "alive": lambda: None,
        "on_answer": lambda index, reply: arrived.append((index, reply)),
    }
    replies = ask(**(defaults | options))
    assert sorted(arrived, key=lambda pair: pair[0]) == list(enumerate(replies))
    return replies


def one(answer, prompt="Q", **options):
    with ScriptedServer(lambda path, body: answer) as server:
        (reply,) = put(server, [prompt], **options)
    return reply


def test_questions_are_sent_in_order_once_and_greedily(monkeypatch):
    """E11: the same order and concurrency in both variants. A proxy of the shell is not used."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")

    def script(path, body):
        answer = completion(body["prompt"])
        return Answer([0.02, *answer.steps], content_type=answer.content_type)

    with ScriptedServer(script) as server:
        replies = put(server, [f"Q{n}" for n in range(9)], stop=["\n\n"], seed=3)
    assert [reply.text for reply in replies] == [f"Q{n}" for n in range(9)]
    # Two in flight may overtake each other on the wire, and no more than that.
    order = [int(body["prompt"][1:]) for _, body in server.requests]
    assert sorted(order) == list(range(9))
    assert all(abs(number - place) < 2 for place, number in enumerate(order))
    assert server.most_in_flight == 2
    path, body = server.requests[order.index(0)]
    assert path == "/v1/completions"
    assert body == {"model": "m", "prompt": "Q0", "max_tokens": 64, "temperature": 0, "stop": ["\n\n"], "seed": 3}
    assert (replies[0].prompt_tokens, replies[0].output_tokens, replies[0].finish_reason) == (5, 2, "stop")
    assert replies[0].e2el_s > 0
    assert replies[0].tokens is None


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_apart_under_either_name(key):
    """D5, E5."""
    messages = [{"role": "user", "content": "Q"}]
    with ScriptedServer(lambda path, body: chat({"role": "assistant", "content": "21", key: "7, 14"})) as server:
        (reply,) = put(server, [messages])
    assert (reply.text, reply.reasoning, reply.output_tokens) == ("21", "7, 14", 300)
    assert server.requests[0][0] == "/v1/chat/completions"
    assert server.requests[0][1]["messages"] == messages


@pytest.mark.parametrize("message", [{"role": "assistant", "content": ""}, {"content": None, "reasoning": "so"}, {}])
def test_an_answer_without_content_is_empty_and_no_error(message):
    """E6: empty, null or missing content after 300 tokens of reasoning."""
    reply = one(chat(message, "length"), [{"role": "user", "content": "Q"}])
    assert (reply.text, reply.finish_reason, reply.output_tokens, reply.error) == ("", "length", 300, None)
    assert reply.reasoning == message.get("reasoning")


def test_chat_logprobs_give_the_best_other_token():
    entry = {
        "token": " 4",
        "logprob": -0.1,
        "bytes": [32, 52],
        "top_logprobs": [
            {"token": " 5", "logprob": -2.5, "bytes": [32, 53]},
            {"token": " 4", "logprob": -0.1, "bytes": [32, 52]},
            {"token": " 6", "logprob": -2.4, "bytes": [32, 54]},
        ],
    }
    halves = {
        "token": "�",
        "logprob": -0.5,
        "bytes": [0xE2, 0x80],
        "top_logprobs": [
            {"token": "�", "logprob": -0.5, "bytes": [0xE2, 0x80]},
            {"token": "�", "logprob": -0.9, "bytes": [0xC3]},
        ],
    }
    alone = {"token": "x", "logprob": -9999.0, "top_logprobs": []}
    answer = chat({"content": "4"}, logprobs={"content": [entry, halves, alone]})
    with ScriptedServer(lambda path, body: answer) as server:
        (reply,) = put(server, [[{"role": "user", "content": "Q"}]], logprobs=5)
    assert (server.requests[0][1]["logprobs"], server.requests[0][1]["top_logprobs"]) == (True, 5)
    assert reply.tokens == [
        TokenStep(token=" 4", logprob=-0.1, runner_up=" 6", runner_up_logprob=-2.4, close={}),
        TokenStep(token="bytes:\\xe2\\x80", logprob=-0.5, runner_up="bytes:\\xc3", runner_up_logprob=-0.9, close={}),
        TokenStep(token="x", logprob=-9999.0, close={}),
    ]


def test_completion_logprobs_give_the_best_other_token():
    logprobs = {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.123456, None],
        "top_logprobs": [{"a": -0.123456, "c": -3.0, "d": -0.2, "e": -0.6}, None],
    }
    answer = completion("ab", logprobs=logprobs)
    with ScriptedServer(lambda path, body: answer) as server:
        (reply,) = put(server, ["Q"], logprobs=3)
    assert server.requests[0][1]["logprobs"] == 3
    assert reply.tokens == [
        TokenStep(token="a", logprob=-0.1235, runner_up="d", runner_up_logprob=-0.2, close={"e": -0.6}),
        TokenStep(token="b", close={}),
    ]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (json_answer({"error": {"message": "boom"}}, status=500), "InternalServerError: Error code: 500"),
        (json_answer({"object": "error", "message": "hm"}), "no choice in the response"),
        (json_answer([]), "no choice in the response"),
        (json_answer({"choices": [7]}), "no choice in the response"),
        (Answer([b"<html>"], content_type="text/html"), "JSONDecodeError"),
        (Answer([b'{"choices"'], content_type="application/json", whole=False), "APIConnectionError"),
        (Answer([30.0], content_type="application/json"), "APITimeoutError"),
    ],
)
def test_a_failed_question_says_why_and_is_asked_once(answer, said):
    with ScriptedServer(lambda path, body: answer) as server:
        (reply,) = put(server, ["Q"], request_timeout_s=1.0)
    assert said in reply.error
    assert reply.text == ""
    assert len(server.requests) == 1


def test_answers_that_arrived_before_the_server_died_were_handed_over():
    arrived = []
    state = {"dead": False}

    def script(path, body):
        if body["prompt"] == "Q2":
            state["dead"] = True
            return Answer([60.0])
        return completion(body["prompt"])

    with ScriptedServer(script) as server, pytest.raises(LoadFailed, match="after 2 of 5 answers: exit code 9"):
        put(
            server,
            [f"Q{n}" for n in range(5)],
            max_concurrency=1,
            alive=lambda: "exit code 9" if state["dead"] else None,
            on_answer=lambda index, reply: arrived.append((index, reply.text)),
        )
    assert arrived == [(0, "Q0"), (1, "Q1")]


def test_ctrl_c_and_a_full_disk_end_the_questions():
    def interrupt(index, reply):
        signal.raise_signal(signal.SIGINT)

    def full(index, reply):
        raise OSError(28, "No space left on device")

    with ScriptedServer(lambda path, body: completion()) as server:
        with pytest.raises(KeyboardInterrupt):
            put(server, ["Q0", "Q1", "Q2"], max_concurrency=1, on_answer=interrupt)
        with pytest.raises(OSError, match="No space left"):
            put(server, ["Q0", "Q1", "Q2"], max_concurrency=1, on_answer=full)
    assert len(server.requests) < 6


def test_text_that_no_file_can_hold_is_escaped():
    assert one(completion("\ud83d!")).text == "\\ud83d!"


# Readiness.


def vllm_like(names, answer):
    def script(path, body):
        if path == "/v1/models":
            return json_answer({"object": "list", "data": [{"id": name} for name in names]})
        return answer

    return script


def test_ready_means_that_our_model_answered_with_a_token():
    with ScriptedServer(vllm_like(["ours"], completion(model="ours"))) as server:
        assert first_completion(server.url, "ours", 10.0) is None
        assert list_models(server.url) == ["ours"]
    assert server.requests[1][1]["max_tokens"] == 1


@pytest.mark.parametrize(
    ("names", "answer", "said"),
    [
        (["theirs"], completion(), "serves theirs, not ours"),
        ([], completion(), "serves nothing, not ours"),
        (["ours"], Answer([30.0]), "APITimeoutError"),
        (["ours"], json_answer({"error": {"message": "EngineDeadError"}}, status=500), "EngineDeadError"),
        (["ours"], json_answer({"choices": []}), "no choice in the response"),
        (["ours"], json_answer({"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}), "without a token"),
        (["ours"], json_answer({"choices": [{"text": "x"}]}), "without a token"),
        (["ours"], completion(model="theirs"), "signed theirs, not ours"),
    ],
)
def test_not_ready_says_why(names, answer, said):
    """C3, C4: a foreign server, a list of models in front of an engine that never answers or is dead."""
    with ScriptedServer(vllm_like(names, answer)) as server:
        assert said in first_completion(server.url, "ours", 1.0)


def test_no_server_is_not_ready():
    with ScriptedServer(lambda path, body: completion()) as server:
        url = server.url
    assert "/v1/models did not answer" in first_completion(url, "ours", 5.0)
    with pytest.raises(LoadFailed, match="/v1/models did not answer"):
        list_models(url)


# The server's own endpoints.


def test_token_pool_is_distinct_ordinary_ids():
    answer = json_answer({"count": 600, "max_model_len": 4096, "tokens": [*range(500, 200, -1), *range(200, 500)]})
    with ScriptedServer(lambda path, body: answer) as server:
        pool = token_pool(server.url + "/", "m")
    assert pool.tokens == list(range(200, 501))
    assert pool.max_model_len == 4096
    path, body = server.requests[0]
    assert path == "/tokenize"
    assert body["add_special_tokens"] is False
    assert len(set(body["prompt"].split())) > 600


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (json_answer({"tokens": list(range(150)) * 5}), "150 distinct tokens"),
        (json_answer({"detail": "Not Found"}, status=404), "HTTP 404.*Not Found"),
        (json_answer({"tokens": "abc"}), "without a list"),
        (json_answer([1]), "without a list"),
        (Answer([b"{"]), "did not answer"),
        (Answer([b"{"], whole=False), "did not answer"),
    ],
)
def test_no_pool_no_load(answer, said):
    with ScriptedServer(lambda path, body: answer) as server, pytest.raises(LoadFailed, match=said):
        token_pool(server.url, "m")


METRICS = b"""# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="a b}c"} 100.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 2e2 1767225600
vllm:prompt_tokens_created{engine="0"} 1.7e9
vllm:prefix_cache_queries_total 64
vllm:prefix_cache_hits_total{engine="0"} 0.0
"""


def counters(text, **options):
    with ScriptedServer(lambda path, body: Answer([text], content_type="text/plain", **options)) as server:
        return read_counters(server.url)


def test_counters_are_summed_over_label_sets():
    """D8."""
    assert counters(METRICS) == {"prompt_tokens": 300.0, "prefix_cache_queries": 64.0, "prefix_cache_hits": 0.0}


@pytest.mark.parametrize("text", [b"", b"up 1\n", b"vllm:prompt_tokens_total NaN\n", b"vllm:prompt_tokens_total{\n"])
def test_unreadable_counters_are_not_zero(text):
    """D8."""
    assert counters(text) is None
    assert counters(METRICS, status=500) is None
    assert counters(METRICS, whole=False) is None


def test_counters_delta_is_none_where_it_cannot_be_known():
    """D8: not exported, not readable, or gone backwards with another process."""
    before = {"prompt_tokens": 100.0, "prefix_cache_hits": 0.0}
    assert counters_delta(before, {"prompt_tokens": 164.0, "prefix_cache_queries": 5.0}) == ServerCounters(
        prompt_tokens=64.0
    )
    assert counters_delta(before, {"prompt_tokens": 99.0}) is None
    assert counters_delta(None, before) is None
    assert counters_delta(before, None) is None
