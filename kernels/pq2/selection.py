"""Names and shapes of a checkpoint -> which modules become PQ2 and which stay, and why; checks without weights.

A module becomes PQ2 where its `.weight` is a matrix and its name says that it is a linear layer (`q_proj`, `down_proj`,
`in_proj_qkv`: anything with `_proj`), the token embedding (`embed_tokens`) or the head (`lm_head`). It stays as it is

* where `--keep` names it, or `--no-embedding`, `--no-head`;
* where it has fewer than 256 rows: gates and routers, which decide much and weigh little. Modules that vLLM fuses into
  one count together, so that a small k_proj goes the way of its q_proj;
* among the routed experts of a mixture, and in vision and audio towers: the plugin serves the linear layers of a
  language model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pq2.errors import FormatError
from pq2.format import GROUP
from pq2.quantize import check_rotation

MIN_ROWS = 256
"""Rows under which a linear layer stays: PQ2 saves little there, and gates are sensitive."""
FUSED_INTO = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "in_proj_qkv": "in_proj_qkvz",
    "in_proj_z": "in_proj_qkvz",
    "in_proj_b": "in_proj_ba",
    "in_proj_a": "in_proj_ba",
}
"""Modules that vLLM multiplies by as one matrix, stacked along N, and what it calls that."""
FUSED = tuple(
    tuple(part for part, into in FUSED_INTO.items() if into == whole) for whole in dict.fromkeys(FUSED_INTO.values())
)
"""Siblings of one layer of vLLM's: PQ2 all of them or none, with equal signs."""
ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")
"""Layers that tensor parallelism cuts along K; the others are cut along N, by whole rows."""
EMBEDDING = "embed_tokens"
HEAD = "lm_head"

_LINEAR = re.compile(r".+_proj(_.+)?")
_TOWERS = {"visual", "vision_tower", "vision_model", "audio_tower", "audio_model"}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for.

    Attributes:
        keep: Expressions; a module whose name one of them is found in stays.
        embedding: Whether the token embedding becomes PQ2.
        head: Whether the head does; None: yes, or as the embedding where the two are tied.
    """

    keep: Sequence[re.Pattern[str]] = ()
    embedding: bool = True
    head: bool | None = None


@dataclass(slots=True)
class Selection:
    """What becomes of the modules that could be PQ2.

    Attributes:
        converted: Module -> N and K.
        kept: Module -> why it stays; every module that has a weight of two or more dimensions and is not PQ2.
    """

    converted: dict[str, tuple[int, int]] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


def last(module: str) -> str:
    """The last part of a module's name: its kind."""
    return module.rpartition(".")[2]


def fused_with(module: str) -> tuple[str, ...]:
    """All modules that vLLM would fuse with this one, itself included; (module,) where there are none."""
    parent, dot, kind = module.rpartition(".")
    for kinds in FUSED:
        if kind in kinds:
            return tuple(f"{parent}{dot}{sibling}" for sibling in kinds)
    return (module,)


def select(shapes: Mapping[str, Sequence[int]], tied: bool, wishes: Wishes) -> Selection:
    """Apply the rule of this module.

    Args:
        shapes: Shape of every tensor of the checkpoint.
        tied: Whether the head is the embedding.
        wishes: What was asked for.

    Raises:
        FormatError: Wishes that contradict each other, an expression that keeps part of a fused layer or nothing at
            all, or nothing left to convert.
    """
    modules = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith(".weight")}
    _check_wishes(modules, tied, wishes)
    selection = Selection()
    for module, shape in modules.items():
        if len(shape) < 2:
            continue
        reason = _reason_to_keep(module, modules, wishes)
        if reason is None:
            selection.converted[module] = (shape[0], shape[1])
        else:
            selection.kept[module] = reason
    if tied and not any(last(module) == EMBEDDING for module in selection.converted):
        selection.kept.setdefault(HEAD, "it is the embedding, which stays")
    if not selection.converted:
        raise FormatError(
            f"nothing to convert: no matrix of this checkpoint is named *_proj, {EMBEDDING} or {HEAD} and is not kept"
        )
    check_fused(selection.converted, modules)
    return selection


def check_fused(converted: Iterable[str], modules: Iterable[str]) -> None:
    """Whether fused layers are PQ2 as a whole.

    Raises:
        FormatError: Some of a layer's parts are and some are not.
    """
    pq2, present = set(converted), set(modules)
    for module in sorted(pq2):
        rest = [sibling for sibling in fused_with(module) if sibling in present - pq2]
        if rest:
            raise FormatError(
                f"{', '.join(rest)}: vLLM fuses this with {module}, which is PQ2: convert all of a fused layer or none "
                f"(keep the others too)"
            )


def check_groups(converted: Mapping[str, tuple[int, int]], block: int | None, parts: int) -> None:
    """Whether groups of 128, the rotation and tensor parallelism fit every layer.

    Args:
        converted: Module -> N and K.
        block: Block of the rotation, or None.
        parts: Tensor-parallel ranks.

    Raises:
        FormatError: With the first layer that does not fit, and how many more there are.
    """
    odd = [module for module, (_, k) in converted.items() if k % GROUP]
    if odd:
        k = converted[odd[0]][1]
        more = f" (and {len(odd) - 1} more modules)" if len(odd) > 1 else ""
        raise FormatError(
            f"{odd[0]}{more}: K is {k}: PQ2 stores rows in groups of {GROUP} weights, so it must be a multiple of "
            f"{GROUP}; leave such modules as they are with --keep REGEX, --no-embedding, --no-head"
        )
    for module, (_, k) in converted.items():
        ranks = parts if last(module) in ROW_PARALLEL else 1
        if block is not None:
            check_rotation(k, block, ranks, module)
        if k % (ranks * GROUP):
            whole = [str(p) for p in range(1, k // GROUP + 1) if (k // GROUP) % p == 0]
            raise FormatError(
                f"{module}: {ranks} tensor-parallel ranks would cut a group of {GROUP} weights: K is {k}, {k // GROUP} "
                f"groups; ranks that cut between groups: {', '.join(whole)}"
            )


def _check_wishes(modules: Mapping[str, Sequence[int]], tied: bool, wishes: Wishes) -> None:
    if tied and wishes.head is not None and wishes.head != wishes.embedding:
        raise FormatError(
            "the head of this model is its embedding (tie_word_embeddings): both become PQ2 or neither; give "
            f"{'--embedding --head' if wishes.head else '--no-embedding --no-head'}, or no option for the head"
        )
    for pattern in wishes.keep:
        if not any(pattern.search(module) for module in modules):
            raise FormatError(f"--keep {pattern.pattern}: no module of this checkpoint has that in its name")


def _reason_to_keep(module: str, modules: Mapping[str, Sequence[int]], wishes: Wishes) -> str | None:
    kind, parts = last(module), set(module.split("."))
    if any(pattern.search(module) for pattern in wishes.keep):
        return "--keep"
    if kind == EMBEDDING:
        return None if wishes.embedding else "--no-embedding"
    if kind == HEAD:
        return "--no-head" if wishes.head is False else None
    if len(modules[module]) != 2 or not _LINEAR.fullmatch(kind):
        return "no linear layer by its name and shape"
    if parts & _TOWERS:
        return "not part of the language model"
    if "experts" in parts:
        return "a routed expert"
    rows = sum(modules[sibling][0] for sibling in fused_with(module) if sibling in modules)
    return None if rows >= MIN_ROWS else f"fewer than {MIN_ROWS} rows"
