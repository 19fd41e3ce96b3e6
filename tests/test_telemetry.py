"""Naming the GPUs that a launch can use; NVML itself is a stand-in in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from abharness import telemetry

ROOT = Path(telemetry.__file__).parents[1]
FAKE_NVML = Path(__file__).parent / "fake_nvml"
TWO = [
    {"uuid": "GPU-aaaa", "name": "Slow", "used": 5, "pids": [], "limit_mw": 300_000},
    {"uuid": "GPU-abbb", "name": "Fast", "used": 7, "pids": [12, 3]},
]
CODE = """
import json, sys
from abharness.errors import PreflightError
from abharness.telemetry import open_gpu
try:
    gpu = open_gpu(json.loads(sys.argv[1]))
    uuids = gpu.uuids()
    print(json.dumps({
        "uuids": uuids, "describe": gpu.describe(),
        "used": [gpu.memory_used_bytes(uuid) for uuid in uuids], "pids": [gpu.compute_pids(uuid) for uuid in uuids],
    }))
except PreflightError as error:
    print(json.dumps({"error": str(error), "hint": error.hint}))
"""


def look(
    environ: dict[str, str], devices: list[dict[str, Any]] | None = None, site: Path = FAKE_NVML
) -> dict[str, Any]:
    """What `open_gpu` makes of a server environment, on a host with these devices (None: no driver)."""
    env = {"PYTHONPATH": f"{site}:{ROOT}"}
    if devices is not None:
        env["FAKE_NVML"] = json.dumps(devices)
    result = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(environ)], env=env, capture_output=True, text=True, check=True
    )
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer


def test_devices_are_named_and_described() -> None:
    seen = look({}, TWO)
    assert seen["uuids"] == ["GPU-aaaa", "GPU-abbb"]
    assert seen["used"] == [5, 7]
    assert seen["pids"] == [[], [3, 12]]
    assert seen["describe"]["driver_version"] == "999.1"
    assert [one["name"] for one in seen["describe"]["devices"]] == ["Slow", "Fast"]
    assert [one["power_limit_w"] for one in seen["describe"]["devices"]] == [300.0, None]


@pytest.mark.parametrize(
    ("environ", "uuids"),
    [
        ({"CUDA_VISIBLE_DEVICES": "GPU-abbb"}, ["GPU-abbb"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-ab, GPU-aaaa"}, ["GPU-abbb", "GPU-aaaa"]),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["GPU-abbb"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-abbb,-1,GPU-aaaa"}, ["GPU-abbb"]),
    ],
)
def test_visible_devices(environ: dict[str, str], uuids: list[str]) -> None:
    """F5."""
    assert look(environ, TWO)["uuids"] == uuids


def test_index_is_ambiguous_among_several() -> None:
    """F5: CUDA's index is not NVML's."""
    seen = look({"CUDA_VISIBLE_DEVICES": "0"}, TWO)
    assert "ambiguous" in seen["error"]
    assert "GPU-aaaa" in seen["hint"]
    assert look({"CUDA_VISIBLE_DEVICES": "0"}, TWO[:1])["uuids"] == ["GPU-aaaa"]


@pytest.mark.parametrize("listed", ["GPU-a", "GPU-zzz", "7", "MIG-1"])
def test_devices_that_cannot_be_named(listed: str) -> None:
    """F5."""
    seen = look({"CUDA_VISIBLE_DEVICES": listed, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, TWO)
    assert repr(listed) in seen["error"]


@pytest.mark.parametrize("listed", ["", "-1"])
def test_hidden_devices_are_absent_with_the_reason(listed: str) -> None:
    seen = look({"CUDA_VISIBLE_DEVICES": listed}, TWO)
    assert seen["uuids"] == []
    assert "hides every device" in seen["describe"]["absent"]


def test_no_driver_is_absent_with_the_reason() -> None:
    assert look({})["describe"] == {"absent": "NVML: Driver Not Loaded"}
    assert look({}, [])["describe"] == {"absent": "NVML sees no device"}


def test_another_package_of_that_name_is_refused(tmp_path: Path) -> None:
    """F7: the old distribution `pynvml` shadows the official bindings."""
    (tmp_path / "pynvml").mkdir()
    (tmp_path / "pynvml/__init__.py").write_text("def nvmlInit(): pass\n")
    info = tmp_path / "pynvml-11.5.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pynvml\nVersion: 11.5.0\n")
    (info / "top_level.txt").write_text("pynvml\n")
    seen = look({}, TWO, site=tmp_path)
    assert "pynvml 11.5.0" in seen["error"]
    assert "nvidia-ml-py 1" in seen["error"]
    assert "pip uninstall" in seen["hint"]


def test_absent_gpu_has_nothing_to_read() -> None:
    """F1: a missing device is never 0."""
    absent = telemetry.AbsentGpu("no driver")
    with pytest.raises(KeyError):
        absent.memory_used_bytes("GPU-aaaa")
    with pytest.raises(KeyError):
        absent.compute_pids("GPU-aaaa")
