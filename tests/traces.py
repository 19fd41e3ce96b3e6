"""Traces from a few words: the files that torch's profiler and Nsight Systems would write for given steps and kernels.

    kineto(path, [decode(1, "gemm", "attention")])     # .gz in the name packs it
    nsys(path, [prefill(512, "gemm"), decode(1, Ran("gemm", graph=True))])

The device runs `LAG_US` behind the CPU, so a kernel starts long after its step's annotation and the next one's.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_US = 5_156_594_182_023.375
STEP_US = 1000.0
LAG_US = 2600.0
PID = TID = 955


@dataclass(frozen=True)
class Ran:
    """One thing that ran on the device."""

    name: str
    duration_us: float = 4.5
    kind: str = "kernel"
    graph: bool = False
    node: int | None = None
    stream: int = 7
    device: int = 0
    after: bool = False
    """Launched after the step's annotation has ended, as sampling is."""


@dataclass(frozen=True)
class Made:
    """One engine step: its annotation (None: it has none) and what it ran."""

    annotation: str | None
    ran: tuple[Ran, ...]


def step(context: tuple[int, int], generation: tuple[int, int], *ran: str | Ran) -> Made:
    name = f"execute_context_{context[0]}({context[1]})_generation_{generation[0]}({generation[1]})"
    return Made(name, tuple(Ran(one) if isinstance(one, str) else one for one in ran))


def decode(requests: int, *ran: str | Ran) -> Made:
    return step((0, 0), (requests, requests), *ran)


def prefill(tokens: int, *ran: str | Ran) -> Made:
    return step((1, tokens), (0, 0), *ran)


def unannotated(*ran: str | Ran) -> Made:
    return Made(None, step((0, 0), (0, 0), *ran).ran)


@dataclass(frozen=True)
class _Placed:
    """A kernel with its times and the call that launched it."""

    ran: Ran
    start_us: float
    launch_us: float
    correlation: int


def _placed(steps: Sequence[Made]) -> list[tuple[Made, float, list[_Placed]]]:
    """Every step with the start of its annotation and what it ran; a step's graph kernels share one launch."""
    found = []
    correlation = 100
    free_us = START_US + LAG_US
    for number, made in enumerate(steps):
        start_us = START_US + number * STEP_US
        graph: tuple[int, float] | None = None
        placed = []
        for place, ran in enumerate(made.ran):
            launch_us = start_us + 10 + place + (500 if ran.after else 0)
            correlation += 1
            key = (correlation, launch_us)
            if ran.graph:
                graph = key = graph or key
            free_us = max(free_us, key[1] + LAG_US)
            placed.append(_Placed(ran, free_us, key[1], key[0]))
            free_us += ran.duration_us + 0.5
        found.append((made, start_us, placed))
    return found


def event(
    category: str, name: str, ts: float, dur: float, *, pid: int = PID, tid: int = TID, **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kineto_events(steps: Sequence[Made], *, correlated: bool = True, ranges: bool = True) -> list[dict[str, Any]]:
    """The events of these steps, in Kineto's order: the CPU's, then the device's.

    Args:
        steps: In order.
        correlated: Whether device activity names the call that launched it.
        ranges: Whether the annotations have their ranges on the device.
    """
    cpu: list[dict[str, Any]] = []
    device: list[dict[str, Any]] = []
    for number, (made, start_us, placed) in enumerate(_placed(steps)):
        link = 1 + 1000 * number
        if made.annotation:
            cpu.append(event("user_annotation", made.annotation, start_us, 400.0, **{"External id": link}))
            if ranges and placed:
                inside = [one for one in placed if not one.ran.after] or placed
                first, last = inside[0], inside[-1]
                span_us = last.start_us + last.ran.duration_us - first.start_us
                device.append(
                    event(
                        "gpu_user_annotation",
                        made.annotation,
                        first.start_us,
                        span_us,
                        pid=first.ran.device,
                        tid=first.ran.stream,
                        **{"External id": link},
                    )
                )
        cpu.append(event("cpu_op", "aten::mm", start_us + 5, 100.0, **{"External id": link + 1}))
        for one in placed:
            call = "cudaGraphLaunch" if one.ran.graph else "cudaLaunchKernel"
            if not cpu or cpu[-1]["args"].get("correlation") != one.correlation:
                cpu.append(event("cuda_runtime", call, one.launch_us, 0.75, correlation=one.correlation, cbid=1))
            args: dict[str, Any] = {"device": one.ran.device, "context": 1, "stream": one.ran.stream}
            if correlated:
                args["correlation"] = one.correlation
            if one.ran.node is not None:
                args["graph node id"] = one.ran.node
            category = "kernel" if one.ran.kind == "kernel" else f"gpu_{one.ran.kind}"
            times = (one.start_us, one.ran.duration_us)
            device.append(event(category, one.ran.name, *times, pid=one.ran.device, tid=one.ran.stream, **args))
    return [
        {"name": "process_name", "ph": "M", "ts": 0.0, "pid": PID, "tid": 0, "args": {"name": "python"}},
        *cpu,
        *device,
    ]


def kineto_text(events: Iterable[Mapping[str, Any] | str], *, device: str | None = "NVIDIA H200") -> str:
    """The file as Kineto lays it out; an event given as text stands there as it is."""
    properties = [{"id": 0, "name": device, "numSms": 132}] if device else []
    shown = [one if isinstance(one, str) else json.dumps(one) for one in events]
    return (
        f'\n  {{\n    "schemaVersion": 1,\n    "deviceProperties": {json.dumps(properties)},\n'
        '      "cuda_driver_version": 13000,\n  "baseTimeNanoseconds": 1790857026000000000,\n  "traceEvents": [\n  '
        + ",\n  ".join(shown)
        + '\n  ],\n  "traceName": "/tmp/rank0.json"\n}\n'
    )


def write(path: Path, text: str | bytes) -> Path:
    """The file, packed where its name ends in .gz."""
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def kineto(path: Path, steps: Sequence[Made], **options: bool) -> Path:
    return write(path, kineto_text(kineto_events(steps, **options)))


PROCESS = 955 << 24
_SCHEMA = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": "start, end, deviceId, streamId, correlationId, globalPid, demangledName, shortName, "
    "graphNodeId, graphId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "start, end, deviceId, streamId, correlationId, globalPid, copyKind, graphNodeId",
    "CUPTI_ACTIVITY_KIND_MEMSET": "start, end, deviceId, streamId, correlationId, globalPid, memKind, graphNodeId",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start, end, nameId, correlationId, globalTid",
    "NVTX_EVENTS": "start, end, eventType, text, textId, globalTid",
}


