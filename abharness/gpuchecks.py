"""What the GPUs did while cells were measured -> findings: gaps, throttling, clocks that differ between the variants.

Only a GPU that works counts: one that idles clocks as it likes. A reading that a device does not have is unknown,
which is neither 0 nor equal; `unknown_of_gpus` names what could therefore not be checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from abharness.record import CellRecord, Finding, Variant
from abharness.windows import GpuWindow

COVERAGE_LIMIT = 0.90
"""Share of the expected samples below which a window's clocks are not known; one sample of grace, since a window need
not begin on one."""

THROTTLE_REASONS = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
"""Reasons that lower the clocks for heat or for the power supply: the machine's state, not the work. `POWER_CAP`
is not among them: a busy GPU may well run at it, and its clocks say what that cost."""

POWER_CAP = "sw_power_cap"
"""The reason of clocks held down for the power limit."""

THROTTLE_LIMIT = 0.05
"""Share of a window's samples with such a reason above which the cell is not used."""

SM_CLOCK_TOLERANCE = 0.03
"""Relative difference of the variants' SM clocks: four steps of 15 MHz near 1.9 GHz, what equal runs may differ by."""

MEM_CLOCK_TOLERANCE = 0.01
"""The same for the memory clock, which has a few fixed levels: any real difference is far larger."""

POWER_CAP_TOLERANCE = 0.25
"""Difference of the share of samples at the power cap beyond which it is told. It does not invalidate: an H200 at clocks
within 1% was capped in 14% of one variant's samples and in 58% of the other's, which kept the GPU busier."""

MEMORY_TAKEN_BYTES = 64 * 2**20
"""Growth of a device's used memory under which no server is on it: an empty CUDA context alone takes more."""

UTILIZATION_PERIOD_S = 1.0
"""Longest period the driver averages its utilisation over: a shorter window may show 0 for work that has begun."""

CHECKED_FIELDS = ("sm_clock_mhz", "mem_clock_mhz", "reasons")
"""What the checks rest on; missing readings of other fields take nothing away from them."""


def check_gpus(cell: CellRecord) -> list[Finding]:
    """Check one cell's windows: `telemetry_gap` and `throttled`, none of them fatal."""
    if cell.gpus is None:
        return []
    gap = _check_gap(cell, cell.gpus)
    working = [gpu for gpu in cell.gpus if idle(cell, gpu) is None]
    if gap is None and not working and cell.gpus:
        told = "; ".join(f"{gpu.uuid} {idle(cell, gpu)}" for gpu in cell.gpus)
        gap = Finding(
            code="telemetry_gap",
            message=f"the sampled GPU is not the one that works: {told}",
            hint="name the server's GPU by UUID in CUDA_VISIBLE_DEVICES, in the shell or in server.env",
        )
    return [finding for finding in (gap, _check_throttled(working)) if finding is not None]


def unknown_of_gpus(cell: CellRecord) -> list[str]:
    """What of the clocks could not be checked in a cell, by name and reason."""
    if cell.gpus is None:
        return [] if cell.gpus_absent else ["the GPUs' clocks (not on record)"]
    found = []
    for gpu in cell.gpus:
        if idle(cell, gpu) is None and gpu.samples:
            unknown = [
                f"{name} ({gpu.missing.get(name, 'no reading')})"
                for name in CHECKED_FIELDS
                if getattr(gpu, name) is None
            ]
            if gpu.memory_used_bytes_max is None and gpu.utilization_max is None:
                unknown.append("whether it works (no reading of memory and utilisation)")
            found += [f"{', '.join(unknown)} of {gpu.uuid}"] if unknown else []
    return found


