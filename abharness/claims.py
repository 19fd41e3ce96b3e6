"""What a run holds of the machine, on disk while it does -> what a dead harness left, found and given back.

A run keeps everything of its servers in one scratch folder, `<temporary folder>/ab-<token>`, and with it

    .lock       held by the harness: the kernel gives it back with the harness's death, so that nothing has to be
                concluded from process ids
    held.json   the `Claim`: the launch of the moment, by its sentinel, processes, port and shared memory

Its run folder has a `.lock` too, which names the scratch folder: `--resume` finds it under another TMPDIR. Whoever
finds a scratch folder whose lock nobody holds (the guard of that run first of all, then any later run of this user)
takes the lock, stops the processes that are provably of that run, removes their shared memory, and at last the folder.
Nothing else is touched, and nothing of a harness that lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from abharness import locks, procfs, redaction
from abharness.base import Model
from abharness.errors import RecordError, TeardownError, UsageError
from abharness.resources import SharedMemory, port_problem
from abharness.spec import SENTINEL_VARIABLE
from abharness.storage import read_model, write_model
from abharness.tree import ORDERLY, ProcessTree

SCRATCH_NAME = re.compile(r"ab-[0-9a-f]{8}")
"""Names of the scratch folders of runs; nothing of another name is ever removed."""

LOCK_FILE = ".lock"
CLAIM_FILE = "held.json"
POLL_S = 0.1
CLEARING_S = 120.0
"""Longest wait for another process that is clearing the same folder."""

GRACE_S = 5.0
"""How long each signal is given: nobody waits for an orderly end any more."""


class HeldLaunch(Model):
    """What one launch holds.

    Attributes:
        sentinel: Name and value of the variable unique to the launch.
        root: `(pid, start_ticks)` of its first process; None before that was started.
        known: The same of all its processes seen so far.
        shared_before: Names in /dev/shm before the launch.
        shared_used: Names in /dev/shm that its processes were seen to use.
        log: Its log in the scratch folder.
        keep_log: Where that is to be kept.
    """

    sentinel: tuple[str, str]
    host: str
    port: int
    root: tuple[int, int] | None
    known: list[tuple[int, int]]
    shared_before: list[str]
    shared_used: list[str]
    log: str
    keep_log: str


class Claim(Model):
    """What one run holds.

    Attributes:
        kernel: Where its process ids mean something: the boot and the namespace of process ids.
        harness: `(pid, start_ticks)` of the harness.
        launch: The launch of the moment; None between two.
    """

    kernel: tuple[str, str]
    harness: tuple[int, int]
    launch: HeldLaunch | None = None


class Holding:
    """The scratch folder of a run of this process, locked, and what is claimed in it."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._claim = Claim(kernel=_kernel(), harness=_self())

    def note(self, launch: HeldLaunch | None) -> None:
        """Write down what the launch of the moment holds; None when it has given everything back."""
        self._claim = self._claim.model_copy(update={"launch": launch})
        write_model(self.scratch / CLAIM_FILE, self._claim)


@contextlib.contextmanager
def holding(scratch: Path) -> Iterator[Holding]:
    """Make the scratch folder of a run and hold it for the block; it is removed at the end.

    Raises:
        OSError: It cannot be made.
    """
    try:
        with _locked(scratch):
            made = Holding(scratch)
            made.note(None)
            yield made
            # Before the lock is given back: nobody else shall take it for a dead run's.
            shutil.rmtree(scratch, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _locked(scratch: Path) -> Iterator[None]:
    while True:
        # Another run that looks for dead ones may hold it, or remove it, before this one has it.
        scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), locks.held(scratch / LOCK_FILE) as lock:
            if lock is not None:
                yield
                return
        time.sleep(POLL_S)


@contextlib.contextmanager
def one_run_at_a_time(run_dir: Path, scratch: Path) -> Iterator[Path | None]:
    """Hold a run folder for the block.

    Yields:
        The scratch folder of a harness that died while it held this run folder, or None.

    Raises:
        UsageError: Another run holds it, or nothing can be written there.
    """
    path = run_dir / LOCK_FILE
    try:
        path.touch()
    except OSError as error:
        raise UsageError(
            f"cannot write in {run_dir}: {error.strerror}", hint="make it writable, or free some space"
        ) from error
    with locks.held(path) as lock:
        if lock is None:
            raise UsageError(f"{run_dir} is in use by another abharness run", hint="wait for it to end")
        earlier = _named_in(lock)
        lock.seek(0)
        lock.truncate()
        lock.write(json.dumps({"scratch": str(scratch)}) + "\n")
        lock.flush()
        try:
            yield earlier
        finally:
            path.unlink(missing_ok=True)


