"""What else the CPUs did during a window: measured on real processes, told by the comparison."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from abharness.cli import main
from abharness.hostload import HostWatch
from abharness.windows import HostLoad
from tests.synthetic import Made, write_run


@pytest.fixture
def spinning() -> Iterator[psutil.Process]:
    """A process that does nothing but use a CPU."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield psutil.Process(process.pid)
        process.kill()


def test_a_process_outside_the_tree_is_another_and_one_inside_is_not(spinning: psutil.Process) -> None:
    def used_s() -> float:
        times = spinning.cpu_times()
        return float(times.user + times.system)

    before, began_s = used_s(), time.monotonic()
    foreign, ours = HostWatch(list), HostWatch(lambda: [spinning.pid])
    time.sleep(1.5)
    seen, own = foreign.ended(), ours.ended()
    share = (used_s() - before) / (time.monotonic() - began_s)
    # Whatever else runs on this machine is in both.
    assert seen.other_cpus - own.other_cpus == pytest.approx(share, abs=0.1)
    assert seen.cpus == psutil.cpu_count()


def test_a_process_that_is_gone_does_no_harm() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        watch = HostWatch(lambda: [process.pid])
        assert watch.ended().other_cpus >= 0


@pytest.mark.parametrize(("host", "told"), [
    (HostLoad(cpus=32, other_cpus=0.4, stolen_cpus=0.0), None),
    (HostLoad(cpus=32, other_cpus=2.13, stolen_cpus=0.0), "other processes used 2.1 of 32 CPUs meanwhile"),
    (HostLoad(cpus=4, other_cpus=0.0, stolen_cpus=1.0), "the hypervisor gave others 1.0 of 4 CPUs meanwhile"),
    (None, None),
])  # fmt: skip
def test_a_busy_host_is_told_and_takes_no_verdict_away(
    host: HostLoad | None, told: str | None, tmp_path: Path, capsys: Any
) -> None:
    launches = {"baseline": [Made(host=host)] * 4, "candidate": [Made()] * 4}
    write_run(tmp_path / "r", launches)  # type: ignore[arg-type]
    assert main(["compare", str(tmp_path / "r"), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["comparisons"][0]
    messages = [item["finding"]["message"] for item in found["advice"] if item["finding"]["code"] == "host_busy"]
    assert [message.startswith(told or "nothing") for message in messages] == [True] * (4 if told else 0)
