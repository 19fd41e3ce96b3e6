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
import dataclasses, json, sys, time
from abharness.errors import GpuError, PreflightError
from abharness.telemetry import open_gpu
try:
    gpu = open_gpu(json.loads(sys.argv[1]))
    uuids = gpu.uuids()
    first = [gpu.energy_j(uuid) for uuid in uuids]
    time.sleep(0.05)
    print(json.dumps({
        "uuids": uuids, "describe": gpu.describe(),
        "used": [gpu.memory_used_bytes(uuid) for uuid in uuids], "pids": [gpu.compute_pids(uuid) for uuid in uuids],
        "first": first, "read": [dataclasses.asdict(gpu.read(uuid)) for uuid in uuids],
        "kinds": gpu.power_kinds(), "missing": gpu.missing(),
    }))
except PreflightError as error:
    print(json.dumps({"error": str(error), "hint": error.hint}))
"""


def look(
    environ: dict[str, str],
    devices: list[dict[str, Any]] | None = None,
    site: Path = FAKE_NVML,
    faults: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What `open_gpu` makes of a server environment, on a host with these devices (None: no driver)."""
    env = {"PYTHONPATH": f"{site}:{ROOT}", "FAKE_NVML_FAULTS": json.dumps(faults or {})}
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
    with pytest.raises(KeyError):
        absent.energy_j("GPU-aaaa")
    assert (absent.power_kinds(), absent.missing()) == ({}, {})


def test_a_reading_has_energy_power_and_the_limit_in_force() -> None:
    seen = look({}, TWO)
    slow, fast = seen["read"]
    assert slow["power_w"] == 70.0
    assert slow["power_limit_w"] == 300.0
    assert slow["energy_j"] > seen["first"][0] > 0
    assert fast["power_limit_w"] is None
    assert seen["missing"] == {"GPU-abbb": {"power_limit_w": "Not Supported"}}
    assert seen["kinds"] == {"GPU-aaaa": "instant", "GPU-abbb": "instant"}


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ({"not_supported": ["power_instant"]}, "average"),
        ({"not_supported": ["power_average"]}, "instant"),
        ({"not_supported": ["power_instant", "power_average"]}, "unspecified"),
        ({"no_fields": True}, "unspecified"),
    ],
)
def test_f2_what_a_power_reading_is_is_known(faults: dict[str, Any], kind: str) -> None:
    seen = look({}, TWO[:1], faults=faults)
    assert seen["kinds"] == {"GPU-aaaa": kind}
    assert seen["read"][0]["power_w"] == 70.0


