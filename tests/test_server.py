"""One launch against the fake server: starting, getting ready, dying, stopping."""

from __future__ import annotations

import http.server
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from abharness import procfs, resources
from abharness.errors import PreflightError, ServerDied, ServerNotReady, TeardownError, WrongServer
from abharness.server import LaunchCommand, VllmServer
from tests.conftest import MakeCommand, completion, free_port, ready


class FakeGpu:
    """One device; what it holds is what the test says."""

    def __init__(self, *used: int, pids: list[int] | None = None) -> None:
        self.used = list(used)
        self.pids = pids or []

    def uuids(self) -> list[str]:
        return ["GPU-fake"]

    def memory_used_bytes(self, uuid: str) -> int:
        return self.used.pop(0) if len(self.used) > 1 else self.used[0]

    def compute_pids(self, uuid: str) -> list[int]:
        return self.pids


def never() -> str | None:
    raise AssertionError("nothing may be sent to this server")


@contextmanager
def stranger(port: int) -> Iterator[list[str]]:
    """A server of somebody else that answers everything with 200; yields the paths it was asked for."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"data": [{"id": "arm"}]}).encode())

        do_POST = do_GET  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def alive_of(server: VllmServer) -> list[int]:
    return [pid for pid, ticks in server.known() if procfs.is_alive(pid, ticks)]


def engine_of(server: VllmServer) -> int:
    engines = [one.pid for one in server.observe() if procfs.title(one.pid).startswith("VLLM::EngineCore")]
    assert len(engines) == 1
    return engines[0]


# Ready.


def test_ready_and_stopped(make_command: MakeCommand) -> None:
    """C1, C4: ready means our socket and a completion; after it no process and no open port are left."""
    command = make_command(env={"FAKE_WORKERS": "1"})
    waited: list[tuple[float, str]] = []
    with VllmServer(command) as server:
        server.wait_ready(lambda: completion(command), lambda seconds, line: waited.append((seconds, line)))
        assert server.socket_owner_pid == server.pid
        assert server.ready_s is not None
        assert server.ready_s > 0
        assert server.alive() is None
        assert len(alive_of(server)) == 3
        assert os.getsid(server.pid) == server.pid != os.getsid(0)
    assert alive_of(server) == []
    assert not procfs.port_open(command.host, command.port)
    assert server.stop_s is not None
    assert server.alive() == "the server exited with status 0"
    assert "Shutting down" in server.log_text()


def test_server_gets_the_declared_environment_only(
    running: Callable[..., VllmServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A10: what the caller's shell has exported does not leak."""
    monkeypatch.setenv("VLLM_SWITCH", "1")
    server = running()
    assert "VLLM_SWITCH" not in procfs.read_environ(server.pid).variables
    assert dict(procfs.read_environ(server.pid).variables) == dict(server.command.env)


def test_health_is_not_ready(make_command: MakeCommand) -> None:
    """C4: /health and /v1/models answer, no completion ever returns."""
    command = make_command(faults={"completion_hangs": True})
    with VllmServer(command) as server:
        while not procfs.port_open(command.host, command.port):
            time.sleep(0.05)
        server.command = replace(command, ready_timeout_s=1.0)
        with pytest.raises(ServerNotReady, match="the first completion has not returned") as caught:
            server.wait_ready(lambda: completion(command, timeout_s=60))
        assert server.ready_s is None
        assert any("Application startup complete" in line for line in caught.value.log_tail)
    assert alive_of(server) == []


def test_health_before_ready_is_waited_for(make_command: MakeCommand) -> None:
    """C4: the completion returns only when the engine is warm, and that is the time recorded."""
    command = make_command(faults={"health_before_ready_s": 0.8})
    with VllmServer(command) as server:
        ready(server)
        assert server.ready_s is not None
        assert server.ready_s > 0.8


