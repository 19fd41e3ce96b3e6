"""Samples of GPUs: `telemetry.parquet` and back, and what they say about one measured window.

One row a sample of one GPU. `t_s` is on the monotonic clock of the requests; a field that a device does not have is
null in every row. Parquet's library is imported only where a file is written or read.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from abharness import energy
from abharness.atomic import replacing
from abharness.errors import RecordError, first_line
from abharness.windows import GpuWindow, Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at one GPU; None where the device has no such reading.

    Attributes:
        sm_clock_mhz: SM clock now, MHz.
        mem_clock_mhz: Memory clock now, MHz.
        power_w: Power draw, watts; `Sampling.power_kind` says whether it is of this instant or an average.
        temperature_c: Core temperature, degrees Celsius.
        utilization: Share of the driver's last period (1/6 s to 1 s) in which a kernel ran, 0 to 1.
        memory_used_bytes: Device memory in use, by anybody.
        reasons: Why the clocks are what they are (NVML's clocks event reasons, by name); empty when nothing limits.
        energy_j: The energy counter: joules since the driver was loaded. It moves in steps (`Sampling.energy_period_s`).
        power_limit_w: The power limit in force, watts: the lowest of all that are set.
    """

    sm_clock_mhz: float | None
    mem_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None
    utilization: float | None
    memory_used_bytes: int | None
    reasons: tuple[str, ...] | None
    energy_j: float | None
    power_limit_w: float | None


LARGEST_NUMBER = 1e15
"""Of any unit in a sample; what is larger is damage."""

LATER_FIELDS = ("energy_j", "power_limit_w")
"""Columns that files of earlier versions lack: unknown in their samples."""


