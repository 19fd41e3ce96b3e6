"""Lies about the work that was done, the answers, and what else differed."""

from __future__ import annotations

from typing import Any

from tests.lies.battery import DECODE, GSM8K, Lie, Setup
from tests.lies.switches import PLUGIN, WRAPPED, env, faults, in_candidate, wrapped


def cell_lie(name: str, concludes: str, code: str, says: str, **orders: dict[str, Any]) -> Lie:
    return Lie(name, concludes, 3, code, says, lie=faults(**orders))


MEASURED = {"from": 1, "at_least_max_tokens": 4}  # request 0 is the first completion, at readiness
JIT_LINE = "Triton kernel JIT compilation during inference: fused_kernel. This causes a latency spike."
GRAPH_LINE = "Compiling a graph for compile range (17, 17) takes 3.21 s"

LOAD = (
    cell_lie(
        "shorter outputs", "the candidate is faster", "output_tokens_mismatch", r"short outputs: 4 of 4",
        short_outputs=in_candidate(tokens=2, at_least_max_tokens=4),
    ),
    cell_lie(
        "one output of four is shorter", "the candidate is faster", "output_tokens_mismatch", r"short outputs: 1 of 4",
        short_outputs=in_candidate(tokens=2, requests=[2]),
    ),
    cell_lie(
        "shorter outputs, and usage claims the length that was asked", "the candidate is faster",
        "output_tokens_mismatch", r"/metrics counted 8 output tokens, the client 16 in 4 requests",
        short_outputs=in_candidate(tokens=2, claims=4, at_least_max_tokens=4),
    ),
    cell_lie(
        "longer outputs", "the candidate does more tokens a second", "output_tokens_mismatch",
        r"outputs of another length: 4 of 4", long_outputs=in_candidate(tokens=8, at_least_max_tokens=4),
    ),
    cell_lie(
        "longer prompts", "the candidate is slower", "prompt_tokens_mismatch", r"19 prompt tokens instead of 16",
        extra_prompt_tokens=in_candidate(3),
    ),
    cell_lie(
        "no usage in one variant", "the token counts are as asked", "incomplete_requests", r"4 of 4 requests failed",
        missing_usage=in_candidate(**MEASURED),
    ),
    cell_lie(
        "usage is missing now and then", "the token counts are as asked", "incomplete_requests",
        r"2 of 4 requests failed", missing_usage=in_candidate(requests=[2, 4]),
    ),
    cell_lie(
        "errors inside the stream", "the candidate is faster", "incomplete_requests", r"2 of 4 requests failed",
        stream_error=in_candidate(requests=[1, 3]),
    ),
    cell_lie(
        "streams that close early", "the candidate is faster", "incomplete_requests", r"1 of 4 requests failed",
        stream_close=in_candidate(requests=[3], after_tokens=3),
    ),
    cell_lie(
        "errors that come back quickly", "the candidate is faster", "incomplete_requests", r"3 of 4 requests failed",
        http_errors=in_candidate(requests=[1, 2, 3]),
    ),
    cell_lie(
        "prompts from the prefix cache", "the candidate's prefill is faster", "prefix_cache_hits",
        r"came from the prefix cache", prefix_hits=in_candidate(0.5),
    ),
    cell_lie(
        "another client is served meanwhile", "the candidate is slower", "prompt_tokens_mismatch",
        r"the server did other work than the client asked for: /metrics counted \d+ prompt tokens, the client 64",
        other_client=in_candidate(after_requests=2, requests=3),
    ),
    cell_lie(
        "a kernel is compiled while a cell is timed, and logged", "the candidate is slower", "jit_in_window",
        r"JIT compilation during inference", jit=in_candidate(requests=[3], line=JIT_LINE),
    ),
    cell_lie(
        "a kernel is compiled while a cell is timed, without a word", "the candidate is slower", "jit_in_window",
        r"TRITON_CACHE_DIR/LATE/kernel.json", jit=in_candidate(requests=[3], file="TRITON_CACHE_DIR/LATE/kernel.json"),
    ),
    cell_lie(
        "a graph is compiled while a cell is timed", "the candidate is slower", "jit_in_window",
        r"Compiling a graph for", jit=in_candidate(requests=[2], line=GRAPH_LINE),
    ),
)  # fmt: skip

