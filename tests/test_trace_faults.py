"""Traces that are cut, damaged, hostile or none at all: what can be read is, and what is missing is told."""

from __future__ import annotations

import contextlib
import gzip
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from abharness import kineto as reader
from abharness.errors import TraceError
from abharness.trace import Trace, read_trace
from tests.traces import START_US, Ran, decode, event, kineto, kineto_events, kineto_text, nsys, prefill, write

STEPS = [prefill(64, "gemm", "attention"), decode(1, Ran("gemm", graph=True), "sample"), decode(1, "größe")]
EVENTS = kineto_events(STEPS)
TEXT = kineto_text(EVENTS)  # ASCII: a character is a byte
GOOD = ["gemm", "attention", "gemm", "sample", "größe"]
LAST_KERNEL = json.dumps(EVENTS[-1])


def ran(trace: Trace) -> list[str]:
    return [one.name for one in trace.kernels.rows()]


def read_text(tmp_path: Path, text: str | bytes) -> Trace:
    return read_trace(write(tmp_path / "t.json", text))


def with_event(place: int, broken: str, events: Sequence[Any] = EVENTS) -> str:
    return kineto_text([*events[:place], broken, *events[place:]])


NO_TRACES: list[tuple[str, bytes, str]] = [
    ("empty", b"", "is empty"),
    ("zeros", b"\0" * 4096, "begins with"),
    ("gzip of zeros", gzip.compress(b"\0" * 4_000_000), "begins with"),
    ("gzip of nothing", gzip.compress(b""), "it is empty"),
    ("spaces", b"  \n\t " * 1000, "only spaces"),
    ("error page", b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "begins with '<!DOCTYPE html>"),
    ("text", b"hello", "begins with 'hello'"),
    ("number", b"42", "begins with '42'"),
    ("other JSON", b'{"a": [1, 2], "b": {"traceEvents": []}}', "without traceEvents"),
    ("empty object", b"{}", "without traceEvents"),
    ("events that are no array", b'{"traceEvents": {"a": 1}}', "without traceEvents"),
    ("cut before the events", TEXT[: TEXT.index("traceEvents")].encode(), "cut off"),
    ("gzip cut in its head", gzip.compress(TEXT.encode())[:6], "compressed data"),
    ("gzip damaged in its first block", gzip.compress(TEXT.encode())[:10] + b"\xff" * 200, "compressed data"),
    ("binary", bytes(range(1, 256)) * 20, "begins with"),
]


@pytest.mark.parametrize(("data", "said"), [case[1:] for case in NO_TRACES], ids=[case[0] for case in NO_TRACES])
def test_what_is_no_trace_is_an_error_that_says_what_it_is(tmp_path: Path, data: bytes, said: str) -> None:
    (tmp_path / "t.json.gz").write_bytes(data)
    with pytest.raises(TraceError) as error:
        read_trace(tmp_path / "t.json.gz")
    assert said in str(error.value)
    assert str(tmp_path / "t.json.gz") in str(error.value)
    assert error.value.exit_code == 2
    assert error.value.hint


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none")
    with pytest.raises(TraceError, match="directory"):
        read_trace(tmp_path)


def test_a_raw_report_of_nsight_systems_must_be_exported(tmp_path: Path) -> None:
    (tmp_path / "run.nsys-rep").write_bytes(b"NSYS\0\1binary")
    with pytest.raises(TraceError) as error:
        read_trace(tmp_path / "run.nsys-rep")
    assert error.value.hint == f"export it: nsys export --type sqlite {tmp_path / 'run.nsys-rep'}"


def test_an_empty_trace_is_read_and_is_not_whole(tmp_path: Path) -> None:
    trace = read_text(tmp_path, kineto_text([], device=None))
    assert (len(trace.kernels), trace.steps, trace.on_device) == (0, (), False)
    assert trace.problem == "it holds neither device activity nor operators"


