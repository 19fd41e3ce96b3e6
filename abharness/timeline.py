"""What profilers recorded, event by event -> one kernel table with the engine step of every kernel; pure.

A kernel belongs to the step whose annotation began last, at or before the call that launched it: the device runs behind
the CPU, so the kernel's own start says little. Sampling follows its step's annotation and counts to that step.
Times are integer nanoseconds inside and seconds from the trace's first moment outside.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["prefill", "decode", "mixed"]
Source = Literal["kineto", "nsys"]
Kind = Literal["kernel", "memcpy", "memset", "op"]

KINDS: tuple[Kind, ...] = ("kernel", "memcpy", "memset", "op")
UNKNOWN = -1
"""Stands for None in an integer column."""

LATEST_NS = 2**62
"""Later than any clock since 1970: such a time is damage."""

LONGEST_NS = 24 * 3600 * 10**9
"""No kernel, operator or step runs for a day: such a duration is damage."""

_STEP = re.compile(r"execute_context_(\d{1,9})\((\d{1,12})\)_generation_(\d{1,9})\((\d{1,12})\)")
"""vLLM's annotation of an engine step: requests and tokens in prefill and in decode."""

_BARE_STEP = re.compile(r"execute_new_\d+_cached_\d+")
"""The annotation of older vLLM: new and running requests, which does not say what is prefill."""


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step.

    Attributes:
        index: Its place in `Trace.steps`, in order of time.
        start_s: When its annotation began, on the CPU: seconds from the trace's first kernel, launch or step.
        context_requests: Requests in prefill; None where the annotation does not say, as for the next three.
        context_tokens: Their tokens in this step.
        generation_requests: Requests in decode.
        generation_tokens: Their tokens in this step.
    """

    index: int
    start_s: float
    context_requests: int | None
    context_tokens: int | None
    generation_requests: int | None
    generation_tokens: int | None

    @property
    def phase(self) -> Phase | None:
        """What the step does; None when that is not known, or when it runs no request at all."""
        if self.context_requests is None or self.generation_requests is None:
            return None
        if self.context_requests and self.generation_requests:
            return "mixed"
        if self.context_requests:
            return "prefill"
        return "decode" if self.generation_requests else None


@dataclass(frozen=True, slots=True)
class Kernel:
    """One row of the kernel table.

    Attributes:
        name: As the profiler wrote it: demangled where it was.
        start_s: Start on the device (of an operator: on the CPU), seconds from the trace's first moment.
        duration_s: How long it ran, seconds; of an operator, without the operators that it called.
        kind: What it is.
        stream: CUDA stream, None where not recorded.
        device: Index of the device, None where not recorded.
        graph: Whether a CUDA graph replayed it.
        graph_node: Its node in that graph, None where not recorded.
        step: Index of its engine step, None where it belongs to none.
    """

    name: str
    start_s: float
    duration_s: float
    kind: Kind
    stream: int | None
    device: int | None
    graph: bool
    graph_node: int | None
    step: int | None


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernel table, column by column, ordered by start; `Kernel` describes the fields.

    Attributes:
        names: Every name once; `name_ids` point into it.
        name_ids: Of each row.
        start_s: Seconds.
        duration_s: Seconds.
        kind_ids: Places in `KINDS`.
        stream: -1 where not recorded, as in the next four.
        device: Index of the device.
        graph: 1 for kernels that a CUDA graph replayed, else 0.
        graph_node: Node of the graph.
        step: Index into `Trace.steps`.
    """

    names: list[str] = field(default_factory=list)
    name_ids: array[int] = field(default_factory=lambda: array("q"))
    start_s: array[float] = field(default_factory=lambda: array("d"))
    duration_s: array[float] = field(default_factory=lambda: array("d"))
    kind_ids: array[int] = field(default_factory=lambda: array("b"))
    stream: array[int] = field(default_factory=lambda: array("q"))
    device: array[int] = field(default_factory=lambda: array("q"))
    graph: array[int] = field(default_factory=lambda: array("b"))
    graph_node: array[int] = field(default_factory=lambda: array("q"))
    step: array[int] = field(default_factory=lambda: array("q"))

    def __len__(self) -> int:
        return len(self.name_ids)

    def rows(self) -> Iterator[Kernel]:
        """Yield the rows in order of start."""
        for row in range(len(self)):
            yield Kernel(
                name=self.names[self.name_ids[row]],
                start_s=self.start_s[row],
                duration_s=self.duration_s[row],
                kind=KINDS[self.kind_ids[row]],
                stream=_known(self.stream[row]),
                device=_known(self.device[row]),
                graph=bool(self.graph[row]),
                graph_node=_known(self.graph_node[row]),
                step=_known(self.step[row]),
            )


