"""Questions, draws, prompts, scores, records, summaries and checks of the accuracy workload."""

import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest

from abharness.accuracy import (
    STOP,
    Question,
    answer_record,
    build_prompt,
    draw,
    fewshot_examples,
    load_questions,
    questions_sha256,
    score,
    summarise,
)
from abharness.checks import TRUNCATION_LIMIT, check_accuracy
from abharness.errors import UsageError
from abharness.record import AnswerRecord, TokenStep


def make_question(doc_id: int = 0, gold: str = "18") -> Question:
    return Question(doc_id, f"How many eggs, case {doc_id}?", f"9*2=<<9*2=18>>18\n#### {gold}", Decimal(gold))


def make_record(
    text: str | None, doc_id: int = 0, gold: str = "18", finish: str | None = "stop", **more: Any
) -> AnswerRecord:
    question = make_question(doc_id, gold)
    prompt = build_prompt(question, style="chat")
    return answer_record("gsm8k", question, prompt, text, finish_reason=finish, generation={"max_tokens": 512}, **more)


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


GOOD = {"question": "How many?", "answer": "3*7=21\n#### 21"}


def test_a_local_file_is_read_in_order(tmp_path: Path) -> None:
    rows = [
        GOOD,
        {"question": "A\u2028B?", "answer": "#### -4", "extra": 1},
        {"question": "C?", "answer": "x\n#### 2,125"},
    ]
    path = tmp_path / "own.jsonl"
    path.write_text(
        "\ufeff" + "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8"
    )
    questions = load_questions(str(path))
    assert [(q.doc_id, q.question, q.gold) for q in questions] == [
        (0, "How many?", Decimal(21)),
        (1, "A\u2028B?", Decimal(-4)),
        (2, "C?", Decimal(2125)),
    ]
    assert questions[0].answer == GOOD["answer"]


@pytest.mark.parametrize(
    "bad",
    [
        '{"question": "half a li',
        [1],
        {"question": "no answer"},
        {"question": " ", "answer": "#### 1"},
        {"question": 5, "answer": "#### 1"},
        {"question": "Q", "answer": None},
        {"question": "Q", "answer": "no marker 5"},
        {"question": "Q", "answer": "#### five"},
        {"question": "Q", "answer": "#### 4-6"},
        {"question": "Q", "answer": "####"},
        "[" * 100_000,
    ],
)
def test_a_bad_row_is_named_with_file_line_and_shape(tmp_path: Path, bad: Any) -> None:
    path = write_lines(tmp_path / "own.jsonl", GOOD, "", bad, GOOD)
    with pytest.raises(UsageError, match=r"expected .*question.*answer.*#### N") as caught:
        load_questions(path)
    assert f"{path}:3: " in str(caught.value)


def test_many_bad_rows_are_reported_together_but_not_all(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "own.jsonl", *[{"question": "Q", "answer": "?"}] * 12)
    with pytest.raises(UsageError) as caught:
        load_questions(path)
    lines = str(caught.value).splitlines()
    assert lines[-1] == "and 7 more"
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("name", "content"), [("none.jsonl", None), ("empty.jsonl", b""), ("latin.jsonl", b'{"question": "\xe9"}')]
)
def test_an_unreadable_or_empty_file_is_a_usage_error(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=name):
        load_questions(str(path))


def test_the_real_test_split_is_read_whole() -> None:
    folder = os.environ.get("ABHARNESS_GSM8K_DIR", Path(__file__).parent.parent.parent / "shared" / "data" / "gsm8k")
    path = Path(folder) / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is absent: set ABHARNESS_GSM8K_DIR to a folder with GSM8K's test.jsonl")
    questions = load_questions(str(path))
    assert len(questions) == 1319
    assert questions[0].gold == 18
    assert sorted(q.gold for q in questions)[:2] == [-10, -3]
    assert all(q.answer.replace(",", "").endswith(f"#### {q.gold}") for q in questions)


def test_a_dataset_that_cannot_be_loaded_points_to_a_local_file() -> None:
    """Without a network the hub is out of reach; with one this name does not exist: a usage error in either case."""
    with pytest.raises(UsageError, match="no-such-owner/no-such-set-of-questions") as caught:
        load_questions("no-such-owner/no-such-set-of-questions")
    assert caught.value.hint is not None
    assert ".jsonl" in caught.value.hint