def nsys(path: Path, steps: Sequence[Made], *, lacking: Sequence[str] = ()) -> Path:
    """An SQLite export of these steps.

    Args:
        path: Where to write it.
        steps: In order.
        lacking: Tables, and columns of any table, that this version of Nsight Systems does not write.
    """
    strings: dict[str, int] = {}

    def string(text: str) -> int:
        return strings.setdefault(text, len(strings) + 1)

    def ns(us: float) -> int:
        return round((us - START_US) * 1000) + 500_000_000

    rows: dict[str, list[dict[str, Any]]] = {table: [] for table in _SCHEMA}
    launched: set[int] = set()
    for number, (made, start_us, placed) in enumerate(_placed(steps)):
        if made.annotation:
            text = {"text": made.annotation} if number % 2 else {"textId": string(made.annotation)}
            times = {"start": ns(start_us), "end": ns(start_us + 400)}
            rows["NVTX_EVENTS"].append({**times, "eventType": 59, "globalTid": PROCESS + TID, **text})
        for one in placed:
            if one.correlation not in launched:
                launched.add(one.correlation)
                call = string("cudaGraphLaunch_v10000" if one.ran.graph else "cudaLaunchKernel_v7000")
                times = {"start": ns(one.launch_us), "end": ns(one.launch_us + 0.75)}
                rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append(
                    {**times, "nameId": call, "correlationId": one.correlation, "globalTid": PROCESS + TID}
                )
            what: dict[str, int] = {"copyKind": 1}
            if one.ran.kind == "kernel":
                what = {"demangledName": string(one.ran.name), "shortName": string(one.ran.name[:8])}
            elif one.ran.kind == "memset":
                what = {"memKind": 1}
            rows[f"CUPTI_ACTIVITY_KIND_{one.ran.kind.upper()}"].append(
                {
                    "start": ns(one.start_us),
                    "end": ns(one.start_us) + round(one.ran.duration_us * 1000),
                    "deviceId": one.ran.device,
                    "streamId": one.ran.stream,
                    "correlationId": one.correlation,
                    "globalPid": PROCESS,
                    "graphNodeId": one.ran.node,
                    **what,
                }
            )
    rows["StringIds"] = [{"id": number, "value": text} for text, number in strings.items()]
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        for table, schema in _SCHEMA.items():
            if table in lacking:
                continue
            columns = [column.strip() for column in schema.split(",")]
            columns = [column for column in columns if column.split()[0] not in lacking]
            names = [column.split()[0] for column in columns]
            database.execute(f'CREATE TABLE "{table}" ({", ".join(columns)})')
            marks = ", ".join("?" for _ in names)
            values = [[row.get(name) for name in names] for row in rows[table]]
            database.executemany(f'INSERT INTO "{table}" VALUES ({marks})', values)
        database.commit()
    return path
