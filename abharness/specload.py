"""YAML -> ExperimentSpec. Every check of what a user asks for, and its message, lives here.

A fault is reported before anything starts, with file, line, dotted field, what was found and what is allowed; all
faults of a file are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from abharness import redaction, yamlload
from abharness.errors import SpecError, UsageError
from abharness.kernelspec import check_kernels, check_reports
from abharness.metrics import METRICS
from abharness.plan import trace_shapes
from abharness.record import Finding
from abharness.spec import (
    OWNED_ARGS,
    OWNED_VARIABLES,
    PROBE_PLUGIN,
    VARIANTS,
    DecodeWorkload,
    DesignSpec,
    ExperimentSpec,
    Gsm8kWorkload,
    KernelExpectation,
    KernelPatterns,
    PrefillWorkload,
    Primary,
    ServerSpec,
    TelemetrySpec,
    TraceSpec,
    VariantSpec,
    VerifySpec,
)


def load_spec(path: Path, overrides: Sequence[str] = (), *, aa: bool = False) -> ExperimentSpec:
    """Read and check an experiment file.

    Args:
        path: The YAML file.
        overrides: `--set` assignments, `dotted.key=value`.
        aa: The variants may be equal: the baseline is to run against itself.

    Raises:
        UsageError: The file cannot be read.
        SpecError: It cannot be run as written; every fault found is in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError([f"{path}: not UTF-8 text: {error}"]) from error
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror or error}", hint="give the path of a YAML file"
        ) from error
    return parse_spec(text, str(path), overrides, aa=aa)


def parse_spec(text: str, source: str, overrides: Sequence[str] = (), *, aa: bool = False) -> ExperimentSpec:
    """The same for a text; `source` is the name used in messages."""
    located = yamlload.load(text, source)
    _remember_secrets(located, overrides)
    if located.data is not None or not located.problems:
        for assignment in overrides:
            yamlload.override(located, assignment)
    if located.data is None and located.problems:
        raise SpecError(located.problems)
    if not isinstance(located.data, dict):
        found = "an empty file" if located.data is None else type(located.data).__name__
        raise SpecError(
            [f"{source}:1: an experiment is a mapping with experiment, server, variants, ...; found {found}"]
        )
    _remember_secrets(located, ())
    problems = located.problems + _text_problems(located)
    spec: ExperimentSpec | None = None
    try:
        spec = ExperimentSpec.model_validate(located.data)
    except ValidationError as error:
        # A value already refused as text is not refused again for its type.
        problems += [line for line, field in _explain(error, located) if not any(f": {field}: " in p for p in problems)]
    if spec is not None:
        problems += _cross_checks(spec, located, aa=aa)
    if spec is None or problems:
        raise SpecError(problems or ["the experiment could not be read"])
    return spec


def _remember_secrets(located: yamlload.Located, overrides: Sequence[str]) -> None:
    """A spec that cannot be run is told with what was found in it: its secrets must not be."""
    pairs = [(str(path[-1]), origin) for path, origin in located.origins.items() if path]
    for assignment in overrides:
        # The `=` that is missing may be what is to be told.
        name, _, value = (assignment if "=" in assignment else assignment.replace(" ", "=", 1)).partition("=")
        pairs.append((name, yamlload.Origin("", value)))
    found = [
        text
        for name, origin in pairs
        for text in (origin.text or "", *origin.words)
        if redaction.SECRET_NAME.search(name)
    ]
    argv = [word for path, origin in located.origins.items() if "serve_args" in path for word in origin.words]
    redaction.remember([*found, *redaction.secrets_of({}, argv)])


