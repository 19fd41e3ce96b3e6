"""Which GPUs a launch can use, what holds their memory and what they do now: NVML in, UUIDs, pids and readings out.

NVML counts devices in PCI order, CUDA by default fastest first: an index of one is not an index of the other. So a
device is named by its UUID, and an index in CUDA_VISIBLE_DEVICES is accepted only where it cannot be misread.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any, Protocol

from abharness.errors import GpuError, GpuLost, PreflightError
from abharness.samples import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GPU_LOST_HINT = "look for Xid messages in the kernel's log (dmesg); a reset or a reboot is needed"

REASONS = {
    "gpu_idle": "nvmlClocksEventReasonGpuIdle",
    "applications_clocks_setting": "nvmlClocksEventReasonApplicationsClocksSetting",
    "sw_power_cap": "nvmlClocksEventReasonSwPowerCap",
    "hw_slowdown": "nvmlClocksEventReasonHwSlowdown",
    "sync_boost": "nvmlClocksEventReasonSyncBoost",
    "sw_thermal_slowdown": "nvmlClocksEventReasonSwThermalSlowdown",
    "hw_thermal_slowdown": "nvmlClocksEventReasonHwThermalSlowdown",
    "hw_power_brake_slowdown": "nvmlClocksEventReasonHwPowerBrakeSlowdown",
    "display_clock_setting": "nvmlClocksEventReasonDisplayClockSetting",
}
"""Our name of each clocks event reason -> NVML's constant; a bit without a constant is `bit_N`."""


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

    def read(self, uuid: str) -> Reading:
        """Clocks, power, temperature, utilisation, memory and clocks event reasons now.

        Raises:
            GpuError: The device does not answer; `GpuLost` when it never will.
        """
        ...

    def missing(self) -> dict[str, dict[str, str]]:
        """By device, the fields that `read` found it does not have, each with NVML's reason."""
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

    def read(self, uuid: str) -> Reading:
        """There is no such device.

        Raises:
            KeyError: Always.
        """
        raise KeyError(uuid)

    def missing(self) -> dict[str, dict[str, str]]:
        """There is no device."""
        return {}

    def describe(self) -> dict[str, Any]:
        """The reason."""
        return {"absent": self.reason}


class NvmlGpu:
    """NVIDIA devices through NVML (module `pynvml` of the distribution nvidia-ml-py)."""

    def __init__(self, nvml: Any, handles: Mapping[str, Any]) -> None:
        self._nvml = nvml
        self._handles = dict(handles)
        self._missing: dict[str, dict[str, str]] = {}

    def uuids(self) -> list[str]:
        """UUIDs of the usable devices, in the order CUDA sees them."""
        return list(self._handles)

    def memory_used_bytes(self, uuid: str) -> int:
        """Device memory in use now, by anybody.

        Raises:
            GpuError: The device does not answer; `GpuLost` when it never will.
        """
        return int(self._ask(uuid, self._nvml.nvmlDeviceGetMemoryInfo).used)

    def compute_pids(self, uuid: str) -> list[int]:
        """Processes with a compute context; inside a container the numbers may be those of the host.

        Raises:
            GpuError: The device does not answer; `GpuLost` when it never will.
        """
        return sorted(int(one.pid) for one in self._ask(uuid, self._nvml.nvmlDeviceGetComputeRunningProcesses))

    def read(self, uuid: str) -> Reading:
        """The device now; a field that it does not have is None, and `missing` says why.

        Raises:
            GpuError: The device does not answer; `GpuLost` when it never will.
        """
        nvml = self._nvml
        power_mw = self._field(uuid, "power_w", nvml.nvmlDeviceGetPowerUsage)
        rates = self._field(uuid, "utilization", nvml.nvmlDeviceGetUtilizationRates)
        reasons = self._field(uuid, "reasons", self._reasons)
        memory = self._field(uuid, "memory_used_bytes", nvml.nvmlDeviceGetMemoryInfo)
        return Reading(
            sm_clock_mhz=self._field(uuid, "sm_clock_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            mem_clock_mhz=self._field(uuid, "mem_clock_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=self._field(uuid, "temperature_c", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            reasons=None if reasons is None else self._names(reasons),
        )

    def missing(self) -> dict[str, dict[str, str]]:
        """By device, the fields that it does not have, each with NVML's reason."""
        return {uuid: dict(fields) for uuid, fields in self._missing.items()}

    def _reasons(self, handle: Any) -> int:
        try:
            return int(self._nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
        except self._nvml.NVMLError_FunctionNotFound:
            # Drivers before 535 know the same bits under their older name.
            return int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))

    def _names(self, bits: int) -> tuple[str, ...]:
        names = []
        for name, constant in REASONS.items():
            bit = getattr(self._nvml, constant)
            if bits & bit:
                names.append(name)
                bits &= ~bit
        return (*names, *(f"bit_{number}" for number in range(bits.bit_length()) if bits >> number & 1))

    def _field(self, uuid: str, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """One reading, or None where the device has no such thing; asked once only in that case."""
        nvml = self._nvml
        if name in self._missing.get(uuid, {}):
            return None
        try:
            return call(self._handles[uuid], *arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_FunctionNotFound) as error:
            self._missing.setdefault(uuid, {})[name] = str(error)
            return None
        except nvml.NVMLError as error:
            raise self._error(uuid, error) from error

    def _ask(self, uuid: str, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._handles[uuid])
        except self._nvml.NVMLError as error:
            raise self._error(uuid, error) from error

    def _error(self, uuid: str, error: Exception) -> GpuError:
        if isinstance(error, self._nvml.NVMLError_GpuIsLost):
            return GpuLost(f"the driver has lost GPU {uuid}: {error}", hint=GPU_LOST_HINT)
        return GpuError(f"NVML on GPU {uuid}: {error}", hint="see whether nvidia-smi answers")

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