def test_two_processes_in_one_file_are_told(tmp_path: Path) -> None:
    other = event("cuda_runtime", "cudaLaunchKernel", START_US, 1.0, pid=7, correlation=101)
    trace = read_text(tmp_path, kineto_text([*EVENTS, other]))
    assert trace.problem is not None
    assert "2 processes launched kernels" in trace.problem


def test_launches_without_a_kernel_are_told(tmp_path: Path) -> None:
    """CUPTI was held by another profiler: no operator may pass for a kernel."""
    trace = read_text(tmp_path, kineto_text([one for one in EVENTS if one.get("pid") != 0]))
    assert (len(trace.kernels), trace.on_device) == (0, True)
    assert trace.problem is not None
    assert "launch calls, but no kernel was recorded" in trace.problem


# The same examples whatever the window's size: every edge falls somewhere else.
@given(cut=st.integers(0, len(TEXT.encode()) - 1), window=st.sampled_from([7, 64, 501, 2**20]))
@example(cut=len(TEXT.encode()) - 2, window=7)
@example(cut=TEXT.encode().index(b"]"), window=64)
def test_a_trace_cut_at_any_byte_gives_its_first_kernels_and_says_so(
    tmp_path_factory: pytest.TempPathFactory, cut: int, window: int
) -> None:
    data = TEXT.encode()[:cut]
    path = write(tmp_path_factory.mktemp("cut") / "t.json", data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "CHUNK_BYTES", window)
        try:
            trace = read_trace(path)
        except TraceError:
            assert cut <= TEXT.index("traceEvents") + len('traceEvents": [')
            return
    assert ran(trace) == GOOD[: len(ran(trace))]
    assert len(ran(trace)) == whole_kernels(data.decode())
    # Only the line break behind the closing brace may be missing without harm.
    assert (trace.problem is None) == (TEXT[cut:].strip() == "")
    assert trace.on_device


def whole_kernels(text: str) -> int:
    """How many kernels' lines a cut has left whole; one event stands on a line."""
    count = 0
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            count += "kernel" in str(json.loads(line.strip().rstrip(",")).get("cat"))
    return count


