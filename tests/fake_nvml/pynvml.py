"""A stand-in for the NVML bindings: the devices are what FAKE_NVML says (JSON: list of {uuid, name, used, pids})."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):  # noqa: N801
    pass


def nvmlInit() -> None:  # noqa: N802
    if "FAKE_NVML" not in os.environ:
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(json.loads(os.environ["FAKE_NVML"]))


def nvmlDeviceGetHandleByIndex(index: int) -> dict[str, object]:  # noqa: N802
    device: dict[str, object] = json.loads(os.environ["FAKE_NVML"])[index]
    return device


def nvmlDeviceGetUUID(handle: dict[str, str]) -> str:  # noqa: N802
    return handle["uuid"]


def nvmlDeviceGetName(handle: dict[str, str]) -> bytes:  # noqa: N802
    return handle["name"].encode()


def nvmlDeviceGetMemoryInfo(handle: dict[str, int]) -> SimpleNamespace:  # noqa: N802
    return SimpleNamespace(used=handle["used"], total=2**37)


def nvmlDeviceGetComputeRunningProcesses(handle: dict[str, list[int]]) -> list[SimpleNamespace]:  # noqa: N802
    return [SimpleNamespace(pid=pid) for pid in handle["pids"]]


def nvmlDeviceGetPowerManagementLimit(handle: dict[str, int]) -> int:  # noqa: N802
    if "limit_mw" not in handle:
        raise NVMLError_NotSupported
    return handle["limit_mw"]


def nvmlSystemGetDriverVersion() -> str:  # noqa: N802
    return "999.1"
