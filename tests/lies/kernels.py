"""Lies about what was executed: the switch arrives, is logged and believed, and other kernels run than it promises."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.lies.battery import Lie, Setup
from tests.lies.switches import env, faults, in_candidate

PROMISED = "fake_decode_fast"
EXPECTED = {"candidate": {"forbid": ["slow"], "phases": {"decode": {"require": [PROMISED]}}}}

# The server logs what it was told to do, whatever it does.
BELIEVED = Setup(
    spec={
        **env(FAKE_SPEEDS="{}"),
        "trace": {"decode": [1], "prefill": [], "steps": 2},
        "verify": {"expect_log": {"candidate": ["fast kernels enabled"]}, "expect_kernels": EXPECTED},
    },
    faults={"log_lines": in_candidate(["fast kernels enabled"])},
)


def kernel_lie(name: str, says: str, code: str = "kernel_mismatch", exit_code: int = 4, **trace: Any) -> Lie:
    lie = faults(trace=in_candidate(**trace))
    return Lie(name, "the new kernel makes no difference", exit_code, code, says, BELIEVED, lie)


def _the_baselines_tables(run: Path) -> list[str]:
    launches = run / "launches"
    shutil.rmtree(launches / "1-candidate" / "kernels")
    shutil.copytree(launches / "0-baseline" / "kernels", launches / "1-candidate" / "kernels")
    return [str(run)]


def _no_tables(run: Path) -> list[str]:
    shutil.rmtree(run / "launches" / "1-candidate" / "kernels")
    return [str(run)]


LIES = (
    kernel_lie(
        "the log says so and the kernel never runs", r"'fake_decode_fast' did not run in decode\[1\]; there ran fake_norm",
        kernels={"decode": ["fake_norm"]},
    ),
    kernel_lie(
        "the kernel runs in prefill only", r"'fake_decode_fast' did not run in decode\[1\]",
        kernels={"decode": ["fake_norm"], "prefill": [PROMISED]},
    ),
    kernel_lie(
        "one process falls back", r"'fake_decode_fast' did not run in decode\[1\]", ranks=2, others=["fake_norm"]
    ),
    kernel_lie(
        "the old kernel runs beside the new one", r"'slow' is forbidden and ran in any phase: fake_decode_slow",
        kernels={"decode": [PROMISED, "fake_decode_slow"]},
    ),
    kernel_lie(
        "the profiler writes nothing", r"the profiler wrote no trace", "kernels_unverifiable", 3, missing=True
    ),
    kernel_lie(
        "the trace ends before the old kernel", r"'slow' in any phase \(decode\[1\]: ", "kernels_unverifiable", 3,
        truncated=True,
    ),
    kernel_lie(
        "the batch was never as large as asked", r"none of its \d+ steps decodes 1 rows", "kernels_unverifiable", 3,
        rows_short=1,
    ),
    Lie(
        "the kernel tables are the other variant's", "the new kernel ran", 3, "kernel_mismatch",
        r"did not run in decode\[1\]", BELIEVED, edit=_the_baselines_tables,
    ),
    Lie(
        "the kernel tables are gone", "the new kernel ran", 3, "kernels_unverifiable", r"cannot be read", BELIEVED,
        edit=_no_tables,
    ),
)  # fmt: skip
