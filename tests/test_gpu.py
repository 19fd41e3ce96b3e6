"""Telemetry of a real NVIDIA GPU; by hand: python -m pytest --noconftest -m gpu tests/test_gpu.py"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from abharness.gpuchecks import COVERAGE_LIMIT
from abharness.sampler import Sampler
from abharness.telemetry import NvmlGpu, open_gpu

pytestmark = pytest.mark.gpu

BURN = """
import time, torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("ready", flush=True)
end = time.monotonic() + 8
while time.monotonic() < end:
    for _ in range(20):
        a = a @ a * 1e-3
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def gpu() -> NvmlGpu:
    found = open_gpu(os.environ)
    if not isinstance(found, NvmlGpu):
        pytest.skip(f"no GPU: {found.describe()}")
    return found


@pytest.fixture
def burning() -> Iterator[None]:
    """Matrix products on the first GPU."""
    with subprocess.Popen([sys.executable, "-c", BURN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            pytest.skip("torch cannot use the GPU here")
        yield
        process.kill()


def test_every_reading_of_a_data_centre_gpu_is_there(gpu: NvmlGpu) -> None:
    (first, *_) = gpu.uuids()
    reading = gpu.read(first)
    assert {name for name in reading.__slots__ if getattr(reading, name) is None} == set(gpu.missing().get(first, {}))
    assert gpu.missing().get(first, {}) == {}
    assert first.startswith("GPU-")


def test_a_window_under_load_has_an_energy_that_both_witnesses_tell(gpu: NvmlGpu, burning: None) -> None:
    sampler = Sampler(gpu, None)
    sampler.note_memory_before()
    sampler.start()
    started_s = time.monotonic() + 0.5
    time.sleep(5.5)
    ended_s = time.monotonic() - 0.5
    sampler.stop()
    (window, *_) = sampler.windows(started_s, ended_s) or []
    assert window.energy_absent is None
    assert window.energy_source == "counter"
    assert window.energy_j is not None
    assert window.energy_integral_j is not None
    assert window.energy_j == pytest.approx(window.energy_integral_j, rel=0.1)
    assert window.coverage >= COVERAGE_LIMIT
    assert window.sm_clock_mhz is not None
    assert window.sm_clock_mhz > 500
    assert window.utilization is not None
    assert window.utilization > 0.9  # one sample of a window may see the moment between two products
    sampling = sampler.sampling()
    assert sampling is not None
    assert 0.01 < sampling.energy_period_s[window.uuid] < 0.5
    assert sampling.cpu_s < 0.05 * (sampling.ended_s - sampling.started_s)
    print(window.model_dump_json(indent=1), sampling.model_dump_json(indent=1))
