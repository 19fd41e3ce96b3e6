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
)
"""Lines of `bash` blocks that are not run: they build, fetch, or need what only the reader has."""

# A run on the fake server may show nothing, but it must be a whole run.
WHOLE = (0, 3)

EXAMPLES = ("yaml", "console", "bash")


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


def pattern(expected: str) -> str:
    """What the page shows as a regular expression."""
    parts = []
    for line in expected.splitlines():
        if line.strip() == "...":
            parts.append(r"(?:.*\n)*?")
        else:
            parts.append(r".*?".join(re.escape(part) for part in line.split("...")) + r"[ ]*\n")
    return "".join(parts)


def test_what_a_page_leaves_out_may_be_anything_and_nothing_else_may() -> None:
    assert re.fullmatch(pattern("a\n...\nd ... f\n"), "a\nb\nc\nd e f\n")
    assert re.fullmatch(pattern("a\n...\nd\n"), "a\nd\n")
    assert not re.fullmatch(pattern("a\nd\n"), "a\nb\nd\n")
    assert not re.fullmatch(pattern("a 1.5\n"), "a 1x5\n")


@pytest.mark.parametrize("page", with_examples(), ids=shown)
def test_the_examples_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for block in fences(page.read_text(encoding="utf-8")):
        if block.title:
            reader.write(block)
        elif block.language == "console":
            wanted = steps(block)
            for (command, expected), (output, _) in zip(wanted, reader.shell([c for c, _ in wanted]), strict=True):
                printed = output.strip("\n") + "\n" if output.strip("\n") else ""
                assert re.fullmatch(pattern(expected), printed), (
                    f"{shown(page)}:{block.line}: $ {command}\nprints\n{output}\nthe page shows\n{expected}"
                )
        elif block.language == "bash":
            lines = [line for line in block.text.replace("\\\n", " ").splitlines() if line.strip() and line[0] != "#"]
            lines = [line for line in lines if not NOT_RUN.search(line)]
            for line, (output, status) in zip(lines, reader.shell(lines), strict=True):
                assert status in WHOLE, f"{shown(page)}:{block.line}: {line}\nexit status {status}\n{output}"
    for path in reader.specs():
        load_spec(path)
