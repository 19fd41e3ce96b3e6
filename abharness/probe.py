"""The second witness: a vLLM general plugin that writes down what its own process sees, when the harness asks for it.

Without `ABHARNESS_PROBE_DIR` in the environment it does nothing. With it, every process that loads general plugins, and
every child such a process forks, writes `<pid>.json` there: at once, and again whenever a datagram arrives on the socket
`<pid>.sock` beside it. Between the two a thread sleeps in the kernel, so nothing runs while the server is measured.

Only the standard library is needed, and of ours `redaction`, which needs no more: both files are copied into a folder of
their own (see `install`), which the harness puts at the end of the server's PYTHONPATH, so that nothing has to be
installed in the server's environment. A fault in here never reaches the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .redaction import hidden, printable, redact, redact_data

if TYPE_CHECKING:
    from collections.abc import Iterator

DIR_VARIABLE = "ABHARNESS_PROBE_DIR"
PLUGIN = "abharness_probe"
GROUP = "vllm.general_plugins"
MODULES = ("vllm", "torch", "triton", "transformers", "flashinfer", "numpy")
REPORT_FUNCTION = "abharness_report"
"""A plugin's module that has this function is asked what the plugin runs."""
MOST_REPORTED = 16 * 1024
"""Bytes of a plugin's report, as JSON."""
_MARK = "_abharness_probe_pid"


def install(folder: Path) -> None:
    """Make a folder that brings the plugin to any interpreter when it is on PYTHONPATH.

    Args:
        folder: Made if missing; holds a package and the metadata that names its entry point, and nothing else.
    """
    package = folder / PLUGIN
    package.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    (package / "__init__.py").write_text("", encoding="utf-8")
    for name in ("probe.py", "redaction.py"):
        shutil.copyfile(here / name, package / name)
    write_metadata(folder, PLUGIN, "probe")


def write_metadata(folder: Path, name: str, module: str) -> None:
    """Write the metadata by which vLLM finds the plugin `NAME.MODULE:register` in a folder on PYTHONPATH."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n", encoding="utf-8")
    entry = f"[{GROUP}]\n{name} = {name}.{module}:register\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")


@contextlib.contextmanager
def short_path(socket_path: Path) -> Iterator[str]:
    """A name of the same socket that fits into an address, which holds 107 bytes; see unix(7)."""
    folder = os.open(socket_path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{socket_path.name}"
    finally:
        os.close(folder)


def register() -> None:
    """The plugin's entry point: report, and listen for questions. Does nothing unasked, and nothing twice."""
    folder = os.environ.get(DIR_VARIABLE)
    if not folder or getattr(sys, _MARK, None) == os.getpid():
        return
    setattr(sys, _MARK, os.getpid())
    try:
        witness = _Witness(Path(folder), _plugins_of_caller())
        witness.report("start")
        witness.listen()
        os.register_at_fork(before=witness.pause, after_in_parent=witness.listen, after_in_child=witness.begin_again)
    except Exception as error:
        _complain(error)


def _complain(error: Exception) -> None:
    # The server's log is the only place left; the harness then has no report, and says so.
    print(f"abharness probe: no report from pid {os.getpid()}: {error!r}", file=sys.stderr, flush=True)  # noqa: T201


class _Witness:
    """The reporting state of one process."""

    def __init__(self, folder: Path, plugins: list[str] | None) -> None:
        self.folder = folder
        self.plugins = plugins
        self.deaf: str | None = None
        self.reason = "start"
        self.socket: socket.socket | None = None
        self.thread: threading.Thread | None = None

    def report(self, reason: str, nonce: str | None = None) -> None:
        """Write this process's file, whole or not at all."""
        self.reason = reason
        data = {"reason": reason, "nonce": nonce, "deaf": self.deaf, **_facts(self.plugins)}
        if reason == "asked":
            # Not at the start: the plugins are only being loaded then, and what they would look at may not be there yet.
            data["reports"], data["report_faults"] = _reports()
        path = self.folder / f"{os.getpid()}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(data), encoding="ascii")
        part.replace(path)

    def listen(self) -> None:
        """Wait for questions in a thread of its own."""
        try:
            path = self.folder / f"{os.getpid()}.sock"
            path.unlink(missing_ok=True)
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            with short_path(path) as address:
                self.socket.bind(address)
            self.thread = threading.Thread(target=self._serve, args=(self.socket,), name=PLUGIN, daemon=True)
            self.thread.start()
        except Exception as error:
            self.deaf = repr(error)
            self.report(self.reason)  # the one before did not know

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                question = listening.recv(128).decode("ascii", "replace")
            except OSError:
                return
            if not question:
                return
            try:
                self.report("asked", question)
            except Exception as error:
                _complain(error)

    def pause(self) -> None:
        """End the thread: a process that is about to fork should have as few as it had without us."""
        if self.socket is None or self.thread is None or self.thread is threading.current_thread():
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as waker:
            with short_path(self.folder / f"{os.getpid()}.sock") as address:
                waker.sendto(b"", address)
            self.thread.join(1.0)
        self.socket.close()
        self.socket = self.thread = None

    def begin_again(self) -> None:
        """In a forked child: a process of its own, with a report of its own."""
        setattr(sys, _MARK, os.getpid())
        try:
            self.report("fork")
            self.listen()
        except Exception as error:
            _complain(error)