def spec_warnings(spec: ExperimentSpec) -> list[Finding]:
    """Doubts about a spec that can be run; each adapted to what it already does."""
    findings: list[Finding] = []
    for variant in VARIANTS:
        slots = _int_arg(spec.merged_args(variant), "--max-num-seqs")
        for workload in spec.workloads:
            limits = workload.max_concurrency
            most = max(limits) if isinstance(limits, tuple) else limits
            if slots is not None and most > slots:
                findings.append(
                    Finding(
                        code="queueing",
                        message=f"{workload.name}: max_concurrency {most} is more than the {variant}'s "
                        f"--max-num-seqs {slots}: requests wait in the server's queue and TTFT contains that wait",
                        hint=f"raise --max-num-seqs to {most} or lower max_concurrency",
                    )
                )
    for variant in VARIANTS:
        named = spec.merged_env(variant).get("VLLM_PLUGINS")
        if named is not None and PROBE_PLUGIN not in named.split(","):
            findings.append(
                Finding(
                    code="one_witness",
                    message=f"{variant}: VLLM_PLUGINS={named!r} keeps the probe out: the environment is proven by /proc "
                    "alone, which does not show what a process changes after its start",
                    hint=f"VLLM_PLUGINS: {','.join(part for part in (named, PROBE_PLUGIN) if part)!r}",
                )
            )
    if spec.design.order == "ab" and spec.design.launches_per_variant > 1:
        findings.append(
            Finding(
                code="order_confounded",
                message="design.order ab runs every baseline launch before every candidate launch: any drift of the "
                "machine counts as a difference between the variants",
                hint="use the default order abba",
            )
        )
    return findings


_REFERENCE = re.compile(r"\$(?:\{\w+\}|\w+)")


def literal_references(spec: ExperimentSpec) -> list[str]:
    """Values that look like a reference to an environment variable, which stays the text it is; one warning each."""
    holders: list[tuple[str, ServerSpec | VariantSpec]] = [("server", spec.server)]
    holders += [(f"variants.{variant}", spec.variants[variant]) for variant in VARIANTS]
    values: list[tuple[str, str | None]] = [("server.model", spec.server.model)]
    for place, holder in holders:
        values.append((f"{place}.python", holder.python))
        values += [(f"{place}.env.{name}", value) for name, value in holder.env.items()]
        values += [(f"{place}.serve_args[{index}]", value) for index, value in enumerate(holder.serve_args)]
        values += [(f"{place}.kernels[{index}]", value) for index, value in enumerate(holder.kernels or ())]
    return [
        f"{place} is the text {value!r}: a spec takes nothing from the environment; write the value, give it with --set "
        "in the shell, or name a variable in server.inherit"
        for place, value in values
        if value is not None and _REFERENCE.search(value)
    ]


def _text_problems(located: yamlload.Located) -> list[str]:
    """Environment values, arguments and names that YAML turned into something that is not text."""
    problems: list[str] = []

    def fix(container: Any, key: Any, path: yamlload.Path, *, may_be_null: bool) -> None:
        value, origin = container[key], located.origin(path)
        if isinstance(value, str) or (value is None and may_be_null and origin.text):
            return
        where = f"{origin.place}: {yamlload.dotted(path)}"
        if value is None and may_be_null:
            problems.append(f'{where}: no value; write "" for set and empty, or null for must be unset')
        elif origin.text is None or isinstance(value, dict | list):
            problems.append(f"{where}: found {_kind(value)}; expected text in quotes")
        elif origin.from_command_line:
            container[key] = origin.text  # a command line has no types: the text typed is the value
        else:
            problems.append(
                f"{where}: {origin.text or 'an empty value'} is read by YAML as {_kind(value)}; "
                f'quote it: "{origin.text}"'
            )

    def items(container: Any, name: str, path: yamlload.Path, *, may_be_null: bool) -> None:
        part = container.get(name) if isinstance(container, dict) else None
        if isinstance(part, dict):
            for key in part:
                fix(part, key, (*path, name, key), may_be_null=may_be_null)
        elif isinstance(part, list):
            for index in range(len(part)):
                fix(part, index, (*path, name, index), may_be_null=may_be_null)

    data = located.data
    variants = data.get("variants")
    holders: list[tuple[Any, yamlload.Path]] = [(data.get("server"), ("server",))]
    if isinstance(variants, dict):
        holders += [(variant, ("variants", name)) for name, variant in variants.items()]
    for holder, path in holders:
        items(holder, "env", path, may_be_null=True)
        items(holder, "serve_args", path, may_be_null=False)
        items(holder, "kernels", path, may_be_null=False)
        items(holder, "inherit", path, may_be_null=False)
        if isinstance(holder, dict) and holder.get("model") is not None and not isinstance(holder["model"], str):
            fix(holder, "model", (*path, "model"), may_be_null=False)
    return problems


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int():
            return f"the integer {value}"
        case float():
            return f"the number {value}"
        case dict():
            return "a mapping"
        case list():
            return "a list"
        case str():
            return f"{value!r}"
    return f"a {type(value).__name__}"


