"""Lies that are told after the run, in its records; and the order of the launches."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tests.lies.battery import Edit, Lie, Setup, copy_of
from tests.lies.load import ASKED

# Three launches a variant, so that the honest records do show the difference; the lies must not.
BASE_RUN = Setup(spec={"design": {"launches_per_variant": 3}})
CANDIDATES = ("1-candidate", "2-candidate", "5-candidate")


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(path.read_text())
    changed = change(data)
    path.write_text(json.dumps(data if changed is None else changed))


def in_file(name: str, change: Callable[[Any], Any], launches: tuple[str, ...] = CANDIDATES[:1]) -> Edit:
    """The edit that changes one JSON file of some launches."""

    def edit(run: Path) -> list[str]:
        for launch in launches:
            rewrite(run / "launches" / launch / name, change)
        return [str(run)]

    return edit


def in_lines(name: str, change: Callable[[list[str]], list[str]]) -> Edit:
    """The edit that changes the lines of one file of a candidate launch."""

    def edit(run: Path) -> list[str]:
        path = run / "launches" / CANDIDATES[0] / name
        path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
        return [str(run)]

    return edit


def replaced(old: str, new: str) -> Callable[[list[str]], list[str]]:
    def change(lines: list[str]) -> list[str]:
        assert old in lines[0]
        return [lines[0].replace(old, new, 1), *lines[1:]]

    return change


def busy_client(launch: Any) -> None:
    launch["cells"][0]["client"]["cpu_share"] = 0.97


def other_prompts(launch: Any) -> None:
    launch["cells"][0]["prompts_sha256"] = "0" * 64


def no_cells(launch: Any) -> None:
    launch["cells"] = []


def no_end(launch: Any) -> None:
    launch["cells"][0]["ended_s"] = math.nan


def a_day_later(launch: Any) -> None:
    launch["started_at"] = (datetime.fromisoformat(launch["started_at"]) + timedelta(days=1)).isoformat()


def swapped(launch: Any) -> None:
    launch["variant"] = "baseline"


def other_engine_value(evidence: Any) -> None:
    for check in evidence["environment"]:
        for process in check["processes"]:
            if process["name"].startswith("VLLM::EngineCore"):
                process["started_with"]["FAKE_SWITCH"] = "slow"


def unreadable_engine(evidence: Any) -> None:
    for check in evidence["environment"]:
        for process in check["processes"]:
            if process["name"].startswith("VLLM::EngineCore"):
                process.update(state="unreadable", reason="wiped", started_with={})


def no_engine(evidence: Any) -> None:
    for check in evidence["environment"]:
        check["processes"] = [one for one in check["processes"] if not one["name"].startswith("VLLM::")]


def no_checks(evidence: Any) -> None:
    evidence["environment"] = []


def no_second_check(evidence: Any) -> None:
    del evidence["environment"][1:]


def touched(evidence: Any) -> None:
    evidence["default_caches_touched"] = ["/root/.cache/vllm/torch_compile_cache/stray/graph.py"]


def full_before(evidence: Any) -> None:
    evidence["caches"][0]["files_before"] = 3


def missing_evidence(run: Path) -> list[str]:
    (run / "launches" / CANDIDATES[0] / "evidence.json").unlink()
    return [str(run)]


def counted_twice(run: Path) -> list[str]:
    """One launch under two numbers: twice the sample, half the noise."""
    shutil.rmtree(run / "launches" / CANDIDATES[1])
    copied = run / "launches" / CANDIDATES[1]
    shutil.copytree(run / "launches" / CANDIDATES[0], copied)
    rewrite(copied / "launch.json", lambda launch: launch.update(launch_index=2))
    return [str(run)]


def foreign_launch(run: Path) -> list[str]:
    path = run / "launches" / CANDIDATES[0] / "launch.json"
    rewrite(path, lambda launch: launch.update(config_hash="0123456789ab"))
    return [str(run)]


def laundered(run: Path) -> list[str]:
    """Errors in the requests, and a comparison.json from a better day."""
    path = run / "launches" / CANDIDATES[0] / "requests.jsonl"
    lines = path.read_text().splitlines()
    line = json.loads(lines[0])
    line["request"]["error"] = "HTTP 500"
    path.write_text("\n".join([json.dumps(line), *lines[1:]]) + "\n")
    saved = json.loads((run / "comparison.json").read_text())
    assert saved["comparisons"][0]["outcome"] == "no regression"
    return [str(run)]


def two_runs(change: Callable[[Any], Any] | None) -> Edit:
    """The baseline of one run against the candidate of another, on another machine or not."""

    def edit(run: Path) -> list[str]:
        second = copy_of(run, run.parent.parent.parent / "second")
        if change is not None:
            rewrite(second / "experiment.json", change)
        return [str(run), str(second), "--allow", "order_confounded"]

    return edit


def on_a_gpu(record: Any) -> None:
    record["provenance"]["gpu"] = {"driver_version": "999.1", "devices": [{"uuid": "GPU-1", "name": "Fake"}]}


def edited(
    name: str, concludes: str, exit_code: int, code: str | None, says: str, edit: Edit, honest: Setup = BASE_RUN
) -> Lie:
    return Lie(name, concludes, exit_code, code, says, honest, edit=edit)


FASTER = "the candidate is faster"
PROVEN = "the switch was on"

RECORDS = (
    edited("lines of the requests are removed", FASTER, 3, "incomplete_requests", r"the 3 requests on record are not",
           in_lines("requests.jsonl", lambda lines: lines[:-1])),
    edited("a line of the requests is doubled", FASTER, 3, "incomplete_requests", r"the 5 requests on record are not",
           in_lines("requests.jsonl", lambda lines: [*lines, lines[0]])),
    edited("the last line of the requests is half", FASTER, 3, "incomplete_requests", r"the 3 requests on record",
           in_lines("requests.jsonl", lambda lines: [*lines[:-1], lines[-1][:50]])),
    edited("a line in the middle is damaged", FASTER, 3, "incomplete_requests", r"requests.jsonl:1: line dropped",
           in_lines("requests.jsonl", lambda lines: [lines[0][:50] + "\n", *lines[1:]])),
    edited("NaN in a request", FASTER, 3, "incomplete_requests", r"requests.jsonl:1: line dropped",
           in_lines("requests.jsonl", replaced('"submitted_s":', '"submitted_s":NaN,"was":'))),
    edited("NaN in a launch record", FASTER, 2, None, r"launch.json: cells.0.ended_s", in_file("launch.json", no_end)),
    edited("one launch had other prompts", FASTER, 3, "undeclared_difference", r"prompts.decode.* differs between",
           in_file("launch.json", other_prompts)),
    edited("a launch without its cell", FASTER, 3, "undeclared_difference", r"prompts.decode.* differs between",
           in_file("launch.json", no_cells)),
    edited("the client was at its limit", FASTER, 3, "client_bound", r"the client used 0.97 of a core",
           in_file("launch.json", busy_client)),
edited("all of one variant were run again the day after", FASTER, 3, "order_confounded", r"order_confounded",
           in_file("launch.json", a_day_later, CANDIDATES)),
    edited("a launch changes sides", FASTER, 4, "launch_failed", r"2 of 3 planned candidate launches",
           in_file("launch.json", swapped)),
    edited("a launch is counted twice", FASTER, 2, None, r"same launch|sentinel", counted_twice),
    edited("a launch of another configuration is copied in", FASTER, 2, None, r"configuration 0123456789ab in a run of",
           foreign_launch),
    edited("failed requests, and a comparison from a better day", FASTER, 3, "incomplete_requests", r"HTTP 500",
           laundered),
    edited("answers are removed", "the answers are the same", 3, "incomplete_requests", r"incomplete 7/8",
           in_lines("gsm8k.jsonl", lambda lines: lines[:-1]), ASKED),
    edited("an answer is doubled", "the answers are the same", 3, "incomplete_requests", r"answered more than once",
           in_lines("gsm8k.jsonl", lambda lines: [*lines, lines[0]]), ASKED),
    edited("the findings are emptied, the witness says another value", PROVEN, 3, "env_mismatch", r"'slow'",
           in_file("evidence.json", other_engine_value)),
    edited("the findings are emptied, the witness could not be read", PROVEN, 3, "env_unverifiable", r"wiped",
           in_file("evidence.json", unreadable_engine)),
    edited("the engine is not among the witnesses", PROVEN, 3, "env_unverifiable", r"engine",
           in_file("evidence.json", no_engine)),
    edited("no check is on record", PROVEN, 3, "env_unverifiable", r"no environment verification is on record",
           in_file("evidence.json", no_checks)),
    edited("the check after the load is not on record", PROVEN, 3, "env_unverifiable", r"after",
           in_file("evidence.json", no_second_check)),
    edited("the evidence is gone", PROVEN, 3, "env_unverifiable", r"no environment verification is on record",
           missing_evidence),
    edited("the findings are emptied, the default caches were written", "it was compiled afresh", 3,
           "compile_cache_reused", r"stray/graph.py", in_file("evidence.json", touched)),
    edited("the findings are emptied, the caches were not empty", "it was compiled afresh", 3,
           "compile_cache_reused", r"3 file", in_file("evidence.json", full_before)),
    Lie("one run had a GPU", FASTER, 3, "undeclared_difference", r"host.gpu", BASE_RUN,
        edit=two_runs(on_a_gpu), honest_edit=two_runs(None)),
)  # fmt: skip

# The switch does nothing; every server that starts is faster than the one before.
DRIFT = Setup(
    spec={
        "server": {"env": {"FAKE_DRIFT": "@TMP@/drift", "FAKE_SPEEDS": "{}"}},
        "design": {"launches_per_variant": 3, "order": "abba"},
    }
)
ORDER = (
    Lie("all of one variant before the other, under drift", FASTER, 3, "order_confounded",
        r"design\.order is ab", DRIFT,
        Setup(spec={"design": {"order": "ab"}})),
)  # fmt: skip

LIES = (*RECORDS, *ORDER)
