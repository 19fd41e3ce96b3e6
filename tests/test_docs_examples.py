"""Examples of the documentation, carried out page by page as a reader would, in a folder of the page's own.

What a page may hold, in the order in which a reader meets it:

* `yaml title=NAME`: the text goes to the file NAME; blocks of one name follow each other in it.
* `console`: lines after `$ ` are commands, run for real in one shell; what follows must be what they print. A line `...`
  stands for any lines, `...` within a line for any text of that line.
* `bash`: every line is run. A run or check of a spec goes to the fake vLLM server, in small (`docs_bin/abharness`); what
  installs, fetches or looks at the reader's own server is not run.
* `text` and all else is not run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from abharness.specload import load_spec
from tests.markdown import ROOT, Fence, fences, pages, shown

BIN = Path(__file__).parent / "docs_bin"

NOT_RUN = re.compile(
    r"abharness (server|model) |abharness verify-env --pid|python3 -m venv|tests/check|abharness trace baseline\.json"
    r"|abharness replay (capture|run|calibrate|tune|validate|positions) "
)
"""Lines of `bash` blocks that are not run: they build, fetch, or need what only the reader has."""

WHOLE = (0, 3)
"""A run on the fake server may show nothing, but it must be a whole run."""

WHOLE_COMPARISON = (0, 1, 3)
"""Records that are compared may show a regression."""


def with_examples() -> list[Path]:
    found = []
    for page in pages():
        blocks = fences(page.read_text(encoding="utf-8"))
        if any(block.language in ("console", "bash") or block.title for block in blocks):
            found.append(page)
    return found


@dataclass
class Reader:
    """Who follows a page: in a folder with the repository's experiments and results, and a model of their own."""

    folder: Path

    def __post_init__(self) -> None:
        shutil.copytree(ROOT / "experiments", self.folder / "experiments")
        shutil.copytree(ROOT / "results", self.folder / "results")
        (self.folder / "my-model").mkdir()
        (self.folder / "my-model" / "config.json").write_text("{}")

    def shell(self, commands: list[str]) -> list[tuple[str, int]]:
        """What each command prints, and its exit status; all in one shell."""
        parts = [f"{command}\nstatus=$?; echo; echo '#end' $status; (exit $status)" for command in commands]
        environ = {
            **os.environ,
            "COLUMNS": "80",
            "NO_COLOR": "1",
            "PATH": f"{BIN}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        environ["PYTHONPATH"] = str(ROOT)
        # Nothing is installed yet for this reader, and nothing can be: an example must not download a vLLM.
        environ |= {"ABHARNESS_CACHE": str(self.folder / "cache"), "PIP_NO_INDEX": "1"}
        done = subprocess.run(
            ["bash"], input="\n".join(parts), cwd=self.folder, env=environ, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        found = re.findall(r"(.*?)\n#end (\d+)\n", done.stdout, re.DOTALL)
        assert len(found) == len(commands), done.stdout
        return [(output, int(status)) for output, status in found]

    def write(self, block: Fence) -> None:
        assert block.title is not None
        path = self.folder / block.title
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as out:
            out.write(block.text)

    def specs(self) -> list[Path]:
        """The experiments that the page wrote."""
        written = [path for path in self.folder.glob("*.yaml") if "experiment:" in path.read_text(encoding="utf-8")]
        return sorted(written)


def steps(block: Fence) -> list[tuple[str, str]]:
    """Commands of a `console` block with what they print by the page."""
    found: list[tuple[str, str]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], ""))
        else:
            assert found, f"line {block.line}: output before a command"
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found


def as_shown(expected: str, printed: str) -> bool:
    """Whether a command printed what a page shows of it."""
    lines = printed.splitlines()
    at, anywhere = 0, False
    chunks: list[tuple[bool, list[str]]] = [(False, [])]
    for line in expected.splitlines():
        if line.strip() == "...":
            chunks.append((True, []))
        else:
            chunks[-1][1].append(line)
    for number, (anywhere, chunk) in enumerate(chunks):
        # A chunk after the last `...` ends the output; the first place of one before it is as good as any.
        last = number == len(chunks) - 1
        places = range(at, len(lines) - len(chunk) + 1) if anywhere else range(at, at + 1)
        if last and anywhere and chunk:
            places = range(max(at, len(lines) - len(chunk)), len(lines) - len(chunk) + 1)
        found = next((place for place in places if all(map(same_line, chunk, lines[place : place + len(chunk)]))
                      and place + len(chunk) <= len(lines)), None)  # fmt: skip
        if found is None:
            return False
        at = found + len(chunk)
    return at == len(lines) or (anywhere and not chunks[-1][1])


def same_line(shown_line: str, line: str) -> bool:
    """One line of a page against one that was printed; trailing blanks do not count."""
    parts = [re.escape(part) for part in shown_line.rstrip().split("...")]
    return re.fullmatch(".*".join(parts), line.rstrip()) is not None


def test_what_a_page_leaves_out_may_be_anything_and_nothing_else_may() -> None:
    assert as_shown("a\n...\nd ... f\n", "a\nb\nc\nd e f\n")
    assert as_shown("a\n...\nd\n", "a\nd\n")
    assert as_shown("...\nd\n...\n", "a\nd\nd\n")
    assert as_shown("", "")
    assert not as_shown("a\nd\n", "a\nb\nd\n")
    assert not as_shown("a\n", "a\nb\n")
    assert not as_shown("a\nb\n", "a\n")
    assert not as_shown("...\nd\n", "d\ne\n")
    assert not as_shown("...\nc\n...\n", "a\nd\n")
    assert not as_shown("a 1.5\n", "a 1x5\n")


@pytest.mark.parametrize("page", with_examples(), ids=shown)
def test_the_examples_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for block in fences(page.read_text(encoding="utf-8")):
        if block.title:
            reader.write(block)
        elif block.language == "console":
            wanted = steps(block)
            for (command, expected), (output, _) in zip(wanted, reader.shell([c for c, _ in wanted]), strict=True):
                printed = output.strip("\n")
                assert as_shown(expected, printed), (
                    f"{shown(page)}:{block.line}: $ {command}\nprints\n{output}\nthe page shows\n{expected}"
                )
        elif block.language == "bash":
            lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip() and line[0] != "#"]
            lines = [line for line in lines if not NOT_RUN.search(line)]
            for line, (output, status) in zip(lines, reader.shell(lines), strict=True):
                allowed = WHOLE_COMPARISON if line.startswith("abharness compare") else WHOLE
                assert status in allowed, f"{shown(page)}:{block.line}: {line}\nexit status {status}\n{output}"
    for path in reader.specs():
        load_spec(path)
