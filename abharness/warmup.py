"""A cell -> its warm-up: requests that reach every shape the cell uses, with prompts that are never measured.

What compiles, tunes or captures late does so by shape: the number of sequences in a step, and the length of their
contexts. So there are two waves, each with the cell's own concurrency:

1. *batches*: prompts of the cell's length whose outputs end one token apart, so that the batch shrinks from
   `max_concurrency` to 1 and each size is run. At least `max_concurrency` requests, however few `num_warmups` asks for;
   more than that run first, as they are.
2. *contexts*, where the cell's outputs are longer than those of the first wave: prompts that leave `LAST_TOKENS` of
   the cell's context, so that its end is reached without generating all that lies before.

The cost: the first wave takes as many decode steps as the longest of its outputs (`OUTPUT_LEN`, or a little more than
`max_concurrency` where that is larger) for each `max_concurrency` of its requests; the second one prefill of
`max_concurrency` whole contexts and `LAST_TOKENS` steps. `num_warmups: 0` is no warm-up at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from abharness.plan import Shape

OUTPUT_LEN = 64
"""Longest output of the first wave, tokens, unless the concurrency asks for more."""

LAST_TOKENS = 8
"""Tokens generated at the end of the cell's context in the second wave."""

STEP_TOKENS = 2048
"""Prompt tokens that a server is taken to prefill in one step (vLLM's smallest default of max_num_batched_tokens):
the first output must not end before the last prompt is in the batch."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that are sent together, at most `max_concurrency` of the cell in flight.

    Attributes:
        name: For the label that seeds the prompts.
        input_len: Prompt tokens of each.
        output_lens: Output tokens of each, in order of submission.
    """

    name: str
    input_len: int
    output_lens: tuple[int, ...]


def waves(shape: Shape) -> list[Wave]:
    """The warm-up of a cell, in order; no request is longer than those of the cell."""
    if shape.num_warmups == 0:
        return []
    most = shape.max_concurrency
    first = max(OUTPUT_LEN - most, -(-most * shape.input_len // STEP_TOKENS) + 1) + 1
    staggered = [min(shape.output_len, first + place) for place in range(most)]
    before = [min(shape.output_len, OUTPUT_LEN)] * max(0, shape.num_warmups - most)
    found = [Wave("batches", shape.input_len, (*before, *staggered))]
    if shape.output_len > max(staggered):
        end = shape.input_len + shape.output_len - LAST_TOKENS
        found.append(Wave("contexts", end, (LAST_TOKENS,) * most))
    return found
