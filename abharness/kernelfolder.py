"""Folders of kernels -> frozen copies that a launch's PYTHONPATH brings to its server, each with the hash of what it is.

A kernel folder is a Python package `NAME/` with `vllm_plugin.py`, which has `register()`; kernels/README.md says the
rest. It is copied once a run, with the metadata that names its entry point, as the probe is: nothing has to be
installed, and an edit during the run changes no later launch.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from abharness import git
from abharness.cache import expand_user
from abharness.errors import UsageError, VerificationFailed
from abharness.probe import write_metadata
from abharness.witnesses import KernelFolder

PLUGIN_MODULE = "vllm_plugin"
LEFT_OUT = ("__pycache__", "tests")
"""Folders that are not copied, at any depth; what begins with a dot is not either."""


def resolve(
    folders: Sequence[str], site_parent: Path, environ: Mapping[str, str]
) -> tuple[Path, tuple[KernelFolder, ...]]:
    """Look at the kernel folders of a variant and say where their copies will lie; nothing is made.

    Args:
        folders: As the spec names them: relative to the working directory, or with `~`.
        site_parent: Equal sets of folders share a folder below it.
        environ: The caller's environment, for the home.

    Returns:
        The folder for PYTHONPATH, and what will lie in it.

    Raises:
        UsageError: One of them is not there, or is no kernel folder.
    """
    found = []
    for text in folders:
        path = expand_user(text, environ)
        _check(path, text)
        try:
            files = _files(path)
            sha256 = _digest(path, files)
        except OSError as error:
            raise UsageError(f"kernels {text!r}: cannot read {error.filename}: {error.strerror}") from error
        found.append((path, sha256, git.state_of_files(path, files) or {}))
    whole = hashlib.sha256("".join(f"{path.name} {sha256}\n" for path, sha256, _ in found).encode())
    site = site_parent / whole.hexdigest()[:12]
    return site, tuple(
        KernelFolder(
            name=path.name,
            path=str(path),
            sha256=sha256,
            site=str(site),
            git_commit=state.get("commit"),
            git_dirty=state.get("dirty"),
        )
        for path, sha256, state in found
    )


def install(site: Path, folders: Sequence[KernelFolder]) -> None:
    """Make the copies, with the metadata by which vLLM finds their plugins.

    Args:
        site: Made if missing; empty where a variant has no kernels.
        folders: What comes into it.

    Raises:
        UsageError: A folder was changed since `resolve` looked at it.
    """
    site.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        source, target = Path(folder.path), site / folder.name
        if target.exists():
            continue  # both variants have this set
        with contextlib.suppress(FileNotFoundError):  # what is gone by now is missing in the copy, too
            for name in _files(source):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, target / name)
        write_metadata(site, folder.name, PLUGIN_MODULE)
        if changed(folder):
            raise UsageError(
                f"kernels {folder.path}: it was changed while the run was prepared",
                hint="run again when nothing writes there",
            )


def changed(folder: KernelFolder) -> bool:
    """Whether the copy is not, or not any more, what was resolved."""
    copy = Path(folder.site) / folder.name
    try:
        return _digest(copy, _files(copy)) != folder.sha256
    except OSError:
        return True


def require_unchanged(folders: Sequence[KernelFolder]) -> None:
    """Refuse to go on with a copy that somebody wrote to.

    Raises:
        VerificationFailed: One is not what was copied.
    """
    for folder in folders:
        if changed(folder):
            raise VerificationFailed(
                f"kernels {folder.name}: the run's copy {Path(folder.site) / folder.name} was changed since it was made",
                hint="a kernel folder must not write into itself: keep tables and caches elsewhere",
                code="undeclared_difference",
            )


def _check(path: Path, text: str) -> None:
    hint = f"a kernel folder is a package: __init__.py, and {PLUGIN_MODULE}.py with register(); see kernels/README.md"
    if not path.is_dir():
        found = "is no folder" if path.exists() else "does not exist"
        raise UsageError(f"kernels {text!r}: {path} {found}", hint=hint)
    for name in ("__init__.py", f"{PLUGIN_MODULE}.py"):
        if not (path / name).is_file():
            raise UsageError(f"kernels {text!r}: {path} has no {name}", hint=hint)
    plugin = path / f"{PLUGIN_MODULE}.py"
    try:
        tree = ast.parse(plugin.read_bytes(), str(plugin))
    except (SyntaxError, ValueError) as error:
        version = platform.python_version()
        raise UsageError(
            f"kernels {text!r}: {plugin} cannot be read as Python {version}: {error}", hint="correct it"
        ) from error
    if "register" not in _defined(tree):
        raise UsageError(f"kernels {text!r}: {plugin} defines no register()", hint=hint)


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines or imports at its top level."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _files(folder: Path) -> list[str]:
    """Names of the files that make up a folder, relative to it, sorted.

    Raises:
        UsageError: Something in it cannot be copied as a file.
    """
    found = []
    for here, folders, files in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith(".")]
        for name in folders:
            if (Path(here) / name).is_symlink():
                raise UsageError(
                    f"kernels {folder}: {Path(here) / name} is a symbolic link to a folder",
                    hint="put the files there themselves: what it leads to could change during the run",
                )
        for name in files:
            path = Path(here) / name
            if name.startswith(".") or name.endswith(".pyc"):
                continue
            if not path.is_file():
                raise UsageError(f"kernels {folder}: {path} is no regular file", hint="remove it")
            found.append(path.relative_to(folder).as_posix())
    return sorted(found)


def _digest(folder: Path, files: Sequence[str]) -> str:
    whole = hashlib.sha256()
    for name in files:
        content = (folder / name).read_bytes()
        whole.update(os.fsencode(name) + b"\0" + str(len(content)).encode() + b"\0" + content)
    return whole.hexdigest()
