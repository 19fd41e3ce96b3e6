"""The spec: the models of an experiment file, and what the harness keeps for itself. `specload` reads and checks it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from abharness.record import Variant

VARIANTS: tuple[Variant, Variant] = ("baseline", "candidate")

CACHE_VARIABLES: dict[str, str] = {
    "VLLM_CACHE_ROOT": "vllm",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "triton-home",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "CUDA_CACHE_PATH": "cuda",
    "TORCH_EXTENSIONS_DIR": "torch-extensions",
    "VLLM_CONFIG_ROOT": "vllm-config",
}
"""Variables that name a compile or JIT cache, each with the folder a launch gives it: new and empty every time."""

SENTINEL_VARIABLE = "ABHARNESS_LAUNCH"
"""Set to a unique value in every launch: a process whose environment block shows it was read whole."""

PROBE_VARIABLE = "ABHARNESS_PROBE_DIR"
"""Folder into which the processes of a launch report about themselves (`probe`, which must not import this)."""

PROBE_PLUGIN = "abharness_probe"
"""Name of the probe among vLLM's general plugins."""

CAPTURE_VARIABLE = "ABHARNESS_CAPTURE"
"""Configuration of the plugin that captures linear layers (`replay.inside.capture_plugin`); unset in every run."""

OWNED_VARIABLES: dict[str, str] = {
    **dict.fromkeys(CACHE_VARIABLES, "every launch gets a new, empty directory"),
    SENTINEL_VARIABLE: "it proves which launch a process belongs to",
    PROBE_VARIABLE: "the probe reports there",
    CAPTURE_VARIABLE: "abharness replay capture sets it",
    "SPT_NOENV": "it keeps renamed processes readable",
    "TMPDIR": "every launch gets its own",
}

OWNED_ARGS: dict[str, str] = {
    "--host": "servers are bound to loopback",
    "--port": "set server.port",
    "--served-model-name": "a unique name proves which server answers",
    "--model": "set server.model",
    "--uds": "servers are bound to loopback",
    "--config": "a file of arguments would hide the difference between the variants",
    "--profiler-config": "the trace section asks for traces",
}

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, StringConstraints(pattern=_NAME, max_length=80)]
Count = Annotated[int, Field(ge=1, strict=True)]
Env = dict[str, str | None]


def kernel_name(folder: str) -> str:
    """Name of the package, and of the plugin, in a kernel folder: the folder's own."""
    return PurePath(folder).name


