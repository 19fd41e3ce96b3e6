"""`abharness replay capture`: a spec in, one server launched with the capture plugin, a capture on disk."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from abharness import claims, commands, prepare, provenance
from abharness.errors import AbharnessError, LaunchError, UsageError
from abharness.failures import what_happened
from abharness.launch import utc_now
from abharness.plan import Host, Plan, PlannedLaunch, build_plan, shapes
from abharness.progress import Reporter
from abharness.record import RunRecord, Variant
from abharness.replay import capturing, view
from abharness.replay.captures import Capture, Layer, require_new, write_capture
from abharness.reported import without_counts
from abharness.runs import RUN_FILE, Launch, launches_dir, read_launch
from abharness.spec import (
    CAPTURE_VARIABLE,
    PROBE_PLUGIN,
    VARIANTS,
    DecodeWorkload,
    DesignSpec,
    ExperimentSpec,
)
from abharness.storage import read_model

INPUT_LEN = 64
"""Prompt tokens where none are asked for and no row count needs more."""

MARGIN_STEPS = 32
"""Decode steps beyond those captured: requests that are sent together do not start in one step."""

PREFILL_TOKENS = 1024
"""Prompt tokens taken to be processed in a step, at the least."""

GIB = 2**30
EAGER = "--enforce-eager"
_PARALLEL = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line.

    Attributes:
        spec: The YAML file.
        output: Folder of the capture, new or empty.
        overrides: `--set` assignments.
        variant: Whose server.
        layers: Regular expression, searched for in the names of modules; None is every layer.
        rows: Row counts; none are those of the decode workloads.
        steps: Decode steps of each.
        input_len: Prompt tokens of a request; None is 64, or what the row counts need.
        weights: Whether weights are copied.
        most_gib: Bound of everything written.
    """

    spec: Path
    output: Path
    overrides: Sequence[str]
    variant: Variant
    layers: str | None
    rows: Sequence[int]
    steps: int
    input_len: int | None
    weights: Literal["copy", "made"]
    most_gib: float


def capture(options: Options, environ: Mapping[str, str], *, reporter: Reporter) -> str:
    """Capture the linear layers of decode steps.

    Returns:
        What was captured, for people.

    Raises:
        UsageError: It cannot be done as asked.
        LaunchError: The launch failed, or showed too few steps.
        KeyboardInterrupt: Asked to stop; nothing is left.
    """
    _check_options(options)
    spec = commands.load(options.spec, options.overrides, [])
    wish = _wish(options, spec)
    _check_server(spec, options.variant, wish)
    asked = _one_server(spec, options.variant, wish)
    claims.clear_dead_runs(prepare.scratch_parent(), reporter.note)
    host = prepare.make_host(asked, environ)
    exchange = capturing.Exchange(host.scratch / "capture")
    asked = _with_variable(asked, exchange.config)
    plan = build_plan(asked, host)
    planned = next(launch for launch in plan.launches if launch.variant == options.variant)
    _check_plugins(planned)
    prepare.check_disk(host.scratch, options.output)
    prepare.make_missing_parts(asked, host, environ, reporter.note)
    made = not options.output.exists()
    options.output.mkdir(parents=True, exist_ok=True)
    try:
        found = _launch(asked, Plan(plan.config_hash, (planned,)), host, exchange, wish, options.output, reporter)
        write_capture(options.output, found)
    except BaseException:
        capturing.forget(options.output)
        if made:
            with contextlib.suppress(OSError):  # somebody else has put something there
                options.output.rmdir()
        raise
    return _summary(options.output, found)


def _check_options(options: Options) -> None:
    require_new(options.output)
    try:
        re.compile(options.layers or "")
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"--layers {options.layers!r}: not a regular expression: {error}") from error
    for name, value, least in (
        *(("--rows", rows, 1) for rows in options.rows),
        ("--steps", options.steps, 1),
        *(("--input-len", length, 4) for length in (options.input_len,) if length is not None),
    ):
        if not least <= value < 2**31:
            raise UsageError(f"{name} {value}: a whole number from {least} on is expected")
    if not (0 < options.most_gib < math.inf):
        raise UsageError(f"--most-gib {options.most_gib:g}: a number of GiB above 0 is expected")