def _explain(error: ValidationError, located: yamlload.Located) -> list[tuple[str, str]]:
    """Pydantic's errors as (message, dotted field), one line each."""
    lines: list[tuple[str, str]] = []
    for item in error.errors():
        if item["type"] == "too_short" and len(item["input"]) >= item["ctx"]["min_length"]:
            continue  # enough are there; those with faults of their own, told apart, are not counted
        # A discriminated union puts its tag into the location; the file has no such level.
        data: Any = located.data
        path: yamlload.Path = ()
        for part in item["loc"]:
            if part in ("decode", "prefill", "gsm8k") and isinstance(data, dict) and data.get("kind") == part:
                continue
            path = (*path, part)
            try:
                data = data[part]
            except (KeyError, IndexError, TypeError):
                data = None
        if path and path[-1] == "[key]":
            path = path[:-1]
        place, field = located.origin(path).place, yamlload.dotted(path)
        match item["type"]:
            case "extra_forbidden":
                text = f"unknown key; allowed here: {_allowed(path)}"
            case "missing":
                text = "missing; it is required"
            case "literal_error" if item["loc"] and item["loc"][-1] == "[key]":
                text = f"unknown name {path[-1]!r}; allowed: {', '.join(VARIANTS)}"
            case _:
                found = _kind(item.get("input"))
                text = f"found {found}; {item['msg'][0].lower()}{item['msg'][1:]}"
        lines.append((f"{place}: {field}: {text}", field))
    return lines


_SECTIONS: dict[str, type[BaseModel]] = {
    "server": ServerSpec,
    "design": DesignSpec,
    "telemetry": TelemetrySpec,
    "trace": TraceSpec,
    "verify": VerifySpec,
}


def _allowed(path: yamlload.Path) -> str:
    """The keys that may stand beside an unknown one."""
    if path[0] == "workloads" and len(path) > 1:
        kinds: dict[str, type[BaseModel]] = {
            "decode": DecodeWorkload,
            "prefill": PrefillWorkload,
            "gsm8k": Gsm8kWorkload,
        }
        return "; ".join(f"{kind}: {', '.join(model.model_fields)}" for kind, model in kinds.items())
    if path[:2] == ("verify", "expect_kernels") and len(path) > 3:
        return ", ".join((KernelPatterns if "phases" in path[3:-1] else KernelExpectation).model_fields)
    if path[0] == "variants" and len(path) > 2:
        return ", ".join(VariantSpec.model_fields)
    section = _SECTIONS.get(str(path[0]), ExperimentSpec) if len(path) > 1 else ExperimentSpec
    return ", ".join(section.model_fields)


def _int_arg(args: Sequence[str], name: str) -> int | None:
    """The last value of an integer argument, with vLLM's human-readable suffixes (`8k` = 8,000, `8K` = 8,192)."""
    found: int | None = None
    for index, arg in enumerate(args):
        text = args[index + 1] if arg == name and index + 1 < len(args) else None
        if arg.startswith(f"{name}="):
            text = arg.split("=", 1)[1]
        match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([kKmMgG]?)", text) if text else None
        if match:
            scale = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}[match[2]]
            found = int(float(match[1]) * scale)
    return found


def _least_arg(spec: ExperimentSpec, name: str) -> int | None:
    """An integer argument in the variant where it is the smaller; None where no variant gives it."""
    given = [_int_arg(spec.merged_args(variant), name) for variant in VARIANTS]
    return min((value for value in given if value is not None), default=None)