@given(cut=st.integers(1, len(gzip.compress(TEXT.encode(), mtime=0)) - 1))
def test_a_packed_trace_cut_at_any_byte_says_so(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "t.json.gz"
    path.write_bytes(gzip.compress(TEXT.encode(), mtime=0)[:cut])
    try:
        trace = read_trace(path)
    except TraceError:
        return
    assert ran(trace) == GOOD[: len(ran(trace))]
    assert trace.problem is not None
    assert "compressed data" in trace.problem


def test_a_cut_gzip_keeps_what_was_before_the_cut(tmp_path: Path) -> None:
    noise = [event("cpu_op", f"op{place * 7919 % 1000}", START_US + place, 0.5) for place in range(2_000)]
    packed = gzip.compress(kineto_text([*EVENTS, *noise]).encode())
    (tmp_path / "t.gz").write_bytes(packed[: len(packed) * 9 // 10])
    trace = read_trace(tmp_path / "t.gz")
    assert ran(trace) == GOOD
    assert trace.problem is not None
    assert trace.problem.startswith("the compressed data ends early; it is cut off")


def test_what_follows_the_trace_is_told(tmp_path: Path) -> None:
    trace = read_text(tmp_path, TEXT + TEXT)
    assert ran(trace) == GOOD
    assert trace.problem == f"something else follows the trace at byte {len(TEXT) + 3}"


def test_damage_inside_a_gzip_is_told(tmp_path: Path) -> None:
    noise = [event("cpu_op", f"op{place * 7919 % 1000}", START_US + place, 0.5) for place in range(20_000)]
    packed = bytearray(gzip.compress(kineto_text([*EVENTS, *noise]).encode()))
    packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "t.gz").write_bytes(packed)
    assert read_trace(tmp_path / "t.gz").problem


MALFORMED: list[tuple[str, str]] = [
    (
        "quotes in a name",
        '{"ph": "X", "cat": "python_function", "name": "{"device": "cpu"}(12): run", "ts": 1, "dur": 1}',
    ),
    ("garbage behind an event", '{"ph": "M", "name": "x"}}}}'),
    ("not closed", '{"ph": "X", "cat": "cpu_op", "name": "a", "args": {"x": 1}'),
    ("no value", '{"ph": "X", "cat": "cpu_op", "name": , "ts": 1}'),
    ("nested deeper than can be", '{"ph": "X", "args": ' + "[" * 100_000 + "}"),
]


@pytest.mark.parametrize("place", [3, len(EVENTS) - 1])
@pytest.mark.parametrize("window", [13, 64, 2**20])
@pytest.mark.parametrize(("broken"), [case[1] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_reading_goes_on_behind_an_event_that_is_no_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, window: int, place: int
) -> None:
    monkeypatch.setattr(reader, "CHUNK_BYTES", window)
    text = with_event(place, broken)
    trace = read_text(tmp_path, text)
    assert (ran(trace), len(trace.steps)) == (GOOD, 3)
    assert trace.problem is not None
    start = len(text[: text.index(broken)].encode())
    assert f"at least 1 events are no JSON and were left out (the first at byte {start}:" in trace.problem


def test_a_broken_last_event_costs_only_itself(tmp_path: Path) -> None:
    trace = read_text(tmp_path, with_event(len(EVENTS), '{"ph": "X", "cat": "kernel", "name": "a"b", "ts": 1}'))
    assert ran(trace) == GOOD
    assert trace.problem is not None
    assert "at least 1 events are no JSON" in trace.problem


def test_a_broken_event_at_the_end_of_a_cut_file_is_told_with_its_byte(tmp_path: Path) -> None:
    text = TEXT[: TEXT.index(LAST_KERNEL) + 30]
    trace = read_text(tmp_path, text)
    assert ran(trace) == GOOD[:-1]
    assert trace.problem is not None
    assert f"cut off or damaged from byte {len(text[:-30].encode())} on" in trace.problem


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "nan", "-nan", "inf", "-inf"])
def test_numbers_that_c_writes_cost_nothing(tmp_path: Path, value: str) -> None:
    odd = json.dumps(event("kernel", "odd", START_US + 9000, 2.0, pid=0, occupancy=0.5)).replace("0.5", value)
    trace = read_text(tmp_path, with_event(len(EVENTS), odd))
    assert (ran(trace), trace.problem) == ([*GOOD, "odd"], None)
    assert trace.repaired == (value.strip("-") in ("nan", "inf"))


def test_a_missing_comma_costs_nothing(tmp_path: Path) -> None:
    text = TEXT.replace(LAST_KERNEL, f"{LAST_KERNEL} {LAST_KERNEL}")
    trace = read_text(tmp_path, text)
    assert (ran(trace), trace.problem, trace.repaired) == ([*GOOD, "größe"], None, 1)


def test_backslashes_and_control_characters_in_names_cost_nothing(tmp_path: Path) -> None:
    one = json.dumps(event("kernel", "NAME", START_US + 9000, 2.0, pid=0))
    text = with_event(5, one.replace("NAME", "C:\\path\\unit\\new"))
    text = text.replace("attention", "att\x01en\ttion")
    trace = read_text(tmp_path, text)
    assert trace.problem is None
    assert trace.repaired == 1
    # \n is an escape that JSON knows: what the writer meant cannot be told.
    assert sorted(ran(trace)) == sorted(
        [*[name.replace("attention", "att\x01en\ttion") for name in GOOD], "C:\\path\\unit\new"]
    )


HOSTILE: dict[str, dict[str, Any]] = {
    "negative duration": {"dur": -1.0},
    "negative start": {"ts": -5.0},
    "start after the end of time": {"ts": 1e300},
    "start that no integer column holds": {"ts": 1e16},
    "a whole number too large for a float": {"ts": 10**400},
    "a year long": {"dur": 3.2e13},
    "text for a start": {"ts": "12"},
    "text for a duration": {"dur": "12"},
    "true for a duration": {"dur": True},
    "NaN for a start": {"ts": float("nan")},
    "no start": {"ts": None},
    "list for a name": {"name": ["x"]},
    "no name": {"name": None},
    "no complete event": {"ph": "B"},
}


@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE)
def test_an_event_that_cannot_be_used_is_left_out_and_counted(tmp_path: Path, damage: dict[str, Any]) -> None:
    bad = {**event("kernel", "bad", START_US + 9000, 2.0, pid=0), **damage}
    trace = read_text(tmp_path, kineto_text([*EVENTS, bad, bad]))
    assert ran(trace) == GOOD
    assert trace.problem is not None
    assert "2 events cannot be used and were left out" in trace.problem


