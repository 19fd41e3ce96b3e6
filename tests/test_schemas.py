"""The published JSON Schemas: up to date, true of what there is, and strict where the readers are."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from abharness import arguments, schemas
from abharness.cli import main
from abharness.errors import SpecError
from abharness.specload import parse_spec
from tests.synthetic import Made, write_run
from tests.test_properties_spec import VALID, dumped, mutate, outcome, places, values

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "docs" / "schemas"
EXPERIMENTS = sorted((ROOT / "experiments").glob("*.yaml"))


def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((PUBLISHED / f"{name}.json").read_text(encoding="utf-8")))


def accepts(name: str, data: Any) -> bool:
    return validator(name).is_valid(data)


def faults(name: str, data: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}"[:300] for error in validator(name).iter_errors(data)]


def test_the_names_of_the_command_line_are_those_there_are() -> None:
    assert tuple(schemas.SCHEMAS) == arguments.SCHEMAS


@pytest.mark.parametrize("name", schemas.SCHEMAS)
def test_the_published_file_is_what_the_command_prints(name: str, capsys: Any) -> None:
    assert main(["schema", name]) == 0
    printed = capsys.readouterr().out
    Draft202012Validator.check_schema(json.loads(printed))
    told = f"make it anew: abharness schema {name} > docs/schemas/{name}.json"
    assert (PUBLISHED / f"{name}.json").read_text(encoding="utf-8") == printed, told


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield schema
        for part in schema.values():
            yield from _objects(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _objects(part)


def test_every_key_of_a_spec_has_a_description() -> None:
    schema = validator("spec").schema
    lacking = [
        f"{one.get('title')}.{name}"
        for one in _objects(schema)
        for name, part in one["properties"].items()
        if not part.get("description")
    ]
    assert lacking == []
    assert "null picks a free one" in schema["$defs"]["ServerSpec"]["properties"]["port"]["description"]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_is_valid_and_names_the_schema_for_editors(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    prefix = "# yaml-language-server: $schema="
    first = text.splitlines()[0]
    assert first.startswith(prefix)
    assert (path.parent / first.removeprefix(prefix)).resolve() == (PUBLISHED / "spec.json").resolve()
    assert faults("spec", yaml.safe_load(text)) == []


def test_the_example_in_the_reference_is_valid() -> None:
    page = (ROOT / "docs" / "reference" / "spec.md").read_text(encoding="utf-8")
    example = page.partition("```yaml\n")[2].partition("```")[0]
    assert faults("spec", yaml.safe_load(example)) == []


def test_a_spec_with_everything_is_valid() -> None:
    assert faults("spec", VALID) == []
    parse_spec(json.dumps(VALID), "x.yaml")


@pytest.mark.parametrize("value", [1, [1, 16], (2,)])
def test_one_concurrency_or_a_list(value: Any) -> None:
    data = copy.deepcopy(VALID)
    data["workloads"][0]["max_concurrency"] = list(value) if isinstance(value, tuple) else value
    data["design"]["primary"] = None
    assert faults("spec", data) == []
    parse_spec(json.dumps(data), "x.yaml")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("unknown",), 1),
        (("experiment",), "a b"),
        (("server", "env", "A"), 1),
        (("server", "env", "A"), True),
        (("server", "port"), 70000),
        (("server", "port"), "8000"),
        (("server", "serve_args"), ["--max-num-seqs", 16]),
        (("server", "model"), None),
        (("server", "models"), "m"),
        (("variants", "control"), {}),
        (("variants", "candidate", "args"), []),
        (("design", "order"), "baab"),
        (("design", "alpha"), 1),
        (("design", "launches_per_variant"), 0),
        (("design", "launches_per_variant"), 1.5),
        (("design", "primary"), "d[1]"),
        (("design", "primary"), "d[x]/tpot"),
        (("workloads",), []),
        (("workloads", 0, "kind"), "burst"),
        (("workloads", 0, "input_lens"), [8]),
        (("workloads", 0, "max_concurrency"), [0]),
        (("workloads", 1, "input_lens"), []),
        (("workloads", 2, "num_questions"), 1320),
        (("telemetry",), {"interval_s": 0.001}),
        (("trace",), {"steps": 0}),
        (("verify", "expect_log"), {"both": ["x"]}),
        (("verify", "expect_kernels"), {"candidate": {"phases": {"decoding": {"require": ["x"]}}}}),
    ],
)
def test_what_the_loader_refuses_by_its_shape_the_schema_refuses(path: tuple[Any, ...], value: Any) -> None:
    data = copy.deepcopy(VALID)
    place = data
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(SpecError):
        parse_spec(json.dumps(data), "x.yaml")
    assert not accepts("spec", data)


@pytest.mark.parametrize("path", [("experiment",), ("server",), ("variants",), ("variants", "baseline"), ("workloads",),
                                  ("workloads", 0, "name"), ("workloads", 0, "kind"), ("server", "model")])  # fmt: skip
def test_what_is_required(path: tuple[Any, ...]) -> None:
    data = copy.deepcopy(VALID)
    place = data
    for part in path[:-1]:
        place = place[part]
    del place[path[-1]]
    with pytest.raises(SpecError):
        parse_spec(json.dumps(data), "x.yaml")
    assert not accepts("spec", data)


def compared(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "abharness.cli", "compare", str(folder), "--format", "json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    data = json.loads(done.stdout)
    assert isinstance(data, dict)
    return data


def test_what_compare_prints_of_the_published_records_is_valid() -> None:
    data = compared(ROOT / "results")
    assert len(data["comparisons"]) > 4
    assert faults("comparison", data) == []


def test_what_compare_prints_of_changed_answers_and_findings_is_valid(tmp_path: Path) -> None:
    launches: Any = {
        "baseline": [Made(answers={1: "It is 2.\n#### 2"}), Made()],
        "candidate": [Made(client={"cpu_share": 0.99}), Made(status="failed")],
    }
    data = compared(write_run(tmp_path / "r", launches, "design.launches_per_variant=2"))
    assert faults("comparison", data) == []
    assert data["comparisons"][0]["exit_code"] == 4
    assert data["comparisons"][0]["accuracy"][0]["changed"]


def test_the_schema_of_a_comparison_knows_every_key_and_asks_for_each() -> None:
    data = compared(ROOT / "results" / "quickstart")
    for change in ({"outcome": "fine"}, {"exit_code": 2}, {"new": 1}, {"launches": {"baseline": [1, "x"]}}):
        wrong = copy.deepcopy(data)
        wrong["comparisons"][0] |= change
        assert not accepts("comparison", wrong), change
    for key in data["comparisons"][0]:
        wrong = copy.deepcopy(data)
        del wrong["comparisons"][0][key]
        assert not accepts("comparison", wrong), key


FILES = {
    "run": "*/*/experiment.json",
    "launch": "*/*/launches/*/launch.json",
    "evidence": "*/*/launches/*/evidence.json",
}
LINES = {"request": "*/*/launches/*/requests.jsonl", "answer": "*/*/launches/*/gsm8k.jsonl"}


@pytest.mark.parametrize("name", [*FILES, *LINES])
def test_records_are_valid_and_damaged_ones_are_not(name: str, tmp_path: Path) -> None:
    made = write_run(tmp_path / "results" / "made" / "r", {"baseline": [Made()], "candidate": [Made()]})
    checked = 0
    for results in (ROOT / "results", made.parents[1]):
        for path in results.glob(FILES.get(name) or LINES[name]):
            texts = path.read_text().splitlines()[:5] if name in LINES else [path.read_text()]
            for text in texts:
                data = json.loads(text)
                assert faults(name, data) == [], path
                assert not accepts(name, {**data, "unknown": 1})
                checked += 1
    assert checked > 4
    assert not accepts(name, [])


SPEC_VALIDATOR = validator("spec")


@given(st.sampled_from(places(VALID)), values, st.sampled_from(["replace", "remove", "rename"]))
def test_what_the_loader_accepts_the_schema_accepts(path: tuple[Any, ...], value: Any, how: str) -> None:
    try:
        text = dumped(mutate(VALID, path, value, how))
    except (ValueError, yaml.YAMLError):
        return
    if outcome(text) is not None:
        assert [error.message for error in SPEC_VALIDATOR.iter_errors(yaml.safe_load(text))] == []
