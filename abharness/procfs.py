"""Reading `/proc`: pids, ports and raw environment blocks in, processes and what they were started with out.

`/proc/<pid>/environ` is a snapshot from the moment of exec: later changes of `os.environ` do not show, a forked child
shows its parent's block, a spawned one its own. It lies in the process's own memory, so a process that renames itself
(setproctitle) may have overwritten it, in whole or in part. A block that cannot be whole proves nothing: it is
`unreadable` with a reason, and no variable of it counts as absent. Wholeness is held against what the kernel laid out
at exec and keeps elsewhere: the block's bounds (fields 50 and 51 of `/proc/<pid>/stat`), and, where the process's
memory may be read, the vector of entry pointers on its stack.

Only the standard library is needed here. Everything is a snapshot; a process is named for good by its pid together
with its start time in clock ticks since boot (field 22 of `/proc/<pid>/stat`, see proc_pid_stat(5)).
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from abharness.envblock import (
    EnvironRead,
    ExecLayout,
    find_layout,
    judge_block,
    parse_environ,
    shows_title,
)
from abharness.redaction import redact_argv
from abharness.witnesses import ENGINE_TITLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PROC = Path("/proc")
TCP_LISTEN = "0A"
KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of the kernel's include/linux/sched.h, in field 9 of `/proc/<pid>/stat`."""
MOST_STACK_BYTES = 32 * 2**20
"""More than the pointers of any start take: arguments and environment together are at most 6 MiB (execve(2))."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process at one moment; `(pid, start_ticks)` is its identity.

    Attributes:
        state: As in `/proc/<pid>/stat`; that of a living thread where the first thread has ended before the others.
        tid: The thread through which the process can be looked into: `pid`, or that living thread's.
        kernel: A thread of the kernel, which has no environment and no arguments.
        stack: Where the kernel laid out the argument and environment pointers at exec; 0 when it does not tell.
        env: Start and end of the environment block in the process's memory; zeros when the kernel does not tell.
    """

    pid: int
    ppid: int
    session: int
    state: str
    start_ticks: int
    tid: int
    kernel: bool
    stack: int
    env: tuple[int, int]

    @property
    def ended(self) -> bool:
        """Whether it is only waiting to be collected by its parent."""
        return self.state in "ZX"


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening TCP socket and the processes that hold it; none are known when they may not be looked into."""

    address: str
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServerTree:
    """One vLLM server found running: its topmost process, and that with all its descendants."""

    root: Process
    processes: tuple[Process, ...]


def read_environ(pid: int) -> EnvironRead:
    """What a process was started with.

    A read that an exec fell into, or that came before the new program has a block, is made again for a moment.
    """
    for attempt in range(5):
        if attempt:
            time.sleep(0.02)
        before = process(pid)
        try:
            block = (_folder(before or pid) / "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            if before is None and _hidden(pid):
                return EnvironRead("unreadable", "this process is another user's, and hidden (hidepid)")
            return EnvironRead("gone", "the process has ended")
        except PermissionError:
            return EnvironRead("unreadable", "no permission to read the environment of this process")
        except OSError as error:
            return EnvironRead("unreadable", f"the environment cannot be read: {error}")
        seen = process(pid)
        if before is None or seen is None or seen.ended or seen.start_ticks != before.start_ticks:
            return EnvironRead("gone", "the process has ended")
        if seen.kernel:
            return EnvironRead("unreadable", "a thread of the kernel has no environment")
        if before.env == seen.env and before.tid == seen.tid and block:
            return judge_block(block, seen.env, exec_layout(seen))
    if block:
        return EnvironRead("unreadable", "the process starts one program after another; its environment did not hold")
    return parse_environ(block)


def exec_layout(one: Process) -> ExecLayout | None:
    """What the kernel laid out for a process at exec.

    Returns:
        None where its memory may not be read (another user, ptrace_scope) or does not look like it.
    """
    if not one.stack or not one.stack < one.env[0]:
        return None
    try:
        auxv = (_folder(one) / "auxv").read_bytes()
        with (_folder(one) / "mem").open("rb", buffering=0) as memory:
            memory.seek(one.stack)
            raw = memory.read(min(one.env[0] - one.stack, MOST_STACK_BYTES)) or b""
    except (OSError, OverflowError):
        return None
    return find_layout(raw, auxv)


def renamed(one: Process) -> bool | None:
    """Whether a process shows a title in place of its arguments; None when its arguments cannot be read.

    With an environment that is whole this proves that the renaming left the environment alone (`SPT_NOENV`).
    """
    try:
        raw = (_folder(one) / "cmdline").read_bytes()
    except OSError:
        return None
    if raw.startswith(ENGINE_TITLE.encode()):
        return True
    layout = exec_layout(one)
    return shows_title(raw, None if layout is None else layout.argc)


def _folder(one: Process | int) -> Path:
    if isinstance(one, int):
        return PROC / str(one)
    return PROC / str(one.pid) if one.tid == one.pid else PROC / str(one.pid) / "task" / str(one.tid)


def _hidden(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def process(pid: int) -> Process | None:
    """One process, or None when there is none of that pid, or none that this user may see."""
    fields = _stat(PROC / str(pid) / "stat")
    if fields is None:
        return None
    tid = pid
    if fields[0] == "Z":
        # The first thread may end before the others: the process then lives on, and only they can be looked into.
        for thread in _threads(pid):
            of_thread = _stat(PROC / str(pid) / "task" / str(thread) / "stat")
            if of_thread is not None and of_thread[0] not in "ZX":
                tid = thread
                fields = [of_thread[0], *fields[1:25], *of_thread[25:]]
                break
    return Process(
        pid,
        ppid=int(fields[1]),
        session=int(fields[3]),
        state=fields[0],
        start_ticks=int(fields[19]),
        tid=tid,
        kernel=bool(int(fields[6]) & KERNEL_THREAD),
        stack=int(fields[25]),
        env=(int(fields[47]), int(fields[48])),
    )


def _stat(path: Path) -> list[str] | None:
    """Fields 3 to the last of a stat file."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The command name may hold spaces and parentheses; the last ")" ends it.
    return text.rpartition(")")[2].split()