def test_hub_rows_become_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def fake_load(name: str, config: str, *, split: str) -> datasets.Dataset:
        calls.append((name, config, split))
        return datasets.Dataset.from_list([GOOD, {"question": "B?", "answer": "#### 7"}])

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, timeout: None)
    monkeypatch.setattr(datasets, "load_dataset", fake_load)
    questions = load_questions("openai/gsm8k", "train")
    assert calls == [("openai/gsm8k", "main", "train")]
    assert [(q.doc_id, q.gold) for q in questions] == [(0, Decimal(21)), (1, Decimal(7))]


def test_a_bad_hub_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, timeout: None)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: datasets.Dataset.from_list([GOOD, {"question": "B", "answer": "7"}])
    )
    with pytest.raises(UsageError, match="openai/gsm8k test row 1"):
        load_questions("openai/gsm8k")


def test_importing_accuracy_does_not_import_datasets() -> None:
    code = "import sys, abharness.accuracy; print('datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


POOL = [make_question(doc_id) for doc_id in range(1319)]


def test_a_draw_is_fixed_for_good() -> None:
    """These ids follow from SHA-256 alone: a change of them makes old and new runs incomparable."""
    assert [q.doc_id for q in draw(POOL, 8, seed=0)] == [392, 942, 404, 87, 1023, 923, 282, 46]


def test_a_smaller_draw_begins_the_larger_and_nothing_repeats() -> None:
    large = [q.doc_id for q in draw(POOL, 128, seed=3)]
    assert [q.doc_id for q in draw(POOL, 8, seed=3)] == large[:8]
    assert len(set(large)) == 128
    assert large != sorted(large)
    assert large[:8] != [q.doc_id for q in draw(POOL, 8, seed=4)]
    assert sorted(q.doc_id for q in draw(POOL, 1319, seed=3)) == list(range(1319))


@pytest.mark.parametrize("n", [-1, 0, 1320])
def test_an_impossible_draw_is_refused(n: int) -> None:
    with pytest.raises(UsageError, match=rf"num_questions is {n}.* 1 to 1319"):
        draw(POOL, n, seed=0)


def test_fewshot_examples_are_never_asked_and_do_not_depend_on_the_number_of_questions() -> None:
    few = fewshot_examples(POOL, 5, seed=0, asked=draw(POOL, 8, seed=0))
    assert few == fewshot_examples(POOL, 5, seed=0, asked=draw(POOL, 1314, seed=0))
    assert len({q.doc_id for q in few}) == 5
    assert fewshot_examples(POOL, 0, seed=0, asked=POOL) == []


def test_fewshot_examples_among_the_asked_are_refused() -> None:
    with pytest.raises(UsageError, match="among the 1315 asked"):
        fewshot_examples(POOL, 5, seed=0, asked=draw(POOL, 1315, seed=0))
    with pytest.raises(UsageError, match="0 to 1319"):
        fewshot_examples(POOL, 1320, seed=0, asked=[])
    copy = [Question(5000 + q.doc_id, q.question, q.answer, q.gold) for q in POOL]
    with pytest.raises(UsageError, match="among the 1319 asked"):
        fewshot_examples(copy, 2, seed=9, asked=POOL)


def test_a_zero_shot_chat_prompt_asks_for_the_marker() -> None:
    prompt = build_prompt(make_question(), style="chat")
    assert prompt.text is None
    assert prompt.stop == ()
    assert prompt.messages is not None
    assert [message["role"] for message in prompt.messages] == ["user"]
    assert prompt.messages[0]["content"].startswith("How many eggs, case 0?\n\n")
    assert "#### <number>" in prompt.messages[0]["content"]


def test_a_fewshot_chat_prompt_alternates_turns() -> None:
    prompt = build_prompt(make_question(), style="chat", fewshot=POOL[1:3])
    assert prompt.messages is not None
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert prompt.messages[1]["content"] == POOL[1].answer
    assert "case 0" in prompt.messages[-1]["content"]


def test_a_completion_prompt_is_lm_eval_s() -> None:
    prompt = build_prompt(make_question(), style="completion", fewshot=POOL[1:2])
    assert prompt.messages is None
    assert prompt.text == (
        "Question: How many eggs, case 1?\nAnswer: 9*2=<<9*2=18>>18\n#### 18\n\n"
        "Question: How many eggs, case 0?\nAnswer:"
    )
    assert prompt.stop == STOP == ("Question:", "</s>", "<|im_end|>")


