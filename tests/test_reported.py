"""What plugins say of themselves: conditions, which processes count, and what no two launches have equal."""

from __future__ import annotations

from typing import Any

import pytest

from abharness.record import EnvironmentCheck
from abharness.reported import choices, condition_problem, identity, judge_reports
from abharness.witnesses import ProbeReport, ProcessWitness

REPORT = {"choice": "kernel set tuned, single=on", "device": "cuda", "on": True, "nothing": None, "empty": {},
          "given": {"MY_KERNELS": "tuned"}, "list": [1], "calls": {"single": 36, "reference": 0}}  # fmt: skip


def check(*processes: tuple[str, dict[str, Any] | None], when: Any = "after_load", **probe: Any) -> EnvironmentCheck:
    """A check of processes of these roles, each with what the plugin `mine` reports there."""
    witnesses, probes = [], []
    for pid, (role, report) in enumerate(processes, 1):
        witnesses.append(ProcessWitness(pid=pid, ppid=0, start_ticks=pid, name="x", state="ok", role=role))
        if report is not None:
            heard = {"reason": "asked", "nonce": "n", "plugins": ["mine"], "reports": {"mine": report}, **probe}
            facts = {"executable": "p", "python": "3", "environ": {}, "modules": {}, "cache_dirs": {}}
            probes.append(ProbeReport(pid=pid, ppid=0, start_ticks=pid, name="x", **facts, **heard))
    return EnvironmentCheck(when=when, expected={}, processes=witnesses, probes=probes)


def judged(found: EnvironmentCheck, **conditions: str) -> list[tuple[str, str]]:
    expected = {"mine": {key.replace("__", "."): condition for key, condition in conditions.items()}}
    return [(finding.code, finding.message) for finding in judge_reports(found, expected)]


@pytest.mark.parametrize(
    ("key", "condition", "met"),
    [
        ("choice", "kernel set tuned.*", True),
        ("choice", "kernel set", False),  # the whole text
        ("choice", "==1", False),
        ("given__MY_KERNELS", "tuned", True),
        ("on", "true", True),
        ("on", "==1", False),  # a truth value is no number
        ("nothing", "null", True),
        ("calls__single", ">0", True),
        ("calls__single", ">= 36", True),
        ("calls__single", ">36", False),
        ("calls__single", "<37.5", True),
        ("calls__single", "!=36", False),
        ("calls__single", "36", False),  # a number is compared
        ("calls__reference", "==0", True),
        ("calls__reference", ">-1", True),
        ("calls", ".*", False),
        ("calls__other", ">=0", False),
        ("list", ".*", False),
        ("empty", ".*", False),
    ],
)
def test_conditions(key: str, condition: str, met: bool) -> None:
    assert condition_problem(condition) is None
    found = judged(check(("EngineCore", REPORT)), **{key: condition})
    assert [code for code, _ in found] == ([] if met else ["switch_not_recognised"])
    assert all("pid 1 (EngineCore)" in message for _, message in found)


def test_a_key_that_is_not_there_is_told_with_those_that_are() -> None:
    ((_, message),) = judged(check(("EngineCore", {"choice": "x", "calls": {"a": 1}})), calls__b=">0")
    assert "it has no such key (it has calls.a, choice)" in message


IDLE = {**REPORT, "calls": {"single": 0, "reference": 0}}


def test_the_processes_that_count_are_the_workers_and_engines_where_those_have_none() -> None:
    assert judged(check(("server", IDLE), ("EngineCore", REPORT)), calls__single=">0") == []
    assert judged(check(("server", REPORT), ("EngineCore", IDLE)), calls__single=">0") != []
    assert judged(check(("server", IDLE), ("EngineCore", IDLE), ("Worker_TP0", REPORT)), calls__single=">0") == []
    two = judged(check(("EngineCore", REPORT), ("Worker_TP0", REPORT), ("Worker_TP1", IDLE)), calls__single=">0")
    assert [("pid 3 (Worker_TP1)" in message, "pid 2" in message) for _, message in two] == [(True, False)]


def test_what_was_not_heard_is_never_met() -> None:
    for found, why in (
        (check(("EngineCore", None)), "the probe was not heard there"),
        (check(("EngineCore", None)).model_copy(update={"probe_absent": "PYTHONPATH is unset"}), "PYTHONPATH is unset"),
        (check(("EngineCore", REPORT), reason="start"), "the probe did not answer there"),
        (check(("EngineCore", REPORT), reports={}), "it is loaded and has no abharness_report()"),
        (check(("EngineCore", REPORT), reports={}, plugins=[]), "it is not loaded there"),
        (
            check(("EngineCore", REPORT), reports={}, report_faults={"mine": "KeyError"}),
            "it failed to report: KeyError",
        ),
    ):
        ((code, message),) = judged(found, calls__reference="==0")
        assert (code, why in message) == ("env_unverifiable", True), message
        assert [code for code, _ in judged(found)] == ["env_unverifiable"], (
            "without a condition it must report all the same"
        )


def test_nothing_is_expected_before_the_load() -> None:
    assert judged(check(("EngineCore", IDLE), when="before_load"), calls__single=">0") == []


def test_counters_are_no_identity() -> None:
    names = identity([check(("EngineCore", REPORT))])
    assert names == identity([check(("EngineCore", IDLE))])
    assert names["mine.choice"] == "kernel set tuned, single=on"
    assert not any(word in name for name in names for word in ("calls", "given"))


def test_processes_that_disagree_have_no_choice_in_common() -> None:
    other = {**REPORT, "choice": "kernel set legacy"}
    assert choices([check(("Worker", REPORT), ("Worker", other), ("server", {"choice": "none"}))]) == {
        "mine": {"kernel set tuned, single=on", "kernel set legacy"}
    }
