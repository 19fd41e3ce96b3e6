"""Remarks beside a call, and orders that confound: through the command line, on runs made of numbers."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from abharness.cli import main
from tests.synthetic import SPEC, Made, write_run

JITTER = [0.0005, -0.0005, 0.0003, -0.0002, 0.0001, -0.0003, 0.0002, 0.0]


def made(*speeds: float) -> list[Made]:
    return [Made(speed=speed) for speed in speeds]


def in_time(order: str, speeds: list[float]) -> dict[Any, list[Made]]:
    """Launches by variant, from speeds in the order in which they run."""
    return {
        "baseline": made(*(s for s, side in zip(speeds, order, strict=True) if side == "b")),
        "candidate": made(*(s for s, side in zip(speeds, order, strict=True) if side == "c")),
    }


def report(capsys: Any, *arguments: Any) -> str:
    main(["compare", *map(str, arguments)])
    return str(capsys.readouterr().out)


def headline(capsys: Any, run: Path) -> dict[str, Any]:
    main(["compare", str(run), "--format", "json"])
    rows = json.loads(capsys.readouterr().out)["comparisons"][0]["cells"][0]["rows"]
    return next(row for row in rows if row["decisive"])


def test_a_call_stands_beside_an_exact_rank_test_that_agrees(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", {"baseline": made(100, 101, 99, 100.5), "candidate": made(110, 111, 109, 110.5)})
    row = headline(capsys, run)
    assert row["rank"] == {"p": pytest.approx(2 / 70), "smallest": pytest.approx(2 / 70)}
    out = report(capsys, run)
    assert "roughly log-normal" in out
    assert "the exact Mann-Whitney test, which does not, agrees (p=0.029, uncorrected)" in out


def test_three_launches_are_called_and_the_rank_test_is_said_to_be_unable_to_decide(
    tmp_path: Path, capsys: Any
) -> None:
    launches: Any = {"baseline": made(100, 101, 99), "candidate": made(130, 131, 129)}
    run = write_run(tmp_path / "r", launches, "design.launches_per_variant=3")
    assert headline(capsys, run)["call"] == "better"
    assert "cannot decide: with 3+3 launches its smallest p is 0.100" in report(capsys, run)


def test_a_rank_test_that_disagrees_is_told_and_does_not_decide(tmp_path: Path, capsys: Any) -> None:
    overlap: Any = {"baseline": made(100, 101, 99, 104), "candidate": made(110, 111, 103, 112)}
    run = write_run(tmp_path / "r", overlap)
    assert headline(capsys, run)["call"] == "better"
    assert "does not agree: the call rests on that assumption (p=0.057" in report(capsys, run)


def test_no_difference_has_no_rank_test(tmp_path: Path, capsys: Any) -> None:
    run = write_run(tmp_path / "r", {"baseline": made(100, 101, 99, 102), "candidate": made(101, 100, 99.5, 102)})
    assert headline(capsys, run)["rank"] is None
    assert "Mann-Whitney" not in report(capsys, run)


def test_no_difference_says_what_could_have_been_shown(tmp_path: Path, capsys: Any) -> None:
    out = report(capsys, write_run(tmp_path / "r", in_time("bccbbccb", [100.0, 101.0, 99.0, 100.5] * 2)))
    (note,) = [line for line in out.splitlines() if line.startswith("note: ~ means that no difference was shown")]
    found = re.search(
        r"Smallest difference that n=4 launches .* marked: about ([\d.]+)%; for 1% it takes (\d+) launches", note
    )
    assert found is not None
    assert 1 < float(found[1]) < 10
    assert int(found[2]) > 4


def test_drift_across_launches_is_told_with_its_size(tmp_path: Path, capsys: Any) -> None:
    order = "bccbbccb"
    steady = [100 * math.exp(e) for e in JITTER]
    drifting = [s * math.exp(0.01 * at) for at, s in enumerate(steady)]
    assert "drift: " not in report(capsys, write_run(tmp_path / "s", in_time(order, steady)))
    out = report(capsys, write_run(tmp_path / "d", in_time(order, drifting)))
    assert "drift: +7.2% from the first launch to the last" in out
    assert "order abba keeps a steady drift out of the comparison" in out


def test_a_drift_smaller_than_min_effect_is_not_told(tmp_path: Path, capsys: Any) -> None:
    drifting = [100 * math.exp(e / 10 + 0.001 * at) for at, e in enumerate(JITTER)]
    assert "drift: " not in report(capsys, write_run(tmp_path / "d", in_time("bccbbccb", drifting)))


def test_the_first_launch_of_a_pair_that_differs_from_the_second_is_told(tmp_path: Path, capsys: Any) -> None:
    speeds = [100 * math.exp(e + (0.03 if at % 2 == 0 else 0)) for at, e in enumerate(JITTER)]
    out = report(capsys, write_run(tmp_path / "r", in_time("bccbbccb", speeds)))
    assert "place in a pair: the first launch of a pair differs from the second by +3." in out


def test_a_launch_that_stands_out_is_named_and_kept(tmp_path: Path, capsys: Any) -> None:
    run = write_run(
        tmp_path / "r", {"baseline": made(100, 100.1, 99.9, 93), "candidate": made(100, 100.1, 99.9, 100.05)}
    )
    out = report(capsys, run)
    assert "launch 7-baseline stands out: 93 tok/s, -7.0% from the median of its variant" in out
    assert "it is kept" in out
    assert headline(capsys, run)["samples"]["baseline"][-1] == pytest.approx(93)


def test_three_launches_name_no_outlier(tmp_path: Path, capsys: Any) -> None:
    launches: Any = {"baseline": made(100, 100.1, 80), "candidate": made(100, 100.1, 99.9)}
    run = write_run(tmp_path / "r", launches, "design.launches_per_variant=3")
    assert "stands out" not in report(capsys, run)


def test_a_random_order_that_happens_to_confound_has_the_code_and_the_correlation(tmp_path: Path, capsys: Any) -> None:
    launches: Any = {"baseline": made(100, 101), "candidate": made(130, 131)}
    design = ("design.order=random", "design.launches_per_variant=2")
    codes: dict[str, int] = {}
    for seed in range(8):
        run = write_run(tmp_path / str(seed), launches, *design, f"design.seed={seed}")
        order = "".join(one[0] for one in json.loads((run / "experiment.json").read_text())["plan"])
        code = main(["compare", str(run)])
        out = capsys.readouterr().out
        assert (code, "order_confounded" in out) == ((3, True) if order in ("bcbc", "cbcb") else (0, False)), order
        if order == "bcbc":
            assert "(b c b c) correlate variant with time: +0.45, limit 0.4" in out
            assert "use another seed or design.order abba" in out
        codes[order] = code
    assert {0, 3} <= set(codes.values()), "the seeds tried must hold both kinds"


def test_launches_run_again_later_confound_though_the_plan_did_not(tmp_path: Path, capsys: Any) -> None:
    """Both candidates failed at first and were run again after every baseline: in time it is b b c c."""
    launches: Any = {"baseline": made(100, 101), "candidate": made(130, 131)}
    for one in launches["candidate"]:
        one.started_at = "2026-01-02T00:00:00+00:00"
    run = write_run(tmp_path / "r", launches, "design.launches_per_variant=2")
    assert main(["compare", str(run)]) == 3
    out = capsys.readouterr().out
    assert "order_confounded: order: design.order is abba, and the launches as they ran (b b c c)" in out
    assert "launches were run again later: start a new run" in out
    assert main(["compare", str(run), "--allow", "order_confounded"]) == 0


def test_a_random_order_that_will_confound_is_told_before_anything_runs(tmp_path: Path, capsys: Any) -> None:
    warned = []
    for seed in range(8):
        design = ["--set", "design.order=random", "--set", "design.launches_per_variant=2"]
        spec = tmp_path / "made.yaml"
        spec.write_text(SPEC)
        assert main(["run", str(spec), "--dry-run", *design, "--set", f"design.seed={seed}"]) == 0
        out = capsys.readouterr()
        order = next(line for line in out.out.splitlines() if line.startswith("order")).split()[1:5]
        alternates = order[0] == order[2] and order[1] == order[3]
        assert ("correlates variant with time" in out.err) == alternates
        warned.append(alternates)
    assert set(warned) == {True, False}
