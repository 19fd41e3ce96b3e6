"""Whether an environment block is whole: real processes that damage theirs, hide it, run on or end while it is read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from abharness import procfs
from abharness.envblock import ExecLayout, find_layout, judge_block, parse_environ, shows_title

Start = Callable[..., int]
PRELUDE = """\
import ctypes, os, sys
f = open('/proc/self/stat').read().rpartition(')')[2].split()
arg, arg_end, env, env_end = map(int, f[45:49])
def put(at, text): ctypes.memmove(at, text, len(text))
"""
WAIT = "\nprint('up', flush=True)\nsys.stdin.read()"
ENV = {"A": "1", "VLLM_SWITCH": "1", "LAST": "x" * 40}


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a Python process of exactly this environment; returns its pid when it has run `code`."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str, env: dict[str, str] | None = None, **options: object) -> int:
        process = subprocess.Popen(  # type: ignore[call-overload]
            [sys.executable, "-S", "-c", PRELUDE + code + WAIT],
            env=ENV if env is None else env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            **options,
        )
        started.append(process)
        assert process.stdout.readline()
        return int(process.pid)

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_block_of_600_kb_is_read_whole(start: Start) -> None:
    env = {f"N{number:05}": "v" * 110 for number in range(5_000)} | {"BIG": "b" * 100_000, "LAST": "1"}
    read = procfs.read_environ(start("", env))
    assert (read.state, read.layout_checked, read.variables) == ("ok", True, env)


def test_bytes_that_are_no_utf_8_newlines_and_equals_signs_come_through(start: Start) -> None:
    env = {"N\udcff": "\udc80", "NOTE": "x\nVLLM_SWITCH=1\n", "ARGS": "a=b=c", "EMPTY": ""}
    assert procfs.read_environ(start("", env)).variables == env


# Each: what a process writes over its block, and whether what is left still looks like one.
OVERRUNS = {
    "title without an equals sign": ("put(env, b'VLLM::EngineCore\\0')", False),
    "title with one, in the middle of an entry": ("put(env, b'T=yyyyyy\\0')", True),
    "title with one, which splits an entry": ("put(env, b'A=1\\0V=\\0')", True),
    "title with one, which joins two entries": ("put(env, b'T=yyyyyy')", True),
    "title with one, up to the end": ("put(env, b'T' + b'=' * (env_end - env - 2) + b'\\0')", True),
    "last NUL gone": ("put(env_end - 1, b'x')", True),
    "all NUL": ("put(env, bytes(env_end - env))", False),
    "tail NUL": ("put(env_end - 30, bytes(30))", False),
    "tail NUL from an entry's end": ("put(env + 4, bytes(env_end - env - 4))", False),
}


@pytest.mark.parametrize("overrun", OVERRUNS)
def test_a_block_that_a_title_ran_into_is_unreadable(overrun: str, start: Start) -> None:
    """A1: also where what is left of it parses, and a variable of it would be taken for unset."""
    code, parses = OVERRUNS[overrun]
    pid = start(code)
    assert (parse_environ(Path(f"/proc/{pid}/environ").read_bytes()).state == "ok") is parses
    read = procfs.read_environ(pid)
    assert (read.state, read.variables) == ("unreadable", {})
    assert "environment block is" in str(read.reason)


CHANGES = {
    "replaced": "os.environ['VLLM_SWITCH'] = 'other'",
    "removed": "del os.environ['A']; del os.environ['LAST']",
    "removed, then added": "del os.environ['A']; os.environ['NEW'] = '1'; os.environ['VLLM_SWITCH'] = '0'",
    "cleared": "os.environ.clear()",
    "many": "os.environ.update({f'N{n}': 'v' for n in range(1000)})",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_process_does_to_its_environment_later_raises_no_doubt(change: str, start: Start) -> None:
    """A3: the C library moves pointers on the stack, the block stays as it was."""
    read = procfs.read_environ(start(CHANGES[change]))
    assert (read.state, read.layout_checked, read.variables) == ("ok", True, ENV)


TITLES = {
    "short": ("put(arg, b'VLLM::Worker' + bytes(arg_end - arg - 12))", True),
    "of another kind": ("put(arg, b'some title' + bytes(arg_end - arg - 10))", True),
    "as long as the arguments": ("put(arg, b't' * (arg_end - arg))", True),
    "none": ("", False),
}


@pytest.mark.parametrize("title", TITLES)
def test_a_renamed_process_whose_block_is_whole_is_told_from_one_that_was_not_renamed(title: str, start: Start) -> None:
    code, renamed = TITLES[title]
    pid = start(code)
    one = procfs.process(pid)
    assert one is not None
    assert procfs.renamed(one) is renamed
    assert procfs.read_environ(pid).variables == ENV


def test_empty_arguments_are_no_title() -> None:
    assert shows_title(b"cmd\0\0\0", 3) is False
    assert shows_title(b"cmd\0\0\0", 2) is True
    assert shows_title(b"cmd\0-x\0", None) is False
    assert shows_title(b"title\0\0\0", None) is True
    assert shows_title(b"", 0) is None


def test_a_short_read_is_unreadable_though_it_ends_at_an_entry() -> None:
    assert judge_block(b"A=1\0B=2\0", (100, 108), None).variables == {"A": "1", "B": "2"}
    read = judge_block(b"A=1\0", (100, 108), None)
    assert (read.state, read.reason) == ("unreadable", "the environment block was not read whole: 4 of 8 bytes")


def test_without_the_kernel_s_bounds_the_layout_claims_nothing() -> None:
    assert judge_block(b"A=1\0", (0, 0), ExecLayout(1, 1, (100,))).layout_checked is False


@pytest.mark.parametrize("stack", [b"", b"\1", b"\1" * 64, b"\xff" * 64, bytes(64)])
def test_memory_that_is_no_exec_layout_claims_nothing(stack: bytes) -> None:
    assert find_layout(stack, b"\x21" * 16) is None
    assert find_layout(stack, stack) is None


def test_a_process_whose_first_thread_has_ended_lives_and_is_read(start: Start) -> None:
    """The first thread of a process is a zombie then, and /proc/<pid>/environ says that there is no such process."""
    code = (
        "import threading\n"
        "def stay():\n"
        "    while open('/proc/self/stat').read().rpartition(')')[2].split()[0] != 'Z': pass\n"
        "    os.write(1, b'up\\n'); os.read(0, 1)\n"
        "threading.Thread(target=stay).start()\n"
        "ctypes.CDLL(None).syscall(60, 0)"
    )
    if os.uname().machine != "x86_64":
        pytest.skip("the number of the exit system call is that of x86_64")
    pid = start(code)
    one = procfs.process(pid)
    assert one is not None
    assert not one.ended
    assert procfs.is_alive(pid, one.start_ticks)
    with pytest.raises(ProcessLookupError):
        Path(f"/proc/{pid}/environ").read_bytes()
    assert procfs.read_environ(pid).variables == ENV


def test_threads_are_no_processes(start: Start) -> None:
    pid = start("import threading\nfor _ in range(3): threading.Thread(target=sys.stdin.read).start()")
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) == 4
    assert [one.pid for one in procfs.tree(pid)] == [pid]


def test_a_process_that_runs_one_program_after_another_is_never_read_half(start: Start) -> None:
    """Every read is one program's whole block, or none."""
    loop = 'exec env -i ROUND=$((ROUND + 1)) A=$A$A /bin/sh -c "$0" "$0"'
    guarded = f'[ "$ROUND" -lt 3000 ] || exit 0; [ "${{#A}}" -lt 99 ] || A=y; {loop}'
    process = subprocess.Popen(["/bin/sh", "-c", guarded, guarded], env={"ROUND": "0", "A": "y"})
    seen = 0
    while process.poll() is None:
        read = procfs.read_environ(process.pid)
        assert read.state in ("ok", "gone", "unreadable")
        if read.state == "ok":
            seen += 1
            assert {"ROUND", "A"} <= set(read.variables)
            assert set(read.variables["A"]) == {"y"}
    assert process.wait() == 0
    assert seen


