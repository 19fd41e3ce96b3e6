"""Lies about who answers and whether anybody does; and about compiled code that was there before."""

from __future__ import annotations

from typing import Any

from tests.lies.battery import Lie, Setup
from tests.lies.switches import WRAPPED, env, faults, in_candidate, wrapped

BASELINE_ONLY = {"when": {"FAKE_SWITCH": None}}
SOON = Setup(spec={"server": {"ready_timeout_s": 4}})


def stray(how: str) -> dict[str, Any]:
    return {"stray": {**BASELINE_ONLY, "how": how, "after_requests": 3, "pid_file": f"@TMP@/{how}.pid"}}


SERVERS = (
    Lie(
        "the server of the launch before answers",
        "the candidate was measured: it was the baseline's server",
        4,
        "launch_failed",
        r"port \d+ is still open, held by pid|is taken by pid",
        lie=Setup(faults=stray("later")),
    ),
    Lie(
        "another process takes the port after readiness",
        "our server was measured",
        4,
        "wrong_server",
        r"is answered by pid \d+",
        lie=Setup(faults=stray("takes")),
    ),
    Lie(
        "another process shares the listening socket",
        "our server alone was measured",
        4,
        "wrong_server",
        r"is answered by pid \d+",
        lie=Setup(faults=stray("shares")),
    ),
    Lie(
        "a foreign server is on the port",
        "our server was measured",
        4,
        "wrong_server",
        r"port \d+ on 127.0.0.1 is taken by pid \d+",
        Setup(spec={"server": {"port": "@PORT@"}}),
        Setup(foreign_server=True),
    ),
    Lie(
        "another model is served",
        "our model was measured",
        4,
        "launch_failed",
        r"ServerNotReady.*serves other, not abharness-",
        lie=faults(served_name=in_candidate("other")).over(SOON),
    ),
    Lie(
        "answers come from another model under our name",
        "our model was measured",
        4,
        "launch_failed",
        r"ServerNotReady.*signed other",
        lie=faults(signs_as=in_candidate("other")).over(SOON),
    ),
    Lie(
        "completions never return",
        "the server is up: it is healthy",
        4,
        "launch_failed",
        r"ServerNotReady",
        lie=faults(completion_hangs=in_candidate()).over(SOON),
    ),
    Lie(
        "health is good and the engine is not ready",
        "the server is up: it is healthy",
        4,
        "launch_failed",
        r"ServerNotReady",
        lie=faults(health_before_ready_s=in_candidate(60)).over(SOON),
    ),
    Lie(
        "the engine is dead and the server lives",
        "the candidate is slow",
        4,
        "launch_failed",
        r"VLLM::EngineCore \(pid \d+\) has ended, the server \(pid \d+\) runs on",
        lie=faults(
            engine_dead_server_lives=in_candidate(), die=in_candidate(at="after_requests", n=3, who="engine")
        ),
    ),
    Lie(
        "the server dies at once",
        "the candidate is slow to start",
        4,
        "launch_failed",
        r"ServerDied",
        lie=faults(exit_after_s=in_candidate(0.3), slow_start_s=in_candidate(20)),
    ),
    Lie(
        "the server dies under load",
        "the requests that came back were fast",
        4,
        "launch_failed",
        r"the server went away",
        lie=faults(die=in_candidate(at="after_requests", n=4, who="server")),
    ),
    Lie(
        "the engine dies under load",
        "the requests that came back were fast",
        4,
        "launch_failed",
        r"launch 1-candidate: failed",
        lie=faults(die=in_candidate(at="after_requests", n=4, who="engine")),
    ),
)  # fmt: skip

GRAPH = "torch_compile_cache/5f3a/rank_0_0/backbone"
# What the baseline compiled last year: the engine that loads it runs without the switch.
PREFILL = (
    f'mkdir -p "$VLLM_CACHE_ROOT/{GRAPH}"\n'
    f"""echo '""' > "$VLLM_CACHE_ROOT/{GRAPH}/graph.json"\n"""
    f'touch -d 2025-01-01 "$VLLM_CACHE_ROOT/{GRAPH}/graph.json"'
)


def cache_lie(name: str, exit_code: int, says: str, lie: Setup, honest: Setup | None = None) -> Lie:
    concludes = "both variants were compiled afresh"
    return Lie(name, concludes, exit_code, "compile_cache_reused", says, honest or Setup(), lie)


CACHES = (
    cache_lie("a wrapper fills the cache before the start", 4, r"loaded from a cache", wrapped(PREFILL), WRAPPED),
    cache_lie(
        "a wrapper fills the cache, and the server does not tell",
        3,
        r"older than the launch",
        wrapped(PREFILL).over(faults(quiet_cache_load=True)),
        WRAPPED,
    ),
    cache_lie("a compiled graph is loaded", 4, r"Directly load the compiled", faults(cache_load_line=in_candidate())),
    cache_lie("no cache folder is used", 3, r"none of the launch's", faults(cache_unused=in_candidate())),
    cache_lie("the default cache is written", 3, r"stray/graph.py", faults(default_cache_write=in_candidate())),
    cache_lie(
        "the default cache is written through a symbolic link",
        3,
        r"stray/graph.py",
        Setup(faults={"default_cache_write": in_candidate()}, links={"home/.cache": "@TMP@/disk"}),
    ),
    cache_lie(
        "the default cache is written where XDG_CACHE_HOME says",
        3,
        r"stray/graph.py",
        faults(default_cache_write=in_candidate()),
        Setup(spec=env(XDG_CACHE_HOME="@TMP@/xdg")),
    ),
    cache_lie(
        "the engine moves its cache elsewhere",
        4,
        r"VLLM_CACHE_ROOT",
        faults(late_environ=in_candidate(VLLM_CACHE_ROOT="@TMP@/elsewhere")),
    ),
)

LIES = (*SERVERS, *CACHES)
