"""A profiler's file -> `Trace`, whichever profiler wrote it; and the kernel table as Parquet and back.

What a file is, its first bytes say, never its name. Parquet's library is imported only where a file is written or read.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from abharness.atomic import replacing
from abharness.errors import RecordError, TraceError, first_line
from abharness.kineto import read_kineto
from abharness.nsys import SQLITE_MAGIC, read_nsys
from abharness.timeline import KINDS, UNKNOWN, Kernel, Kernels, Phase, Source, Step, Trace, sane

__all__ = ["Kernel", "Kernels", "Phase", "Step", "Trace", "read_kernels", "read_trace", "write_kernels"]

RAW_SUFFIXES = (".nsys-rep", ".qdrep")
PARQUET_MAGIC = b"PAR1"
SCHEMA_VERSION = 1
MOST_S = 1e10
"""Later than any trace goes on, seconds."""

_HEAD = b"abharness.trace"
_TIMES = ("start", "duration")
_NULLABLE = ("stream", "device", "graph_node", "step")


def read_trace(path: Path) -> Trace:
    """Read one trace: JSON of torch's profiler, plain or gzip, an SQLite export of Nsight Systems, or kernels as Parquet.

    Raises:
        TraceError: Nothing can be read: no such file, an empty one, no trace, a database that is locked or foreign. A
            trace that is damaged further on is returned, and says so in `problem`.
        RecordError: It is Parquet, but not what `write_kernels` wrote.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(SQLITE_MAGIC))
        if not magic:
            raise TraceError(f"{path} is empty", hint="the profiler writes its trace when it is stopped")
        if magic == SQLITE_MAGIC:
            return read_nsys(path)
        if magic.startswith(PARQUET_MAGIC):
            return read_kernels(path)
        if path.suffix in RAW_SUFFIXES:
            raise TraceError(
                f"{path} is a raw report of Nsight Systems", hint=f"export it: nsys export --type sqlite {path}"
            )
        return read_kineto(path)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error


def write_kernels(path: Path, trace: Trace) -> None:
    """Write a trace as Parquet, whole or not at all: the rows, and the rest in the schema's metadata.

    Raises:
        OSError: The file cannot be written; an existing one is untouched.
    """
    import pyarrow
    import pyarrow.parquet

    kernels = trace.kernels
    columns: dict[str, Any] = {
        "name": pyarrow.DictionaryArray.from_arrays(
            pyarrow.array(kernels.name_ids, pyarrow.int32()), pyarrow.array(kernels.names, pyarrow.string())
        ),
        **{
            f"{name}_ns": pyarrow.array(_nanoseconds(getattr(kernels, f"{name}_s")), pyarrow.int64()) for name in _TIMES
        },
        "kind": pyarrow.DictionaryArray.from_arrays(
            pyarrow.array(kernels.kind_ids, pyarrow.int8()), pyarrow.array(KINDS, pyarrow.string())
        ),
        "graph": pyarrow.array(kernels.graph, pyarrow.int8()),
    }
    for name in _NULLABLE:
        values = [None if value == UNKNOWN else value for value in getattr(kernels, name)]
        columns[name] = pyarrow.array(values, pyarrow.int64())
    head = {
        "schema_version": SCHEMA_VERSION,
        "source": trace.source,
        "on_device": trace.on_device,
        "problem": trace.problem,
        "unsegmented": trace.unsegmented,
        "repaired": trace.repaired,
        "steps": [asdict(step) for step in trace.steps],
    }
    table = pyarrow.table(columns).replace_schema_metadata({_HEAD: json.dumps(head, allow_nan=False)})
    with replacing(path) as out:
        # Thousands of times in order differ by little: as differences they take a third of the room.
        pyarrow.parquet.write_table(
            table,
            out,
            compression="zstd",
            use_dictionary=["name", "kind"],
            column_encoding=dict.fromkeys((*(f"{name}_ns" for name in _TIMES), *_NULLABLE), "DELTA_BINARY_PACKED"),
        )


def _nanoseconds(times_s: array[float]) -> list[int]:
    return [round(time_s * 1e9) for time_s in times_s]


def read_kernels(path: Path) -> Trace:
    """Read what `write_kernels` wrote.

    Raises:
        RecordError: It cannot be read, is another table, or of a later version.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        table.validate(full=True)
        head = json.loads((table.schema.metadata or {})[_HEAD])
        if head["schema_version"] != SCHEMA_VERSION:
            raise RecordError(
                f"{path} has schema version {head['schema_version']}; this abharness reads {SCHEMA_VERSION}"
            )
        names = table["name"].combine_chunks()
        kinds = table["kind"].combine_chunks()
        places = array("b", [KINDS.index(name) for name in kinds.dictionary.to_pylist()])
        _check_head(head)
        if any(
            table.schema.field(name).type != pyarrow.int64()
            for name in (*_NULLABLE, *(f"{name}_ns" for name in _TIMES))
        ):
            raise ValueError("a column of another type")
        if not all(map(sane, table["start_ns"].to_pylist(), table["duration_ns"].to_pylist())):
            raise ValueError("a time that is none")
        numbers = {name: array("q", table[name].fill_null(UNKNOWN).to_pylist()) for name in _NULLABLE}
        if not all(UNKNOWN <= step < len(head["steps"]) for step in numbers["step"]):
            raise ValueError("a row of a step that is not there")
        if not all(isinstance(name, str) for name in names.dictionary.to_pylist()):
            raise ValueError("a name that is no text")
        return Trace(
            source=head["source"],
            kernels=Kernels(
                names=names.dictionary.to_pylist(),
                name_ids=array("q", names.indices.to_pylist()),
                start_s=array("d", (time / 1e9 for time in table["start_ns"].to_pylist())),
                duration_s=array("d", (time / 1e9 for time in table["duration_ns"].to_pylist())),
                kind_ids=array("b", [places[place] for place in kinds.indices.to_pylist()]),
                graph=array("b", table["graph"].to_pylist()),
                **numbers,
            ),
            steps=tuple(Step(**step) for step in head["steps"]),
            unsegmented=head["unsegmented"],
            problem=head["problem"],
            on_device=head["on_device"],
            repaired=head["repaired"],
        )
    except (
        OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError, pyarrow.ArrowException
    ) as error:  # fmt: skip
        raise RecordError(f"{path} cannot be read: {first_line(error)}") from error


def _check_head(head: dict[str, Any]) -> None:
    """Refuse what is not as `write_kernels` writes it: what is drawn from it must not stumble later.

    Raises:
        ValueError: It is not.
    """
    texts = (head["unsegmented"], head["problem"])
    whole = head["source"] in get_args(Source) and all(text is None or isinstance(text, str) for text in texts)
    whole = whole and type(head["on_device"]) is bool and type(head["repaired"]) is int
    for place, step in enumerate(head["steps"]):
        counts = [value for name, value in step.items() if name not in ("index", "start_s")]
        whole = whole and step["index"] == place and isinstance(step["start_s"], int | float)
        whole = whole and abs(step["start_s"]) < MOST_S and all(one is None or _is_count(one) for one in counts)
    if not whole:
        raise ValueError("its head is damaged")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**62
