"""Whole traces: what ran, when, and in which engine step; the same from either profiler."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from abharness.errors import RecordError
from abharness.trace import Kernel, Trace, read_kernels, read_trace, write_kernels
from tests.traces import (
    START_US,
    Made,
    Ran,
    decode,
    event,
    kineto,
    kineto_events,
    kineto_text,
    nsys,
    prefill,
    step,
    unannotated,
    write,
)

STEPS = [
    prefill(512, "gemm", Ran("Memcpy HtoD", kind="memcpy", duration_us=1.25), "attention"),
    decode(1, Ran("gemm", graph=True, node=3), Ran("attention", graph=True, node=5), Ran("sample", after=True)),
    step((0, 0), (0, 0)),
    decode(2, Ran("gemm", graph=True, node=3), Ran("Memset", kind="memset"), Ran("sample", after=True)),
    step((1, 64), (2, 2), "mixed_attention"),
]


@pytest.fixture(params=["json", "json.gz", "sqlite"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Sequence[Made]], Trace]:
    """Writes steps as a file of one kind and reads it. No name tells the kind."""

    def read(steps: Sequence[Made]) -> Trace:
        path = (nsys if request.param == "sqlite" else kineto)(tmp_path / f"t.{request.param}", steps)
        return read_trace(path.rename(tmp_path / "trace"))

    return read


def in_steps(trace: Trace) -> list[tuple[str, int | None]]:
    return [(one.name, one.step) for one in trace.kernels.rows()]


def test_every_kernel_belongs_to_the_step_that_launched_it(made: Callable[[Sequence[Made]], Trace]) -> None:
    """The device runs two steps behind, and sampling is launched after its step's annotation has ended."""
    trace = made(STEPS)
    assert (trace.problem, trace.unsegmented, trace.on_device, trace.repaired) == (None, None, True, 0)
    assert in_steps(trace) == [
        ("gemm", 0),
        ("Memcpy HtoD", 0),
        ("attention", 0),
        ("gemm", 1),
        ("attention", 1),
        ("sample", 1),
        ("gemm", 3),
        ("Memset", 3),
        ("sample", 3),
        ("mixed_attention", 4),
    ]
    assert [one.phase for one in trace.steps] == ["prefill", "decode", None, "decode", "mixed"]
    first = trace.steps[0]
    assert (first.index, first.context_requests, first.context_tokens) == (0, 1, 512)
    assert (first.start_s, first.generation_requests, first.generation_tokens) == (0.0, 0, 0)
    assert trace.steps[1].start_s == pytest.approx(1000e-6, abs=2e-9)


def test_a_row_has_what_the_profiler_saw(made: Callable[[Sequence[Made]], Trace]) -> None:
    trace = made([decode(1, "gemm", Ran("attention", 12.75, graph=True, node=9, stream=13, device=1))])
    gemm, attention = trace.kernels.rows()
    assert gemm == Kernel(
        name="gemm",
        start_s=pytest.approx(2610e-6, abs=2e-9),
        duration_s=pytest.approx(4.5e-6),
        kind="kernel",
        stream=7,
        device=0,
        graph=False,
        graph_node=None,
        step=0,
    )
    assert (attention.stream, attention.device, attention.graph, attention.graph_node) == (13, 1, True, 9)
    assert attention.duration_s == pytest.approx(12.75e-6)


def test_a_graph_is_seen_from_its_launch_where_nodes_have_no_number(made: Callable[[Sequence[Made]], Trace]) -> None:
    trace = made([decode(1, Ran("gemm", graph=True), Ran("attention", graph=True), Ran("sample", after=True))])
    assert [(one.graph, one.graph_node) for one in trace.kernels.rows()] == [(True, None), (True, None), (False, None)]


def test_kernels_launched_before_the_first_annotation_have_no_step(made: Callable[[Sequence[Made]], Trace]) -> None:
    assert in_steps(made([unannotated("early"), decode(1, "gemm")])) == [("early", None), ("gemm", 0)]


def test_without_annotations_nothing_has_a_step_and_the_trace_says_why(made: Callable[[Sequence[Made]], Trace]) -> None:
    trace = made([unannotated("gemm"), unannotated("attention")])
    assert (trace.steps, in_steps(trace), trace.problem) == ((), [("gemm", None), ("attention", None)], None)
    assert trace.unsegmented is not None
    assert "annotation" in trace.unsegmented


def test_the_annotation_of_older_vllm_makes_steps_of_unknown_phase(made: Callable[[Sequence[Made]], Trace]) -> None:
    trace = made([Made("execute_new_1_cached_3", (Ran("gemm"),)), Made("prepare_inputs", (Ran("copy"),))])
    assert in_steps(trace) == [("gemm", 0), ("copy", 0)]
    only = trace.steps[0]
    assert (only.phase, only.context_requests, only.generation_tokens) == (None, None, None)


