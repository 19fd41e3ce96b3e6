"""The validity codes: what each means and does, and the checks that can be made from records alone.

A code that invalidates gives *no verdict*: for its cell if it was found in a cell, for the whole comparison otherwise.
The others are advice. Doers produce findings while they run; `compare` makes the cell checks again from raw records.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Code:
    """One validity code.

    Attributes:
        meaning: What was seen, in general terms.
        next_step: What to do about it.
        invalidates: True: no verdict while it stands.
    """

    meaning: str
    next_step: str
    invalidates: bool = True


CODES: dict[str, Code] = {
    "env_unverifiable": Code(
        "the environment of a server process could not be read whole, so the switch is not proven",
        "see which process and why in evidence.json",
    ),
    "env_mismatch": Code(
        "a server process was started with another value of a declared variable",
        "look for a typo or for code that rewrites the variable before it starts the process",
    ),
    "switch_not_recognised": Code(
        "the switch reached the process but the server does not know it, or its expected log line is missing",
        "check the name against this vLLM version",
    ),
    "plugin_not_active": Code(
        "a required plugin did not load in the processes that run the model",
        "check VLLM_PLUGINS and the plugin's entry point in the server's environment",
    ),
    "wrong_server": Code("the socket that answers is not held by the launched process tree", "free the port"),
    "foreign_gpu_process": Code("another process used the GPU", "stop it, or use another GPU"),
    "compile_cache_reused": Code(
        "a launch that should have compiled afresh loaded compiled code",
        "find the cache directory that is not under the launch's own folders",
    ),
    "prefix_cache_hits": Code(
        "prompts were served from the prefix cache", "prompts are distinct: look for a plugin or proxy that caches"
    ),
    "prompt_tokens_mismatch": Code("the server counted other prompt lengths than were sent", "see requests.jsonl"),
    "output_tokens_mismatch": Code(
        "the server generated other lengths than were asked",
        "ignore_eos or min_tokens is not honoured; see requests.jsonl",
    ),
    "incomplete_requests": Code("requests failed or answers are missing", "see the errors in the launch's record"),
    "client_bound": Code(
        "the load generator was near its own limit: it was measured, not the server",
        "give the client a core of its own, or lower the concurrency",
    ),
    "order_confounded": Code(
        "all launches of one variant came before the other's: drift counts as a difference", "use design.order abba"
    ),
    "undeclared_difference": Code(
        "the variants differ in more than what was declared", "make them equal, or compare with --allow NAME"
    ),
    "accuracy_below_floor": Code(
        "a variant's answers fell through the floor: its speed is not a gain", "look at its answers in gsm8k.jsonl"
    ),
    "launch_failed": Code("a planned launch is missing or failed", "rerun with --resume"),
    "accuracy_truncated": Code(
        "answers were cut at max_tokens and are neither right nor wrong", "raise max_tokens", invalidates=False
    ),
    "queueing": Code("requests wait in the server's queue", "raise --max-num-seqs", invalidates=False),
    "truthiness_risk": Code(
        "the variants differ only in values that a careless reader takes for the same",
        "leave the variable unset in the baseline (null)",
        invalidates=False,
    ),
}
