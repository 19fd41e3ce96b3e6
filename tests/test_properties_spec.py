"""The spec loader on any text, any YAML, any damaged spec and any --set: a spec, or faults with a place; no traceback."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from abharness.cli import main
from abharness.errors import SpecError
from abharness.plan import config_hash
from abharness.spec import ExperimentSpec
from abharness.specload import parse_spec, spec_warnings
from tests.synthetic import SPEC

VALID: dict[str, Any] = {
    "experiment": "x",
    "server": {"model": "m", "env": {"A": "1", "B": None}, "serve_args": ["--max-model-len", "8k"], "inherit": ["P"]},
    "variants": {"baseline": {"env": {"S": None}}, "candidate": {"env": {"S": "1"}, "python": "p"}},
    "design": {"order": "abba", "launches_per_variant": 2, "primary": "d[1]/tpot"},
    "workloads": [
        {"name": "d", "kind": "decode", "input_len": 8, "output_len": 8, "max_concurrency": [1, 2]},
        {"name": "p", "kind": "prefill", "input_lens": [8, 16]},
        {"name": "g", "kind": "gsm8k", "num_questions": 4, "dataset": "./q.jsonl"},
    ],
    "verify": {"expect_log": {"candidate": ["on$"]}, "plugins": {"baseline": ["p"]}},
}
LONG = "9" * 5000
TEXTS = ("", "on", "null", "~", "1", "0x1F", "1:30", "2024-13-45", "!!int x", "!!binary =", "&a [*a]", "*a", "<<", "{", "[",
         ".nan", ".inf", "1e400", "8k", LONG, f"0x{LONG}", "--port", "a\0b", "\ud800", "\x85", "managed:cpu", "d[1]/tpot",
         "d[99]/x", f"d[{LONG}]/tpot", "(", "--max-model-len", f"{LONG}k", "=", "?", "!!set {a}", "!!map x", "!!seq x",
         "!!timestamp 2001-01-01", "!!float x", "!!python/object:os.system x", "%TAG", "---", "...")  # fmt: skip
odd_texts = st.sampled_from(TEXTS) | st.text(max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(10**4999, 10**5001) | st.floats() | odd_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_texts, inner, max_size=3),
    max_leaves=6,
)
KEYS = ("server", "env", "variants", "baseline", "candidate", "design", "workloads", "[0]", "[1]", f"[{LONG}]", "decode",
        "model", "serve_args", "primary", "verify", "expect_log", "plugins", "max_concurrency", "port", "name",
        "")  # fmt: skip
keys = st.lists(st.sampled_from(KEYS) | st.text(max_size=4), max_size=4).map(".".join)
assignments = st.builds(lambda key, value: f"{key}={value}", keys, odd_texts) | st.text(max_size=12)


def outcome(text: str, overrides: list[str] | None = None) -> ExperimentSpec | None:
    """The spec, or None when it was refused properly."""
    try:
        spec = parse_spec(text, "x.yaml", overrides or [])
    except SpecError as error:
        problems = error.problems
    else:
        problems = []
        config_hash(spec)
        spec_warnings(spec)
        return spec
    assert problems
    assert all(problem.startswith(("x.yaml", "--set", "the experiment")) for problem in problems)
    return None


def dumped(data: Any) -> str:
    return str(yaml.safe_dump(data, allow_unicode=True))


@given(
    st.text(max_size=80)
    | st.lists(odd_texts | st.sampled_from([": ", "\n", "- ", "  ", "? "]), max_size=12).map("".join)
)
@example("!!map x")
@example("a: &a [*a]")
@example("\ud800")
@example("a: !!timestamp x")
@example("[" * 3000)
@example("{a: " * 1200)
@example('"\\uD800": 1')
def test_any_text_is_a_spec_or_refused(text: str) -> None:
    assert outcome(text) is None


@given(values)
def test_any_yaml_is_a_spec_or_refused(data: Any) -> None:
    try:
        text = dumped(data)
    except (ValueError, RecursionError, yaml.YAMLError):
        return  # an integer of 5,000 digits cannot be written by this Python
    assert outcome(text) is None


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        found += places(value, (*path, key))
    return found


def mutate(data: Any, path: tuple[Any, ...], value: Any, how: str) -> Any:
    result = copy.deepcopy(data)
    target = result
    for part in path[:-1]:
        target = target[part]
    if how == "remove":
        del target[path[-1]]
    elif how == "rename" and isinstance(target, dict):
        target[str(value)] = target.pop(path[-1])
    else:
        target[path[-1]] = value
    return result


@given(st.sampled_from(places(VALID)), values, st.sampled_from(["replace", "remove", "rename"]))
def test_a_damaged_spec_is_still_one_or_refused(path: tuple[Any, ...], value: Any, how: str) -> None:
    try:
        text = dumped(mutate(VALID, path, value, how))
    except (ValueError, yaml.YAMLError):
        return
    outcome(text)


@given(st.lists(assignments, max_size=4))
@example([f"workloads[{LONG}].name=x"])
@example([f"server.serve_args=[--max-model-len, '{LONG}k']"])
@example([f"server.port=0x{LONG}"])
@example([f"design.primary='decode[{LONG}]/tpot'"])
@example(["workloads.decode.input_len=0x" + LONG])
@example(["verify={expect_log: {candidate: ['a{99999999999999999999}']}}"])
@example(["verify={expect_log: {candidate: ['" + "(" * 5000 + "']}}"])
@example(["=", "..=1", "server.env.=1", "[0]=1", "server=", "variants=[]", "server.env=[A]", "workloads={}"])
def test_any_set_is_a_spec_or_refused(overrides: list[str]) -> None:
    outcome(SPEC, overrides)


@given(st.dictionaries(st.text("ABC_", min_size=1, max_size=4), st.none() | st.text(max_size=6).filter(
    lambda text: "\0" not in text and text.isprintable()), max_size=4))  # fmt: skip
def test_quoted_values_arrive_as_they_were_written(env: dict[str, str | None]) -> None:
    data = copy.deepcopy(VALID)
    data["server"]["env"] = env
    data["server"]["inherit"] = []
    spec = outcome(dumped(data))
    assert spec is not None
    assert spec.server.env == env


@given(st.sampled_from(["S", "ODD", "on"]), st.text(max_size=8).filter(str.isprintable))
def test_a_variable_given_by_set_is_never_another_value(name: str, value: str) -> None:
    """`--set` has no types: what does not read as YAML's null or a container is the text itself, or is refused."""
    spec = outcome(SPEC, [f"variants.candidate.env.{name}={value}"])
    if spec is not None and spec.variants["candidate"].env[name] is not None:
        found = spec.variants["candidate"].env[name]
        loaded = yaml.safe_load(value)
        assert found == (loaded if isinstance(loaded, str) else value.strip().split(" #")[0].strip())


@pytest.mark.parametrize("raw", [b"", b"\xff\xfe", b"a: \xff", b"\0", b"experiment: x\0", b"\xef\xbb\xbfexperiment: x"])
def test_any_file_is_refused_by_the_command_line(raw: bytes, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(raw)
    assert main(["run", "--dry-run", str(path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
