"""The code -> the tables of docs/, between comments `<!-- generated: NAME -->` and `<!-- end -->`.

    python -m tests.reference          writes every table anew
    python -m tests.reference check    says which are not as the code has them, exit 1

A test holds that they are as the code has them. What the code does not have (a command that is documented and gone)
cannot be written and is told.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from abharness import checks, events, gpuchecks, record, samples, spec, timeline, windows, witnesses
from abharness.arguments import make_parser
from abharness.codes import CODES
from abharness.metrics import METRICS
from abharness.plan import BASE_VARIABLES, SWITCH_PREFIXES, Host, build_plan
from abharness.replay import captures, records
from abharness.specload import parse_spec
from tests.markdown import ROOT, pages, shown

MARKED = re.compile(r"<!-- generated: (?P<name>[^\n]+?) -->\n(?P<body>.*?)<!-- end -->", re.DOTALL)


def rendered(text: str) -> tuple[str, list[str]]:
    """A page with its tables as the code has them, and the names that the code does not have."""
    unknown: list[str] = []

    def table(match: re.Match[str]) -> str:
        try:
            body = "\n".join(make(match["name"]))
        except KeyError as error:
            unknown.append(f"{match['name']}: the code has no {error}")
            return match[0]
        return f"<!-- generated: {match['name']} -->\n\n{body}\n\n<!-- end -->"

    return MARKED.sub(table, text), unknown


def make(name: str) -> list[str]:
    """The lines of one table.

    Raises:
        KeyError: The code has nothing of this name.
    """
    kind, _, what = name.partition(" ")
    return list(TABLES[kind](what))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _head(*cells: str) -> list[str]:
    return [_row(*cells), _row(*("---" for _ in cells))]


def _codes(which: str) -> Iterator[str]:
    if which == "thresholds":
        yield from _thresholds()
        return
    wanted = {"invalidating": True, "advice": False}[which]
    yield from _head("code", "meaning", "next step", *(["`--allow`"] if wanted else []))
    for name, code in sorted(CODES.items()):
        if code.invalidates is wanted:
            yield _row(
                f"`{name}`", code.meaning, code.next_step, *(["yes" if code.waivable else "no"] if wanted else [])
            )


def _thresholds() -> Iterator[str]:
    yield from _head("code", "from")
    yield _row(
        "`client_bound`",
        f"{checks.CLIENT_CPU_SHARE_LIMIT:g} of one core used by the client, or a median event-loop lag of "
        f"{checks.LAG_SHARE_LIMIT:.0%} of the time that it lengthens",
    )
    yield _row("`prefix_cache_hits`", f"{checks.PREFIX_HIT_LIMIT:.0%} of a cell's prompt tokens")
    yield _row(
        "`clocks_differ`",
        f"{gpuchecks.SM_CLOCK_TOLERANCE:.0%} between the medians of the SM clocks, {gpuchecks.MEM_CLOCK_TOLERANCE:.0%} of "
        "the memory clocks",
    )
    yield _row(
        "`throttled`", f"{gpuchecks.THROTTLE_LIMIT:.0%} of a window's samples: {', '.join(gpuchecks.THROTTLE_REASONS)}"
    )
    yield _row("`telemetry_gap`", f"fewer than {gpuchecks.COVERAGE_LIMIT:.0%} of the expected samples")
    yield _row(
        "`power_capped`",
        f"{gpuchecks.POWER_CAP_TOLERANCE * 100:.0f} points between the variants' shares of samples at the power limit",
    )
    yield _row("`host_busy`", f"{checks.OTHER_CPUS_LIMIT:g} CPUs used by others")
    yield _row("`accuracy_truncated`", f"{checks.TRUNCATION_LIMIT:.0%} of the answers cut")


def _metrics(_which: str) -> Iterator[str]:
    yield from _head("metric", "of", "stored in", "shown in", "better", "role")
    for metric in METRICS:
        role = "headline" if metric.headline else "shown" if metric.chief else "`--all-metrics`"
        better = "higher" if metric.higher_is_better else "lower"
        yield _row(f"`{metric.name}`", ", ".join(metric.kinds), metric.unit, metric.display_unit, better, role)


def commands() -> dict[str, argparse.ArgumentParser]:
    """Every command that does something, by its words."""
    found: dict[str, argparse.ArgumentParser] = {}

    def below(words: tuple[str, ...], parser: argparse.ArgumentParser) -> None:
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        for action in inner:
            for name, sub in action.choices.items():
                below((*words, name), sub)
        if not inner:
            found[" ".join(words)] = parser

    below((), make_parser())
    return found


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """What a command takes, less `--help`."""
    return [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]


def _cli(command: str) -> Iterator[str]:
    yield from _head("argument", "meaning")
    for action in arguments(commands()[command]):
        value = action.metavar or ("" if action.nargs == 0 else "|".join(map(str, action.choices or ())))
        if not action.option_strings:
            name = f"{value}..." if action.nargs in ("+", "*") else f"[{value}]" if action.nargs == "?" else f"{value}"
        else:
            name = f"{', '.join(action.option_strings)} {value}".strip()
        meaning = action.help or ""
        if action.choices and action.metavar:
            meaning = f"{meaning}; one of {', '.join(map(str, action.choices))}".lstrip("; ")
        yield _row(f"`{name}`", meaning or "the experiment file")


def attributes(doc: str | None) -> dict[str, str]:
    """The `Attributes` of a Google docstring, each on one line."""
    section = inspect.cleandoc(doc or "").partition("Attributes:\n")[2]
    found = re.finditer(r"^    (\w+): (.*(?:\n      +.*)*)", section, re.MULTILINE)
    return {match[1]: re.sub(r"\bNone\b", "null", re.sub(r"\s+", " ", match[2])) for match in found}


def field_docs(model: type[BaseModel]) -> dict[str, str]:
    """What a model's docstring, or that of a base, says of each field."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= attributes(base.__doc__)
    return found