def test_death_before_ready_ends_the_wait_with_the_log(make_command: MakeCommand) -> None:
    """C5 (1): exits 1 long before the deadline."""
    command = make_command(faults={"exit_after_s": 0.5, "slow_start_s": 60}, ready_timeout_s=600.0)
    with (
        VllmServer(command) as server,
        pytest.raises(ServerDied, match=r"exited with status 1 .* before it was ready") as e,
    ):
        server.wait_ready(never)
    assert any("vLLM server version" in line for line in e.value.log_tail)
    assert "launch.json" in str(e.value.hint)
    assert "vllm.entrypoints.cli.main serve" in server.by_hand()


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"die": {"at": "before_listen", "code": 3}}, "exited with status 3"),
        ({"die": {"at": "before_listen", "signal": "SIGKILL"}}, "ended by SIGKILL"),
        ({"die": {"at": "before_listen", "who": "engine"}}, "VLLM::EngineCore .* has ended|exited with status 1"),
        ({"die": {"at": "after_requests", "n": 1}}, "exited with status 1"),
    ],
    ids=["before-listening", "signal", "engine", "in-first-completion"],
)
def test_death_at_each_stage_before_ready(make_command: MakeCommand, faults: dict[str, Any], said: str) -> None:
    """C5."""
    command = make_command(faults=faults)
    with VllmServer(command) as server, pytest.raises(ServerDied, match=said):
        ready(server)
    assert alive_of(server) == []


def test_slow_start_passes_with_enough_time(make_command: MakeCommand) -> None:
    """C5 (2): the deadline is the caller's."""
    command = make_command(faults={"slow_start_s": 1.2}, ready_timeout_s=30.0)
    waited: list[str] = []
    with VllmServer(command) as server:
        server.wait_ready(lambda: completion(command), lambda seconds, line: waited.append(line))
    assert waited
    assert any("FAKE_SWITCH" in line for line in waited)


def test_deadline_while_alive_cleans_up(make_command: MakeCommand) -> None:
    """C5 (3)."""
    command = make_command(faults={"slow_start_s": 60}, ready_timeout_s=0.8)
    with VllmServer(command) as server, pytest.raises(ServerNotReady, match="nothing listens on the port"):
        server.wait_ready(never)
    assert alive_of(server) == []


def test_taken_port_is_refused_before_the_start(make_command: MakeCommand) -> None:
    """C3: a stale server that even shows the right model name."""
    command = make_command()
    with stranger(command.port) as asked:
        with pytest.raises(PreflightError, match=f"port {command.port} .* pid {os.getpid()} "), VllmServer(command):
            pass
        assert asked == []
        assert not command.log_path.exists()


def test_foreign_socket_gets_no_request(make_command: MakeCommand) -> None:
    """C3: another server takes the port while ours is starting."""
    command = make_command(faults={"slow_start_s": 60})
    with VllmServer(command) as server:
        with stranger(command.port) as asked:
            with pytest.raises(WrongServer, match=f"answered by pid {os.getpid()} ") as caught:
                server.wait_ready(never)
            assert asked == []
        assert caught.value.code == "wrong_server"
    assert alive_of(server) == []


def test_a_socket_that_others_hold_too_is_not_ours(make_command: MakeCommand, tmp_path: Path) -> None:
    """What a detached process accepts, this server did not serve."""
    pid_file = tmp_path / "stray.pid"
    order = {"how": "shares", "after_requests": 1, "pid_file": str(pid_file)}
    command = make_command(faults={"stray": order})
    server = VllmServer(command)
    server.start()
    try:
        while not procfs.listeners(command.host, command.port):
            time.sleep(0.02)
        server.check_listener()
        assert completion(command) is None
        stray = int(pid_file.read_text())
        with pytest.raises(WrongServer, match=f"answered by pid {stray} ") as caught:
            server.check_listener()
        assert caught.value.code == "wrong_server"
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
        server.stop()
    with pytest.raises(WrongServer, match="nothing listens any more"):
        server.check_listener()


def test_errors_of_the_completion_call_reach_the_caller(make_command: MakeCommand) -> None:
    command = make_command()

    def broken() -> str | None:
        raise ZeroDivisionError("a fault in the client")

    with VllmServer(command) as server, pytest.raises(ZeroDivisionError):
        server.wait_ready(broken)


# Alive.


@pytest.mark.parametrize("lives_on", [False, True])
def test_engine_death_under_load_is_noticed(running: Callable[..., VllmServer], lives_on: bool) -> None:
    """C4: an engine that dies is a failed launch, whatever /health says."""
    server = running(faults={"engine_dead_server_lives": True} if lives_on else {})
    assert server.alive() is None
    engine = engine_of(server)
    os.kill(engine, signal.SIGKILL)
    while (reason := server.alive()) is None:
        time.sleep(0.01)
    if lives_on:
        assert reason == f"VLLM::EngineCore (pid {engine}) has ended, the server (pid {server.pid}) runs on"