def _threads(pid: int) -> list[int]:
    try:
        return sorted(int(entry.name) for entry in (PROC / str(pid) / "task").iterdir())
    except OSError:
        return []


def processes() -> Iterator[Process]:
    """Every process that can be seen."""
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            found = process(int(entry.name))
            if found is not None:
                yield found


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None when there is none of that pid."""
    found = process(pid)
    return None if found is None else found.start_ticks


def is_alive(pid: int, ticks: int) -> bool:
    """Whether this very process still runs; a zombie and another process of the same pid do not count."""
    found = process(pid)
    return found is not None and found.start_ticks == ticks and not found.ended


def descendants(root_pid: int, among: Iterable[Process]) -> list[Process]:
    """The root and everything below it, by parent links, root first; empty when the root is not there."""
    children: dict[int, list[Process]] = {}
    queue: list[Process] = []
    for one in among:
        children.setdefault(one.ppid, []).append(one)
        if one.pid == root_pid:
            queue.append(one)
    found: list[Process] = []
    while queue:
        one = queue.pop(0)
        found.append(one)
        queue += sorted(children.get(one.pid, []), key=lambda child: child.pid)
    return found


def tree(root_pid: int) -> list[Process]:
    """A process and its descendants now; one that was re-parented is not among them (see `carrying`)."""
    return descendants(root_pid, processes())


def values_of(name: str) -> Iterator[tuple[Process, str]]:
    """Every process of this user that was started with a variable, re-parented ones too, and its value there."""
    for one in processes():
        if _uid(one.pid) == os.getuid():
            value = read_environ(one.pid).variables.get(name)
            if value is not None:
                yield one, value


def carrying(name: str, value: str) -> list[Process]:
    """Every process of this user that was started with a variable of this value."""
    return [one for one, found in values_of(name) if found == value]


def _uid(pid: int) -> int | None:
    try:
        return (PROC / str(pid)).stat().st_uid
    except (FileNotFoundError, ProcessLookupError):
        return None


def command_line(pid: int) -> list[str]:
    """The arguments as they stand now (a renamed process shows its title), secrets hidden; empty: cannot be read."""
    return redact_argv(arguments(pid))


def arguments(pid: int) -> list[str]:
    """The same with their secrets."""
    try:
        raw = (PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return [part.decode("utf-8", "surrogateescape") for part in raw.rstrip(b"\0").split(b"\0")] if raw else []


def title(pid: int) -> str:
    """The command line on one line, cut to 80 characters; the kernel's name where there is none."""
    text = " ".join(command_line(pid)).strip()
    if not text:
        try:
            text = f"[{(PROC / str(pid) / 'comm').read_text(encoding='utf-8', errors='replace').strip()}]"
        except OSError:
            text = "[gone]"
    return text if len(text) <= 80 else text[:77] + "..."