def _check_gap(cell: CellRecord, gpus: Sequence[GpuWindow]) -> Finding | None:
    length = cell.ended_s - cell.started_s
    short = [gpu for gpu in gpus if not gpu.samples or gpu.samples < COVERAGE_LIMIT * gpu.expected_samples - 1]
    if not gpus:
        return Finding(
            code="telemetry_gap",
            message=f"the GPUs' clocks are not known: {cell.gpus_absent or 'there are no samples'}",
            hint="rerun this launch, or bring its telemetry.parquet back",
        )
    if not short:
        return None
    errors = dict.fromkeys(text for gpu in short for text in gpu.errors)
    told = ", ".join(f"{gpu.uuid} {gpu.samples} of {gpu.expected_samples}" for gpu in short)
    message = f"{told} samples in a window of {length:.2f} s (limit {COVERAGE_LIMIT:.0%})"
    if errors:
        return Finding(
            code="telemetry_gap",
            message=f"{message}: {'; '.join(list(errors)[:3])}",
            hint="see whether nvidia-smi answers, and the kernel's log for Xid messages",
        )
    return Finding(
        code="telemetry_gap",
        message=message,
        hint="let the cell take longer (num_prompts, output_len), or sample it at another telemetry.interval_s: shorter "
        "for a short cell, longer where NVML is too slow for it",
    )


def idle(cell: CellRecord, gpu: GpuWindow) -> str | None:
    """Why a GPU did not do this cell's work; None where it did, or where nothing tells."""
    used, before = gpu.memory_used_bytes_max, gpu.memory_used_bytes_before
    if used is not None and before is not None and used < before + MEMORY_TAKEN_BYTES:
        return f"used {used / 2**20:.0f} MiB of memory, {before / 2**20:.0f} MiB before the server was started"
    if gpu.utilization_max == 0 and cell.ended_s - cell.started_s > UTILIZATION_PERIOD_S:
        return f"was at 0% utilisation in all {gpu.samples} samples"
    return None


def _check_throttled(gpus: Sequence[GpuWindow]) -> Finding | None:
    told = []
    for gpu in gpus:
        shares = {name: (gpu.reasons or {}).get(name, 0.0) for name in THROTTLE_REASONS}
        over = [f"{name} in {share:.0%}" for name, share in shares.items() if share > THROTTLE_LIMIT]
        if over:
            told.append(f"{gpu.uuid} {', '.join(over)}")
    if not told:
        return None
    return Finding(
        code="throttled",
        message=f"the clocks were lowered: {'; '.join(told)} of the samples (limit {THROTTLE_LIMIT:.0%})",
        hint="cool the machine, check its power supply, or lock the clocks below what it can hold (nvidia-smi -lgc)",
    )


Launches = Mapping[Variant, Sequence[Sequence[CellRecord]]]
"""By variant, of each launch the records of one cell: its repeats."""


def check_clocks(cells: Launches) -> Finding | None:
    """Compare the variants' clocks in one cell: `clocks_differ`.

    A launch's value is the median over its repeats of the window's median, a variant's the median over its launches;
    each GPU is compared with itself.
    """
    told = [
        f"{name} of {uuid}: {', '.join(f'{variant} {value:.0f} MHz' for variant, value in medians.items())} "
        f"(tolerance {tolerance:.0%})"
        for uuid, name, tolerance, medians in _differing_clocks(cells)
    ]
    if not told:
        return None
    return Finding(
        code="clocks_differ",
        message="; ".join(told),
        hint="lock the clocks where both variants hold them (nvidia-smi -lgc and -lmc), or raise the power limit",
    )


def higher_clocked(cells: Launches) -> Variant | None:
    """The variant whose clocks are the higher ones wherever those of one cell differ.

    Nothing runs slower for a higher clock: where this variant is the slower one all the same, the clocks are not why.

    Returns:
        None where no clocks differ, or each variant has the higher one somewhere.
    """
    leads = {max(medians, key=medians.__getitem__) for _, _, _, medians in _differing_clocks(cells)}
    return leads.pop() if len(leads) == 1 else None


