"""Launch configurations as data: (architecture, rows, N, K) -> the paths to try, in order, and how each is launched.

A table is a JSON file `tables/ARCH.json`, made by `python -m pq2.tune` or by hand:

    {"tuned": {"8": {"default": [ENTRY, ...], "5120x6144": [ENTRY, ...]}, "16": ...}, "exact": {...}}

`tuned` and `exact` are kernel sets; a key below is a number of rows, and serves all numbers up to it that a smaller key
does not (`any` serves all others); `NxK` is a weight. An entry names its path and the fields of that path's launch:
{"path": "single", "block_n": 4, "block_g": 32, "num_warps": 1}.

The rule for a weight that a table does not have: the entries of the weight with the same K whose N is nearest, by ratio;
then the default. In any case the default follows, as those entries may be switched off or may not take the shape. An
architecture without a table takes sm_86's, whose kernels need nothing that a later GPU lacks.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterator
from importlib import resources
from typing import Any, NamedTuple

from pq2.errors import FormatError

FALLBACK = "sm_86"
ANY = sys.maxsize
"""The number of rows that a table calls `any`."""


class Single(NamedTuple):
    """`single.single`, in plain Triton."""

    block_n: int
    block_g: int
    num_warps: int


class SingleRing(NamedTuple):
    """`single_ring.single_ring`; `per_sm` are its programs on a multiprocessor."""

    rows: int
    lanes: int
    warps_n: int
    warps_k: int
    stages: int
    per_sm: int


class Direct(NamedTuple):
    """`direct.direct`."""

    block_n: int
    warps_k: int
    warps_n: int
    sg: int


class Ring(NamedTuple):
    """`ring.ring`; `per_sm` are its programs on a multiprocessor."""

    block_n: int
    warps_k: int
    warps_n: int
    sg: int
    stages: int
    keep: int
    split: int
    registers: int
    per_sm: int


class Prefill(NamedTuple):
    """`prefill.prefill`."""

    block_m: int
    block_n: int
    warps_m: int
    warps_n: int
    stages: int
    band: int


class PrefillWgmma(NamedTuple):
    """`prefill_wgmma.prefill_wgmma`; `per_sm` are its programs on a multiprocessor."""

    block_m: int
    consumers: int
    stages: int
    sg: int
    split: int
    band: int
    per_sm: int


Launch = Single | SingleRing | Direct | Ring | Prefill | PrefillWgmma


class Kind(NamedTuple):
    """What an entry's `path` stands for.

    Attributes:
        launch: Its fields.
        switch: The path whose switch turns it on.
        gluon: Whether it is written in Gluon, which Triton's interpreter does not run.
        k_multiple: K must be a multiple of it.
        rows: The fewest rows it takes, and the most.
    """

    launch: type[Launch]
    switch: str
    gluon: bool
    k_multiple: int
    rows: tuple[int, int]


KINDS = {
    "single": Kind(Single, "single", False, 128, (1, 1)),
    "single_ring": Kind(SingleRing, "single", True, 1024, (1, 1)),
    "direct": Kind(Direct, "small", True, 128, (1, 16)),
    "ring": Kind(Ring, "ring", True, 1024, (1, 16)),
    "prefill": Kind(Prefill, "prefill", True, 128, (1, ANY)),
    "prefill_wgmma": Kind(PrefillWgmma, "prefill", True, 256, (1, ANY)),
}
"""What an entry may name as its path."""


class Entry(NamedTuple):
    """One way to multiply."""

    path: str
    launch: Launch

    @property
    def kind(self) -> Kind:
        """What the path stands for."""
        return KINDS[self.path]

    @property
    def counter(self) -> str:
        """The counter of its calls: `single_ring` is how `single` is tuned, and `prefill_wgmma` is sm_90's `prefill`."""
        return self.path.removesuffix("_ring").removesuffix("_wgmma")


def rows_name(rows: int) -> str:
    """What a table calls a number of rows."""
    return "any" if rows == ANY else str(rows)


def read_entry(fields: dict[str, Any]) -> Entry:
    """An entry of a table.

    Raises:
        FormatError: An unknown path, or fields that are not those of its launch.
    """
    path = fields.get("path")
    if path not in KINDS:
        raise FormatError(f"launch table: path {path!r}: there are {', '.join(KINDS)}")
    launch = KINDS[path].launch
    given = {name: value for name, value in fields.items() if name != "path"}
    if set(given) != set(launch._fields) or not all(type(value) is int for value in given.values()):
        raise FormatError(f"launch table: {fields}: {path} has {', '.join(launch._fields)}, integers")
    return Entry(path, launch(**given))


def write_entry(entry: Entry) -> dict[str, Any]:
    """An entry as a table has it."""
    return {"path": entry.path, **entry.launch._asdict()}


Weights = dict[str, list[Entry]]
Table = dict[str, dict[int, Weights]]


def read_table(text: str) -> Table:
    """A table: kernel set -> most rows -> weight (`NxK` or `default`) -> entries.

    Raises:
        FormatError: An entry is not one, or a number of rows has no default.
    """
    found: Table = {}
    for kernel_set, by_rows in json.loads(text).items():
        found[kernel_set] = {}
        for rows, weights in by_rows.items():
            if "default" not in weights:
                raise FormatError(f"launch table: {kernel_set}, {rows} rows: no default")
            found[kernel_set][ANY if rows == "any" else int(rows)] = {
                weight: [read_entry(fields) for fields in entries] for weight, entries in weights.items()
            }
    return found


@functools.cache
def table(arch: str) -> tuple[str, Table]:
    """The table for an architecture (`sm_90`), and the architecture that it was made for."""
    folder = resources.files("pq2") / "tables"
    own = folder / f"{arch}.json"
    name = arch if own.is_file() else FALLBACK
    return name, read_table((folder / f"{name}.json").read_text(encoding="utf-8"))


def candidates(arch: str, kernel_set: str, m: int, n: int, k: int) -> Iterator[Entry]:
    """Entries for a product of m rows with a weight [n, k], the one to prefer first; none where the table ends before m."""
    by_rows = table(arch)[1].get(kernel_set, {})
    weights = next((by_rows[rows] for rows in sorted(by_rows) if m <= rows), None)
    if weights is None:
        return
    same_k = [name for name in weights if name.endswith(f"x{k}")]
    if same_k:
        yield from weights[min(same_k, key=lambda name: abs(math.log(int(name.partition("x")[0]) / n)))]
    yield from weights["default"]
