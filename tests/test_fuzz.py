"""Some hundred damaged inputs for every reader; `python -m tests.benchmarks.fuzz --inputs 100000` feeds many more."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest

from abharness import endpoints
from abharness.errors import LoadFailed, RecordError, TraceError
from abharness.samples import Sample, read_samples, write_samples
from abharness.trace import read_kernels, read_trace, write_kernels
from tests.benchmarks.fuzz import fuzz, readers
from tests.traces import decode, kineto, nsys

INPUTS = {"spec": 60, "set": 100}
"""Fewer for those that take long; 300 for the others."""

NAMES = [
    "spec", "set", "experiment.json", "launch.json", "evidence.json", "requests.jsonl", "gsm8k.jsonl", "requests.jsonl.gz",
    "trace.json", "trace.json.gz", "trace.sqlite", "kernels.parquet", "telemetry.parquet", "stream", "environ", "metrics",
    "server_info", "tokenize", "allow",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return readers(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", NAMES)
def test_only_the_documented_errors_come_out(name: str, made: Any) -> None:
    assert fuzz(name, made[name], range(INPUTS.get(name, 300)), seed=1) == {}


def test_every_reader_is_fed(made: Any) -> None:
    assert list(made) == NAMES


# What fell out of more inputs than these.


@pytest.mark.parametrize(
    ("column", "values"),
    [("t_s", [None, None]), ("t_s", [float("nan"), 1.0]), ("sm_clock_mhz", ["fast", "slow"]), ("power_w", [1e308, 1.0]),
     ("uuid", [None, "GPU-1"]), ("reasons", [["a", None], []]), ("memory_used_bytes", [0.5, 1.5])],
)  # fmt: skip
def test_samples_of_another_kind_are_refused(column: str, values: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "telemetry.parquet"
    sample = Sample(t_s=1.0, uuid="GPU-1", sm_clock_mhz=1.0, mem_clock_mhz=1.0, power_w=1.0, temperature_c=1.0,
                    utilization=1.0, memory_used_bytes=1, reasons=(), energy_j=1.0, power_limit_w=1.0)  # fmt: skip
    write_samples(path, [sample, sample])
    assert read_samples(path) == [sample, sample]
    table = pyarrow.parquet.read_table(path)
    place = table.schema.get_field_index(column)
    pyarrow.parquet.write_table(table.set_column(place, column, pyarrow.array(values)), path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_samples(path)


@pytest.mark.parametrize("head", [
    {"steps": [{"index": 0, "start_s": 0.1, "context_requests": 0, "context_tokens": 0, "generation_requests": {"a": 1},
                "generation_tokens": 1}]},
    {"steps": []}, {"source": "perf"}, {"problem": 5}, {"on_device": None}, {"steps": None}, {"repaired": "x"},
])  # fmt: skip
def test_a_kernel_table_with_another_head_is_refused(head: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "k.parquet"
    write_kernels(path, read_trace(kineto(tmp_path / "t.json", [decode(1, "gemm")])))
    read_kernels(path)
    table = pyarrow.parquet.read_table(path)
    changed = {**json.loads(table.schema.metadata[b"abharness.trace"]), **head}
    pyarrow.parquet.write_table(table.replace_schema_metadata({b"abharness.trace": json.dumps(changed)}), path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_kernels(path)


@pytest.mark.parametrize(
    ("name", "values"),
    [("stream", pyarrow.array([None], pyarrow.uint64())), ("start_ns", pyarrow.array([1e308])),
     ("duration_ns", pyarrow.array([-1])), ("duration_ns", pyarrow.array([2**63 - 1]))],
)  # fmt: skip
def test_a_kernel_table_of_other_numbers_is_refused(name: str, values: Any, tmp_path: Path) -> None:
    path = tmp_path / "k.parquet"
    write_kernels(path, read_trace(kineto(tmp_path / "t.json", [decode(1, "gemm")])))
    table = pyarrow.parquet.read_table(path)
    place = table.schema.get_field_index(name)
    pyarrow.parquet.write_table(table.set_column(place, name, values), path)
    with pytest.raises(RecordError, match="cannot be read"):
        read_kernels(path)


def test_a_time_that_is_no_number_of_nanoseconds_costs_its_event_only(tmp_path: Path) -> None:
    path = kineto(tmp_path / "t.json.gz", [decode(1, "gemm"), decode(1, "other")])
    whole = read_trace(path)
    document = json.loads(gzip.decompress(path.read_bytes()))
    event = next(one for one in document["traceEvents"] if one.get("name") == "other" and one.get("cat") == "kernel")
    event["ts"] = 1.7e308
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    assert len(read_trace(path).kernels) == len(whole.kernels) - 1


def test_texts_of_another_type_in_an_export_name_nothing(tmp_path: Path) -> None:
    path = nsys(tmp_path / "t.sqlite", [decode(1, "gemm")])
    with closing(sqlite3.connect(path)) as database:
        database.execute("update StringIds set value = ?", (b"\xff\0",))
        database.commit()
    assert read_trace(path).problem is not None


def test_a_damaged_schema_that_sqlite_cannot_even_quote_is_told(tmp_path: Path) -> None:
    path = nsys(tmp_path / "t.sqlite", [decode(1, "gemm")])
    path.write_bytes(path.read_bytes().replace(b"CREATE TABLE", b"CREATE \xe5ABLE"))
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)


@pytest.mark.parametrize("answer", [b"[" * 100_000, b'{"a":' * 100_000, b'{"tokens": [true, false]}', b"[1]"])
def test_a_server_that_answers_anything_is_a_failed_load_or_an_absent_answer(answer: bytes) -> None:
    with mock.patch.object(endpoints, "_fetch", return_value=answer):
        with pytest.raises(LoadFailed):
            endpoints.token_pool("http://x", "m")
        info, absent = endpoints.server_info("http://x")
    assert info is None
    assert absent