def test_server_death_under_load_is_noticed(running: Callable[..., VllmServer]) -> None:
    """C5."""
    server = running(faults={"die": {"at": "after_requests", "n": 3, "code": 7}})
    assert [completion(server.command), completion(server.command)][1] is not None
    while server.alive() is None:
        time.sleep(0.01)
    assert server.alive() == "the server exited with status 7"


# Stop.


def test_surviving_engine_is_ended(running: Callable[..., VllmServer]) -> None:
    """C1: the server gets SIGKILL, its port is closed at once, its engine is re-parented and lives."""
    server = running(faults={"engine_survives": True}, env={"FAKE_WORKERS": "1"})
    engine = engine_of(server)
    os.kill(server.pid, signal.SIGKILL)
    while server.alive() is None:
        time.sleep(0.01)
    assert not procfs.port_open(server.command.host, server.command.port)
    assert engine in alive_of(server)
    server.stop()
    assert alive_of(server) == []


def test_engine_that_ignores_signals_is_killed(make_command: MakeCommand) -> None:
    """C1: SIGINT, then SIGTERM, then SIGKILL."""
    command = make_command(faults={"engine_survives": "stubborn", "ignore_signals": ["SIGINT", "SIGTERM"]}, grace_s=0.4)
    with VllmServer(command) as server:
        ready(server)
        assert len(alive_of(server)) == 2
    assert alive_of(server) == []
    assert server.alive() == "the server was ended by SIGKILL"


def test_re_parented_engine_is_found_when_nothing_was_observed(make_command: MakeCommand) -> None:
    """C1: an engine whose server died before anybody looked is known by the launch's own variable."""
    command = make_command(faults={"engine_survives": True, "die": {"at": "before_listen", "signal": "SIGKILL"}})
    with VllmServer(command) as server, pytest.raises(ServerDied):
        server.wait_ready(never)
    assert procfs.carrying(*command.sentinel) == []


