"""One launch: a complete command and environment in, a running server of known processes out, and nothing left after.

    with VllmServer(command) as server:      # started in its own session
        server.wait_ready(first_completion)  # our socket, our model, one real completion
        ...                                  # server.alive() between requests
    # stopped: processes gone, port closed, GPU memory given back

Processes are named by (pid, start time) from the moment they are seen; only those are ever signalled, and each is
checked again right before. HTTP is the caller's: what decides readiness is passed in.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, Self

from abharness import procfs
from abharness.errors import PreflightError, ServerDied, ServerNotReady, TeardownError, WrongServer
from abharness.record import CacheEvidence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where the C library keeps named segments and semaphores
# Names that Python's multiprocessing gives its segments and semaphores.
SHARED_NAME = re.compile(r"psm_\w+|sem\.mp-\w+")
POLL_S = 0.1
# A driver keeps some memory of its own, and frees a context's in steps.
GPU_MEMORY_TOLERANCE_BYTES = 512 * 2**20
GPU_IDLE_LIMIT_BYTES = 2 * 2**30
LOG_HEAD_BYTES = 48 * 2**20
LOG_TAIL_BYTES = 16 * 2**20
WALK_LIMIT = 200_000


class GpuMemory(Protocol):
    """What this module asks of `telemetry.Gpu`."""

    def uuids(self) -> list[str]:
        """UUIDs of the devices the launch can use."""
        ...

    def memory_used_bytes(self, uuid: str) -> int:
        """Device memory in use now."""
        ...

    def compute_pids(self, uuid: str) -> list[int]:
        """Processes with a compute context."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """One server launch, complete.

    Attributes:
        argv: The command; the first item is the interpreter or program.
        env: The whole environment; nothing is inherited.
        cwd: Working directory, which must hold nothing that shadows an import.
        host: Address the server binds, numeric.
        port: TCP port the server binds.
        log_path: File that gets the server's output.
        served_model_name: Name unique to this launch.
        sentinel: Name and value of the variable unique to this launch; `env` holds it.
        ready_timeout_s: From start to the first completion.
        cache_dirs: Environment variable to the fresh directory it names, one for every compile and JIT cache.
        watched_defaults: Default cache locations, which must stay untouched.
        gpu: The devices the launch can use.
        grace_s: How long each of SIGINT, SIGTERM and SIGKILL is given.
        gpu_release_s: How long device memory may take to come back.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    host: str
    port: int
    log_path: Path
    served_model_name: str
    sentinel: tuple[str, str]
    ready_timeout_s: float
    cache_dirs: Mapping[str, Path]
    watched_defaults: Sequence[Path]
    gpu: GpuMemory
    grace_s: float = 15.0
    gpu_release_s: float = 60.0


# --- preflight ------------------------------------------------------------------------------------------------------


def check_port_free(host: str, port: int) -> None:
    """Nothing may listen where the server will.

    Raises:
        PreflightError: Something does; it is named where it can be seen.
    """
    holders = [pid for listener in procfs.listeners(host, port) for pid in listener.pids]
    if not holders and not procfs.listeners(host, port) and not procfs.port_open(host, port):
        return
    named = (
        "; ".join(f"pid {pid} ({procfs.title(pid)})" for pid in holders) or "a process that cannot be seen from here"
    )
    raise PreflightError(
        f"port {port} on {host} is taken by {named}",
        hint="stop it, or give the experiment another port; it may be the server of a run that was killed",
        code="wrong_server",
    )


def check_paths_distinct(paths: Mapping[str, Path]) -> None:
    """Cache directories must be different ones after every symlink and `~` is resolved.

    Args:
        paths: A name for people (variant and variable) to the directory.

    Raises:
        PreflightError: Two are the same directory.
    """
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        real = path.expanduser().resolve()
        if real in seen:
            raise PreflightError(
                f"{name} and {seen[real]} are the same directory: {real}",
                hint="what one variant compiles would be loaded by the other; give each its own",
                code="compile_cache_reused",
            )
        seen[real] = name


