"""Feeds damaged inputs to everything that reads: only the documented errors may come out, and each within seconds.

    python -m tests.benchmarks.fuzz --inputs 100000 [--reader NAME] [--seed N] [--only K]

Each input is a valid sample with a few seeded changes: bytes flipped, cut, doubled, spliced from another sample, words
that matter to the reader put in, and for JSON, SQLite and Parquet single values replaced by ones of other types and
sizes. `--only K` makes the K-th input alone, for a debugger. Exit status 1 where anything else came out.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gzip
import io
import json
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet

from abharness import commands, endpoints, envblock, record, samples, sse, storage, trace, traceview, waivers
from abharness.errors import LoadFailed, RecordError, TraceError, UsageError
from abharness.specload import load_spec, spec_warnings
from abharness.windows import Sampling
from tests.synthetic import Made, write_run
from tests.test_run import SPEC
from tests.traces import Ran, decode, kineto, nsys, prefill

HANG_S = 20
NUMBERS = [0, -1, 1, 2**31, -(2**31), 2**53, 2**63, -(2**63) - 1, 2**64, 10**30, 1e308, -1e308, 5e-324, 0.1, 1e999]
VALUES: list[Any] = [
    *NUMBERS,
    None,
    True,
    False,
    "",
    "x",
    "\ud800",
    "\0",
    "candidate",
    "1" * 400,
    [],
    {},
    [[]],
    {"": None},
]
COLUMN_TYPES = [pyarrow.string(), pyarrow.float32(), pyarrow.int8(), pyarrow.uint64(), pyarrow.bool_(), pyarrow.null(),
                pyarrow.list_(pyarrow.int64()), pyarrow.binary(), pyarrow.timestamp("ns")]  # fmt: skip
RAW_JSON = [b"NaN", b"-Infinity", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b'"\\ud800"', b"1e400", b"\xff\xfe", b"\0"]


@dataclass
class Reader:
    """Something that reads.

    Attributes:
        made: Valid inputs.
        read: Reads one; what it raises beyond `allowed` is a fault.
        words: Texts that matter to it.
        change: Changes an input knowing its form; None: bytes only.
    """

    made: list[bytes]
    read: Callable[[bytes], object]
    allowed: tuple[type[Exception], ...] = ()
    words: tuple[bytes, ...] = ()
    change: Callable[[random.Random, bytes], bytes] | None = None


def damaged(draw: random.Random, reader: Reader) -> bytes:
    """One input: a sample with one to six changes."""
    data = draw.choice(reader.made)
    if reader.change is not None and draw.random() < 0.6:
        for _ in range(draw.choice((1, 1, 2, 3))):
            data = reader.change(draw, data)
        if draw.random() < 0.7:
            return data
    for _ in range(draw.randint(1, 6)):
        data = _bytes_changed(draw, data, reader)
    return data


def _bytes_changed(draw: random.Random, data: bytes, reader: Reader) -> bytes:
    at = draw.randrange(len(data) + 1)
    length = min(len(data) - at, int(2 ** draw.uniform(0, 8)))
    match draw.randrange(7):
        case 0 if at < len(data):
            return data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at] + draw.randbytes(draw.randint(1, 8)) + data[at:]
        case 2:
            return data[:at] + data[at + length :]
        case 3:
            return data[:at] + data[at : at + length] * draw.choice((2, 3, 50)) + data[at + length :]
        case 4:
            other = draw.choice(reader.made)
            return data[:at] + other[draw.randrange(len(other) + 1) :]
        case 5 if reader.words:
            return data[:at] + draw.choice(reader.words) + data[at + draw.choice((0, length)) :]
    return data[:at]


def _json_changed(draw: random.Random, data: bytes) -> bytes:
    """A JSON text with one value replaced, renamed, doubled or dropped."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places: list[tuple[Any, Any]] = []
    queue = [document]
    while queue:
        one = queue.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else []
        places += [(one, key) for key in keys]
        queue += [one[key] for key in keys]
    if not places:
        return data
    holder, key = draw.choice(places)
    match draw.randrange(5):
        case 0 | 1:
            holder[key] = draw.choice(VALUES)
        case 2:
            del holder[key]
        case 3:
            other, name = draw.choice(places)
            with contextlib.suppress(KeyError, IndexError):
                holder[key] = json.loads(json.dumps(other[name]))
        case 4 if isinstance(holder, dict):
            holder[draw.choice(["x", "", "schema_version", "a" * 300])] = holder.pop(key)
    try:
        text = json.dumps(document).encode()
    except (ValueError, RecursionError):
        return data
    return text.replace(b'"x"', draw.choice(RAW_JSON), 1) if draw.random() < 0.2 else text


