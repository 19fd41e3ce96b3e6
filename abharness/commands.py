"""What the commands do once the command line is parsed: spec in, text and exit code out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from abharness import claims, compare, guard, inspection, kernelfolder, prepare, probe, redaction, report, webpage
from abharness.errors import UsageError
from abharness.failures import COMMAND_TITLE, command_lines, last_words, what_happened
from abharness.plan import Host, Plan, build_plan, describe, launch_order
from abharness.progress import Reporter
from abharness.record import EnvironmentCheck
from abharness.reported import without_counts
from abharness.runner import Runner
from abharness.runs import launches_dir, read_launch
from abharness.spec import VARIANTS, DesignSpec, ExperimentSpec, Primary
from abharness.specload import literal_references, load_spec, spec_warnings
from abharness.storage import write_text_atomic
from abharness.telemetry import open_gpu
from abharness.validity import confounded
from abharness.verify import suspicious_values


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of `abharness run`: the comparison, where the records are, the files made from all of them."""

    comparison: compare.Comparison
    run_dir: Path
    files: list[Path]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Outcome of `abharness verify-env`."""

    text: str
    json: str
    exit_code: int


def load(
    path: Path, overrides: Sequence[str], only: Sequence[str], *, trace: bool = False, aa: bool = False
) -> ExperimentSpec:
    """Read a spec.

    Args:
        path: The YAML file.
        overrides: `--set` assignments.
        only: Workloads to keep; none keeps all.
        trace: Ask for a trace, with the defaults where the spec does not.
        aa: Make it the A/A of this experiment.

    Raises:
        SpecError: The spec cannot be run.
        UsageError: A workload named by `only` is not in it.
    """
    spec = load_spec(path, overrides, aa=aa)
    for variant in VARIANTS:
        redaction.remember(redaction.secrets_of(spec.merged_env(variant), spec.merged_args(variant)))
    if trace and spec.traced is None:
        spec = load_spec(path, [*overrides, "trace={}"], aa=aa)
    if aa:
        spec = spec.against_itself()
    if not only:
        return spec
    names = [workload.name for workload in spec.workloads]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: no such workload", hint=f"this spec has {', '.join(names)}")
    primary = Primary.parse(spec.design.primary) if spec.design.primary else None
    if primary is not None and primary.workload not in only:
        raise UsageError(
            f"--only leaves out {primary.workload}, which design.primary names",
            hint="add --set design.primary=null",
        )
    return spec.model_copy(update={"workloads": tuple(w for w in spec.workloads if w.name in only)})


def warnings(spec: ExperimentSpec) -> list[str]:
    """Doubts about a spec that can be run, one line each."""
    findings = [*spec_warnings(spec), *suspicious_values(spec.merged_env("baseline"), spec.merged_env("candidate"))]
    told = [f"{finding.message}; {finding.hint}" if finding.hint else finding.message for finding in findings]
    told += literal_references(spec)
    if spec.design.order == "random" and (drawn := confounded(launch_order(spec.design))) is not None:
        told.append(
            f"design.order random draws an order with seed {spec.design.seed} that correlates variant with time "
            f"({drawn:+.2f}): there will be no verdict; use another seed or design.order abba"
        )
    return told


def dry_run(spec: ExperimentSpec, environ: Mapping[str, str]) -> str:
    """The plan of a spec as text; nothing is started or made."""
    host = prepare.make_host(spec, environ)
    text = describe(spec, build_plan(spec, host))
    return text + "".join(f"would be made first: {name}\n" for name in prepare.missing_parts(spec, environ))


def run(
    spec: ExperimentSpec, environ: Mapping[str, str], *, output: Path, resume: bool, reporter: Reporter
) -> RunResult:
    """Run an experiment to its report.

    Raises:
        AbharnessError: It could not start, or cannot be compared.
        KeyboardInterrupt: Asked to stop; what was measured is on disk.
    """
    host = prepare.make_host(spec, environ)
    run_dir = prepare.run_dir_to_resume(spec, host, output) if resume else None
    claims.clear_dead_runs(prepare.scratch_parent(), reporter.note)
    prepare.check_disk(output, host.scratch)
    prepare.make_missing_parts(spec, host, environ, reporter.note)
    if run_dir is None:
        run_dir = prepare.new_run_dir(spec, host, output)
    with claimed(host) as claim, claims.one_run_at_a_time(run_dir, host.scratch) as earlier:
        if earlier is not None:
            claims.clear_dead(earlier, reporter.note)
        execute(spec, build_plan(spec, host), host, claim, run_dir, reporter)
        return _report(run_dir, reporter)


@contextlib.contextmanager
def claimed(host: Host) -> Iterator[claims.Holding]:
    """Hold the scratch folder of a run, guarded; nothing of the run outlives the block, or this process."""
    with guard.guarding(host.scratch), claims.holding(host.scratch) as claim:
        probe.install(host.probe_site)
        for variant, site in host.kernel_sites.items():
            kernelfolder.install(site, host.kernels[variant])
        yield claim


def execute(
    spec: ExperimentSpec,
    plan: Plan,
    host: Host,
    claim: claims.Holding,
    run_dir: Path,
    reporter: Reporter,
    *,
    kept: bool = True,
) -> None:
    """Run the launches of a plan into a run folder; what ends one of them is in its record.

    Raises:
        AbharnessError: The run cannot go on.
        KeyboardInterrupt: Asked to stop.
    """
    Runner(
        spec,
        plan,
        run_dir=run_dir,
        gpu=open_gpu(host.environ),
        reporter=reporter,
        versions=prepare.server_versions(plan),
        hold=claim.note,
        kept=kept,
    ).run()


def _report(run_dir: Path, reporter: Reporter) -> RunResult:
    (comparison,) = compare.compare_folders([run_dir])
    written = {"comparison.json": "json", "report.md": "markdown"}
    for name, form in written.items():
        write_text_atomic(run_dir / name, report.render([comparison], form))
    files = [run_dir / name for name in written]
    page = run_dir / "report.html"
    try:
        write_text_atomic(page, webpage.render([comparison]))
        files.append(page)
    except Exception as error:
        # A picture that cannot be drawn must not cost the verdict, nor pass unnoticed.
        reporter.warn(
            f"no {page}: {type(error).__name__}: {error}; everything measured is on disk, and abharness compare with "
            "--html makes the page again"
        )
    return RunResult(comparison, run_dir, files)


def verify_spec(spec: ExperimentSpec, environ: Mapping[str, str], *, reporter: Reporter) -> VerifyResult:
    """Launch each variant once, without load, and check it.

    Raises:
        AbharnessError: Nothing could be launched at all.
    """
    texts_only = {variant: without_counts(expected) for variant, expected in spec.verify.expect_report.items()}
    idle = spec.model_copy(
        update={
            "workloads": (),
            "design": DesignSpec(launches_per_variant=1, seed=spec.design.seed),
            "trace": None,
            "verify": spec.verify.model_copy(update={"expect_kernels": {}, "expect_report": texts_only}),
        }
    )
    claims.clear_dead_runs(prepare.scratch_parent(), reporter.note)
    host = prepare.make_host(spec, environ)
    prepare.check_disk(host.scratch)
    prepare.make_missing_parts(spec, host, environ, reporter.note)
    with claimed(host) as claim:
        run_dir = host.scratch / "run"
        run_dir.mkdir()
        plan = build_plan(idle, host)
        for planned in plan.launches:
            # One at a time: a variant that fails must not keep the other from being checked.
            execute(idle, Plan(plan.config_hash, (planned,)), host, claim, run_dir, reporter, kept=False)
        texts: list[str] = []
        data: list[dict[str, Any]] = []
        codes: list[int] = []
        for planned in plan.launches:
            path = launches_dir(run_dir) / planned.label
            launch = read_launch(path)
            error = launch.record.error
            for check in launch.evidence.environment:
                texts.append(inspection.check_text(f"{planned.variant} {check.when}", check))
                codes.append(_check_code(check))
            if error:
                texts.append(f"{planned.variant}\n  {what_happened(error)}\n")
                texts += [f"  {line}\n" for line in last_words(error)]
                if error.command:
                    texts.append("\n".join([f"{planned.variant}, {COMMAND_TITLE}", *command_lines(error.command), ""]))
                codes.append(3 if error.code == "env_unverifiable" else 4)
            data.append(
                {
                    "variant": planned.variant,
                    "checks": [check.model_dump(mode="json") for check in launch.evidence.environment],
                    "error": error.model_dump(mode="json") if error else None,
                }
            )
    unchecked: list[str] = []
    if spec.verify.expect_kernels:
        unchecked.append("expect_kernels: kernels are traced under load; abharness run checks them")
    if texts_only != spec.verify.expect_report:
        unchecked.append("expect_report: numbers count what the load does; abharness run checks them")
    texts += [f"not checked: {text}\n" for text in unchecked]
    return VerifyResult("".join(texts), _json({"variants": data, "not_checked": unchecked}), _worst(codes))


def verify_running(pid: int, expect: Sequence[str], expect_unset: Sequence[str]) -> VerifyResult:
    """Check the process tree of a running server against expected values.

    Raises:
        UsageError: Nothing is expected, or there is no such process.
    """
    expected = inspection.parse_expectations(expect, expect_unset)
    if not expected:
        raise UsageError("--pid needs something to check", hint="add --expect NAME=VALUE or --expect-unset NAME")
    check = inspection.check_running(pid, expected)
    text = inspection.check_text(f"server {pid}", check)
    return VerifyResult(text, _json(check.model_dump(mode="json")), _check_code(check))


def list_servers() -> VerifyResult:
    """Every vLLM server of this user."""
    views = inspection.running_servers()
    data = [
        {**dataclasses.asdict(view), "processes": [one.model_dump(mode="json") for one in view.processes]}
        for view in views
    ]
    unread = any(one.state == "unreadable" for view in views for one in view.processes)
    return VerifyResult(inspection.servers_text(views), _json({"servers": data}), 3 if unread else 0)


def _check_code(check: EnvironmentCheck) -> int:
    codes = {finding.code for finding in check.findings if finding.fatal}
    return 0 if not codes else 3 if codes == {"env_unverifiable"} else 4


def _worst(codes: Sequence[int]) -> int:
    return max(codes, default=0)


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, allow_nan=False) + "\n"