@dataclass(frozen=True, slots=True)
class Sample(Reading):
    """A reading with its moment (monotonic seconds, when the reading began) and its GPU (NVML UUID)."""

    t_s: float
    uuid: str


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples as Parquet, whole or not at all.

    Raises:
        OSError: The file cannot be written; an existing one is untouched.
    """
    import pyarrow
    import pyarrow.parquet

    columns = {name: [getattr(sample, name) for sample in samples] for name in _schema().names}
    with replacing(path) as out:
        pyarrow.parquet.write_table(pyarrow.table(columns, schema=_schema()), out, compression="zstd")


def _schema() -> Any:
    import pyarrow

    number, whole = pyarrow.float64(), pyarrow.int64()
    types = {"t_s": number, "uuid": pyarrow.string(), "memory_used_bytes": whole}
    types["reasons"] = pyarrow.list_(pyarrow.string())
    names = ["t_s", "uuid", *(field.name for field in fields(Reading))]
    return pyarrow.schema([(name, types.get(name, number)) for name in names])


def read_samples(path: Path) -> list[Sample]:
    """Read what `write_samples` wrote.

    Raises:
        RecordError: It cannot be read, or lacks a column.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
        for name in LATER_FIELDS:
            if name not in table.schema.names:
                table = table.append_column(name, pyarrow.nulls(table.num_rows, pyarrow.float64()))
        table = table.select(_schema().names).cast(_schema())
        table.validate(full=True)
        rows: list[dict[str, Any]] = table.to_pylist()
        for row in rows:
            if row["t_s"] is None or row["uuid"] is None or None in (row["reasons"] or ()):
                raise ValueError("a sample without its moment, its GPU or the name of a reason")
            if any(isinstance(value, float) and not abs(value) <= LARGEST_NUMBER for value in row.values()):
                raise ValueError("a number out of range")
        return [Sample(**{**row, "reasons": None if row["reasons"] is None else tuple(row["reasons"])}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, pyarrow.ArrowException) as error:
        raise RecordError(f"{path} cannot be read: {first_line(error)}") from error


def by_gpu(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples of each GPU, in order of time."""
    found: dict[str, list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.t_s):
        found.setdefault(sample.uuid, []).append(sample)
    return found


def summarise(
    samples: Mapping[str, Sequence[Sample]],
    sampling: Sampling,
    started_s: float,
    ended_s: float,
    errors: Mapping[str, Sequence[str]],
) -> list[GpuWindow]:
    """What each GPU did in a window; only samples inside it count, but for its energy those around its ends.

    Args:
        samples: By GPU, in order of time; a GPU without a sample has an empty list.
        sampling: How they were taken.
        started_s: Start of the window, monotonic seconds.
        ended_s: Its end.
        errors: By GPU, what NVML said in this window instead of a sample.
    """
    expected = max(1, math.floor((ended_s - started_s) / sampling.interval_s))
    windows = []
    for uuid, ordered in samples.items():
        first = bisect_left(ordered, started_s, key=lambda sample: sample.t_s)
        inside = ordered[first : bisect_right(ordered, ended_s, key=lambda sample: sample.t_s)]
        reasons = [one.reasons for one in inside if one.reasons is not None]
        counts = Counter(reason for one in reasons for reason in one)
        memory = [one.memory_used_bytes for one in inside if one.memory_used_bytes is not None]
        sm_clocks, busy = _known(inside, "sm_clock_mhz"), _known(inside, "utilization")
        powers, limits = _known(inside, "power_w"), _known(inside, "power_limit_w")
        joules = _energy(uuid, ordered, sampling, started_s, ended_s)
        changed = len(set(limits)) > 1
        windows.append(
            GpuWindow(
                uuid=uuid,
                samples=len(inside),
                expected_samples=expected,
                coverage=len(inside) / expected,
                sm_clock_mhz=statistics.median(sm_clocks) if sm_clocks else None,
                sm_clock_mhz_min=min(sm_clocks, default=None),
                mem_clock_mhz=_median(inside, "mem_clock_mhz"),
                power_w=statistics.median(powers) if powers else None,
                power_mean_w=statistics.fmean(powers) if powers else None,
                power_kind=sampling.power_kind.get(uuid),
                power_limit_w=statistics.median(limits) if limits else None,
                power_limit_w_min=min(limits) if changed else None,
                power_limit_w_max=max(limits) if changed else None,
                power_limit_changed=changed,
                energy_j=joules.energy_j,
                energy_integral_j=joules.integral_j,
                energy_source=joules.source,
                energy_absent=joules.absent,
                idle_power_w=sampling.idle_power_w.get(uuid),
                temperature_c_max=max(_known(inside, "temperature_c"), default=None),
                utilization=statistics.median(busy) if busy else None,
                utilization_max=max(busy, default=None),
                memory_used_bytes_max=max(memory, default=None),
                memory_used_bytes_before=sampling.memory_before_bytes.get(uuid),
                reasons={name: count / len(reasons) for name, count in sorted(counts.items())} if reasons else None,
                missing=sampling.missing.get(uuid, {}),
                errors=list(errors.get(uuid, ())),
            )
        )
    return windows


def _energy(
    uuid: str, ordered: Sequence[Sample], sampling: Sampling, started_s: float, ended_s: float
) -> energy.Energy:
    missing = sampling.missing.get(uuid, {})
    conditions = energy.Conditions(
        interval_s=sampling.interval_s,
        period_s=sampling.energy_period_s.get(uuid),
        power_kind=sampling.power_kind.get(uuid, "unspecified"),
        no_counter=missing.get("energy_j"),
        no_power=missing.get("power_w"),
    )
    counter = [(sample.t_s, sample.energy_j) for sample in ordered if sample.energy_j is not None]
    power = [(sample.t_s, sample.power_w) for sample in ordered if sample.power_w is not None]
    return energy.of_window(counter, power, started_s, ended_s, conditions)


def _known(samples: Sequence[Sample], name: str) -> list[float]:
    return [value for sample in samples if (value := getattr(sample, name)) is not None]


def _median(samples: Sequence[Sample], name: str) -> float | None:
    known = _known(samples, name)
    return statistics.median(known) if known else None
