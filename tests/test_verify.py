"""What was declared against what the processes of a running server show, and the plugins that it loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from abharness import procfs
from abharness.hearing import hear
from abharness.judge import judge_check
from abharness.verify import attached_check, check_environment
from abharness.witnesses import GpuHolder
from tests.checking import Running, check, codes
from tests.conftest import FAKE_SITE, MakeCommand, completion

# Environment.


def test_everything_declared_is_seen_in_every_process(running: Running) -> None:
    server = running(env={"FAKE_SWITCH": "fast", "EMPTY": "", "FAKE_WORKERS": "2"})
    expected = {"FAKE_SWITCH": "fast", "EMPTY": "", "VLLM_SWITCH": None}
    result = check(server, expected, expect_log=[r"FAKE_SWITCH=f\w+$"])
    assert result.findings == []
    assert [witness.state for witness in result.processes] == ["ok"] * 4
    assert all(witness.started_with == expected for witness in result.processes)
    assert [witness.name for witness in result.processes][1:] == ["VLLM::EngineCore", *["VLLM::Worker"] * 2]
    assert [witness.renamed for witness in result.processes] == [False, True, True, True], "and their blocks are whole"
    assert all(witness.layout_checked for witness in result.processes)
    assert "fake kernels: FAKE_SWITCH=fast" in str(result.log_matches[r"FAKE_SWITCH=f\w+$"])


@pytest.mark.parametrize("declared", [None, "1"], ids=["unset", "set"])
@pytest.mark.parametrize("wipe", ["all", "prefix", "middle", "tail", "title"])
def test_wiped_block_is_unverifiable_in_both_arms(running: Running, wipe: str, declared: str | None) -> None:
    """A1: the arm that says "must be unset" must not pass either."""
    env = {} if declared is None else {"FAKE_SWITCH": declared}
    server = running(faults={"wipe_environ": wipe}, env=env)
    result = check(server, {"FAKE_SWITCH": declared})
    engine = next(witness for witness in result.processes if witness.name == "VLLM::EngineCore")
    assert (engine.state, engine.started_with) == ("unreadable", {})
    assert codes(result.findings) == ["env_unverifiable"]
    finding = result.findings[0]
    assert finding.fatal
    assert f"pid {engine.pid} (EngineCore)" in finding.message
    assert "SPT_NOENV=1" in str(finding.hint)


@pytest.mark.parametrize(
    ("expected", "found"),
    [(None, ""), ("", None), ("0", "false"), ("false", "0"), ("0", None), ("1", "1 ")],
)
def test_values_are_exact_strings(running: Running, expected: str | None, found: str | None) -> None:
    """A5: unset, empty, "0" and "false" are four values."""
    server = running(env={} if found is None else {"VLLM_SWITCH": found})
    result = check(server, {"VLLM_SWITCH": expected})
    assert "env_mismatch" in codes(result.findings)
    message = next(finding.message for finding in result.findings if finding.code == "env_mismatch")
    assert f"expected {'unset' if expected is None else repr(expected)}" in message
    assert ("started without it" if found is None else f"started with {found!r}") in message
    assert "disagree" not in message


@pytest.mark.parametrize("engine_value", ["slow", None])
def test_processes_that_disagree(running: Running, engine_value: str | None) -> None:
    """A3: the server has the switch, the engine it spawned another value or none."""
    server = running(faults={"child_env": {"FAKE_SWITCH": engine_value}}, env={"FAKE_SWITCH": "fast"})
    result = check(server, {"FAKE_SWITCH": "fast"})
    assert codes(result.findings) == ["env_mismatch"]
    finding = result.findings[0]
    assert finding.fatal
    assert "the processes disagree" in finding.message
    assert f"pid {server.pid} (APIServer) was started with 'fast'" in finding.message
    engine = "(EngineCore) was started with 'slow'" if engine_value else "(EngineCore) was started without it"
    assert engine in finding.message


def test_later_changes_are_seen_by_the_second_witness_only(running: Running) -> None:
    """A3: the block says what a process was started with; the process itself says what it has now."""
    server = running(faults={"late_environ": {"FAKE_SWITCH": "slow"}}, env={"FAKE_SWITCH": "fast"})
    assert "FAKE_SWITCH=slow" in server.log_text()
    result = check(server, {"FAKE_SWITCH": "fast"})
    assert all(witness.started_with == {"FAKE_SWITCH": "fast"} for witness in result.processes)
    assert codes(result.findings) == ["env_mismatch"]
    assert "in the processes themselves" in result.findings[0].message
    assert "(EngineCore) has 'slow' in os.environ" in result.findings[0].message
    alone = check(server, {"FAKE_SWITCH": "fast"}, probes=[], probe_absent="left out")
    assert codes(alone.findings) == ["one_witness"]
    assert "left out" in alone.findings[0].message
    assert not alone.findings[0].fatal


def test_engine_that_does_not_report_is_no_proof(running: Running) -> None:
    server = running(env={"FAKE_SWITCH": "fast"})
    reports = hear(Path(server.command.env["ABHARNESS_PROBE_DIR"]))
    assert {report.reason for report in reports} == {"asked"}
    kept = [report for report in reports if report.pid == server.pid]
    result = check(server, {"FAKE_SWITCH": "fast"}, probes=kept)
    assert codes(result.findings) == ["env_unverifiable"]
    assert "(EngineCore)" in result.findings[0].message
    assert result.findings[0].fatal
    stale = [report.model_copy(update={"start_ticks": 1}) for report in reports]
    assert codes(check(server, {"FAKE_SWITCH": "fast"}, probes=stale).findings) == ["one_witness"]
    old = [report.model_copy(update={"reason": "start"}) for report in reports]
    assert codes(check(server, {"FAKE_SWITCH": "fast"}, probes=old).findings) == ["env_unverifiable"]
    deaf = [report.model_copy(update={"deaf": "OSError('no sockets')"}) for report in old]
    (finding,) = check(server, {"FAKE_SWITCH": "fast"}, probes=deaf).findings
    assert finding.code == "env_unverifiable"
    assert "it cannot be asked: OSError('no sockets')" in finding.message


def test_variables_beyond_the_declared_ones_are_on_record(running: Running) -> None:
    server = running(faults={"child_env": {"LEAK": "1", "HOME": None}}, env={"FAKE_SWITCH": "fast"})
    engine = next(one for one in check(server, {"FAKE_SWITCH": "fast"}).processes if one.role == "EngineCore")
    assert {name: engine.undeclared[name] for name in ("LEAK", "HOME")} == {"LEAK": "1", "HOME": None}
    assert "FAKE_SWITCH" not in engine.undeclared


def test_caches_moved_out_of_the_launch_are_seen_from_inside(running: Running) -> None:
    server = running(faults={"late_environ": {"TRITON_CACHE_DIR": "/tmp/elsewhere"}})
    caches = {name: str(path) for name, path in server.command.cache_dirs.items()}
    assert check(server, {}).findings == []
    result = check(server, {}, caches=caches)
    assert codes(result.findings) == ["compile_cache_reused"]
    assert "os.environ['TRITON_CACHE_DIR'] is '/tmp/elsewhere'" in result.findings[0].message


def test_processes_on_the_gpu(running: Running) -> None:
    server = running()
    own = check(server, {}, gpu_pids={"GPU-1": [server.pid]})
    assert (own.findings, [holder.whose for holder in own.gpu_holders]) == ([], ["ours"])
    unseen = check(server, {}, gpu_pids={"GPU-1": [2**22 + 7]})
    assert codes(unseen.findings) == ["not_checked"]
    # A device file open makes a process of this machine one that may be on the GPU: here it is asked of a stand-in.
    holder = GpuHolder(uuid="GPU-1", pid=os.getpid(), name="ray::worker", whose="foreign")
    foreign = judge_check(own.model_copy(update={"gpu_holders": [*own.gpu_holders, holder]}), expected={})
    assert codes(foreign) == ["foreign_gpu_process"]
    assert "ray::worker" in foreign[0].message


def test_block_of_another_launch_proves_nothing(running: Running) -> None:
    """A1: without the launch's own variable a plausible block is not believed."""
    server = running()
    for sentinel, what in (
        (("ABHARNESS_OTHER", "1"), "is missing"),
        ((server.command.sentinel[0], "another"), "is '"),
    ):
        result = check_environment(
            when="after_load",
            root_pid=server.pid,
            launched=server.command.env,
            expected={"FAKE_SWITCH": None},
            sentinel=sentinel,
            log_text=server.log_text(),
            probes=hear(Path(server.command.env["ABHARNESS_PROBE_DIR"])),
        )
        assert set(codes(result.findings)) == {"env_unverifiable"}
        assert all(witness.state == "unreadable" for witness in result.processes)
        assert what in str(result.processes[0].reason)


