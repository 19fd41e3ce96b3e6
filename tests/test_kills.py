"""The harness is killed: nothing of it stays, nothing measured is lost, and `--resume` ends in a whole report."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from abharness.cli import main
from tests.conftest import free_port
from tests.kills import Point, Scene
from tests.test_run import spec_file

SMALL = [
    part
    for key in ("decode.max_concurrency=1", "decode.output_len=4", "decode.num_prompts=3", "prefill.input_lens=[8]",
                "prefill.num_prompts=1", "gsm8k.num_questions=3")
    for part in ("--set", f"workloads.{key}")
]  # fmt: skip
DRAW = random.Random(5)

POINTS = [
    *(Point(delay_s=round(DRAW.uniform(0.2, 6.0), 2)) for _ in range(5)),
    Point(line=r"baseline: start$"),
    Point(line=r"baseline: start$", delay_s=0.4),
    Point(line=r"verify before_load"),
    Point(line=r"decode .* warm-up"),
    Point(line=r"decode .* x1$", delay_s=0.1),
    Point(line=r"gsm8k 3 questions", delay_s=0.1),
    Point(line=r"baseline: stop"),
    Point(file="launches/0-baseline/.*.json.*"),
    Point(file="launches/0-baseline/launch.json"),
    Point(line=r"launch 2/2 candidate: start"),
    Point(line=r"launch 2/2 candidate: stop", delay_s=0.2),
    Point(file="comparison.json"),
]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(**faults: object) -> Scene:
        made.append(Scene(tmp_path, [str(spec_file(tmp_path, shm_leak=True, **faults)), *SMALL], free_port()))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes():
            process.kill()


def resumed(scene: Scene) -> str:
    """Go on to the end: the report must be whole. Returns what was said."""
    harness = scene.start("--resume")
    code = harness.wait(120)
    err = scene.said()
    if "nothing to resume" in err:
        code = scene.start().wait(120)
        err = scene.said()
    # A busy machine may keep the harness from a verdict, never from a report.
    assert code in (0, 1, 3), err
    return err


def check_whole(scene: Scene) -> None:
    (folder,) = (scene.folder / "results" / "fake").iterdir()
    states = {
        path.parent.name: json.loads(path.read_text())["status"] for path in folder.glob("launches/*/launch.json")
    }
    assert states == {"0-baseline": "completed", "1-candidate": "completed"}
    assert (folder / "report.md").read_text()
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
    assert main(["compare", str(folder)]) in (0, 1, 3)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_after_a_kill_nothing_stays_and_resume_ends_the_run(point: Point, scene: Callable[..., Scene]) -> None:
    run = scene()
    harness = run.start()
    run.wait_for(point, harness)
    run.kill(harness, guard=False)
    assert run.wait_until_clear(60) == []
    kept, lines = run.records(), run.measured()
    err = resumed(run)
    assert "a killed run left" not in err
    assert {path: digest for path, digest in run.records().items() if path in kept} == kept
    assert run.measured() >= lines
    check_whole(run)
    assert run.left() == []


@pytest.mark.parametrize("point", [POINTS[6], POINTS[9], POINTS[14]], ids=str)
def test_where_the_guard_was_killed_too_resume_clears_up_itself(point: Point, scene: Callable[..., Scene]) -> None:
    run = scene()
    harness = run.start()
    assert run.wait_for(point, harness)
    run.kill(harness, guard=True)
    time.sleep(1.0)
    servers = [process.pid for process in run.processes()]
    assert servers, "nobody has stopped the server"
    run.note_shared_memory()
    assert run.shared
    kept = run.records()
    err = resumed(run)
    assert "a killed run left launch" in err
    assert f"pid {servers[0]}" in err or f"pid {servers[-1]}" in err
    assert {path: digest for path, digest in run.records().items() if path in kept} == kept
    check_whole(run)
    assert run.left() == []


def test_a_run_of_another_folder_clears_up_too(scene: Callable[..., Scene], tmp_path: Path) -> None:
    run = scene()
    harness = run.start()
    assert run.wait_for(Point(line=r"decode .* x1$"), harness)
    run.kill(harness, guard=True)
    other = Scene(tmp_path / "other", run.arguments, free_port())
    other.tmp.rmdir()
    other.tmp.symlink_to(run.tmp)
    assert other.start("--only", "prefill").wait(120) in (0, 1, 3)
    assert "a killed run left launch" in other.said()
    assert run.left() == []


def test_verify_env_is_guarded_as_a_run_is(scene: Callable[..., Scene]) -> None:
    run = scene(slow_start_s=30)
    run.events = False
    argv = ["-m", "abharness.cli", "verify-env", run.arguments[0], "--set", f"server.port={run.port}"]
    with run.stderr.open("wb") as err:
        harness = psutil.Popen([os.sys.executable, *argv], env={**os.environ, "TMPDIR": str(run.tmp)}, stderr=err)  # type: ignore[attr-defined]
    assert run.wait_for(Point(line="started", delay_s=1.0), harness)
    run.kill(harness, guard=False)
    assert run.wait_until_clear(60) == []


def test_a_server_that_ignores_polite_signals_is_ended_by_the_guard(scene: Callable[..., Scene]) -> None:
    run = scene(ignore_signals=["SIGINT", "SIGTERM"], engine_survives="stubborn")
    harness = run.start()
    assert run.wait_for(Point(line=r"decode .* x1$"), harness)
    run.kill(harness, guard=False)
    assert run.wait_until_clear(90) == []


def test_two_harnesses_never_work_on_one_run_folder_and_the_living_one_is_not_touched(
    scene: Callable[..., Scene], tmp_path: Path
) -> None:
    run = scene()
    harness = run.start("--set", "workloads.decode.num_prompts=300")
    assert run.wait_for(Point(line=r"decode .* x1$"), harness)
    second = Scene(tmp_path / "second", run.arguments, free_port())
    (second.folder / "results").symlink_to(run.folder / "results")
    second.tmp.rmdir()
    second.tmp.symlink_to(run.tmp)
    port = ["--set", f"server.port={run.port}"]
    assert second.start("--resume", "--set", "workloads.decode.num_prompts=300", *port).wait(60) == 2
    assert "in use by another abharness run" in second.said()
    assert harness.poll() is None
    harness.send_signal(signal.SIGINT)
    assert harness.wait(60) == 130
    assert '"interrupted"' in next((run.folder / "results").rglob("0-baseline/launch.json")).read_text()
    assert run.wait_until_clear(10) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_guard_outlives_signals_to_the_whole_group_and_ends_with_the_run(
    number: signal.Signals, scene: Callable[..., Scene]
) -> None:
    run = scene()
    harness = run.start("--set", "workloads.decode.num_prompts=400")
    assert run.wait_for(Point(line=r"decode .* x1$"), harness)
    (guard,) = [one for one in run.processes() if "abharness.guard" in one.cmdline()]
    assert os.getsid(guard.pid) == guard.pid, "Ctrl-C of the terminal does not reach it"
    before = guard.cpu_times()
    guard.send_signal(number)
    time.sleep(0.3)
    assert guard.is_running()
    assert guard.status() == psutil.STATUS_SLEEPING
    assert guard.cpu_times() == before, "it waits and does nothing else"
    harness.send_signal(number)
    assert harness.wait(60) == 130
    assert run.wait_until_clear(10) == []


def test_torn_records_are_set_aside_and_run_again(scene: Callable[..., Scene]) -> None:
    run = scene()
    assert run.start().wait(120) in (0, 1, 3)
    (folder,) = (run.folder / "results" / "fake").iterdir()
    torn = folder / "launches" / "1-candidate" / "launch.json"
    torn.write_text(torn.read_text()[:700])
    (folder / "experiment.json").write_text('{"schema_version": 1, "exper')
    (folder / ".comparison.json.ab_c9xyz").write_text("{")
    kept = {path: digest for path, digest in run.records().items() if "0-baseline" in path}
    err = resumed(run)
    assert "the launch is run again" in err
    assert {path: digest for path, digest in run.records().items() if path in kept} == kept
    assert (folder / "attempts" / "1-candidate.1" / "requests.jsonl").exists()
    assert (folder / "attempts" / "experiment.json.1").exists()
    check_whole(run)


def test_a_record_of_a_newer_abharness_is_never_set_aside(scene: Callable[..., Scene]) -> None:
    run = scene()
    assert run.start().wait(120) in (0, 1, 3)
    record = next((run.folder / "results").rglob("1-candidate/launch.json"))
    newer = {**json.loads(record.read_text()), "schema_version": 999}
    record.write_text(json.dumps(newer))
    assert run.start("--resume").wait(120) == 2
    assert "schema version 999" in run.said()
    assert json.loads(record.read_text()) == newer


def test_a_folder_that_is_no_runs_is_never_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from abharness import claims

    for name in ("ab-0123456z", "ab-01234567x", "precious"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".lock").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / ".lock").touch()
    (tmp_path / "ab-89abcdef").symlink_to(tmp_path / "target")
    own = tmp_path / "ab-01234567"
    own.mkdir()
    (own / ".lock").touch()
    (own / "held.json").write_text('{"kernel": [')
    before = sorted(path.name for path in tmp_path.iterdir() if path != own)
    claims.clear_dead_runs(tmp_path, pytest.fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "target" / ".lock").exists()


def test_a_process_that_was_given_the_pid_of_a_dead_server_is_not_touched(tmp_path: Path) -> None:
    from abharness import claims
    from abharness.procfs import start_ticks

    with subprocess.Popen(["sleep", "60"], start_new_session=True) as stranger:
        try:
            ticks = start_ticks(stranger.pid)
            assert ticks is not None
            scratch = tmp_path / "ab-01234567"
            with claims.holding(scratch) as held:
                held.note(claims.HeldLaunch(
                    sentinel=("ABHARNESS_LAUNCH", "01234567-0"), host="127.0.0.1", port=1,
                    root=(stranger.pid, ticks - 1), known=[(stranger.pid, ticks - 1)],
                    shared_before=[], shared_used=[], log=str(scratch / "server.log"), keep_log=str(tmp_path / "kept.log"),
                ))  # fmt: skip
                claim = (scratch / "held.json").read_text()
            scratch.mkdir()
            (scratch / ".lock").touch()
            (scratch / "held.json").write_text(claim)
            claims.clear_dead(scratch, pytest.fail)
            assert not scratch.exists()
            assert stranger.poll() is None
        finally:
            stranger.kill()
