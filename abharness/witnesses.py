"""The records of what each witness of a launch shows: `/proc`, the probe, the GPU driver, the cache directories."""

from __future__ import annotations

from typing import Any, Literal

from abharness.base import Model

ENGINE_TITLE = "VLLM::"
"""What vLLM begins the titles of its processes with."""

ReadState = Literal["ok", "unreadable", "gone"]


class ProcessWitness(Model):
    """What `/proc` says of one process of a server's tree.

    Attributes:
        pid: Process id; with `start_ticks` it names one process for good.
        ppid: Its parent's.
        start_ticks: Field 22 of `/proc/<pid>/stat`, clock ticks since boot.
        name: Its title as it stands now, cut to 80 characters.
        state: `ok`: environment read whole, sentinel seen. `unreadable`: see `reason`. `gone`: it ended meanwhile.
        reason: Why the block proves nothing (wiped, empty, no permission, sentinel missing, ...).
        started_with: Value of each declared variable in the exec-time block; None is proven unset. Empty unless
            `state` is `ok`.
        role: What it does in the server: `server`, `EngineCore`, `Worker...`, or `process`.
        undeclared: Variables beyond the declared ones whose exec-time value is not the launched one: the value, or None
            where the launched variable is missing.
        renamed: Whether it shows a title in place of its arguments; with `state` `ok` that proves that the renaming
            left the environment alone (`SPT_NOENV`). None: its arguments cannot be read, or nobody looked.
        layout_checked: The block agrees with the number and the places of the entries that the kernel laid out at
            exec. False: that could not be read (ptrace_scope). None: nobody looked.
    """

    pid: int
    ppid: int
    start_ticks: int
    name: str
    state: ReadState
    reason: str | None = None
    started_with: dict[str, str | None] = {}
    role: str = "process"
    undeclared: dict[str, str | None] = {}
    renamed: bool | None = None
    layout_checked: bool | None = None


class LoadedModule(Model):
    """One imported module as its process sees it; None where it does not say.

    Attributes:
        version: Its `__version__`.
        file: Where it was imported from.
    """

    version: str | None = None
    file: str | None = None


class ProbeReport(Model):
    """What `abharness.probe` wrote inside one process of the server.

    Attributes:
        pid: Process id, as the process sees it.
        ppid: Its parent's.
        start_ticks: With `pid` it names one process for good.
        name: Name of the process in Python's `multiprocessing`.
        reason: `asked`: the answer to this check's question. `start`, `fork`: written then, and not answered since.
        nonce: The question's number that this answers; None when it was not asked.
        deaf: Why it cannot answer questions, or None.
        executable: Its interpreter.
        python: Python version.
        environ: `os.environ` at that moment, secrets redacted.
        modules: The libraries that matter, of those imported.
        plugins: General plugins loaded in this process.
        plugin_files: Where each general plugin's module was imported from, of those imported.
        reports: What plugins say of themselves (`abharness_report`), by plugin; only in an answer.
        report_faults: Why a plugin that has something to say could not say it, by plugin.
        cache_dirs: Cache directories that loaded libraries say they use, by the variable that should name them.
        gpu_uuids: GPUs that CUDA shows this process, or None with the reason in `gpu_absent`.
        gpu_absent: Why it shows none, or None.
    """

    pid: int
    ppid: int
    start_ticks: int
    name: str
    reason: Literal["start", "fork", "asked"]
    nonce: str | None = None
    deaf: str | None = None
    executable: str
    python: str
    environ: dict[str, str]
    modules: dict[str, LoadedModule]
    plugins: list[str]
    plugin_files: dict[str, str] = {}
    reports: dict[str, dict[str, Any]] = {}
    report_faults: dict[str, str] = {}
    cache_dirs: dict[str, str]
    gpu_uuids: list[str] | None = None
    gpu_absent: str | None = None


class KernelFolder(Model):
    """A kernel folder as the launches of a run get it: a frozen copy.

    Attributes:
        name: Of its package and its plugin.
        path: The folder that was copied.
        sha256: Hash over the names and the contents of its files.
        site: The folder on PYTHONPATH in which the copy lies.
        git_commit: Commit checked out in the repository that it lies in; None where it lies in none.
        git_dirty: Whether it holds anything that is not in that commit; None where there is none.
    """

    name: str
    path: str
    sha256: str
    site: str
    git_commit: str | None = None
    git_dirty: bool | None = None


class GpuHolder(Model):
    """A process with a compute context on a GPU of the launch.

    Attributes:
        uuid: NVML UUID of the GPU.
        pid: As the driver numbers it.
        name: Its title, where it can be seen from here.
        whose: `ours`: of the verified tree. `foreign`: another process of this machine. `unknown`: the driver's number
            names no process that can be seen here (another pid namespace).
    """

    uuid: str
    pid: int
    name: str
    whose: Literal["ours", "foreign", "unknown"]


class CacheEvidence(Model):
    """One cache directory of a launch: proven empty before, and what it held after.

    Attributes:
        variable: The environment variable that names it.
        path: The directory.
        files_before: Files in it before the launch; 0 or the launch fails.
        files_after: Files in it after the launch.
        bytes_after: Their size.
        older: Files that were written before the launch began: somebody put them there.
    """

    variable: str
    path: str
    files_before: int
    files_after: int | None = None
    bytes_after: int | None = None
    older: list[str] = []
