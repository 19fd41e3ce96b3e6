"""What a run tells while it works: time left, few lines elsewhere than on a terminal, a live view that fits."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from abharness.cli import main
from abharness.progress import RichReporter, RunStart, ends
from abharness.record import Variant
from abharness.terminal import cells
from abharness.timeleft import TimeLeft, about, duration
from tests.test_run import CANDIDATE, QUICK, leftovers, run, run_dir, spec_file
from tests.test_terminal import SGR, on_a_terminal

ABBA: list[Variant] = ["baseline", "candidate", "candidate", "baseline"]


def test_nothing_is_known_before_a_launch_has_finished() -> None:
    clock = TimeLeft(ABBA, {})
    clock.launch(0, 0)
    clock.phase(1)
    assert clock.left_s(50) is None
    clock.done(100, completed=True)
    assert clock.left_s(100) == 300


def test_each_variant_is_expected_to_take_as_long_as_it_took() -> None:
    clock = TimeLeft(ABBA, {})
    clock.launch(0, 0)
    clock.done(100, completed=True)
    clock.launch(1, 100)
    assert clock.left_s(110) == 290, "its own variant has not finished yet: the other's stand in"
    clock.done(140, completed=True)
    assert clock.left_s(140) == 40 + 100


def test_within_a_launch_its_phases_tell_what_is_left() -> None:
    clock = TimeLeft(["baseline", "baseline"], {})
    clock.launch(0, 0)
    clock.phase(0)
    clock.phase(60)
    clock.done(100, completed=True)
    clock.launch(1, 100)
    clock.phase(100)
    assert clock.left_s(130) == 70
    assert clock.left_s(190) == 40, "the first phase takes longer than before: what follows it still has to come"
    clock.phase(200)
    assert clock.left_s(210) == 30
    assert clock.left_s(300) is None, "it takes longer than any before: nobody knows"


def test_a_failed_launch_says_nothing_about_the_others() -> None:
    clock = TimeLeft(ABBA, {})
    clock.launch(0, 0)
    clock.done(3, completed=False)
    assert clock.left_s(3) is None


def test_resumed_launches_count_as_they_took_and_are_not_run_again() -> None:
    clock = TimeLeft(ABBA, {0: 100.0, 2: 40.0})
    clock.launch(1, 1000)
    assert clock.left_s(1000) == 140
    clock.launch(3, 1040)
    assert clock.left_s(1040) == 100


def test_estimates_in_words_are_no_more_exact_than_they_are() -> None:
    told = [about(seconds) for seconds in (None, 4, 44, 89, 100, 725, 7800)]
    assert told == [
        None,
        "a few seconds left",
        "about 40 s left",
        "about 90 s left",
        "about 2 min left",
        "about 12 min left",
        "about 2 h 10 min left",
    ]
    assert [duration(seconds) for seconds in (0.6, 61, 3725)] == ["1 s", "1 min 01 s", "1 h 02 min"]


@given(st.text(max_size=80), st.text(max_size=40), st.integers(min_value=4, max_value=120))
def test_a_line_of_the_live_view_is_never_wider_than_its_place(left: str, right: str, width: int) -> None:
    assert cells(ends(left, right, width)) <= width


def test_elsewhere_than_on_a_terminal_a_run_says_little(tmp_path: Path, capsys: Any) -> None:
    """A line when a launch begins and one when it ends; what is warned of is a line more."""
    assert run(tmp_path, *QUICK) in (0, 3)
    lines = capsys.readouterr().err.splitlines()
    quiet = [line for line in lines if "warning: " not in line]
    assert [re.sub(r"\d\d:\d\d:\d\d |\d+ s", "", line) for line in quiet] == [
        "launch 1/2 baseline: started",
        "launch 1/2 baseline: done in , ready after ; a few seconds left",
        "launch 2/2 candidate: started; a few seconds left",
        "launch 2/2 candidate: done in , ready after ",
        f"records in {run_dir(tmp_path)}",
    ]


def test_force_color_draws_nothing_into_a_file(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert run(tmp_path, *QUICK) in (0, 3)
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("columns", [40, 80])
def test_the_live_view_fits_its_terminal_and_leaves_it_clean(columns: int, tmp_path: Path) -> None:
    path = spec_file(tmp_path, die={"when": CANDIDATE, "at": "after_requests", "n": 4})
    shown = on_a_terminal(["run", str(path), "-o", str(tmp_path / "results"), *QUICK], columns=columns)
    lines = re.split(r"[\r\n]|\x1b\[[?0-9;]*[A-Za-z]", SGR.sub("", shown))
    first = [line for line in lines if re.fullmatch(r"launch 1/2 baseline +time left unknown", line)]
    second = [line for line in lines if re.fullmatch(r"launch 2/2 cand\S* +a few seconds left", line)]
    phases = [line for line in lines if re.fullmatch(r"  decode \S.*\d/4 \d+ s", line)]
    assert first, "the launch, and that the time left is not known"
    assert second, "and what is known after a launch"
    assert phases, "and the phase with what is done of it"
    assert {cells(line) for line in [*first, *second, *phases]} == {columns}
    told = " ".join(SGR.sub("", shown).split())
    assert "launch 2/2 candidate: failed: CellFailed" in told
    assert "dying after_requests, as asked" in told
    assert f"abharness compare {run_dir(tmp_path)}" in SGR.sub("", shown), "a command is copied, and so stays whole"
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h"), "the cursor is back"
    assert leftovers() == []


def test_a_server_that_logs_escape_sequences_draws_nothing() -> None:
    stream = io.StringIO()
    reporter = RichReporter(Console(file=stream, force_terminal=True, width=60, color_system=None))
    reporter.begin(RunStart("x", Path("r"), "c", ["baseline"], {}, {}, kept=True))
    reporter.launch(0, 1, "baseline")
    reporter.phase("start \x1b]0;owned\x07")
    reporter.waiting("3 s: \x1b[2J\u202e[red]loading[/red]")
    reporter.warn("\x1b[31mred \x9b2J")
    reporter.close()
    shown = stream.getvalue()
    assert "\\x1b]0;owned\\x07" in shown
    assert "[red]loading" in shown, "what looks like markup is text"
    assert not re.search(r"\x1b\]|\x1b\[2J|\x1b\[31m|\x9b|\u202e|\x07", shown)


def test_a_spec_with_a_doubt_is_told_before_the_first_launch(tmp_path: Path, capsys: Any) -> None:
    path = spec_file(tmp_path)
    assert main(["run", str(path), "--dry-run", "--set", "variants.candidate.env.FAKE_SWITCH=\"0\"",
                 "--set", "variants.baseline.env.FAKE_SWITCH=\"1\""]) == 0  # fmt: skip
    assert capsys.readouterr().err.startswith("warning: ")
