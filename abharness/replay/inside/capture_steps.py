"""vLLM's attention metadata -> whether a forward pass is a decode step of so many rows; needs no torch."""

from __future__ import annotations

from typing import Any

DUMMY = "a run without attention metadata (vLLM's own: profiling, warm-up)"
PROMPTS = "a step with prompt tokens"
SPECULATIVE = "a step with speculative tokens"


def decode_problem(metadata: Any, rows: int, input_len: int) -> str | None:
    """Why a forward pass is no step in which `rows` requests decode one token each, or None.

    Args:
        metadata: `attn_metadata` of the forward context: by layer name, or one of all layers.
        rows: Requests that decode.
        input_len: Tokens of their prompts: a token at or before that place is a prompt's.
    """
    if metadata is None:
        return DUMMY
    if isinstance(metadata, list | tuple):
        return "a step in microbatches"
    values = list(metadata.values()) if isinstance(metadata, dict) else [metadata]
    distinct = list({id(one): one for one in values if one is not None}.values())
    proven = False
    for one in distinct:
        problem, shown = _of_one(one, rows, input_len)
        if problem is not None:
            return problem
        proven = proven or shown
    if not proven:
        names = ", ".join(sorted({type(one).__name__ for one in distinct})) or "none"
        return f"a step of which the attention metadata ({names}) does not tell whether it decodes"
    return None


def _of_one(one: Any, rows: int, input_len: int) -> tuple[str | None, bool]:
    """What one backend's metadata says against it, and whether it shows that it is one."""
    query = _number(one, "max_query_len")
    prefills = max(_number(one, "num_prefills") or 0, _number(one, "num_prefill_tokens") or 0)
    if (query is not None and query > 1) or prefills:
        return PROMPTS, False
    if _number(one, "num_spec_decodes"):
        return SPECULATIVE, False
    tokens = _number(one, "num_actual_tokens")
    if tokens is not None and tokens != rows:
        return f"a step of {tokens} rows", False
    # Some backends count tokens and requests only where they tell prompts apart; others leave these at 0.
    counted = _number(one, "num_prefills") is not None
    decodes = _number(one, "num_decodes") if counted else None
    if decodes is not None and decodes != rows:
        return f"a step of {decodes} rows", False
    lengths: Any = getattr(one, "seq_lens", None)
    if hasattr(lengths, "tolist"):
        first = lengths.tolist()[:rows]
        if len(first) == rows and min(first) <= input_len:
            # One token of a prompt, cut off by the limit of a step, looks like a decoded one.
            return PROMPTS, False
    return None, (query == 1 and tokens == rows) or decodes == rows


def _number(one: Any, name: str) -> int | None:
    value = getattr(one, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
