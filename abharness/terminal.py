"""Statements and tables -> lines for a terminal: at most 80 columns wide, wrapped, painted, and nothing but text.

Colour repeats what the words say and never says more: a cell is painted by its first words. Text of others (answers,
logs, names) is escaped here, before it is measured or painted.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from abharness.redaction import screen_safe

TABLE_WIDTH = 80
PROSE_WIDTH = 100
"""Columns at which prose is wrapped on a wider terminal: longer lines are hard to read."""

GAP = "  "

Section = tuple[str, list[list[str]]]
"""A title and rows of four columns: name, baseline, candidate, what is said of them."""

Role = Literal["good", "bad", "unknown", "quiet", "strong"]

SGR: dict[Role, str] = {"good": "1;32", "bad": "1;31", "unknown": "1;33", "quiet": "2", "strong": "1"}

# What is copied stays whole: a command of ours with its flags, a flag with its quoted value.
_WORDS = re.compile(r"abharness [a-z-]+(?: [A-Z][\w.]*\b| --[a-z-]+| \S*/\S+)*\S*|--[a-z-]+ '[^']*'|\S+")

# What stands together in the last column: an effect with its word, brackets with what is in them.
_PIECES = re.compile(r"[+-][\d.]+% (?:better|worse)|\([^()]*\)|\[[^\[\]]*\]|\S+")

_NAME_PIECES = re.compile(r"[^_:\[., ]*[_:\[., ]*")


@dataclass(frozen=True, slots=True)
class Look:
    """How text is laid out.

    Attributes:
        width: Columns at which prose is wrapped; None leaves every statement on a line of its own.
        color: Paint with ANSI escape sequences.
    """

    width: int | None = None
    color: bool = False


PLAIN = Look()


def look_of(stream: TextIO, choice: str, environ: Mapping[str, str]) -> Look:
    """The look that fits where a stream goes.

    On a terminal prose is wrapped to it, 100 columns at most. Elsewhere it is not wrapped at all: `grep CODE` then finds
    the whole statement and not the first line of it, a diff of two reports shows the statements that changed and not
    paragraphs that flow differently because a number grew by a digit, and a pager or an editor wraps as its reader
    likes. Tables have the same 80 columns everywhere but on a terminal that has fewer, so colour and place change no line
    of them.

    Args:
        stream: Where the text goes.
        choice: `auto`, `always` or `never`.
        environ: `NO_COLOR`, `FORCE_COLOR` and `TERM` count for `auto`.
    """
    return Look(_columns(stream), wants_color(stream, choice, environ))


def wants_color(stream: TextIO, choice: str, environ: Mapping[str, str]) -> bool:
    """Whether a stream is to be painted; for `auto`, `NO_COLOR` is stronger than `FORCE_COLOR`."""
    if choice != "auto":
        return choice == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and environ.get("TERM", "dumb") not in ("dumb", "unknown")


def _columns(stream: TextIO) -> int | None:
    if not stream.isatty():
        return None
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return min(columns or TABLE_WIDTH, PROSE_WIDTH)


def paint(text: str, role: Role | None, look: Look) -> str:
    """The text in the colour of its role; as it is where there is no colour."""
    return f"\x1b[{SGR[role]}m{text}\x1b[0m" if role and text and look.color else text


def cells(text: str) -> int:
    """Columns that a terminal gives a text."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.category(one) in ("Mn", "Me", "Cf") else 1 + (unicodedata.east_asian_width(one) in "WF")
        for one in text
    )


def statement(text: str, look: Look, *, role: Role | None = None, lead: Role | None = None) -> list[str]:
    """One statement as lines; what follows the first hangs by two more columns than it is indented.

    A word wider than the line (a path, a command) is left whole, and so can be copied.

    Args:
        text: The statement; spaces in front of it indent it.
        look: How it is laid out.
        role: Paints all of it.
        lead: Paints its first word.
    """
    safe = screen_safe(text)
    indent = safe[: len(safe) - len(safe.lstrip(" "))]
    words: list[str] = _WORDS.findall(safe)
    lines = [safe]
    if look.width is not None and cells(safe) > look.width:
        lines = [indent + line for line in _filled(words, look.width - len(indent), hang=GAP)]
    if lead and words:
        first = indent + words[0]
        lines[0] = indent + paint(words[0], lead, look) + lines[0][len(first) :]
    return [paint(line, role, look) for line in lines]