def _facts(plugins: list[str] | None) -> dict[str, Any]:
    multiprocessing = sys.modules.get("multiprocessing.process")
    gpus, gpu_absent = _gpus()
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "start_ticks": _start_ticks(),
        "name": multiprocessing.current_process().name if multiprocessing else "MainProcess",
        "executable": sys.executable,
        "python": ".".join(map(str, sys.version_info[:3])),
        "environ": redact(dict(os.environ)),
        "modules": _modules(),
        "plugins": _imported_plugins() if plugins is None else plugins,
        "plugin_files": _plugin_files(),
        "cache_dirs": _cache_dirs(),
        "gpu_uuids": gpus,
        "gpu_absent": gpu_absent,
    }


def _start_ticks() -> int:
    stat = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    return int(stat.rpartition(")")[2].split()[19])


def _modules() -> dict[str, dict[str, str | None]]:
    """Version and file of the modules that matter, of those that are loaded: what is installed elsewhere is no fact."""
    found = {}
    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None:
            version, file = getattr(module, "__version__", None), getattr(module, "__file__", None)
            found[name] = {"version": None if version is None else str(version), "file": file}
    return found


def _plugins_of_caller() -> list[str] | None:
    """The names vLLM is loading right now, from the caller's own table; None where it keeps none we know."""
    frame = sys._getframe(1)
    while frame is not None:
        table = frame.f_locals.get("plugins")
        if isinstance(table, dict) and any(getattr(value, "__name__", "") == "register" for value in table.values()):
            return sorted(str(name) for name in table)
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _imported_plugins() -> list[str]:
    """General plugins whose module this process has imported: vLLM imports no other, and drops what fails."""
    return sorted(_plugin_modules())


def _plugin_modules() -> dict[str, Any]:
    entries = metadata.entry_points(group=GROUP)
    return {entry.name: sys.modules[entry.module] for entry in entries if entry.module in sys.modules}


def _plugin_files() -> dict[str, str]:
    files = {name: getattr(module, "__file__", None) for name, module in _plugin_modules().items()}
    return {name: printable(file) for name, file in files.items() if isinstance(file, str)}


def _reports() -> tuple[dict[str, Any], dict[str, str]]:
    """What the plugins of this process say of themselves, and of those that cannot say it, why."""
    reports: dict[str, Any] = {}
    faults: dict[str, str] = {}
    for name, module in _plugin_modules().items():
        try:
            function = getattr(module, REPORT_FUNCTION, None)
            if function is None:
                continue
            report = function()
            if not isinstance(report, dict):
                raise TypeError(f"{REPORT_FUNCTION} returned {type(report).__name__}, not a dict")
            text = json.dumps(report, allow_nan=False)
            if len(text) > MOST_REPORTED:
                raise ValueError(f"{REPORT_FUNCTION} returned {len(text)} bytes of JSON, more than {MOST_REPORTED}")
            reports[name] = redact_data(json.loads(text))
        except BaseException as error:  # a SystemExit would end the thread that answers
            faults[name] = hidden("", repr(error))[:300]
    return reports, faults


def _cache_dirs() -> dict[str, str]:
    """Cache directories that loaded libraries say they use, where they say so without making them."""
    found: dict[str, str] = {}
    places = (
        ("VLLM_CACHE_ROOT", "vllm.envs", "VLLM_CACHE_ROOT"),
        ("TRITON_CACHE_DIR", "triton.knobs", "cache.dir"),
        ("FLASHINFER_WORKSPACE_BASE", "flashinfer.jit.env", "FLASHINFER_WORKSPACE_DIR"),
    )
    for variable, module, attribute in places:
        value: Any = sys.modules.get(module)
        with contextlib.suppress(Exception):
            for part in attribute.split("."):
                value = getattr(value, part) if value is not None else None
            if value is not None:
                found[variable] = hidden(variable, str(value))
    return found


def _gpus() -> tuple[list[str] | None, str | None]:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None, "torch is not loaded in this process"
    try:
        if not torch.cuda.is_initialized():
            return None, "CUDA is not initialised in this process"
        devices = range(torch.cuda.device_count())
        uuids = [str(torch.cuda.get_device_properties(device).uuid) for device in devices]
    except Exception as error:
        return None, repr(error)
    return [uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}" for uuid in uuids], None
