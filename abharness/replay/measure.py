"""A capture and candidates -> a `Replay`: each checked, then replayed for seconds while NVML is sampled."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from abharness import __version__, environments, kernelfolder
from abharness.errors import AbharnessError, UsageError
from abharness.plan import BASE_VARIABLES
from abharness.redaction import redact
from abharness.replay import attribution
from abharness.replay.captures import Capture, Layer
from abharness.replay.process import Worker
from abharness.replay.records import REPLAY_FILE, CandidateCheck, Device, Replay, Segment
from abharness.sampler import Sampler
from abharness.storage import write_model
from abharness.telemetry import AbsentGpu, Gpu, open_gpu
from abharness.trace import read_trace

WARM_S = 1.0
"""Replayed before a measured part, so that its clock is that of the load."""
PROFILED = 8
"""Replays of a trace."""
PASSED_ON = ("PYTHONPATH", "TRITON_CACHE_DIR", "TMPDIR")
"""Of the caller's environment, besides the declared base."""
INTERVAL_S = 0.05
"""Between two samples of the GPU: segments are short."""


@dataclass(frozen=True, slots=True)
class Function:
    """A candidate as it is asked for.

    Attributes:
        name: How it is called in tables.
        function: `module:function`, or the name of an entry point.
        options: What the function is given.
        by_shape: What it is given besides, for layers of a shape `NxK`.
    """

    name: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    by_shape: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setup:
    """Where and how a capture is replayed.

    Attributes:
        folder: The capture's.
        rows: Row counts, in the order in which they are replayed; none takes the capture's.
        python: Interpreter: None is this one, a path, or `managed:cpu`.
        kernels: Folders of kernels for its PYTHONPATH.
        env: Further variables.
        device: `cuda` or `cpu`.
        maker: Function that makes weights and biases, where the capture has none.
        reference: Function that gives what results must be; None: what the server had, else production.
        tolerance: Largest relative error of a position.
        seconds: Of a segment.
        pause_s: Before each segment but the first: the device rests.
        output: Folder of results, below which the record gets a folder.
    """

    folder: Path
    rows: Sequence[int]
    python: str | None
    kernels: Sequence[str]
    env: Mapping[str, str]
    device: Literal["cuda", "cpu"]
    maker: str
    reference: str | None
    tolerance: float
    seconds: float
    pause_s: float
    output: Path