ASKED = Setup(spec={**env(FAKE_TPOT_S="0.001"), "workloads": [GSM8K]})
FLOOR = Setup(spec={"workloads": [DECODE, {**GSM8K, "min_exact_match": 0.5}]})

ANSWERS = (
    Lie(
        "wrong answers", "the candidate answers as well", 1, None,
        r"answers got worse \(8 of 8 answers differ\)", ASKED, faults(answers=in_candidate(wrong=True)),
    ),
    Lie(
        "wrong answers, faster", "the candidate is faster", 3, "accuracy_below_floor",
        r"candidate answers 0 of 8 right \(0%\), the floor is 50%", FLOOR, faults(answers=in_candidate(wrong=True)),
    ),
    Lie(
        "answers cut short in one variant", "the candidate answers worse", 3, "truncation_differs",
        r"truncation_differs: .*baseline 0 of 8, candidate 8 of 8", ASKED, faults(answers=in_candidate(truncated=True)),
    ),
    Lie(
        "answers that are errors", "the candidate answers worse", 3, "incomplete_requests",
        r"8 of 8 requests failed", ASKED,
        faults(http_errors=in_candidate(requests=list(range(1, 9)))),
    ),
)  # fmt: skip

SITECUSTOMIZE = """\
import os, sys
if os.environ.get("FAKE_SWITCH"):
    sys.path.append("@TMP@/newer")
"""
TORCH = "Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n"

# The plugin brings the package into every process, as the model code does.
UPGRADED = Setup(
    spec={"server": {"python": "@TMP@/bin/python", "env": {"VLLM_PLUGINS": None}}},
    files={
        **WRAPPED.files,
        "site/my_kernels.py": "import torch\n\ndef register(): pass\n",
        "site/torch/__init__.py": "__version__ = '2.10.0'\n",
        "site/torch-2.10.0.dist-info/METADATA": TORCH.replace("2.11", "2.10"),
    },
).over(PLUGIN)
UPGRADE = (
    "mv @TMP@/site/torch-2.10.0.dist-info @TMP@/site/torch-2.11.0.dist-info && "
    "sed -i s/2.10/2.11/ @TMP@/site/torch/__init__.py @TMP@/site/torch-2.11.0.dist-info/METADATA"
)


def differs(name: str, says: str, honest: Setup, lie: Setup) -> Lie:
    return Lie(name, "the switch made the difference", 3, "undeclared_difference", says, honest, lie)


DIFFERENCES = (
    differs(
        "a wrapper sets another variable in one variant", r"OMP_NUM_THREADS", WRAPPED,
        wrapped('[ -n "$FAKE_SWITCH" ] && export OMP_NUM_THREADS=1'),
    ),
    differs(
        "a wrapper drops a variable in one variant", r"VLLM_NO_USAGE_STATS", WRAPPED,
        wrapped('[ -n "$FAKE_SWITCH" ] && unset VLLM_NO_USAGE_STATS'),
    ),
    differs(
        "a wrapper adds an argument in one variant", r"max.num.seqs", WRAPPED,
        wrapped('[ -n "$FAKE_SWITCH" ] && set -- "$@" --max-num-seqs 1'),
    ),
    differs(
        "another package version in one variant", r"version.torch: baseline \(absent\); candidate '2.11.0'",
        Setup(spec=env(PYTHONPATH="@TMP@/site:@SITE@"), files={"newer/torch-2.11.0.dist-info/METADATA": TORCH}),
        Setup(files={"site/sitecustomize.py": SITECUSTOMIZE}),
    ),
    differs(
        "a package is upgraded between the launches", r"torch", UPGRADED,
        wrapped(f"[ -n \"$FAKE_SWITCH\" ] && {{ {UPGRADE}; }}"),
    ),
    differs(
        "the server resolves another setting than declared", r"max_num_batched_tokens", Setup(),
        faults(config=in_candidate(**{"scheduler_config.max_num_batched_tokens": 8192})),
    ),
    differs(
        "the server reads another variable otherwise", r"VLLM_CPU_KVCACHE_SPACE", Setup(),
        faults(vllm_env=in_candidate(VLLM_CPU_KVCACHE_SPACE=40)),
    ),
)  # fmt: skip

LIES = (*LOAD, *ANSWERS, *DIFFERENCES)
