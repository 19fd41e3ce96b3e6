"""A trace of torch's profiler (Kineto, Chrome JSON, plain or gzip) -> kernel table.

The events are decoded one by one from a window over the file, so that gigabytes cost no memory. The standard library's
decoder does it: it takes the bare `NaN`, `Infinity` and control characters that Kineto writes, knows the byte where an
event begins, and after an event that is no JSON (Kineto leaves quotes in the names of Python frames as they are) reading
goes on at the next one, which is counted and told.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from abharness.errors import TraceError
from abharness.timeline import UNKNOWN, Assembler, Kind, Trace, is_step, sane

CHUNK_BYTES = 2**18
"""Small, since the decoder counts the lines before every error that it raises."""

LONGEST_EVENT_BYTES = 4 * 2**20
"""A longer event is taken for damage: the longest real ones, with the shapes of every argument, have some kilobytes."""

GZIP_MAGIC = b"\x1f\x8b"

_DEVICE_KINDS: dict[str, Kind] = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_SPACE = re.compile(r"[ \t\r\n]*")
_NEXT_EVENT = re.compile(r'\}\s*,\s*\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args)"\s*:')
_BARE_NUMBER = re.compile(r'(":\s*)[+-]?(?:nan|inf)(?:inity)?(?=\s*[,}\]])', re.IGNORECASE)
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})?')


def read_kineto(path: Path) -> Trace:
    """Read one file.

    Raises:
        TraceError: It does not begin as a trace, or ends before its events do.
        OSError: It cannot be read.
    """
    reader = _Reader()
    with path.open("rb") as raw:
        zipped = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        data: io.BufferedIOBase = gzip.GzipFile(fileobj=raw) if zipped else raw
        return reader.read(_Window(data), path)


class _Malformed(Exception):
    """What stands at a byte is no JSON."""


class _Truncated(Exception):
    """The file ends inside of what stands at a byte."""


class _Window:
    """A piece of the file as text, one character a byte, so that places in it are bytes of the file."""

    def __init__(self, data: io.BufferedIOBase) -> None:
        self._data = data
        self._decoder = json.JSONDecoder(strict=False)
        self.text = ""
        self.at = 0
        self._base = 0
        self._ended = False
        self.fault: str | None = None

    @property
    def byte(self) -> int:
        """Place in the (unpacked) file."""
        return self._base + self.at

    def more(self) -> bool:
        """Drop what is behind and read on; False at the end of the file."""
        if self._ended:
            return False
        try:
            # `read` would throw away what it has unpacked up to a cut.
            chunk = self._data.read1(CHUNK_BYTES)
        except EOFError:
            self.fault, chunk = "the compressed data ends early", b""
        except (zlib.error, gzip.BadGzipFile) as error:
            self.fault, chunk = f"the compressed data is damaged ({error})", b""
        self._ended = not chunk
        self.text = self.text[self.at :] + chunk.decode("latin-1")
        self._base += self.at
        self.at = 0
        return bool(chunk)

    def peek(self) -> str:
        """The next character that is no space; empty at the end of the file."""
        while True:
            if self.at < len(self.text) and self.text[self.at] > " ":
                return self.text[self.at]
            found = _SPACE.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.more():
                return ""

    def take(self, wanted: str) -> str:
        """Step over one of these characters and return it.

        Raises:
            _Malformed: Another one stands here.
            _Truncated: The file ends here.
        """
        found = self.peek()
        if not found:
            raise _Truncated
        if found not in wanted:
            raise _Malformed(f"expected {' or '.join(wanted)}, found {found!r}")
        self.at += 1
        return found

    def value(self) -> Any:
        """Step over the JSON value that stands here and return it.

        Raises:
            _Malformed: It is none.
            _Truncated: The file ends inside of it.
        """
        if not self.peek():
            raise _Truncated
        while True:
            try:
                value, end = self._decoder.raw_decode(self.text, self.at)
            except (ValueError, RecursionError) as error:
                # Cut by the window's edge, unless the next event is in sight already.
                cut = len(self.text) - self.at < LONGEST_EVENT_BYTES and not _NEXT_EVENT.search(self.text, self.at)
                if cut and self.more():
                    continue
                raise _Malformed(str(error).partition(": line")[0]) from error
            # A number at the window's edge may go on behind it.
            if end == len(self.text) and not isinstance(value, (dict, list, str)) and self.more():
                continue
            self.at = end
            return value

    def next_event(self) -> str | None:
        """Step to the event behind a broken one and return the broken text, or None when there is no further event."""
        start = self.at
        while (found := _NEXT_EVENT.search(self.text, start)) is None:
            if len(self.text) - self.at > LONGEST_EVENT_BYTES:
                self.at = len(self.text) - 64
            # The separator may lie across the edge.
            start = max(self.at, len(self.text) - 64) - self.at
            if not self.more():
                return None
        broken = self.text[self.at : found.start() + 1]
        self.at = self.text.index("{", found.start() + 1)
        return broken

    def last_event(self) -> str | None:
        """The broken text of the array's last event, stepped over; None where the array does not end behind it."""
        end = re.search(r"\}\s*\]", self.text[self.at :])
        if end is None:
            return None
        broken = self.text[self.at : self.at + end.start() + 1]
        self.at += end.start() + 1
        return broken


