"""The documentation -> its pages, headings, links, fenced blocks: what the tests of the docs look at."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


def pages() -> list[Path]:
    """Every page that a reader may open, in order."""
    return [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown(path: Path) -> str:
    """A page's name in messages and test ids."""
    return path.relative_to(ROOT).as_posix()


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block.

    Attributes:
        language: First word after the fence.
        title: Value of `title=` after it, or None.
        text: Its lines, without the indentation that the fence itself has.
        line: Number of the line of its fence.
    """

    language: str
    title: str | None
    text: str
    line: int


_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```[ \t]*$", re.MULTILINE | re.DOTALL
)


def fences(text: str) -> list[Fence]:
    """The fenced blocks of a page, in order."""
    found = []
    for match in _FENCE.finditer(text):
        info = match["info"].split()
        title = next((word.removeprefix("title=") for word in info[1:] if word.startswith("title=")), None)
        indent = len(match["indent"])
        body = "".join(line[indent:] if line.strip() else line for line in match["body"].splitlines(keepends=True))
        found.append(Fence(info[0] if info else "", title, body, text[: match.start()].count("\n") + 1))
    return found


def prose(text: str) -> str:
    """A page without its fenced blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL)


def code_spans(text: str) -> list[str]:
    """The `code` in a page's prose, escapes of tables undone."""
    return [span.replace("\\|", "|") for span in re.findall(r"`([^`\n]+)`", prose(text))]


def anchors(text: str) -> set[str]:
    """What a link may name after `#` in this page, as GitHub makes it from headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = 0
        while (name := slug if not count else f"{slug}-{count}") in found:
            count += 1
        found.add(name)
    return found


def links(text: str) -> list[str]:
    """Targets of the links of a page."""
    without_code = re.sub(r"`[^`\n]*`", "", prose(text))
    return re.findall(r"\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)", without_code)