def _differing_clocks(cells: Launches) -> Iterator[tuple[str, str, float, dict[Variant, float]]]:
    """Clocks beyond their tolerance: GPU, name of the clock, tolerance, MHz by variant."""
    for uuid in dict.fromkeys(gpu.uuid for part in cells.values() for launch in part for gpu in _working(launch)):
        for name, field, tolerance in (
            ("SM clock", "sm_clock_mhz", SM_CLOCK_TOLERANCE),
            ("memory clock", "mem_clock_mhz", MEM_CLOCK_TOLERANCE),
        ):
            medians = {variant: _over_launches(part, uuid, field) for variant, part in cells.items()}
            known = {variant: value for variant, value in medians.items() if value is not None}
            if len(known) == len(medians) and max(known.values()) > min(known.values()) * (1 + tolerance):
                yield uuid, name, tolerance, known


def check_power_cap(cells: Launches) -> Finding | None:
    """Compare how often the variants were at the power cap in one cell: `power_capped`, which is advice."""
    told = []
    for uuid in dict.fromkeys(gpu.uuid for part in cells.values() for launch in part for gpu in _working(launch)):
        shares = {variant: _over_launches(part, uuid, POWER_CAP) for variant, part in cells.items()}
        known = [value for value in shares.values() if value is not None]
        if len(known) == len(shares) and max(known) - min(known) > POWER_CAP_TOLERANCE:
            shown = ", ".join(f"{variant} {value:.0%}" for variant, value in shares.items())
            told.append(f"{uuid}: {shown} of the samples (told from a difference of {POWER_CAP_TOLERANCE:.0%})")
    if not told:
        return None
    return Finding(
        code="power_capped",
        message=f"{POWER_CAP}, the power limit, held the variants back unequally: {'; '.join(told)}",
        hint="it may be what the candidate costs: the one that draws more power meets the limit first",
    )


@dataclass(frozen=True, slots=True)
class Condition:
    """What the GPUs did in one cell, side by side: it describes, and decides nothing.

    Attributes:
        name: What, with its unit as shown.
        values: By variant, the median over its launches, in the unit shown; None where it is not known.
    """

    name: str
    values: Mapping[Variant, float | None]


def conditions(cells: Launches) -> tuple[Condition, ...]:
    """SM clock, power and the share of samples at the power cap (where it is not 0 in both) of the GPUs that work."""
    found: list[Condition] = []
    everyone = [gpu for part in cells.values() for launch in part for gpu in _working(launch)]
    uuids = list(dict.fromkeys(gpu.uuid for gpu in everyone))
    for uuid in uuids:
        of = f" of {uuid}" if len(uuids) > 1 else ""
        kinds = sorted({gpu.power_kind for gpu in everyone if gpu.uuid == uuid and gpu.power_kind is not None})
        kind = f" ({'/'.join(kinds)})" if kinds else ""
        for name, field, scale, only_above in (
            (f"SM clock MHz{of}", "sm_clock_mhz", 1, None),
            (f"power W{kind}{of}", "power_mean_w", 1, None),
            (f"{POWER_CAP} % of samples{of}", POWER_CAP, 100, 0.0),
        ):
            values = {variant: _over_launches(part, uuid, field) for variant, part in cells.items()}
            known = [value for value in values.values() if value is not None]
            if known and (only_above is None or max(known) > only_above):
                shown = {variant: None if value is None else value * scale for variant, value in values.items()}
                found.append(Condition(name, shown))
    return tuple(found)


def _working(launch: Sequence[CellRecord]) -> list[GpuWindow]:
    return [gpu for cell in launch for gpu in cell.gpus or [] if gpu.samples and idle(cell, gpu) is None]


def _over_launches(launches: Sequence[Sequence[CellRecord]], uuid: str, field: str) -> float | None:
    values = []
    for launch in launches:
        known = []
        for gpu in _working(launch):
            share = None if gpu.reasons is None else gpu.reasons.get(field, 0.0)
            value = share if field == POWER_CAP else getattr(gpu, field)
            if gpu.uuid == uuid and value is not None:
                known.append(value)
        if known:
            values.append(statistics.median(known))
    return statistics.median(values) if values else None