@pytest.mark.parametrize("style", ["chat", "completion"])
def test_a_question_is_never_its_own_example(style: Any) -> None:
    with pytest.raises(UsageError, match="question 1 is one of its own"):
        build_prompt(POOL[1], style=style, fewshot=POOL[:3])


def test_the_hash_covers_questions_golds_prompts_and_order() -> None:
    questions = POOL[:2]
    chat = [build_prompt(q, style="chat") for q in questions]
    base = questions_sha256(questions, chat)
    assert base == questions_sha256(list(questions), list(chat))
    other_gold = [make_question(0, "19"), questions[1]]
    variants = [
        questions_sha256(questions[::-1], chat[::-1]),
        questions_sha256(questions, [build_prompt(q, style="completion") for q in questions]),
        questions_sha256(questions, [build_prompt(q, style="chat", fewshot=POOL[5:6]) for q in questions]),
        questions_sha256(other_gold, chat),
        questions_sha256(questions[:1], chat[:1]),
    ]
    assert len({base, *variants}) == 6


@pytest.mark.parametrize(
    ("text", "finish", "state"),
    [
        ("#### 18", "stop", "right"),
        ("#### 19", "stop", "wrong"),
        ("#### -18", "stop", "wrong"),
        ("I do not know.", "stop", "no_answer"),
        ("#### 17-18", "stop", "no_answer"),
        ("", "stop", "no_answer"),
        (None, "stop", "no_answer"),
        ("<think>7, 14, 18", "stop", "no_answer"),
        ("Each box 12, so 6*3=18. Then 18", "length", "truncated"),
        ("", "length", "truncated"),
        (None, "length", "truncated"),
        ("The answer is 18.\n\nAnd also", "length", "truncated"),
        ("#### 18", "length", "truncated"),
        ("<think>#### 18\n more", "length", "truncated"),
        ("6*3=18\n#### 18\n\nQuestion: A tin has 4 pens.\nAnswer: 4*3=12 a", "length", "right"),
        ("6*2=12\n#### 12\n\nQuestion: A tin has 6 pens.\n#### 18\n", "length", "wrong"),
        ("#### 18", None, "error"),
        ("#### 18", "abort", "error"),
    ],
)
def test_state(text: str | None, finish: str | None, state: str) -> None:
    """E6: cut off is neither right nor wrong, except after a finished `#### N` line. E5: only content is scored."""
    assert score(make_question(), text, finish_reason=finish).state == state


def test_a_truncated_or_failed_reply_gives_no_value_and_no_match() -> None:
    """E6: no middle number is left lying around to be counted."""
    for outcome in (
        score(make_question(), "Then 18", finish_reason="length"),
        score(make_question(), "#### 18", finish_reason="stop", error="connection closed"),
    ):
        assert {e.value for e in outcome.extractions.values()} == {None}
        assert {e.exact_match for e in outcome.extractions.values()} == {None}


def test_the_deciding_filter_makes_the_state() -> None:
    text = "The answer is 18."
    assert score(make_question(), text, finish_reason="stop").state == "right"
    strict = score(make_question(), text, finish_reason="stop", decided_by="strict-match")
    assert strict.state == "no_answer"
    assert strict.extractions["flexible-extract"].exact_match is True
    assert strict.extractions["strict-match"].exact_match is False


def test_a_record_has_lm_eval_s_keys_and_survives_json() -> None:
    tokens = [TokenStep(token="18", logprob=-0.1, runner_up="19", runner_up_logprob=-2.5)]
    record = make_record("#### 18", reasoning="7? 3*7", tokens=tokens, prompt_tokens=50, output_tokens=4, e2el_s=0.5)
    line = json.loads(json.dumps(record.model_dump(mode="json"), allow_nan=False))
    assert AnswerRecord.model_validate(line) == record
    assert line["doc"] == {"question": "How many eggs, case 0?", "answer": "9*2=<<9*2=18>>18\n#### 18"}
    assert line["target"] == line["doc"]["answer"]
    assert json.loads(line["arguments"]["gen_args_0"]["arg_0"])[0]["role"] == "user"
    assert line["arguments"]["gen_args_0"]["arg_1"] == {"until": [], "max_tokens": 512}
    assert (line["resps"], line["filtered_resps"]) == ([["#### 18"]], ["18"])
    assert (line["filter"], line["exact_match"], line["state"]) == ("flexible-extract", 1.0, "right")
    assert set(line["extractions"]) == {"strict-match", "flexible-extract"}
    assert (line["reasoning"], line["prompt_tokens"], line["output_tokens"], line["e2el_s"]) == ("7? 3*7", 50, 4, 0.5)


