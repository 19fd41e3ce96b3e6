"""The fake server itself: other tests rest on what it shows."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from abharness.server import VllmServer

Running = Callable[..., VllmServer]


def post(server: VllmServer, path: str, **body: Any) -> Any:
    command = server.command
    request = urllib.request.Request(
        f"http://{command.host}:{command.port}{path}",
        json.dumps({"model": command.served_model_name, **body}).encode(),
        {"content-type": "application/json", "x-request-id": "mine"},
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        raw = response.read().decode()
    if not body.get("stream"):
        return json.loads(raw)
    return [event.removeprefix("data: ") for event in raw.strip().split("\n\n")]


def metrics(server: VllmServer) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.command.port}/metrics", timeout=20) as response:
        lines = response.read().decode().splitlines()
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_unknown_faults_fail_loudly() -> None:
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("fake_vllm.py"), "serve", "m", "--port", "1"],
        env={"FAKE_FAULTS": '{"no_such_fault": 1}'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "unknown faults ['no_such_fault']" in result.stderr


def test_speed_depends_on_the_engines_own_switch(running: Running) -> None:
    """A3: what the server process has does not matter."""
    plain = running(env={"FAKE_SWITCH": "fast"})
    lied_to = running(env={"FAKE_SWITCH": "fast"}, faults={"child_env": {"FAKE_SWITCH": "slow"}})
    assert "FAKE_SWITCH=fast" in plain.log_text()
    assert "FAKE_SWITCH=slow" in lied_to.log_text()


def test_fault_of_one_variant_only(running: Running) -> None:
    faults = {"missing_usage": {"when": {"FAKE_SWITCH": "fast"}, "from": 1}, "no_metrics": {"when": {"PATH": None}}}
    for switch, lies in (("slow", False), ("fast", True)):
        server = running(env={"FAKE_SWITCH": switch}, faults=faults)
        assert (post(server, "/v1/completions", prompt=[1], max_tokens=4)["usage"] is None) == lies
        assert metrics(server)


def test_stream_ends_with_usage(running: Running) -> None:
    server = running()
    events = post(
        server, "/v1/completions", prompt=[5, 6], max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 0]
    assert chunks[-1]["usage"]["prompt_tokens"] == 2
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, None, "length"]
    assert chunks[0]["id"] == "cmpl-mine"


@pytest.mark.parametrize(
    ("faults", "last"),
    [({"stream_error": {"after_tokens": 2, "from": 1}}, "error"), ({"stream_close": {"from": 1}}, "closed")],
)
def test_broken_streams(running: Running, faults: dict[str, Any], last: str) -> None:
    """D6."""
    server = running(faults=faults)
    if last == "error":
        events = post(server, "/v1/completions", prompt=[1], max_tokens=9, stream=True)
        assert "error" in json.loads(events[-2])
        assert len(events) == 4
    else:
        with pytest.raises(http.client.IncompleteRead):
            post(server, "/v1/completions", prompt=[1], max_tokens=9, stream=True)


def test_prefix_cache_is_counted(running: Running) -> None:
    """D8."""
    server = running()
    before = metrics(server)
    for _ in range(2):
        post(server, "/v1/completions", prompt=list(range(100)), max_tokens=1)
    after = metrics(server)
    assert after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"] == 200
    assert after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"] == 96
    assert after["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"] == 2


def test_questions_are_answered_from_the_file(running: Running, tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(3)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    server = running(
        env={"FAKE_ANSWERS": str(tmp_path / "answers.jsonl")}, faults={"answers": {"wrong": [1], "truncated": [2]}}
    )

    def ask(index: int) -> Any:
        content = f"{rows[0]['question']} {rows[0]['answer']}\n{rows[index]['question']}"
        messages = [{"role": "user", "content": content}]
        answer = post(server, "/v1/chat/completions", messages=messages, max_tokens=50, logprobs=True, top_logprobs=2)
        return answer["choices"][0]

    right, wrong, cut = ask(0), ask(1), ask(2)
    assert (right["message"]["content"], right["finish_reason"]) == (rows[0]["answer"], "stop")
    assert wrong["message"]["content"].endswith("#### 424242")
    assert cut["finish_reason"] == "length"
    assert [len(step["top_logprobs"]) for step in right["logprobs"]["content"]] == [2, 2, 2]
    assert "".join(step["token"] for step in right["logprobs"]["content"]) == rows[0]["answer"]


def info(server: VllmServer) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.command.port}/server_info?config_format=json") as response:
        return json.load(response)


def test_the_resolved_configuration_is_told_in_development_mode_only(running: Running) -> None:
    with pytest.raises(OSError, match="404"):
        info(running())
    env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_FAKE_SWITCH": "0"}
    told = info(running(env=env, flags=["--max-num-seqs=16"]))
    same = info(running(env=env, flags=["--max-num-seqs", "16"]))
    assert told["vllm_config"]["scheduler_config"] == same["vllm_config"]["scheduler_config"]
    assert told["vllm_config"]["scheduler_config"]["max_num_seqs"] == 16
    assert told["vllm_env"]["VLLM_FAKE_SWITCH"] == "0"
    lied = info(
        running(
            env={**env, "FAKE_READS": "truthiness"},
            faults={"config": {"cache_config.block_size": 32, "extra": 1}, "vllm_env": {"VLLM_PORT": 7}},
        )
    )
    assert lied["vllm_config"]["cache_config"]["block_size"] == 32
    assert lied["vllm_config"]["extra"] == 1
    assert (lied["vllm_env"]["VLLM_FAKE_SWITCH"], lied["vllm_env"]["VLLM_PORT"]) == (True, 7)


@pytest.mark.parametrize(
    ("reads", "given", "read"),
    [("exact", "0", "0"), ("truthiness", "0", "fast"), ("truthiness", "", ""), ("nothing", "fast", "")],
)
def test_the_switch_is_read_as_ordered(running: Running, reads: str, given: str, read: str) -> None:
    """A5."""
    assert f"FAKE_SWITCH={read}\n" in running(env={"FAKE_SWITCH": given, "FAKE_READS": reads}).log_text()


def test_every_server_of_a_drifting_machine_is_faster_than_the_one_before(running: Running, tmp_path: Path) -> None:
    """G1."""
    for factor in ("1.000", "1.060", "1.124"):
        server = running(env={"FAKE_DRIFT": str(tmp_path / "drift")})
        assert f"fake machine: {factor} times as fast" in server.log_text()


def test_other_clients_are_counted(running: Running) -> None:
    server = running(faults={"other_client": {"after_requests": 2, "requests": 3}})
    before = metrics(server)
    post(server, "/v1/completions", prompt=[1], max_tokens=1)
    while metrics(server)["vllm:generation_tokens_total"] < before["vllm:generation_tokens_total"] + 61:
        time.sleep(0.01)
    assert metrics(server)["vllm:prefix_cache_hits_total"] == 0


def test_requests_that_do_not_fit_are_refused(running: Running) -> None:
    server = running(flags=["--max-model-len", "16"])
    with pytest.raises(OSError, match="400"):
        post(server, "/v1/completions", prompt=[1] * 10, max_tokens=10)
    assert post(server, "/tokenize", prompt="one two three")["count"] == 3