def _lines_changed(draw: random.Random, data: bytes) -> bytes:
    lines = data.split(b"\n")
    place = draw.randrange(len(lines))
    lines[place] = _json_changed(draw, lines[place])
    return b"\n".join(lines)


def _packed(change: Callable[[random.Random, bytes], bytes]) -> Callable[[random.Random, bytes], bytes]:
    def changed(draw: random.Random, data: bytes) -> bytes:
        try:
            return gzip.compress(change(draw, gzip.decompress(data)), 1)
        except (OSError, EOFError):
            return data

    return changed


def _table_changed(draw: random.Random, data: bytes) -> bytes:
    """A Parquet file with a column of other values or of another type, dropped or renamed, or other metadata."""
    try:
        table = pyarrow.parquet.read_table(pyarrow.BufferReader(data))
    except Exception:  # damaged before: whatever Arrow says of it
        return data
    if not table.num_columns:
        return data
    place = draw.randrange(table.num_columns)
    name = table.schema.names[place]
    match draw.randrange(6):
        case 0:
            table = table.drop_columns([name])
        case 1:
            kind = draw.choice(COLUMN_TYPES)
            table = table.set_column(place, name, pyarrow.nulls(table.num_rows, kind))
        case 2:
            value = draw.choice([*NUMBERS, "x", "", None, True, b"\xff", [1], ["x", None], float("nan"), {"a": 1}])
            with contextlib.suppress(pyarrow.ArrowException, OverflowError, ValueError, TypeError):
                table = table.set_column(place, name, pyarrow.array([value] * table.num_rows))
        case 3:
            table = table.rename_columns([draw.choice(["x", "name", "uuid"]) if one == name else one
                                          for one in table.schema.names])  # fmt: skip
        case 4:
            head = {key: _json_changed(draw, value) if value[:1] == b"{" else value
                    for key, value in (table.schema.metadata or {}).items()}  # fmt: skip
            table = table.replace_schema_metadata(head)
        case 5:
            table = pyarrow.concat_tables([table.slice(0, draw.randrange(table.num_rows + 1)), table])
    out = io.BytesIO()
    try:
        pyarrow.parquet.write_table(table, out)
    except pyarrow.ArrowException:
        return data
    return out.getvalue()


def _database_changed(draw: random.Random, data: bytes) -> bytes:
    """A database with single cells replaced, a table or column dropped or renamed."""
    try:
        with contextlib.closing(sqlite3.connect(":memory:")) as database:
            database.deserialize(data)
            tables = [row[0] for row in database.execute("select name from sqlite_master where type = 'table'")]
            table = draw.choice(tables)
            column = draw.choice([row[1] for row in database.execute(f'pragma table_info("{table}")')])
            value = draw.choice([0, -1, 2**31, 2**63 - 1, -(2**63), 1e308, None, "", "x", b"\xff\0", "\0", "1" * 400])
            match draw.randrange(5):
                case 0 | 1:
                    which = draw.choice(["1", "rowid % 2", "rowid = 1"])
                    database.execute(f'update "{table}" set "{column}" = ? where {which}', (value,))
                case 2:
                    database.execute(f'drop table "{table}"')
                case 3:
                    database.execute(f'alter table "{table}" rename column "{column}" to "x"')
                case 4:
                    database.execute(f'delete from "{table}" where rowid % 2')
            database.commit()
            return database.serialize()
    except (sqlite3.Error, IndexError, OverflowError, ValueError):
        return data


