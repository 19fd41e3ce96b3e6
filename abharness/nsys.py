"""An SQLite export of Nsight Systems -> kernel table.

Tables and columns come and go with the version and with what was traced: what is there is looked at first. Only
`CUPTI_ACTIVITY_KIND_KERNEL` with start, end and a name must be there; a missing other column is an unknown value.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from abharness.errors import TraceError
from abharness.timeline import UNKNOWN, Assembler, Kind, Trace, is_step, sane

SQLITE_MAGIC = b"SQLite format 3\0"

_KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
_RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_DIAGNOSTICS = "DIAGNOSTIC_EVENT"
_LOST = re.compile(r"not all .*events|lost|dropped", re.IGNORECASE)
"""What the profiler says when its own buffers were too small."""

_KNOWN = {_KERNEL, _RUNTIME, _GRAPH, _DIAGNOSTICS, "StringIds", "NVTX_EVENTS", "TARGET_INFO_SESSION_START_TIME"}

_COPIES = {
    1: "HtoD",
    2: "DtoH",
    3: "HtoA",
    4: "AtoH",
    5: "AtoA",
    6: "AtoD",
    7: "DtoA",
    8: "DtoD",
    9: "HtoH",
    10: "PtoP",
}
"""CUPTI's kinds of copies, by the names that torch's profiler gives them."""

_PROCESS_SHIFT = 24
"""A global thread id is the global process id with the thread in its lower bits."""


def read_nsys(path: Path) -> Trace:
    """Read one export.

    Raises:
        TraceError: It is locked, damaged, or another program's database.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1)) as database:
            database.text_factory = lambda raw: raw.decode("utf-8", "replace")
            return _Export(database, path).read()
    except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: of its message, which quotes damage
        raise TraceError(
            f"{path} cannot be read: {error}",
            hint="wait for the export to end, or make it again: nsys export --type sqlite FILE.nsys-rep",
        ) from error


