"""The report as a terminal shows it: 80 columns, colours that repeat the words, nothing that a terminal would obey."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from abharness.cli import main
from abharness.redaction import screen_safe, shell_word
from abharness.terminal import PLAIN, Look, cells, statement, table
from tests.synthetic import Made, write_run

ROOT = Path(__file__).parent.parent
SGR = re.compile(r"\x1b\[[0-9;]*m")
LAUNCHES: dict[Any, list[Made]] = {
    "baseline": [Made(speed=speed) for speed in (100.0, 100.4, 99.8, 100.1)],
    "candidate": [Made(speed=speed) for speed in (108.2, 108.9, 108.4, 108.0)],
}


def on_a_terminal(arguments: list[str], *, columns: int, env: dict[str, str] | None = None) -> str:
    """What a command of ours writes to a terminal of so many columns, stdout and stderr."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    child = subprocess.Popen(
        [sys.executable, "-m", "abharness.cli", *arguments],
        env={**clean, "TERM": "xterm-256color", **(env or {})},
        cwd=ROOT,
        stdin=slave,
        stdout=slave,
        stderr=slave,
    )
    os.close(slave)
    found = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        found += part
    os.close(master)
    child.wait(30)
    return found.decode().replace("\r\n", "\n")


def piped(arguments: list[str], env: dict[str, str] | None = None) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    done = subprocess.run(
        [sys.executable, "-m", "abharness.cli", *arguments],
        env={**clean, "TERM": "xterm-256color", **(env or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("made") / "r", LAUNCHES)


def is_table(line: str) -> bool:
    return bool(re.search(r" ± |baseline +candidate|\d x \d|^\S.*  +\(p=|^ {30,}\S", line))


def test_the_question_and_the_verdict_are_the_first_two_lines(run: Path) -> None:
    lines = piped(["compare", str(run)]).splitlines()
    assert lines[0] == "Is it faster?"
    assert lines[1].startswith("Candidate: faster in 1, slower in 0")


def test_no_published_table_is_wider_than_80_columns() -> None:
    out = piped(["compare", "results", "--all-metrics"])
    tables = [line for line in out.splitlines() if is_table(line)]
    assert len(tables) > 100
    assert [line for line in tables if cells(line) > 80] == []
    assert "net_energy_per_output_token" in out, "the longest names are among them"


def test_elsewhere_than_on_a_terminal_a_statement_is_one_line_for_grep_and_diff(run: Path) -> None:
    notes = [line for line in piped(["compare", str(run)]).splitlines() if line.startswith("note: no A/A floor")]
    assert len(notes) == 1
    assert notes[0].endswith("abharness run SPEC.yaml --aa measures it")


@pytest.mark.parametrize("columns", [40, 80, 100, 200])
def test_on_a_terminal_prose_is_wrapped_to_it_and_100_at_most(columns: int, run: Path) -> None:
    plain = SGR.sub("", on_a_terminal(["compare", str(run)], columns=columns))
    wide = [line for line in plain.splitlines() if cells(line) > min(columns, 100)]
    # A single word or command is left whole.
    assert [line for line in wide if not re.fullmatch(r"records: \S+|  (abharness run SPEC.yaml --aa|\S+)", line)] == []
    assert f"records: {run}" in plain.splitlines(), "a path is copied, and so stays whole"
    assert "abharness run SPEC.yaml --aa" in plain, "and so does a command"


def test_wrapping_and_colour_change_no_word_and_no_line_of_a_table(run: Path) -> None:
    shown, file = on_a_terminal(["compare", str(run)], columns=80), piped(["compare", str(run)])
    plain = SGR.sub("", shown)
    assert plain.split() == file.split()
    assert [x for x in plain.splitlines() if is_table(x)] == [x for x in file.splitlines() if is_table(x)]


@pytest.mark.parametrize(
    ("where", "arguments", "env", "painted"),
    [
        ("terminal", [], {}, True),
        ("terminal", [], {"NO_COLOR": "1"}, False),
        ("terminal", [], {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ("terminal", [], {"NO_COLOR": ""}, True),
        ("terminal", [], {"TERM": "dumb"}, False),
        ("terminal", ["--color", "never"], {}, False),
        ("terminal", ["--color", "always"], {"NO_COLOR": "1"}, True),
        ("pipe", [], {}, False),
        ("pipe", [], {"FORCE_COLOR": "1"}, True),
        ("pipe", [], {"FORCE_COLOR": "0"}, False),
        ("pipe", ["--color", "always"], {}, True),
    ],
)
def test_colour_is_where_it_is_wanted(
    where: str, arguments: list[str], env: dict[str, str], painted: bool, run: Path
) -> None:
    command = ["compare", str(run), *arguments]
    out = on_a_terminal(command, columns=80, env=env) if where == "terminal" else piped(command, env)
    assert ("\x1b" in out) == painted
    assert "Candidate: faster in 1" in SGR.sub("", out)


def test_colour_only_repeats_what_the_words_say(tmp_path: Path) -> None:
    slower = {"baseline": LAUNCHES["candidate"], "candidate": LAUNCHES["baseline"]}
    good = piped(["compare", str(write_run(tmp_path / "g", LAUNCHES)), "--color", "always"])
    bad = piped(["compare", str(write_run(tmp_path / "b", slower)), "--color", "always"])
    green, red = "\x1b[1;32m", "\x1b[1;31m"
    assert re.search(r"\x1b\[1;32m\+8\.\d+% better", good)
    assert re.search(r"\x1b\[1;31m-7\.\d+% worse", bad)
    assert f"{green}Candidate: faster in 1" in good
    assert f"{red}Candidate: faster in 0, slower in 1" in bad
    assert red not in good
    assert green not in bad


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\r\nCandidate: faster in 9 of 9 cells."


def test_nothing_others_wrote_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    """A question, a variable, a machine, a log and a model's answer: each tries to draw."""
    launches = {
        "baseline": [Made(speed=100.0 + i, answers={3: f"{HOSTILE}\n#### 3"}) for i in range(4)],
        "candidate": [Made(speed=108.0 + i, answers={3: f"{HOSTILE}\n#### 4"}) for i in range(4)],
    }
    run = write_run(tmp_path / "r", launches)
    record = json.loads((run / "experiment.json").read_text())
    record["question"] = f"Is it {HOSTILE}?"
    record["spec"]["question"] = record["question"]
    record["spec"]["variants"]["candidate"]["env"]["SWITCH"] = HOSTILE
    record["provenance"]["cpu"] = HOSTILE
    record["spec_sha256"] = None
    (run / "experiment.json").write_text(json.dumps(record))
    for form in ("text", "markdown", "json"):
        out = piped(["compare", str(run), "--format", form])
        assert set(re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", out)) == set()
        assert not re.search(r"^\W*Candidate: faster in 9", out, re.MULTILINE)
        assert "owned" in out, "it is shown, not swallowed"


def test_an_error_that_quotes_a_hostile_name_is_harmless(tmp_path: Path, capsys: Any) -> None:
    assert main(["compare", str(tmp_path / HOSTILE.replace("/", "")[:60])]) == 2
    assert "\x1b" not in capsys.readouterr().err


@given(st.text())
def test_screen_safe_text_is_one_line_without_controls(text: str) -> None:
    safe = screen_safe(text)
    assert safe.isprintable() or not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]", safe)
    assert len(safe.splitlines()) <= 1
    assert screen_safe(safe) == safe


@given(st.binary(max_size=12).map(lambda raw: raw.replace(b"\0", b"").decode("utf-8", "surrogateescape")))
def test_a_shell_gets_back_what_was_quoted(text: str) -> None:
    word = shell_word(text)
    assert screen_safe(word, lines=True) == word
    done = subprocess.run(["bash", "-c", f"printf %s {word}"], capture_output=True, check=True)
    assert done.stdout == text.encode("utf-8", "surrogateescape")


@given(st.text(max_size=300), st.integers(min_value=10, max_value=120))
def test_wrapping_loses_nothing_and_only_a_single_word_is_wider(text: str, width: int) -> None:
    lines = statement(text, Look(width=width))
    assert "".join(lines).split() == screen_safe(text).split() or " ".join(lines).split() == screen_safe(text).split()
    for line in lines:
        assert cells(line) <= width or " " not in line.strip()


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=90)


VALUES = st.sampled_from(["-", "1812 ± 1%", "36 x 2034.5 us"])


@given(st.lists(st.tuples(NAMES, VALUES), min_size=1), st.booleans())
def test_no_line_of_a_table_is_wider_than_80(rows: list[tuple[str, str]], whole: bool) -> None:
    said = ["+35.26% better (p=0.025 n=2) [+281.2%, +379.2%] [1] [2]", "~ (p=1.000 n=2)", "no verdict [1]", ""]
    made = [[name, value, value, said[number % 4]] for number, (name, value) in enumerate(rows)]
    lines = table([("title", made)], "vs baseline", PLAIN, whole_names=whole)
    assert [line for line in lines if cells(line) > 80] == []
    if not whole:
        text = " ".join(lines)
        assert text.count("+281.2%, +379.2%") == sum(row[3] == said[0] for row in made)


def test_wide_characters_are_counted_as_wide() -> None:
    assert (cells("速い"), cells("e\u0301"), cells("abc")) == (4, 1, 3)


def test_a_reader_that_goes_away_does_not_change_the_exit_code(tmp_path: Path) -> None:
    slower = {"baseline": LAUNCHES["candidate"], "candidate": LAUNCHES["baseline"]}
    run = write_run(tmp_path / "r", slower)
    command = f"set -o pipefail; {sys.executable} -m abharness.cli compare {run} | true"
    assert subprocess.run(["bash", "-c", command], cwd=ROOT, check=False).returncode == 1
