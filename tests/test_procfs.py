"""Reading environment blocks, process trees and ports."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from abharness import procfs
from abharness.redaction import hidden, printable

Child = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def child() -> Iterator[Child]:
    """Starts Python children with exactly the environment given; each prints one line when it is up."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, *, argv0: list[str] | None = None, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*(argv0 or [sys.executable]), "-c", code],
            executable=sys.executable,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


WAIT = "import sys; print('up', flush=True); sys.stdin.read()"


def test_environment_block_is_split_at_nul_and_first_equals_only() -> None:
    """A7."""
    block = b'NOTE=x\nVLLM_SWITCH=1\ny\x00VLLM_ARGS={"k":"a=b=c"}\x00=::=C\x00VLLM_EMPTY=\x00N\xff=1\x00VLLM_SWITCH2=1'
    read = procfs.parse_environ(block)
    assert read.state == "ok"
    assert read.variables == {
        "NOTE": "x\nVLLM_SWITCH=1\ny",
        "VLLM_ARGS": '{"k":"a=b=c"}',
        "VLLM_EMPTY": "",
        "N\udcff": "1",
        "VLLM_SWITCH2": "1",
    }
    assert "VLLM_SWITCH" not in read.variables
    assert read.nameless == ("=::=C",)
    assert printable("N\udcff") == "N\\xff"


def test_final_nul_and_repeated_names() -> None:
    """A7: a final NUL changes nothing; of equal names the first counts, as for getenv."""
    assert procfs.parse_environ(b"A=1\0B=2\0").variables == {"A": "1", "B": "2"}
    assert procfs.parse_environ(b"A=1\0A=2\0").variables == {"A": "1"}


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        pytest.param(b"\0" * 238, "wiped: 238 NUL bytes", id="A1-all"),
        pytest.param(b"", "empty", id="A1-empty"),
        pytest.param(b"\0" * 40 + b"HOME=/root\0PATH=/bin\0", "first 40 bytes are NUL", id="A1-prefix"),
        pytest.param(b"HOME=/root\0\0\0\0PATH=/bin\0", "two NUL bytes in a row at byte 10", id="A1-middle"),
        pytest.param(b"HOME=/root\0\0\0\0\0\0", "two NUL bytes in a row at byte 10", id="A1-tail"),
        pytest.param(b"ngineCore\0PATH=/bin\0", "'ngineCore' has no '='", id="A1-title"),
    ],
)
def test_damaged_block_is_unreadable_never_unset(block: bytes, reason: str) -> None:
    """A1."""
    read = procfs.parse_environ(block)
    assert read.state == "unreadable"
    assert reason in str(read.reason)
    assert not read.variables


