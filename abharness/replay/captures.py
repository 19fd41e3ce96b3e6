"""What a capture is on disk: the linear layers of a decode step in model order, their inputs, and where weights are.

    DIR/capture.json             this model: positions, layers, files
    DIR/rows-8.safetensors       inputs `<position>.x.<step>` [rows, K], results `<position>.y.<step>` [rows, N]
    DIR/weights-00001.safetensors  tensors `<layer>/<tensor>`, as they are after loading ("prepared")

A capture whose weights are "made" holds no tensors of them: who replays it makes random ones of these sizes. One without
files for a row count has no inputs for it: random ones are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from abharness.base import Model
from abharness.errors import RecordError, UsageError
from abharness.storage import read_json, write_model

CAPTURE_FILE = "capture.json"
CAPTURE_VERSION: Literal[1] = 1

Size = Annotated[int, Field(ge=1, lt=2**31, strict=True)]


class StoredTensor(Model):
    """One tensor of a layer.

    Attributes:
        file: Name of the safetensors file beside `capture.json`.
        key: Its name in that file.
        shape: Its sizes.
        dtype: As torch names it, `bfloat16`.
    """

    file: str
    key: str
    shape: tuple[Annotated[int, Field(ge=0, strict=True)], ...]
    dtype: str


class Layer(Model):
    """A linear layer.

    Attributes:
        name: The module's name in the model.
        kind: Its class, `QKVParallelLinear`.
        method: Class of the quantisation method that multiplies, `UnquantizedLinearMethod`.
        n: Columns of its result.
        k: Columns of its input.
        bias: Whether a bias is added.
        tensors: Its parameters and buffers after loading, by name; none where weights are made.
        loaded: The tensors are as loaded, not as prepared: what was prepared of them is no tensor of the layer, as are
            the packed weights of vLLM on a CPU.
    """

    name: Annotated[str, Field(min_length=1)]
    kind: str
    method: str
    n: Size
    k: Size
    bias: bool = False
    tensors: dict[str, StoredTensor] = {}
    loaded: bool = False

    @property
    def shape(self) -> str:
        """`NxK`, by which layers are alike."""
        return f"{self.n}x{self.k}"


class Capture(Model):
    """The linear layers of a decode step.

    Attributes:
        schema_version: Of this file.
        name: What it is a capture of; names the folder of its results.
        source: A running server, or sizes alone.
        weights: Whether the weights are in the files, or made by who replays.
        dtype: Of inputs and results, as torch names it.
        rows: Row counts (tokens of a step).
        steps: Different decode steps of each row count whose inputs are there; 0 where inputs are made.
        order: Names of layers, in the order of their calls in one step; one that is called twice is there twice.
        layers: Every layer.
        files: Row count -> name of the file with its inputs.
        left_out: Layers that were asked for and are not there, with the reason.
        server: How the server was started and what it was: argv, environment, versions, GPU; empty for sizes alone.
    """

    schema_version: Literal[1] = CAPTURE_VERSION
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
    source: Literal["server", "sizes"]
    weights: Literal["copied", "made"]
    dtype: Literal["bfloat16", "float16", "float32"]
    rows: Annotated[tuple[Size, ...], Field(min_length=1)]
    steps: Annotated[int, Field(ge=0, strict=True)]
    order: Annotated[tuple[str, ...], Field(min_length=1)]
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    files: dict[int, str] = {}
    left_out: dict[str, str] = {}
    server: dict[str, object] = {}

    @property
    def positions(self) -> list[Layer]:
        """The layer of every call of a step, in order."""
        by_name = {layer.name: layer for layer in self.layers}
        return [by_name[name] for name in self.order]

    def shapes(self) -> dict[str, int]:
        """`NxK` -> calls of that shape in a step, in the order in which they come first."""
        return dict(Counter(layer.shape for layer in self.positions))


def require_new(folder: Path) -> None:
    """Refuse a folder that a capture would be written over.

    Raises:
        UsageError: It is a file, or not empty.
    """
    hint = "name a new or empty folder with -o; nothing is overwritten"
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"-o {folder}: not a folder", hint=hint)
    if folder.is_dir() and any(folder.iterdir()):
        raise UsageError(f"-o {folder}: not empty", hint=hint)


def write_capture(folder: Path, capture: Capture) -> None:
    """Write `capture.json`, last: a folder that has one is whole."""
    write_model(folder / CAPTURE_FILE, capture)


def read_capture(folder: Path) -> Capture:
    """Read a capture and look that its files are there.

    Raises:
        UsageError: The folder holds none.
        RecordError: It is damaged, of another version, or a file is missing.
    """
    path = folder / CAPTURE_FILE
    if not path.is_file():
        raise UsageError(
            f"{folder} holds no capture (no {CAPTURE_FILE})",
            hint="make one: abharness replay capture SPEC.yaml -o DIR, or abharness replay synthesize -o DIR",
        )
    data = read_json(path)
    if data.get("schema_version") != CAPTURE_VERSION:
        raise RecordError(
            f"{path}: schema version {data.get('schema_version')!r}; this abharness reads {CAPTURE_VERSION}"
        )
    try:
        capture = Capture.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RecordError(f"{path}: {place}: {first['msg']}", hint="capture again") from error
    names = [layer.name for layer in capture.layers]
    problems = [f"layer {name} is there twice" for name, count in Counter(names).items() if count > 1]
    problems += [f"{name} is called, and is no layer of it" for name in capture.order if name not in names]
    problems += [f"no file {name}" for name in _files(capture) if not (folder / name).is_file()]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RecordError(f"{path}: {problems[0]}{more}", hint="capture again")
    return capture


def _files(capture: Capture) -> Sequence[str]:
    tensors = (tensor.file for layer in capture.layers for tensor in layer.tensors.values())
    return sorted({*capture.files.values(), *tensors})
