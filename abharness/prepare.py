"""Spec + this machine -> Host and run folder: interpreters, model, port, scratch folder; missing managed parts are made.

`--dry-run` uses the same functions and makes nothing.
"""

from __future__ import annotations

import re
import secrets
import socket
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from abharness import environments, kernelfolder, models, resources
from abharness.environments import PREFIX
from abharness.errors import UsageError
from abharness.plan import Host, Plan, config_hash
from abharness.record import Variant
from abharness.spec import VARIANTS, ExperimentSpec

MIN_FREE_BYTES = 2 * 2**30
"""Free space asked for in the results and scratch folders: compile caches of one launch and its logs fit."""


def make_host(spec: ExperimentSpec, environ: Mapping[str, str]) -> Host:
    """Resolve what the machine contributes to a plan, without making anything.

    Raises:
        UsageError: An interpreter or model that cannot exist, or a folder that is no kernel folder.
    """
    token = secrets.token_hex(4)
    # Short: vLLM's sockets live below it, and a socket path ends at 107 bytes.
    scratch = scratch_parent() / f"ab-{token}"
    named = {variant: spec.kernels_of(variant) for variant in VARIANTS}
    resolved = {
        variant: kernelfolder.resolve(folders, scratch / "kernels", environ) for variant, folders in named.items()
    }
    contents = [[(one.name, one.sha256) for one in folders] for _, folders in resolved.values()]
    if named["baseline"] != named["candidate"] and contents[0] == contents[1]:
        raise UsageError(
            f"kernels: the variants name other folders ({', '.join(named['baseline'])} and "
            f"{', '.join(named['candidate'])}), and what is in them is the same",
            hint="name the other version in one of them; where both are to have the same kernels, server.kernels says so",
        )
    return Host(
        pythons={variant: environments.resolve_python(spec.python_of(variant), environ) for variant in VARIANTS},
        model=models.resolve_model(spec.server.model, environ),
        port=spec.server.port or free_port(),
        scratch=scratch,
        probe_site=scratch / "site",
        run_token=token,
        environ=environ,
        kernels={variant: folders for variant, (_, folders) in resolved.items()},
        kernel_sites={variant: site for variant, (site, _) in resolved.items()} if any(named.values()) else {},
    )


def scratch_parent() -> Path:
    """The folder in which every run of this user keeps its scratch folder."""
    return Path(tempfile.gettempdir()).resolve()


def free_port() -> int:
    """A loopback port that was free a moment ago; preflight checks it again before every launch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def missing_parts(spec: ExperimentSpec, environ: Mapping[str, str]) -> list[str]:
    """Managed environments and models that a run would make first."""
    names = {name for variant in VARIANTS if (name := spec.python_of(variant)) and name.startswith(PREFIX)}
    missing = sorted(name for name in names if not environments.is_installed(name, environ))
    if spec.server.model.startswith(PREFIX) and not models.is_fetched(spec.server.model, environ):
        missing.append(spec.server.model)
    return missing


def make_missing_parts(
    spec: ExperimentSpec, host: Host, environ: Mapping[str, str], progress: Callable[[str], None]
) -> None:
    """Install managed environments and fetch the managed model that a spec names.

    Raises:
        InstallError: One of them could not be made.
        UsageError: The model must be converted but no variant uses a managed environment to do it in.
    """
    for variant in VARIANTS:
        name = spec.python_of(variant)
        if name and name.startswith(PREFIX):
            environments.install(name, environ=environ, progress=progress)
    if spec.server.model.startswith(PREFIX) and not models.is_fetched(spec.server.model, environ):
        name = spec.server.model.removeprefix(PREFIX)
        managed = [host.pythons[variant] for variant in VARIANTS if (spec.python_of(variant) or "").startswith(PREFIX)]
        if not managed:
            raise UsageError(
                f"{spec.server.model} must be converted first, and no variant uses a managed environment to do it in",
                hint=f"run: abharness model fetch {name}",
            )
        models.fetch(spec.server.model, python=managed[0], environ=environ, progress=progress)


def server_versions(plan: Plan) -> dict[Variant, dict[str, str]]:
    """What each variant's interpreter reports of itself, in the environment it will be launched with.

    Raises:
        PreflightError: An interpreter has no vLLM.
    """
    first = {launch.variant: launch for launch in reversed(plan.launches)}
    return {variant: environments.versions(Path(launch.argv[0]), launch.env) for variant, launch in first.items()}


def check_disk(*folders: Path) -> None:
    """Refuse to start on a disk that will be full before the end.

    Raises:
        PreflightError: Less than `MIN_FREE_BYTES` free where a folder is or will be.
    """
    for folder in folders:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        resources.check_disk_free(there, MIN_FREE_BYTES)


def new_run_dir(spec: ExperimentSpec, host: Host, output: Path) -> Path:
    """Make the folder of a new run; its name comes behind those of all runs beside it, whatever the clock says.

    Raises:
        UsageError: It cannot be made.
    """
    folder = output / spec.experiment / f"{_next_stamp(output / spec.experiment)}-{config_hash(spec, host.kernels)}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}", hint="choose another folder with -o") from error
    return folder


_STAMP = "%Y%m%dT%H%M%SZ"
_STAMPED = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{12}")


def _next_stamp(parent: Path) -> str:
    """This moment, or the second after the newest run where the clock was set back since."""
    now = datetime.now(UTC).strftime(_STAMP)
    try:
        stamps = [path.name.partition("-")[0] for path in parent.iterdir() if _STAMPED.fullmatch(path.name)]
        newest = max(stamps, default="")
        if newest < now:
            return now
        return (datetime.strptime(newest, _STAMP) + timedelta(seconds=1)).strftime(_STAMP)
    except (OSError, ValueError, OverflowError):
        return now  # no folder yet, or a name that is no time


def run_dir_to_resume(spec: ExperimentSpec, host: Host, output: Path) -> Path:
    """The newest run of exactly this configuration.

    Raises:
        UsageError: There is none.
    """
    wanted = config_hash(spec, host.kernels)
    parent = output / spec.experiment
    runs = sorted(parent.glob("*-*")) if parent.is_dir() else []
    same = [run for run in runs if run.name.endswith(f"-{wanted}")]
    if same:
        return same[-1]
    others = f"; {len(runs)} run(s) there have another configuration" if runs else ""
    raise UsageError(
        f"nothing to resume: no run of configuration {wanted} below {parent}{others}",
        hint="run without --resume to start a new run; two configurations are never mixed",
    )
