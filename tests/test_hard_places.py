"""Runs on a disk that is full, read-only or slow, and under a clock that steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from abharness import prepare
from abharness import server as server_module
from abharness.beside import Beside
from abharness.cli import main
from abharness.server import VllmServer
from abharness.storage import append_lines, read_lines
from tests.conftest import MakeCommand, free_port, ready
from tests.kills import Scene
from tests.test_run import leftovers, spec_file
from tests.test_storage import LOAD

SMALL = ["--only", "decode", "--only", "gsm8k", "--set", "workloads.decode.max_concurrency=1",
         "--set", "workloads.decode.output_len=4", "--set", "workloads.gsm8k.num_questions=3"]  # fmt: skip


class Disk:
    """A small file system in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mount(self, options: str) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.folder], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.decode().strip()}")

    def change(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", self.folder], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    made = Disk(folder)
    yield made
    subprocess.run(["umount", folder], check=False, capture_output=True)


@pytest.fixture
def no_space_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before the start is passed: the disk fills up later."""
    monkeypatch.setattr(prepare, "MIN_FREE_BYTES", 0)


def completed(folder: Path) -> dict[Path, bytes]:
    found = {path: path.read_bytes() for path in folder.rglob("launches/*/launch.json")}
    return {path: raw for path, raw in found.items() if json.loads(raw)["status"] == "completed"}


@pytest.mark.usefixtures("no_space_needed")
@pytest.mark.parametrize("pages", [3, 9, 16, 24])
def test_a_disk_that_fills_up_loses_nothing_measured_and_leaves_nothing_running(
    pages: int, disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.mount(f"size={4 * pages}k")
    argv = ["run", str(spec_file(tmp_path)), "-o", str(disk.folder), *SMALL]
    code = main(argv)
    err = capsys.readouterr().err
    assert code == 5, err
    assert "No space left on device" in err
    assert str(disk.folder) in err, "the path is what has to be known"
    assert "hint: free some space" in err
    assert leftovers() == []
    kept = completed(disk.folder)
    lines = [path.read_bytes() for path in disk.folder.rglob("*.jsonl")]
    assert all(raw.endswith(b"\n") or not raw for raw in lines), "no half line is left"
    disk.change("size=64m")
    assert main([*argv, "--resume"]) in (0, 1, 3), capsys.readouterr().err
    assert {path: path.read_bytes() for path in kept} == kept
    assert len(completed(disk.folder)) == 2


def test_lines_that_do_not_fit_are_not_begun(disk: Disk) -> None:
    disk.mount("size=8k")
    path = disk.folder / "x.jsonl"
    append_lines(path, [LOAD] * 10)
    with pytest.raises(OSError, match=r"x\.jsonl"):
        append_lines(path, [LOAD] * 500)
    append_lines(path, [LOAD])
    assert read_lines(path, type(LOAD)) == ([LOAD] * 11, [])


def test_a_read_only_results_folder_is_told_before_anything_starts(
    disk: Disk, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_space_needed: None
) -> None:
    disk.mount("size=16m")
    argv = ["run", str(spec_file(tmp_path)), "-o", str(disk.folder), *SMALL]
    assert main(argv) in (0, 1, 3)
    next(disk.folder.rglob("1-candidate/launch.json")).unlink()
    disk.change("ro")
    before = sorted(disk.folder.rglob("*"))
    capsys.readouterr()
    for more in ([], ["--resume"]):
        assert main([*argv, *more]) == 2
        err = capsys.readouterr().err
        assert "Read-only file system" in err
        assert str(disk.folder) in err
        assert "hint: " in err
        assert ": start" not in err
    assert sorted(disk.folder.rglob("*")) == before
    assert main(["compare", str(disk.folder)]) in (3, 4), "what is there can still be read"


@pytest.fixture(scope="module")
def slow_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    library = tmp_path_factory.mktemp("slow") / "slow_disk.so"
    source = Path(__file__).parent / "slow_disk.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def test_a_slow_disk_is_never_waited_for_while_something_is_timed(
    slow_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    scene = Scene(tmp_path / "scene", [str(spec_file(tmp_path)), *SMALL], free_port())
    for name, value in {"LD_PRELOAD": str(slow_disk), "SLOW_BELOW": str(scene.folder / "results"), "SLOW_S": "0.3",
                        "SLOW_NOTES": str(notes)}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    # The server gets the slow disk too.
    more = [part for name in ("LD_PRELOAD", "SLOW_BELOW", "SLOW_S", "SLOW_NOTES")
            for part in ("--set", f"server.env.{name}={os.environ[name]}")]  # fmt: skip
    assert scene.start(*more).wait(180) in (0, 1, 3), scene.stderr.read_text()
    rows = [line.split(" ", 3) for line in notes.read_text().splitlines()]
    assert {Path(row[3]).name.lstrip(".").split(".")[0] for row in rows} >= {"requests", "gsm8k", "launch", "evidence"}
    assert not any(row[3].endswith("server.log") for row in rows), "a server does not wait for its log"
    timed, asked = 0, 0
    for path in scene.folder.rglob("launch.json"):
        record = json.loads(path.read_text())
        for cell in record["cells"]:
            inside = [row for row in rows if cell["started_s"] - 0.3 < float(row[0]) < cell["ended_s"]]
            assert inside == []
            timed += 1
        for run in record["accuracy"]:
            inside = [row for row in rows if run["started_s"] < float(row[0]) < run["ended_s"]]
            assert all(row[1] != row[2] for row in inside), "not in the thread that reads the answers"
            asked += 1
    assert (timed, asked) == (2, 2)


def test_calls_beside_the_load_return_at_once_keep_their_order_and_tell_what_failed() -> None:
    gate = threading.Event()
    made: list[int] = []

    def call(number: int) -> None:
        gate.wait()
        made.append(number)
        if number == 2:
            raise OSError("full")

    def load() -> None:
        with Beside(call) as beside:
            for number in range(4):
                beside.put(number)
            assert made == [], "nobody waited"
            gate.set()

    with pytest.raises(OSError, match="full"):
        load()
    assert made == [0, 1, 2]


# Clocks. The harness sees one that is off by what a file says; the kernel's, which stamps files, stays as it is.

STEPPING = """\
import datetime, time
_file, _time, _real = {file!r}, time.time, datetime.datetime
def _off():
    try:
        return float(open(_file).read())
    except (OSError, ValueError):
        return 0.0
time.time = lambda: _time() + _off()
class _Stepped(_real):
    @classmethod
    def now(cls, tz=None):
        return _real.now(tz) + datetime.timedelta(seconds=_off())
datetime.datetime = _Stepped
"""


@pytest.fixture
def stepping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file; the wall clock of every Python started from now on is off by the seconds in it."""
    site = tmp_path / "site"
    site.mkdir()
    file = tmp_path / "offset"
    (site / "sitecustomize.py").write_text(STEPPING.format(file=str(file)))
    monkeypatch.setenv("PYTHONPATH", str(site))
    return file


@pytest.mark.parametrize("step_s", [-86400.0, 86400.0])
def test_a_clock_that_steps_during_a_run_changes_nothing_that_is_measured(
    step_s: float, stepping: Path, tmp_path: Path
) -> None:
    scene = Scene(tmp_path / "scene", [str(spec_file(tmp_path)), *SMALL], free_port())
    harness = scene.start()
    stop = threading.Event()

    def step() -> None:
        for number in range(1000):
            stepping.write_text(str(step_s * (number % 2)))
            if stop.wait(0.7):
                return

    thread = threading.Thread(target=step)
    thread.start()
    try:
        code = harness.wait(120)
    finally:
        stop.set()
        thread.join()
    assert code in (0, 1, 3), scene.stderr.read_text()
    for path in scene.folder.rglob("launch.json"):
        record = json.loads(path.read_text())
        assert record["status"] == "completed"
        assert record["findings"] == []
        assert 0 < record["ready_s"] < record["wall_s"] < 1000
        for cell in record["cells"]:
            assert 0 < cell["ended_s"] - cell["started_s"] < 1000


def test_resume_finds_the_newest_run_after_the_clock_was_set_back(stepping: Path, tmp_path: Path) -> None:
    scene = Scene(tmp_path / "scene", [str(spec_file(tmp_path)), *SMALL, "--only", "decode"], free_port())
    names = []
    for offset in (7200.0, 0.0, 0.0):
        stepping.write_text(str(offset))
        assert scene.start().wait(120) in (0, 1, 3), scene.stderr.read_text()
        names.append({path.name for path in (scene.folder / "results" / "fake").iterdir()})
    (first,), (second,), (third,) = names[0], names[1] - names[0], names[2] - names[1]
    assert first < second < third
    record = scene.folder / "results" / "fake" / third / "launches" / "1-candidate" / "launch.json"
    record.unlink()
    assert scene.start("--resume").wait(120) in (0, 1, 3)
    assert record.exists()


def test_files_are_told_from_older_ones_when_the_clock_is_set_back(
    make_command: MakeCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = server_module.file_clock
    with VllmServer(make_command()) as server:
        ready(server)
        # As if the clock that stamps files was set back: what is written from now on seems older than the launch.
        back = real(server.command.log_path.parent) - 3600
        for cache in server.command.cache_dirs.values():
            (cache / "late").write_text("x")
            os.utime(cache / "late", (back, back))
        default = server.command.watched_defaults[0]
        default.mkdir(parents=True)
        (default / "late").write_text("x")
        os.utime(default / "late", (back, back))
        monkeypatch.setattr(server_module, "file_clock", lambda folder: real(folder) - 3600)
        assert [cache.older for cache in server.cache_evidence() if cache.older] == []
        assert [Path(path).name for path in server.defaults_touched()] == ["late"]
