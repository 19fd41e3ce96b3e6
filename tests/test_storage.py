"""Records and files: written whole or not at all, read carefully."""

from __future__ import annotations

import errno
import gzip
import json
import math
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from abharness import storage
from abharness.cli import main
from abharness.errors import RecordError
from abharness.record import ClientLoad, Evidence, Finding, RunRecord
from abharness.storage import append_lines, read_lines, read_model, write_model, write_text_atomic
from tests.test_run import spec_file

LOAD = ClientLoad(cpu_share=0.5, loop_lag_p50_s=0, loop_lag_p99_s=0, chunks_per_s=1)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_h3_a_full_disk_leaves_the_old_file_and_names_the_path(tiny_disk: Path) -> None:
    path = tiny_disk / "launch.json"
    write_text_atomic(path, "old")
    with pytest.raises(OSError, match=r"launch\.json") as caught:
        write_text_atomic(path, "x" * 2**21)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_text() == "old"
    assert [entry.name for entry in tiny_disk.iterdir()] == ["launch.json"]


def test_h3_a_run_is_refused_where_there_is_no_room(
    tiny_disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(spec_file(tmp_path)), "-o", str(tiny_disk)]) == 4
    err = capsys.readouterr().err
    assert str(tiny_disk) in err
    assert "GiB needed for caches, logs and records" in err
    assert list(tiny_disk.iterdir()) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_h2_nan_and_infinity_are_never_written(value: float, tmp_path: Path) -> None:
    with pytest.raises(ValidationError):
        ClientLoad(cpu_share=value, loop_lag_p50_s=0, loop_lag_p99_s=0, chunks_per_s=1)
    with pytest.raises(ValueError, match="JSON"):
        write_model(tmp_path / "x.json", LOAD.model_copy(update={"cpu_share": value}))
    assert list(tmp_path.iterdir()) == []


def test_a_record_reads_back_as_it_was_written(tmp_path: Path) -> None:
    write_model(tmp_path / "x.json", LOAD)
    assert read_model(tmp_path / "x.json", ClientLoad) == LOAD
    json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)


def test_h1_lines_survive_a_half_written_last_one(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append_lines(path, [LOAD] * 57)
    with path.open("a") as out:
        out.write('{"cpu_share": 0.5, "loop_l')
    records, warnings = read_lines(path, ClientLoad)
    assert records == [LOAD] * 57
    assert len(warnings) == 1
    assert f"{path}:58: line dropped" in warnings[0]


def test_garbage_between_good_lines_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    good = LOAD.model_dump_json()
    path.write_bytes(b"\n".join([good.encode(), b"\xff\xfe", b"[" * 100_000, b'{"a": 1}', b"null", b"", good.encode()]))
    records, warnings = read_lines(path, ClientLoad)
    assert records == [LOAD, LOAD]
    assert len(warnings) == 4


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", '{"schema_version": 2}', '{"schema_version": "1"}', '{"x": 1}']
)
def test_a_damaged_or_newer_record_is_refused_with_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=r"experiment\.json"):
        read_model(path, RunRecord)


def test_a_missing_file_is_a_record_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no\.json"):
        read_model(tmp_path / "no.json", Evidence)
    with pytest.raises(RecordError, match=r"no\.jsonl"):
        read_lines(tmp_path / "no.jsonl", Finding)


def test_lines_that_were_packed_for_publishing_are_read(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    load = ClientLoad(cpu_share=0.1, loop_lag_p50_s=0.0, loop_lag_p99_s=0.0, chunks_per_s=1.0)
    append_lines(path, [load, load])
    plain = path.read_bytes()
    packed = tmp_path / "requests.jsonl.gz"
    packed.write_bytes(gzip.compress(plain))
    path.unlink()
    assert read_lines(path, ClientLoad) == ([load, load], [])
    packed.write_bytes(gzip.compress(plain)[:-9])
    with pytest.raises(RecordError, match=r"requests\.jsonl"):
        read_lines(path, ClientLoad)


numbers = st.one_of(
    st.integers(-(10**18), 10**18),
    st.floats(allow_nan=False),
    st.sampled_from([1e15, -1e15, 1.1e15, 1e16, 10**15, 10**15 + 1]),
)
documents = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8) | st.sampled_from(["1e99", " 9999999999999999", "NaN"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), documents, max_size=4), st.sampled_from([None, 1]), st.booleans())
@example({"a": 123456789012345.6, "b": [-1234567890123456]}, None, False)
@example({"a": "0123456789abcdef1e5"}, None, True)
@example({"a": 1e-300, "b": 5e-324, "c": -0.0}, None, False)
def test_the_quick_parser_reads_what_the_careful_one_does(
    data: dict[str, object], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(data, indent=indent, ensure_ascii=ascii_only).encode(errors="surrogatepass")

    def outcome(parse: Callable[[bytes], object]) -> str:
        try:
            return repr(parse(text))
        except ValueError as error:
            return f"refused: {error}"

    def careful(raw: bytes) -> object:
        return json.loads(
            raw, parse_constant=storage._no_constants, parse_float=storage._number, parse_int=storage._integer
        )

    assert outcome(storage._loads) == outcome(careful)


@pytest.mark.parametrize(
    "number", ["1e16", "1E16", "1.5e+300", "-2e15", "1e999", "99999999999999999999", "-1234567890123456.5"]
)
def test_a_number_out_of_range_is_refused_wherever_it_stands(number: str, tmp_path: Path) -> None:
    for text in (
        f'{{"a":{number}}}',
        f'{{"a": {number}}}',
        f'{{"a": [{number}]}}',
        f'{{"a":\n{number}\n}}',
        f'{{"a":\t{number}}}',
    ):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(RecordError, match="out of range"):
            storage.read_json(tmp_path / "x.json")
