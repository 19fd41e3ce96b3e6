"""What a server's log says of its switches, and advice on texts of flags."""

from __future__ import annotations

import pytest

from abharness.judge import judge_check
from abharness.record import EnvironmentCheck, Finding
from abharness.verify import LogFacts, read_log, suspicious_values
from abharness.witnesses import ProcessWitness
from tests.checking import Running, check, codes
from tests.conftest import MakeCommand


def log_check(
    text: str, *declared: str, expect_log: tuple[str, ...] = (), fresh_caches: bool = True
) -> tuple[LogFacts, list[Finding]]:
    """What a log alone says of a launch whose one process shows every declared variable."""
    facts = read_log(text, expect_log=expect_log)
    values = dict.fromkeys(declared, "1")
    engine = ProcessWitness(
        pid=1, ppid=0, start_ticks=1, name="e", state="ok", role="EngineCore", started_with={**values}
    )
    seen = EnvironmentCheck(
        when="before_load", expected={}, processes=[engine], log_matches=facts.matches, log_doubts=facts.doubts,
        log_cache_loads=facts.cache_loads, probe_absent="a log only",
    )  # fmt: skip
    found = judge_check(seen, expected=values, expect_log=expect_log, fresh_caches=fresh_caches)
    return facts, [finding for finding in found if finding.code != "one_witness"]


@pytest.mark.parametrize(
    "line",
    [
        "(APIServer pid=1) WARNING 07-02 21:58:11 [envs.py:7] Unknown vLLM environment variable detected: VLLM_ROUTE",
        "WARNING Unknown environment variables: VLLM_A, VLLM_ROUTE, VLLM_B",
        "WARNING: unrecognized environment variable 'VLLM_ROUTE'",
        "\x1b[33mWARNING\x1b[0m The environment variable VLLM_ROUTE is no longer supported, use --route",
        "WARNING Env var VLLM_ROUTE=1 is ignored",
    ],
)
def test_variable_that_arrived_and_is_not_known(line: str) -> None:
    """A4."""
    _, findings = log_check(f"INFO start\n{line}\nINFO Using FLASH_ATTN backend", "VLLM_ROUTE")
    assert codes(findings) == ["switch_not_recognised"]
    assert findings[0].fatal
    assert "VLLM_ROUTE was delivered and not recognised" in findings[0].message


@pytest.mark.parametrize(
    "line",
    [
        "WARNING Unknown vLLM environment variable detected: VLLM_ROUTE_2",
        "WARNING Unknown vLLM environment variable detected: MY_VLLM_ROUTE",
        "INFO environment variable VLLM_ROUTE=1 selects the second route",
        "INFO VLLM_ROUTE: unknown model architecture, using the default",
    ],
)
def test_lines_that_say_nothing_against_the_variable(line: str) -> None:
    """A4: neither a longer name nor another complaint."""
    assert log_check(line, "VLLM_ROUTE")[1] == []


def test_unknown_variable_fails_a_launch_that_delivered_it(running: Running) -> None:
    """A4: the environment is right in every process, and the variant is still not what it says."""
    server = running(env={"VLLM_ROUTE": "1"})
    result = check(server, {"VLLM_ROUTE": "1"})
    assert all(witness.started_with == {"VLLM_ROUTE": "1"} for witness in result.processes)
    assert codes(result.findings) == ["switch_not_recognised"]
    assert check(server, {"FAKE_SWITCH": None}).findings == []


def test_expected_line_is_missing() -> None:
    """A4."""
    facts, findings = log_check(
        "Using FLASH_ATTN backend\nUsing \x1b[1mX\x1b[0m", expect_log=("TRITON_ATTN", "^Using X$")
    )
    assert facts.matches == {"TRITON_ATTN": None, "^Using X$": "Using X"}
    assert codes(findings) == ["switch_not_recognised"]
    assert "'TRITON_ATTN'" in findings[0].message


@pytest.mark.parametrize(
    "line",
    [
        "Directly load the compiled graph(s) for compile range (1, 2048) from the cache, took 1.9 s",
        "[backbone] Directly load AOT compilation from path /root/.cache/vllm/torch_compile_cache/x/model",
    ],
)
def test_compiled_code_from_a_cache(line: str) -> None:
    """B1."""
    finding = log_check(f"(EngineCore pid=1) INFO {line}")[1][0]
    assert (finding.code, finding.fatal) == ("compile_cache_reused", True)
    assert log_check(line, fresh_caches=False)[1] == []


def test_shared_cache_shows_in_the_second_launch(make_command: MakeCommand, running: Running) -> None:
    """B1: the switch is not in the cache key, so the second variant runs the first one's graph."""
    first = running(env={"FAKE_SWITCH": "slow"})
    root = str(first.command.cache_dirs["VLLM_CACHE_ROOT"])
    assert check(first, {"FAKE_SWITCH": "slow"}).findings == []
    first.stop()
    second = running(env={"FAKE_SWITCH": "fast", "VLLM_CACHE_ROOT": root})
    result = check(second, {"FAKE_SWITCH": "fast"})
    assert codes(result.findings) == ["compile_cache_reused"]


@pytest.mark.parametrize(
    ("one", "other", "advised"),
    [
        ("0", "1", True),
        ("true", "1", True),
        ("", "1", True),
        ("False", "0", True),
        (None, "1", False),
        ("1", "1", False),
        ("legacy", "tuned", False),
        ("0", "2", False),
    ],
)
def test_flag_texts_get_advice(one: str | None, other: str | None, advised: bool) -> None:
    """A5."""
    findings = suspicious_values({"VLLM_FOO_DEBUG": one}, {"VLLM_FOO_DEBUG": other})
    assert codes(findings) == (["truthiness_risk"] if advised else [])
    if advised:
        assert not findings[0].fatal
        assert "null" in str(findings[0].hint)
