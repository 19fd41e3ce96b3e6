"""Run folders damaged in any way: read whole, read with what was lost named, or refused; never a traceback."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from abharness.cli import main
from abharness.errors import RecordError
from abharness.record import ClientLoad, Evidence, Finding, LaunchRecord, RequestLine, RunRecord, ServerCounters
from abharness.runs import read_run
from abharness.storage import append_lines, read_lines, read_model
from tests.synthetic import Made, write_run

FILES = (
    "experiment.json",
    "launches/1-candidate/launch.json",
    "launches/1-candidate/evidence.json",
    "launches/1-candidate/requests.jsonl",
    "launches/1-candidate/gsm8k.jsonl",
)
RAW = st.sampled_from([
    "NaN", "-Infinity", "null", "true", "-1", "0", "1", "1e308", "-1e308", "1e999", "5e-324", "1" + "0" * 30, "9" * 5000,
    '""', '"x"', '"\\ud800"', '"\\u0000"', "[]", "{}", "[[]]", '[{"a": 1}]', '{"baseline": {}}', '"candidate"',
    '"completed"', '"failed"', '"undeclared_difference"', '"decode[1]/tpot"', '["baseline"]', "2", '"abba"', '"ab"',
])  # fmt: skip
# Each example copies a folder and compares it, a tenth of a second.
few = settings(max_examples=settings().max_examples // 3)
FORMATS = st.sampled_from(["text", "markdown", "json"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in order, of two launches a variant; its verdict is `no regression`."""
    busy = {"counters": ServerCounters(prefix_cache_queries=64, prefix_cache_hits=0)}
    findings = [Finding(code="queueing", message="requests wait")]
    launches = {
        "baseline": [Made(speed=100.0, **busy), Made(speed=100.4)],
        "candidate": [Made(speed=108.2, findings=findings), Made(speed=108.9, **busy)],
    }
    folder = tmp_path_factory.mktemp("whole") / "run"
    run = write_run(folder, launches, "design.launches_per_variant=2", "workloads.gsm8k.min_exact_match=0.1")
    assert compare(run) == 0
    return run


@pytest.fixture(scope="module")
def copied(
    whole: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], contextlib.AbstractContextManager[Path]]:
    """Copies of that run to be damaged."""
    target = tmp_path_factory.mktemp("damaged") / "run"

    @contextlib.contextmanager
    def copy_of() -> Iterator[Path]:
        shutil.copytree(whole, target)
        try:
            yield target
        finally:
            shutil.rmtree(target)

    return copy_of


def compare(run: Path, form: str = "text") -> int:
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["compare", str(run), "--format", form, "--all-metrics"])
    out.seek(0)
    text = out.read()
    assert code in (0, 1, 2, 3, 4), err.getvalue()
    if code == 2:
        assert err.getvalue().startswith("error: "), err.getvalue()
        assert str(run) in err.getvalue(), "the file is named"
    elif form == "json":
        json.loads(text, parse_constant=pytest.fail)
    assert "nan" not in text.lower().split()
    return code


def read(run: Path) -> None:
    with contextlib.suppress(RecordError):
        read_run(run)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        found += places(value, (*path, key))
    return found


def with_raw(data: Any, path: tuple[Any, ...], raw: str | None) -> str:
    """The JSON text with one value replaced by other text, or left out."""
    if not path:
        return raw or ""
    result = copy.deepcopy(data)
    target = result
    for part in path[:-1]:
        target = target[part]
    if raw is None:
        del target[path[-1]]
        return json.dumps(result)
    target[path[-1]] = "@@@"
    return json.dumps(result).replace('"@@@"', raw)


@few
@given(st.data(), FORMATS)
def test_one_value_replaced_or_left_out(copied: Any, data: st.DataObject, form: str) -> None:
    with copied() as run:
        path = run / data.draw(st.sampled_from(FILES))
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        number = data.draw(st.integers(0, len(lines) - 1))
        record = json.loads(lines[number])
        where = data.draw(st.sampled_from(places(record)))
        lines[number] = with_raw(record, where, data.draw(st.none() | RAW))
        path.write_text("\n".join(lines) + "\n")
        read(run)
        compare(run, form)


@few
@given(st.data())
def test_several_values_replaced(copied: Any, data: st.DataObject) -> None:
    with copied() as run:
        for name in data.draw(st.lists(st.sampled_from(FILES), min_size=1, max_size=4)):
            path = run / name
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            number = data.draw(st.integers(0, len(lines) - 1))
            try:
                record = json.loads(lines[number])
            except ValueError:
                continue
            where = data.draw(st.sampled_from(places(record)))
            lines[number] = with_raw(record, where, data.draw(RAW))
            path.write_text("\n".join(lines) + "\n")
        compare(run)


@few
@given(st.sampled_from(FILES), st.integers(0, 10**6), st.binary(max_size=6), st.integers(0, 6), FORMATS)
def test_bytes_overwritten_inserted_or_lost(copied: Any, name: str, at: int, put: bytes, lost: int, form: str) -> None:
    with copied() as run:
        raw = (run / name).read_bytes()
        at %= len(raw)
        (run / name).write_bytes(raw[:at] + put + raw[at + lost :])
        read(run)
        compare(run, form)