@dataclass(frozen=True, slots=True)
class Trace:
    """What one trace file holds.

    Attributes:
        source: The profiler that recorded it: torch's (`kineto`) or Nsight Systems (`nsys`).
        kernels: The kernel table; of a CPU-only trace, its operators.
        steps: Engine steps in order of time; empty when the trace has no annotation of steps.
        unsegmented: Why no row has a step, or None when rows have.
        problem: Why the trace is not whole: what is there was read, what is missing is not known. None when whole.
        on_device: False for a CPU-only trace: rows are operators (`op`), durations are self time.
        repaired: Events that were not valid JSON as written (bare `nan`, backslashes not doubled) and were read after
            all; nothing of them is missing.
    """

    source: Source
    kernels: Kernels
    steps: tuple[Step, ...]
    unsegmented: str | None
    problem: str | None
    on_device: bool
    repaired: int = 0


def is_step(name: str) -> bool:
    """Whether an annotation is that of an engine step."""
    return name.startswith("execute_") and (_STEP.match(name) or _BARE_STEP.match(name)) is not None


def sane(start_ns: int, duration_ns: int) -> bool:
    """Whether these can be the times of an event."""
    return 0 <= start_ns < LATEST_NS and 0 <= duration_ns <= LONGEST_NS


class Assembler:
    """Takes events in any order, keeps them in columns, and puts them together at the end.

    A `place` names the thread an event happened on, as (process, thread); two readers may use any numbers that are
    consistent within one trace.
    """

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._name_ids = array("q")
        self._kinds = array("b")
        self._starts = array("q")
        self._durations = array("q")
        self._streams = array("q")
        self._devices = array("q")
        self._nodes = array("q")
        self._graphs = array("b")
        self._processes = array("q")
        self._correlations = array("q")
        self._launches: dict[int, dict[int, int]] = {}
        self._launch_starts = array("q")
        self._launch_places = array("q")
        self._launch_graphs = array("b")
        self._places: dict[tuple[int, int], int] = {}
        self._steps: list[_Annotation] = []
        self._ranges: list[_Range] = []
        self._ops = _Operators()
        self.device_rows = 0

    def device(
        self,
        kind: Kind,
        name: str,
        start_ns: int,
        duration_ns: int,
        *,
        stream: int,
        device: int,
        node: int,
        process: int,
        correlation: int,
    ) -> None:
        """Add a kernel, copy or memset; process and correlation name the call that launched it."""
        self.device_rows += 1
        self._row(KINDS.index(kind), name, start_ns, duration_ns)
        self._streams.append(stream)
        self._devices.append(device)
        self._nodes.append(node)
        self._graphs.append(node != UNKNOWN)
        self._processes.append(process)
        self._correlations.append(correlation)

    def _row(self, kind: int, name: str, start_ns: int, duration_ns: int) -> None:
        self._kinds.append(kind)
        self._name_ids.append(self._names.setdefault(name, len(self._names)))
        self._starts.append(start_ns)
        self._durations.append(duration_ns)

    def launch(self, correlation: int, place: tuple[int, int], start_ns: int, *, graph: bool) -> None:
        """Add an API call that may have launched something."""
        self._launches.setdefault(place[0], {})[correlation] = len(self._launch_starts)
        self._launch_starts.append(start_ns)
        self._launch_places.append(self._places.setdefault(place, len(self._places)))
        self._launch_graphs.append(graph)

    def annotation(self, name: str, place: tuple[int, int], start_ns: int, link: int | None) -> None:
        """Add the CPU annotation of an engine step; `link` is what its range on the device carries too."""
        self._steps.append(_Annotation(start_ns, place, name, link))

    def device_range(self, name: str, stream: int, device: int, start_ns: int, end_ns: int, link: int | None) -> None:
        """Add the span of an engine step on a stream of the device."""
        self._ranges.append(_Range(start_ns, end_ns, (device, stream), name, link))

    def operator(self, name: str, place: tuple[int, int], start_ns: int, duration_ns: int) -> None:
        """Add a CPU operator; operators become rows only where nothing ran on a device."""
        place_id = self._places.setdefault(place, len(self._places))
        self._ops.add(self._names.setdefault(name, len(self._names)), place_id, start_ns, duration_ns)

    def drop_operators(self) -> None:
        """Forget the operators: the trace has device activity."""
        self._ops = _Operators()

    def finish(self, source: Source, *, problems: Sequence[str], on_device: bool, repaired: int = 0) -> Trace:
        """Put the trace together."""
        if not on_device:
            self._take_operators()
        ranges = self._ranges
        annotations = sorted(self._steps, key=lambda one: one.start_ns)
        if not annotations and ranges:
            # Only the device's side of the annotations was recorded: the earliest range of each is its step.
            annotations = [_Annotation(one.start_ns, (UNKNOWN, UNKNOWN), one.name, one.link) for one in _firsts(ranges)]
        steps_of_rows = self._assign(annotations)
        moments = [series for series in (self._starts, self._launch_starts) if len(series)]
        origin = min([min(series) for series in moments] + [one.start_ns for one in annotations[:1]], default=0)
        order = sorted(range(len(self._starts)), key=self._starts.__getitem__)
        kernels = Kernels(names=list(self._names))
        for row in order:
            kernels.name_ids.append(self._name_ids[row])
            kernels.start_s.append((self._starts[row] - origin) / 1e9)
            kernels.duration_s.append(self._durations[row] / 1e9)
            kernels.kind_ids.append(self._kinds[row])
            kernels.stream.append(self._streams[row])
            kernels.device.append(self._devices[row])
            kernels.graph.append(self._graphs[row])
            kernels.graph_node.append(self._nodes[row])
            kernels.step.append(steps_of_rows[row])
        steps = tuple(
            Step(index, (one.start_ns - origin) / 1e9, *_counts(one.name)) for index, one in enumerate(annotations)
        )
        told = list(problems)
        if not order:
            told.append(
                "it holds no device activity" if on_device else "it holds neither device activity nor operators"
            )
        return Trace(
            source=source,
            kernels=_compact(kernels),
            steps=steps,
            unsegmented=_unsegmented(steps, kernels),
            problem="; ".join(told) or None,
            on_device=on_device,
            repaired=repaired,
        )

    def _take_operators(self) -> None:
        """Turn the operators into rows whose launch is themselves."""
        ops = self._ops
        names = list(self._names)
        places = list(self._places)
        for row, self_ns in enumerate(ops.self_times()):
            self._row(KINDS.index("op"), names[ops.name_ids[row]], ops.starts[row], self_ns)
            for column in (self._streams, self._devices, self._nodes):
                column.append(UNKNOWN)
            self._graphs.append(0)
            place = places[ops.places[row]]
            self._processes.append(place[0])
            self._correlations.append(row)
            self.launch(row, place, ops.starts[row], graph=False)

    def _assign(self, annotations: Sequence[_Annotation]) -> array[int]:
        """The step of every row, by its launch, or where that is not recorded by the ranges on its stream."""
        threads = _ByPlace(annotations)
        streams = _ByStream(self._ranges, annotations)
        places = list(self._places)
        found = array("q")
        for row, (process, correlation) in enumerate(zip(self._processes, self._correlations, strict=True)):
            launch = self._launches.get(process, {}).get(correlation)
            if launch is None:
                found.append(streams.at((self._devices[row], self._streams[row]), self._starts[row]))
                continue
            if self._launch_graphs[launch]:
                self._graphs[row] = 1
            found.append(threads.at(places[self._launch_places[launch]], self._launch_starts[launch]))
        return found


