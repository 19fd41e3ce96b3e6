"""The experiment file: everything wrong with it is told before anything starts, with line, field, found and allowed."""

import re
from pathlib import Path

import pytest

from abharness.cli import main
from abharness.errors import SpecError, UsageError
from abharness.spec import ExperimentSpec
from abharness.specload import load_spec, parse_spec, spec_warnings

GOOD = """\
experiment: switch
question: Is it faster?
server:
  model: some/model
  serve_args: [--max-num-seqs, "16", --max-model-len, "2048"]
  env: {SHARED: "1"}
variants:
  baseline: {env: {SWITCH: null}}
  candidate: {env: {SWITCH: "1"}}
workloads:
  - {name: decode, kind: decode, input_len: 512, output_len: 1024, max_concurrency: [1, 16]}
  - {name: prefill, kind: prefill, input_lens: [128, 512]}
  - {name: gsm8k, kind: gsm8k, num_questions: 8}
"""


def problems(text: str, *overrides: str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "x.yaml", overrides)
    return caught.value.problems


def one_problem(text: str, *overrides: str) -> str:
    found = problems(text, *overrides)
    assert len(found) == 1, found
    return found[0]


def test_a_good_spec_reads_whole() -> None:
    spec = parse_spec(GOOD, "x.yaml")
    assert spec.merged_env("candidate") == {"SHARED": "1", "SWITCH": "1"}
    assert spec.switches() == {"SWITCH": {"baseline": None, "candidate": "1"}}
    assert spec.workloads[0].max_concurrency == (1, 16)


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ("on", "the boolean true"),
        ("no", "the boolean false"),
        ("0123", "the integer 83"),
        ("1:30", "the integer 90"),
        ("1_000", "the integer 1000"),
        ("1", "the integer 1"),
        ("1.0", "the number 1.0"),
        ("2001-01-01", "a date"),
    ],
)
def test_a6_unquoted_environment_values_are_refused_with_line_and_cure(written: str, read_as: str) -> None:
    text = GOOD.replace('SHARED: "1"', f"SHARED: {written}")
    message = one_problem(text)
    assert message.startswith("x.yaml:6: server.env.SHARED: ")
    assert f"{written} is read by YAML as {read_as}" in message
    assert f'quote it: "{written}"' in message


def test_a6_a_missing_environment_value_is_neither_empty_nor_unset() -> None:
    message = one_problem(GOOD.replace('SHARED: "1"', "SHARED: "))
    assert message == 'x.yaml:6: server.env.SHARED: no value; write "" for set and empty, or null for must be unset'


def test_a6_duplicate_keys_are_refused_and_named_with_both_lines() -> None:
    text = GOOD.replace('  env: {SHARED: "1"}', '  env:\n    G: "1"\n    G: "0"')
    assert one_problem(text) == "x.yaml:8: server.env.G: duplicate key, first given at x.yaml:7; keep one of them"


def test_every_problem_of_a_file_is_told_at_once() -> None:
    text = GOOD.replace('SHARED: "1"', "A: on, B: 0123").replace("model: some/model", "modle: x")
    found = problems(text)
    assert [line.split(": ")[1] for line in found] == ["server.env.A", "server.env.B", "server.model", "server.modle"]