def check_caches_empty(cache_dirs: Mapping[str, Path]) -> list[CacheEvidence]:
    """Make the cache directories of a launch and prove them empty and distinct.

    Raises:
        PreflightError: One holds a file, is none, or is the same as another.
    """
    check_paths_distinct(cache_dirs)
    evidence = []
    for variable, path in cache_dirs.items():
        real = path.expanduser().resolve()
        try:
            real.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PreflightError(f"{variable}={path} is no directory: {error}", code="compile_cache_reused") from error
        files = [Path(folder, name) for folder, _, names in os.walk(real) for name in names]
        if files:
            raise PreflightError(
                f"{variable}={path} is not empty before the launch: {len(files)} file(s), for example {files[0]}",
                hint="a launch must compile afresh; remove the directory",
                code="compile_cache_reused",
            )
        evidence.append(CacheEvidence(variable=variable, path=str(path), files_before=0))
    return evidence


def check_disk_free(path: Path, needed_bytes: int) -> None:
    """The file system of an existing path must have room.

    Raises:
        PreflightError: It has less than `needed_bytes`.
    """
    free = shutil.disk_usage(path).free
    if free < needed_bytes:
        raise PreflightError(
            f"{path}: {free / 2**30:.2f} GiB free, {needed_bytes / 2**30:.2f} GiB needed for caches, logs and records",
            hint="free some space, or choose another results directory",
        )


def check_gpu_free(gpu: GpuMemory) -> None:
    """No other process may use the devices.

    Raises:
        PreflightError: One does, or more than 2 GiB are in use by processes that cannot be seen.
    """
    for uuid in gpu.uuids():
        pids = gpu.compute_pids(uuid)
        used = gpu.memory_used_bytes(uuid)
        if pids or used > GPU_IDLE_LIMIT_BYTES:
            named = ", ".join(f"pid {pid} ({procfs.title(pid)})" for pid in pids) or "processes not visible from here"
            raise PreflightError(
                f"GPU {uuid} is in use: {used / 2**30:.1f} GiB held by {named}",
                hint="stop them, or choose an idle GPU with CUDA_VISIBLE_DEVICES=<its UUID>",
                code="foreign_gpu_process",
            )


# --- the server -----------------------------------------------------------------------------------------------------