def _wish(options: Options, spec: ExperimentSpec) -> capturing.Wish:
    decode = [workload for workload in spec.workloads if isinstance(workload, DecodeWorkload)]
    rows = sorted(set(options.rows) or {rows for workload in decode for rows in workload.max_concurrency})
    if not rows:
        raise UsageError(
            f"{options.spec}: no decode workload says how many rows a step has", hint="name them: --rows 1 --rows 8"
        )
    input_len = options.input_len or max(INPUT_LEN, rows[-1] + 1)
    if input_len <= rows[-1]:
        raise UsageError(
            f"--input-len {input_len}: prompts must be longer than the largest row count, {rows[-1]}: a step of a prompt "
            "could not be told from a decode step",
            hint=f"give at least --input-len {rows[-1] + 1}, or leave it out",
        )
    return capturing.Wish(
        layers=options.layers or "",
        rows=tuple(rows),
        steps=options.steps,
        input_len=input_len,
        weights=options.weights,
        most_bytes=int(options.most_gib * GIB),
    )


def _output_len(wish: capturing.Wish, rows: int) -> int:
    """Tokens of each request: while its last prompts are processed, its first ones decode already."""
    return wish.steps + MARGIN_STEPS + -(-rows * wish.input_len // PREFILL_TOKENS)


def _check_server(spec: ExperimentSpec, variant: Variant, wish: capturing.Wish) -> None:
    """Refuse what the serve arguments show to be impossible.

    Raises:
        UsageError: More than one GPU, or room for fewer rows or tokens than are asked for.
    """
    for names in _PARALLEL:
        size = _argument(spec, variant, *names)
        if size is not None and size > 1:
            raise UsageError(
                f"{variant}: {names[0]} {size}: a capture is of a model in one process; each of several has a part of it",
                hint=f"add --set server.serve_args=[...] without {names[0]}",
            )
    slots = _argument(spec, variant, "--max-num-seqs")
    if slots is not None and slots < wish.rows[-1]:
        raise UsageError(
            f"--rows {wish.rows[-1]}: the {variant}'s --max-num-seqs {slots} lets no more decode together",
            hint=f"raise --max-num-seqs to {wish.rows[-1]}, or name fewer rows with --rows",
        )
    limit = _argument(spec, variant, "--max-model-len")
    need = wish.input_len + max(_output_len(wish, rows) for rows in wish.rows)
    if limit is not None and need > limit:
        raise UsageError(
            f"a request of {wish.input_len} prompt tokens and {need - wish.input_len} decoded ones does not fit the "
            f"{variant}'s --max-model-len {limit}",
            hint=f"raise --max-model-len to {need}, or lower --input-len, --steps or --rows",
        )


def _argument(spec: ExperimentSpec, variant: Variant, *names: str) -> int | None:
    """The last value of a numeric argument; None where it is not given, or not as digits."""
    values = [value for flag, value in spec.canonical_args(variant) if flag in names]
    return int(values[-1]) if values and values[-1] is not None and re.fullmatch(r"\d{1,9}", values[-1]) else None


def _workload_name(rows: int) -> str:
    return f"rows-{rows}"


def _one_server(spec: ExperimentSpec, variant: Variant, wish: capturing.Wish) -> ExperimentSpec:
    """The experiment with nothing but decode steps of these rows, on the one server (both variants are it)."""
    own = spec.variants[variant]
    if EAGER not in {flag for flag, _ in spec.canonical_args(variant)}:
        own = own.model_copy(update={"serve_args": (*own.serve_args, EAGER)})
    plugins = {**spec.verify.plugins, variant: (*spec.verify.plugins.get(variant, ()), capturing.PLUGIN)}
    reports = {name: without_counts(expected) for name, expected in spec.verify.expect_report.items()}
    verify = {"expect_kernels": {}, "expect_report": reports, "plugins": plugins}
    workloads = [
        DecodeWorkload(
            kind="decode",
            name=_workload_name(rows),
            input_len=wish.input_len,
            output_len=_output_len(wish, rows),
            max_concurrency=(rows,),
            num_prompts=rows,
            num_warmups=0,
        )
        for rows in wish.rows
    ]
    return spec.model_copy(
        update={
            "variants": dict.fromkeys(VARIANTS, own),
            "workloads": tuple(workloads),
            "design": DesignSpec(launches_per_variant=1, seed=spec.design.seed),
            "trace": None,
            "verify": spec.verify.model_copy(update=verify),
        }
    )


def _with_variable(spec: ExperimentSpec, config: Path) -> ExperimentSpec:
    variants = {
        variant: own.model_copy(update={"env": {**own.env, CAPTURE_VARIABLE: str(config)}})
        for variant, own in spec.variants.items()
    }
    return spec.model_copy(update={"variants": variants})


def _check_plugins(planned: PlannedLaunch) -> None:
    """Refuse an environment that keeps the plugin out.

    Raises:
        UsageError: VLLM_PLUGINS does not name it, or PYTHONPATH is not ours to add to.
    """
    named = planned.env.get("VLLM_PLUGINS")
    if named is not None:
        missing = [name for name in (PROBE_PLUGIN, capturing.PLUGIN) if name not in named.split(",")]
        if missing:
            value = ",".join(part for part in (named, *missing) if part)
            raise UsageError(
                f"{planned.variant}: VLLM_PLUGINS={named!r} keeps {' and '.join(missing)} out: nothing can be captured",
                hint=f"VLLM_PLUGINS: {value!r}",
            )
    if planned.probe_absent is not None:
        raise UsageError(
            f"{planned.variant}: {planned.probe_absent}: the capture plugin cannot be brought to the server",
            hint="leave PYTHONPATH out of env, or give it a value",
        )


def _launch(
    spec: ExperimentSpec,
    plan: Plan,
    host: Host,
    exchange: capturing.Exchange,
    wish: capturing.Wish,
    output: Path,
    reporter: Reporter,
) -> Capture:
    (planned,) = plan.launches
    rows_of = {
        shape.label: shape.max_concurrency
        for workload in spec.workloads
        if isinstance(workload, DecodeWorkload)
        for shape in shapes(workload)
    }
    arming = cast("Reporter", capturing.Arming(reporter, rows_of, exchange.arm))
    with commands.claimed(host) as claim:
        capturing.install(host.probe_site)
        run_dir = host.scratch / "run"
        run_dir.mkdir()
        exchange.begin(wish, output)
        commands.execute(spec, plan, host, claim, run_dir, arming, kept=False)
        launch = read_launch(launches_dir(run_dir) / planned.label)
        run = read_model(run_dir / RUN_FILE, RunRecord)
        said = exchange.heard()
    # What the plugin has to say comes first: a server that cannot be captured may have been ended for it.
    _raise(capturing.fault(said))
    error = launch.record.error
    if error is not None:
        raise LaunchError(f"the {planned.variant}'s launch failed: {what_happened(error)}", hint=error.hint)
    model = capturing.result(said, wish)
    return Capture(
        name=f"{spec.experiment}-{planned.variant}"[-80:].lstrip("._-"),
        source="server",
        weights="copied" if wish.weights == "copy" else "made",
        dtype=model["dtype"],
        rows=wish.rows,
        steps=wish.steps,
        order=tuple(model["order"]),
        layers=tuple(Layer.model_validate(layer) for layer in model["layers"]),
        files={int(rows): name for rows, name in model["files"].items()},
        left_out=model["left_out"],
        server=_server(launch, run, wish),
    )


def _raise(error: AbharnessError | None) -> None:
    if error is not None:
        raise error


def _server(launch: Launch, run: RunRecord, wish: capturing.Wish) -> dict[str, Any]:
    """Where the steps come from, by the launch's record, which holds no secrets."""
    record = launch.record
    return {
        "experiment": record.experiment,
        "variant": record.variant,
        "eager": True,
        "input_len": wish.input_len,
        "captured_at": utc_now(),
        "abharness": provenance.own_version(),
        "model": record.model,
        "argv": record.argv,
        "env": record.env,
        "kernels": [kernel.model_dump(mode="json", include={"name", "sha256"}) for kernel in record.kernels],
        "versions": launch.evidence.server_versions,
        "machine": {name: run.provenance.get(name) for name in ("cpu", "gpu", "kernel", "machine")},
    }


def _summary(output: Path, found: Capture) -> str:
    size = sum(path.stat().st_size for path in output.iterdir())
    return f"{output}: {size / GIB:.2f} GiB\n{view.capture_text(found)}"
