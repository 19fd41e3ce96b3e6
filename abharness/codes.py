"""The validity codes: what each means, what to do about it, and whether it takes the verdict away.

A code that invalidates gives *no verdict*: for its cell if it was found in a cell, for the whole comparison otherwise.
The others are advice.
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
        waivable: `compare --allow` can set it aside: a difference or a disturbance that a person may know to be
            harmless. Never a failed proof, nor work that was not done.
    """

    meaning: str
    next_step: str
    invalidates: bool = True
    waivable: bool = False


CODES: dict[str, Code] = {
    "env_unverifiable": Code(
        "a server process's environment could not be read whole, or a report not be heard: the switch is not proven",
        "see which process and why in evidence.json",
    ),
    "env_mismatch": Code(
        "a server process was started with another value of a declared variable",
        "look for a typo or for code that rewrites the variable before it starts the process",
    ),
    "switch_not_recognised": Code(
        "the switch reached the process but the server does not know it, or what it should log or report is not there",
        "check the name against this vLLM version",
    ),
    "kernel_mismatch": Code(
        "a kernel that had to run did not, or a forbidden one did",
        "see which kernels ran: abharness trace on kernels/ of the launch",
    ),
    "kernels_unverifiable": Code(
        "kernels were expected, and the traces do not show which ran",
        "see traces/ of the launch and the server's log",
        waivable=True,
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
        "prompts were served from the prefix cache",
        "prompts are distinct: look for a plugin or proxy that caches",
        waivable=True,
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
        waivable=True,
    ),
    "jit_in_window": Code(
        "something was compiled, tuned or captured inside a measured window, and its time was measured too",
        "raise num_warmups, or add the shape that was not reached to the warm-up",
        waivable=True,
    ),
    "clocks_differ": Code(
        "the GPU ran at other clocks in one variant: that difference is not the switch's, or not only",
        "lock the clocks where both variants hold them (nvidia-smi -lgc), or raise the power limit",
        waivable=True,
    ),
    "clocks_against": Code(
        "the slower variant ran at the higher clocks: they cannot be why it is slower; by how much holds at these clocks",
        "lock the clocks (nvidia-smi -lgc) to learn the size without them",
        invalidates=False,
    ),
    "throttled": Code(
        "the GPU lowered its clocks for heat or power supply", "cool the machine, or lock the clocks", waivable=True
    ),
    "telemetry_gap": Code(
        "the GPU's clocks during the window are not known",
        "see the sampling in launch.json, and whether NVML answers",
        waivable=True,
    ),
    "order_confounded": Code(
        "variant and time go together in the launches: drift counts as a difference",
        "use design.order abba",
        waivable=True,
    ),
    "undeclared_difference": Code(
        "the variants differ in more than what was declared", "make them equal", waivable=True
    ),
    "accuracy_below_floor": Code(
        "a variant's answers fell through the floor: its speed is not a gain", "look at its answers in gsm8k.jsonl"
    ),
    "aa_difference": Code(
        "an A/A found a difference: two variants that are one and the same server differ",
        "look for what else ran on the machine, then run it again with more launches; until it passes, believe no A/B here",
    ),
    "launch_failed": Code("a planned launch is missing or failed", "rerun with --resume"),
    "one_witness": Code(
        "the probe was not heard: the environment is proven by /proc alone",
        "let abharness set PYTHONPATH and VLLM_PLUGINS load abharness_probe",
        invalidates=False,
    ),
    "follows": Code(
        "resolved settings differ that are taken to follow from the declared difference",
        "look at server_info.json of both variants",
        invalidates=False,
    ),
    "effect_unproven": Code(
        "the switch was delivered, and nothing shows that the server acts on it",
        "add verify.expect_log with a line that only the switched server logs",
        invalidates=False,
    ),
    "truncation_differs": Code(
        "answers were cut at max_tokens in one variant more than in the other: which is better is not known",
        "raise max_tokens",
    ),
    "accuracy_truncated": Code(
        "answers were cut at max_tokens and are neither right nor wrong", "raise max_tokens", invalidates=False
    ),
    "power_capped": Code(
        "the power limit held one variant back more than the other", "compare their power and clocks", invalidates=False
    ),
    "host_busy": Code(
        "something else used the machine's CPUs while a cell was measured",
        "let nothing else run on the machine",
        invalidates=False,
    ),
    "preempted": Code(
        "the server ran out of KV cache and computed requests again",
        "give it more KV cache (--gpu-memory-utilization, --max-model-len), or lower max_concurrency",
        invalidates=False,
    ),
    "not_checked": Code(
        "something could not be looked at: it may be well or not", "see the message for what and why", invalidates=False
    ),
    "queueing": Code("requests wait in the server's queue", "raise --max-num-seqs", invalidates=False),
    "truthiness_risk": Code(
        "the variants differ only in flag texts that a careless reader takes for the same, and no difference was shown",
        "leave the variable unset in the baseline (null)",
        waivable=True,
    ),
}


def code_of(name: str) -> Code:
    """A code by name; one that is not known (a record of another version) invalidates."""
    return CODES.get(name) or Code(
        "a check that this abharness does not know objects", "compare with the version that wrote it"
    )
