"""The events of a run for machines: the models of the lines that `abharness run --json` writes, and their JSON Schema.

One JSON object a line on stdout, in order of time; the last is always `finished`. In between: `run_started` once, then
for every launch that is run `launch_started`, its `phase`s with `progress`, `note` and `warning` among them, and
`launch_finished`. Notes and warnings may also come outside a launch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from abharness.base import Model
from abharness.record import Failure, Variant

Outcome = Literal["no regression", "regression", "no verdict", "launch failed", "interrupted", "error"]


class _Event(Model):
    """What every event has."""

    version: Literal[1] = Field(default=1, description="Version of this format.")
    time: str = Field(description="When it happened: ISO 8601, UTC, milliseconds.")


class RunStarted(_Event):
    """The run folder is made, everything is resolved, and the first launch is next."""

    event: Literal["run_started"] = "run_started"
    experiment: str = Field(description="Name of the experiment.")
    run_dir: str = Field(description="Folder that gets every record of the run.")
    config_hash: str = Field(description="Hash of the resolved configuration; --resume goes by it.")
    plan: list[Variant] = Field(description="Variant of every launch, in order of time.")
    on_record: list[int] = Field(description="Indices of launches that an earlier run completed; they are skipped.")
    abharness_version: str = Field(description="Version of this harness.")
    versions: dict[Variant, dict[str, str]] = Field(description="Packages of each variant's interpreter.")


class LaunchStarted(_Event):
    """A launch begins."""

    event: Literal["launch_started"] = "launch_started"
    index: int = Field(ge=0, description="Index of the launch in the plan.")
    total: int = Field(ge=1, description="Launches of the plan.")
    variant: Variant = Field(description="What it launches.")
    left_s: float | None = Field(description="About how many seconds to the end of the last launch; null is unknown.")


class Phase(_Event):
    """A phase of the launch begins."""

    event: Literal["phase"] = "phase"
    index: int = Field(ge=0, description="Index of the launch.")
    name: str = Field(description="`start`, `verify before_load`, a cell with its shape, `stop`.")
    left_s: float | None = Field(description="As in launch_started.")


class Progress(_Event):
    """Requests or questions of the phase are done; at most one a second, and always one when all of them are."""

    event: Literal["progress"] = "progress"
    index: int = Field(ge=0, description="Index of the launch.")
    phase: str = Field(description="Name of the phase.")
    done: int = Field(ge=0, description="Requests or questions that ended.")
    total: int = Field(ge=0, description="Requests or questions of the phase.")
    left_s: float | None = Field(description="As in launch_started.")


class Note(_Event):
    """Something worth knowing that is no fault."""

    event: Literal["note"] = "note"
    index: int | None = Field(description="Index of the launch; null outside a launch.")
    text: str = Field(description="For people.")


class Warn(_Event):
    """A doubt about the spec, or what a check saw in a launch."""

    event: Literal["warning"] = "warning"
    index: int | None = Field(description="Index of the launch; null outside a launch.")
    code: str | None = Field(description="Validity code, where it is one.")
    text: str = Field(description="For people.")


class LaunchFinished(_Event):
    """A launch ended and is on record."""

    event: Literal["launch_finished"] = "launch_finished"
    index: int = Field(ge=0, description="Index of the launch.")
    variant: Variant = Field(description="What it launched.")
    status: Literal["completed", "failed", "interrupted"] = Field(description="As in its record.")
    folder: str = Field(description="Folder of its record.")
    ready_s: float | None = Field(description="Seconds from start to the first completion; null: it never came.")
    wall_s: float = Field(description="Seconds that all of it took.")
    error: Failure | None = Field(description="Why it did not complete: with the server's last words and the command.")


class Problem(Model):
    """What ended a run other than a launch."""

    kind: str = Field(description="Class name of the error.")
    message: str = Field(description="What happened.")
    hint: str | None = Field(description="What to do next.")
    code: str | None = Field(description="Validity code, where it is one.")


class Finished(_Event):
    """The last event, whatever happened."""

    event: Literal["finished"] = "finished"
    outcome: Outcome = Field(description="`interrupted` and `error` have no comparison.")
    exit_code: int = Field(description="Exit code of the process.")
    summary: str | None = Field(description="The verdict in one sentence.")
    codes: list[str] = Field(description="Validity codes that take the verdict away.")
    run_dir: str | None = Field(description="Folder of the records; null: the run ended before there was one.")
    files: list[str] = Field(description="Files that were made from all launches: comparison and reports.")
    error: Problem | None = Field(description="Null where there is a comparison.")


Event = Annotated[
    RunStarted | LaunchStarted | Phase | Progress | Note | Warn | LaunchFinished | Finished,
    Field(discriminator="event"),
]

ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of one line of `abharness run --json`."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "abharness event",
        "description": "One line of abharness run --json",
        **ADAPTER.json_schema(mode="serialization"),
    }
