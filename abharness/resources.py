"""What one launch takes of the machine: port, cache directories, disk, GPU and shared memory.

Before: `check_*` raise `PreflightError` when something is not free. After: `*_problem` say what was not given back.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from abharness import procfs
from abharness.errors import PreflightError
from abharness.witnesses import CacheEvidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where the C library keeps named segments and semaphores
# Names that Python's multiprocessing, torch and NCCL give their segments and semaphores.
SHARED_NAME = re.compile(r"psm_\w+|sem\.mp-\w+|torch_\w+|nccl-\w+")
POLL_S = 0.1
# A driver keeps some memory of its own, and frees a context's in steps.
GPU_MEMORY_TOLERANCE_BYTES = 512 * 2**20
GPU_IDLE_LIMIT_BYTES = 2 * 2**30
WALK_LIMIT = 200_000
CLOCK_TICK_S = 0.02
"""Time stamps of files are taken from a clock that is up to one kernel tick behind, seconds."""
OLDER_KEPT = 20
"""Paths of files older than the launch that go into the record."""


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


def check_port_free(host: str, port: int) -> None:
    """Nothing may listen where the server will.

    Raises:
        PreflightError: Something does; it is named where it can be seen.
    """
    found = procfs.listeners(host, port)
    if not found and not procfs.port_open(host, port):
        return
    raise PreflightError(
        f"port {port} on {host} is taken by {named(pid for one in found for pid in one.pids)}",
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
            hint="free some space, or choose another folder with -o and TMPDIR",
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
            raise PreflightError(
                f"GPU {uuid} is in use: {used / 2**30:.1f} GiB held by {named(pids)}",
                hint="stop them, or choose an idle GPU with CUDA_VISIBLE_DEVICES=<its UUID>",
                code="foreign_gpu_process",
            )


def file_clock(folder: Path) -> float:
    """This moment on the clock that stamps the files of a folder, seconds since the epoch.

    Raises:
        OSError: Nothing can be written there.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def measure_cache(before: CacheEvidence, since: float) -> CacheEvidence:
    """The same cache directory with what it holds now.

    Args:
        before: What is known of it.
        since: When the launch began, seconds since the epoch: an older file was not written by its server.
    """
    sizes = []
    older: list[str] = []
    for folder, _, names in os.walk(Path(before.path).expanduser().resolve()):
        for name in names:
            path = Path(folder, name)
            try:
                state = path.lstat()
            except FileNotFoundError:
                continue  # temporary files come and go while it compiles
            sizes.append(state.st_size)
            if state.st_mtime < since - CLOCK_TICK_S:
                older.append(str(path))
    found = {"files_after": len(sizes), "bytes_after": sum(sizes), "older": older[:OLDER_KEPT]}
    return before.model_copy(update=found)


def changed_files(folders: Iterable[Path], since: float) -> list[str]:
    """Files below some folders that were written since a moment.

    Args:
        folders: Where to look; one that does not exist holds nothing.
        since: Seconds since the epoch.

    Returns:
        Their paths. When there are too many files to look at, the last entry says so.
    """
    since -= CLOCK_TICK_S
    changed: list[str] = []
    visited: set[str] = set()
    seen = 0
    for top in folders:
        # A cache is often a link to a larger disk, at any depth.
        for folder, below, names in os.walk(top.expanduser().resolve(), followlinks=True):
            real = os.path.realpath(folder)
            if real in visited:
                below.clear()
                continue
            visited.add(real)
            for name in names:
                seen += 1
                path = Path(folder, name)
                try:
                    state = path.lstat()
                except FileNotFoundError:
                    continue
                if max(state.st_mtime, state.st_ctime) > since:
                    changed.append(str(path))
            if seen > WALK_LIMIT:
                return [*changed, f"{folder}: not looked at beyond here, more than {WALK_LIMIT} files"]
    return changed


def port_problem(host: str, port: int, wait_s: float) -> list[str]:
    """Wait until nothing listens there; otherwise say who does."""
    deadline = time.monotonic() + wait_s
    while found := procfs.listeners(host, port):
        if time.monotonic() > deadline:
            pids = [pid for one in found for pid in one.pids]
            return [f"port {port} is still open, held by {named(pids)}"]
        time.sleep(POLL_S)
    return []


def memory_problem(gpu: GpuMemory, before: Mapping[str, int], wait_s: float) -> list[str]:
    """Wait until the devices' memory is back at its level; otherwise say how much is kept and who is on the device.

    Args:
        gpu: The devices.
        before: UUID to bytes in use before the launch.
        wait_s: How long it may take.
    """
    deadline = time.monotonic() + wait_s
    while True:
        used = {uuid: gpu.memory_used_bytes(uuid) for uuid in before}
        kept = [uuid for uuid in before if used[uuid] > before[uuid] + GPU_MEMORY_TOLERANCE_BYTES]
        if not kept or time.monotonic() > deadline:
            break
        time.sleep(POLL_S * 2)
    return [
        f"GPU {uuid} has {used[uuid] / 2**30:.1f} GiB in use, {before[uuid] / 2**30:.1f} GiB before the launch; "
        f"on it: {named(gpu.compute_pids(uuid))}"
        for uuid in kept
    ]


def named(pids: Iterable[int]) -> str:
    """Processes for people: pid and title."""
    return "; ".join(f"pid {pid} ({procfs.title(pid)})" for pid in pids) or "a process that cannot be seen from here"


class SharedMemory:
    """The named shared memory of one launch: what a killed vLLM leaves in /dev/shm is removed if provably its own.

    A name counts as its own when it appeared after the start, was open or mapped in one of its processes at a `note`,
    belongs to this user, and is in use by nobody. A name that merely appeared meanwhile may be anybody's and stays.
    """

    def __init__(self, before: Iterable[str], used: Iterable[str] = ()) -> None:
        """Begin with names: those that were there before the launch, and those that it is known to have used."""
        self.before = frozenset(before)
        self.used = set(used)

    @classmethod
    def now(cls) -> Self:
        """Of a launch that begins now."""
        return cls(cls._names())

    def note(self, pids: Iterable[int]) -> None:
        """Remember what these processes use now."""
        for pid in pids:
            self.used |= {Path(path).name for path in procfs.files_in_use(pid, f"{SHARED_MEMORY}/")}

    def appeared(self) -> list[str]:
        """Paths that are there and were not before the launch."""
        return sorted(str(SHARED_MEMORY / name) for name in self._names() - self.before)

    def remove(self) -> None:
        """Remove what is left and provably ours."""
        left = (self._names() - self.before) & self.used
        if not left:
            return
        in_use = {path for one in procfs.processes() for path in procfs.files_in_use(one.pid, f"{SHARED_MEMORY}/")}
        for path in (SHARED_MEMORY / name for name in left):
            try:
                if str(path) not in in_use and path.lstat().st_uid == os.getuid():
                    path.unlink()
            except FileNotFoundError:
                continue

    @staticmethod
    def _names() -> set[str]:
        if not SHARED_MEMORY.is_dir():
            return set()
        return {path.name for path in SHARED_MEMORY.iterdir() if SHARED_NAME.fullmatch(path.name)}
