"""The cache directories of one launch of the fake server: empty before, used after, and nothing beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from abharness import resources
from abharness.errors import PreflightError
from abharness.server import VllmServer
from tests.conftest import MakeCommand, ready


def test_caches_are_proven_empty_and_used(running: Callable[..., VllmServer]) -> None:
    """B1."""
    server = running()
    evidence = {one.variable: one for one in server.cache_evidence()}
    assert set(evidence) == set(server.command.cache_dirs)
    assert all(one.files_before == 0 and one.files_after for one in evidence.values())
    assert server.defaults_touched() == []


def test_unused_cache_shows(running: Callable[..., VllmServer]) -> None:
    """B1: a variable this server does not read leaves its directory empty."""
    server = running(faults={"cache_unused": ["TRITON_CACHE_DIR"]})
    evidence = {one.variable: one.files_after for one in server.cache_evidence()}
    assert evidence["TRITON_CACHE_DIR"] == 0
    assert evidence["CUDA_CACHE_PATH"]


def test_default_cache_location_written(running: Callable[..., VllmServer]) -> None:
    """B1, B3: code compiled for one variant lands where the other would find it."""
    server = running(faults={"default_cache_write": True})
    assert [Path(path).name for path in server.defaults_touched()] == ["graph.py"]


def test_default_cache_location_written_through_a_link(make_command: MakeCommand) -> None:
    """B1: caches are moved to larger disks by links, at any depth, and links can go round in circles."""
    command = make_command()
    default, disk = command.watched_defaults[0], command.cwd.parent / "disk"
    (disk / "stray").mkdir(parents=True)
    default.mkdir(parents=True)
    (default / "torch_compile_cache").symlink_to(disk)
    (disk / "round").symlink_to(default)
    with VllmServer(command) as server:
        ready(server)
        assert server.defaults_touched() == []
        (default / "torch_compile_cache/stray/graph.py").write_text("{}")
        assert [Path(path).name for path in server.defaults_touched()] == ["graph.py"]


def test_old_files_in_default_locations_do_not_count(make_command: MakeCommand) -> None:
    """B3."""
    command = make_command()
    old = command.watched_defaults[1] / "cache/kernel.so"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x")
    time.sleep(0.05)
    with VllmServer(command) as server:
        ready(server)
        assert server.defaults_touched() == []


def test_prefilled_cache_is_refused(make_command: MakeCommand) -> None:
    """B1, B3: also when it is reached through a symlink."""
    command = make_command()
    real = command.cwd / "elsewhere"
    real.mkdir()
    (real / "graph.py").write_text("compiled for somebody else")
    link = command.cache_dirs["VLLM_CACHE_ROOT"]
    link.parent.mkdir(parents=True)
    link.symlink_to(real)
    with pytest.raises(PreflightError, match=r"VLLM_CACHE_ROOT=.* not empty .* 1 file") as caught, VllmServer(command):
        pass
    assert caught.value.code == "compile_cache_reused"


def test_equal_cache_paths_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: through a symlink and through `~` too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for other in (tmp_path / "link", Path("~/real"), tmp_path / "real/../real"):
        with pytest.raises(PreflightError, match="candidate VLLM_CACHE_ROOT and baseline VLLM_CACHE_ROOT are the same"):
            resources.check_paths_distinct(
                {"baseline VLLM_CACHE_ROOT": tmp_path / "real", "candidate VLLM_CACHE_ROOT": other}
            )
    resources.check_paths_distinct({"a": tmp_path / "real", "b": tmp_path / "real2"})