def test_processes_that_end_while_they_are_read_are_gone_or_whole() -> None:
    states = set()
    for _ in range(40):
        process = subprocess.Popen(["/bin/sh", "-c", "read line"], env=ENV, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.close()
        while (read := procfs.read_environ(process.pid)).state != "gone":
            states.add(read.state)
            assert read.state == "ok" or "empty" in str(read.reason)
            if read.state == "ok":
                assert ENV.items() <= read.variables.items() or os.environ.items() <= read.variables.items()
        process.wait()
    assert procfs.read_environ(process.pid).state == "gone"


def test_an_empty_environment_is_unreadable_never_unset(start: Start) -> None:
    read = procfs.read_environ(start("", {}))
    assert (read.state, read.reason) == ("unreadable", "the environment block is empty")


def as_nobody(proc: Path, code: str) -> str:
    """What an unprivileged user sees through a /proc mounted at `proc`."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    script = (
        "import os\nfrom pathlib import Path\nfrom abharness import procfs\n"
        f"procfs.PROC = Path({str(proc)!r})\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n{code}"
    )
    root = Path(procfs.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(params=["invisible", "noaccess"])
def hiding_proc(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A /proc that keeps other users' processes from view (hidepid)."""
    folder = Path("/tmp") / f"abharness-proc-{os.getpid()}-{request.param}"
    folder.mkdir()
    mount = ["mount", "-t", "proc", "-o", f"hidepid={request.param}", "proc", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        folder.rmdir()
        pytest.skip(f"proc cannot be mounted here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)
    folder.rmdir()


def test_a_hidden_process_is_unreadable_and_not_gone(hiding_proc: Path, start: Start) -> None:
    pid = start("")
    code = f"print(procfs.read_environ({pid}).state, procfs.process({pid}), len(list(procfs.processes())) > 0)"
    assert as_nobody(hiding_proc, code) == "unreadable None True"
    gone = "print(procfs.read_environ(2**22 - 1).state)"
    assert as_nobody(hiding_proc, gone) == "gone"


def test_a_process_under_another_user_is_read_by_root_and_by_nobody_else() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can start processes of other users")
    pipe = subprocess.PIPE
    command = ["/bin/sh", "-c", "echo up; read line"]
    other = subprocess.Popen(command, env=ENV, stdin=pipe, stdout=pipe, user=65533, group=65533, extra_groups=[])
    try:
        assert other.stdout is not None
        assert other.stdout.readline()
        assert procfs.read_environ(other.pid).variables == ENV
        assert as_nobody(Path("/proc"), f"print(procfs.read_environ({other.pid}).state)") == "unreadable"
        assert other.pid not in {one.pid for one in procfs.carrying("A", "1")}, "of this user only"
    finally:
        other.communicate()


def test_a_used_pid_is_another_process(start: Start) -> None:
    """C1: the kernel gives the same number again."""
    first = subprocess.Popen(["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE)
    ticks = procfs.start_ticks(first.pid)
    assert ticks is not None
    first.communicate()
    last_pid = Path("/proc/sys/kernel/ns_last_pid")
    for _ in range(20):
        time.sleep(0.02)
        try:
            last_pid.write_text(str(first.pid - 1))
        except OSError as error:
            pytest.skip(f"pids cannot be chosen here: {error}")
        second = subprocess.Popen(["/bin/sh", "-c", "read line"], stdin=subprocess.PIPE)
        again = procfs.start_ticks(second.pid)
        same = second.pid == first.pid
        alive = procfs.is_alive(first.pid, ticks)
        second.communicate()
        if same:
            assert again is not None
            assert again > ticks
            assert not alive
            return
    pytest.skip("another process took the pid every time")
