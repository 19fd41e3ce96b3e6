"""What `abharness replay` does once the command line is parsed: captures, runs and functions in, text and records out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from abharness.errors import ReplayError, UsageError
from abharness.record import Variant
from abharness.replay import attribution, measure, serving, tuning, view
from abharness.replay import calibration as calibrating
from abharness.replay.captures import CAPTURE_FILE, Capture, read_capture, require_new, write_capture
from abharness.replay.measure import Function, Session, Setup
from abharness.replay.parser import DENSE
from abharness.replay.records import (
    CALIBRATION_FILE,
    REPLAY_FILE,
    Calibration,
    CandidateCheck,
    Point,
    Replay,
    RowCalibration,
    Segment,
    read_record,
)
from abharness.replay.sizes import read_sizes
from abharness.replay.sizes import synthesize as make_capture
from abharness.replay.validation import replayed_rows, validate
from abharness.storage import write_model, write_text_atomic
from abharness.telemetry import open_gpu
from abharness.trace import read_trace

REPORT_FILE = "report.txt"
PRODUCTION = "production"
DENSE_WEIGHTS = f"{DENSE}:weights"
DENSE_REFERENCE = f"{DENSE}:reference"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Done:
    """Outcome of a command: the text for stdout, and where the records are."""

    text: str
    folder: Path


def synthesize(sizes: str, folder: Path, rows: Sequence[int]) -> str:
    """Write a capture of sizes alone.

    Raises:
        UsageError: The sizes are not understood, or the folder is not empty.
    """
    capture = make_capture(read_sizes(sizes), rows)
    require_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_capture(folder, capture)
    return view.capture_text(capture)


def show(folder: Path) -> str:
    """What is in a capture, or in the folder of a replay.

    Raises:
        UsageError: It is neither.
    """
    if (folder / CAPTURE_FILE).is_file():
        return view.capture_text(read_capture(folder))
    if (folder / REPLAY_FILE).is_file():
        return view.replay_text(read_record(folder / REPLAY_FILE, Replay))
    raise UsageError(f"{folder} holds neither {CAPTURE_FILE} nor {REPLAY_FILE}")


def parse_candidates(texts: Sequence[str]) -> list[Function]:
    """`NAME=FUNCTION` texts.

    Raises:
        UsageError: One is not of this form, or a name is there twice or is production's.
    """
    found: list[Function] = []
    for text in texts:
        name, equals, function = text.partition("=")
        if not equals or not name or not function:
            raise UsageError(f"--candidate {text}: expected NAME=module:function, or NAME=entry-point")
        if name == PRODUCTION or name in [one.name for one in found]:
            raise UsageError(f"--candidate {name}: the name is taken; give each candidate one of its own")
        found.append(Function(name, function))
    return found


def parse_env(texts: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` texts.

    Raises:
        UsageError: One is not of this form.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"--env {text}: expected NAME=VALUE")
        found[name] = value
    return found


def run(
    setup: Setup,
    production: str,
    candidates: Sequence[Function],
    calibration_file: Path | None,
    environ: Mapping[str, str],
    say: Say,
) -> Done:
    """Replay production and candidates at each row count: without spins, and with them where a calibration is given.

    Raises:
        AbharnessError: It could not be carried out; what was measured is on disk.
    """
    setup, capture = _opened(setup, environ)
    calibration = _read_calibration(calibration_file, setup.rows)
    serving_mhz: dict[int, float] = {}
    with measure.session(setup, capture, "run", PRODUCTION, environ, say) as session:
        _apply(calibration, calibration_file, session)
        for rows in setup.rows:
            session.load(rows)
            named = [Function(PRODUCTION, production), *candidates]
            checked = [one for one in named if session.check(one).wrong is None]
            _require_production(session, rows)
            right = [one for one in checked if session.try_segment(one.name) is not None]
            _require_production(session, rows)
            if calibration is not None:
                gaps_s, scale, clock_mhz = calibrating.at_rows(calibration, rows)
                serving_mhz[rows] = clock_mhz
                spins = calibrating.spins(gaps_s, scale, clock_mhz)
                for one in right:
                    session.try_segment(one.name, spins, scale)
    return _written(session, view.replay_text(session.replay, serving_mhz))


def calibrate(
    setup: Setup, production: str, run_folder: Path, variant: Variant, environ: Mapping[str, str], say: Say
) -> Done:
    """Size the spins from a served run's traced steps, and find the length at which a replay is in its state.

    Raises:
        AbharnessError: It could not be carried out; what was measured is on disk.
    """
    served = serving.open_run(run_folder)
    setup, capture = _opened(setup, environ)
    found: dict[int, RowCalibration] = {}
    states = {rows: serving.serving(served, variant, rows) for rows in setup.rows}
    steps = {rows: serving.decode_steps(served, variant, rows) for rows in setup.rows}
    for state in states.values():
        if state.power_w is None or state.sm_clock_mhz is None:
            raise UsageError(
                f"{run_folder}: power and clock at {state.rows} rows are not on record: there is nothing to calibrate to"
            )
    with measure.session(setup, capture, "calibrate", PRODUCTION, environ, say) as session:
        replay = session.replay
        for rows in setup.rows:
            state = states[rows]
            session.load(rows)
            session.check(Function(PRODUCTION, production))
            _require_production(session, rows)
            bare = session.segment(PRODUCTION)
            gaps_s, remark = calibrating.gaps(steps[rows], _sequences(bare), state.tpot_s)
            points = [_point(bare, 0.0)]
            assert state.power_w is not None
            assert state.sm_clock_mhz is not None
            for scale in calibrating.SCALES:
                if scale > 0:
                    spins = calibrating.spins(gaps_s, scale, state.sm_clock_mhz)
                    points.append(_point(session.segment(PRODUCTION, spins, scale, profiled=False), scale))
            scale, matched, told = calibrating.choose(points, state.power_w, state.sm_clock_mhz)
            found[rows] = RowCalibration(
                gaps_s=gaps_s,
                tpot_s=state.tpot_s,
                serving_power_w=state.power_w,
                serving_clock_mhz=state.sm_clock_mhz,
                points=points,
                scale=scale,
                matched=matched,
                remark="; ".join(text for text in (told, remark) if text),
            )
            measured_on = (states[rows].gpu_name, states[rows].power_limit_w)
            here = (replay.device.name, replay.device.power_limit_w)
            if measured_on != here:
                session.note(
                    f"served on {measured_on[0]} at {measured_on[1]} W, calibrated on {here[0]} at {here[1]} W"
                )
            calibration = Calibration(
                capture=replay.capture,
                model=replay.model,
                gpu_name=replay.device.name,
                power_limit_w=replay.device.power_limit_w,
                positions=replay.positions,
                serving=str(run_folder),
                rows=found,
            )
            write_model(session.folder / CALIBRATION_FILE, calibration)
    text = view.calibration_text(calibration)
    return _written(session, text + "".join(f"note: {one}\n" for one in session.replay.notes))


def tune(
    setup: Setup,
    function: str,
    provider: str,
    calibration_file: Path | None,
    table: tuple[str, Path] | None,
    environ: Mapping[str, str],
    say: Say,
    *,
    exact: bool,
    most: int | None,
) -> Done:
    """Replay production, every option, production again; rank them by shape where the machine did not drift.

    Args:
        setup: The capture and how it is replayed.
        function: What makes a layer's call; its options are tuned, and without any it is production.
        provider: What gives the options of a shape.
        calibration_file: Spins for the step, or None.
        table: Function that makes the text of a dispatch table of what was chosen, and where it is written; or None.
        environ: The caller's environment.
        say: Told of every segment.
        exact: Choose only what is bit-identical to production.
        most: Options of a shape, at most; None is all.

    Raises:
        AbharnessError: It could not be carried out; what was measured is on disk.
    """
    setup, capture = _opened(setup, environ)
    calibration = _read_calibration(calibration_file, setup.rows)
    rankings: list[tuning.Ranking] = []
    with measure.session(setup, capture, "tune", PRODUCTION, environ, say) as session:
        _apply(calibration, calibration_file, session)
        for rows in setup.rows:
            session.load(rows)
            spins, scale = None, None
            if calibration is not None:
                gaps_s, scale, clock_mhz = calibrating.at_rows(calibration, rows)
                spins = calibrating.spins(gaps_s, scale, clock_mhz)
            rankings.append(_tune_rows(session, function, provider, rows, spins, scale, most))
        chosen = {one.rows: tuning.chosen(one, exact=exact) for one in rankings}
        if table is not None and any(chosen.values()):
            write_text_atomic(table[1], session.table(table[0], chosen))
    text = "\n".join(view.ranking_text(one) for one in rankings)
    if table is not None:
        text += f"table: {table[1]}\n" if any(chosen.values()) else "no table: nothing is faster than production\n"
    return _written(session, text + "".join(f"note: {one}\n" for one in session.replay.notes))


def _tune_rows(
    session: Session,
    function: str,
    provider: str,
    rows: int,
    spins: Sequence[int] | None,
    scale: float | None,
    most: int | None,
) -> tuning.Ranking:
    production = Function(PRODUCTION, function)
    session.check(production)
    _require_production(session, rows)
    options = session.options(provider)
    for shape, offered in options.items():
        if most is not None and len(offered) > most:
            session.note(f"{rows} rows, {shape}: the first {most} of {len(offered)} options were tried (--most)")
            options[shape] = offered[:most]
    first = session.segment(PRODUCTION, spins, scale)
    tried: list[tuple[Segment, CandidateCheck]] = []
    for number, by_shape in enumerate(tuning.groups(options)):
        name = f"option-{number}"
        check = session.check(Function(name, function, by_shape=by_shape))
        if check.wrong_shapes:
            right = {shape: one for shape, one in by_shape.items() if shape not in check.wrong_shapes}
            session.note(f"{rows} rows: {name} is wrong for {', '.join(check.wrong_shapes)}: not timed there")
            check = session.check(Function(name, function, by_shape=right))
        if check.wrong is None and check.by_shape:
            segment = session.try_segment(name, spins, scale)
            if segment is not None:
                tried.append((segment, check))
        session.drop(name)
    last = session.segment(PRODUCTION, spins, scale)
    return tuning.rank(rows, session.replay.shapes, first, last, tried)


def positions(trace: Path, replay_folder: Path, candidate: str, rows: int) -> str:
    """The times of a candidate's positions in a trace of whatever made it, beside those of its replay.

    Raises:
        UsageError: The replay does not know the candidate's kernels, or the trace has no whole step of them.
        TraceError: Nothing can be read of the trace.
    """
    replay = read_record(replay_folder / REPLAY_FILE, Replay)
    known = [one for one in replay.segments if (one.candidate, one.rows) == (candidate, rows) and one.kernels_of]
    if not known:
        raise UsageError(f"{replay_folder}: the kernels of {candidate}'s positions at {rows} rows are not on record")
    steps = attribution.every(attribution.intervals(read_trace(trace).kernels), _sequences(known[0]))
    return view.positions_text(replay, known[0], steps)


def validate_run(replay_folder: Path, candidate: str, run_folder: Path) -> str:
    """A replay's predictions beside a serving A/B of the same switch.

    Raises:
        UsageError: They have no row count in common, or the replay lacks the candidate.
    """
    replay = read_record(replay_folder / REPLAY_FILE, Replay)
    served = serving.open_run(run_folder)
    both = set(serving.row_counts(served, "baseline")) & set(serving.row_counts(served, "candidate"))
    rows_known = [rows for rows in replayed_rows(replay) if rows in both]
    if not rows_known:
        raise UsageError(
            f"{replay_folder} has {', '.join(map(str, replayed_rows(replay)))} rows, and {run_folder} "
            f"{', '.join(map(str, sorted(both))) or 'none'}: none in common"
        )
    found = [
        validate(
            replay,
            candidate,
            serving.serving(served, "baseline", rows),
            serving.serving(served, "candidate", rows),
        )
        for rows in rows_known
    ]
    remarks = []
    for one in found:
        for prediction in one.predictions:
            clock, served_at = prediction.clock_mhz, one.candidate.sm_clock_mhz
            remark = None if clock is None or served_at is None else calibrating.clock_remark(clock, served_at)
            if remark is not None:
                remarks.append(f"note: {one.rows} rows: {remark}\n")
        if replay.model is not None and one.baseline.model != replay.model:
            remarks.append(f"note: the replay is of {replay.model}, the run of {one.baseline.model}\n")
        if one.baseline.gpu_name != replay.device.name:
            remarks.append(f"note: replayed on {replay.device.name}, served on {one.baseline.gpu_name}\n")
    text = view.validation_text(found, candidate) + "".join(dict.fromkeys(remarks))
    write_text_atomic(replay_folder / "validation.txt", text)
    return text


def _opened(setup: Setup, environ: Mapping[str, str]) -> tuple[Setup, Capture]:
    """The capture, and the setup with what it says: row counts where none are asked for, and a reference."""
    capture = read_capture(setup.folder)
    rows = tuple(dict.fromkeys(setup.rows)) or capture.rows
    unknown = [one for one in rows if one not in capture.rows]
    if unknown and capture.files:
        raise UsageError(
            f"--rows {unknown[0]}: the capture has {', '.join(map(str, capture.rows))}",
            hint="capture that row count, too",
        )
    if setup.device == "cuda":
        gpu = open_gpu(environ)
        if not gpu.uuids():
            raise UsageError(
                f"no GPU: {gpu.describe().get('absent')}",
                hint="--device cpu replays on the CPU: without graphs, clocks or power",
            )
    reference = setup.reference
    if reference is None and capture.weights == "made" and setup.maker == DENSE_WEIGHTS:
        reference = DENSE_REFERENCE
    return replace(setup, rows=rows, reference=reference), capture


def _require_production(session: Session, rows: int) -> None:
    wrong = next((one.wrong for one in session.replay.checks if (one.name, one.rows) == (PRODUCTION, rows)), None)
    if wrong is not None:
        raise ReplayError(
            f"production at {rows} rows: {wrong}: there is nothing to compare with",
            hint="look whether --production is what the capture's layers are, and --reference what they compute",
        )


def _apply(calibration: Calibration | None, path: Path | None, session: Session) -> None:
    """Note that a calibration is used; refuse one that does not hold here."""
    if calibration is None:
        return
    replay = session.replay
    reasons = calibrating.does_not_apply(calibration, replay.device, replay.positions, replay.model)
    if reasons:
        raise UsageError(
            f"{path} does not apply here: {'; '.join(reasons)}",
            hint="calibrate here: abharness replay calibrate; or leave --calibration out: the replay is then without spins",
        )
    session.update(calibration=str(path))


def _read_calibration(path: Path | None, rows: Sequence[int]) -> Calibration | None:
    """The calibration, if one is given; refused before anything is measured where it does not cover a row count."""
    if path is None:
        return None
    found = read_record(path / CALIBRATION_FILE if path.is_dir() else path, Calibration)
    for one in rows:
        calibrating.at_rows(found, one)
    return found


def _sequences(segment: Segment) -> list[tuple[str, ...]]:
    if not segment.kernels_of:
        raise ReplayError(
            f"the kernels of each position are not known: {segment.positions_absent or 'a CPU has none'}",
            hint="calibrating needs a GPU and a profiler that sees its kernels",
        )
    return [tuple(segment.kernels[kind]) for kind in segment.kernels_of]


def _point(segment: Segment, scale: float) -> Point:
    gpu = segment.gpu
    if gpu is None or gpu.power_mean_w is None or gpu.sm_clock_mhz is None:
        raise ReplayError("power and clock of the replay are not known: there is nothing to calibrate by")
    return Point(scale=scale, power_w=gpu.power_mean_w, sm_clock_mhz=gpu.sm_clock_mhz, step_s=segment.step_s)


def _written(session: Session, text: str) -> Done:
    write_text_atomic(session.folder / REPORT_FILE, text)
    return Done(text, session.folder)
