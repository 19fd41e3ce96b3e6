"""The capture plugin from outside: brought to a server, told what to do, and heard.

SITE/abharness_capture/            the plugin, on the server's PYTHONPATH
EXCHANGE/config.json               what to capture; the path is in ABHARNESS_CAPTURE
EXCHANGE/armed                     the row count whose steps are to be taken now
EXCHANGE/status-<pid>.json         what each process has to say
DIR/weights-*, DIR/rows-*          what it writes; without a capture.json they are nothing
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from abharness.errors import AbharnessError, LaunchError, UsageError
from abharness.probe import write_metadata
from abharness.storage import read_json, write_json, write_text_atomic

PLUGIN = "abharness_capture"
"""Name of the plugin among vLLM's general plugins."""
_MODULE = "capture_plugin"
_FILES = (f"{_MODULE}.py", "capture_status.py", "capture_steps.py", "capture_files.py", "capture_recorder.py")
_WRITTEN = ("weights-*.safetensors", "rows-*.safetensors", ".*.safetensors.part")


@dataclass(frozen=True, slots=True)
class Wish:
    """What the plugin is asked for.

    Attributes:
        layers: Regular expression, searched for in the names of modules.
        rows: Row counts.
        steps: Steps of each.
        input_len: Prompt tokens of every request.
        weights: `copy`, or `made` for no tensors of weights.
        most_bytes: Bound of everything written.
    """

    layers: str
    rows: tuple[int, ...]
    steps: int
    input_len: int
    weights: str
    most_bytes: int


class Exchange:
    """The folder through which harness and plugin talk.

    Attributes:
        config: What `ABHARNESS_CAPTURE` is to be.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.json"

    def begin(self, wish: Wish, output: Path) -> None:
        """Write down what is wanted; `output` is the folder for the tensors."""
        self.folder.mkdir()
        write_json(self.config, {**asdict(wish), "status": str(self.folder), "output": str(output.absolute())})

    def arm(self, rows: int | None) -> None:
        """Have steps of a row count taken from now on, or none."""
        if rows is None:
            (self.folder / "armed").unlink(missing_ok=True)
        else:
            write_text_atomic(self.folder / "armed", f"{rows}\n")

    def heard(self) -> list[dict[str, Any]]:
        """What every process has said at last."""
        return [read_json(path) for path in sorted(self.folder.glob("status-*.json"))]


def install(site: Path) -> None:
    """Bring the plugin to any interpreter that has `site` on its PYTHONPATH, as the probe is brought."""
    package = site / PLUGIN
    package.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent / "inside"
    (package / "__init__.py").write_text("", encoding="utf-8")
    for name in _FILES:
        shutil.copyfile(here / name, package / name)
    write_metadata(site, PLUGIN, _MODULE)


def forget(output: Path) -> None:
    """Remove what the plugin wrote into a folder."""
    for pattern in _WRITTEN:
        for path in output.glob(pattern):
            path.unlink(missing_ok=True)


def fault(said: Sequence[Mapping[str, Any]]) -> AbharnessError | None:
    """The first reason that a process gives for there being no capture."""
    for one in said:
        found = one["fault"]
        if found is not None and found["kind"] == "usage":
            return UsageError(found["message"], hint=found["hint"])
        if found is not None:
            return LaunchError(f"the capture failed in the server: {found['message']}", hint=found["hint"])
    return None


def result(said: Sequence[Mapping[str, Any]], wish: Wish) -> Mapping[str, Any]:
    """The one model that was captured, with as many steps as were asked for.

    Raises:
        LaunchError: It is none, not one, or too few steps; what was seen is in the message.
    """
    models = [one["model"] for one in said if one["model"] is not None]
    if len(models) != 1:
        seen = f"{len(models)} processes loaded one" if models else "no process with the plugin loaded one"
        raise LaunchError(
            f"no model to capture: {seen} (of {len(said)} with it)",
            hint="serve one model in one process: no data, pipeline or tensor parallelism",
        )
    (model,) = models
    missing = [rows for rows in wish.rows if str(rows) not in model["files"]]
    if missing:
        raise LaunchError(
            "; ".join(_cell_text(rows, model["cells"][str(rows)], wish.steps) for rows in missing),
            hint="rows must decode together: compare with --max-num-seqs and the room in the KV cache, and leave "
            "speculative decoding out",
        )
    return dict(model)


def _cell_text(rows: int, cell: Mapping[str, Any], steps: int) -> str:
    seen = [f"{count} x {what}" for what, count in cell["seen"].items()]
    discarded = [f"{count} x {why}" for why, count in cell["discarded"].items()]
    text = f"{cell['steps']} of {steps} decode steps of {rows} rows were captured"
    text += f"; seen besides: {', '.join(seen)}" if seen else "; no other forward pass was seen"
    return text + (f"; discarded: {', '.join(discarded)}" if discarded else "")


class Arming:
    """A reporter that arms the exchange for the phases that name a cell; the rest is told to another."""

    def __init__(self, told: Any, rows_of: Mapping[str, int], arm: Callable[[int | None], None]) -> None:
        """Begin, with nothing armed.

        Args:
            told: The reporter that everything is told to.
            rows_of: Name of a phase -> the row count that it decodes.
            arm: Called at the begin of every phase.
        """
        self._told = told
        self._rows_of = rows_of
        self._arm = arm

    def phase(self, name: str) -> None:
        """A phase of the launch begins."""
        self._arm(self._rows_of.get(name))
        self._told.phase(name)

    def warn(self, text: str, code: str | None = None) -> None:
        """A doubt; those with a code are about a measurement, and nothing is measured here."""
        if code is None:
            self._told.warn(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._told, name)
