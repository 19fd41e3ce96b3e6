"""`compare --allow CODE[:NAME]`: what may be waived, how it shows, and what no waiver can mend."""

import json
from pathlib import Path
from typing import Any

import pytest

from abharness.cli import main
from abharness.codes import CODES
from abharness.record import Finding, ServerCounters
from tests.synthetic import Made, write_run

SLOW = [100.0, 100.4, 99.7, 100.1]
FAST = [108.2, 108.9, 107.8, 108.4]
BUSY = {"client": {"cpu_share": 0.97}}
WAIVABLE = {
    "undeclared_difference",
    "order_confounded",
    "client_bound",
    "prefix_cache_hits",
    "truthiness_risk",
    "clocks_differ",
    "throttled",
    "telemetry_gap",
    "jit_in_window",
    "kernels_unverifiable",
}


def launches(**of_candidate: Any) -> dict[Any, list[Made]]:
    return {
        "baseline": [Made(speed=speed) for speed in SLOW],
        "candidate": [Made(speed=speed, **of_candidate) for speed in FAST],
    }


def leaking(tmp_path: Path, *names: str) -> Path:
    return write_run(tmp_path / "r", launches(env=dict.fromkeys(names or ("LEAK",), "1")))


def compare(capsys: Any, run: Path, *allow: str) -> tuple[int, dict[str, Any]]:
    flags = [part for text in allow for part in ("--allow", text)]
    code = main(["compare", str(run), "--format", "json", *flags])
    return code, json.loads(capsys.readouterr().out)["comparisons"][0]


def test_a_waived_difference_lets_the_verdict_stand_and_is_kept_and_marked(tmp_path: Path, capsys: Any) -> None:
    code, found = compare(capsys, leaking(tmp_path), "undeclared_difference:env.LEAK")
    assert (code, found["outcome"], found["codes"], found["seen"]) == (0, "no regression", [], [])
    assert [item["name"] for item in found["waived"]] == ["env.LEAK"]
    assert found["waived"][0]["finding"]["code"] == "undeclared_difference"
    assert "env.LEAK: baseline (absent); candidate '1'" in found["waived"][0]["finding"]["message"]
    assert found["summary"].endswith("This verdict stands on waivers: undeclared_difference:env.LEAK.")
    assert found["cells"][0]["rows"][0]["call"] == "better"


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_a_waived_finding_is_printed_with_place_and_message(form: str, tmp_path: Path, capsys: Any) -> None:
    run = leaking(tmp_path)
    assert main(["compare", str(run), "--format", form, "--allow", "undeclared_difference:env.LEAK"]) == 0
    out = capsys.readouterr().out
    assert "waived: undeclared_difference: baseline and candidate: env.LEAK: baseline (absent); candidate '1'" in out
    assert "This verdict stands on waivers: undeclared_difference:env.LEAK." in out


def test_the_flag_that_is_printed_is_the_flag_that_works(tmp_path: Path, capsys: Any) -> None:
    run = leaking(tmp_path)
    assert main(["compare", str(run)]) == 3
    out = capsys.readouterr().out
    assert "--allow 'undeclared_difference:env.LEAK'" in out


def test_every_difference_is_waived_by_its_own_name(tmp_path: Path, capsys: Any) -> None:
    run = leaking(tmp_path, "LEAK", "LEAK2", "OTHER")
    code, found = compare(capsys, run, "undeclared_difference:env.LEAK", "undeclared_difference:env.OTHER")
    assert code == 3
    assert [item["name"] for item in found["seen"]] == ["env.LEAK2"]
    assert "Waived: undeclared_difference:env.LEAK, undeclared_difference:env.OTHER." in found["summary"]
    assert compare(capsys, run, "undeclared_difference:env.LEAK*", "undeclared_difference:env.OTHER")[0] == 0