class _Reader:
    """The events of one file into an assembler, with what went wrong."""

    def __init__(self) -> None:
        self._rows = Assembler()
        self._problems: list[str] = []
        self._malformed = 0
        self._first_malformed = ""
        self._repaired = 0
        self._unusable = 0
        self._first_unusable = ""
        self._kernel_launches = 0
        self._processes: set[object] = set()
        self._has_device = False
        self._found = False

    def read(self, window: _Window, path: Path) -> Trace:
        head = window.peek()
        if head == "\xef" and window.text.startswith("\xef\xbb\xbf", window.at):
            window.at += 3
            head = window.peek()
        if head not in ("{", "["):
            raise TraceError(f"{path} is no trace: {_what(window)}", hint=_HINT)
        try:
            self._document(window) if head == "{" else self._array(window)
            # To the end of the file: a packed one has its checksum there.
            if window.peek():
                self._problems.append(f"something else follows the trace at byte {window.byte}")
        except _Truncated:
            self._problems.append(f"it is cut off at byte {window.byte}")
        except _Malformed as error:
            self._problems.append(f"it is cut off or damaged from byte {window.byte} on ({error})")
        if window.fault:
            self._problems.insert(0, window.fault)
        if not self._found:
            reason = "; ".join(self._problems) or "it is JSON without traceEvents"
            raise TraceError(f"{path} is no trace: {reason}", hint=_HINT)
        return self._finish()

    def _document(self, window: _Window) -> None:
        window.take("{")
        if window.peek() == "}":
            window.take("}")
            return
        while True:
            key = window.value()
            window.take(":")
            if key == "traceEvents" and window.peek() == "[":
                self._array(window)
            else:
                value = window.value()
                self._has_device |= key == "deviceProperties" and bool(value)
            if window.take(",}") == "}":
                return

    def _array(self, window: _Window) -> None:
        window.take("[")
        self._found = True
        if window.peek() == "]":
            window.take("]")
            return
        for event in self._events(window):
            if isinstance(event, dict):
                self._event(event)
            else:
                self._skip("an event is no object", event)

    def _events(self, window: _Window) -> Iterator[Any]:
        """The events up to the end of the array; broken ones are repaired or left out."""
        while window.peek() != "]":
            start = window.byte
            try:
                yield window.value()
                more = window.take(",]") == ","
            except _Malformed as error:
                repaired, more = self._recover(window, start, error)
                if repaired is not None:
                    yield repaired
            if not more:
                return
        window.take("]")

    def _recover(self, window: _Window, start: int, error: _Malformed) -> tuple[dict[str, Any] | None, bool]:
        """Step over what is broken: the event in it, if it can be repaired, and whether another one follows."""
        broken = window.next_event()
        more = broken is not None
        if broken is None:
            broken = window.last_event()
        if broken is None:
            raise error
        if not more:
            window.take("]")
        repaired = _repair(broken)
        if repaired is not None:
            self._repaired += 1
        else:
            self._malformed += 1
            self._first_malformed = self._first_malformed or f"the first at byte {start}: {error}"
        return repaired, more

    def _event(self, event: dict[str, Any]) -> None:
        category = event.get("cat")
        if not isinstance(category, str):
            return
        if event.get("ph") != "X":
            if category in _DEVICE_KINDS:
                self._skip(f"ph {event.get('ph')!r}", event)
            return
        wanted = category in _DEVICE_KINDS or category in _LAUNCHES or category == "cpu_op"
        name = event.get("name")
        if not wanted and not (category.endswith("user_annotation") and isinstance(name, str) and is_step(name)):
            return
        if not isinstance(name, str):
            self._skip("no name", event)
            return
        times = _times(event)
        if times is None:
            self._skip(f"ts {event.get('ts')!r}, dur {event.get('dur')!r}", event)
            return
        start, duration = times
        details = event.get("args")
        args: dict[str, Any] = details if isinstance(details, dict) else {}
        if category in _DEVICE_KINDS:
            self._rows.drop_operators()
            self._rows.device(
                _DEVICE_KINDS[category],
                _text(name),
                start,
                duration,
                stream=_number(args.get("stream", event.get("tid"))),
                device=_number(args.get("device", event.get("pid"))),
                node=_number(args.get("graph node id"), lowest=1),
                process=0,
                correlation=_number(args.get("correlation"), lowest=1),
            )
            return
        # A kernel does not name its process: a file holds one, or `_finish` says that it does not.
        place = (0, hash(event.get("tid")) if isinstance(event.get("tid"), (int, str)) else UNKNOWN)
        if category in _LAUNCHES:
            self._kernel_launches += "Launch" in name
            self._processes.add(str(event.get("pid")))
            correlation = _number(args.get("correlation"), lowest=1)
            if correlation != UNKNOWN:
                self._rows.launch(correlation, place, start, graph="GraphLaunch" in name)
        elif category == "cpu_op":
            if not self._rows.device_rows:
                self._rows.operator(_text(name), place, start, duration)
        elif category == "user_annotation":
            self._rows.annotation(name, place, start, _link(args))
        else:
            stream, device = _number(event.get("tid")), _number(event.get("pid"))
            self._rows.device_range(name, stream, device, start, start + duration, _link(args))

    def _skip(self, why: str, event: object) -> None:
        self._unusable += 1
        self._first_unusable = self._first_unusable or f"{why} in {str(event)[:120]}"

    def _finish(self) -> Trace:
        problems = self._problems
        if self._malformed:
            problems.append(
                f"at least {self._malformed} events are no JSON and were left out ({self._first_malformed})"
            )
        if self._unusable:
            problems.append(f"{self._unusable} events cannot be used and were left out ({self._first_unusable})")
        if len(self._processes) > 1:
            problems.append(
                f"{len(self._processes)} processes launched kernels: which of them a kernel is of is not known; "
                "give each process's own trace"
            )
        on_device = bool(self._rows.device_rows or self._kernel_launches)
        if self._kernel_launches and not self._rows.device_rows:
            problems.append(f"{self._kernel_launches} launch calls, but no kernel was recorded")
        if problems and self._has_device:
            # Device activity stands behind the operators: what is missing may be all of it.
            on_device = True
        return self._rows.finish("kineto", problems=problems, on_device=on_device, repaired=self._repaired)