def _filled(words: Iterable[str], width: int, *, hang: str = "") -> list[str]:
    """Words in lines of a width, each line but the first behind `hang`; a word too wide has a line to itself."""
    lines: list[str] = []
    for word in words:
        if lines and lines[-1].strip() and cells(lines[-1]) + 1 + cells(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"{hang if lines else ''}{word}")
    return lines or [""]


def table(sections: Sequence[Section], last: str, look: Look, *, whole_names: bool = False) -> list[str]:
    """Sections under their titles, columns as wide in all of them, no line wider than 80 columns.

    What does not fit into the last column goes on below it. Where names leave it no room, they are wrapped, or with
    `whole_names` it gets a line to itself below the row. On a narrower terminal a row is several lines.

    Args:
        sections: The rows; one whose text stands alone is a statement and widens no column.
        last: Heading of the last column.
        look: How it is laid out.
        whole_names: Wrap no name for the sake of the last column.
    """
    safe = [(screen_safe(title), [[screen_safe(text) for text in row] for row in rows]) for title, rows in sections]
    if look.width is not None and look.width < TABLE_WIDTH:
        return [line for title, rows in safe for line in _stacked(title, rows, look)]
    head = ["", "baseline", "candidate", last]
    wide = [head, *(row for _, rows in safe for row in rows if any(row[1:]))]
    widths = [max(cells(row[column]) for row in wide) for column in range(3)]
    needed = max(cells(piece) for row in wide for piece in _PIECES.findall(row[3]) or [""])
    beside = TABLE_WIDTH - sum(widths[1:]) - 3 * len(GAP)
    widths[0] = min(widths[0], beside + len(GAP) if whole_names else max(beside - needed, len(head[1])))
    columns = _Columns(widths, room=beside - widths[0], needed=needed, look=look)
    lines: list[str] = []
    for title, rows in safe:
        lines += ["", *statement(title, look, role="strong"), *columns.lines(head, "quiet")]
        for row in rows:
            lines += columns.lines(row, _role(row[3])) if any(row[1:]) else statement(row[0], look)
    return lines


def _stacked(title: str, rows: Sequence[Sequence[str]], look: Look) -> list[str]:
    """A section without columns: name, values and what is said of them below each other."""
    lines = ["", *statement(title, look, role="strong"), *statement(f"{GAP}baseline -> candidate", look, role="quiet")]
    for name, baseline, candidate, said in rows:
        lines += statement(name, look)
        if baseline or candidate:
            lines += statement(f"{GAP}{baseline} -> {candidate}", look)
        lines += statement(f"{GAP}{said}", look, role=_role(said)) if said else []
    return lines


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of one table: `room` is what the last may take, `needed` what its widest piece takes."""

    widths: Sequence[int]
    room: int
    needed: int
    look: Look

    def lines(self, row: Sequence[str], role: Role | None) -> list[str]:
        """One row as lines."""
        names = _broken(row[0], self.widths[0])
        said = _PIECES.findall(row[3])
        apart = self.room < self.needed
        told = [] if apart else _filled(said, self.room) if said else []
        lines = []
        for number in range(max(len(names), len(told), 1)):
            name = names[number] if number < len(names) else ""
            values = row[1:3] if number == 0 else ("", "")
            parts = [_left(name, self.widths[0]), *map(_right, values, self.widths[1:])]
            parts.append(paint(told[number], role, self.look) if number < len(told) else "")
            lines.append(GAP.join(parts).rstrip())
        if apart and said:
            end = min(sum(self.widths) + 2 * len(GAP), TABLE_WIDTH)
            text = " ".join(said)
            lines.append(" " * max(end - cells(text), 0) + paint(text, role, self.look))
        return lines


def _left(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def _right(text: str, width: int) -> str:
    return " " * (width - cells(text)) + text


def _broken(name: str, width: int) -> list[str]:
    """A name in lines of a width, broken behind its own separators; what goes on is indented."""
    if cells(name) <= width:
        return [name]
    lines = [""]
    for piece in _NAME_PIECES.findall(name):
        rest = piece
        while rest:
            if cells((lines[-1] + rest).rstrip()) <= width:
                lines[-1], rest = lines[-1] + rest, ""
            elif lines[-1].strip():
                lines.append(GAP)
            else:
                lines[-1], rest = lines[-1] + rest[: width - len(GAP)], rest[width - len(GAP) :]
    return [line.rstrip() for line in lines if line.strip()]


def _role(said: str) -> Role | None:
    """What paints a cell of the last column: its own first words."""
    if said.startswith("~"):
        return "quiet"
    if said.startswith("no verdict"):
        return "unknown"
    words = said.split()[:2]
    return "bad" if "worse" in words else "good" if "better" in words else None
