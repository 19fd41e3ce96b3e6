"""One environment block: bytes and what the kernel laid out around them in, variables or the reason for doubt out.

Pure: `procfs` reads, this module judges. A block lies in the process's own memory, and a title written over the
arguments may run on into it. Three things that a title writer does not reach say whether it is whole: its size, the
number of entries that the program was started with, and where each of them began.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from abharness.redaction import printable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from abharness.witnesses import ReadState


@dataclass(frozen=True, slots=True)
class EnvironRead:
    """One environment block as it was read.

    Attributes:
        state: `ok`: whole. `unreadable`: see `reason`. `gone`: the process has ended.
        variables: Name to value, the first of equal names as getenv has it; bytes that are no UTF-8 are surrogates.
            Empty unless `state` is `ok`.
        nameless: Entries that begin with "=" (shells on some systems leave them); they set no variable.
        layout_checked: The number of entries and the places where they begin agree with what the kernel laid out at
            exec. False: the process's memory could not be read, so nothing but the block's size and form speaks for it.
    """

    state: ReadState
    reason: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    nameless: tuple[str, ...] = ()
    layout_checked: bool = False


@dataclass(frozen=True, slots=True)
class ExecLayout:
    """What the kernel wrote on a process's stack at exec, out of reach of a title writer.

    Attributes:
        argc: Number of arguments.
        envc: Number of environment entries.
        pointers: The environment pointers as they stand now: setenv and unsetenv may have moved some.
    """

    argc: int
    envc: int
    pointers: tuple[int, ...]


def parse_environ(block: bytes) -> EnvironRead:
    """Split an environment block, or say why it cannot be a whole one.

    Entries end at NUL and nowhere else (values hold newlines); the name ends at the first "=" (values hold more).
    The last entry needs no NUL.
    """
    if not block:
        return EnvironRead("unreadable", "the environment block is empty")
    if not block.strip(b"\0"):
        return EnvironRead("unreadable", f"the environment block is wiped: {len(block)} NUL bytes")
    if block.startswith(b"\0"):
        zeros = len(block) - len(block.lstrip(b"\0"))
        return EnvironRead("unreadable", f"the environment block is wiped in part: its first {zeros} bytes are NUL")
    at = block.find(b"\0\0")
    if at >= 0:
        return EnvironRead("unreadable", f"the environment block is wiped in part: two NUL bytes in a row at byte {at}")
    variables: dict[str, str] = {}
    nameless: list[str] = []
    for raw in block.removesuffix(b"\0").split(b"\0"):
        entry = raw.decode("utf-8", "surrogateescape")
        name, equals, value = entry.partition("=")
        if not equals:
            return EnvironRead(
                "unreadable", f"the environment block is overwritten: {printable(entry)[:60]!r} has no '='"
            )
        if name:
            variables.setdefault(name, value)
        else:
            nameless.append(entry)
    return EnvironRead("ok", None, variables, tuple(nameless))


def judge_block(block: bytes, bounds: tuple[int, int], layout: ExecLayout | None) -> EnvironRead:
    """Split a block that was read from a process, and hold it against what the kernel says of it.

    Args:
        block: The bytes read.
        bounds: Start and end of the block in the process's memory; zeros when not known.
        layout: What the kernel laid out at exec, or None when that cannot be read.
    """
    start, end = bounds
    if end and len(block) != end - start:
        return EnvironRead(
            "unreadable", f"the environment block was not read whole: {len(block)} of {end - start} bytes"
        )
    read = parse_environ(block)
    if read.state != "ok" or layout is None or not end:
        return read
    count = block.count(b"\0")
    if count != layout.envc:
        return EnvironRead(
            "unreadable",
            f"the environment block is overwritten: {count} entries end in it, the process was started with {layout.envc}",
        )
    for pointer in layout.pointers:
        at = pointer - start
        if 0 < at < len(block) and block[at - 1]:
            return EnvironRead(
                "unreadable",
                f"the environment block is overwritten: the entry placed at byte {at} does not begin there",
            )
    return replace(read, layout_checked=True)


def find_layout(stack: bytes, auxv: bytes) -> ExecLayout | None:
    """Read the vectors that begin a program's stack: a count, argument pointers, environment pointers, `auxv`.

    The order is that of the System V ABI, "Process Initialization"; NULL pointers end both lists. Programs move single
    pointers, never the whole, so the number of environment entries is the room between the arguments and `auxv`,
    whatever the pointers say now.

    Args:
        stack: Memory from the stack's start (field 28 of `/proc/<pid>/stat`) upwards.
        auxv: The auxiliary vector, from `/proc/<pid>/auxv`.

    Returns:
        None when this is not what the bytes show.
    """
    word = struct.calcsize("@P")
    words = [value for (value,) in struct.iter_unpack("@P", stack[: len(stack) // word * word])]
    place = stack.find(auxv) if auxv else -1
    if place < word or place % word:
        return None
    argc, last = words[0], place // word - 1
    first = argc + 2
    if not first <= last or words[first - 1] or words[last]:
        return None
    return ExecLayout(argc, last - first, tuple(pointer for pointer in words[first:last] if pointer))


def shows_title(cmdline: bytes, argc: int | None) -> bool | None:
    """Whether a raw command line is a title written over the arguments; None when it is empty.

    Args:
        cmdline: The bytes of `/proc/<pid>/cmdline`; as laid out at exec, every argument ends with one NUL.
        argc: Number of arguments at exec, or None when not known.
    """
    if not cmdline:
        return None
    if not cmdline.endswith(b"\0"):
        return True  # the kernel shows a title that filled the room of the arguments, up to its end
    if argc is not None:
        return cmdline.count(b"\0") != argc
    # One text and NULs up to the end of the room that the arguments had.
    text = cmdline.rstrip(b"\0")
    return b"\0" not in text and len(cmdline) - len(text) > 1
