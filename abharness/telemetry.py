"""Which GPUs a launch can use and what holds their memory: NVML in, UUIDs, bytes and pids out.

NVML counts devices in PCI order, CUDA by default fastest first: an index of one is not an index of the other. So a
device is named by its UUID, and an index in CUDA_VISIBLE_DEVICES is accepted only where it cannot be misread.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any, Protocol

from abharness.errors import PreflightError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Gpu(Protocol):
    """The GPUs a launch can use; none of them on a host without."""

    def uuids(self) -> list[str]:
        """NVML UUIDs of the usable devices, in the order CUDA sees them."""
        ...

    def memory_used_bytes(self, uuid: str) -> int:
        """Device memory in use now, by anybody."""
        ...

    def compute_pids(self, uuid: str) -> list[int]:
        """Processes with a compute context on the device, as the driver numbers them."""
        ...

    def describe(self) -> dict[str, Any]:
        """Driver version, and of each device its UUID, name, memory and power limit (W, None where not supported)."""
        ...


class AbsentGpu:
    """No GPU can be used.

    Attributes:
        reason: Why not.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def uuids(self) -> list[str]:
        """None."""
        return []

    def memory_used_bytes(self, uuid: str) -> int:
        """There is no such device.

        Raises:
            KeyError: Always.
        """
        raise KeyError(uuid)

    def compute_pids(self, uuid: str) -> list[int]:
        """There is no such device.

        Raises:
            KeyError: Always.
        """
        raise KeyError(uuid)

    def describe(self) -> dict[str, Any]:
        """The reason."""
        return {"absent": self.reason}


class NvmlGpu:
    """NVIDIA devices through NVML (module `pynvml` of the distribution nvidia-ml-py)."""

    def __init__(self, nvml: Any, handles: Mapping[str, Any]) -> None:
        self._nvml = nvml
        self._handles = dict(handles)

    def uuids(self) -> list[str]:
        """UUIDs of the usable devices, in the order CUDA sees them."""
        return list(self._handles)

    def memory_used_bytes(self, uuid: str) -> int:
        """Device memory in use now, by anybody."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handles[uuid]).used)

    def compute_pids(self, uuid: str) -> list[int]:
        """Processes with a compute context; inside a container the numbers may be those of the host."""
        return sorted(int(one.pid) for one in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handles[uuid]))

    def describe(self) -> dict[str, Any]:
        """Driver version and the devices."""
        devices = []
        for uuid, handle in self._handles.items():
            try:
                limit = self._nvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
            except self._nvml.NVMLError_NotSupported:
                limit = None
            devices.append(
                {
                    "uuid": uuid,
                    "name": _text(self._nvml.nvmlDeviceGetName(handle)),
                    "memory_bytes": int(self._nvml.nvmlDeviceGetMemoryInfo(handle).total),
                    "power_limit_w": limit,
                }
            )
        return {"driver_version": _text(self._nvml.nvmlSystemGetDriverVersion()), "devices": devices}


def open_gpu(environ: Mapping[str, str]) -> Gpu:
    """The GPUs that a server with this environment can use.

    Args:
        environ: The server's environment; CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are respected.

    Raises:
        PreflightError: Another distribution shadows the NVML bindings, or the visible devices cannot be named without
            doubt.
    """
    _check_bindings()
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        by_uuid = {_text(pynvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
    except pynvml.NVMLError as error:
        return AbsentGpu(f"NVML: {error}")
    if not by_uuid:
        return AbsentGpu("NVML sees no device")
    chosen = _visible(list(by_uuid), environ)
    if not chosen:
        return AbsentGpu(f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']!r} hides every device")
    return NvmlGpu(pynvml, {uuid: by_uuid[uuid] for uuid in chosen})


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _check_bindings() -> None:
    spec = importlib.util.find_spec("pynvml")
    if spec is None:
        raise PreflightError("the module pynvml is missing", hint="pip install nvidia-ml-py")
    owners = sorted(set(importlib.metadata.packages_distributions().get("pynvml", [])))
    # The official bindings are one file; the older distribution `pynvml` ships a package of that name.
    if spec.submodule_search_locations is None and len(owners) <= 1:
        return
    named = ", ".join(f"{owner} {importlib.metadata.version(owner)}" for owner in owners) or "no distribution"
    raise PreflightError(
        f"the module pynvml ({spec.origin}) is not, or not only, the official NVML bindings: it belongs to {named}, "
        "expected nvidia-ml-py alone",
        hint="pip uninstall -y pynvml nvidia-ml-py && pip install nvidia-ml-py",
    )


def _visible(uuids: list[str], environ: Mapping[str, str]) -> list[str]:
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return uuids
    chosen: list[str] = []
    for token in (part.strip() for part in listed.split(",")):
        if token in ("", "-1", "NoDevFiles"):
            break  # as CUDA does: devices after the first invalid entry are invisible
        if token.isdecimal():
            if len(uuids) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
                raise PreflightError(
                    f"CUDA_VISIBLE_DEVICES={listed!r} is ambiguous: of {len(uuids)} GPUs, since CUDA's default order "
                    "(fastest first) need not be NVML's (PCI)",
                    hint=f"name the GPU by UUID, for example CUDA_VISIBLE_DEVICES={uuids[0]}, "
                    "or set CUDA_DEVICE_ORDER=PCI_BUS_ID",
                )
            matches = uuids[int(token) : int(token) + 1]
        else:
            matches = [uuid for uuid in uuids if uuid.startswith(token)]
        if len(matches) != 1:
            raise PreflightError(
                f"CUDA_VISIBLE_DEVICES={listed!r}: {token!r} names {len(matches)} of the GPUs {', '.join(uuids)}",
                hint="use a whole UUID as `nvidia-smi -L` prints it; MIG slices are not supported",
            )
        if matches[0] not in chosen:
            chosen.append(matches[0])
    return chosen