_PRIMARY = r"([^\[\]/]+)(?:\[([0-9]{1,18})\])?/([A-Za-z0-9_]+)"
"""`design.primary`: workload, which of its cells, metric."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class ServerSpec(_Strict):
    """What both variants share.

    Attributes:
        model: A local path (relative to the working directory), a hub name, or `managed:smollm2`.
        python: Interpreter that has vLLM: null is the one running abharness, else a path, `managed:cpu`,
            `managed:gpu` or `managed:vllm==X`.
        kernels: Folders of kernels (relative to the working directory), each a package with a vLLM plugin: copied once a
            run, and put on PYTHONPATH.
        serve_args: Arguments of `vllm serve`, as they would stand on the command line.
        env: Variables of the server; null means must be unset.
        inherit: Names of further variables to take over from the caller's environment.
        port: Loopback port; null picks a free one for the run.
        ready_timeout_s: Longest wait, in seconds, from start to the first completion.
        request_timeout_s: Longest a single request may take, in seconds, before it counts as failed.
    """

    model: Annotated[str, Field(min_length=1)]
    python: str | None = None
    kernels: tuple[str, ...] = ()
    serve_args: tuple[str, ...] = ()
    env: Env = {}
    inherit: tuple[str, ...] = ()
    port: Annotated[int, Field(ge=1, le=65535, strict=True)] | None = None
    ready_timeout_s: Annotated[float, Field(gt=0)] = 900.0
    request_timeout_s: Annotated[float, Field(gt=0)] = 600.0


class VariantSpec(_Strict):
    """What one variant adds to the server.

    Attributes:
        env: Variables over the server's; null means must be unset.
        serve_args: Arguments appended to the server's.
        python: Interpreter instead of the server's; null is the server's.
        kernels: Folders of kernels instead of the server's; null is the server's, and [] none.
    """

    env: Env = {}
    serve_args: tuple[str, ...] = ()
    python: str | None = None
    kernels: tuple[str, ...] | None = None


class DesignSpec(_Strict):
    """How the launches are arranged and judged.

    Attributes:
        order: `abba` (b c c b ...), `ab` (all of the baseline first: confounded with time), `random` (seeded pairs).
        launches_per_variant: Server lifetimes of each variant: the sample size.
        alpha: Family-wise significance level.
        min_effect: Smallest relative change worth calling, for example 0.01.
        seed: Seeds prompts, the question draw and the random order.
        primary: The one cell and metric asked about, `decode[16]/output_throughput` (the number is the concurrency of a
            decode cell, the prompt length of a prefill cell): it alone decides the verdict, uncorrected. Null decides
            by the headline metric of every cell, corrected over the cells.
    """

    order: Literal["abba", "ab", "random"] = "abba"
    launches_per_variant: Annotated[int, Field(ge=1, le=100, strict=True)] = 4
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    min_effect: Annotated[float, Field(ge=0, lt=1)] = 0.01
    seed: Annotated[int, Field(ge=0, strict=True)] = 0
    primary: Annotated[str, Field(json_schema_extra={"pattern": f"^{_PRIMARY}$"})] | None = None


class DecodeWorkload(_Strict):
    """Closed-loop decode load, one cell a concurrency.

    Attributes:
        kind: `decode`.
        name: Unlike the other workloads'; names the cells.
        input_len: Prompt tokens a request.
        output_len: Tokens generated a request; ends only there (`ignore_eos`).
        max_concurrency: Requests in flight: one number or a list.
        num_prompts: Requests a cell; null is twice the concurrency.
        num_warmups: Unmeasured requests before the cell; null is the concurrency, and fewer are raised to it, so that
            every batch size is run. A second wave reaches the end of the context. 0 is no warm-up at all.
        repeats: Times each cell is run in a launch.
    """

    kind: Literal["decode"]
    name: Name
    input_len: Annotated[int, Field(ge=4, strict=True)]
    output_len: Annotated[int, Field(ge=2, strict=True)]
    max_concurrency: tuple[Count, ...] = (1,)
    num_prompts: Count | None = None
    num_warmups: Annotated[int, Field(ge=0, strict=True)] | None = None
    repeats: Count = 1

    @field_validator("max_concurrency", mode="before", json_schema_input_type=Count | tuple[Count, ...])
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, int) and not isinstance(value, bool) else value


class PrefillWorkload(_Strict):
    """Prompt processing: one output token a request, one cell a prompt length.

    Attributes:
        kind: `prefill`.
        name: Unlike the other workloads'; names the cells.
        input_lens: Prompt tokens a request, one cell each.
        num_prompts: Requests a cell.
        max_concurrency: Requests in flight.
        num_warmups: Unmeasured requests before each cell. 0 is no warm-up at all.
        repeats: Times each cell is run in a launch.
    """

    kind: Literal["prefill"]
    name: Name
    input_lens: Annotated[tuple[Annotated[int, Field(ge=4, strict=True)], ...], Field(min_length=1)]
    num_prompts: Count = 8
    max_concurrency: Count = 1
    num_warmups: Annotated[int, Field(ge=0, strict=True)] = 1
    repeats: Count = 1


class Gsm8kWorkload(_Strict):
    """GSM8K answer check.

    Attributes:
        kind: `gsm8k`.
        name: Unlike the other workloads'.
        num_questions: Questions, chosen by a seeded draw of test-set indices.
        dataset: Hub name, or path of a JSONL file in GSM8K's shape.
        fewshot_dataset: The same for few-shot examples; null is the train split of the hub dataset.
        style: `chat` (chat template) or `completion` (plain text).
        num_fewshot: Worked examples before each question.
        max_concurrency: Questions in flight.
        max_tokens: Longest answer.
        logprobs: Candidates a position, for explaining changed answers; null for none.
        filter: `flexible-extract` or `strict-match`: which one decides right and wrong.
        min_exact_match: Share of right answers below which a variant's speed counts for nothing; null for no floor.
    """

    kind: Literal["gsm8k"]
    name: Name
    num_questions: Annotated[int, Field(ge=1, le=1319, strict=True)] = 128
    dataset: Annotated[str, Field(min_length=1)] = "openai/gsm8k"
    fewshot_dataset: Annotated[str, Field(min_length=1)] | None = None
    style: Literal["chat", "completion"] = "chat"
    num_fewshot: Annotated[int, Field(ge=0, le=64, strict=True)] = 0
    max_concurrency: Count = 16
    max_tokens: Count = 512
    logprobs: Annotated[int, Field(ge=1, le=20, strict=True)] | None = 5
    filter: Literal["strict-match", "flexible-extract"] = "flexible-extract"
    min_exact_match: Annotated[float, Field(ge=0, le=1)] | None = None


Workload = Annotated[DecodeWorkload | PrefillWorkload | Gsm8kWorkload, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True)
class Primary:
    """`design.primary`, taken apart; `at` is None where the workload has one cell only."""

    workload: str
    at: int | None
    metric: str

    @staticmethod
    def parse(text: str) -> Primary | None:
        """Read the text; None when it is not of this form."""
        match = re.fullmatch(_PRIMARY, text)
        return Primary(match[1], int(match[2]) if match[2] else None, match[3]) if match else None

    def names(self, workload: str, kind: str, input_len: int, max_concurrency: int) -> bool:
        """Whether this is the cell."""
        return workload == self.workload and self.at in (None, input_len if kind == "prefill" else max_concurrency)


class TelemetrySpec(_Strict):
    """How the GPUs are sampled during the load.

    Attributes:
        interval_s: Seconds between two samples of a GPU. A cell shorter than that has no sample and no verdict. None:
            as often as the GPU's energy counter moves, 0.05 to 0.2.
    """

    interval_s: Annotated[float, Field(ge=0.02, le=10)] | None = None


class TraceSpec(_Strict):
    """A short traced phase after everything measured: which kernels run, by vLLM's own torch profiler.

    Attributes:
        decode: Rows (requests decoding together) of each decode phase; null: fewest and most of the decode workloads.
        prefill: Prompt lengths, tokens, of each prefill phase; null: shortest and longest of the prefill workloads.
        input_len: Prompt tokens of the decode phases; null: the decode workload's own.
        steps: Decode steps of all rows together that are traced, at least.
    """

    decode: tuple[Count, ...] | None = None
    prefill: tuple[Annotated[int, Field(ge=4, strict=True)], ...] | None = None
    input_len: Annotated[int, Field(ge=4, strict=True)] | None = None
    steps: Annotated[int, Field(ge=1, le=1000, strict=True)] = 8


class KernelPatterns(_Strict):
    """Regular expressions, searched for in the full names of kernels.

    Attributes:
        require: Each must match a kernel.
        forbid: None may match a kernel.
    """

    require: tuple[str, ...] = ()
    forbid: tuple[str, ...] = ()


PhaseName = Annotated[str, StringConstraints(pattern=r"^(decode|prefill)(\[[1-9][0-9]{0,8}\])?$")]


class KernelExpectation(KernelPatterns):
    """What must have run in a variant, by the trace.

    Attributes:
        require: Each must match a kernel in at least one traced phase.
        forbid: None may match a kernel in any of them.
        phases: The same for steps of one kind: `decode` (steps that only decode, all rows together), `prefill` (steps
            that only process prompts), every traced phase of that kind; or one phase: `decode[16]`, `prefill[2048]`.
    """

    phases: dict[PhaseName, KernelPatterns] = {}


class VerifySpec(_Strict):
    """Evidence asked for beyond the environment, by variant.

    Attributes:
        expect_log: Regular expressions that must each match a line of the startup log.
        plugins: General plugins that must have loaded in the processes that run the model.
        expect_kernels: Kernels that must, or must not, have run; it asks for a trace.
        expect_report: What plugins must report of themselves after the load, by plugin and dotted key: a regular
            expression that matches the whole text, or a comparison (`>0`, `==2`) with a number.
    """

    expect_log: dict[Variant, tuple[str, ...]] = {}
    plugins: dict[Variant, tuple[str, ...]] = {}
    expect_kernels: dict[Variant, KernelExpectation] = {}
    expect_report: dict[Variant, dict[str, dict[str, str]]] = {}


class ExperimentSpec(_Strict):
    """One question: two variants of one server, the same load on both.

    Attributes:
        experiment: A name; results go to a folder of this name.
        question: What is asked, for the report.
        server: What both variants share.
        variants: What each of the two adds; they must differ.
        design: How the launches are arranged and judged.
        workloads: The load, in this order in every launch.
        telemetry: How the GPUs are sampled.
        trace: A short traced phase after everything measured; null is none. {} takes everything from the workloads.
        verify: Evidence asked for beyond the environment.
    """

    experiment: Name
    question: str = ""
    server: ServerSpec
    variants: Annotated[dict[Variant, VariantSpec], Field(json_schema_extra={"required": list(VARIANTS)})]
    design: DesignSpec = DesignSpec()
    workloads: Annotated[tuple[Workload, ...], Field(min_length=1)]
    telemetry: TelemetrySpec = TelemetrySpec()
    trace: TraceSpec | None = None
    verify: VerifySpec = VerifySpec()

    @property
    def traced(self) -> TraceSpec | None:
        """The trace to take, or None: one that is asked for, or that `verify.expect_kernels` rests on."""
        return self.trace or (TraceSpec() if self.verify.expect_kernels else None)

    def merged_env(self, variant: Variant) -> Env:
        """Environment declared for a variant; None means must be unset."""
        return {**self.server.env, **self.variants[variant].env}

    def merged_args(self, variant: Variant) -> tuple[str, ...]:
        """Serve arguments of a variant."""
        return self.server.serve_args + self.variants[variant].serve_args

    def python_of(self, variant: Variant) -> str | None:
        """The interpreter a variant names."""
        return self.variants[variant].python or self.server.python

    def kernels_of(self, variant: Variant) -> tuple[str, ...]:
        """The kernel folders a variant names."""
        own = self.variants[variant].kernels
        return self.server.kernels if own is None else own

    def plugins_of(self, variant: Variant) -> tuple[str, ...]:
        """Plugins that must have loaded: those asked for, and those of the kernel folders."""
        return tuple(
            dict.fromkeys((*self.verify.plugins.get(variant, ()), *map(kernel_name, self.kernels_of(variant))))
        )

    def canonical_args(self, variant: Variant) -> list[tuple[str, str | None]]:
        """The same in one spelling: `--max-num-seqs=16`, `--max_num_seqs 16` and `--max-num-seqs 16` are one argument."""
        found: list[tuple[str, str | None]] = []
        for arg in self.merged_args(variant):
            if arg.startswith("-"):
                flag, equals, value = arg.partition("=")
                found.append((flag.replace("_", "-"), value if equals else None))
            elif found and found[-1][1] is None:
                found[-1] = (found[-1][0], arg)
            else:
                found.append(("", arg))
        return sorted(found, key=lambda item: item[0])  # stable: of a flag given twice the last one counts

    def switches(self) -> dict[str, dict[Variant, str | None]]:
        """Variables whose declared value differs between the variants: what the experiment is about."""
        both = {variant: self.merged_env(variant) for variant in VARIANTS}
        names = sorted({name for env in both.values() for name in env})
        values = {name: {variant: both[variant].get(name) for variant in VARIANTS} for name in names}
        return {name: value for name, value in values.items() if value["baseline"] != value["candidate"]}

    def against_itself(self) -> ExperimentSpec:
        """The A/A of this experiment: the candidate is the baseline, and what is expected of it as well."""
        expected = {
            name: dict.fromkeys(VARIANTS, values["baseline"]) if "baseline" in values else {}
            for name, values in ((name, getattr(self.verify, name)) for name in VerifySpec.model_fields)
        }
        return self.model_copy(
            update={
                "variants": dict.fromkeys(VARIANTS, self.variants["baseline"]),
                "verify": VerifySpec(**expected),
            }
        )

    @property
    def is_aa(self) -> bool:
        """Whether the variants are one and the same; a spec file with such variants is refused."""
        return self.variants["baseline"] == self.variants["candidate"]
