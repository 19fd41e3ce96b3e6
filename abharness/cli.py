"""The command line: what each command calls, where its output goes, and exit codes; no logic.

Heavy imports happen inside the commands: `abharness --help` needs no HTTP client and no model of a record.
"""

from __future__ import annotations

import argparse
import errno
import gc
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from abharness.arguments import make_parser
from abharness.errors import AbharnessError
from abharness.redaction import remember, screen_safe, secrets_of

if TYPE_CHECKING:
    from abharness.commands import RunResult
    from abharness.compare import Comparison
    from abharness.progress import Reporter
    from abharness.replay.actions import Done
    from abharness.replay.measure import Setup


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the console script's entry point.

    Returns:
        The exit code.
    """
    arguments = make_parser().parse_args(argv)
    remember(secrets_of(os.environ))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets its escape, not a traceback in place of the report.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code: int = ACTIONS[arguments.action](arguments)
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
    if arguments.html is not None and (arguments.html.is_dir() or not arguments.html.parent.is_dir()):
        raise _usage(f"--html {arguments.html}: expected a file in a folder that exists")
    # No matrices are multiplied here: threads for that would only be started, and waited for.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Records hold no cycles, and looking for some in so many objects takes a third of the time.
    gc.disable()
    try:
        from abharness import compare

        comparisons = compare.compare_folders(arguments.folders, arguments.allow)
    finally:
        gc.freeze()  # nor when the process ends
        gc.enable()
    if arguments.html is not None:
        from abharness import webpage
        from abharness.storage import write_text_atomic

        write_text_atomic(arguments.html, webpage.render(comparisons))
        _say(f"page in {arguments.html}")
    _out_report(comparisons, arguments.format, arguments.color, all_metrics=arguments.all_metrics)
    # The gravest outcome of all: a failed launch, a regression, no verdict, none of them.
    codes = [comparison.exit_code for comparison in comparisons]
    return next((code for code in (4, 1, 3) if code in codes), 0)


def _export(arguments: argparse.Namespace) -> int:
    from abharness.export import export

    written = export(arguments.folders, arguments.to, arguments.format)
    for text in written.left_out:
        _say(f"warning: {text}")
    _out("".join(f"{arguments.to / path}\n" for path in written.files))
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    from abharness import schemas

    _out(schemas.text(arguments.name))
    return 0


def _completion(arguments: argparse.Namespace) -> int:
    import shtab

    _out(shtab.complete(make_parser(), shell=arguments.shell) + "\n")
    return 0


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


def _replay_capture(arguments: argparse.Namespace) -> int:
    from abharness.progress import make_reporter
    from abharness.replay import actions_capture

    options = actions_capture.Options(
        spec=arguments.spec,
        output=arguments.output,
        overrides=arguments.overrides,
        variant=arguments.variant,
        layers=arguments.layers,
        rows=arguments.rows,
        steps=arguments.steps,
        input_len=arguments.input_len,
        weights=arguments.weights,
        most_gib=arguments.most_gib,
    )
    reporter = make_reporter()
    try:
        text = actions_capture.capture(options, os.environ, reporter=reporter)
    finally:
        reporter.close()
    _out(text)
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


def _replay_synthesize(arguments: argparse.Namespace) -> int:
    from abharness.replay import actions

    _out(actions.synthesize(arguments.sizes, arguments.output, _row_counts(arguments) or [1]))
    return 0


def _replay_show(arguments: argparse.Namespace) -> int:
    from abharness.replay import actions

    _out(actions.show(arguments.folder))
    return 0


def _replay_run(arguments: argparse.Namespace) -> int:
    from abharness.replay import actions

    candidates = actions.parse_candidates(arguments.candidate)
    done = actions.run(_replayed(arguments), arguments.production, candidates, arguments.calibration, os.environ, _say)
    return _replay_done(done)


def _replay_calibrate(arguments: argparse.Namespace) -> int:
    from abharness.replay import actions

    done = actions.calibrate(
        _replayed(arguments), arguments.production, arguments.serving, arguments.variant, os.environ, _say
    )
    return _replay_done(done)


def _replay_tune(arguments: argparse.Namespace) -> int:
    from abharness.replay import actions

    if (arguments.table is None) != (arguments.to is None):
        raise _usage("--table names the function that makes a table, --to the file it goes to: give both or neither")
    if arguments.most is not None and arguments.most < 1:
        raise _usage("--most must be at least 1")
    done = actions.tune(
        _replayed(arguments),
        arguments.function,
        arguments.options,
        arguments.calibration,
        None if arguments.table is None else (arguments.table, arguments.to),
        os.environ,
        _say,
        exact=arguments.exact,
        most=arguments.most,
    )
    return _replay_done(done)


def _replay_positions(arguments: argparse.Namespace) -> int:
    from abharness.replay import actions

    _out(actions.positions(arguments.trace, arguments.replay, arguments.candidate, arguments.rows))
    return 0


def _replay_validate(arguments: argparse.Namespace) -> int:
    from abharness.replay import actions

    _out(actions.validate_run(arguments.replay, arguments.candidate, arguments.serving))
    return 0


def _replayed(arguments: argparse.Namespace) -> Setup:
    from abharness.replay.actions import parse_env
    from abharness.replay.measure import Setup

    if not 0 < arguments.seconds <= 600:
        raise _usage(f"--seconds {arguments.seconds:g}: expected more than 0 and at most 600")
    if not 0 <= arguments.pause <= 600:
        raise _usage(f"--pause {arguments.pause:g}: expected 0 to 600 seconds")
    if not 0 < arguments.tolerance < 1:
        raise _usage(f"--tolerance {arguments.tolerance:g}: expected more than 0 and less than 1")
    return Setup(
        folder=arguments.capture,
        rows=_row_counts(arguments),
        python=arguments.python,
        kernels=arguments.kernels,
        env=parse_env(arguments.env),
        device=arguments.device,
        maker=arguments.weights_by,
        reference=arguments.reference,
        tolerance=arguments.tolerance,
        seconds=arguments.seconds,
        pause_s=arguments.pause,
        output=arguments.output,
    )


def _row_counts(arguments: argparse.Namespace) -> list[int]:
    wrong = [rows for rows in arguments.rows if not 1 <= rows <= 65536]
    if wrong:
        raise _usage(f"--rows {wrong[0]}: expected 1 to 65536")
    return list(arguments.rows)


def _replay_done(done: Done) -> int:
    _out(done.text)
    _say(f"records in {done.folder}")
    return 0


def _usage(message: str) -> AbharnessError:
    from abharness.errors import UsageError

    return UsageError(message)


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "verify-env": _verify_env,
    "compare": _compare,
    "export": _export,
    "trace": _trace,
    "replay capture": _replay_capture,
    "server install": _server_install,
    "server list": _server_list,
    "server remove": _server_remove,
    "replay synthesize": _replay_synthesize,
    "replay show": _replay_show,
    "replay run": _replay_run,
    "replay calibrate": _replay_calibrate,
    "replay tune": _replay_tune,
    "replay validate": _replay_validate,
    "replay positions": _replay_positions,
    "schema": _schema,
    "completion": _completion,
    "model fetch": _model_fetch,
}


if __name__ == "__main__":
    sys.exit(main())