@dataclass(frozen=True, slots=True)
class _Annotation:
    start_ns: int
    place: tuple[int, int]
    name: str
    link: int | None


@dataclass(frozen=True, slots=True)
class _Range:
    start_ns: int
    end_ns: int
    stream: tuple[int, int]
    name: str
    link: int | None


class _Operators:
    """CPU operators in columns."""

    def __init__(self) -> None:
        self.name_ids, self.places = array("q"), array("q")
        self.starts, self.durations = array("q"), array("q")

    def add(self, name_id: int, place: int, start_ns: int, duration_ns: int) -> None:
        self.name_ids.append(name_id)
        self.places.append(place)
        self.starts.append(start_ns)
        self.durations.append(duration_ns)

    def self_times(self) -> array[int]:
        """Each operator's duration without the operators that it called on its thread."""
        own = array("q", self.durations)
        order = sorted(range(len(own)), key=lambda row: (self.places[row], self.starts[row], -self.durations[row], row))
        open_rows: list[int] = []
        for row in order:
            start, place = self.starts[row], self.places[row]
            while open_rows and (
                self.places[open_rows[-1]] != place
                or self.starts[open_rows[-1]] + self.durations[open_rows[-1]] <= start
            ):
                open_rows.pop()
            if open_rows:
                # A child that outlasts its parent by the clock's rounding takes no more than the parent has.
                own[open_rows[-1]] = max(0, own[open_rows[-1]] - self.durations[row])
            open_rows.append(row)
        return own