@pytest.mark.parametrize("ranges", [True, False])
def test_without_correlations_the_ranges_on_the_stream_decide(tmp_path: Path, ranges: bool) -> None:
    path = kineto(tmp_path / "t.json", [decode(1, "gemm"), decode(1, "gemm", "more")], correlated=False, ranges=ranges)
    trace = read_trace(path)
    if ranges:
        assert in_steps(trace) == [("gemm", 0), ("gemm", 1), ("more", 1)]
    else:
        assert in_steps(trace) == [("gemm", None), ("gemm", None), ("more", None)]
        assert trace.unsegmented is not None
        assert "launch" in trace.unsegmented


def test_without_correlations_a_kernel_behind_every_range_has_no_step(tmp_path: Path) -> None:
    """Sampling lies outside of the range, and nothing says whose it is."""
    path = kineto(tmp_path / "t.json", [decode(1, "gemm", Ran("sample", after=True))], correlated=False)
    assert in_steps(read_trace(path)) == [("gemm", 0), ("sample", None)]


@pytest.mark.parametrize("complete", [True, False])
def test_ranges_that_do_not_name_their_annotation_count_only_if_all_are_there(tmp_path: Path, complete: bool) -> None:
    """Equal names, no link: with one range missing, the others could be any step's."""
    events = kineto_events([decode(1, "gemm"), decode(1, "gemm")], correlated=False)
    for one in events:
        one["args"].pop("External id", None)
    if not complete:
        events.remove(next(one for one in events if one.get("cat") == "gpu_user_annotation"))
    trace = read_trace(write(tmp_path / "t.json", kineto_text(events)))
    assert [one.step for one in trace.kernels.rows()] == ([0, 1] if complete else [None, None])


def test_ranges_on_the_device_alone_make_steps(tmp_path: Path) -> None:
    events = [one for one in kineto_events([prefill(8, "gemm"), decode(1, "gemm")]) if one.get("pid") == 0]
    trace = read_trace(write(tmp_path / "t.json", kineto_text(events)))
    assert in_steps(trace) == [("gemm", 0), ("gemm", 1)]
    assert [one.phase for one in trace.steps] == ["prefill", "decode"]


def test_another_threads_step_counts_only_where_the_own_thread_has_none(tmp_path: Path) -> None:
    events = kineto_events([decode(1, "gemm")])
    own = [{**one, "tid": 7} for one in kineto_events([decode(5, "gemm")]) if one.get("cat") == "user_annotation"]
    own[0]["ts"] = own[0]["ts"] + 5  # nearer to the launch, but on another thread
    worker = event("cuda_runtime", "cudaLaunchKernel", START_US + 900, 1.0, tid=99, correlation=7000)
    late = event("kernel", "late", START_US + 9000, 1.0, pid=0, tid=7, device=0, stream=7, correlation=7000)
    trace = read_trace(write(tmp_path / "t.json", kineto_text([*events, *own, worker, late])))
    assert in_steps(trace) == [("gemm", 0), ("late", 1)]


def test_a_cpu_only_trace_shows_operators_without_those_they_called(tmp_path: Path) -> None:
    events = [
        event("user_annotation", step((0, 0), (1, 1)).annotation or "", 100.0, 900.0),
        event("cpu_op", "aten::linear", 200.0, 100.0),
        event("cpu_op", "aten::addmm", 210.0, 80.0),
        event("cpu_op", "aten::copy_", 220.0, 30.0),
        event("cpu_op", "aten::copy_", 260.0, 10.0),
        event("cpu_op", "aten::relu", 300.0, 7.0),
        event("cpu_op", "aten::linear", 205.0, 50.0, tid=2),
    ]
    trace = read_trace(write(tmp_path / "t.json", kineto_text(events, device=None)))
    assert (trace.on_device, trace.problem) == (False, None)
    times = [(one.name, round(one.duration_s * 1e6), one.step, one.kind) for one in trace.kernels.rows()]
    assert times == [
        ("aten::linear", 20, 0, "op"),
        ("aten::linear", 50, 0, "op"),
        ("aten::addmm", 40, 0, "op"),
        ("aten::copy_", 30, 0, "op"),
        ("aten::copy_", 10, 0, "op"),
        ("aten::relu", 7, 0, "op"),
    ]


