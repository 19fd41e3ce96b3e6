"""Kernel folders: refused before anything starts, frozen for the run, on record, and part of what a run is."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from abharness import kernelfolder
from abharness.cli import main
from abharness.errors import UsageError
from abharness.plan import config_hash
from abharness.record import Evidence, LaunchRecord, RunRecord
from abharness.specload import load_spec
from abharness.storage import read_model
from tests.conftest import FAKE_SITE
from tests.lies.folders import PLUGIN
from tests.test_run import leftovers

SPEC: dict[str, Any] = {
    "experiment": "fake",
    "server": {"model": "some/model", "env": {"PYTHONPATH": str(FAKE_SITE)}, "ready_timeout_s": 60},
    "variants": {"baseline": {"env": {"FAKE_SWITCH": None}}, "candidate": {"env": {"FAKE_SWITCH": "fast"}}},
    "design": {"launches_per_variant": 1},
    "workloads": [
        {"name": "decode", "kind": "decode", "input_len": 16, "output_len": 4, "max_concurrency": 1, "num_prompts": 4}
    ],
}


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    return write(tmp_path / "mine", {"__init__.py": "", "vllm_plugin.py": PLUGIN})


def spec_file(folder: Path, kernels: list[str], **more: Any) -> Path:
    """The spec with kernel folders; `env` and `verify` come over it, `candidate` into that variant."""
    # What others compile at home meanwhile is no business of these runs.
    env = {**SPEC["server"]["env"], "HOME": str(folder / "home"), **more.get("env", {})}
    server = {**SPEC["server"], "kernels": kernels, "env": env}
    candidate = {**SPEC["variants"]["candidate"], **more.get("candidate", {})}
    variants = {"baseline": SPEC["variants"]["baseline"], "candidate": candidate}
    path = folder / "fake.yaml"
    path.write_text(json.dumps({**SPEC, "server": server, "variants": variants, "verify": more.get("verify", {})}))
    return path


def run(folder: Path, path: Path, *arguments: str) -> int:
    return main(["run", str(path), "-o", str(folder / "results"), *arguments])


def launches(folder: Path) -> list[LaunchRecord]:
    return [read_model(path, LaunchRecord) for path in sorted(folder.glob("results/fake/*/launches/*/launch.json"))]


# Bad input.


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "does not exist"),
        ({"vllm_plugin.py": "def register(): pass"}, "has no __init__.py"),
        ({"__init__.py": ""}, "has no vllm_plugin.py"),
        ({"__init__.py": "", "vllm_plugin.py": "def unregister(): pass"}, "defines no register()"),
        ({"__init__.py": "", "vllm_plugin.py": "if True:\n    def register(): pass"}, "defines no register()"),
        ({"__init__.py": "", "vllm_plugin.py": "def register( pass"}, "cannot be read as Python"),
    ],
)
def test_what_is_no_kernel_folder_is_refused_before_anything_starts(
    files: dict[str, str], says: str, tmp_path: Path, capsys: Any
) -> None:
    write(tmp_path / "mine", files)
    path = spec_file(tmp_path, [str(tmp_path / "mine")])
    for arguments in (["run", str(path), "-o", str(tmp_path / "results")], ["run", str(path), "--dry-run"]):
        assert main(arguments) == 2
        told = capsys.readouterr().err
        assert says in told
        assert str(tmp_path / "mine") in told
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "imported", ["from .entry import register", "from .entry import go as register", "register = print"]
)
def test_register_may_come_from_elsewhere(imported: str, mine: Path) -> None:
    (mine / "vllm_plugin.py").write_text(imported)
    _, (folder,) = kernelfolder.resolve([str(mine)], mine.parent / "sites", {})
    assert folder.name == "mine"


def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(UsageError, match="is no folder"):
        kernelfolder.resolve([str(tmp_path / "mine")], tmp_path / "sites", {})


@pytest.mark.parametrize(
    ("kernels", "line"),
    [
        (["./my-kernels"], "server.kernels[0]: './my-kernels': 'my-kernels' cannot be the name of a package"),
        ([".."], "server.kernels[0]: '..': '..' cannot be the name of a package"),
        (["x/torch"], "server.kernels[0]: 'x/torch': a package 'torch' would stand in for the one of that name"),
        (["vllm"], "a package 'vllm' would stand in"),
        (["x/json"], "a package 'json' would stand in"),
        (["a/mine", "b/mine/"], "server.kernels[1]: 'b/mine/': 'mine' is already the name of 'a/mine'"),
        ([7], "server.kernels[0]: 7 is read by YAML as the integer 7; quote it"),
        ("a/mine", "server.kernels: found 'a/mine'"),
    ],
)
def test_names_that_cannot_be_are_told_with_their_place(kernels: Any, line: str, tmp_path: Path, capsys: Any) -> None:
    assert run(tmp_path, spec_file(tmp_path, kernels)) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "candidate", "line"),
    [
        ({"VLLM_PLUGINS": "abharness_probe"}, {}, "server.env.VLLM_PLUGINS: 'abharness_probe' does not name mine"),
        ({"VLLM_PLUGINS": ""}, {}, '"mine", or remove it'),
        (
            {"VLLM_PLUGINS": "a"},
            {"env": {"VLLM_PLUGINS": "b"}},
            "variants.candidate.env.VLLM_PLUGINS: 'b' does not name",
        ),
        ({"PYTHONPATH": None}, {}, "server.env.PYTHONPATH: must be unset by this spec, but kernels needs it"),
    ],
)
def test_an_environment_that_keeps_the_plugin_out_is_refused(
    env: dict[str, Any], candidate: dict[str, Any], line: str, mine: Path, capsys: Any
) -> None:
    assert run(mine.parent, spec_file(mine.parent, [str(mine)], env=env, candidate=candidate)) == 2
    assert line in capsys.readouterr().err


def test_reports_need_the_probe_where_plugins_are_named(mine: Path, capsys: Any) -> None:
    expected = {"expect_report": {"baseline": {"mine": {"choice": "x"}}}}
    path = spec_file(mine.parent, [str(mine)], env={"VLLM_PLUGINS": "mine"}, verify=expected)
    assert run(mine.parent, path) == 2
    assert "does not name abharness_probe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        (">", "'>' is no comparison with a number; allowed are ==N, !=N, >=N, <=N, >N, <N"),
        ("= 1", "is no comparison"),
        (">0 and <5", "is no comparison"),
        ("(", "not a regular expression"),
    ],
)
def test_conditions_that_cannot_be_checked_are_refused(condition: str, says: str, mine: Path, capsys: Any) -> None:
    verify = {"expect_report": {"candidate": {"mine": {"calls.fast": condition}}}}
    assert run(mine.parent, spec_file(mine.parent, [str(mine)], verify=verify)) == 2
    told = capsys.readouterr().err
    assert says in told
    assert "verify.expect_report.candidate.mine.calls.fast" in told


def test_links_to_folders_and_what_is_no_file_are_refused(mine: Path) -> None:
    def resolve() -> None:
        kernelfolder.resolve([str(mine)], mine.parent / "sites", {})

    (mine / "tables").symlink_to(mine.parent)
    with pytest.raises(UsageError, match="symbolic link to a folder"):
        resolve()
    (mine / "tables").unlink()
    os.mkfifo(mine / "pipe")
    with pytest.raises(UsageError, match="no regular file"):
        resolve()
    (mine / "pipe").unlink()
    resolve()


# The copy.


def test_the_copy_holds_what_counts_and_the_hash_is_of_that(mine: Path) -> None:
    write(
        mine, {"tables/h200.json": "{}", "tests/test_x.py": "", "__pycache__/x.pyc": "", ".cache": "", "loose.pyc": ""}
    )
    sites = mine.parent / "sites"
    site, folders = kernelfolder.resolve([str(mine)], sites, {})
    assert not sites.exists(), "looking makes nothing"
    kernelfolder.install(site, folders)
    copied = sorted(path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file())
    assert copied == [
        "mine-1.dist-info/METADATA", "mine-1.dist-info/entry_points.txt", "mine/__init__.py", "mine/tables/h200.json",
        "mine/vllm_plugin.py",
    ]  # fmt: skip
    entry = (site / "mine-1.dist-info/entry_points.txt").read_text()
    assert entry == "[vllm.general_plugins]\nmine = mine.vllm_plugin:register\n"
    before = folders[0].sha256

    def again() -> str:
        return kernelfolder.resolve([str(mine)], sites, {})[1][0].sha256

    write(mine, {"tests/test_x.py": "changed", "__pycache__/y.pyc": ""})
    assert again() == before
    for name, text in (("tables/h200.json", "{ }"), ("tables/a100.json", "{}"), ("vllm_plugin.py", PLUGIN + "\n")):
        write(mine, {name: text})
        assert again() != before, name
        before = again()
    (mine / "tables/a100.json").rename(mine / "tables/b200.json")
    assert again() != before, "a name counts, too"


def test_a_folder_that_is_edited_while_it_is_copied_is_refused(mine: Path) -> None:
    site, folders = kernelfolder.resolve([str(mine)], mine.parent / "sites", {})
    write(mine, {"vllm_plugin.py": PLUGIN + "# edited"})
    with pytest.raises(UsageError, match="changed while the run was prepared"):
        kernelfolder.install(site, folders)


def test_the_commit_is_on_record_and_what_is_not_in_it_makes_it_dirty(mine: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", str(mine.parent), *who, *arguments], check=True, capture_output=True)

    def state() -> tuple[str | None, bool | None]:
        _, (folder,) = kernelfolder.resolve([str(mine)], mine.parent / "sites", {})
        return folder.git_commit, folder.git_dirty

    assert state() == (None, None)
    git("init", "-q")
    write(mine.parent, {".gitignore": "ignored.py\n__pycache__/\n"})
    git("add", "-A")
    git("commit", "-qm", "x")
    commit, dirty = state()
    assert (len(commit or ""), dirty) == (40, False)
    write(mine.parent, {"beside.py": ""})
    write(mine, {"__pycache__/x.pyc": ""})
    assert state() == (commit, False), "what is not copied does not count"
    write(mine, {"ignored.py": ""})
    assert state() == (commit, True), "git says nothing of a file that it ignores, and it is in no commit"
    (mine / "ignored.py").unlink()
    write(mine, {"__init__.py": "edited"})
    assert state() == (commit, True)


# Runs.

EDITS_ITS_SOURCE = """