def _cross_checks(spec: ExperimentSpec, located: yamlload.Located, *, aa: bool) -> list[str]:
    problems: list[str] = []

    def tell(path: yamlload.Path, text: str) -> None:
        problems.append(f"{located.origin(path).place}: {yamlload.dotted(path)}: {text}")

    missing = [variant for variant in VARIANTS if variant not in spec.variants]
    if missing:
        tell(("variants",), f"both variants are needed; missing: {', '.join(missing)}")
        return problems
    holders: list[tuple[yamlload.Path, ServerSpec | VariantSpec]] = [(("server",), spec.server)]
    holders += [(("variants", variant), spec.variants[variant]) for variant in VARIANTS]
    for path, holder in holders:
        _check_env(holder.env, (*path, "env"), tell)
        _check_args(holder.serve_args, (*path, "serve_args"), tell)
    for index, name in enumerate(spec.server.inherit):
        if name in OWNED_VARIABLES:
            tell(("server", "inherit", index), f"{name} is set by abharness: {OWNED_VARIABLES[name]}")
        if any(name in spec.merged_env(variant) for variant in VARIANTS):
            tell(("server", "inherit", index), f"{name} is also given in env; keep one of the two")
    same = all(
        (spec.canonical_args("baseline") == spec.canonical_args("candidate"),
         spec.python_of("baseline") == spec.python_of("candidate"),
         spec.kernels_of("baseline") == spec.kernels_of("candidate"),
         not spec.switches())
    )  # fmt: skip
    if same and not aa:
        tell(
            ("variants",),
            "the two variants do not differ: nothing would be compared; change env, serve_args, python or kernels "
            "(to run one server against itself: --aa)",
        )
    _check_workloads(spec, tell)
    _check_primary(spec, tell)
    _check_trace(spec, tell)
    check_kernels(spec, tell)
    check_reports(spec, tell)
    for path, pattern in _patterns(spec):
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            tell(path, f"not a regular expression: {error}")
    return problems


def _patterns(spec: ExperimentSpec) -> Iterator[tuple[yamlload.Path, str]]:
    """Every regular expression of a spec with its place."""
    held: list[tuple[yamlload.Path, Sequence[str]]] = [
        (("verify", "expect_log", variant), texts) for variant, texts in spec.verify.expect_log.items()
    ]
    for variant, expected in spec.verify.expect_kernels.items():
        path: yamlload.Path = ("verify", "expect_kernels", variant)
        parts: list[tuple[yamlload.Path, KernelPatterns]] = [(path, expected)]
        parts += [((*path, "phases", name), part) for name, part in expected.phases.items()]
        held += [((*at, key), getattr(part, key)) for at, part in parts for key in ("require", "forbid")]
    for path, texts in held:
        yield from (((*path, index), text) for index, text in enumerate(texts))


_ENV_NAME = re.compile(r"[^=\0]+")


def _check_env(env: Mapping[str, str | None], path: yamlload.Path, tell: Any) -> None:
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name) or name != name.strip():
            tell((*path, name), f"{name!r} cannot be the name of an environment variable")
        if value is not None and "\0" in value:
            tell((*path, name), "an environment value cannot hold a NUL byte")
        if name in OWNED_VARIABLES:
            tell((*path, name), f"{name} is set by abharness: {OWNED_VARIABLES[name]}; remove it here")


def _check_args(args: Sequence[str], path: yamlload.Path, tell: Any) -> None:
    for index, arg in enumerate(args):
        flag = arg.split("=", 1)[0].replace("_", "-")
        if flag in OWNED_ARGS:
            tell((*path, index), f"{flag} is set by abharness: {OWNED_ARGS[flag]}; remove it here")
        if "\0" in arg:
            tell((*path, index), "an argument cannot hold a NUL byte")
        if arg.startswith("-") and " " in arg and "=" not in arg:
            tell((*path, index), f"{arg!r} is one argument with a space in it; write name and value as two list items")