class VllmServer:
    """One server lifetime; a context manager that starts it on entry and stops it on every way out.

    Attributes:
        command: What was asked for.
        socket_owner_pid: Process of ours that holds the listening socket, once ready.
        ready_s: From process start to the first completion, once ready.
        stop_s: How long stopping took, once stopped.
    """

    def __init__(self, command: LaunchCommand) -> None:
        self.command = command
        self.socket_owner_pid: int | None = None
        self.ready_s: float | None = None
        self.stop_s: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log: BinaryIO | None = None
        self._known: dict[tuple[int, int], str] = {}
        self._caches: list[CacheEvidence] = []
        self._memory_before: dict[str, int] = {}
        self._shm_before: set[str] = set()
        self._shm_ours: set[str] = set()
        self._started_wall = 0.0
        self._started = 0.0
        self._observed = 0.0

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop()
        except TeardownError as failed:
            # Ctrl-C stays what it is; otherwise the next launch must not start, whatever ended this one.
            if error is None or isinstance(error, Exception):
                raise
            error.add_note(str(failed))

    @property
    def pid(self) -> int:
        """The process that was started.

        Raises:
            RuntimeError: Before `start`.
        """
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    def start(self) -> None:
        """Prove port, caches and GPU free, then start the process.

        Raises:
            PreflightError: The machine is not in a state to start it, or the program cannot be executed.
        """
        command = self.command
        check_port_free(command.host, command.port)
        check_gpu_free(command.gpu)
        self._caches = check_caches_empty(command.cache_dirs)
        self._memory_before = {uuid: command.gpu.memory_used_bytes(uuid) for uuid in command.gpu.uuids()}
        self._shm_before = _shared_names()
        try:
            self._log = command.log_path.open("wb")
            self._started_wall, self._started = time.time(), time.monotonic()
            # Its own session: Ctrl-C in our terminal reaches us, and we stop the server in order.
            self._process = subprocess.Popen(
                list(command.argv),
                env=dict(command.env),
                cwd=command.cwd,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise PreflightError(f"the server cannot be started: {error}", hint=f"by hand: {self.by_hand()}") from error
        self.observe()

    def wait_ready(
        self,
        first_completion: Callable[[], str | None],
        on_wait: Callable[[float, str], None] | None = None,
    ) -> None:
        """Wait until the listening socket is ours and one real completion came back.

        Args:
            first_completion: Asks the server for one completion of `served_model_name`; returns None when at least one
                token came, else the reason. Called only while the socket is ours, from another thread, so that a
                server that never answers or dies meanwhile is noticed. What it raises is raised here.
            on_wait: Called about once a second with the seconds since start and the last log line.

        Raises:
            ServerDied: The process ended.
            WrongServer: Somebody else's socket answers; nothing was sent.
            ServerNotReady: `ready_timeout_s` is over.
        """
        deadline = self._started + self.command.ready_timeout_s
        attempt: _Attempt | None = None
        reason = "nothing listens on the port"
        told = self._started
        while True:
            self.observe()
            self._raise_if_dead("before it was ready")
            owner = self._our_listener()
            if owner is not None and attempt is None:
                reason = "the first completion has not returned"
                attempt = _Attempt(first_completion)
            if attempt is not None and attempt.done():
                outcome = attempt.result()
                if outcome is None and owner is not None:
                    self._raise_if_dead("right after its first completion")
                    self.socket_owner_pid, self.ready_s = owner, attempt.ended - self._started
                    self._note_shared_memory()
                    return
                reason, attempt = outcome or "the listening socket was closed again", None
                time.sleep(POLL_S)
            now = time.monotonic()
            if now > deadline:
                raise ServerNotReady(
                    f"no completion within {self.command.ready_timeout_s:g} s: {reason}",
                    hint=f"raise server.ready_timeout_s if it was still compiling; by hand: {self.by_hand()}",
                    log_tail=self.log_tail(),
                )
            if on_wait is not None and now - told >= 1.0:
                told = now
                on_wait(now - self._started, next(iter(self.log_tail(1)), ""))
            time.sleep(POLL_S)

    def observe(self) -> list[procfs.Process]:
        """Look at the process tree and remember everybody in it; returns those alive now."""
        if self._process is None:
            return []
        everything = list(procfs.processes())
        root = self._process.pid
        ours = {one.pid: one for one in procfs.descendants(root, everything)}
        ours.update((one.pid, one) for one in everything if one.session == root)
        # A re-parented process may have started others since.
        for pid, ticks in list(self._known):
            ours.update((one.pid, one) for one in procfs.descendants(pid, everything) if procfs.is_alive(pid, ticks))
        for one in ours.values():
            self._known[one.pid, one.start_ticks] = procfs.title(one.pid)
        self._observed = time.monotonic()
        return [one for one in ours.values() if one.state not in "ZX"]

    def known(self) -> list[tuple[int, int]]:
        """`(pid, start_ticks)` of every process ever seen in the tree."""
        return list(self._known)

    def alive(self) -> str | None:
        """None while the server and its engine processes run, else what has ended."""
        if self._process is None:
            return "the server was not started"
        if self._process.poll() is not None:
            return f"the server {_status(self._process.returncode)}"
        if time.monotonic() - self._observed > 5.0:
            self.observe()
        for (pid, ticks), title in self._known.items():
            if title.startswith(procfs.ENGINE_TITLE) and not procfs.is_alive(pid, ticks):
                return f"{title.split(' ')[0]} (pid {pid}) has ended, the server (pid {self._process.pid}) runs on"
        return None

    def stop(self) -> None:
        """End every process of ours and see that port and GPU memory are given back. Safe to call at any moment.

        Raises:
            TeardownError: Something is left after SIGKILL and the time allowed.
        """
        began = time.monotonic()
        try:
            self._end_processes([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        except KeyboardInterrupt:
            # Asked twice: no more waiting for a clean end, but still an end.
            self._end_processes([signal.SIGKILL])
            raise
        finally:
            if self._log is not None:
                self._log.close()
        if self._process is None or self.stop_s is not None:
            return
        problems = [f"pid {pid} ({self._known[pid, ticks]}) is still there" for pid, ticks in self._remaining()]
        problems += self._port_problem() + self._memory_problem()
        self._remove_shared_memory()
        self.stop_s = time.monotonic() - began
        if problems:
            raise TeardownError(
                "the server did not give everything back: " + "; ".join(problems),
                hint="nothing else can be measured on this machine before that is cleared",
                log_tail=self.log_tail(),
            )

    # Evidence.

    def cache_evidence(self) -> list[CacheEvidence]:
        """What each cache directory holds now."""
        evidence = []
        for one in self._caches:
            sizes = []
            for folder, _, names in os.walk(Path(one.path).expanduser().resolve()):
                for name in names:
                    try:
                        sizes.append(Path(folder, name).lstat().st_size)
                    except FileNotFoundError:
                        continue  # temporary files come and go while it compiles
            evidence.append(one.model_copy(update={"files_after": len(sizes), "bytes_after": sum(sizes)}))
        return evidence

    def defaults_touched(self) -> list[str]:
        """Files below the watched default cache locations that changed since the start; the walk is bounded."""
        # Time stamps of files are taken from a clock that is up to one kernel tick behind.
        since = self._started_wall - 0.02
        touched: list[str] = []
        seen = 0
        for top in self.command.watched_defaults:
            for folder, _, names in os.walk(top.expanduser().resolve()):
                for name in names:
                    seen += 1
                    path = Path(folder, name)
                    try:
                        state = path.lstat()
                    except FileNotFoundError:
                        continue
                    if max(state.st_mtime, state.st_ctime) > since:
                        touched.append(str(path))
                if seen > WALK_LIMIT:
                    return [*touched, f"{folder}: not looked at beyond here, more than {WALK_LIMIT} files"]
        return touched

    def leftovers(self) -> list[str]:
        """Shared-memory names that appeared during the launch and could not be proven its own."""
        return sorted(str(SHARED_MEMORY / name) for name in _shared_names() - self._shm_before)

    def log_text(self) -> str:
        """The server's output; of a very long one its first 48 and last 16 MiB."""
        return _read_bounded(self.command.log_path, LOG_HEAD_BYTES, LOG_TAIL_BYTES)

    def log_tail(self, lines: int = 40) -> list[str]:
        """The last lines of the output, without colours, each cut to 400 characters."""
        text = ANSI.sub("", _read_bounded(self.command.log_path, 0, 2**18))
        return [line[:400] for line in text.splitlines()[-lines:]]

    def by_hand(self) -> str:
        """A shell command that starts the same server; secrets are taken from the shell's own variables."""
        variables = [
            f'{name}="${name}"' if procfs.SECRET_NAME.search(name) else f"{name}={shlex.quote(procfs.printable(value))}"
            for name, value in self.command.env.items()
        ]
        return " ".join(
            ["cd", shlex.quote(str(self.command.cwd)), "&&", "env", "-i", *variables, shlex.join(self.command.argv)]
        )

    # Inside.

    def _raise_if_dead(self, moment: str) -> None:
        assert self._process is not None
        if self._process.poll() is None and (self.ready_s is not None or self.alive() is None):
            return
        code = self._process.poll()
        what = f"the server {_status(code)}" if code is not None else self.alive()
        raise ServerDied(
            f"{what} {time.monotonic() - self._started:.1f} s after its start, {moment}",
            hint=f"by hand: {self.by_hand()}",
            log_tail=self.log_tail(),
        )

    def _our_listener(self) -> int | None:
        """The process of ours that holds the listening socket; None when nothing listens."""
        for last_look in (False, True):
            found = procfs.listeners(self.command.host, self.command.port)
            if not found:
                return None
            own = {pid for pid, ticks in self._known if procfs.is_alive(pid, ticks)}
            foreign = [one for one in found if not own.intersection(one.pids)]
            if not foreign:
                return min(pid for one in found for pid in one.pids if pid in own)
            if last_look:
                break
            self.observe()  # it may be a child that has only just been started
        pids = [pid for one in foreign for pid in one.pids]
        named = "; ".join(f"pid {pid} ({procfs.title(pid)})" for pid in pids) or "a process that cannot be seen"
        raise WrongServer(
            f"port {self.command.port} on {self.command.host} is answered by {named}, not by the server that was "
            f"started (pid {self.pid}); nothing was sent to it",
            hint="it took the port while our server was starting; stop it, or choose another port",
            code="wrong_server",
            log_tail=self.log_tail(),
        )

    def _remaining(self) -> list[tuple[int, int]]:
        return [(pid, ticks) for pid, ticks in self._known if procfs.is_alive(pid, ticks)]

    def _end_processes(self, numbers: Sequence[signal.Signals]) -> None:
        if self._process is None:
            return
        self._adopt_carriers()
        self._note_shared_memory()
        for number in numbers:
            if not self._remaining():
                return
            root = self._process.pid
            # vLLM's server ends its own children in order when it is asked alone; the others are told afterwards.
            targets = [one for one in self._remaining() if number is not signal.SIGINT or one[0] == root]
            if not targets:
                continue
            _signal(targets, number)
            deadline = time.monotonic() + self.command.grace_s
            while time.monotonic() < deadline:
                ended = self._process.poll() is not None
                self.observe()
                if number is signal.SIGKILL:
                    _signal(self._remaining(), number)
                if ended and not self._remaining():
                    return
                time.sleep(POLL_S / 2)
            self._adopt_carriers()

    def _adopt_carriers(self) -> None:
        self.observe()
        for one in procfs.carrying(*self.command.sentinel):
            self._known.setdefault((one.pid, one.start_ticks), procfs.title(one.pid))

    def _port_problem(self) -> list[str]:
        deadline = time.monotonic() + self.command.grace_s
        while found := procfs.listeners(self.command.host, self.command.port):
            if time.monotonic() > deadline:
                pids = [pid for one in found for pid in one.pids]
                named = ", ".join(f"pid {pid} ({procfs.title(pid)})" for pid in pids) or "a process that cannot be seen"
                return [f"port {self.command.port} is still open, held by {named}"]
            time.sleep(POLL_S)
        return []

    def _memory_problem(self) -> list[str]:
        gpu = self.command.gpu
        deadline = time.monotonic() + self.command.gpu_release_s
        while True:
            used = {uuid: gpu.memory_used_bytes(uuid) for uuid in self._memory_before}
            kept = {
                u: used[u] for u, before in self._memory_before.items() if used[u] > before + GPU_MEMORY_TOLERANCE_BYTES
            }
            if not kept:
                return []
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S * 2)
        problems = []
        for uuid, now in kept.items():
            pids = (
                ", ".join(f"pid {pid} ({procfs.title(pid)})" for pid in gpu.compute_pids(uuid)) or "no visible process"
            )
            before = self._memory_before[uuid]
            problems.append(
                f"GPU {uuid} has {now / 2**30:.1f} GiB in use, {before / 2**30:.1f} GiB before the launch; on it: {pids}"
            )
        return problems

    def _note_shared_memory(self) -> None:
        # What our processes had mapped is ours; a name that merely appeared meanwhile may be anybody's.
        prefix = f"{SHARED_MEMORY}/"
        for pid, _ in self._remaining():
            self._shm_ours |= {path.removeprefix(prefix) for path in procfs.files_in_use(pid, prefix)}

    def _remove_shared_memory(self) -> None:
        new = {name for name in _shared_names() - self._shm_before if name in self._shm_ours}
        if not new:
            return
        prefix = f"{SHARED_MEMORY}/"
        in_use = {path for one in procfs.processes() for path in procfs.files_in_use(one.pid, prefix)}
        for name in new:
            path = SHARED_MEMORY / name
            if str(path) in in_use:
                continue
            try:
                if path.lstat().st_uid == os.getuid():
                    path.unlink()
            except FileNotFoundError:
                continue


class _Attempt:
    """One call of the first completion in a thread of its own: it may never return."""

    def __init__(self, call: Callable[[], str | None]) -> None:
        self._outcome: str | None = None
        self._error: BaseException | None = None
        self.ended = 0.0

        def run() -> None:
            try:
                self._outcome = call()
            except BaseException as error:  # noqa: BLE001  # raised again in the waiting thread
                self._error = error
            self.ended = time.monotonic()

        self._thread = threading.Thread(target=run, name="first-completion", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        self._thread.join(POLL_S)
        return not self._thread.is_alive()

    def result(self) -> str | None:
        if self._error is not None:
            raise self._error
        return self._outcome


def _status(code: int) -> str:
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _signal(targets: Iterable[tuple[int, int]], number: signal.Signals) -> None:
    for pid, ticks in targets:
        # A pid may have been given to another process since: only the one we recorded is signalled.
        if procfs.is_alive(pid, ticks):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def _shared_names() -> set[str]:
    try:
        return {path.name for path in SHARED_MEMORY.iterdir() if SHARED_NAME.fullmatch(path.name)}
    except FileNotFoundError:
        return set()


def _read_bounded(path: Path, head: int, tail: int) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if size <= head + tail:
                raw = file.read(head + tail)
            else:
                raw = file.read(head)
                file.seek(size - tail)
                raw += b"\n[... %d bytes left out ...]\n" % (size - head - tail) + file.read(tail)
    except FileNotFoundError:
        return ""
    return raw.decode("utf-8", "replace")