def listeners(host: str, port: int) -> list[Listener]:
    """The TCP sockets that accept connections to `host:port`, through a wildcard address too, with their holders."""
    wanted = ipaddress.ip_address(socket.gethostbyname(host) if host == "localhost" else host)
    inodes: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except FileNotFoundError:
            continue  # a kernel without IPv6
        for line in lines:
            fields = line.split()
            raw, _, raw_port = fields[1].partition(":")
            if fields[3] == TCP_LISTEN and int(raw_port, 16) == port:
                address = _address(raw)
                if address == wanted or address.is_unspecified:
                    inodes[f"socket:[{fields[9]}]"] = str(address)
    holders: dict[str, list[int]] = {inode: [] for inode in inodes}
    if holders:
        for one in processes():
            for link in _open_files(one.pid):
                if link in holders and one.pid not in holders[link]:
                    holders[link].append(one.pid)
    return [Listener(inodes[inode], tuple(sorted(pids))) for inode, pids in holders.items()]


def _address(raw: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    # The kernel prints 32-bit words in host byte order.
    packed = b"".join(struct.pack("=I", int(raw[i : i + 8], 16)) for i in range(0, len(raw), 8))
    address = ipaddress.ip_address(packed)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _open_files(pid: int) -> Iterator[str]:
    folder = PROC / str(pid) / "fd"
    try:
        links = list(folder.iterdir())
    except OSError:
        return
    for link in links:
        try:
            yield str(link.readlink())
        except OSError:
            continue


def files_in_use(pid: int, under: str) -> set[str]:
    """Paths below `under` that a process has open or mapped now, deleted ones left out."""
    found = {link for link in _open_files(pid) if link.startswith(under)}
    try:
        maps = (PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        maps = ""
    found.update(parts[5] for parts in (line.split(maxsplit=5) for line in maps.splitlines()) if len(parts) == 6)
    return {path for path in found if path.startswith(under) and not path.endswith(" (deleted)")}


def uses_gpu(pid: int) -> bool:
    """Whether a process that can be seen here may be on an NVIDIA GPU: it has a device file open, or forbids the look."""
    if process(pid) is None:
        return False
    try:
        next((PROC / str(pid) / "fd").iterdir(), None)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return any(link.startswith("/dev/nvidia") for link in _open_files(pid))


def port_open(host: str, port: int) -> bool:
    """Whether something accepts a TCP connection there; nothing is sent."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def find_vllm_servers(uid: int) -> list[ServerTree]:
    """The vLLM servers of a user that run now, one tree each.

    A root is the topmost process whose command line serves vLLM, or a process titled `VLLM::...` (engine, worker) that
    has lost its server.
    """
    everything = list(processes())
    by_pid = {one.pid: one for one in everything}
    marked = {one.pid for one in everything if _uid(one.pid) == uid and _is_vllm(command_line(one.pid))}

    def has_marked_ancestor(one: Process) -> bool:
        seen = {one.pid}
        while (parent := by_pid.get(one.ppid)) is not None and parent.pid not in seen:
            if parent.pid in marked:
                return True
            seen.add(parent.pid)
            one = parent
        return False

    roots = sorted((by_pid[pid] for pid in marked if not has_marked_ancestor(by_pid[pid])), key=lambda one: one.pid)
    return [ServerTree(root, tuple(descendants(root.pid, everything))) for root in roots]


def _is_vllm(argv: list[str]) -> bool:
    if not argv:
        return False
    if argv[0].startswith(ENGINE_TITLE):
        return True
    # `vllm bench serve` is a client; a shell or a timeout around the server is not the server.
    if re.fullmatch(r"(python|pypy)[\d.]*", Path(argv[0]).name):
        argv = argv[1:]
        while argv and argv[0].startswith("-") and argv[0] != "-m":
            argv = argv[1:]
        if argv[:1] == ["-m"] and len(argv) > 1:
            module, rest = argv[1], argv[2:]
            if module in ("vllm", "vllm.entrypoints.cli.main"):
                return rest[:1] == ["serve"]
            return module.startswith("vllm.entrypoints.") and module.endswith("api_server")
    return bool(argv) and Path(argv[0]).name == "vllm" and argv[1:2] == ["serve"]
