"""Help and completion: every command explains itself with an example, and shells complete what it takes."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from abharness.arguments import SCHEMAS, make_parser

ROOT = Path(__file__).parents[1]


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


ALL = list(parsers(make_parser()))


@pytest.mark.parametrize("parser", ALL, ids=lambda parser: parser.prog)
def test_every_command_says_what_it_does_with_an_example_that_parses(parser: argparse.ArgumentParser) -> None:
    assert parser.description
    lines = (parser.epilog or "").splitlines()
    examples = [line.removeprefix("example: ") for line in lines if line.startswith("example: ")]
    assert examples, "no line that begins with `example: `"
    for example in examples:
        # A redirection, a pipe and the command before ours are the shell's business.
        (ours,) = [part for part in example.split("&&") if part.strip().startswith("abharness")]
        words = shlex.split(re.split(r" [>|] ", ours)[0])
        make_parser().parse_args(words[1:])
        if parser.prog != "abharness":
            assert words[: len(parser.prog.split())] == parser.prog.split() or len(list(parsers(parser))) > 1


@pytest.mark.parametrize("parser", ALL, ids=lambda parser: parser.prog)
def test_every_argument_says_what_it_is(parser: argparse.ArgumentParser) -> None:
    silent = [
        action.dest
        for action in parser._actions
        if not action.help and not isinstance(action, argparse._SubParsersAction) and action.metavar is None
    ]
    assert silent == []


def script(shell: str, tmp_path: Path) -> Path:
    path = tmp_path / f"completion.{shell}"
    with path.open("w") as out:
        subprocess.run([sys.executable, "-m", "abharness.cli", "completion", shell], stdout=out, check=True, cwd=ROOT)
    return path


CASES = [
    ("abharness ", {"run", "compare", "export", "schema", "completion", "trace", "server", "model", "verify-env"}),
    ("abharness compl", {"completion"}),
    ("abharness compare --for", {"--format"}),
    ("abharness compare --format ", {"text", "markdown", "json"}),
    ("abharness export x --format v", {"vllm-bench"}),
    ("abharness schema ", {*SCHEMAS}),
    ("abharness server ", {"install", "list", "remove"}),
    ("abharness run experiments/quick", {"experiments/quickstart.yaml"}),
    ("abharness compare results/gr", {"results/graphs"}),
]

BASH = """
source {script}
COMP_LINE={line}; COMP_POINT=${{#COMP_LINE}}
read -r -a COMP_WORDS <<< "$COMP_LINE"
[[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
completer=$(complete -p abharness | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
$completer abharness "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(("line", "expected"), CASES)
def test_bash_completes(line: str, expected: set[str], tmp_path: Path) -> None:
    program = BASH.format(script=script("bash", tmp_path), line=shlex.quote(line))
    done = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found = set(done.stdout.split())
    assert expected <= found if line == "abharness " else found == expected


ZSH = """
import os, pty, select, time
pid, fd = pty.fork()
if pid == 0:
    os.chdir({root!r})
    os.environ.update(TERM="dumb", PS1="> ", COLUMNS="200")
    os.execvp("zsh", ["zsh", "-f", "-i"])
def read(until, seconds=20.0):
    text, end = "", time.monotonic() + seconds
    while time.monotonic() < end and until not in text:
        if select.select([fd], [], [], 0.1)[0]:
            text += os.read(fd, 65536).decode(errors="replace")
    return text
os.write(fd, b"autoload -Uz compinit; compinit -u -D; zstyle ':completion:*' list-prompt ''; "
             b"fpath=({folder!s} $fpath); autoload -Uz _abharness; compdef _abharness abharness; print REA''DY\\n")
read("READY")
os.write(fd, {line!r}.encode() + b"\\t\\t; print EN''D\\n")
print(read("END\\r"))
os.kill(pid, 9)
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("abharness compl", "completion"),
        ("abharness schema evid", "evidence"),
        ("abharness run experiments/quick", "experiments/quickstart.yaml"),
    ],
)
def test_zsh_completes(line: str, expected: str, tmp_path: Path) -> None:
    script("zsh", tmp_path).rename(tmp_path / "_abharness")
    program = ZSH.format(root=str(ROOT), folder=tmp_path, line=line)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert expected in done.stdout.replace("\b", "")


@pytest.mark.skipif(shutil.which("tcsh") is None, reason="tcsh is not installed")
def test_tcsh_takes_its_script(tmp_path: Path) -> None:
    program = f"source {script('tcsh', tmp_path)}; complete abharness"
    done = subprocess.run(["tcsh", "-f", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "verify-env" in done.stdout