def test_a_waiver_that_matches_nothing_is_a_warning(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", launches())
    assert main(["compare", str(run), "--allow", "undeclared_difference:env.LAEK"]) == 0
    out = capsys.readouterr().out
    assert "warning: --allow 'undeclared_difference:env.LAEK' matched nothing" in out
    assert "stands on waivers" not in out


def test_a_waived_cell_code_gives_the_cell_its_call_back(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", launches(**BUSY))
    code, found = compare(capsys, run)
    assert (code, found["codes"]) == (3, ["client_bound"])
    code, found = compare(capsys, run, "client_bound")
    assert (code, found["codes"], found["cells"][0]["codes"]) == (0, [], [])
    assert len(found["waived"]) == 4
    assert found["cells"][0]["rows"][0]["call"] == "better"


def test_a_waiver_of_a_cell_code_can_be_held_to_places(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", launches(**BUSY))
    assert compare(capsys, run, "client_bound:decode input_len=16")[0] == 0
    code, found = compare(capsys, run, "client_bound:launch 1-candidate")
    assert (code, len(found["waived"]), len(found["seen"])) == (3, 1, 3)
    assert main(["compare", str(run), "--allow", "client_bound:prefill"]) == 3
    assert "'client_bound:prefill' matched nothing" in capsys.readouterr().out


def test_two_waivable_codes_in_one_run_need_two_waivers(tmp_path: Path, capsys: Any) -> None:
    hits = ServerCounters(prefix_cache_queries=64, prefix_cache_hits=32)
    run = write_run(tmp_path / "r", launches(counters=hits), "design.order=ab")
    assert compare(capsys, run, "order_confounded")[0] == 3
    assert compare(capsys, run, "prefix_cache_hits")[0] == 3
    assert compare(capsys, run, "prefix_cache_hits", "order_confounded")[0] == 0
    main(["compare", str(run)])
    out = capsys.readouterr().out
    assert "--allow 'order_confounded'" in out
    assert "--allow 'prefix_cache_hits'" in out


def test_a_waiver_never_reaches_a_regression(tmp_path: Path, capsys: Any) -> None:
    made = {"baseline": [Made(speed=s) for s in FAST], "candidate": [Made(speed=s, env={"LEAK": "1"}) for s in SLOW]}
    code, found = compare(capsys, write_run(tmp_path / "r", made), "undeclared_difference:env.LEAK")
    assert (code, found["outcome"]) == (1, "regression")
    assert "stands on waivers" in found["summary"]


def test_advice_can_be_waived_too(tmp_path: Path, capsys: Any) -> None:
    risk = Finding(code="truthiness_risk", message="differs only as '0' against '1'")
    _, found = compare(capsys, write_run(tmp_path / "r", launches(findings=[risk])), "truthiness_risk")
    assert found["advice"] == []
    assert {item["finding"]["code"] for item in found["waived"]} == {"truthiness_risk"}


def test_what_is_waivable_is_named_here() -> None:
    assert {name for name, code in CODES.items() if code.waivable} == WAIVABLE


@pytest.mark.parametrize("name", sorted(name for name, code in CODES.items() if not code.waivable))
def test_a_failed_proof_or_broken_work_cannot_be_waived(name: str, tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", launches())
    for text in (name, f"{name}:x"):
        assert main(["compare", str(run), "--allow", text]) == 2
        err = capsys.readouterr().err
        assert f"--allow {text}: {name} cannot be waived" in err
        assert "no waiver makes a failed proof a proof" in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("env.LEAK", "no code 'env.LEAK'"),
        ("", "no code ''"),
        (":x", "no code ''"),
        ("undeclared_difference", "needs the name of the difference"),
        ("undeclared_difference:", "needs the name of the difference"),
        ("undeclared_difference:*", "needs the name of the difference"),
        ("client_bound:", "nothing after the colon"),
        ("CLIENT_BOUND", "no code 'CLIENT_BOUND'"),
    ],
)
def test_a_waiver_that_cannot_be_read_is_a_usage_error(text: str, told: str, tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", launches())
    assert main(["compare", str(run), "--allow", text]) == 2
    err = capsys.readouterr().err
    assert f"--allow {text}: " in err
    assert told in err
    if "no code" in told:
        assert "order_confounded" in err


def test_a_finding_of_an_unknown_code_blocks_the_verdict(tmp_path: Path, capsys: Any) -> None:
    """A record of another version may hold one; it is not taken for advice."""
    found = Finding(code="from_the_future", message="something was wrong")
    run = write_run(tmp_path / "r", launches(findings=[found]))
    assert main(["compare", str(run)]) == 3
    assert "from_the_future: launch 1-candidate: something was wrong" in capsys.readouterr().out
    assert main(["compare", str(run), "--allow", "from_the_future"]) == 2