_HINT = "expected the JSON of torch's profiler (.json, .json.gz) or an SQLite export of Nsight Systems"


def _what(window: _Window) -> str:
    if window.fault:
        return window.fault
    if not window.text:
        return "it holds only spaces" if window.byte else "it is empty"
    shown = window.text[window.at : window.at + 40]
    return f"it begins with {shown!r}"


def _times(event: dict[str, Any]) -> tuple[int, int] | None:
    """Start and duration, microseconds in the file, nanoseconds here; None where they cannot be times."""
    start_ns, duration_ns = _nanoseconds(event.get("ts")), _nanoseconds(event.get("dur"))
    if start_ns is None or duration_ns is None or not sane(start_ns, duration_ns):
        return None
    return start_ns, duration_ns


def _nanoseconds(value: object) -> int | None:
    if isinstance(value, float):
        return round(value * 1000) if math.isfinite(value * 1000) else None
    return value * 1000 if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object, *, lowest: int = 0) -> int:
    """A small whole number, or `UNKNOWN`; CUDA's ids begin at 1 where 0 says that there is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value < 2**62:
        return UNKNOWN
    return value


def _link(args: dict[str, Any]) -> int | None:
    link = _number(args.get("External id"))
    return None if link == UNKNOWN else link


def _text(name: str) -> str:
    """The name as it was meant: the window reads bytes, names are UTF-8."""
    if name.isascii():
        return name
    try:
        return name.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return name  # written with \u escapes, which the decoder has read, or not UTF-8


def _repair(broken: str) -> dict[str, Any] | None:
    """The event, if it is JSON but for numbers written by C (`nan`, `inf`) and backslashes that are not doubled."""
    text = _BARE_NUMBER.sub(r"\1null", broken)
    text = _ESCAPE.sub(lambda found: found[0] if found[1] else r"\\", text)
    try:
        event = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None