def test_an_operator_never_has_less_than_no_time(tmp_path: Path) -> None:
    """The clock's rounding may let a child outlast its parent, or begin with it and stand before it in the file."""
    events = [
        event("cpu_op", "child", 100.0, 12.0),
        event("cpu_op", "parent", 100.0, 30.0),
        event("cpu_op", "short", 200.0, 10.0),
        event("cpu_op", "outlasts", 201.0, 12.0),
        event("cpu_op", "more", 205.0, 5.0),
    ]
    trace = read_trace(write(tmp_path / "t.json", kineto_text(events, device=None)))
    times = {one.name: round(one.duration_s * 1e6) for one in trace.kernels.rows()}
    assert times == {"child": 12, "parent": 18, "short": 0, "outlasts": 7, "more": 5}


def test_the_bare_array_of_chromes_format_is_a_trace_too(tmp_path: Path) -> None:
    text = kineto_text(kineto_events([decode(1, "gemm")]))
    array = text[text.index("[\n  {") : text.index("\n  ],") + 4]
    assert in_steps(read_trace(write(tmp_path / "t.json", array))) == [("gemm", 0)]


def test_names_keep_their_characters(tmp_path: Path) -> None:
    events = kineto_events([decode(1, "größe<λ>", 'quo"ted\\')])
    assert [one.name for one in read_trace(write(tmp_path / "e.json", kineto_text(events))).kernels.rows()] == [
        "größe<λ>",
        'quo"ted\\',
    ]
    raw = kineto_text(events).replace("\\u00f6", "ö").replace("\\u00df", "ß").replace("\\u03bb", "λ")
    assert next(read_trace(write(tmp_path / "r.json", raw)).kernels.rows()).name == "größe<λ>"


@pytest.mark.parametrize(
    "lacking",
    [["graphNodeId", "graphId"], ["streamId", "deviceId"], ["demangledName"], ["text"], ["CUPTI_ACTIVITY_KIND_MEMCPY"]],
)
def test_other_versions_of_nsight_systems_lack_columns_and_tables(tmp_path: Path, lacking: list[str]) -> None:
    trace = read_trace(nsys(tmp_path / "t.sqlite", [decode(1, "gemm"), decode(1, "gemm")], lacking=lacking))
    assert trace.problem is None
    one = next(trace.kernels.rows())
    assert one.name == "gemm"
    if "streamId" in lacking:
        assert (one.stream, one.device) == (None, None)
    assert len(trace.steps) == (1 if "text" in lacking else 2)


def test_two_processes_of_one_export_may_use_the_same_correlations(tmp_path: Path) -> None:
    path = nsys(tmp_path / "t.sqlite", [decode(1, "gemm")])
    other = 77 << 24
    with closing(sqlite3.connect(path)) as database:
        for table, column, add in (("KERNEL", "globalPid", 0), ("RUNTIME", "globalTid", 5)):
            table = f"CUPTI_ACTIVITY_KIND_{table}"
            rows = [
                dict(zip(names(database, table), row, strict=True))
                for row in database.execute(f"SELECT * FROM {table}")
            ]
            for row in rows:
                row |= {column: other + add, "start": row["start"] + 50_000, "end": row["end"] + 50_000}
                marks = ", ".join("?" for _ in row)
                database.execute(f"INSERT INTO {table} VALUES ({marks})", list(row.values()))
        database.commit()
    # The other process has no annotation: its kernel belongs to no step, whatever its correlation is.
    assert in_steps(read_trace(path)) == [("gemm", 0), ("gemm", None)]


def names(database: sqlite3.Connection, table: str) -> list[Any]:
    return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]


def test_parquet_keeps_a_trace_whole(made: Callable[[Sequence[Made]], Trace], tmp_path: Path) -> None:
    trace = replace(made([*STEPS, decode(1, Ran("odd", stream=3, device=2))]), problem="cut", repaired=2)
    write_kernels(tmp_path / "kernels.parquet", trace)
    assert read_kernels(tmp_path / "kernels.parquet") == trace
    assert list(read_kernels(tmp_path / "kernels.parquet").kernels.rows()) == list(trace.kernels.rows())
    assert read_trace(tmp_path / "kernels.parquet") == trace
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_parquet_keeps_a_trace_without_rows(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.json", kineto_text([])))
    write_kernels(tmp_path / "k.parquet", trace)
    assert read_kernels(tmp_path / "k.parquet") == trace


def test_a_kernel_file_that_cannot_be_read_is_an_error_of_the_record(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "text").write_text("not parquet")
    pyarrow.parquet.write_table(pyarrow.table({"name": ["x"]}), tmp_path / "other")
    pyarrow.parquet.write_table(
        pyarrow.table({"name": ["x"]}).replace_schema_metadata({"abharness.trace": '{"schema_version": 99}'}),
        tmp_path / "later",
    )
    for name, said in (
        ("text", "cannot be read"),
        ("other", "cannot be read"),
        ("none", "cannot be read"),
        ("later", "99"),
    ):
        with pytest.raises(RecordError, match=said):
            read_kernels(tmp_path / name)