@pytest.mark.parametrize(
    "args", [None, [], "x", {"stream": "7", "device": -3, "correlation": 2**70, "graph node id": "n"}]
)
def test_details_of_the_wrong_kind_are_unknown(tmp_path: Path, args: Any) -> None:
    bad = {**event("kernel", "bad", START_US + 9000, 2.0, pid="gpu", tid="stream"), "args": args}
    trace = read_text(tmp_path, kineto_text([*EVENTS, bad]))
    assert trace.problem is None
    last = list(trace.kernels.rows())[-1]
    assert (last.name, last.stream, last.device, last.graph_node, last.graph) == ("bad", None, None, None, False)


@pytest.mark.parametrize("bad", ["7", "null", '"text"', "[1, 2]"])
def test_an_event_that_is_no_object_is_counted(tmp_path: Path, bad: str) -> None:
    trace = read_text(tmp_path, with_event(4, bad))
    assert ran(trace) == GOOD
    assert trace.problem is not None
    assert "1 events cannot be used" in trace.problem


@pytest.mark.parametrize(
    "bad",
    ['{"cat": "python_function", "ph": "B"}', '{"ph": "X", "cat": ["kernel"]}', "{}", '{"ph": "f", "cat": "ac2g"}'],
)
def test_events_of_other_kinds_are_no_fault(tmp_path: Path, bad: str) -> None:
    trace = read_text(tmp_path, with_event(4, bad))
    assert (ran(trace), trace.problem) == (GOOD, None)


def test_a_step_whose_counts_are_absurd_is_no_step(tmp_path: Path) -> None:
    odd = event("user_annotation", f"execute_context_{'9' * 5000}(1)_generation_1(1)", START_US, 1.0)
    trace = read_text(tmp_path, kineto_text([*EVENTS, odd]))
    assert (len(trace.steps), trace.problem) == (3, None)


@given(st.binary(max_size=300))
def test_any_bytes_behind_the_head_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    head = TEXT[: TEXT.index(LAST_KERNEL)].encode()
    trace = read_trace(write(tmp_path_factory.mktemp("any") / "t.json", head + tail))
    assert ran(trace)[: len(GOOD) - 1] == GOOD[:-1]
    assert trace.problem is not None


def test_an_event_without_an_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(reader, "LONGEST_EVENT_BYTES", 5000)
    endless = '{"ph": "X", "name": "' + "x" * 50_000
    text = (
        TEXT[: TEXT.index(LAST_KERNEL)] + endless + ",\n" + kineto_text([{"ph": "X"}, EVENTS[-1]]).partition("[\n")[2]
    )
    trace = read_text(tmp_path, text)
    assert trace.problem is not None
    assert ran(trace)[:4] == GOOD[:4]


def execute(path: Path, *statements: str) -> Path:
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()
    return path


def test_a_foreign_database_is_an_error_that_names_its_tables(tmp_path: Path) -> None:
    path = execute(tmp_path / "t.sqlite", "CREATE TABLE users (id)")
    with pytest.raises(TraceError, match="no export of Nsight Systems: its tables are users"):
        read_trace(path)