class _Export:
    """One database and what was read of it."""

    def __init__(self, database: sqlite3.Connection, path: Path) -> None:
        self._database = database
        tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if not _KNOWN.intersection(tables):
            shown = ", ".join(tables[:5]) or "none"
            raise TraceError(
                f"{path} is no export of Nsight Systems: its tables are {shown}",
                hint="expected the file that nsys export --type sqlite FILE.nsys-rep writes",
            )
        self._columns = {
            table: {row[1] for row in database.execute(f'PRAGMA table_info("{table}")')}
            for table in tables
            if table in _KNOWN or table.startswith("CUPTI_ACTIVITY_KIND_")
        }
        self._strings: dict[int, str] = {}
        if self._columns.get("StringIds", set()) >= {"id", "value"}:
            rows = database.execute("SELECT id, value FROM StringIds")
            self._strings = {number: text for number, text in rows if isinstance(number, int) and isinstance(text, str)}
        self._rows = Assembler()
        self._problems: list[str] = []
        self._unusable: dict[str, int] = {}

    def read(self) -> Trace:
        try:
            self._devices()
            self._launches()
            self._steps()
            self._whole_graphs()
            self._losses()
        except sqlite3.OperationalError:
            raise  # locked, or no such file: nothing of it can be trusted
        except sqlite3.DatabaseError as error:
            if not self._rows.device_rows:
                raise
            self._problems.append(f"the database is damaged ({error}); rows behind the damage are missing")
        self._problems += [f"{count} rows of {table} cannot be used" for table, count in self._unusable.items()]
        return self._rows.finish("nsys", problems=self._problems, on_device=True)

    def _select(self, table: str, wanted: tuple[str, ...], needed: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
        """Rows of a table, NULL in the columns that it lacks; none where it lacks a needed one."""
        columns = self._columns.get(table)
        if columns is None:
            return
        lacking = [name for name in needed if name not in columns]
        if lacking:
            self._problems.append(f"{table} has no column {', '.join(lacking)}: it was not read")
            return
        listed = ", ".join(f'"{name}"' if name in columns else "NULL" for name in wanted)
        yield from self._database.execute(f'SELECT {listed} FROM "{table}"')  # noqa: S608 - our own names

    def _devices(self) -> None:
        where = ("start", "end", "deviceId", "streamId", "graphNodeId", "globalPid", "correlationId")
        naming = self._columns.get(_KERNEL, set())
        name_column = next((name for name in ("demangledName", "shortName", "mangledName") if name in naming), "name")
        self._activity("kernel", _KERNEL, (*where, name_column), ("start", "end", name_column))
        self._activity("memcpy", "CUPTI_ACTIVITY_KIND_MEMCPY", (*where, "copyKind"), ("start", "end"))
        self._activity("memset", "CUPTI_ACTIVITY_KIND_MEMSET", (*where, "memKind"), ("start", "end"))
        if _KERNEL not in self._columns:
            self._problems.append(f"it has no table {_KERNEL}: no kernel was recorded")

    def _activity(self, kind: Kind, table: str, columns: tuple[str, ...], needed: tuple[str, ...]) -> None:
        for start, end, device, stream, node, process, correlation, what in self._select(table, columns, needed):
            name = self._name(kind, what)
            times = _times(start, end)
            if name is None or times is None:
                self._count(table)
                continue
            self._rows.device(
                kind,
                name,
                *times,
                stream=_number(stream),
                device=_number(device),
                node=_number(node, lowest=1),
                process=_process(process),
                correlation=_number(correlation, lowest=1),
            )

    def _name(self, kind: Kind, what: object) -> str | None:
        if kind == "memcpy":
            return f"Memcpy {_COPIES.get(what, 'of unknown kind') if isinstance(what, int) else 'of unknown kind'}"
        if kind == "memset":
            return "Memset"
        if isinstance(what, str):
            return what
        return self._strings.get(what) if isinstance(what, int) else None

    def _launches(self) -> None:
        columns = ("start", "end", "globalTid", "correlationId", "nameId")
        for start, end, thread, correlation, name in self._select(_RUNTIME, columns, ("start", "correlationId")):
            number = _number(correlation, lowest=1)
            times = _times(start, start if end is None else end)
            if times is None:
                self._count(_RUNTIME)
            elif number != UNKNOWN:
                called = self._strings.get(name, "") if isinstance(name, int) else ""
                self._rows.launch(number, _place(thread), times[0], graph="GraphLaunch" in called)

    def _steps(self) -> None:
        columns = ("start", "end", "globalTid", "text", "textId")
        for start, end, thread, text, text_id in self._select("NVTX_EVENTS", columns, ("start",)):
            name = text if isinstance(text, str) else self._strings.get(text_id, "") if isinstance(text_id, int) else ""
            if not is_step(name):
                continue
            times = _times(start, start if end is None else end)
            if times is None:
                self._count("NVTX_EVENTS")
            else:
                self._rows.annotation(name, _place(thread), times[0], None)

    def _whole_graphs(self) -> None:
        whole = sum(1 for _ in self._select(_GRAPH, ("start",), ()))
        if whole:
            self._problems.append(
                f"{whole} CUDA graph launches were recorded whole: the kernels inside of them are not known; "
                "profile with nsys --cuda-graph-trace=node"
            )

    def _losses(self) -> None:
        told = [text for (text,) in self._select(_DIAGNOSTICS, ("text",), ("text",)) if isinstance(text, str)]
        self._problems += [f"the profiler says: {text[:200]}" for text in dict.fromkeys(told) if _LOST.search(text)]

    def _count(self, table: str) -> None:
        self._unusable[table] = self._unusable.get(table, 0) + 1


def _times(start: object, end: object) -> tuple[int, int] | None:
    """Start and duration, nanoseconds; None where they cannot be times."""
    if not isinstance(start, int) or not isinstance(end, int) or not sane(start, end - start):
        return None
    return start, end - start


def _number(value: object, *, lowest: int = 0) -> int:
    return value if isinstance(value, int) and lowest <= value < 2**62 else UNKNOWN


def _process(value: object) -> int:
    return value >> _PROCESS_SHIFT if isinstance(value, int) else UNKNOWN


def _place(thread: object) -> tuple[int, int]:
    return (thread >> _PROCESS_SHIFT, thread) if isinstance(thread, int) else (UNKNOWN, UNKNOWN)