def test_a5_unset_empty_zero_and_false_are_four_values() -> None:
    values = ["null", '""', '"0"', '"false"']
    for left in values:
        for right in values:
            text = GOOD.replace("SWITCH: null", f"SWITCH: {left}").replace('SWITCH: "1"', f"SWITCH: {right}")
            if left == right:
                assert "do not differ" in one_problem(text)
            else:
                assert "SWITCH" in parse_spec(text, "x.yaml").switches()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("question:", "questoin:", "x.yaml:2: questoin: unknown key; allowed here: experiment, question, server"),
        ("  candidate:", "  candidat:", "unknown name 'candidat'; allowed: baseline, candidate"),
        ("max_concurrency: [1, 16]", "max_concurrency: [1, 1]", "x.yaml:11: workloads[0].max_concurrency: "),
        ("max_concurrency: [1, 16]", "max_concurrency: 0", "workloads[0].max_concurrency"),
        (
            "output_len: 1024",
            "output_len: 2000",
            "input_len + output_len = 2512 tokens do not fit --max-model-len 2048",
        ),
        ("[128, 512]", "[128, 2048]", "do not fit --max-model-len 2048"),
        ('"2048"', '"1k"', "do not fit --max-model-len 1000"),
        ("name: prefill", "name: decode", "x.yaml:12: workloads[1].name: 'decode' is already the name of workloads[0]"),
        ("kind: prefill", "kind: prefil", "does not match any of the expected tags"),
        ("num_questions: 8", "num_questions: true", "workloads[2].num_questions: found the boolean true"),
        ("num_questions: 8", "num_questions: 8, num_fewshot: 2, dataset: ./q.jsonl", "fewshot_dataset"),
        ("[--max-num-seqs, ", "[--port, ", "--port is set by abharness: set server.port; remove it here"),
        ("[--max-num-seqs, ", "[--max-num-seqs=4, --host=0.0.0.0, ", "--host is set by abharness"),
        ("[--max-num-seqs, ", '["--max-num-seqs 8", ', "write name and value as two list items"),
        ('"16", --max', "16, --max", "x.yaml:5: server.serve_args[1]: 16 is read by YAML as the integer 16"),
        ('SHARED: "1"', 'VLLM_CACHE_ROOT: "/tmp/x"', "every launch gets a new, empty directory"),
        ('SHARED: "1"', '"A=B": "1"', "cannot be the name of an environment variable"),
        ("  baseline: {env: {SWITCH: null}}\n", "", "both variants are needed; missing: baseline"),
        ("workloads:", "verify: {expect_log: {candidate: ['(']}}\nworkloads:", "not a regular expression"),
        ("workloads:", "verify: {expect_log: {both: [x]}}\nworkloads:", "'both'"),
        ("server:", "design: {alpha: .nan}\nserver:", "design.alpha: found the number nan"),
        ("server:", "design: {primary: decode/tpot}\nserver:", "names 2 cells, not one; expected CELL/METRIC"),
        ("server:", "design: {primary: 'decode[8]/tpot'}\nserver:", "names 0 cells"),
        ("server:", "design: {primary: 'prefill[128]/tpot'}\nserver:", "'tpot' is no metric of a prefill cell"),
        (
            "server:",
            "design: {primary: tpot}\nserver:",
            "design.primary: 'tpot'; expected CELL/METRIC with CELL one of",
        ),
        ("experiment: switch", "experiment: ../x", "experiment: found '../x'"),
    ],
)
def test_what_cannot_be_run_is_refused(old: str, new: str, expected: str) -> None:
    assert old in GOOD
    assert any(expected in line for line in problems(GOOD.replace(old, new)))


@pytest.mark.parametrize(
    "text",
    ["", "- a", "x", "{", "a: [", "\0", "a: &a [*a]", "? [x]\n: 1", "a: !!int x", "&a {<<: *a}", "a: 2001-13-45", "{}"],
)
def test_what_is_no_experiment_at_all_is_told_with_the_file(text: str) -> None:
    assert all(line.startswith("x.yaml") for line in problems(text))


def test_b2_variants_cannot_be_pointed_at_one_cache() -> None:
    text = GOOD.replace("SWITCH: null", 'TRITON_CACHE_DIR: "~/t"').replace('SWITCH: "1"', 'TRITON_CACHE_DIR: "/t"')
    assert len([line for line in problems(text) if "TRITON_CACHE_DIR is set by abharness" in line]) == 2


def test_set_overrides_by_key_position_and_name() -> None:
    spec = parse_spec(
        GOOD,
        "x.yaml",
        [
            "server.model=./other",
            "workloads.decode.output_len=64",
            "workloads[1].input_lens=[64]",
            "variants.candidate.env.SWITCH=0",
            "design.launches_per_variant=2",
        ],
    )
    assert spec.server.model == "./other"
    assert spec.workloads[0].output_len == 64  # type: ignore[union-attr]
    assert spec.workloads[1].input_lens == (64,)  # type: ignore[union-attr]
    assert spec.merged_env("candidate")["SWITCH"] == "0", "a command line has no types: the text typed is the value"
    assert spec.design.launches_per_variant == 2


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("server.modle=x", "--set server.modle: server.modle: unknown key"),
        ("workloads.nosuch.output_len=1", "workloads.nosuch: there is no such element"),
        ("workloads[9].output_len=1", "there is no such element"),
        ("server.model", "expected dotted.key=value"),
        ("design.alpha=[", "--set design.alpha: not valid YAML"),
        ("design.order=aabb", "--set design.order: design.order: found 'aabb'"),
    ],
)
def test_a_bad_override_names_itself(override: str, expected: str) -> None:
    assert any(expected in line for line in problems(GOOD, override))


