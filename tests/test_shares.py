"""Work shared out over processes: the same results and errors as in one, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.synthetic import Made, write_run

ROOT = Path(__file__).parents[1]
MANY = 40  # runs that are worth two processes

PROGRAM = """
import os, sys
from abharness.errors import RecordError
from abharness.shares import LEAST, in_shares
os.sched_setaffinity(0, os.sched_getaffinity(0))
{body}
"""


def run_program(body: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stderr == ""
    return done.stdout


needs_cpus = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU: nothing is shared out")


@needs_cpus
def test_results_come_in_order_and_from_more_than_one_process() -> None:
    body = """
found = in_shares(lambda share: [(item, os.getpid()) for item in share], range(3 * LEAST))
print([item for item, _ in found] == list(range(3 * LEAST)), len({pid for _, pid in found}) > 1, os.getpid() == found[0][1])
try: os.waitpid(-1, os.WNOHANG)
except ChildProcessError: print("no child is left")
"""
    assert run_program(body).splitlines() == ["True True True", "no child is left"]


def test_few_items_and_a_process_with_threads_stay_in_one() -> None:
    body = """
print({pid for pid in in_shares(lambda share: [os.getpid() for _ in share], range(LEAST))} == {os.getpid()})
import threading
stop = threading.Event()
threading.Thread(target=stop.wait).start()
print({pid for pid in in_shares(lambda share: [os.getpid() for _ in share], range(9 * LEAST))} == {os.getpid()})
stop.set()
"""
    assert run_program(body).splitlines() == ["True", "True"]


@needs_cpus
def test_the_earliest_error_is_raised_whole_and_a_child_that_dies_is_told() -> None:
    body = """
def fails(share):
    if 0 not in share: raise RecordError(f"bad {share[0]}", hint="look")
    return list(share)
try: in_shares(fails, range(2 * LEAST))
except RecordError as error: print(error, error.hint, error.exit_code)
def dies(share):
    if 0 not in share: os.kill(os.getpid(), 9)
    return list(share)
try: in_shares(dies, range(2 * LEAST))
except ChildProcessError as error: print(error)
"""
    assert run_program(body).splitlines() == [
        "bad 16 look 2", "a process that shared the work died before it was done: out of memory?"
    ]  # fmt: skip


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    for index in range(MANY):
        launches: Any = {"baseline": [Made(speed=100 + index)], "candidate": [Made(speed=120 + index)]}
        write_run(folder / f"r{index:02}", launches, "design.launches_per_variant=1")
    write_run(folder / "aa", {"baseline": [Made(), Made()], "candidate": [Made(), Made()]}, "design.launches_per_variant=2",
              aa=True)  # fmt: skip
    return folder


def compare(folder: Path, *, cpus: int) -> tuple[int, str, str]:
    """The command's outcome on that many CPUs."""
    some = sorted(os.sched_getaffinity(0))[:cpus]
    program = (
        f"import os, sys; os.sched_setaffinity(0, {some}); from abharness.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run([sys.executable, "-c", program, "compare", str(folder), "--format", "json"], cwd=ROOT,
                          capture_output=True, text=True, check=False)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_compare_says_the_same_on_one_cpu_and_on_more(many: Path) -> None:
    one, more = compare(many, cpus=1), compare(many, cpus=8)
    assert one == more
    assert one[1].count('"exit_code"') == MANY + 1
    assert "A/A floor: 4 launches" in one[1]


def test_a_damaged_record_is_the_same_error_on_more_cpus(many: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(many), str(damaged)], check=True)
    (damaged / "r35" / "launches" / "0-baseline" / "launch.json").write_text("{")
    one, more = compare(damaged, cpus=1), compare(damaged, cpus=8)
    assert one == more
    assert one[0] == 2
    assert "r35" in one[2]
    assert "hint: the file is damaged" in one[2]
