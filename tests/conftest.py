"""Fixtures that launch the fake server."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from abharness.probe import install
from abharness.server import LaunchCommand, VllmServer
from abharness.telemetry import AbsentGpu

# The same examples in every run: a suite that fails now and then teaches nobody. `--hypothesis-profile=explore` looks
# for new ones.
settings.register_profile(
    "suite",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("explore", settings.get_profile("suite"), derandomize=False, max_examples=3_000)
settings.load_profile("suite")

# A shell starts background jobs with SIGINT ignored, and tests of Ctrl-C would then wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Launches keep their folders in a place of this test session's own, by which its processes are known (`leftovers`).
SCRATCH = tempfile.mkdtemp(prefix="abt-")
os.environ["TMPDIR"] = tempfile.tempdir = SCRATCH
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)

FAKE_SITE = Path(__file__).parent / "fake_site"
CACHE_VARIABLES = (
    "VLLM_CACHE_ROOT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "CUDA_CACHE_PATH",
)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody holds at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        assert isinstance(port, int)
        return port


MakeCommand = Callable[..., LaunchCommand]


@pytest.fixture
def make_command(tmp_path: Path) -> MakeCommand:
    """Builds the command of a fake launch: `make_command(faults={...}, env={...}, ready_timeout_s=5)`."""

    def make(
        *, faults: dict[str, Any] | None = None, env: dict[str, str] | None = None, flags: list[str] | None = None,
        **fields: Any,
    ) -> LaunchCommand:  # fmt: skip
        folder = tmp_path / uuid.uuid4().hex[:8]
        caches = {name: folder / "cache" / name.lower() for name in CACHE_VARIABLES}
        (folder / "cwd").mkdir(parents=True)
        (folder / "home").mkdir()
        (folder / "probe").mkdir()
        install(folder / "site")
        port = fields.pop("port", None) or free_port()
        sentinel = ("ABHARNESS_LAUNCH", uuid.uuid4().hex)
        command = LaunchCommand(
            argv=[
                sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "fake-model", "--host", "127.0.0.1",
                "--port", str(port), "--served-model-name", "arm", *(flags or []),
            ],
            env={
                sentinel[0]: sentinel[1],
                "PATH": os.environ["PATH"],
                "HOME": str(folder / "home"),
                "PYTHONPATH": str(FAKE_SITE),
                "ABHARNESS_PROBE_DIR": str(folder / "probe"),
                "FAKE_FAULTS": json.dumps(faults or {}),
                **{name: str(path) for name, path in caches.items()},
                **(env or {}),
            },
            cwd=folder / "cwd",
            host="127.0.0.1",
            port=port,
            log_path=folder / "server.log",
            served_model_name="arm",
            sentinel=sentinel,
            ready_timeout_s=20.0,
            cache_dirs=caches,
            watched_defaults=[folder / "home/.cache/vllm", folder / "home/.triton"],
            gpu=AbsentGpu("tests need none"),
            grace_s=5.0,
        )  # fmt: skip
        python_path = f"{command.env['PYTHONPATH']}{os.pathsep}{folder / 'site'}"
        return replace(command, env={**command.env, "PYTHONPATH": python_path}, **fields)

    return make


def completion(command: LaunchCommand, *, max_tokens: int = 1, timeout_s: float = 5.0) -> str | None:
    """Ask for one completion: None when a token came, else the reason."""
    request = urllib.request.Request(
        f"http://{command.host}:{command.port}/v1/completions",
        json.dumps({"model": command.served_model_name, "prompt": [1, 2, 3], "max_tokens": max_tokens}).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            usage = json.load(response)["usage"]
    except (OSError, ValueError) as error:
        return f"{error!r}"
    return None if usage["completion_tokens"] else "no token"


def ready(server: VllmServer) -> None:
    server.wait_ready(lambda: completion(server.command))


@pytest.fixture
def running(make_command: MakeCommand) -> Iterator[Callable[..., VllmServer]]:
    """Starts fake servers that are ready, and stops them after the test."""
    servers: list[VllmServer] = []

    def start(**options: Any) -> VllmServer:
        command = make_command(**options)
        server = VllmServer(command)
        servers.append(server)
        server.start()
        server.wait_ready(lambda: completion(command))
        return server

    yield start
    for server in servers:
        server.stop()
