"""Which GPUs a launch can use, what holds their memory and what they do now: NVML in, UUIDs, pids and readings out.

NVML counts devices in PCI order, CUDA by default fastest first: an index of one is not an index of the other. So a
device is named by its UUID, and an index in CUDA_VISIBLE_DEVICES is accepted only where it cannot be misread.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from abharness.errors import GpuError, GpuLost, PreflightError
from abharness.samples import Reading
from abharness.windows import PowerKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

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


FIELD_VALUE = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""NVML's type of a field value (nvmlValueType_t) -> the member of the union that holds it."""

FIELD_LACKING = (2, 3, 4, 6, 13)
"""Statuses of a field that the device or the driver does not have: invalid argument (a field the driver does not know),
not supported, no permission, not found, function not found (nvmlReturn_t). Any other is a failed reading."""


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

    def energy_j(self, uuid: str) -> float | None:
        """The energy counter alone, joules since the driver was loaded; None where the device has none.

        Raises:
            GpuError: The device does not answer; `GpuLost` when it never will.
        """
        ...

    def power_kinds(self) -> dict[str, PowerKind]:
        """By device that was read, what its power reading is."""
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

    def energy_j(self, uuid: str) -> float | None:
        """There is no such device.

        Raises:
            KeyError: Always.
        """
        raise KeyError(uuid)

    def power_kinds(self) -> dict[str, PowerKind]:
        """There is no device."""
        return {}

    def missing(self) -> dict[str, dict[str, str]]:
        """There is no device."""
        return {}

    def describe(self) -> dict[str, Any]:
        """The reason."""
        return {"absent": self.reason}


@dataclass(frozen=True, slots=True)
class Device:
    """One usable device.

    Attributes:
        handle: NVML's handle of it: memory and processes are asked of this one.
        board: The handle of the whole GPU: clocks, temperature, power and their limits are asked of this one. The same
            as `handle` but for a MIG slice.
        parent: UUID of the GPU that this is a MIG slice of; None for a whole GPU.
    """

    handle: Any
    board: Any
    parent: str | None = None


