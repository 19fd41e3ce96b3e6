"""Where two answers part and whether a near-tie explains it (field report E11)."""

from decimal import Decimal
from typing import Any

import pytest

from abharness.accuracy import Question, answer_record, build_prompt
from abharness.flips import NEAR_TIE_NATS, explain_flip
from abharness.record import AnswerRecord, TokenStep

QUESTION = Question(942, "How many?", "#### 18", Decimal(18))
Step = tuple[str, float | None, str | None, float | None]


def make(text: str, steps: list[Step] | None = None, **more: Any) -> AnswerRecord:
    tokens = None
    if steps is not None:
        tokens = [TokenStep(token=t, logprob=p, runner_up=r, runner_up_logprob=q) for t, p, r, q in steps]
    prompt = build_prompt(QUESTION, style="chat")
    return answer_record("g", QUESTION, prompt, text, finish_reason="stop", generation={}, tokens=tokens, **more)


SURE: Step = ("#### ", -0.01, "So", -5.0)


def test_a_near_tie_is_recognised() -> None:
    """E11: each runner-up is the other's token, both gaps small."""
    a = make("#### 18", [SURE, ("18", -0.70, "19", -0.73)])
    b = make("#### 19", [SURE, ("19", -0.69, "18", -0.75)])
    flip = explain_flip(a, b)
    assert (flip.doc_id, flip.position, flip.token_a, flip.token_b) == (942, 1, "18", "19")
    assert flip.gap_a == pytest.approx(0.03)
    assert flip.gap_b == pytest.approx(0.06)
    assert (flip.near_tie, flip.reason) == (True, None)
    assert (flip.identical_text, flip.answer_changed) == (False, True)
    assert (flip.char_position, flip.char_text) == (6, "answer")


@pytest.mark.parametrize(
    ("step_a", "step_b"),
    [
        (("18", -0.1, "19", -0.1 - NEAR_TIE_NATS - 0.01), ("19", -0.70, "18", -0.71)),
        (("18", -0.70, "19", -0.71), ("19", -0.1, "18", -3.0)),
        (("18", -0.70, "17", -1.0), ("19", -0.70, "18", -0.71)),
        (("18", -0.70, "19", -0.71), ("19", -0.70, "17", -1.0)),
        (("18", -3.0, "19", -0.1), ("19", -0.70, "18", -0.71)),
    ],
)
def test_a_clear_gap_is_no_near_tie(step_a: Step, step_b: Step) -> None:
    flip = explain_flip(make("#### 18", [SURE, step_a]), make("#### 19", [SURE, step_b]))
    assert (flip.position, flip.near_tie, flip.reason) == (1, False, None)


@pytest.mark.parametrize(
    ("close", "near_tie"), [({"19": -0.9}, True), ({"19": -1.1}, False), ({}, False), (None, None)]
)
def test_three_tokens_may_tie(close: dict[str, float] | None, near_tie: bool | None) -> None:
    """The runner-up of a is a third token: whether b's was as close is known only where such candidates were kept."""
    a, b = make("#### 18", [("18", -0.70, "17", -0.71)]), make("#### 19", [("19", -0.70, "18", -0.71)])
    assert a.tokens is not None
    a = a.model_copy(update={"tokens": [a.tokens[0].model_copy(update={"close": close})]})
    flip = explain_flip(a, b)
    assert flip.near_tie is near_tie
    assert ("keeps only the runner-up" in (flip.reason or "")) is (near_tie is None)


def test_a_gap_of_two_rounding_steps_is_near_in_float32_too() -> None:
    a = make("#### 18", [("18", -0.7001, "19", -0.9502)])
    assert explain_flip(a, make("#### 19", [("19", -0.70, "18", -0.95)])).near_tie is True