def readers(folder: Path) -> dict[str, Reader]:
    """Every reader with its samples; `folder` gets the files that are read."""
    run = write_run(folder / "run", {"baseline": [Made(speed=100.0)], "candidate": [Made(speed=104.0)]})
    launch = run / "launches" / "1-candidate"
    steps = [prefill(64, "gemm"), decode(2, "gemm", Ran("attention", graph=True, node=3)), decode(2, "gemm")]
    written = kineto(folder / "a.json", steps)
    packed = kineto(folder / "a.json.gz", steps)
    database = nsys(folder / "a.sqlite", steps)
    trace.write_kernels(folder / "k.parquet", trace.read_trace(written))
    numbers = {"sm_clock_mhz": 1980.0, "mem_clock_mhz": 2619.0, "power_w": 300.0, "temperature_c": 40.0, "utilization": 0.9,
               "memory_used_bytes": 2**33, "energy_j": 5.0, "power_limit_w": 700.0}  # fmt: skip
    samples.write_samples(folder / "t.parquet", [
        samples.Sample(t_s=number / 10, uuid="GPU-1", reasons=("sw_power_cap",) if number % 2 else (), **numbers)
        for number in range(20)
    ])  # fmt: skip

    def at(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        path = folder / "in" / name
        path.parent.mkdir(exist_ok=True)

        def run_on(data: bytes) -> object:
            path.write_bytes(data)
            return read(path)

        return run_on

    def spec_of(path: Path) -> None:
        spec = load_spec(path)
        spec_warnings(spec)
        commands.warnings(spec)

    def overridden(data: bytes) -> None:
        with contextlib.suppress(UsageError):
            load_spec(spec_path, data.decode("utf-8", "surrogateescape").split("\x1f"))

    spec_path = folder / "base.yaml"
    spec_path.write_text(SPEC)

    def traced(path: Path) -> None:
        found = trace.read_trace(path)
        traceview.text([path], [found], None, 15)
        json.loads(traceview.as_json([path], [found], None))

    def sampled(path: Path) -> None:
        found = samples.by_gpu(samples.read_samples(path))
        sampling = Sampling(
            interval_s=0.1, started_s=0.0, ended_s=2.0, samples=20, cpu_s=0.1, energy_period_s={"GPU-1": 0.1}
        )
        samples.summarise({"GPU-1": found.get("GPU-1", [])}, sampling, 0.3, 1.5, {"GPU-1": []})

    def streamed(data: bytes) -> None:
        draw = random.Random(len(data))
        exchange = sse.Exchange(0, submitted_s=1.0, sent_s=1.1, status=200, ended_s=9.0)
        place = 0
        while place < len(data):
            size = draw.randint(1, 200)
            exchange.reads.append((2.0 + place / 1e6, data[place : place + size]))
            place += size
        found = sse.to_record(exchange, prompt_sha256="0" * 64, requested_input_len=3, requested_output_len=4)
        json.dumps(found.model_dump(mode="json"), allow_nan=False)

    def answered(call: Callable[[], object]) -> Callable[[bytes], object]:
        def read(data: bytes) -> object:
            with mock.patch.object(endpoints, "_fetch", return_value=data):
                return call()

        return read

    def environment(data: bytes) -> None:
        envblock.parse_environ(data)
        envblock.judge_block(data, (4096, 4096 + len(data)), envblock.ExecLayout(2, data.count(b"\0"), (4096, 4100)))
        envblock.find_layout(data, data[len(data) // 2 :])
        envblock.shows_title(data, 3)

    def lines(kind: Any) -> Callable[[Path], object]:
        return lambda path: storage.read_lines(path.with_name(path.name.removesuffix(".gz")), kind)

    def model(name: str, kind: Any, path: Path) -> Reader:
        return Reader([path.read_bytes()], at(f"{name}.json", lambda path: storage.read_model(path, kind)), (RecordError,),
                      tuple(RAW_JSON), _json_changed)  # fmt: skip

    requests, answers = (launch / "requests.jsonl").read_bytes(), (launch / "gsm8k.jsonl").read_bytes()
    stream = b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in [
        {"choices": [{"text": "a", "token_ids": [1]}]}, {"choices": [{"delta": {"content": "b", "reasoning": "c"}}]},
        {"choices": [{"text": "", "finish_reason": "length"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}, {"error": {"message": "m", "code": 500}},
    ]) + b": ping\n\nevent: error\ndata: x\n\ndata: [DONE]\n\n"  # fmt: skip
    metrics = b"".join(b'# HELP %s x\n%s{model="a b",e="}"} 12.5\n' % (name.encode(), name.encode())
                       for name in endpoints._COUNTERS.values())  # fmt: skip
    experiments = Path(__file__).parent.parent.parent / "experiments"
    specs = [SPEC.encode(), *(path.read_bytes() for path in sorted(experiments.glob("*.yaml")))]
    yaml_words = (b"&a ", b"*a", b"<<: ", b"!!int ", b"!!timestamp ", b"!!binary ", b"- ", b"{", b"}", b"[", b"? ", b"|\n",
                  b"0x", b"1e9999", b"2026-13-45", b"null", b"\t", b"%YAML 1.2\n", b"---\n", b"...\n", b"\xc3", b"\x85",
                  b"decode", b"server:", b"env:", b"9" * 5000, b"[" * 200, b"a: {" * 120)  # fmt: skip
    keys = (b"server.model=", b"workloads[0].repeats=", b"workloads.decode.output_len=", b"design.primary=", b"trace=",
            b"variants.candidate.env.X=", b"server.env=", b"[", b"]", b".", b"=", b"\x1f", b"null", b"[1, 2]", b"{a: 1}",
            b"!!int ", b"9" * 400)  # fmt: skip
    return {
        "spec": Reader(specs, at("s.yaml", spec_of), (UsageError,), yaml_words),
        "set": Reader([b"server.model=./m\x1fworkloads[0].repeats=2", b"design.primary=decode[1]/tpot", b"trace={}"],
                      overridden, (UsageError,), keys),
        "experiment.json": model("experiment", record.RunRecord, run / "experiment.json"),
        "launch.json": model("launch", record.LaunchRecord, launch / "launch.json"),
        "evidence.json": model("evidence", record.Evidence, launch / "evidence.json"),
        "requests.jsonl": Reader([requests], at("r.jsonl", lines(record.RequestLine)), (RecordError,), tuple(RAW_JSON),
                                 _lines_changed),
        "gsm8k.jsonl": Reader([answers], at("g.jsonl", lines(record.AnswerRecord)), (RecordError,), tuple(RAW_JSON),
                              _lines_changed),
        "requests.jsonl.gz": Reader([gzip.compress(requests)], at("z.jsonl.gz", lines(record.RequestLine)), (RecordError,),
                                    (b"\x1f\x8b\x08\0",), _packed(_lines_changed)),
        "trace.json": Reader([written.read_bytes()], at("t.json", traced), (TraceError,), tuple(RAW_JSON), _json_changed),
        "trace.json.gz": Reader([packed.read_bytes()], at("t.json.gz", traced), (TraceError,), (b"\x1f\x8b\x08\0",),
                                _packed(_json_changed)),
        "trace.sqlite": Reader([database.read_bytes()], at("t.sqlite", traced), (TraceError,), (b"SQLite format 3\0",),
                               _database_changed),
        "kernels.parquet": Reader([(folder / "k.parquet").read_bytes()], at("k.parquet", traced), (TraceError, RecordError),
                                  (b"PAR1",), _table_changed),
        "telemetry.parquet": Reader([(folder / "t.parquet").read_bytes()], at("m.parquet", sampled), (RecordError,),
                                    (b"PAR1",), _table_changed),
        "stream": Reader([stream], streamed, (), (b"data: ", b"\n\n", b"\r", b"[DONE]", b'"choices":', *RAW_JSON)),
        "environ": Reader([b"PATH=/bin\0A=1\0B=a=b\nc\0", b"=x\0Y=\0", b"A\0\0"], environment, (), (b"\0", b"=", b"\0\0")),
        "metrics": Reader([metrics], answered(lambda: endpoints.read_counters("x")), (),
                          (b"}", b"{", b" ", b"NaN", b"1e999", b"\n", b"vllm:")),
        "server_info": Reader([b'{"vllm_config": {"a": {"b": 1}}, "vllm_env": {"X": "1"}}'],
                              answered(lambda: endpoints.server_info("x")), (), tuple(RAW_JSON), _json_changed),
        "tokenize": Reader([json.dumps({"tokens": list(range(200)), "max_model_len": 4096}).encode()],
                           answered(lambda: endpoints.token_pool("x", "m")), (LoadFailed,), tuple(RAW_JSON), _json_changed),
        "allow": Reader([b"undeclared_difference:env.LEAK", b"order_confounded", b"client_bound:decode"],
                        lambda data: waivers.parse_waivers([data.decode("utf-8", "surrogateescape")]), (UsageError,),
                        (b":", b"*", b"order_confounded", b"undeclared_difference", b"\xff", b"\0")),
    }  # fmt: skip


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """An input that takes too long is a fault: the alarm ends it."""

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError(f"not read within {HANG_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(HANG_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(name: str, reader: Reader, numbers: range, seed: int) -> dict[str, tuple[int, int, str]]:
    """Feed one reader.

    Returns:
        Faults by the place they came from: how often, the number of the first input, its traceback.
    """
    faults: dict[str, tuple[int, int, str]] = {}
    for number in numbers:
        data = damaged(random.Random(f"{seed}/{name}/{number}"), reader)
        try:
            with limited():
                reader.read(data)
        except reader.allowed:
            continue
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            key = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
            many, first, text = faults.get(key, (0, number, "".join(traceback.format_exception(error)[-6:])))
            faults[key] = (many + 1, first, text)
    return faults


def main() -> int:
    """Feed the readers and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--reader", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    arguments = parser.parse_args()
    faulthandler.enable()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    numbers = range(arguments.inputs) if arguments.only is None else range(arguments.only, arguments.only + 1)
    total: Counter[str] = Counter()
    try:
        for name, reader in readers(folder).items():
            if arguments.reader and name not in arguments.reader:
                continue
            started_s = time.monotonic()
            faults = fuzz(name, reader, numbers, arguments.seed)
            total[name] = len(faults)
            print(
                f"{name}: {len(numbers)} inputs, {time.monotonic() - started_s:.0f} s, {len(faults)} faults", flush=True
            )
            for key, (many, first, text) in faults.items():
                print(
                    f"  {key}: {many} times, first with --reader {name} --seed {arguments.seed} --only {first}\n{text}"
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if sum(total.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