def test_f2_power_that_fails_in_the_middle_does_not_become_another_kind() -> None:
    code = """
import json, os
from abharness.errors import GpuError
from abharness.telemetry import open_gpu
gpu = open_gpu({})
gpu.read("GPU-aaaa")
os.environ["FAKE_NVML_FAULTS"] = json.dumps({"not_supported": ["power_instant"]})
try:
    print(gpu.read("GPU-aaaa"))
except GpuError as error:
    print(error, gpu.power_kinds())
"""
    env = {"PYTHONPATH": f"{FAKE_NVML}:{ROOT}", "FAKE_NVML": json.dumps(TWO)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "instant power cannot be read any more" in done.stdout
    assert "'instant'" in done.stdout


@pytest.mark.parametrize(("lacks", "asked"), [([], [[186, 83]]), (["energy_field"], [[186, 83], [186], [186]])])
def test_power_and_energy_are_one_question_where_the_device_can_answer_it(
    lacks: list[str], asked: list[list[int]]
) -> None:
    """Each question takes a device milliseconds; one without the field is asked apart from then on."""
    code = """
import json
import pynvml
from abharness.telemetry import open_gpu
gpu = open_gpu({})
first = gpu.read("GPU-aaaa")
asked, real = [], pynvml.nvmlDeviceGetFieldValues
pynvml.nvmlDeviceGetFieldValues = lambda handle, fields: asked.append(fields) or real(handle, fields)
second = gpu.read("GPU-aaaa")
if len(asked) > 1:
    gpu.read("GPU-aaaa")
print(json.dumps([asked, second.power_w, second.energy_j >= first.energy_j > 0, gpu.missing()]))
"""
    faults = json.dumps({"not_supported": lacks})
    env = {"PYTHONPATH": f"{FAKE_NVML}:{ROOT}", "FAKE_NVML": json.dumps(TWO[:1]), "FAKE_NVML_FAULTS": faults}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [asked, 70.0, True, {}]


def test_f1_a_device_without_a_counter_says_so_and_is_not_zero() -> None:
    seen = look({}, TWO[:1], faults={"not_supported": ["energy_j"]})
    assert seen["first"] == [None]
    assert seen["read"][0]["energy_j"] is None
    assert seen["missing"] == {"GPU-aaaa": {"energy_j": "Not Supported"}}


SLICES = [
    {"uuid": "MIG-1111", "used": 11, "pids": [4]},
    {"uuid": "MIG-2222", "used": 22, "pids": []},
]
SLICED = [TWO[0], {**TWO[1], "limit_mw": 500_000, "mig": SLICES}]


@pytest.mark.parametrize("listed", ["MIG-2222", "MIG-2", "MIG-2222,-1"])
def test_a_mig_slice_has_its_own_memory_and_processes_and_the_clocks_of_its_gpu(listed: str) -> None:
    seen = look({"CUDA_VISIBLE_DEVICES": listed}, SLICED)
    assert (seen["uuids"], seen["used"], seen["pids"]) == (["MIG-2222"], [22], [[]])
    (reading,) = seen["read"]
    assert (reading["sm_clock_mhz"], reading["reasons"], reading["power_limit_w"]) == (345, ["gpu_idle"], 500.0)
    assert reading["memory_used_bytes"] == 22
    (device,) = seen["describe"]["devices"]
    assert (device["name"], device["mig_slice_of"]) == ("Fake slice", "GPU-abbb")


def test_the_power_of_a_mig_slice_is_not_known() -> None:
    seen = look({"CUDA_VISIBLE_DEVICES": "MIG-1111"}, SLICED)
    (reading,) = seen["read"]
    assert (reading["power_w"], reading["energy_j"], reading["utilization"]) == (None, None, None)
    reason = "GPU GPU-abbb is shared by MIG slices: its power is not this slice's alone"
    assert seen["missing"]["MIG-1111"] == {"power_w": reason, "energy_j": reason, "utilization": "Not Supported"}
    assert seen["first"] == [None]


@pytest.mark.parametrize(
    "environ",
    [{}, {"CUDA_VISIBLE_DEVICES": "GPU-abbb"}, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}],
)
def test_a_gpu_in_mig_mode_is_named_by_its_slice(environ: dict[str, str]) -> None:
    seen = look(environ, SLICED)
    assert "GPU GPU-abbb is in MIG mode, and a server runs on one of its slices: MIG-1111, MIG-2222" in seen["error"]
    assert "CUDA_VISIBLE_DEVICES=MIG-1111" in seen["hint"]
    empty = look(environ, [TWO[0], {**SLICED[1], "mig": []}])
    assert "none yet" in empty["error"]


def test_the_other_gpus_of_such_a_host_are_as_always() -> None:
    assert look({"CUDA_VISIBLE_DEVICES": "GPU-aaaa"}, SLICED)["uuids"] == ["GPU-aaaa"]


@pytest.mark.parametrize("listed", ["MIG-1111,MIG-2222", "GPU-aaaa,MIG-1111"])
def test_a_mig_slice_stands_alone(listed: str) -> None:
    assert "CUDA uses one MIG slice" in look({"CUDA_VISIBLE_DEVICES": listed}, SLICED)["error"]


@pytest.mark.parametrize("listed", ["MIG-", "MIG-3"])
def test_a_slice_that_cannot_be_named(listed: str) -> None:
    seen = look({"CUDA_VISIBLE_DEVICES": listed}, SLICED)
    assert repr(listed) in seen["error"]
    assert "MIG-2222" in seen["error"]