def test_d12_more_requests_than_sequence_slots_is_a_warning_with_the_cure() -> None:
    spec = parse_spec(GOOD.replace("[1, 16]", "[1, 64]"), "x.yaml")
    found = [finding for finding in spec_warnings(spec) if finding.code == "queueing"]
    assert found
    assert "max_concurrency 64" in found[0].message
    assert "--max-num-seqs 16" in found[0].message
    assert not [f for f in spec_warnings(parse_spec(GOOD, "x.yaml")) if f.code == "queueing"]


def test_g1_an_order_that_confounds_says_so() -> None:
    spec = parse_spec(GOOD, "x.yaml", ["design.order=ab"])
    assert [finding.code for finding in spec_warnings(spec)] == ["order_confounded"]


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.yaml"):
        load_spec(tmp_path / "no.yaml")


def test_a_file_that_is_no_text_is_a_spec_error(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError):
        load_spec(path)


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).parent.parent.joinpath("experiments").glob("*.yaml")), ids=lambda p: p.name
)
def test_shipped_experiments_are_valid(path: Path) -> None:
    spec = load_spec(path)
    assert isinstance(spec, ExperimentSpec)
    assert spec.experiment == path.stem
    assert spec.question


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (f"workloads.decode.input_len=0x{'f' * 5000}", "an integer of more than 63 bits"),
        (f"workloads[{'9' * 5000}].input_len=8", "there is no such element"),
        (f"design.primary=decode[{'9' * 5000}]/tpot", "expected CELL/METRIC"),
        ("verify={expect_log: {candidate: ['a{99999999999999999999}']}}", "not a regular expression"),
        (f"verify={{expect_log: {{candidate: ['{'(' * 5000}']}}}}", "not a regular expression"),
    ],
)
def test_numbers_and_patterns_past_every_limit_are_refused_with_their_place(override: str, told: str) -> None:
    with pytest.raises(SpecError, match=re.escape(told)):
        parse_spec(GOOD, "x.yaml", [override])


def test_a_model_length_of_5000_digits_limits_nothing() -> None:
    assert parse_spec(GOOD, "x.yaml", [f"server.serve_args=[--max-model-len, '{'9' * 5000}k']"]).server.serve_args


@pytest.mark.parametrize("text", ["${HOME}", "$HOME/x", "~/x", "a%(HOME)s", "a{{HOME}}", "$(id)"])
def test_nothing_in_a_spec_is_interpolated(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/taken")
    values = [f"server.env.SHARED={text}", f"server.model={text}", f"server.serve_args[1]={text}"]
    spec = parse_spec(GOOD, "x.yaml", values)
    assert (spec.server.env["SHARED"], spec.server.model, spec.server.serve_args[1]) == (text, text, text)


def test_what_looks_like_a_reference_to_a_variable_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(GOOD.replace('SHARED: "1"', 'SHARED: "${HOME}/x"').replace('SWITCH: "1"', 'SWITCH: "$ONE"'))
    assert main(["run", str(path), "--dry-run", "--set", "server.python=managed:cpu"]) == 0
    done = capsys.readouterr()
    assert "warning: server.env.SHARED is the text '${HOME}/x': a spec takes nothing from the environment" in done.err
    assert "warning: variants.candidate.env.SWITCH is the text '$ONE'" in done.err
    assert "${HOME}/x" in done.out
    path.write_text(GOOD.replace('SHARED: "1"', 'SHARED: "^a$|costs 5 $"'))
    assert main(["run", str(path), "--dry-run", "--set", "server.python=managed:cpu"]) == 0
    assert "takes nothing from the environment" not in capsys.readouterr().err


def test_a_fault_in_the_only_workload_is_told_once() -> None:
    head = GOOD.partition("workloads:")[0]
    line = "workloads: [{name: d, kind: decode, input_len: 8, output_len: 8, max_concurrency: 1, num_promts: 2}]\n"
    assert "workloads[0].num_promts: unknown key" in one_problem(head + line)
    assert "workloads: found a list; tuple should have at least 1 item" in one_problem(head + "workloads: []\n")