def test_a_locked_database_is_an_error(tmp_path: Path) -> None:
    path = nsys(tmp_path / "t.sqlite", STEPS)
    with closing(sqlite3.connect(path)) as database:
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(TraceError, match="locked"):
            read_trace(path)


@pytest.mark.parametrize("cut", [16, 100, 2000, 4096])
def test_a_cut_database_is_an_error(tmp_path: Path, cut: int) -> None:
    path = nsys(tmp_path / "t.sqlite", STEPS)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)


def test_damage_inside_a_database_is_never_taken_for_a_whole_trace(tmp_path: Path) -> None:
    path = nsys(tmp_path / "t.sqlite", [decode(1, *["gemm"] * 40)] * 50)
    whole = path.read_bytes()
    for page in range(1, len(whole) // 4096):
        path.write_bytes(whole[: page * 4096] + b"\xa5" * 4096 + whole[(page + 1) * 4096 :])
        try:
            trace = read_trace(path)
        except TraceError:
            continue
        assert trace.problem is not None, page
        assert set(ran(trace)) <= {"gemm"}


def test_what_the_profiler_lost_is_told(tmp_path: Path) -> None:
    path = execute(
        nsys(tmp_path / "t.sqlite", STEPS),
        "CREATE TABLE DIAGNOSTIC_EVENT (timestamp, severity, text)",
        "INSERT INTO DIAGNOSTIC_EVENT VALUES (1, 1, 'Process 7 was started'), (2, 2, 'Not all CUDA events were collected')",
    )
    assert read_trace(path).problem == "the profiler says: Not all CUDA events were collected"


def test_reading_a_database_leaves_it_as_it_was(tmp_path: Path) -> None:
    path = nsys(tmp_path / "t.sqlite", STEPS)
    before = path.read_bytes()
    path.chmod(0o444)
    assert ran(read_trace(path)) == GOOD
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_graphs_recorded_whole_are_told(tmp_path: Path) -> None:
    path = nsys(tmp_path / "t.sqlite", [decode(1, "sample")])
    execute(
        path,
        "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start, end, graphId)",
        "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (1, 2, 3), (4, 5, 3)",
    )
    trace = read_trace(path)
    assert ran(trace) == ["sample"]
    assert trace.problem is not None
    assert "2 CUDA graph launches were recorded whole" in trace.problem
    assert "--cuda-graph-trace=node" in trace.problem


def test_an_export_without_kernels_is_not_whole(tmp_path: Path) -> None:
    trace = read_trace(nsys(tmp_path / "t.sqlite", STEPS, lacking=["CUPTI_ACTIVITY_KIND_KERNEL"]))
    assert trace.problem is not None
    assert "no table CUPTI_ACTIVITY_KIND_KERNEL" in trace.problem


@pytest.mark.parametrize("column", ["end", "start"])
def test_a_needed_column_that_is_missing_is_told(tmp_path: Path, column: str) -> None:
    trace = read_trace(nsys(tmp_path / "t.sqlite", STEPS, lacking=[column]))
    assert trace.problem is not None
    assert f"CUPTI_ACTIVITY_KIND_KERNEL has no column {column}" in trace.problem


@pytest.mark.parametrize(
    "damage", ["start = 'x'", "end = start - 5", "start = -1", "end = NULL", "demangledName = 99999", "start = 1.5"]
)
def test_rows_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path, damage: str) -> None:
    path = execute(
        nsys(tmp_path / "t.sqlite", STEPS), f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET {damage} WHERE rowid IN (1, 2)"
    )
    trace = read_trace(path)
    assert ran(trace) == GOOD[2:]
    assert trace.problem == "2 rows of CUPTI_ACTIVITY_KIND_KERNEL cannot be used"


def test_both_readers_know_a_kernels_file_from_its_first_bytes(tmp_path: Path) -> None:
    assert read_trace(kineto(tmp_path / "a.sqlite", STEPS)).source == "kineto"
    assert read_trace(nsys(tmp_path / "b.json", STEPS)).source == "nsys"