SPAWN = """
import os, subprocess, sys
env = {"FIRST": "1", **os.environ} if sys.argv[1] == "moved" else dict(os.environ)
child = subprocess.Popen(["VLLM::EngineCore", "60"], executable="/bin/sleep", env=env)
print("up", flush=True)
sys.stdin.read()
child.kill()
child.wait()
"""


@pytest.mark.parametrize(
    ("order", "found"), [("kept", ["one_witness"]), ("moved", ["env_unverifiable", "one_witness"])]
)
def test_renamed_process_whose_block_begins_with_something_else(order: str, found: list[str]) -> None:
    """A1: entries that a title replaced whole leave a block that parses; the first one tells."""
    env = {"ABHARNESS_LAUNCH": "x", "PATH": os.environ["PATH"]}
    argv = [sys.executable, "-c", SPAWN, order]
    with subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as root:
        assert root.stdout is not None
        root.stdout.readline()
        result = check_environment(
            when="before_load", root_pid=root.pid, launched=env, expected={"SWITCH": None},
            sentinel=("ABHARNESS_LAUNCH", "x"), log_text="",
        )  # fmt: skip
        root.communicate("")
    assert codes(result.findings) == found


def test_re_parented_engine_is_checked(running: Running) -> None:
    """C1, A3: a process that is in no tree any more is found by the launch's variable and by its pid."""
    server = running(
        faults={"engine_survives": True, "child_env": {"FAKE_SWITCH": "slow"}}, env={"FAKE_SWITCH": "fast"}
    )
    engine = next(one.pid for one in server.observe() if procfs.title(one.pid) == "VLLM::EngineCore")
    os.kill(server.pid, 9)
    while server.alive() is None or procfs.tree(server.pid)[1:]:
        time.sleep(0.01)
    result = check(server, {"FAKE_SWITCH": "fast"})
    assert [(w.pid, w.started_with) for w in result.processes if w.state == "ok"] == [(engine, {"FAKE_SWITCH": "slow"})]
    assert codes(result.findings) == ["env_mismatch"]


