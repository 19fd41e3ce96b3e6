"""The models of what is read and written -> JSON Schemas, for editors and for those who read our JSON.

Made from the models themselves, so they cannot drift from what is read; descriptions are those of the models' docstrings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from inspect import cleandoc
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from abharness.events import json_schema
from abharness.record import AnswerRecord, Evidence, LaunchRecord, RequestLine, RunRecord
from abharness.spec import ExperimentSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _comparison() -> dict[str, Any]:
    """What `compare --format json` prints: every comparison, with its exit code, which is no field of the class."""
    from abharness.compare import EXIT_CODES, Comparison

    data = _schema(Comparison, "serialization")
    definitions = data.pop("$defs")
    data["properties"]["exit_code"] = {
        "enum": sorted(EXIT_CODES.values()),
        "description": "The exit code this outcome leads to.",
    }
    data["required"] = list(data["properties"])
    return {
        "title": "abharness compare --format json",
        "type": "object",
        "properties": {"comparisons": {"type": "array", "items": {"$ref": "#/$defs/Comparison"}}},
        "required": ["comparisons"],
        "additionalProperties": False,
        "$defs": {**definitions, "Comparison": data},
    }


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "spec": lambda: _schema(ExperimentSpec),
    "comparison": _comparison,
    "run": lambda: _schema(RunRecord),
    "launch": lambda: _schema(LaunchRecord),
    "evidence": lambda: _schema(Evidence),
    "request": lambda: _schema(RequestLine),
    "answer": lambda: _schema(AnswerRecord),
    "events": json_schema,
}
"""By the name that `abharness schema` takes."""


def text(name: str) -> str:
    """One of `SCHEMAS` as JSON text."""
    return json.dumps({"$schema": DIALECT, **SCHEMAS[name]()}, indent=1) + "\n"


def _schema(model: type, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
    return TypeAdapter(model).json_schema(schema_generator=_Generator, mode=mode)


class _Generator(GenerateJsonSchema):
    """Pydantic's generator, with docstrings as descriptions and keys named one by one where only some are allowed."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        return _described(super().model_schema(schema), schema["cls"])

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        data = _described(super().dataclass_schema(schema), schema["cls"])
        # What is written of a dataclass is all of it and nothing else.
        return {**data, "required": list(data["properties"]), "additionalProperties": False}

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        data = super().dict_schema(schema)
        values = data.get("additionalProperties", {})
        if "patternProperties" in data:
            return {**data, "additionalProperties": False}
        if (names := data.get("propertyNames", {}).get("enum")) is None:
            return data
        keys = {name: {**values, "description": f"Of the {name}."} for name in names}
        return {"type": "object", "properties": keys, "additionalProperties": False}


def _described(data: JsonSchemaValue, cls: type) -> JsonSchemaValue:
    data["description"] = _summary(cls)
    for name, about in _attributes(cls).items():
        if name in data["properties"]:
            data["properties"][name]["description"] = about
    return data


def _summary(cls: type) -> str:
    """The docstring of a class up to its attributes, as running text."""
    return " ".join(_doc(cls).partition("\nAttributes:")[0].split())


def _doc(cls: type) -> str:
    # A dataclass without a docstring has one that repeats its signature.
    written = cls.__dict__.get("__doc__") or ""
    return "" if is_dataclass(cls) and written.startswith(f"{cls.__name__}(") else cleandoc(written)


_ATTRIBUTE = re.compile(r"^ {4}(\w+): +(.*(?:\n(?: {5,}.*|(?=\n)))*)", re.MULTILINE)


def _attributes(cls: type) -> dict[str, str]:
    """What the docstrings of a class and of those it builds on say of each field."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = _doc(base).partition("\nAttributes:\n")[2]
        found |= {match[1]: " ".join(match[2].replace("`", "").split()) for match in _ATTRIBUTE.finditer(section)}
    return found