@few
@given(st.sampled_from(FILES), st.integers(2, 10**6))
def test_a_file_cut_short_gives_no_verdict_or_is_refused(copied: Any, name: str, cut: int) -> None:
    """Records are refused; of lines the whole ones are kept, and what is missing invalidates its cell."""
    with copied() as run:
        raw = (run / name).read_bytes()
        (run / name).write_bytes(raw[: -(cut % (len(raw) - 1) + 1) - 1])
        assert compare(run) == (3 if name.endswith(".jsonl") else 2)


@pytest.mark.parametrize(
    ("name", "code"), list(zip(FILES, (2, 4, 3, 3, 3), strict=True)), ids=[name.rpartition("/")[2] for name in FILES]
)
def test_a_file_that_is_missing_or_a_folder(name: str, code: int, copied: Any) -> None:
    with copied() as run:
        (run / name).unlink()
        assert compare(run) == code
        (run / name).mkdir()
        assert compare(run) in (2, 4)


@few
@given(st.lists(st.sampled_from(["doubled", "swapped", "lost"]), min_size=1, max_size=3), st.data())
def test_lines_doubled_or_lost_give_no_verdict_and_their_order_does_not_matter(
    copied: Any, changes: list[str], data: st.DataObject
) -> None:
    with copied() as run:
        path = run / data.draw(st.sampled_from(FILES[3:]))
        lines = path.read_text().splitlines(keepends=True)
        kept = list(lines)
        for change in changes:
            at = data.draw(st.integers(0, len(kept) - 1))
            if change == "doubled":
                kept.insert(0, kept[at])
            elif change == "swapped":
                kept.append(kept.pop(at))
            elif len(kept) > 1:
                del kept[at]
        path.write_text("".join(kept))
        assert compare(run) == (0 if sorted(kept) == sorted(lines) else 3)


@given(st.binary(max_size=60) | st.recursive(RAW, lambda inner: inner.map("[{}]".format)).map(str.encode))
@example(b'{"code": "x", "message": "m", "fatal": ' + b"9" * 5000 + b"}")
@example(b"[" * 100_000)
@example(b'{"schema_version": true}')
@example(b'{"schema_version": 1' + b"0" * 5000 + b"}")
def test_any_file_is_read_or_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(raw)
    for kind in (RunRecord, LaunchRecord, Finding, ClientLoad):
        with pytest.raises(RecordError, match=r"record\.json"):
            read_model(path, kind)
        records, warnings = read_lines(path, kind)
        assert records == []
        assert len(warnings) == sum(bool(line.strip()) for line in raw.split(b"\n"))
    with contextlib.suppress(RecordError):
        read_model(path, Evidence)


@given(
    st.lists(st.builds(Finding, code=st.text(max_size=5), message=st.text(max_size=20)), max_size=5),
    st.integers(0, 500),
)
def test_lines_cut_anywhere_keep_every_whole_line(tmp_path: Path, findings: list[Finding], cut: int) -> None:
    path = tmp_path / "lines.jsonl"
    path.unlink(missing_ok=True)
    append_lines(path, findings)
    raw = path.read_bytes()
    assert read_lines(path, Finding) == (findings, [])
    kept = raw[: max(0, len(raw) - cut)]
    path.write_bytes(kept)
    records, warnings = read_lines(path, Finding)
    whole_lines = kept.count(b"\n")
    # A line that lacks only its newline is whole.
    assert records[:whole_lines] == findings[:whole_lines]
    assert len(records) + len(warnings) == whole_lines + bool(kept.rpartition(b"\n")[2])
    assert records == findings[: len(records)]


def test_every_line_of_a_request_file_is_checked_on_its_own(whole: Path) -> None:
    lines, warnings = read_lines(whole / FILES[3], RequestLine)
    assert (len(lines), warnings) == (4, [])


@pytest.mark.parametrize(
    ("key", "value"), [("spec", "order"), ("plan", ["baseline", "candidate"]), ("plan", []), ("schema_version", True)]
)
def test_a_run_record_that_was_changed_after_the_run_is_refused(key: str, value: Any, copied: Any) -> None:
    with copied() as run:
        path = run / "experiment.json"
        record = json.loads(path.read_text())
        if value == "order":
            record["spec"]["design"]["order"] = "random"
        else:
            record[key] = value
        path.write_text(json.dumps(record))
        assert compare(run) == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("submitted_s", -1.0),
        ("first_token_s", 1e9),
        ("last_token_s", 0.0),
        ("sent_s", 1e9),
        ("prompt_tokens", None),
        ("first_token_s", None),
        ("last_token_s", None),
        ("prompt_sha256", "\ud800"),
    ],
)
def test_a_request_timed_out_of_order_or_not_counted_gives_its_cell_no_verdict(
    field: str, value: Any, copied: Any
) -> None:
    with copied() as run:
        path = run / FILES[3]
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[2]["request"][field] = value
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert compare(run) == 3


def test_a_cell_whose_window_is_not_that_of_its_requests_gives_no_verdict(copied: Any) -> None:
    with copied() as run:
        path = run / FILES[1]
        record = json.loads(path.read_text())
        record["cells"][0]["ended_s"] /= 2
        path.write_text(json.dumps(record))
        assert compare(run) == 3