class Session:
    """A worker with a capture, the GPU's sampler beside it, and the record that both fill.

    Attributes:
        setup: As it was given.
        capture: What is replayed.
        replay: The record so far; it is on disk after every segment.
        folder: Where; it is made when the capture was loaded, so that what is refused leaves nothing.
    """

    def __init__(
        self,
        setup: Setup,
        capture: Capture,
        kind: Literal["run", "calibrate", "tune"],
        production: str,
        worker: Worker,
        sampler: Sampler,
        gpu: Gpu,
        env: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        self.setup = setup
        self.capture = capture
        self._worker = worker
        self._sampler = sampler
        self._say = say
        self._copies = 1
        self._rows = setup.rows[0]
        self._sequences: dict[str, list[tuple[str, ...]]] = {}
        described = self._load(self._rows)
        self.folder = _new_folder(setup.output, capture.name, kind)
        known = gpu.describe()
        own: dict[str, Any] = next(
            (one for one in known.get("devices", []) if one.get("uuid") == described.get("uuid")), {}
        )
        model = capture.server.get("model")
        self.replay = Replay(
            kind=kind,
            status="running",
            capture=capture.name,
            model=str(model) if model else None,
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            abharness=__version__,
            device=Device(
                kind=described["device"],
                name=described.get("name"),
                uuid=described.get("uuid"),
                arch=described.get("arch"),
                l2_bytes=described.get("l2_bytes"),
                torch=described["torch"],
                driver=known.get("driver_version"),
                power_limit_w=own.get("power_limit_w"),
            ),
            env=redact(dict(env)),
            positions=list(capture.order),
            shapes=[layer.shape for layer in capture.positions],
            production=production,
            tolerance=setup.tolerance,
        )
        if described["device"] == "cuda" and sampler.absent is not None:
            self.note(f"clocks and power are not known: {sampler.absent}")

    def note(self, text: str) -> None:
        """Add what a reader must know; nothing is added twice."""
        if text not in self.replay.notes:
            self.update(notes=[*self.replay.notes, text])

    def update(self, **changes: Any) -> None:
        """Change the record, and write it."""
        self.replay = self.replay.model_copy(update=changes)
        write_model(self.folder / REPLAY_FILE, self.replay)

    def _load(self, rows: int) -> dict[str, Any]:
        setup = self.setup
        done = self._worker.ask(
            "load",
            folder=str(setup.folder.resolve()),
            capture=self.capture.model_dump(mode="json", exclude={"server"}),
            rows=rows,
            device=setup.device,
            maker=setup.maker,
        )
        self._copies, self._rows = done["copies"], rows
        self._sequences = {}
        return done

    def load(self, rows: int) -> None:
        """Bring a row count to the device."""
        if self._rows != rows:
            self._load(rows)

    def options(self, provider: str) -> dict[str, list[dict[str, Any]]]:
        """By shape, what a provider of options would have tried."""
        return dict(self._worker.ask("options", provider=provider))

    def table(self, function: str, chosen: Mapping[int, Mapping[str, Any]]) -> str:
        """The text of a dispatch table with these options in it."""
        asked = {str(rows): dict(by_shape) for rows, by_shape in chosen.items()}
        return str(self._worker.ask("table", function=function, chosen=asked)["text"])

    def check(self, candidate: Function) -> CandidateCheck:
        """Build a candidate and hold it against the reference; what is wrong is told, kept, and not to be timed.

        Raises:
            UsageError: It cannot be built.
            ReplayError: The worker failed.
        """
        done = self._worker.ask(
            "candidate",
            name=candidate.name,
            function=candidate.function,
            options=dict(candidate.options),
            by_shape={shape: dict(options) for shape, options in candidate.by_shape.items()},
            reference=self.setup.reference,
        )
        found = _judged(candidate, self._rows, done, self.capture, self.setup.tolerance)
        if found.reference == "production":
            self.note("no reference: results are compared with those of production alone (--reference)")
        if found.wrong is None:
            try:
                self._sequences[candidate.name] = self._learn(candidate.name)
            except AbharnessError as error:
                self.note(f"{candidate.name}: times of positions are not known: {error}")
        else:
            self._say(f"{candidate.name}: {found.wrong}")
        self.update(checks=[*self.replay.checks, found])
        return found

    def _learn(self, name: str) -> list[tuple[str, ...]]:
        if self.setup.device == "cpu":
            return []
        path = self._worker.scratch / "marked.json"
        self._worker.ask("profile", name=name, path=str(path), replays=1, marked=True)
        marked = [kernel.name for kernel in attribution.intervals(read_trace(path).kernels)]
        return attribution.learn(marked, len(self.capture.order))

    def segment(
        self, name: str, spins: Sequence[int] | None = None, scale: float | None = None, *, profiled: bool = True
    ) -> Segment:
        """Replay a candidate that was checked.

        Args:
            name: The candidate.
            spins: Cycles before each position, or None.
            scale: What the spins were multiplied by, for the record.
            profiled: Take a trace after it, for the times of positions.

        Raises:
            UsageError: Its graph gives other results than its calls alone.
            ReplayError: The worker failed.
        """
        made = self._worker.ask("capture", name=name, spins=None if spins is None else list(spins))
        checks = [
            one.model_copy(update={"compared": made["compared"]}) if (one.name, one.rows) == (name, self._rows) else one
            for one in self.replay.checks
        ]
        if self.replay.segments:
            time.sleep(self.setup.pause_s)
        done = self._worker.ask("sustain", name=name, warm_s=WARM_S, seconds=self.setup.seconds)
        times = sorted(done["step_s"])
        cuts = statistics.quantiles(times, n=10) if len(times) > 1 else [times[0]] * 9
        found = Segment(
            candidate=name,
            rows=self._rows,
            proxy=spins is not None,
            scale=scale,
            started_s=done["started_s"],
            ended_s=done["ended_s"],
            step_s=statistics.median(times),
            step_p10_s=cuts[0],
            step_p90_s=cuts[-1],
            batches=len(times),
            replays_a_batch=done["replays_a_batch"],
            copies=self._copies,
            gpu=self._window(done["started_s"], done["ended_s"]),
            **(self._positions(name) if profiled else {"positions_absent": "not asked for"}),
        )
        self.update(checks=checks, segments=[*self.replay.segments, found])
        self._say(segment_line(found))
        return found

    def try_segment(self, name: str, spins: Sequence[int] | None = None, scale: float | None = None) -> Segment | None:
        """The same for a candidate that others can do without: what its graph refuses is told and kept on its check.

        Raises:
            ReplayError: The worker failed.
        """
        try:
            return self.segment(name, spins, scale)
        except UsageError as refusal:
            wrong = str(refusal)
        self._say(f"{name}: {wrong}")
        asked = (name, self._rows)
        checks = [
            one.model_copy(update={"wrong": wrong}) if (one.name, one.rows) == asked else one
            for one in self.replay.checks
        ]
        self.update(checks=checks)
        return None

    def _window(self, started_s: float, ended_s: float) -> Any:
        self._sampler.look_now()
        windows = self._sampler.windows(started_s, ended_s)
        uuid = self.replay.device.uuid
        return next((one for one in windows or [] if one.uuid == uuid), None)

    def _positions(self, name: str) -> dict[str, Any]:
        """Times of positions under the profiler, or why they are not known."""
        path = self._worker.scratch / "replays.json"
        try:
            done = self._worker.ask("profile", name=name, path=str(path), replays=PROFILED, marked=False)
            if done["positions_s"] is not None:
                return {"positions_s": done["positions_s"]}
            if name not in self._sequences:
                return {"positions_absent": "its kernels could not be told apart when it was checked"}
            sequences = self._sequences[name]
            found = attribution.intervals(read_trace(path).kernels)
            whole = attribution.replays(found, sequences * self._copies, PROFILED)
            steps = [part for step in whole for part in attribution.by_copy(step, self._copies)]
        except AbharnessError as error:
            return {"positions_absent": str(error)}
        median = attribution.medians(steps)
        kinds = list(dict.fromkeys(sequences))
        return {
            "positions_s": list(median.positions_s),
            "gaps_s": list(median.gaps_s),
            "kernels": [list(names) for names in kinds],
            "kernels_of": [kinds.index(names) for names in sequences],
        }

    def drop(self, name: str) -> None:
        """Give a candidate's memory back."""
        self._worker.ask("drop", name=name)


def _judged(
    candidate: Function, rows: int, done: Mapping[str, Any], capture: Capture, tolerance: float
) -> CandidateCheck:
    layers = capture.positions
    errors = [position["relative_error"] for position in done["positions"]]
    same = [position["bit_identical"] for position in done["positions"]]
    worst = max(range(len(errors)), key=lambda place: math.inf if errors[place] is None else errors[place])
    bad = [place for place, error in enumerate(errors) if error is None or error > tolerance]
    wrong = None
    if errors[worst] is None:
        wrong = f"{layers[worst].name}: the result is not finite: not timed"
    elif bad:
        off = f"off by {errors[worst]:.2e} against {done['reference']} (--tolerance {tolerance:g})"
        wrong = f"{layers[worst].name}: {off}: not timed"
    return CandidateCheck(
        name=candidate.name,
        rows=rows,
        function=candidate.function,
        options=dict(candidate.options),
        by_shape={shape: dict(options) for shape, options in candidate.by_shape.items()},
        reference=done["reference"],
        worst_relative_error=errors[worst],
        worst_layer=layers[worst].name,
        bit_identical=None if same[0] is None else all(same),
        differing=_shapes_of(layers, [place for place, one in enumerate(same) if one is False]),
        wrong=wrong,
        wrong_shapes=_shapes_of(layers, bad),
    )


def _shapes_of(layers: Sequence[Layer], places: Sequence[int]) -> list[str]:
    return list(dict.fromkeys(layers[place].shape for place in places))


def segment_line(found: Segment) -> str:
    """One segment in one line."""
    spins = f", spins x{found.scale:g}" if found.proxy and found.scale is not None else ""
    gpu = found.gpu
    clock = f", {gpu.sm_clock_mhz:.0f} MHz" if gpu and gpu.sm_clock_mhz is not None else ""
    power = f", {gpu.power_mean_w:.0f} W" if gpu and gpu.power_mean_w is not None else ""
    return f"{found.candidate}, {found.rows} rows{spins}: {found.step_s * 1e3:.4g} ms a step{clock}{power}"


@contextlib.contextmanager
def session(
    setup: Setup,
    capture: Capture,
    kind: Literal["run", "calibrate", "tune"],
    production: str,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Iterator[Session]:
    """Start a worker with the first row count of a capture, and sample the GPU until the block ends.

    Raises:
        UsageError: The interpreter, a kernel folder or the capture cannot be used.
        ReplayError: The worker failed.
    """
    python = environments.resolve_python(setup.python, environ)
    if setup.python is not None and setup.python.startswith(environments.PREFIX):
        environments.install(setup.python, environ=environ, progress=say)
    env = {name: environ[name] for name in (*BASE_VARIABLES, *PASSED_ON) if name in environ} | dict(setup.env)
    told = {name: value for name, value in env.items() if name not in BASE_VARIABLES or name in setup.env}
    gpu: Gpu = open_gpu(env) if setup.device == "cuda" else AbsentGpu("a CPU replays")
    sampler = Sampler(gpu, INTERVAL_S)
    with contextlib.ExitStack() as stack:
        copies = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ab-replay-")))
        site, folders = kernelfolder.resolve(setup.kernels, copies, environ)
        if folders:
            kernelfolder.install(site, folders)
        busy = {uuid: len(gpu.compute_pids(uuid)) for uuid in gpu.uuids()}
        worker = stack.enter_context(Worker(python, env, [site] if folders else []))
        found = Session(setup, capture, kind, production, worker, sampler, gpu, told, say)
        others = busy.get(found.replay.device.uuid or "", 0)
        if others:
            found.note(
                f"{others} other processes were on the GPU before it began: times, clock and power are theirs, too"
            )
        for folder in folders:
            state = "" if folder.git_commit is None else f", commit {folder.git_commit[:12]}"
            dirty = " with changes" if folder.git_dirty else ""
            found.note(f"kernels {folder.name}: sha256 {folder.sha256[:12]}{state}{dirty}")
        stack.callback(sampler.stop)
        sampler.start()
        try:
            yield found
        except BaseException as error:
            # What was measured is on disk; the record says that there was more to come.
            found.update(status="failed", error=str(error) or type(error).__name__)
            raise
        found.update(status="completed")


def _new_folder(output: Path, capture: str, kind: str) -> Path:
    """Make the folder of a new record.

    Raises:
        UsageError: It cannot be made.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    parent = output / f"replay-{capture}"
    for number in range(100):
        folder = parent / (f"{stamp}-{kind}" + (f"-{number}" if number else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UsageError(f"cannot make {folder}: {error.strerror}", hint="choose another with -o") from error
        return folder
    raise UsageError(f"cannot make a new folder in {parent}", hint="choose another with -o")