@pytest.mark.parametrize(
    ("text", "more", "state", "exact_match", "filtered"),
    [
        ("#### 19", {}, "wrong", 0.0, "19"),
        ("none", {}, "no_answer", 0.0, "[invalid]"),
        (None, {"reasoning": "so it is 18", "finish": "length"}, "truncated", None, "[invalid]"),
        (None, {"reasoning": "so it is 18"}, "no_answer", 0.0, "[invalid]"),
        ("#### 18", {"error": "HTTP 500"}, "error", None, "[invalid]"),
    ],
)
def test_what_a_record_says_of_an_answer_that_is_not_right(
    text: str | None, more: dict[str, Any], state: str, exact_match: float | None, filtered: str
) -> None:
    """E5 and E6: reasoning is kept, never scored; what was not scored has no exact_match."""
    record = make_record(text, **more)
    assert (record.state, record.exact_match, record.filtered_resps) == (state, exact_match, [filtered])
    assert record.reasoning == more.get("reasoning")


def test_a_reply_without_an_end_says_why_it_is_an_error() -> None:
    assert make_record("#### 18", finish="abort").error == "finish_reason 'abort' does not say that the reply is whole"
    assert make_record("#### 18", error="HTTP 500").error == "HTTP 500"


def test_summary() -> None:
    """E4: guesses are listed. E6: truncation apart, with its rate."""
    records = [
        make_record("#### 18", 0),
        make_record("The answer is 18.", 1),
        make_record("18 eggs, 2 hens", 2),
        make_record("no idea", 3),
        make_record("18 and", 4, finish="length"),
        make_record(None, 5, error="HTTP 500"),
        make_record("2 hens, 18 eggs", 6),
    ]
    summary = summarise(records)
    assert summary.asked == 7
    assert summary.states == {"right": 3, "wrong": 1, "truncated": 1, "no_answer": 1, "error": 1}
    flexible, strict = summary.exact_match["flexible-extract"], summary.exact_match["strict-match"]
    assert (flexible.right, flexible.scored, flexible.total, flexible.rate) == (3, 5, 7, 3 / 7)
    assert (strict.right, strict.scored, strict.total) == (1, 5, 7)
    assert summary.truncation_rate == 1 / 7
    assert summary.low_confidence == (2, 6)


def test_nothing_asked_has_no_rates() -> None:
    summary = summarise([])
    assert (summary.asked, summary.truncation_rate, summary.low_confidence) == (0, None, ())
    assert {match.rate for match in summary.exact_match.values()} == {None}
    assert set(summary.states.values()) == {0}


def test_a_full_set_of_answers_has_no_findings() -> None:
    records = [make_record("#### 18", i) for i in range(20)] + [make_record("18", 20, finish="length")]
    assert TRUNCATION_LIMIT > 1 / 21
    assert check_accuracy(records, range(21)) == []
    assert check_accuracy([], []) == []


def test_missing_answers_are_named() -> None:
    """H1."""
    (finding,) = check_accuracy([make_record("#### 18", i) for i in range(57)], range(128))
    assert finding.code == "incomplete_requests"
    assert "incomplete 57/128" in finding.message
    assert "57, 58, 59" in finding.message
    assert not finding.fatal


def test_repeated_and_foreign_answers_are_named() -> None:
    records = [make_record("#### 18", i) for i in (0, 1, 1, 7)]
    (finding,) = check_accuracy(records, range(2))
    assert finding.code == "incomplete_requests"
    assert "questions 1, 7 (2 of 3)" in finding.message


def test_failed_requests_are_named_with_the_first_reason() -> None:
    records = [make_record("#### 18", 0), make_record(None, 1, error="HTTP 500")]
    (finding,) = check_accuracy(records, range(2))
    assert finding.code == "incomplete_requests"
    assert "1 of 2 requests failed" in finding.message
    assert "HTTP 500" in finding.message


def test_many_truncated_answers_are_a_warning_with_number_and_limit() -> None:
    """E6."""
    records = [make_record("#### 18", i) for i in range(18)] + [make_record("18", i, finish="length") for i in (18, 19)]
    (finding,) = check_accuracy(records, range(20))
    assert finding.code == "accuracy_truncated"
    assert "2 of 20 answers hit the token limit (10.0%, limit 5%)" in finding.message
    assert finding.hint is not None
    assert "max_tokens" in finding.hint
    assert not finding.fatal