def _check_workloads(spec: ExperimentSpec, tell: Any) -> None:
    seen: dict[str, int] = {}
    limit = _least_arg(spec, "--max-model-len")
    for index, workload in enumerate(spec.workloads):
        path: yamlload.Path = ("workloads", index)
        if workload.name in seen:
            tell((*path, "name"), f"{workload.name!r} is already the name of workloads[{seen[workload.name]}]")
        seen.setdefault(workload.name, index)
        match workload:
            case DecodeWorkload():
                need, what = workload.input_len + workload.output_len, "input_len + output_len"
                if not workload.max_concurrency or len(set(workload.max_concurrency)) < len(workload.max_concurrency):
                    tell((*path, "max_concurrency"), "give one or more concurrencies, each once")
                most = max(workload.max_concurrency, default=0)
                if workload.num_prompts is not None and workload.num_prompts < most:
                    tell(
                        (*path, "num_prompts"), f"{workload.num_prompts} prompts cannot keep {most} requests in flight"
                    )
            case PrefillWorkload():
                need, what = max(workload.input_lens) + 1, "the longest of input_lens + 1 output token"
                if len(set(workload.input_lens)) < len(workload.input_lens):
                    tell((*path, "input_lens"), "give each length once")
                if workload.num_prompts < workload.max_concurrency:
                    most = workload.max_concurrency
                    tell(
                        (*path, "num_prompts"), f"{workload.num_prompts} prompts cannot keep {most} requests in flight"
                    )
            case Gsm8kWorkload():
                need, what = workload.max_tokens + 1, "max_tokens + the question"
                if workload.num_fewshot and workload.fewshot_dataset is None and _is_path(workload.dataset):
                    tell((*path, "num_fewshot"), "a local dataset has no train split; name a file in fewshot_dataset")
        if limit is not None and need > limit:
            tell(path, f"{what} = {need} tokens do not fit --max-model-len {limit}")


def _check_trace(spec: ExperimentSpec, tell: Any) -> None:
    shapes = trace_shapes(spec)
    if spec.traced is not None and not shapes:
        tell(("trace",), "nothing would be traced: name rows in trace.decode or lengths in trace.prefill")
    for key in ("decode", "prefill"):
        given = getattr(spec.trace, key, None) or ()
        if len(set(given)) < len(given):
            tell(("trace", key), "give each once")
    slots = _least_arg(spec, "--max-num-seqs")
    limit = _least_arg(spec, "--max-model-len")
    for shape in shapes:
        if slots is not None and shape.max_concurrency > slots:
            tell(
                ("trace",),
                f"{shape.phase} needs {shape.max_concurrency} rows in one step, --max-num-seqs is {slots}; name fewer in "
                "trace.decode",
            )
        if limit is not None and shape.input_len + shape.output_len > limit:
            need = shape.input_len + shape.output_len
            tell(("trace",), f"{shape.phase} needs {need} tokens a request, --max-model-len is {limit}")
    traced = {name for shape in shapes for name in (shape.kind, shape.phase)}
    for variant, expected in spec.verify.expect_kernels.items():
        for name in expected.phases:
            if name not in traced:
                path = ("verify", "expect_kernels", variant, "phases", name)
                tell(path, f"no such phase is traced; there are {', '.join(sorted(traced))} (see trace)")


def _check_primary(spec: ExperimentSpec, tell: Any) -> None:
    if spec.design.primary is None:
        return
    path: yamlload.Path = ("design", "primary")
    primary = Primary.parse(spec.design.primary)
    cells = [
        (workload.name, workload.kind, *shape)
        for workload in spec.workloads
        if not isinstance(workload, Gsm8kWorkload)
        for shape in (
            [(workload.input_len, concurrency) for concurrency in workload.max_concurrency]
            if isinstance(workload, DecodeWorkload)
            else [(input_len, workload.max_concurrency) for input_len in workload.input_lens]
        )
    ]
    found = [cell for cell in cells if primary is not None and primary.names(*cell)]
    if primary is None or len(found) != 1:
        shown = ", ".join(f"{name}[{length if kind == 'prefill' else most}]" for name, kind, length, most in cells)
        number = "" if primary is None else f" names {len(found)} cells, not one"
        tell(path, f"{spec.design.primary!r}{number}; expected CELL/METRIC with CELL one of {shown or '(none)'}")
        return
    known = [metric.name for metric in METRICS if found[0][1] in metric.kinds]
    if primary.metric not in known:
        tell(path, f"{primary.metric!r} is no metric of a {found[0][1]} cell; allowed: {', '.join(known)}")


def _is_path(dataset: str) -> bool:
    return dataset.endswith((".jsonl", ".json")) or dataset.startswith((".", "/", "~"))