def test_no_engine_in_the_tree(running: Running) -> None:
    """A1, C4: nothing can be said of the process that runs the model when it cannot be found."""
    server = running(faults={"engine_dead_server_lives": True})
    os.kill(next(one.pid for one in server.observe() if one.pid != server.pid), 9)
    while server.alive() is None:
        time.sleep(0.01)
    result = check(server, {"FAKE_SWITCH": None})
    assert codes(result.findings) == ["env_unverifiable"]
    assert "no process of the tree shows itself as the engine" in result.findings[0].message


def test_server_that_has_ended(running: Running) -> None:
    server = running()
    server.stop()
    result = check(server, {"FAKE_SWITCH": None})
    assert codes(result.findings) == ["env_unverifiable"]
    assert "no process is left" in result.findings[0].message


def test_engine_without_a_title_is_known_by_the_log(running: Running) -> None:
    """Without setproctitle the log's prefix says which process is the engine."""
    server = running(env={"FAKE_WORKERS": "1"})
    log = "\n".join(f"\x1b[0;36m(EngineCore_DP0 pid={pid})\x1b[0;0m INFO up" for pid, _ in server.known())
    result = check_environment(
        when="before_load",
        root_pid=server.pid,
        launched=server.command.env,
        expected={},
        sentinel=server.command.sentinel,
        log_text=log,
        probes=hear(Path(server.command.env["ABHARNESS_PROBE_DIR"])),
    )
    assert result.findings == []


def test_secrets_are_not_in_messages(running: Running) -> None:
    server = running(env={"HF_TOKEN": "hf_real"})
    result = check(server, {"HF_TOKEN": "hf_other"})
    assert codes(result.findings) == ["env_mismatch"]
    assert "hf_" not in result.findings[0].message


# A server that somebody else started.


def test_attached_server_is_checked_as_a_whole(running: Running) -> None:
    """A1, A3."""
    server = running(faults={"child_env": {"FAKE_SWITCH": "slow"}}, env={"FAKE_SWITCH": "fast"})
    result = attached_check(server.pid, {"FAKE_SWITCH": "fast"}, ["VLLM_SWITCH"])
    assert result.when == "attached"
    assert codes(result.findings) == ["env_mismatch"]
    assert attached_check(server.pid, {}, ["VLLM_SWITCH"]).findings == []


def test_attached_server_with_a_wiped_engine(running: Running) -> None:
    """A1: "unset" is not claimed of a block that is wiped in part."""
    server = running(faults={"wipe_environ": "prefix"})
    result = attached_check(server.pid, {}, ["FAKE_SWITCH"])
    assert codes(result.findings) == ["env_unverifiable"]


def test_attached_to_nothing() -> None:
    result = attached_check(2**22 + 1, {"A": "1"})
    assert codes(result.findings) == ["env_unverifiable"]


def test_running_servers_are_found(running: Running, make_command: MakeCommand) -> None:
    """C1: one tree a server; an engine that lost its server is a root of its own."""
    first = running(env={"FAKE_WORKERS": "1"})
    second = running(faults={"engine_survives": True}, env={"FAKE_WORKERS": "1"})

    def found() -> dict[int, set[int]]:
        mine = {pid for server in (first, second) for pid, _ in server.known()}
        trees = procfs.find_vllm_servers(os.getuid())
        return {one.root.pid: {p.pid for p in one.processes} for one in trees if one.root.pid in mine}

    everybody = {server.pid: {one.pid for one in server.observe()} for server in (first, second)}
    assert found() == everybody
    engine = next(one.pid for one in second.observe() if procfs.title(one.pid) == "VLLM::EngineCore")
    os.kill(second.pid, 9)
    while second.alive() is None:
        time.sleep(0.01)
    assert found() == {first.pid: everybody[first.pid], engine: everybody[second.pid] - {second.pid}}
    assert procfs.find_vllm_servers(os.getuid() + 1) == []