SECTIONS = {
    "ServerSpec": "server",
    "VariantSpec": "variants",
    "DesignSpec": "design",
    "DecodeWorkload": "decode workload",
    "PrefillWorkload": "prefill workload",
    "Gsm8kWorkload": "gsm8k workload",
    "TelemetrySpec": "telemetry",
    "TraceSpec": "trace",
    "VerifySpec": "verify",
    "KernelExpectation": "expect_kernels",
    "KernelPatterns": "phases",
    "RunStarted": "run_started",
    "LaunchStarted": "launch_started",
    "LaunchFinished": "launch_finished",
    "Warn": "warning",
}
"""Headings of the reference that are not the model's name."""


def _type(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """The type of a field in words, with its limits."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{SECTIONS.get(name, name)}](#{SECTIONS.get(name, name).lower().replace(' ', '-')})"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(_type(part, definitions) for part in schema[union])
    match schema.get("type"):
        case "array":
            items = schema.get("items") or {}
            inner = _type(items, definitions) if items else "text"
            return f"list of ({inner})" if " or " in inner or "," in inner else f"list of {inner}"
        case "object":
            values = schema.get("additionalProperties")
            return f"mapping to {_type(values, definitions)}" if isinstance(values, dict) and values else "mapping"
        case "string":
            return "text"
        case "null":
            return "null"
        case "boolean":
            return "true or false"
        case "integer" | "number" as kind:
            return f"{kind}{_limits(schema)}"
    return "any"


def _limits(schema: dict[str, Any]) -> str:
    if "minimum" in schema and "maximum" in schema:
        return f" from {schema['minimum']:g} to {schema['maximum']:g}"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    told = " and ".join(f"{sign} {schema[key]:g}" for key, sign in signs.items() if key in schema)
    return f" {told}" if told else ""


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = field.default
    if isinstance(value, BaseModel):
        return "all defaults"
    return f"`{json.dumps(value)}`"


def fields(model: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of every field of a model."""
    schema = model.model_json_schema()
    docs = field_docs(model)
    for name, field in model.model_fields.items():
        yield name, _type(schema["properties"][name], schema.get("$defs", {})), _default(field), docs.get(name, "")


def _models(*modules: ModuleType) -> dict[str, type[BaseModel]]:
    """The models that these modules define, by name."""
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, BaseModel)
        and value.__module__ == module.__name__
        and value.model_fields
    }


