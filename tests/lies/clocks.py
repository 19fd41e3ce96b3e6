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

# Long enough for the energy counter, whose period is 0.02 s here; the energy decides.
BY_ENERGY = Setup(
    spec={
        "workloads": [{**DECODE, "output_len": 60, "num_prompts": 2}],
        "design": {"primary": "decode[1]/energy_per_output_token"},
        "telemetry": {"interval_s": 0.1},
    },
).over(ON_A_GPU)


def gpu_lie(name: str, code: str, says: str, lie: Setup, exit_code: int = 3, honest: Setup = ON_A_GPU) -> Lie:
    return Lie(name, "the switch made the difference", exit_code, code, says, honest, lie)


def energy_lie(name: str, says: str, lie: Setup) -> Lie:
    """There is nothing wrong with the run: the energy alone is not known, and it was to decide."""
    says = rf"^\[\d\] energy: {says}"
    return Lie(name, "a token costs less energy", 3, None, says, BY_ENERGY, lie)


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
    energy_lie(
        "the energy counter counts half in one variant", r"counter \d+ J, integrated power \d+ J: \d+% apart, limit 10%",
        faults(gpu=in_candidate(energy_scale=0.55)),
    ),
    energy_lie(
        "the energy counter starts over under load", r"counter reset: it went from \d",
        faults(gpu=in_candidate(energy_wraps_j=200)),
    ),
    energy_lie(
        "the energy counter stands still", r"the energy counter stood still at .* J",
        faults(gpu=in_candidate(energy_scale=0)),
    ),
    energy_lie(
        "the window is too short for the energy counter", r"window of .* s is shorter than .*: its energy would be",
        Setup(spec={"workloads": [{**DECODE, "output_len": 20, "num_prompts": 2}]}),
    ),
    energy_lie(
        "the device has no energy counter, and its power is an average",
        r"no energy counter \(Not Supported\), and integrated power needs a window of 10 s \(average power\)",
        nvml(not_supported=["energy_j", "power_instant"]),
    ),
    gpu_lie(
        "the power limit is lower in one variant", "undeclared_difference", r"power_limit.GPU-11111111: baseline .700 W",
        faults(gpu=in_candidate(power_limit_w=500)),
    ),
)  # fmt: skip