# Plugins.


def test_plugin_that_is_not_installed(running: Running) -> None:
    """A9: matching environment alone is not enough."""
    server = running(env={"VLLM_PLUGINS": "my_kernels", "VLLM_LOGGING_LEVEL": "DEBUG"})
    absent = "VLLM_PLUGINS leaves it out"
    result = check(server, {"VLLM_PLUGINS": "my_kernels"}, plugins=["my_kernels"], probe_absent=absent)
    assert codes(result.findings) == ["one_witness", "plugin_not_active"]
    assert result.plugins == {"my_kernels": []}
    assert result.findings[-1].fatal


@pytest.fixture
def plugin_site(tmp_path: Path) -> Callable[[str], str]:
    """Makes a PYTHONPATH with a plugin `my_kernels` of this source."""

    def make(source: str) -> str:
        info = tmp_path / "site/my_kernels-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-kernels\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[vllm.general_plugins]\nmy_kernels = my_kernels:register\n")
        (tmp_path / "site/my_kernels.py").write_text(source)
        return os.pathsep.join([str(tmp_path / "site"), str(FAKE_SITE)])

    return make


GOOD = "def register(): pass"


@pytest.mark.parametrize("allowed", [{"VLLM_PLUGINS": "my_kernels"}, {}], ids=["named", "all"])
def test_plugin_loaded_everywhere(running: Running, plugin_site: Callable[[str], str], allowed: dict[str, str]) -> None:
    """A9."""
    env = {"PYTHONPATH": plugin_site(GOOD), "VLLM_LOGGING_LEVEL": "DEBUG", "FAKE_WORKERS": "1", **allowed}
    result = check(running(env=env), {}, plugins=["my_kernels"], probes=[], probe_absent="the log alone")
    assert codes(result.findings) == ["one_witness"]
    assert [one.role for one in result.processes if one.pid in result.plugins["my_kernels"]] == [
        "APIServer", "EngineCore", "Worker"]  # fmt: skip


def test_plugin_in_the_api_server_only(running: Running, plugin_site: Callable[[str], str]) -> None:
    """A9."""
    env = {"PYTHONPATH": plugin_site(GOOD), "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_PLUGINS": "my_kernels"}
    server = running(env=env, faults={"plugin_api_server_only": ["my_kernels"]})
    result = check(server, {}, plugins=["my_kernels"], probes=[], probe_absent="the log alone")
    assert result.plugins == {"my_kernels": [server.pid]}
    assert codes(result.findings) == ["one_witness", "plugin_not_active"]
    assert "(EngineCore)" in result.findings[1].message


def test_plugin_that_fails_on_import(running: Running, plugin_site: Callable[[str], str]) -> None:
    """A9: the server starts normally."""
    env = {"PYTHONPATH": plugin_site("import no_such_module"), "VLLM_PLUGINS": "my_kernels"}
    result = check(running(env=env), {}, plugins=["my_kernels"])
    assert codes(result.findings) == ["one_witness", "plugin_not_active"]
    assert "Failed to load plugin my_kernels" in result.findings[1].message


@pytest.mark.parametrize("where", ["everywhere", "API server only", "not in one worker"])
def test_plugin_reported_from_inside(running: Running, plugin_site: Callable[[str], str], where: str) -> None:
    """A9: without DEBUG the log is silent; the report from within each process counts as well."""
    env = {"PYTHONPATH": plugin_site(GOOD), "VLLM_PLUGINS": "my_kernels,abharness_probe", "FAKE_WORKERS": "1"}
    faults = {"plugin_api_server_only": ["my_kernels"]} if where == "API server only" else {}
    server = running(env=env, faults=faults)
    reports = hear(Path(server.command.env["ABHARNESS_PROBE_DIR"]))
    if where == "not in one worker":
        last = max(report.pid for report in reports)
        reports = [one.model_copy(update={"plugins": []}) if one.pid == last else one for one in reports]
    result = check(server, {}, plugins=["my_kernels"], probes=reports)
    assert codes(result.findings) == ([] if where == "everywhere" else ["plugin_not_active"])


def test_completion_helper_sees_errors(running: Running) -> None:
    """The reason is returned, so that a fast error is not taken for readiness."""
    server = running(faults={"http_errors": {"status": 500, "from": 1}})
    assert "500" in str(completion(server.command))