def _named_in(lock: TextIO) -> Path | None:
    try:
        return Path(json.load(lock)["scratch"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None  # empty: it is new; torn: its holder died before anything was started


def clear_dead_runs(temporary: Path, say: Callable[[str], None]) -> None:
    """Give back what every dead harness of this user left on this machine.

    Args:
        temporary: The folder of scratch folders.
        say: Told what is stopped.

    Raises:
        TeardownError: Something cannot be stopped.
    """
    for folder in sorted(temporary.iterdir()):
        clear_dead(folder, say)


def clear_dead(scratch: Path, say: Callable[[str], None]) -> None:
    """Give back what a dead harness left: its processes, their shared memory, the scratch folder.

    Nothing is done where the folder is no run's, another user's, gone, or held by a living harness. Where somebody
    else is clearing it, that is waited for.

    Raises:
        TeardownError: Something cannot be stopped.
    """
    deadline = time.monotonic() + CLEARING_S
    while _is_own_scratch(scratch):
        try:
            with locks.held(scratch / LOCK_FILE, create=False) as lock:
                if lock is not None:
                    _clear(scratch, say)
                    return
        except FileNotFoundError:
            # Made a moment ago, or by a harness that died within that moment.
            with contextlib.suppress(OSError):
                scratch.rmdir()
            return
        if _lives(_read(scratch)) or time.monotonic() > deadline:
            return
        time.sleep(POLL_S)


def _is_own_scratch(path: Path) -> bool:
    try:
        return (
            SCRATCH_NAME.fullmatch(path.name) is not None
            and path.is_dir()
            and not path.is_symlink()
            and path.lstat().st_uid == os.getuid()
        )
    except OSError:
        return False


def _lives(claim: Claim | None) -> bool:
    """Whether the harness of a claim runs; one that cannot be told lives, as it holds the lock."""
    return claim is None or claim.kernel != _kernel() or procfs.is_alive(*claim.harness)


def _read(scratch: Path) -> Claim | None:
    try:
        return read_model(scratch / CLAIM_FILE, Claim)
    except RecordError:
        return None


def _clear(scratch: Path, say: Callable[[str], None]) -> None:
    claim = _read(scratch)
    launch = claim.launch if claim is not None and claim.kernel == _kernel() else None
    problems: list[str] = []
    # A process may have been started before the claim said so; its sentinel says of which run it is.
    for sentinel in sorted({*_sentinels(scratch), *([launch.sentinel] if launch else [])}):
        of_launch = launch if launch is not None and launch.sentinel == sentinel else None
        problems += _stop(sentinel, of_launch, say)
    if problems:
        raise TeardownError(
            f"what a killed run ({scratch.name}) left cannot be cleared away: {'; '.join(problems)}",
            hint="nothing can be measured on this machine before that is gone",
        )
    shutil.rmtree(scratch, ignore_errors=True)


def _sentinels(scratch: Path) -> set[tuple[str, str]]:
    """Sentinels of a run's launches that some process of this user carries now."""
    begin = f"{scratch.name.removeprefix('ab-')}-"
    values = {value for _, value in procfs.values_of(SENTINEL_VARIABLE) if value.startswith(begin)}
    return {(SENTINEL_VARIABLE, value) for value in values}


def _stop(sentinel: tuple[str, str], launch: HeldLaunch | None, say: Callable[[str], None]) -> list[str]:
    tree = ProcessTree(sentinel)
    # Without a claim whatever its processes have in use appeared with them.
    shared = SharedMemory(launch.shared_before, launch.shared_used) if launch else SharedMemory(())
    if launch is not None:
        tree.grow_from(launch.root, launch.known)
    tree.adopt_carriers()
    if found := tree.remaining():
        say(f"a killed run left launch {sentinel[1]} running: stopping {_named(tree, found)}")
    for pid, _ in found:
        # They end now, and what they were started with is to be hidden in their log.
        redaction.remember(redaction.secrets_of(procfs.read_environ(pid).variables, procfs.arguments(pid)))
    shared.note(pid for pid, _ in found)
    tree.end(ORDERLY, GRACE_S)
    shared.remove()
    if launch is not None:
        _keep_log(Path(launch.log), Path(launch.keep_log))
    problems = [f"{_named(tree, [one])} is still there" for one in tree.remaining()]
    return problems + (port_problem(launch.host, launch.port, GRACE_S) if found and launch else [])


def _keep_log(log: Path, kept: Path) -> None:
    redaction.remember(redaction.secrets_of(os.environ))
    with contextlib.suppress(OSError):  # a full disk, a folder that is gone: it is no reason to leave processes
        if kept.parent.is_dir() and not kept.exists():
            redaction.scrubbed_copy(log, kept)


def _named(tree: ProcessTree, keys: list[tuple[int, int]]) -> str:
    return ", ".join(f"pid {key[0]} ({tree.known[key]})" for key in keys)


def _kernel() -> tuple[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return boot, str(Path("/proc/self/ns/pid").readlink())


def _self() -> tuple[int, int]:
    return os.getpid(), procfs.start_ticks(os.getpid()) or 0