def test_environ_is_the_exec_time_snapshot(child: Child) -> None:
    """A3: a later change does not show in the process or its forked child, and does in a spawned one."""
    code = (
        "import os, subprocess, sys\n"
        "os.environ['VLLM_SWITCH'] = '0'\n"
        "forked = os.fork()\n"
        "if not forked: sys.stdin.read(); os._exit(0)\n"
        "spawned = subprocess.Popen([sys.executable, '-c', 'import sys; print(1, flush=True); sys.stdin.read()'],"
        " stdout=subprocess.PIPE)\n"
        "spawned.stdout.readline()\n"
        "print(forked, spawned.pid, flush=True)\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={"VLLM_SWITCH": "1"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        forked, spawned = map(int, process.stdout.readline().split())
        values = [procfs.read_environ(pid).variables["VLLM_SWITCH"] for pid in (process.pid, forked, spawned)]
        assert values == ["1", "1", "0"]
        assert {one.pid for one in procfs.tree(process.pid)} == {process.pid, forked, spawned}
    finally:
        process.communicate()


def test_process_that_ended_is_gone(child: Child) -> None:
    process = child(WAIT, A="1")
    assert procfs.read_environ(process.pid).variables == {"A": "1"}
    ticks = procfs.start_ticks(process.pid)
    assert ticks is not None
    assert procfs.is_alive(process.pid, ticks)
    process.kill()
    while (seen := procfs.process(process.pid)) is not None and seen.state != "Z":
        time.sleep(0.01)
    assert procfs.read_environ(process.pid).state == "gone"
    assert not procfs.is_alive(process.pid, ticks)
    process.communicate()
    assert procfs.read_environ(process.pid).state == "gone"
    assert procfs.start_ticks(process.pid) is None


def test_no_permission_is_unreadable(child: Child) -> None:
    if os.getuid() != 0:
        assert procfs.read_environ(1).state == "unreadable"
        return
    owner = child(WAIT, A="1")
    drop = "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)"
    code = f"read = procfs.read_environ({owner.pid}); print(read.state, read.reason)"
    result = subprocess.run(
        [sys.executable, "-c", f"from abharness import procfs\n{drop}\n{code}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(procfs.__file__).parents[1],
    )
    assert result.stdout.startswith("unreadable no permission")


def test_start_time_survives_odd_command_names(child: Child) -> None:
    """C1: field 22 is found although the name holds spaces and parentheses."""
    plain = child(WAIT, A="1")
    odd = child("open('/proc/self/comm', 'w').write('a) R 1 (b c')\n" + WAIT, A="1")
    for process in (plain, odd):
        seen = procfs.process(process.pid)
        assert seen is not None
        assert (seen.ppid, seen.session) == (os.getpid(), os.getsid(0))
    first, second = procfs.start_ticks(plain.pid), procfs.start_ticks(odd.pid)
    assert first is not None
    assert second is not None
    assert second >= first


def test_reused_pid_is_another_process(child: Child) -> None:
    """C1: pid and start time must both match."""
    process = child(WAIT, A="1")
    ticks = procfs.start_ticks(process.pid)
    assert ticks is not None
    assert not procfs.is_alive(process.pid, ticks + 1)


def test_re_parented_process_is_found_by_its_variable(child: Child) -> None:
    """C1: after the parent died its child is in no tree of ours, but carries the launch's variable and session."""
    code = (
        "import os, sys\n"
        "read, write = os.pipe()\n"
        "pid = os.fork()\n"
        "if pid: print(pid, flush=True); os.close(write); sys.stdin.read()\n"
        "else: os.close(1); os.read(0, 1); os.close(write); import time; time.sleep(30)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={"LAUNCH": "one"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    orphan = int(process.stdout.readline())
    try:
        process.kill()
        process.communicate()
        assert orphan not in {one.pid for one in procfs.tree(os.getpid())}
        assert [one.pid for one in procfs.carrying("LAUNCH", "one")] == [orphan]
        assert procfs.carrying("LAUNCH", "on") == []
    finally:
        os.kill(orphan, 9)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::", "::1"])
def test_listener_is_named(address: str) -> None:
    """C3."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((address, 0))
        except OSError as error:
            pytest.skip(f"cannot bind {address}: {error}")
        port = listener.getsockname()[1]
        assert procfs.listeners("127.0.0.1", port) == []
        listener.listen()
        found = procfs.listeners("127.0.0.1", port)
        if address == "::1":
            assert found == []
        else:
            assert [(one.address, one.pids) for one in found] == [(address, (os.getpid(),))]
            assert procfs.port_open("127.0.0.1", port)
    assert procfs.listeners("localhost", port) == []
    assert not procfs.port_open("127.0.0.1", port)


def test_files_in_use_sees_open_and_mapped_files(tmp_path: Path) -> None:
    opened, mapped, closed = (tmp_path / name for name in ("opened", "mapped", "closed"))
    for path in (opened, mapped, closed):
        path.write_bytes(b"x")
    import mmap

    with mapped.open("rb") as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with opened.open("rb"):
        assert procfs.files_in_use(os.getpid(), str(tmp_path)) == {str(opened), str(mapped)}
    view.close()
    assert procfs.files_in_use(os.getpid(), str(tmp_path)) == set()


def test_secrets_are_hidden_and_equal_ones_still_seen_as_equal() -> None:
    assert "hf_abc" not in hidden("HF_TOKEN", "hf_abc")
    assert hidden("VLLM_API_KEY", "k") == hidden("VLLM_API_KEY", "k") != hidden("VLLM_API_KEY", "l")
    assert hidden("TOKENIZERS_PARALLELISM", "false") == "false"
    assert hidden("VLLM_SWITCH", "") == ""
