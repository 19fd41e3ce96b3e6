"""A stand-in for the NVML bindings, found through PYTHONPATH where the official ones would be.

FAKE_NVML           the devices, JSON: list of {uuid, name, used, pids, limit_mw, mig}; unset is "no driver". mig: the
                    device is in MIG mode, and these are its slices, list of {uuid, used, pids}
FAKE_GPU_DIR        folder in which fake engines keep `<pid>.json`: what each does to its device while it lives
FAKE_NVML_FAULTS    JSON object, fault -> argument:
    not_supported   fields that the device does not have: sm_clock_mhz, mem_clock_mhz, power_w, temperature_c,
                    utilization, reasons, energy_j, power_instant, power_average
    energy_period_s seconds between two steps of the energy counter, 0.02 if not given
    no_fields       true: the driver is too old to know values by their field number
    old_driver      true: the driver knows the clocks event reasons under their older name only
    fail            object: after (SM clock readings that work), times (how many then fail)
    lost_after      SM clock readings that work before the device is lost for good
    slow_s          seconds that an SM clock reading takes

The energy counter sums the power that the living engines draw. What an engine says of its device may bend it:
energy_scale (of what is drawn, so much is counted), energy_wraps_j (it begins at 0 again each so many joules).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_TEMPERATURE_GPU = 0
NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION = 83
NVML_FI_DEV_POWER_AVERAGE = 185
NVML_FI_DEV_POWER_INSTANT = 186
NVML_DEVICE_MIG_DISABLE = 0
NVML_DEVICE_MIG_ENABLE = 1
UNSIGNED_LONG_LONG = 3
UNSIGNED_INT = 1
NOT_SUPPORTED = 3

REASONS = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
    "one_of_the_future": 1 << 40,
}
nvmlClocksEventReasonGpuIdle = 0x1  # noqa: N816
nvmlClocksEventReasonApplicationsClocksSetting = 0x2  # noqa: N816
nvmlClocksEventReasonSwPowerCap = 0x4  # noqa: N816
nvmlClocksEventReasonHwSlowdown = 0x8  # noqa: N816
nvmlClocksEventReasonSyncBoost = 0x10  # noqa: N816
nvmlClocksEventReasonSwThermalSlowdown = 0x20  # noqa: N816
nvmlClocksEventReasonHwThermalSlowdown = 0x40  # noqa: N816
nvmlClocksEventReasonHwPowerBrakeSlowdown = 0x80  # noqa: N816
nvmlClocksEventReasonDisplayClockSetting = 0x100  # noqa: N816

IDLE = {"sm_clock_mhz": 345, "mem_clock_mhz": 2619, "power_w": 70.0, "temperature_c": 30, "utilization": 0,
        "reasons": ["gpu_idle"]}  # fmt: skip
BUSY = {"sm_clock_mhz": 1980, "mem_clock_mhz": 2619, "power_w": 500.0, "temperature_c": 55, "utilization": 97,
        "reasons": []}  # fmt: skip

readings = 0
counters: dict[str, dict[str, float]] = {}


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):  # noqa: N801
    pass


class NVMLError_NoPermission(NVMLError):  # noqa: N801
    pass


class NVMLError_FunctionNotFound(NVMLError):  # noqa: N801
    pass


class NVMLError_GpuIsLost(NVMLError):  # noqa: N801
    pass


class NVMLError_NotFound(NVMLError):  # noqa: N801
    pass


class NVMLError_InvalidArgument(NVMLError):  # noqa: N801
    pass


def faults() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(os.environ.get("FAKE_NVML_FAULTS") or "{}")
    return found


def on_device(uuid: str) -> dict[int, dict[str, Any]]:
    """What the living engines do to a device, by pid."""
    folder = os.environ.get("FAKE_GPU_DIR")
    found = {}
    first = json.loads(os.environ["FAKE_NVML"])[0]["uuid"]
    for path in Path(folder).glob("*.json") if folder else ():
        try:
            alive = Path(f"/proc/{path.stem}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            alive = False
        if alive:
            state = json.loads(path.read_text())
            if state.get("uuid", first) == uuid:
                found[int(path.stem)] = state
    return found


def still_there() -> None:
    if "lost_after" in faults() and readings > faults()["lost_after"]:
        raise NVMLError_GpuIsLost("GPU is lost")


def state_of(handle: dict[str, Any]) -> dict[str, Any]:
    working = on_device(handle["uuid"])
    here = {**(BUSY if working else IDLE), "power_limit_w": handle.get("limit_mw", 0) / 1000}
    for state in working.values():
        here |= state
    return here


def value(handle: dict[str, Any], name: str) -> Any:
    still_there()
    if name in faults().get("not_supported", []):
        raise NVMLError_NotSupported("Not Supported")
    # A GPU in MIG mode does not say how busy it is, nor does a slice.
    if name == "utilization" and ("mig" in handle or handle["uuid"].startswith("MIG-")):
        raise NVMLError_NotSupported("Not Supported")
    return state_of(handle)[name]


def nvmlInit() -> None:  # noqa: N802
    if "FAKE_NVML" not in os.environ:
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(json.loads(os.environ["FAKE_NVML"]))


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, Any]:  # noqa: N802
    device: dict[str, Any] = json.loads(os.environ["FAKE_NVML"])[index]
    return device


def nvmlDeviceGetUUID(handle: dict[str, str]) -> str:  # noqa: N802
    return handle["uuid"]


def nvmlDeviceGetName(handle: dict[str, str]) -> bytes:  # noqa: N802
    return handle["name"].encode()


def nvmlDeviceGetMemoryInfo(handle: dict[str, Any]) -> SimpleNamespace:  # noqa: N802
    still_there()
    taken = sum(state.get("memory_bytes", 0) for state in on_device(handle["uuid"]).values())
    return SimpleNamespace(used=handle["used"] + taken, total=2**37)


def nvmlDeviceGetComputeRunningProcesses(handle: dict[str, Any]) -> list[SimpleNamespace]:  # noqa: N802
    still_there()
    working = [pid for pid, state in on_device(handle["uuid"]).items() if state.get("memory_bytes", 0)]
    return [SimpleNamespace(pid=pid) for pid in [*handle["pids"], *working]]


def nvmlDeviceGetClockInfo(handle: dict[str, Any], kind: int) -> int:  # noqa: N802
    global readings
    if kind == NVML_CLOCK_SM:
        readings += 1
        time.sleep(faults().get("slow_s", 0))
        fail = faults().get("fail")
        if fail and fail["after"] < readings <= fail["after"] + fail["times"]:
            raise NVMLError("Unknown Error")
    return int(value(handle, "sm_clock_mhz" if kind == NVML_CLOCK_SM else "mem_clock_mhz"))


def nvmlDeviceGetTotalEnergyConsumption(handle: dict[str, Any]) -> int:  # noqa: N802
    state = state_of(handle)
    still_there()
    if "energy_j" in faults().get("not_supported", []):
        raise NVMLError_NotSupported("Not Supported")
    period, now = faults().get("energy_period_s", 0.02), time.monotonic()
    counter = counters.setdefault(handle["uuid"], {"joules": 9000.0, "tick": now // period})
    counter["joules"] += state["power_w"] * state.get("energy_scale", 1) * (now // period - counter["tick"]) * period
    counter["tick"] = now // period
    return int(counter["joules"] % state.get("energy_wraps_j", float("inf")) * 1000)


def nvmlDeviceGetFieldValues(handle: dict[str, Any], fields: list[int]) -> list[SimpleNamespace]:  # noqa: N802
    if faults().get("no_fields"):
        raise NVMLError_FunctionNotFound("Function Not Found")
    return [field_value(handle, field) for field in fields]


def field_value(handle: dict[str, Any], field: int) -> SimpleNamespace:
    """One field as NVML answers it: a status of its own, and a union."""
    if field == NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION:
        try:
            if "energy_field" in faults().get("not_supported", []):
                raise NVMLError_NotSupported("Not Supported")
            millijoules = nvmlDeviceGetTotalEnergyConsumption(handle)
        except NVMLError_NotSupported:
            return SimpleNamespace(nvmlReturn=NOT_SUPPORTED, valueType=UNSIGNED_LONG_LONG, value=None)
        value_of = SimpleNamespace(ullVal=millijoules)
        return SimpleNamespace(nvmlReturn=0, valueType=UNSIGNED_LONG_LONG, value=value_of)
    name = {NVML_FI_DEV_POWER_AVERAGE: "power_average", NVML_FI_DEV_POWER_INSTANT: "power_instant"}[field]
    status = NOT_SUPPORTED if name in faults().get("not_supported", []) else 0
    milliwatts = SimpleNamespace(uiVal=int(value(handle, "power_w") * 1000))
    return SimpleNamespace(nvmlReturn=status, valueType=UNSIGNED_INT, value=milliwatts)


def nvmlDeviceGetEnforcedPowerLimit(handle: dict[str, Any]) -> int:  # noqa: N802
    if "limit_mw" not in handle:
        raise NVMLError_NotSupported("Not Supported")
    return int(value(handle, "power_limit_w") * 1000)


def nvmlDeviceGetMigMode(handle: dict[str, Any]) -> list[int]:  # noqa: N802
    if "mig" not in handle:
        raise NVMLError_NotSupported("Not Supported")
    return [NVML_DEVICE_MIG_ENABLE] * 2


def nvmlDeviceGetMaxMigDeviceCount(handle: dict[str, Any]) -> int:  # noqa: N802
    return 7


def nvmlDeviceGetMigDeviceHandleByIndex(handle: dict[str, Any], index: int) -> dict[str, Any]:  # noqa: N802
    # As with real ones, the places are not filled from the first.
    if not 1 <= index <= len(handle["mig"]):
        raise NVMLError_NotFound("Not Found")
    return {"name": "Fake slice", **handle["mig"][index - 1]}


def nvmlDeviceGetHandleByUUID(uuid: str) -> dict[str, Any]:  # noqa: N802
    for device in json.loads(os.environ["FAKE_NVML"]):
        for one in (device, *device.get("mig", [])):
            if one["uuid"] == uuid:
                return {"name": "Fake slice", **one}
    raise NVMLError_NotFound("Not Found")


def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
    for device in json.loads(os.environ["FAKE_NVML"]):
        if handle["uuid"] in [one["uuid"] for one in device.get("mig", [])]:
            return device  # type: ignore[no-any-return]
    raise NVMLError_InvalidArgument("Invalid Argument")


def nvmlDeviceGetPowerUsage(handle: dict[str, Any]) -> int:  # noqa: N802
    return int(value(handle, "power_w") * 1000)


def nvmlDeviceGetTemperature(handle: dict[str, Any], sensor: int) -> int:  # noqa: N802
    assert sensor == NVML_TEMPERATURE_GPU
    return int(value(handle, "temperature_c"))


def nvmlDeviceGetUtilizationRates(handle: dict[str, Any]) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(gpu=value(handle, "utilization"), memory=0)


def nvmlDeviceGetCurrentClocksEventReasons(handle: dict[str, Any]) -> int:  # noqa: N802
    if faults().get("old_driver"):
        raise NVMLError_FunctionNotFound("Function Not Found")
    return nvmlDeviceGetCurrentClocksThrottleReasons(handle)


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: dict[str, Any]) -> int:  # noqa: N802
    return sum(REASONS[name] for name in value(handle, "reasons"))


def nvmlDeviceGetPowerManagementLimit(handle: dict[str, int]) -> int:  # noqa: N802
    if "limit_mw" not in handle:
        raise NVMLError_NotSupported
    return handle["limit_mw"]


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return "999.1"