def test_only_own_processes_are_ended(running: Callable[..., VllmServer]) -> None:
    """C1: a bystander in the same process group and with the same title lives on."""
    code = "import sys; print(1, flush=True); sys.stdin.read()"
    bystander = subprocess.Popen(
        ["VLLM::EngineCore", "-c", code], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        server = running()
        server.stop()
        assert bystander.poll() is None
    finally:
        bystander.communicate()


def test_interrupt_stops_the_server(make_command: MakeCommand) -> None:
    command = make_command()
    server = VllmServer(command)

    def interrupted() -> None:
        with server:
            ready(server)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert alive_of(server) == []
    assert not procfs.port_open(command.host, command.port)


def test_second_interrupt_ends_the_wait_but_not_the_cleaning(make_command: MakeCommand) -> None:
    command = make_command(
        faults={"engine_survives": "stubborn", "ignore_signals": ["SIGINT", "SIGTERM"]}, grace_s=60.0
    )
    server = VllmServer(command)
    server.start()
    ready(server)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        server.stop()
    timer.join()
    assert alive_of(server) == []


def test_stop_twice_and_without_start(make_command: MakeCommand) -> None:
    VllmServer(make_command()).stop()
    server = VllmServer(make_command())
    server.start()
    server.stop()
    server.stop()
    assert alive_of(server) == []


def test_missing_interpreter(make_command: MakeCommand) -> None:
    command = replace(make_command(), argv=["/nonexistent/python", "-m", "vllm"])
    with pytest.raises(PreflightError, match="cannot be started"), VllmServer(command):
        pass


def test_gpu_memory_not_given_back(make_command: MakeCommand) -> None:
    """C1: the processes are gone, and the device still holds 100 GB."""
    gpu = FakeGpu(0, 0, 100 * 2**30, pids=[])
    command = make_command(gpu=gpu, gpu_release_s=0.3)
    server = VllmServer(command)
    server.start()
    gpu.pids = [os.getpid()]
    with pytest.raises(TeardownError, match=rf"100.0 GiB in use, 0.0 GiB before .* pid {os.getpid()} "):
        server.stop()


def test_gpu_memory_given_back_late(make_command: MakeCommand) -> None:
    """C1."""
    command = make_command(gpu=FakeGpu(2**20, 2**20, 90 * 2**30, 50 * 2**30, 2**21), gpu_release_s=30.0)
    with VllmServer(command) as server:
        pass
    assert server.stop_s is not None


def test_failed_teardown_outranks_the_first_failure(make_command: MakeCommand) -> None:
    """C1: the next launch must not start, whatever ended this one."""
    command = make_command(gpu=FakeGpu(0, 0, 100 * 2**30), gpu_release_s=0.2)
    with pytest.raises(TeardownError) as caught, VllmServer(command):
        raise ServerDied("first")
    assert isinstance(caught.value.__context__, ServerDied)


# Shared memory.


def test_leaked_segment_of_a_killed_server_is_removed(running: Callable[..., VllmServer]) -> None:
    """C1: only what our processes had mapped; a segment that merely appeared meanwhile stays and is reported."""
    server = running(faults={"shm_leak": True})
    ours = Path(f"/dev/shm/psm_{server.pid:08x}")
    foreign = Path(f"/dev/shm/psm_abharness_test_{os.getpid()}")
    foreign.write_bytes(b"x")
    try:
        assert ours.exists()
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        assert not ours.exists()
        assert foreign.exists()
        assert str(foreign) in server.leftovers()
    finally:
        foreign.unlink()


# Preflight.


def test_busy_gpu_is_refused(make_command: MakeCommand) -> None:
    with pytest.raises(PreflightError, match=f"1.0 GiB held by pid {os.getpid()}") as caught:
        resources.check_gpu_free(FakeGpu(2**30, pids=[os.getpid()]))
    assert caught.value.code == "foreign_gpu_process"
    with pytest.raises(PreflightError, match=r"80\.0 GiB held by a process that cannot be seen"):
        resources.check_gpu_free(FakeGpu(80 * 2**30))
    resources.check_gpu_free(FakeGpu(600 * 2**20))


def test_full_disk_is_refused(tmp_path: Path) -> None:
    """H3."""
    resources.check_disk_free(tmp_path, 1)
    with pytest.raises(PreflightError, match=r"GiB free, 1073741824\.00 GiB needed"):
        resources.check_disk_free(tmp_path, 2**60)


# Log and command.


def test_log_is_read_in_bounds(make_command: MakeCommand) -> None:
    """A log of gigabytes, with half a character where the reading begins, costs no memory."""
    command = make_command()
    server = VllmServer(command)
    assert server.log_tail() == []
    with command.log_path.open("wb") as log:
        log.write(b"\x1b[0;36m(APIServer pid=1)\x1b[0;0m first\n")
        log.seek(3 * 2**30)
        log.write("ü".encode()[1:] + b"last but one\n" + "läst\n".encode())
    assert server.log_tail(2)[-1] == "läst"
    text = server.log_text()
    assert "first" in text
    assert "läst" in text
    assert "bytes left out" in text
    assert len(text) < 70 * 2**20


def test_command_by_hand_runs_and_hides_secrets(make_command: MakeCommand) -> None:
    """C5: what is printed can be pasted into a shell."""
    argv = [sys.executable, "-c", "import json, os; print(json.dumps([dict(os.environ), os.getcwd()]))"]
    command = replace(make_command(env={"HF_TOKEN": "hf_secret", "VLLM_ARGS": '{"k": "a=b\'c"}\n'}), argv=argv)
    text = VllmServer(command).by_hand()
    assert "hf_secret" not in text
    shell = ["sh", "-c", text]
    result = subprocess.run(shell, env={"HF_TOKEN": "hf_secret", "LEAK": "1"}, capture_output=True, check=True)
    environ, cwd = json.loads(result.stdout)
    environ.pop("LC_CTYPE", None)  # Python adds it to its own environment under the C locale
    assert environ == dict(command.env)
    assert cwd == str(command.cwd)
    assert shlex.split(text)[:3] == ["mkdir", "-p", str(command.cwd)]


def test_free_port_is_accepted() -> None:
    resources.check_port_free("127.0.0.1", free_port())


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(running: Callable[..., VllmServer]) -> None:
    """The server is in a process group of its own."""
    server = running()
    assert os.getpgid(server.pid) != os.getpgid(0)
    assert {os.getpgid(pid) for pid in alive_of(server)} == {server.pid}


def test_launch_command_is_immutable(make_command: MakeCommand) -> None:
    command: LaunchCommand = make_command()
    with pytest.raises(AttributeError):
        command.port = 1  # type: ignore[misc]