def register():
    with open(os.environ["SOURCE"], "w") as file:
        file.write("def register(): pass\\n")
"""


def test_an_edit_during_the_run_changes_no_later_launch_and_the_run_before_it_is_not_gone_on_with(
    mine: Path, capsys: Any
) -> None:
    folder = mine.parent
    (mine / "vllm_plugin.py").write_text(PLUGIN + EDITS_ITS_SOURCE)
    _, (first,) = kernelfolder.resolve([str(mine)], folder / "sites", {})
    verify = {"expect_report": {v: {"mine": {"choice": "kernel set .*"}} for v in ("baseline", "candidate")}}
    path = spec_file(folder, [str(mine)], env={"SOURCE": str(mine / "vllm_plugin.py")}, verify=verify)
    assert run(folder, path) == 0
    assert (mine / "vllm_plugin.py").read_text() == "def register(): pass\n"
    records = launches(folder)
    assert [record.kernels[0].sha256 for record in records] == [first.sha256, first.sha256]
    assert not Path(records[0].kernels[0].site).exists()
    capsys.readouterr()
    assert run(folder, path, "--resume") == 2
    assert "nothing to resume" in capsys.readouterr().err
    (mine / "vllm_plugin.py").write_text(PLUGIN + EDITS_ITS_SOURCE)
    assert run(folder, path, "--resume") == 0
    assert "launch 0-baseline is on record; skipped" in capsys.readouterr().err
    assert leftovers() == []


def test_a_run_shows_its_kernels_everywhere(mine: Path, capsys: Any) -> None:
    folder = mine.parent
    verify = {"expect_report": {"candidate": {"mine": {"choice": "kernel set fast", "calls.fast": "==1"}}}}
    path = spec_file(folder, [str(mine)], verify=verify)
    assert main(["run", str(path), "--dry-run"]) == 0
    planned = capsys.readouterr().out
    _, (resolved,) = kernelfolder.resolve([str(mine)], folder / "sites", {})
    assert f"kernels    candidate: mine {resolved.sha256[:12]} (in no repository) from {mine}\n" in planned
    assert f"PYTHONPATH={FAKE_SITE}:/" in planned
    assert run(folder, path) == 0
    told = capsys.readouterr().out
    assert "reported: mine says kernel set fast in the candidate and kernel set plain in the baseline" in told
    (run_dir,) = folder.glob("results/fake/*")
    record = read_model(run_dir / "experiment.json", RunRecord)
    assert run_dir.name.endswith(f"-{record.config_hash}")
    assert record.config_hash != config_hash(load_spec(path)), "what is in the folder counts"
    evidence = read_model(run_dir / "launches/1-candidate/evidence.json", Evidence)
    engines = [probe for probe in evidence.environment[1].probes if probe.reports["mine"]["calls"]["fast"]]
    assert [engine.reports["mine"]["given"] for engine in engines] == [{"FAKE_SWITCH": "fast"}]
    page = (run_dir / "report.html").read_text()
    assert f"mine {resolved.sha256[:12]} (in no repository)" in page
    assert "reports choice=kernel set fast" in page


def test_verify_env_shows_the_reports_and_leaves_the_counters_to_the_run(mine: Path, capsys: Any) -> None:
    verify = {"expect_report": {"candidate": {"mine": {"choice": "kernel set fast", "calls.fast": ">1000"}}}}
    path = spec_file(mine.parent, [str(mine)], verify=verify)
    assert main(["verify-env", str(path)]) == 0
    told = capsys.readouterr().out
    assert "EngineCore reports choice=kernel set fast, given.FAKE_SWITCH=fast, calls.fast=1, calls.plain=0" in told
    assert "not checked: expect_report: numbers count what the load does" in told
    verify["expect_report"]["candidate"]["mine"]["choice"] = "kernel set plain"
    assert main(["verify-env", str(spec_file(mine.parent, [str(mine)], verify=verify))]) == 4
    assert "plugin mine reports choice: expected 'kernel set plain'" in capsys.readouterr().out


def test_two_versions_of_a_folder_are_an_experiment(mine: Path, capsys: Any) -> None:
    folder = mine.parent
    newer = write(folder / "new" / "mine", {"__init__.py": "", "vllm_plugin.py": PLUGIN.replace("kernel set", "newer")})
    own = {"env": {"FAKE_SWITCH": None}, "kernels": [str(newer)]}
    path = spec_file(folder, [str(mine)], candidate=own)
    assert run(folder, path) == 0
    told = capsys.readouterr().out
    assert "effect of kernels: reported: mine says newer plain in the candidate and kernel set plain" in told
    assert "undeclared_difference" not in told
    old, new = launches(folder)
    assert old.kernels[0].sha256 != new.kernels[0].sha256


def test_a_report_proves_only_the_switch_that_the_plugin_was_given(mine: Path, capsys: Any) -> None:
    folder = mine.parent
    path = spec_file(folder, [str(mine)], candidate={"env": {"FAKE_SWITCH": "fast", "ANOTHER": "1"}})
    assert run(folder, path) == 0
    told = capsys.readouterr().out
    assert "effect of FAKE_SWITCH: reported: mine says kernel set fast in the candidate" in told
    assert "effect of ANOTHER: reported" not in told
    assert re.search(r"^note: .*ANOTHER: delivered, and nothing shows", told, re.MULTILINE)


def test_one_variant_may_have_kernels_and_the_other_none(mine: Path, capsys: Any) -> None:
    folder = mine.parent
    path = spec_file(folder, [], candidate={"env": {"FAKE_SWITCH": None}, "kernels": [str(mine)]})
    assert run(folder, path) == 0
    told = capsys.readouterr().out
    assert "effect of kernels: other code is loaded: mine is absent and " in told
    assert "undeclared_difference" not in told


def test_an_aa_has_the_kernels_and_the_expectations_of_the_baseline(mine: Path, capsys: Any) -> None:
    verify = {"expect_report": {"baseline": {"mine": {"choice": "kernel set plain"}}}}
    path = spec_file(mine.parent, [str(mine)], verify=verify, candidate={"kernels": []})
    run(mine.parent, path, "--aa")
    assert "undeclared_difference" not in capsys.readouterr().out
    assert [[one.name for one in record.kernels] for record in launches(mine.parent)] == [["mine"], ["mine"]]
