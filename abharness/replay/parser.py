"""The arguments of `abharness replay` and its actions; it imports nothing of ours."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DENSE = "abharness_replay.dense"
"""The module of functions for layers that are not quantised, where a replay runs."""

FUNCTIONS = (
    "FUNCTION is module:function, or the name of an entry point of the group abharness.replay, in the environment that\n"
    "replays; module:function?name=value gives it arguments. It takes a layer and gives what computes its result.\n\n"
)

EXIT_CODES = """exit codes:
  0    done
  2    the command line, a capture or a record cannot be used
  4    a replay could not be carried out; what it measured before is kept
  5    internal error
  130  interrupted; what was measured is kept
"""


def add_capture(parser: argparse.ArgumentParser, directories: dict[str, str]) -> None:
    """Add the arguments of `replay capture` but for those that every command with a spec has.

    Args:
        parser: Its parser.
        directories: How a completion script completes a folder.
    """
    output = parser.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="new, or empty")
    output.complete = directories  # type: ignore[attr-defined]  # read by shtab
    parser.add_argument(
        "--variant", choices=("baseline", "candidate"), default="candidate", help="whose server; default: candidate"
    )
    parser.add_argument(
        "--layers", metavar="REGEX", help="only layers in whose module name this is found; default: every linear layer"
    )
    parser.add_argument(
        "--rows",
        metavar="N",
        type=int,
        action="append",
        default=[],
        help="rows (requests decoding together) of a step; repeatable; default: those of the decode workloads",
    )
    parser.add_argument("--steps", metavar="N", type=int, default=2, help="decode steps of each row count; default: 2")
    parser.add_argument(
        "--input-len",
        metavar="N",
        type=int,
        help="prompt tokens of a request, more than the rows of any step; default: 64, or as many as the rows need",
    )
    parser.add_argument(
        "--weights",
        choices=("copy", "made"),
        default="copy",
        help="made: store no weights; who replays makes random ones of their sizes; default: copy",
    )
    parser.add_argument(
        "--most-gib", metavar="G", type=float, default=16.0, help="most that may be written, GiB; default: 16"
    )
    parser.set_defaults(action="replay capture")


def add_actions(actions: Any, files: dict[str, str], directories: dict[str, str]) -> None:
    """Add the actions to the subparsers of `replay`.

    Args:
        actions: What `add_subparsers` gave.
        files: How a completion script completes a file.
        directories: And a folder.
    """
    raw = argparse.RawDescriptionHelpFormatter

    def add(name: str, short: str, description: str, epilog: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(
            name, help=short, description=description, epilog=epilog + "\n" + EXIT_CODES, formatter_class=raw
        )
        made.set_defaults(action=f"replay {name}")
        return made

    def completed(action: argparse.Action, how: dict[str, str]) -> None:
        action.complete = how  # type: ignore[attr-defined]  # read by shtab

    def replaying(parser: argparse.ArgumentParser) -> None:
        completed(parser.add_argument("capture", metavar="CAPTURE", type=Path, help="folder of a capture"), directories)
        parser.add_argument(
            "--rows", metavar="M", type=int, action="append", default=[], help="repeatable; default: the capture's"
        )
        parser.add_argument(
            "--python", metavar="PYTHON", help="interpreter with torch, as server.python in a spec; default: this one"
        )
        parser.add_argument(
            "--kernels", metavar="DIR", action="append", default=[], help="kernel folder for its path; repeatable"
        )
        parser.add_argument(
            "--env", metavar="NAME=VALUE", action="append", default=[], help="for the replay; repeatable"
        )
        parser.add_argument(
            "--device",
            choices=("cuda", "cpu"),
            default="cuda",
            help="cpu: without graphs, clocks and power; default: cuda",
        )
        parser.add_argument(
            "--weights-by",
            metavar="FUNCTION",
            default=f"{DENSE}:weights",
            help="makes the weights of a capture that has none; default: dense ones",
        )
        parser.add_argument(
            "--reference",
            metavar="FUNCTION",
            help="gives what results must be; default: what the server had, else float64 for dense layers, else production",
        )
        parser.add_argument(
            "--tolerance", metavar="E", type=float, default=0.01, help="relative error allowed, default: 0.01"
        )
        parser.add_argument("--seconds", metavar="S", type=float, default=3.0, help="of each segment, default: 3")
        parser.add_argument("--pause", metavar="S", type=float, default=1.0, help="between segments, default: 1")
        output = parser.add_argument("-o", "--output", metavar="DIR", type=Path, default=Path("results"))
        output.help = "default: results"
        completed(output, directories)

    def production(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--production", metavar="FUNCTION", default=f"{DENSE}:linear", help="what serves now; default: dense layers"
        )

    def calibrated(parser: argparse.ArgumentParser) -> None:
        completed(
            parser.add_argument(
                "--calibration", metavar="FILE", type=Path, help="of replay calibrate: replay with spins, too"
            ),
            files,
        )

    sizes = add(
        "synthesize",
        "make a capture of sizes alone",
        "Write a capture without tensors, of a model's sizes: hybrid-27b (257 projections), qwen3-8b, or a YAML file with "
        "name, dtype and blocks of layers. Who replays it makes random weights and inputs.",
        "example: abharness replay synthesize hybrid-27b -o captures/27b --rows 1 --rows 16\n",
    )
    sizes.add_argument("sizes", metavar="SIZES", help="hybrid-27b, qwen3-8b or a file")
    completed(sizes.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="new"), directories)
    sizes.add_argument("--rows", metavar="M", type=int, action="append", default=[], help="repeatable; default: 1")

    show = add(
        "show",
        "print what is in a capture or a replay",
        "Print the layers of a capture by shape, or the tables of a replay.",
        "example: abharness replay show captures/27b\n",
    )
    completed(show.add_argument("folder", metavar="DIR", type=Path, help="of a capture or a replay"), directories)

    run = add(
        "run",
        "replay candidates",
        "Replay the whole step of a capture as one CUDA graph, for production and each candidate: each is held against the "
        "reference first, then replayed for seconds, with clock and power beside its time. With a calibration, also with "
        "spins that stand for what a server does between the layers.",
        FUNCTIONS
        + "example: abharness replay run captures/27b --kernels kernels/pq2 --weights-by pq2.replaying:weights "
        "--reference pq2.replaying:reference --production pq2.replaying:legacy --candidate tuned=pq2.replaying:tuned\n",
    )
    replaying(run)
    production(run)
    run.add_argument(
        "--candidate", metavar="NAME=FUNCTION", action="append", default=[], help="one to compare; repeatable"
    )
    calibrated(run)

    calibrate = add(
        "calibrate",
        "size the spins from a served run",
        "From a run whose decode steps were traced: how long the server is at something else before each layer. Replayed "
        "with spins of several lengths, and the length is told at which power, or the clock where that moves, is the "
        "server's. It holds for this card, power limit and model.",
        FUNCTIONS + "example: abharness replay calibrate captures/8b --serving results/pq2-ring/RUN --variant baseline "
        "--kernels kernels/pq2 --production pq2.replaying:legacy\n",
    )
    replaying(calibrate)
    production(calibrate)
    completed(
        calibrate.add_argument("--serving", metavar="RUN", type=Path, required=True, help="folder of a run"),
        directories,
    )
    calibrate.add_argument(
        "--variant",
        choices=("baseline", "candidate"),
        default="baseline",
        help="that runs production; default: baseline",
    )

    tune = add(
        "tune",
        "rank options by shape",
        "Replay production, every option, production again. All shapes are tuned in one graph: each runs its own option. "
        "Where production moved between its two segments, nothing is ranked. An option whose results are not production's "
        "bit for bit is marked.",
        FUNCTIONS
        + "example: abharness replay tune captures/27b --kernels kernels/pq2 --weights-by pq2.replaying:weights "
        "--function pq2.replaying:tuned --options pq2.replaying:options --table pq2.replaying:table --to sm_90.json\n",
    )
    replaying(tune)
    tune.add_argument("--function", metavar="FUNCTION", required=True, help="makes a call; without options: production")
    tune.add_argument("--options", metavar="FUNCTION", required=True, help="gives the options of a layer's shape")
    tune.add_argument("--most", metavar="N", type=int, help="options of a shape, at most; default: all")
    tune.add_argument("--exact", action="store_true", help="choose only what is bit-identical to production")
    tune.add_argument("--table", metavar="FUNCTION", help="makes a dispatch table of what was chosen")
    completed(tune.add_argument("--to", metavar="FILE", type=Path, help="where the table is written"), files)
    calibrated(tune)

    validate = add(
        "validate",
        "hold predictions against a serving A/B",
        "Put the change of a token's time that a replay predicts, without and with spins, beside what a run of the same "
        "switch measured, at every row count that both have. The error is in percentage points.",
        "example: abharness replay validate results/replay-8b/STAMP-run --candidate tuned --serving results/pq2-ring/RUN\n",
    )
    completed(validate.add_argument("replay", metavar="REPLAY", type=Path, help="folder of replay run"), directories)
    validate.add_argument("--candidate", metavar="NAME", required=True, help="the candidate of the replay")
    completed(
        validate.add_argument("--serving", metavar="RUN", type=Path, required=True, help="folder of the run"),
        directories,
    )

    positions = add(
        "positions",
        "time a candidate's positions in any trace",
        "Find the whole steps of a candidate in a trace of torch's profiler or Nsight Systems, of a server or of a replay, "
        "and print the time of each shape beside the replay's.",
        "example: abharness replay positions server.sqlite results/replay-8b/STAMP-run --candidate production --rows 1\n",
    )
    completed(
        positions.add_argument("trace", metavar="FILE", type=Path, help="a trace, as abharness trace reads"), files
    )
    completed(positions.add_argument("replay", metavar="REPLAY", type=Path, help="folder of replay run"), directories)
    positions.add_argument("--candidate", metavar="NAME", required=True, help="whose kernels are looked for")
    positions.add_argument("--rows", metavar="M", type=int, default=1, help="rows of the replay's step, default: 1")
