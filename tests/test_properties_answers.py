"""The answer extractor: any text has an outcome, a planted answer is found, equality is that of numbers."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

from hypothesis import assume, example, given
from hypothesis import strategies as st

from abharness.accuracy import Question, answer_record, build_prompt, parse_gold, score
from abharness.answers import FILTERS, canonical, equals, extract, states_marker_in_full
from abharness.record import AnswerRecord

FRAGMENTS = (
    "####", "#### ", "\\boxed{", "}", "{", "The answer is", "Answer:", "A:", "Question:", "<think>", "</think>", "$", "€",
    "1", "18", "4-6", "3:30", "1/2", "1/0", "3 1/2", ".5", "1e9", "1e999", "2 × 10^3", "x1", "½", "١٢", "1,000", "1,00",
    "\n", " ", ".", ",", "=", "+", "-", "−", "%", "**", "^", "²", "\\frac{1}{0}", "\\frac{3}{4}", "{,}", "<|im_end|>",
    "</s>", "negative ", "So she has ", " eggs for the 2 days.", "0" * 40, "9" * 5000, "1/" + "9" * 29, "5th", "Step 1:",
)  # fmt: skip
replies = st.text(max_size=60) | st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12).map("".join)
decimals = st.decimals(-(10**12), 10**12, allow_nan=False, allow_infinity=False, places=3)
integers = st.integers(-(10**15), 10**15)
QUESTION = Question(0, "How many?", "18\n#### 18", Decimal(18))


@given(replies)
@example("#### " + "9" * 5000)
@example("The answer is 1" + "0" * 5000 + "/3")
@example("1e99 " * 50)
def test_any_text_has_an_outcome(text: str) -> None:
    for name in FILTERS:
        found = extract(text, name)
        assert found.method
        assert found.exact_match is None
        if found.value is not None:
            exact = Fraction(found.value) if "/" in found.value else Decimal(found.value)
            assert canonical(exact) == found.value
    assert states_marker_in_full(text) in (True, False)
    parse_gold(text)


@given(replies | st.none(), st.sampled_from(["stop", "length", "abort", None]), st.none() | st.just("500"))
def test_any_reply_is_one_record_in_one_state(text: str | None, finish: str | None, error: str | None) -> None:
    assume(text is None or text.isprintable() or not any(0xD800 <= ord(char) < 0xE000 for char in text))
    record = answer_record(
        "gsm8k", QUESTION, build_prompt(QUESTION, style="chat"), text, finish_reason=finish, generation={}, error=error
    )
    assert AnswerRecord.model_validate_json(record.model_dump_json()) == record
    assert (record.exact_match is None) == (record.state in ("truncated", "error"))
    if record.state == "right":
        assert record.exact_match == 1.0


def forms(value: int) -> list[str]:
    return [
        f"#### {value}",
        f"Some working: 3 + 4 = 7.\n#### {value:,}",
        f"We get\n#### **{value}**",
        f"#### ${value}" if value >= 0 else f"#### -${-value}",
        f"#### {value}.00",
        f"Thus \\boxed{{{value}}}.",
        f"so 4 and 5 give $\\boxed{{{value:,}}}$".replace(",", "{,}"),
        f"First 3 apples, then 4. The answer is {value}.",
        f"First 3 apples, then 4.\nAnswer: {value}",
        f"<think>maybe Answer: 7? 3*7=21</think>\nThe answer is {value}.",
        f"#### {value}\n\nQuestion: A tin has 4 pens...\nAnswer: 4*3=12\n#### 12",
    ]


@given(integers, st.integers(0, 10))
def test_a_planted_answer_is_found_in_every_known_form(value: int, form: int) -> None:
    text = forms(value)[form]
    found = extract(text, "flexible-extract")
    assert found.value == str(value), text
    assert not found.low_confidence
    if "####" in text and form != 9:
        assert extract(text, "strict-match").value == str(value)


@given(integers)
def test_full_width_digits_and_unicode_minus_are_digits_and_minus(value: int) -> None:
    wide = str(value).translate({ord("0") + d: chr(0xFF10 + d) for d in range(10)} | {ord("-"): "−"})
    assert extract(f"#### {wide}", "strict-match").value == str(value)


@given(decimals, st.integers(0, 5), st.booleans())
def test_equal_numbers_are_equal_however_they_are_written(value: Decimal, zeros: int, plus: bool) -> None:
    written = format(value, "f") + ("0" * zeros if "." in format(value, "f") else "")
    written = f"+{written}" if plus and not written.startswith("-") else written
    found = extract(f"#### {written}", "strict-match")
    assert found.value is not None
    assert equals(found.value, value)
    assert Fraction(found.value) == Fraction(value)


@given(decimals, decimals)
def test_equality_is_that_of_numbers(one: Decimal, other: Decimal) -> None:
    assert equals(canonical(one), other) == (one == other)
    assert canonical(one) == canonical(Fraction(one))
    assert canonical(-one) == (canonical(one)[1:] if one < 0 else f"-{canonical(one)}" if one else "0")


@given(st.fractions(max_denominator=10**9))
def test_canonical_texts_are_exact(value: Fraction) -> None:
    assert Fraction(canonical(value)) == value


@given(integers, integers)
def test_a_wrong_answer_is_never_right(gold: int, given_answer: int) -> None:
    question = Question(0, "How many?", f"#### {gold}", Decimal(gold))
    scored = score(question, f"#### {given_answer}", finish_reason="stop")
    assert scored.state == ("right" if gold == given_answer else "wrong")


@given(integers)
def test_a_gold_answer_reads_as_itself(value: int) -> None:
    assert parse_gold(f" {value:,} ") == value
    assert parse_gold(f"${value}") == value


@given(replies)
def test_what_is_cut_off_is_neither_right_nor_wrong_unless_its_marker_was_whole(text: str) -> None:
    scored = score(QUESTION, text, finish_reason="length")
    assert scored.state == "truncated" or states_marker_in_full(text)