SPEC_MODELS = _models(spec)
RECORD_MODELS = _models(record, windows, witnesses)
REPLAY_MODELS = _models(captures, records)


def _spec(model: str) -> Iterator[str]:
    yield from _head("key", "type", "default", "meaning")
    for name, kind, default, meaning in fields(SPEC_MODELS[model]):
        yield _row(f"`{name}`", kind, default, meaning)


def _record(model: str) -> Iterator[str]:
    yield from _fields(RECORD_MODELS[model])


def _replay(model: str) -> Iterator[str]:
    # What runs have, too, is on their page.
    yield from (row.replace("(#gpuwindow)", "(records.md#gpuwindow)") for row in _fields(REPLAY_MODELS[model]))


def _fields(model: type[BaseModel]) -> Iterator[str]:
    yield from _head("field", "type", "meaning")
    for name, kind, _default, meaning in fields(model):
        yield _row(f"`{name}`", kind, meaning)


PARQUET: dict[str, tuple[str, dict[str, str]]] = {
    "telemetry": (
        "telemetry.parquet",
        {
            **attributes(samples.Reading.__doc__),
            "t_s": "When the look began, on the clock of the requests.",
            "uuid": "NVML UUID of the GPU.",
        },
    ),
    "kernels": (
        "kernels/decode[[]16].0.parquet",
        {
            **attributes(timeline.Kernel.__doc__),
            "start_ns": "Start on the device (of an operator: on the CPU), from the trace's first moment.",
            "duration_ns": "How long it ran; of an operator, without the operators that it called.",
        },
    ),
}
"""Files of a launch with the meanings of their columns."""


def _parquet(which: str) -> Iterator[str]:
    import pyarrow.parquet

    pattern, meanings = PARQUET[which]
    path = sorted((ROOT / "results").glob(f"attention/*/launches/0-baseline/{pattern}"))[0]
    yield from _head("column", "type", "meaning")
    for column in pyarrow.parquet.read_schema(path):
        kind = str(column.type).replace("dictionary<values=string, indices=int32, ordered=0>", "text")
        kind = kind.replace("dictionary<values=string, indices=int8, ordered=0>", "text").replace("string", "text")
        yield _row(f"`{column.name}`", kind.replace("list<element: text>", "list of text"), meanings[column.name])


EVENT_MODELS: dict[str, type[BaseModel]] = {
    name: value
    for name, value in vars(events).items()
    if isinstance(value, type)
    and issubclass(value, BaseModel)
    and value.__module__ == events.__name__
    and not name.startswith("_")
}


