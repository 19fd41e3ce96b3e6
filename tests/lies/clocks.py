"""Lies about the GPU: its clocks, its heat, who else is on it, and whether it is the one that was looked at.

The harness finds the fake NVML bindings through PYTHONPATH; what they show of the device is what the engine says.
"""

from __future__ import annotations

import json
from typing import Any

from tests.lies.battery import DECODE, ROOT, Lie, Setup
from tests.lies.switches import env, faults, in_candidate

DEVICE = {"uuid": "GPU-11111111", "name": "Fake H", "used": 2**20, "pids": [], "limit_mw": 700_000}
OTHER = {**DEVICE, "uuid": "GPU-22222222"}


def devices(*shown: dict[str, Any]) -> dict[str, str]:
    return {"FAKE_NVML": json.dumps(shown)}


# The cell takes most of a second: there are samples in it.
ON_A_GPU = Setup(
    spec={**env(FAKE_GPU_DIR="@TMP@/gpu", FAKE_SPEEDS="{}", FAKE_TPOT_S="0.02"),
          "workloads": [{**DECODE, "output_len": 20, "num_prompts": 2}]},
    files={"gpu/here": ""},
    outside={"PYTHONPATH": f"{ROOT / 'tests' / 'fake_nvml'}:{ROOT}", "FAKE_GPU_DIR": "@TMP@/gpu", **devices(DEVICE)},
)  # fmt: skip
ON_ONE_OF_TWO = Setup(outside={**devices(DEVICE, OTHER), "CUDA_VISIBLE_DEVICES": "GPU-11111111"}).over(ON_A_GPU)


def gpu_lie(name: str, code: str, says: str, lie: Setup, exit_code: int = 3, honest: Setup = ON_A_GPU) -> Lie:
    return Lie(name, "the switch made the difference", exit_code, code, says, honest, lie)


def nvml(**orders: Any) -> Setup:
    return Setup(outside={"FAKE_NVML_FAULTS": json.dumps(orders)})


LIES = (
    gpu_lie(
        "the clocks fall in one variant", "clocks_differ", r"SM clock of GPU-11111111: baseline 1980 MHz, candidate 1520",
        faults(gpu=in_candidate(sm_clock_mhz=1520, reasons=["sw_power_cap"])),
    ),
    gpu_lie(
        "the memory clock falls in one variant", "clocks_differ", r"memory clock of GPU-11111111",
        faults(gpu=in_candidate(mem_clock_mhz=1593)),
    ),
    gpu_lie(
        "the GPU is too hot", "throttled", r"sw_thermal_slowdown",
        faults(gpu=in_candidate(reasons=["sw_thermal_slowdown"])),
    ),
    gpu_lie(
        "the GPU cannot be read any more", "telemetry_gap", r"Unknown Error",
        nvml(fail={"after": 4, "times": 100_000}),
    ),
    gpu_lie(
        "samples take longer than their interval", "telemetry_gap", r"samples in a window", nvml(slow_s=0.4),
    ),
    gpu_lie(
        "the GPU that was looked at is not the one that works", "telemetry_gap", r"not the one that works",
        faults(gpu={"uuid": "GPU-22222222"}), honest=ON_ONE_OF_TWO,
    ),
    gpu_lie(
        "another process is on the GPU before the start", "foreign_gpu_process", r"GPU GPU-11111111 is in use: .*pid 1 ",
        Setup(outside=devices({**DEVICE, "pids": [1]})), 4,
    ),
    gpu_lie(
        "another process comes to the GPU under load", "foreign_gpu_process", r"outside the verified process tree",
        faults(stray=in_candidate(how="gpu", after_requests=2, pid_file="@TMP@/gpu.pid")), 4,
    ),
)  # fmt: skip