def test_an_equal_answer_by_another_way_is_a_changed_text_only() -> None:
    """E11: texts differ, the answer does not flip."""
    a = make("So 18", [("So", -0.70, "Thus", -0.72), (" 18", -0.1, " 19", -3.0)])
    b = make("Thus 18", [("Thus", -0.70, "So", -0.72), (" 18", -0.1, " 19", -3.0)])
    flip = explain_flip(a, b)
    assert (flip.answer_changed, flip.identical_text, flip.position, flip.near_tie) == (False, False, 0, True)


def test_identical_texts_have_no_divergence() -> None:
    flip = explain_flip(make("#### 18"), make("#### 18"))
    assert (flip.identical_text, flip.answer_changed, flip.position, flip.near_tie) == (True, False, None, None)
    assert flip.reason == "the texts are identical"
    assert flip.char_position is None


@pytest.mark.parametrize(
    ("steps_a", "steps_b", "who"),
    [(None, None, "in a and b"), (None, [SURE], "in a"), ([SURE], None, "in b"), ([], [SURE], "in a")],
)
def test_without_tokens_only_the_character_position_is_known(steps_a: Any, steps_b: Any, who: str) -> None:
    flip = explain_flip(make("#### 18", steps_a), make("#### 19", steps_b))
    assert (flip.position, flip.token_a, flip.gap_a, flip.near_tie) == (None, None, None, None)
    assert flip.reason == f"no tokens with log-probabilities were recorded {who}"
    assert (flip.char_position, flip.char_text) == (6, "answer")


@pytest.mark.parametrize(
    ("step_a", "who"),
    [(("18", None, "19", -0.7), "in a"), (("18", -0.7, None, None), "in a"), (("18", -0.7, "19", -0.7), "")],
)
def test_a_missing_log_probability_leaves_near_tie_unknown(step_a: Step, who: str) -> None:
    flip = explain_flip(make("#### 18", [SURE, step_a]), make("#### 19", [SURE, ("19", -0.7, "18", -0.7)]))
    assert flip.position == 1
    if who:
        assert (flip.gap_a, flip.near_tie) == (None, None)
        assert flip.reason == f"no top-2 log-probabilities at this token {who}"
    else:
        assert (flip.gap_a, flip.near_tie, flip.reason) == (0.0, True, None)


@pytest.mark.parametrize("swap", [False, True])
def test_where_one_ends_the_gap_of_ending_is_not_known(swap: bool) -> None:
    short, long = (
        make("18", [("18", -0.1, "19", -3.0)]),
        make("18 eggs", [("18", -0.1, "19", -3.0), (" eggs", -0.6, ".", -0.9)]),
    )
    flip = explain_flip(long, short) if swap else explain_flip(short, long)
    ended, going = ("token_b", "token_a") if swap else ("token_a", "token_b")
    assert (flip.position, getattr(flip, ended), getattr(flip, going), flip.near_tie) == (1, None, " eggs", None)
    assert flip.reason == f"{'b' if swap else 'a'} ended here; the log-probability of ending is not recorded"
    assert flip.char_position == 2


def test_a_difference_in_the_reasoning_comes_first() -> None:
    flip = explain_flip(make("#### 18", reasoning="hm, 9*2"), make("#### 18", reasoning="hm, 2*9"))
    assert (flip.identical_text, flip.char_text, flip.char_position) == (False, "reasoning", 4)


def test_tokens_that_do_not_show_the_difference_are_said_so() -> None:
    flip = explain_flip(make("#### 18", [SURE]), make("#### 19", [SURE]))
    assert (flip.position, flip.reason) == (None, "the recorded tokens are equal though the texts differ")


def test_a_failed_request_is_no_flip_of_the_model() -> None:
    flip = explain_flip(make("#### 18", [SURE]), make("", None, error="HTTP 500"))
    assert (flip.answer_changed, flip.near_tie, flip.reason) == (True, None, "a request failed: HTTP 500")


def test_answers_to_two_questions_are_not_compared() -> None:
    other = make("#### 18").model_copy(update={"doc_id": 1})
    with pytest.raises(ValueError, match="942 and 1"):
        explain_flip(make("#### 18"), other)