class NvmlGpu:
    """NVIDIA devices through NVML (module `pynvml` of the distribution nvidia-ml-py)."""

    def __init__(self, nvml: Any, devices: Mapping[str, Device]) -> None:
        self._nvml = nvml
        self._devices = dict(devices)
        self._power_kinds: dict[str, PowerKind] = {}
        self._apart: set[str] = set()
        self._missing: dict[str, dict[str, str]] = {}
        for uuid, device in self._devices.items():
            if device.parent is not None:
                reason = f"GPU {device.parent} is shared by MIG slices: its power is not this slice's alone"
                self._missing[uuid] = {"power_w": reason, "energy_j": reason}

    def uuids(self) -> list[str]:
        """UUIDs of the usable devices, in the order CUDA sees them."""
        return list(self._devices)

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
        rates = self._field(uuid, "utilization", nvml.nvmlDeviceGetUtilizationRates, of_board=False)
        reasons = self._field(uuid, "reasons", self._reasons)
        memory = self._field(uuid, "memory_used_bytes", nvml.nvmlDeviceGetMemoryInfo, of_board=False)
        limit_mw = self._field(uuid, "power_limit_w", nvml.nvmlDeviceGetEnforcedPowerLimit)
        power_w, energy_j = self._power_and_energy(uuid)
        return Reading(
            sm_clock_mhz=self._field(uuid, "sm_clock_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
            mem_clock_mhz=self._field(uuid, "mem_clock_mhz", nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
            power_w=power_w,
            temperature_c=self._field(uuid, "temperature_c", nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
            utilization=None if rates is None else rates.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            reasons=None if reasons is None else self._names(reasons),
            energy_j=energy_j,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
        )

    def energy_j(self, uuid: str) -> float | None:
        """The energy counter, joules since the driver was loaded; None where the device has none.

        Raises:
            GpuError: The device does not answer; `GpuLost` when it never will.
        """
        energy_mj = self._field(uuid, "energy_j", self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if energy_mj is None else energy_mj / 1000

    def _power_and_energy(self, uuid: str) -> tuple[float | None, float | None]:
        """Watts and joules, in one question where the device has both as fields: on an H200 each takes it 3.5 ms."""
        nvml = self._nvml
        if self._power_kinds.get(uuid) == "instant" and uuid not in self._apart:
            fields = [nvml.NVML_FI_DEV_POWER_INSTANT, nvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION]
            try:
                values = nvml.nvmlDeviceGetFieldValues(self._devices[uuid].board, fields)
            except nvml.NVMLError as error:
                raise self._error(uuid, error) from error
            if not any(value.nvmlReturn for value in values):
                power_mw, energy_mj = map(self._decoded, fields, values)
                return power_mw / 1000, energy_mj / 1000
            if values[1].nvmlReturn in FIELD_LACKING:
                self._apart.add(uuid)
        return self._field(uuid, "power_w", self._power_w, uuid), self.energy_j(uuid)

    def power_kinds(self) -> dict[str, PowerKind]:
        """By device that was read, what its power reading is; decided at its first reading and kept."""
        return dict(self._power_kinds)

    def _power_w(self, handle: Any, uuid: str) -> float:
        """Power now, watts: the instant field where the device has it, else what `nvidia-smi` shows as power draw.

        The latter is an average over a second on GA100 and on architectures from Ada on, and instant on others (NVML's
        documentation of nvmlDeviceGetPowerUsage); a device with a field for its average and none for the instant shows
        the average.
        """
        nvml = self._nvml
        kind = self._power_kinds.get(uuid)
        if kind in (None, "instant"):
            instant_mw = self._field_value(handle, nvml.NVML_FI_DEV_POWER_INSTANT)
            if instant_mw is not None:
                self._power_kinds[uuid] = "instant"
                return instant_mw / 1000
            if kind is not None:
                raise GpuError(f"NVML on GPU {uuid}: its instant power cannot be read any more")
            average_mw = self._field_value(handle, nvml.NVML_FI_DEV_POWER_AVERAGE)
            self._power_kinds[uuid] = "unspecified" if average_mw is None else "average"
        return float(nvml.nvmlDeviceGetPowerUsage(handle)) / 1000

    def _field_value(self, handle: Any, field: int) -> float | None:
        """A value by its field number; None where the device or the driver has no such field."""
        try:
            value = self._nvml.nvmlDeviceGetFieldValues(handle, [field])[0]
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_FunctionNotFound):
            return None
        if value.nvmlReturn in FIELD_LACKING:
            return None
        if value.nvmlReturn:
            raise self._nvml.NVMLError(value.nvmlReturn)
        return self._decoded(field, value)

    @staticmethod
    def _decoded(field: int, value: Any) -> float:
        if value.valueType not in FIELD_VALUE:
            raise GpuError(f"NVML: field {field} is of type {value.valueType}, which is not known here")
        return float(getattr(value.value, FIELD_VALUE[value.valueType]))

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

    def _field(self, uuid: str, name: str, call: Callable[..., Any], *arguments: Any, of_board: bool = True) -> Any:
        """One reading, or None where the device has no such thing; asked once only in that case."""
        nvml = self._nvml
        if name in self._missing.get(uuid, {}):
            return None
        device = self._devices[uuid]
        try:
            return call(device.board if of_board else device.handle, *arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_FunctionNotFound) as error:
            self._missing.setdefault(uuid, {})[name] = str(error)
            return None
        except nvml.NVMLError as error:
            raise self._error(uuid, error) from error

    def _ask(self, uuid: str, call: Callable[[Any], Any]) -> Any:
        try:
            return call(self._devices[uuid].handle)
        except self._nvml.NVMLError as error:
            raise self._error(uuid, error) from error

    def _error(self, uuid: str, error: Exception) -> GpuError:
        if isinstance(error, self._nvml.NVMLError_GpuIsLost):
            return GpuLost(f"the driver has lost GPU {uuid}: {error}", hint=GPU_LOST_HINT)
        return GpuError(f"NVML on GPU {uuid}: {error}", hint="see whether nvidia-smi answers")

    def describe(self) -> dict[str, Any]:
        """Driver version and the devices."""
        devices = []
        for uuid, device in self._devices.items():
            try:
                limit = self._nvml.nvmlDeviceGetPowerManagementLimit(device.board) / 1000
            except self._nvml.NVMLError_NotSupported:
                limit = None
            devices.append(
                {
                    "uuid": uuid,
                    "name": _text(self._nvml.nvmlDeviceGetName(device.handle)),
                    "memory_bytes": int(self._nvml.nvmlDeviceGetMemoryInfo(device.handle).total),
                    "power_limit_w": limit,
                    **({} if device.parent is None else {"mig_slice_of": device.parent}),
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
        slices = {uuid: found for uuid, handle in by_uuid.items() if (found := _slices(pynvml, handle)) is not None}
    except pynvml.NVMLError as error:
        return AbsentGpu(f"NVML: {error}")
    if not by_uuid:
        return AbsentGpu("NVML sees no device")
    chosen = _visible(list(by_uuid), slices, environ)
    if not chosen:
        return AbsentGpu(f"CUDA_VISIBLE_DEVICES={environ['CUDA_VISIBLE_DEVICES']!r} hides every device")
    try:
        return NvmlGpu(pynvml, {uuid: _device(pynvml, uuid, by_uuid) for uuid in chosen})
    except pynvml.NVMLError as error:
        return AbsentGpu(f"NVML: {error}")


def _slices(nvml: Any, handle: Any) -> list[str] | None:
    """UUIDs of a GPU's MIG slices; None where its MIG mode is off or unknown to it."""
    try:
        if nvml.nvmlDeviceGetMigMode(handle)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return None
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return None

    def each() -> Iterator[str]:
        for index in range(count):
            try:
                yield _text(nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
            except nvml.NVMLError_NotFound:
                continue  # slices need not fill the lowest places

    return list(each())


def _device(nvml: Any, uuid: str, by_uuid: Mapping[str, Any]) -> Device:
    if uuid in by_uuid:
        return Device(by_uuid[uuid], by_uuid[uuid])
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    board = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return Device(handle, board, _text(nvml.nvmlDeviceGetUUID(board)))


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


def _visible(uuids: Sequence[str], slices: Mapping[str, Sequence[str]], environ: Mapping[str, str]) -> list[str]:
    """UUIDs of the devices that CUDA sees, in its order.

    Args:
        uuids: The GPUs, in NVML's order.
        slices: Of each GPU in MIG mode, its slices.
        environ: The server's environment.

    Raises:
        PreflightError: It cannot be said without doubt.
    """
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    chosen = list(uuids) if listed is None else _listed(listed, uuids, slices, environ)
    shown = "CUDA_VISIBLE_DEVICES is not set" if listed is None else f"CUDA_VISIBLE_DEVICES={listed!r}"
    for uuid in chosen:
        if uuid in slices:
            named = ", ".join(slices[uuid]) or "none yet"
            raise PreflightError(
                f"{shown}: GPU {uuid} is in MIG mode, and a server runs on one of its slices: {named}",
                hint=f"name the slice: CUDA_VISIBLE_DEVICES={slices[uuid][0]}"
                if slices[uuid]
                else "make a slice (nvidia-smi mig -cgi), or switch MIG mode off (nvidia-smi -mig 0)",
            )
    if len(chosen) > 1 and any(uuid not in uuids for uuid in chosen):
        raise PreflightError(
            f"{shown}: CUDA uses one MIG slice and nothing beside it",
            hint=f"name one: CUDA_VISIBLE_DEVICES={next(uuid for uuid in chosen if uuid not in uuids)}",
        )
    return chosen


def _listed(
    listed: str, uuids: Sequence[str], slices: Mapping[str, Sequence[str]], environ: Mapping[str, str]
) -> list[str]:
    chosen: list[str] = []
    named = [*uuids, *(uuid for found in slices.values() for uuid in found)]
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
            matches = list(uuids[int(token) : int(token) + 1])
        else:
            matches = [uuid for uuid in named if uuid.startswith(token)]
        if len(matches) != 1:
            raise PreflightError(
                f"CUDA_VISIBLE_DEVICES={listed!r}: {token!r} names {len(matches)} of the GPUs {', '.join(named)}",
                hint="use a whole UUID as `nvidia-smi -L` prints it",
            )
        if matches[0] not in chosen:
            chosen.append(matches[0])
    return chosen