class _ByPlace:
    """Steps by thread and by process: which one began last at a moment."""

    def __init__(self, annotations: Sequence[_Annotation]) -> None:
        self._series: dict[tuple[int, int | None], tuple[list[int], list[int]]] = {}
        for index, one in enumerate(annotations):
            for key in (one.place, (one.place[0], None)):
                starts, indexes = self._series.setdefault(key, ([], []))
                starts.append(one.start_ns)
                indexes.append(index)

    def at(self, place: tuple[int, int], moment_ns: int) -> int:
        for key in (place, (place[0], None)):
            starts, indexes = self._series.get(key, ((), ()))
            before = bisect_right(starts, moment_ns)
            if before:
                return indexes[before - 1]
        return UNKNOWN


class _ByStream:
    """Ranges of steps on the streams of devices: which step a moment lies in."""

    def __init__(self, ranges: Sequence[_Range], annotations: Sequence[_Annotation]) -> None:
        links = {one.link: index for index, one in enumerate(annotations) if one.link is not None}
        ordinals: dict[str, list[int]] = {}
        for index, one in enumerate(annotations):
            ordinals.setdefault(one.name, []).append(index)
        # Without a link, the nth range of a name is the nth step of that name, if both are all there.
        counts = Counter(span.name for span in ranges if span.link not in links)
        nth: Counter[str] = Counter()
        self._series: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for span in sorted(ranges, key=lambda span: span.start_ns):
            if span.link in links:
                step = links[span.link]
            else:
                of_name = ordinals.get(span.name, [])
                step = of_name[nth[span.name]] if counts[span.name] == len(of_name) else UNKNOWN
                nth[span.name] += 1
            self._series.setdefault(span.stream, []).append((span.start_ns, span.end_ns, step))

    def at(self, stream: tuple[int, int], moment_ns: int) -> int:
        spans = self._series.get(stream, [])
        before = bisect_right(spans, (moment_ns, LATEST_NS, 0))
        if before and moment_ns <= spans[before - 1][1]:
            return spans[before - 1][2]
        return UNKNOWN


def _firsts(ranges: Sequence[_Range]) -> list[_Range]:
    """The earliest range of every step, in order of time; a linked step may have one on several streams."""
    firsts: dict[object, _Range] = {}
    for place, one in enumerate(sorted(ranges, key=lambda one: one.start_ns)):
        firsts.setdefault(("unlinked", place) if one.link is None else one.link, one)
    return list(firsts.values())


def _counts(name: str) -> tuple[int | None, int | None, int | None, int | None]:
    """Requests and tokens in prefill, requests and tokens in decode, as the annotation says."""
    match = _STEP.match(name)
    if match is None:
        return None, None, None, None
    return int(match[1]), int(match[2]), int(match[3]), int(match[4])


def _known(value: int) -> int | None:
    return None if value == UNKNOWN else value


def _compact(kernels: Kernels) -> Kernels:
    """The same table, its names in order of first use and without those that no row has."""
    places: dict[int, int] = {}
    for row, name_id in enumerate(kernels.name_ids):
        kernels.name_ids[row] = places.setdefault(name_id, len(places))
    kernels.names[:] = [kernels.names[name_id] for name_id in places]
    return kernels


def _unsegmented(steps: Sequence[Step], kernels: Kernels) -> str | None:
    if not steps:
        return "the trace has no annotation of an engine step (execute_context_..._generation_...)"
    if len(kernels) and max(kernels.step) == UNKNOWN:
        return (
            f"none of the {len(kernels)} rows can be tied to one of the {len(steps)} steps: no launch call of theirs "
            "is in the trace"
        )
    return None
