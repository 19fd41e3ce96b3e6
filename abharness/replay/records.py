"""What a replay leaves on disk: what was replayed, on which device, how right it is, how long it took, at which clock.

DIR/replay.json       `Replay`, written anew after every segment: what was measured is kept
DIR/calibration.json  `Calibration`: the spins that stand for what a server does between its linear layers
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from abharness.base import Model
from abharness.errors import RecordError
from abharness.storage import read_json
from abharness.windows import GpuWindow

REPLAY_VERSION: Literal[1] = 1
REPLAY_FILE = "replay.json"
CALIBRATION_FILE = "calibration.json"


class Device(Model):
    """What replays.

    Attributes:
        kind: `cuda`, or `cpu`: without graphs, clocks or power.
        name: As the driver says.
        uuid: NVML UUID.
        arch: `sm_90`.
        l2_bytes: Size of the L2 cache.
        torch: Its version.
        driver: Version of the driver.
        power_limit_w: In force when it began, watts.
    """

    kind: Literal["cuda", "cpu"]
    name: str | None = None
    uuid: str | None = None
    arch: str | None = None
    l2_bytes: int | None = None
    torch: str
    driver: str | None = None
    power_limit_w: float | None = None


class CandidateCheck(Model):
    """A candidate at one row count, held against the reference before it is timed.

    Attributes:
        name: As it was named.
        rows: Rows of the step.
        function: What makes its calls.
        options: What that function is given.
        by_shape: What it is given besides, for layers of a shape `NxK`.
        reference: What its results were compared with: a function, `captured results`, or `production`: itself.
        worst_relative_error: The largest over all positions; None where a result is not finite.
        worst_layer: Where that is.
        bit_identical: Whether all results are bit for bit production's; None for production.
        differing: Shapes with a position whose results are not.
        wrong: Why it was not timed, or None.
        wrong_shapes: Shapes with a position that is off by more than the tolerance, or not finite.
        compared: Whether the results of its graph were compared with those of calls alone.
    """

    name: str
    rows: int
    function: str
    options: dict[str, Any] = {}
    by_shape: dict[str, dict[str, Any]] = {}
    reference: str
    worst_relative_error: float | None
    worst_layer: str
    bit_identical: bool | None
    differing: list[str] = []
    wrong: str | None = None
    wrong_shapes: list[str] = []
    compared: bool = False


class Segment(Model):
    """One candidate, replayed for seconds without a pause.

    Attributes:
        candidate: Its name.
        rows: Rows of the step.
        proxy: Whether spins stood for what a server does between the layers.
        scale: By which their lengths were multiplied; None without.
        started_s: When the measured part began, monotonic clock.
        ended_s: When it ended.
        step_s: Median seconds of a step, over batches of replays.
        step_p10_s: Tenth percentile of the same.
        step_p90_s: Ninetieth.
        batches: How many there were.
        replays_a_batch: Replays of each.
        copies: Copies of the layers that follow each other in a replay: a step is one of them.
        gpu: Clocks, power and energy in that time; None where nothing is sampled.
        positions_s: Seconds of each position, under the profiler, in the capture's order; None where they are not known.
        gaps_s: Seconds before each position, likewise; spins are in them.
        kernels: Different sequences of kernels that positions run.
        kernels_of: Of each position, which of these.
        positions_absent: Why `positions_s` is not there.
    """

    candidate: str
    rows: int
    proxy: bool
    scale: float | None = None
    started_s: float
    ended_s: float
    step_s: float
    step_p10_s: float
    step_p90_s: float
    batches: int
    replays_a_batch: int
    copies: int
    gpu: GpuWindow | None = None
    positions_s: list[float] | None = None
    gaps_s: list[float] | None = None
    kernels: list[list[str]] = []
    kernels_of: list[int] = []
    positions_absent: str | None = None


class Replay(Model):
    """One replay of a capture.

    Attributes:
        schema_version: Of this file.
        kind: `run`, `calibrate` or `tune`.
        status: Whether it came to its end.
        capture: Name of the capture.
        model: The model it is of, as the server had it; None where it is of sizes alone.
        made_at: When, ISO 8601.
        abharness: Version.
        device: What replayed.
        env: Variables of the worker that change what kernels do.
        positions: Names of the layers, in order.
        shapes: `NxK` of each.
        calibration: The calibration that the spins are of, or None.
        production: Name of the candidate that others are compared with.
        tolerance: Relative error allowed.
        checks: Every candidate at every row count.
        segments: What was measured, in order.
        notes: What a reader must know.
        error: What ended it early.
    """

    schema_version: Literal[1] = REPLAY_VERSION
    kind: Literal["run", "calibrate", "tune"]
    status: Literal["running", "completed", "failed"]
    capture: str
    model: str | None = None
    made_at: str
    abharness: str
    device: Device
    env: dict[str, str] = {}
    positions: list[str]
    shapes: list[str]
    calibration: str | None = None
    production: str
    tolerance: float
    checks: list[CandidateCheck] = []
    segments: list[Segment] = []
    notes: list[str] = []
    error: str | None = None


Matched = Literal["power", "clock", "neither"]


class Point(Model):
    """A replay with spins of some length.

    Attributes:
        scale: By which the gaps of the server were multiplied.
        power_w: Mean power, watts.
        sm_clock_mhz: Median SM clock.
        step_s: Seconds of a step.
    """

    scale: float
    power_w: float
    sm_clock_mhz: float
    step_s: float


class RowCalibration(Model):
    """The spins for one row count.

    Attributes:
        gaps_s: Seconds before each position in the server, at its clock: what is not a captured layer.
        tpot_s: Seconds from one token to the next in the server, not traced.
        serving_power_w: Mean power in the server under that load.
        serving_clock_mhz: Median SM clock there.
        points: What replays with spins of some lengths drew.
        scale: By which the gaps are multiplied so that power, or the clock where that moves, is the server's.
        matched: What the scale was found by.
        remark: What is to be known of it.
    """

    gaps_s: list[Annotated[float, Field(ge=0)]]
    tpot_s: float
    serving_power_w: float
    serving_clock_mhz: float
    points: list[Point]
    scale: float
    matched: Matched
    remark: str


class Calibration(Model):
    """Spins between the layers, and where they hold.

    Attributes:
        schema_version: Of this file.
        capture: Name of the capture.
        model: The model, as the server had it.
        gpu_name: The card.
        power_limit_w: Its limit.
        positions: Names of the layers, in order.
        serving: The run that it was made from.
        rows: By row count.
    """

    schema_version: Literal[1] = REPLAY_VERSION
    capture: str
    model: str | None
    gpu_name: str | None
    power_limit_w: float | None
    positions: list[str]
    serving: str
    rows: Annotated[dict[int, RowCalibration], Field(min_length=1)]


R = TypeVar("R", Replay, Calibration)


def read_record(path: Any, kind: type[R]) -> R:
    """Read one of these files.

    Raises:
        RecordError: It is not there, damaged, or of another version.
    """
    data = read_json(path)
    if data.get("schema_version") != REPLAY_VERSION:
        raise RecordError(
            f"{path}: schema version {data.get('schema_version')!r}; this abharness reads {REPLAY_VERSION}"
        )
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise RecordError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