def event_fields(model: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    """Name, type and meaning of every field of an event."""
    for name, kind, _default, _ in fields(model):
        if name == "event":
            yield name, kind, "Which event this is."
        else:
            yield name, kind, model.model_fields[name].description or ""


def _event(model: str) -> Iterator[str]:
    yield from _head("key", "type", "meaning")
    for name, kind, meaning in event_fields(EVENT_MODELS[model]):
        yield _row(f"`{name}`", kind.replace("(#failure)", "(records.md#failure)"), meaning)


_LEAST = """\
experiment: least
server: {model: m}
variants: {baseline: {}, candidate: {serve_args: [--x]}}
workloads: [{name: d, kind: decode, input_len: 4, output_len: 2}]
"""


def environment_set() -> dict[str, str]:
    """What a server gets that neither the shell nor the spec gave it, with this run's folders named in words."""
    pythons = {variant: Path("/VLLM/bin/python") for variant in spec.VARIANTS}
    host = Host(pythons, "m", 8000, Path("LAUNCH/.."), Path("PROBE"), "TOKEN", {})
    launch = build_plan(parse_spec(_LEAST, "least"), host).launches[0]
    return {name: value.replace("LAUNCH/../0", "LAUNCH").replace("/VLLM", "VLLM") for name, value in launch.env.items()}


def _switches(which: str) -> Iterator[str]:
    match which:
        case "set":
            yield from _head("variable", "value", "a spec may set it")
            for name, value in sorted(environment_set().items()):
                why = spec.OWNED_VARIABLES.get(name)
                yield _row(f"`{name}`", f"`{value}`", f"no: {why}" if why else "yes")
        case "base":
            yield ", ".join(f"`{name}`" for name in BASE_VARIABLES)
        case "prefixes":
            yield ", ".join(f"`{name}`" for name in SWITCH_PREFIXES)
        case "arguments":
            yield from _head("argument", "why a spec may not give it")
            for name, why in spec.OWNED_ARGS.items():
                yield _row(f"`{name}`", why)
        case _:
            raise KeyError(which)


RATES = ROOT / "results" / "simulation" / "rates.json"
NOISES = {
    "normal": "normal",
    "heavy-tailed": "heavy-tailed (t, 3 degrees of freedom)",
    "heteroscedastic": "candidate three times as noisy",
    "drifting": "drifting (6 sd over the run)",
    "bimodal": "bimodal clocks, 4 sd apart",
    "far bimodal": "bimodal clocks, 16 sd apart",
}
"""Kinds of noise by their names in the recorded rates."""


def rates() -> list[dict[str, Any]]:
    """The rows of the published simulation."""
    data = json.loads(RATES.read_text(encoding="utf-8"))
    return [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]


def _simulation(which: str) -> Iterator[str]:
    rows = rates()
    match which:
        case "false-positives":
            launches = (2, 3, 4, 6, 8)
            yield from _head("noise of the launches", *(f"n={n}" for n in launches))
            for noise, told in NOISES.items():
                yield _row(
                    told, *(_share(rows, "false positives", noise, n, 0.02, 0.0, "any_called") for n in launches)
                )
        case "power":
            columns = ((0.01, 4), (0.01, 8), (0.02, 2), (0.02, 4), (0.02, 8), (0.05, 2), (0.05, 4))
            yield from _head("noise of the launches", *(f"{effect:.0%}, n={n}" for effect, n in columns))
            for noise, told in NOISES.items():
                shares = (_share(rows, "power", noise, n, 0.005, effect, "cells_called", 0) for effect, n in columns)
                yield _row(told, *shares)
        case "cells":
            columns = (1, 3, 6, 12)
            yield from _head("noise of the launches", *(f"{n} cell{'s' if n > 1 else ''}" for n in columns))
            for noise, told in NOISES.items():
                tables = ["false positives" if n == 6 else "cells" for n in columns]
                yield _row(
                    told,
                    *(
                        _share(rows, table, noise, 4, 0.02, 0.0, "any_called", cells=n)
                        for table, n in zip(tables, columns, strict=True)
                    ),
                )
        case "order":
            columns = (4, 8)
            orders = ("ab", "abba")
            yield from _head("noise of the launches", *(f"`{order}`, n={n}" for order in orders for n in columns))
            for noise in ("normal", "drifting"):
                yield _row(
                    NOISES[noise],
                    *(
                        _share(rows, "order", noise, n, 0.005, 0.0, "any_called", order=order)
                        for order in orders
                        for n in columns
                    ),
                )
        case _:
            raise KeyError(which)


def _share(
    rows: Sequence[dict[str, Any]],
    table: str,
    noise: str,
    launches: int,
    sd: float,
    effect: float,
    key: str,
    digits: int = 1,
    *,
    cells: int = 6,
    order: str = "abba",
) -> str:
    wanted = {
        "table": table,
        "noise": noise,
        "launches": launches,
        "sd": sd,
        "effect": effect,
        "cells": cells,
        "order": order,
    }
    (row,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return f"{row[key]:.{digits}%}"


TABLES: dict[str, Callable[[str], Iterator[str]]] = {
    "codes": _codes,
    "metrics": _metrics,
    "cli": _cli,
    "spec": _spec,
    "record": _record,
    "replay": _replay,
    "parquet": _parquet,
    "event": _event,
    "switches": _switches,
    "simulation": _simulation,
}


def main(words: Sequence[str]) -> int:
    """Write, or check, every page."""
    wrong = 0
    for path in pages():
        before = path.read_text(encoding="utf-8")
        after, unknown = rendered(before)
        for line in unknown:
            print(f"{shown(path)}: {line}")
        wrong += bool(unknown)
        if after != before:
            print(f"{shown(path)}: {'not as the code has it' if words == ['check'] else 'written'}")
            wrong += words == ["check"]
            if words != ["check"]:
                path.write_text(after, encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
