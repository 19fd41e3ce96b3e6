"""One launch: a complete command and environment in, a running server of known processes out, and nothing left after.

    with VllmServer(command) as server:      # started in its own session
        server.wait_ready(first_completion)  # our socket, our model, one real completion
        ...                                  # server.alive() between requests
    # stopped: processes gone, port closed, GPU memory given back

Processes are named by (pid, start time) from the moment they are seen; only those are ever signalled, and each is
checked again right before. HTTP is the caller's: what decides readiness is passed in.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Self

from abharness import procfs
from abharness.claims import HeldLaunch
from abharness.errors import PreflightError, ServerDied, ServerNotReady, TeardownError, WrongServer
from abharness.redaction import is_secret, redact_argv, scrub, shell_word
from abharness.resources import (
    SharedMemory,
    changed_files,
    check_caches_empty,
    check_gpu_free,
    check_port_free,
    file_clock,
    measure_cache,
    memory_problem,
    named,
    port_problem,
)
from abharness.tree import ORDERLY, ProcessTree
from abharness.witnesses import ENGINE_TITLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from abharness.resources import GpuMemory
    from abharness.witnesses import CacheEvidence

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
POLL_S = 0.1
BY_HAND = (
    "read the end of server.log; launch.json beside it and the report have the command that starts the same server"
)
LOG_HEAD_BYTES = 48 * 2**20
LOG_TAIL_BYTES = 16 * 2**20


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
        self._tree = ProcessTree(command.sentinel)
        self._caches: list[CacheEvidence] = []
        self._memory_before: dict[str, int] = {}
        self._shared = SharedMemory.now()
        self._started_wall = 0.0
        self._started = 0.0

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

    @property
    def started(self) -> bool:
        """Whether a process was ever started."""
        return self._process is not None

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
        try:
            self._log = command.log_path.open("wb")
            self._started_wall, self._started = file_clock(command.log_path.parent), time.monotonic()
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
            raise PreflightError(f"the server cannot be started: {error}", hint=BY_HAND) from error
        # Not collected yet, so the pid is still its own, even where it has ended already.
        ticks = procfs.start_ticks(self._process.pid)
        self._tree.grow_from(None if ticks is None else (self._process.pid, ticks))
        self._tree.observe()

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
        outcome: str | None = None
        reason = "nothing listens on the port"
        told = self._started
        while True:
            self.observe()
            self._raise_if_dead("before it was ready")
            owner = self._our_listener()
            if owner is not None and attempt is None:
                # What an earlier attempt was told says more than that this one has not ended.
                reason = outcome or "the first completion has not returned"
                attempt = _Attempt(first_completion)
            if attempt is not None and attempt.done():
                outcome = attempt.result()
                if outcome is None and owner is not None:
                    self._raise_if_dead("right after its first completion")
                    self.socket_owner_pid, self.ready_s = owner, attempt.ended - self._started
                    self._shared.note(pid for pid, _ in self._tree.remaining())
                    return
                outcome, attempt = outcome or "the listening socket was closed again", None
                reason = outcome
                time.sleep(POLL_S)
            now = time.monotonic()
            if now > deadline:
                raise ServerNotReady(
                    f"no completion within {self.command.ready_timeout_s:g} s: {reason}",
                    hint=f"raise server.ready_timeout_s if it was still compiling; otherwise: {BY_HAND}",
                    log_tail=self.log_tail(),
                )
            if on_wait is not None and now - told >= 1.0:
                told = now
                on_wait(now - self._started, next(iter(self.log_tail(1)), ""))
            time.sleep(POLL_S)

    def observe(self) -> list[procfs.Process]:
        """Look at the process tree and remember everybody in it; returns those alive now."""
        return [] if self._process is None else self._tree.observe()

    def known(self) -> list[tuple[int, int]]:
        """`(pid, start_ticks)` of every process ever seen in the tree."""
        return list(self._tree.known)

    def held(self, keep_log: Path) -> HeldLaunch:
        """What the launch holds of the machine by now, for whoever has to clear it away should this process die.

        Args:
            keep_log: Where its log is to be kept then.
        """
        return HeldLaunch(
            sentinel=self.command.sentinel,
            host=self.command.host,
            port=self.command.port,
            root=self._tree.root,
            known=self.known(),
            shared_before=sorted(self._shared.before),
            shared_used=sorted(self._shared.used),
            log=str(self.command.log_path),
            keep_log=str(keep_log.absolute()),
        )

    def alive(self) -> str | None:
        """None while the server and its engine processes run, else what has ended."""
        if self._process is None:
            return "the server was not started"
        if self._process.poll() is not None:
            return f"the server {_status(self._process.returncode)}"
        if time.monotonic() - self._tree.observed_s > 5.0:
            self.observe()
        for (pid, ticks), title in self._tree.known.items():
            if title.startswith(ENGINE_TITLE) and not procfs.is_alive(pid, ticks):
                return f"{title.split(' ')[0]} (pid {pid}) has ended, the server (pid {self._process.pid}) runs on"
        return None

    def check_listener(self) -> None:
        """The listening socket must still be held by processes of ours, and by nobody else.

        Raises:
            WrongServer: Somebody else holds it too, or nobody does.
        """
        if self._our_listener() is None:
            raise WrongServer(
                f"nothing listens any more on port {self.command.port} of {self.command.host}",
                hint=BY_HAND,
                code="wrong_server",
                log_tail=self.log_tail(),
            )

    def stop(self) -> None:
        """End every process of ours and see that port and GPU memory are given back. Safe to call at any moment.

        Raises:
            TeardownError: Something is left after SIGKILL and the time allowed.
        """
        began = time.monotonic()
        try:
            self._end_processes(ORDERLY)
        except KeyboardInterrupt:
            # Asked twice: no more waiting for a clean end, but still an end.
            self._end_processes([signal.SIGKILL])
            raise
        finally:
            if self._log is not None:
                self._log.close()
        if self._process is None or self.stop_s is not None:
            return
        problems = [
            f"pid {pid} ({self._tree.known[pid, ticks]}) is still there" for pid, ticks in self._tree.remaining()
        ]
        command = self.command
        problems += port_problem(command.host, command.port, command.grace_s)
        problems += memory_problem(command.gpu, self._memory_before, command.gpu_release_s)
        self._shared.remove()
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
        return [measure_cache(one, self._since_wall()) for one in self._caches]

    def defaults_touched(self) -> list[str]:
        """Files below the watched default cache locations that changed since the start; the walk is bounded."""
        return changed_files(self.command.watched_defaults, self._since_wall())

    def _since_wall(self) -> float:
        """The start on the clock that gives files their times; earlier, where that was set back since."""
        now = file_clock(self.command.log_path.parent)
        return min(self._started_wall, now - (time.monotonic() - self._started))

    def leftovers(self) -> list[str]:
        """Shared-memory names that appeared during the launch and could not be proven its own."""
        return self._shared.appeared()

    def log_text(self) -> str:
        """The server's output; of a very long one its first 48 and last 16 MiB."""
        return scrub(_read_bounded(self.command.log_path, LOG_HEAD_BYTES, LOG_TAIL_BYTES))

    def log_tail(self, lines: int = 40) -> list[str]:
        """The last lines of the output, without colours, each cut to 400 characters."""
        text = scrub(ANSI.sub("", _read_bounded(self.command.log_path, 0, 2**18)))
        return [line[:400] for line in text.splitlines()[-lines:]]

    def by_hand(self) -> str:
        """A shell command that starts the same server.

        Secrets are taken from the shell's own variables; where one is not set there, the shell refuses.
        """
        variables = [
            f'{name}="${{{name}:?}}"' if is_secret(name, value) else f"{name}={shell_word(scrub(value))}"
            for name, value in self.command.env.items()
        ]
        # The launch's own folders are gone once it is over.
        folders = [str(self.command.cwd), *(value for name, value in self.command.env.items() if name == "TMPDIR")]
        place = f"mkdir -p {' '.join(map(shell_word, folders))} && cd {shell_word(folders[0])} &&"
        return " ".join([place, "env", "-i", *variables, *map(shell_word, redact_argv(self.command.argv))])

    # Inside.

    def _raise_if_dead(self, moment: str) -> None:
        ended = self.alive()
        if ended is not None:
            if self._process is not None:
                # A server follows its engine in a moment, and its exit status says more.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
                ended = self.alive() or ended
            raise ServerDied(
                f"{ended} {time.monotonic() - self._started:.1f} s after its start, {moment}",
                hint=BY_HAND,
                log_tail=self.log_tail(),
            )

    def _our_listener(self) -> int | None:
        """The process of ours that holds the listening socket; None when nothing listens."""
        for last_look in (False, True):
            found = procfs.listeners(self.command.host, self.command.port)
            if not found:
                return None
            own = {pid for pid, ticks in self._tree.known if procfs.is_alive(pid, ticks)}
            # Whoever holds the socket may accept: one stranger beside our own is one too many.
            pids = sorted({pid for one in found for pid in one.pids} - own)
            if not pids and all(one.pids for one in found):
                return min(pid for one in found for pid in one.pids)
            if last_look:
                break
            self.observe()  # it may be a child that has only just been started
        raise WrongServer(
            f"port {self.command.port} on {self.command.host} is answered by {named(pids)}, not by the server that was "
            f"started (pid {self.pid}); nothing was sent to it",
            hint="it took the port, or was given the socket, while our server ran; stop it, or choose another port",
            code="wrong_server",
            log_tail=self.log_tail(),
        )

    def _end_processes(self, numbers: Sequence[signal.Signals]) -> None:
        if not self._started:
            return
        self._tree.adopt_carriers()
        self._shared.note(pid for pid, _ in self._tree.remaining())
        self._tree.end(numbers, self.command.grace_s)
        if self._process is not None:
            # A child that has ended is to be reaped; its first thread shows as ended a moment before the last one has.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)


class _Attempt:
    """One call of the first completion in a thread of its own: it may never return."""

    def __init__(self, call: Callable[[], str | None]) -> None:
        self._outcome: str | None = None
        self._error: BaseException | None = None
        self.ended = 0.0

        def run() -> None:
            try:
                self._outcome = call()
            except BaseException as error:  # raised again in the waiting thread
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
