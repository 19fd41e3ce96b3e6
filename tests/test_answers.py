"""Extraction of the answer from a reply: the field reports' rows, their neighbours, real replies, and noise."""

import json
import os
import random
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from abharness.answers import FILTERS, canonical, equals, extract, parse_gold, states_marker_in_full


def flexible(text: str) -> str | None:
    return extract(text, "flexible-extract").value


def is_right(text: str, gold: str) -> bool:
    value = flexible(text)
    return value is not None and equals(value, Decimal(gold))


E1 = [
    ("That leaves 64 jars, in all.", "64"),
    (r"\boxed{$7{,}250}", "7250"),
    ("#### 7,250", "7250"),
    ("sides 4 6", "6"),
    # neighbours
    ("The total is 1,234,567, give or take nothing.", "1234567"),
    (r"The answer is \$7{,}250.", "7250"),
    (r"$7\,250$", "7250"),
    (r"\boxed{7,\!250}", "7250"),
    ("The answer is 7\u202f250 euros", "7250"),
    ("#### 1,00,000", "100000"),
    ("The crowd was 12,000,", "12000"),
    ("It costs 18.She pays.", "18"),
]
E2 = [
    ("Her bill comes to $31.00.", "31"),
    ("**18.**", "18"),
    ("#### 18.0", "18"),
    ("= 18.00 dollars", "18"),
    ("+7", "7"),
    # neighbours
    ("The answer is **$18**.", "18"),
    ("#### **18**", "18"),
    ("__18__", "18"),
    ("The answer is `18`.", "18"),
    ("Answer: 18 %", "18"),
    ("#### 018", "18"),
    ("#### .50", "0.5"),
    ("The price is Rs.50", "50"),
    ("The answer is €18,", "18"),
    ("The final answer is: $18$", "18"),
    ("## Final Answer:\n\n**18 eggs**", "18"),
    ("#### <18>", "18"),
    ("####18", "18"),
    ("#### \n18", "18"),
]
E3 = [
    ("The level is -4 m.", "-4"),
    ("The level is 4 m.", "4"),
    (r"\boxed{-4.0}", "-4"),
    # neighbours
    ("#### -$5", "-5"),
    ("#### $-5", "-5"),
    ("#### - 4", "-4"),
    ("#### \u22124", "-4"),
    ("The answer is \u20134.", "-4"),
    ("The answer is **-4**.", "-4"),
    ("The answer is -**4**.", "-4"),
    ("It is negative 4 degrees.", "-4"),
    ("The answer is minus 4.", "-4"),
    ("So x=-4", "-4"),
    ("The answer is (-4).", "-4"),
    (r"\boxed{-\$4}", "-4"),
    ("#### -0", "0"),
    ("So $16-$3=$13", "13"),
    ("20-24=-4", "-4"),
    ("The answer\u201418 eggs", "18"),
]
NUMBERS = [
    ("#### 1.5e3", "1500"),
    ("The answer is 1.5 × 10^3.", "1500"),
    (r"The answer is $1.5 \times 10^{3}$.", "1500"),
    ("The answer is 1.5 × 10³.", "1500"),
    ("The answer is 1.5e3.", "1500"),
    ("#### 25e-1", "2.5"),
    ("#### 1/2", "0.5"),
    (r"\boxed{\frac{7}{14}}", "0.5"),
    ("The answer is 3 1/2.", "3.5"),
    ("The answer is 3½.", "3.5"),
    ("#### 1/3", "1/3"),
    ("#### 18/6", "3"),
    ("#### ７，２５０", "7250"),
    ("答案是１８。", "18"),
    ("共18个", "18"),
    ("#### 18kg", "18"),
    ("#### 25%", "25"),
    ("#### 2 million", "2"),
    ("#### 5th", "5"),
    ("The area is 18 m².", "18"),
    ("| item | cost |\n|---|---|\n| eggs | $7 |\n| Total | $18 |", "18"),
    (r"\boxed{x = 18\text{ eggs}}", "18"),
    (r"\[\boxed{\text{18 eggs}}\]", "18"),
    ("#### 6*3 = 18", "18"),
    ("The answer is 6 eggs * $3/egg = $18 per day", "18"),
    ("The answer is $<<9*2=18>>18", "18"),
    ("An 18-year-old", "18"),
    (r"First \boxed{9}, then \boxed{18}.", "18"),
    ("#### 1. That is all.", "1"),
    ("<|assistant|>\nShe makes $18.<|im_end|>12", "18"),
    ("So 2**3 is 8", "8"),
]


@pytest.mark.parametrize(("text", "value"), [*E1, *E2, *E3, *NUMBERS])
def test_the_number_of_an_answer_is_read_whole_and_with_its_sign(text: str, value: str) -> None:
    """E1 commas, E2 equal spellings, E3 signs; and other ways to write one number."""
    assert flexible(text) == value


@pytest.mark.parametrize(
    "text",
    ["#### 4-6", "#### $4-$6", "The answer is 3:30.", "The answer is 5/12/2023.", "The answer is 2023-05-12.",
     "#### 4, 6", "#### 4,6", "The answer is 4 or 6.", r"\boxed{4 \text{ to } 6}", "#### 10 - 3", "#### 1.2.3",
     "#### 10^3", "#### 5/0", "#### 1e999", "#### 2**3", "#### 6 * 3", "#### 10 + 3"],
)  # fmt: skip
def test_an_explicit_answer_that_is_no_single_number_is_no_answer(text: str) -> None:
    """No part of a range, list, time, date, version, power or open sum is picked out, whatever stood before."""
    found = extract("She has 4 eggs, he has 10.\n" + text, "flexible-extract")
    assert (found.value, found.method) == (None, "not_one_number")


@pytest.mark.parametrize(
    "text",
    [
        "I have eighteen.",
        "He came 5th.",
        "See x1 and H2O.",
        "x_1",
        "At 3:30 on 2023-05-12.",
        "10^5",
        "####",
        "?",
        "-",
        "1e999",
    ],
)
def test_what_is_no_number_gives_no_answer(text: str) -> None:
    found = extract(text, "flexible-extract")
    assert (found.value, found.method) == (None, "no_number")


@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize("text", ["", " \n\t"])
def test_an_empty_reply_is_no_answer(text: str, filter_name: str) -> None:
    assert extract(text, filter_name).method == "empty"  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["The answer is 18.", r"\boxed{18}", "18", "### 18", "##### 18", "#### eighteen"])
def test_strict_match_takes_a_marked_number_only(text: str) -> None:
    found = extract(text, "strict-match")
    assert (found.value, found.method) == (None, "no_marker")


@pytest.mark.parametrize("filter_name", FILTERS)
@pytest.mark.parametrize(
    "text",
    [
        "6*3=18\n#### 18\n\nQuestion: A tin has 4 pens...\nAnswer: 4*3=12\n#### 12",
        "#### 18\n#### 12",
        "#### 18\n\nQ: 4 pens?\nA: 12",
        "#### 18<|im_end|>\n<|im_start|>user\n#### 12",
        "Question: Ann has 6 boxes of 3.\nAnswer: 6*3=18\n#### 18\n\nQuestion: 4 pens\nAnswer: #### 12",
        "#### 1. Find the eggs\n9\n#### 2. Compute\n9*2\n#### 18",
        "#### Step 3: Compute\n9*2=18\n#### 18",
        "#### 18. That is all.\n\nI hope this helps in 2 ways.",
        "\\boxed{9} eggs\n#### 18",
    ],
)
def test_the_first_marked_answer_stands(text: str, filter_name: str) -> None:
    """E4: not a number from a run-on invented question, not a Markdown heading's number."""
    assert extract(text, filter_name).value == "18"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "She makes 18 dollars.\n\nQuestion: A tin has 4 pens.\nAnswer: 4*3=12",
        "She makes $18.</s><s>What is 4*3? 12",
        "She makes $18.\nHuman: and 4*3?\nAssistant: 12",
        "She makes $18.\n\n**Problem 2:** 4*3 = 12",
    ],
)
def test_a_run_on_is_cut_without_a_marker_too(text: str) -> None:
    """E4."""
    assert flexible(text) == "18"


def test_a_restated_question_is_not_a_run_on() -> None:
    assert flexible("Question: How many eggs?\nAnswer: 9*2=18 eggs") == "18"


@pytest.mark.parametrize(
    "text",
    [
        "So she needs 18 eggs for the 2 days.",
        "So in 2 days she needs 18 eggs.",
        "In each of the 3 weeks, the 5 hens lay 18 eggs.",
        "She makes a total of 18 dollars from 9 eggs.",
        "9 * 2 = 18 dollars for the 9 eggs.",
        "The answer for 3 boxes is 18.",
        "To find the answer: 16 - 3 = 13. Then 9 * 2 = 18 dollars.",
        "Answer: She makes $18 every 2 days.",
        "1. She sells 9 eggs.\n2. She makes $18.\n3. Done",
        "Step 1: 9 eggs. She makes 18.\nStep 2: done",
        "The answer to part one is 9.\nThe final answer is 18.",
        "A: 9\nWait, that is one day.\nA: 18",
    ],
)
def test_a_rule_supports_the_number_over_the_others(text: str) -> None:
    """E4."""
    found = extract(text, "flexible-extract")
    assert (found.value, found.method, found.low_confidence) == ("18", "final_statement", False)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("sides 4 6", "6"),
        ("She has 18 eggs and 2 hens.", "2"),
        ("18 since there are 7 days", "7"),
        ("May 5, 2023", "2023"),
    ],
)
def test_the_last_number_of_several_is_a_guess_and_says_so(text: str, value: str) -> None:
    """E4: never silently the last number."""
    found = extract(text, "flexible-extract")
    assert (found.value, found.method, found.low_confidence) == (value, "last_number", True)


def test_the_only_number_is_no_guess() -> None:
    found = extract("She sells them all for $18", "flexible-extract")
    assert (found.value, found.method, found.low_confidence) == ("18", "only_number", False)


@pytest.mark.parametrize(
    ("text", "value", "method"),
    [
        ("<think>maybe Answer: 7? 3*7=21</think>\nThe total is 21.", "21", "final_statement"),
        ("3*7=21, or 24?</think> 21", "21", "final_statement"),
        ("<think>7, 14, 21", None, "unfinished_think"),
        ("<think>\n#### 7\n</think>\n#### 21", "21", "marker"),
        ("<THINKING>#### 7</THINKING>21", "21", "final_statement"),
        ("<think>7</think>9<think>8</think> no, 21", "21", "final_statement"),
        ("7</think><think>8</think>21", "21", "final_statement"),
        ("So\n#### 7</think>\n#### 21", "21", "marker"),
        ("#### 7<think>8</think> or</think>\n#### 21", "21", "marker"),
        ("<think>#### 21</think>", None, "empty"),
        ("#### 21\n<think>7, 14", None, "unfinished_think"),
    ],
)
def test_a_thinking_trace_is_never_searched(text: str, value: str | None, method: str) -> None:
    """E5."""
    found = extract(text, "flexible-extract")
    assert (found.value, found.method) == (value, method)


@pytest.mark.parametrize(
    ("gold", "text", "right"),
    [
        ("18", "18.5", False),
        ("-4", "The level is 4 m.", False),
        ("4", "The level is -4 m.", False),
        ("200", "20", False),
        ("140", "14", False),
        ("18014398509481985", "18014398509481984", False),
        ("18014398509481985", "18014398509481985", True),
        ("0", "0.0", True),
        ("0", "-0.00", True),
        ("0.5", "1/2", True),
        ("100", "1e2", True),
        ("1" + "0" * 60 + "1", "1" + "0" * 60 + "2", False),
        ("0.3", "0.30000000000000000000000000000000000001", False),
        ("0.3333333333333333333333333333", "1/3", False),
    ],
)
def test_comparison_is_exact_and_numeric(gold: str, text: str, right: bool) -> None:
    """E2, E3 and E9: 20 is not 200, no float, no rounding, the sign counts."""
    assert is_right(text, gold) is right


@pytest.mark.parametrize(
    ("value", "text"),
    [(Decimal("1E+5"), "100000"), (Decimal("-0.00"), "0"), (Decimal("007.50"), "7.5"), (Decimal("-1E-3"), "-0.001"),
     (Fraction(-7, 4), "-1.75"), (Fraction(6, 3), "2"), (Fraction(-2, 6), "-1/3"), (Fraction(1, 1024), "0.0009765625")],
)  # fmt: skip
def test_canonical_text(value: Decimal | Fraction, text: str) -> None:
    assert canonical(value) == text


@pytest.mark.parametrize(
    ("text", "gold"),
    [(" 18", "18"), (" -4\n", "-4"), ("2,125", "2125"), ("$5", "5"), ("1/2", "0.5"), ("4-6", None), ("18 eggs", None),
     ("", None), ("eighteen", None), ("1 2", None), ("1/3", None)],
)  # fmt: skip
def test_gold_is_one_number_and_nothing_else(text: str, gold: str | None) -> None:
    """E3: the sign of the gold stays."""
    assert parse_gold(text) == (None if gold is None else Decimal(gold))


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("6*3=18\n#### 18\n\nQuestion: A tin", True),
        ("#### 18\n", True),
        ("#### 18 eggs\nand then", True),
        ("#### 18<|im_end|>", True),
        ("####\n18\nmore", True),
        ("#### 18", False),
        ("#### 18 eg", False),
        ("####\n18", False),
        ("#### 4-6\n", False),
        ("so 18\nand", False),
        ("<think>#### 18\n", False),
        ("", False),
    ],
)
def test_a_marked_number_is_whole_once_its_line_has_ended(text: str, whole: bool) -> None:
    """E6."""
    assert states_marker_in_full(text) is whole


@pytest.mark.parametrize(
    "atom",
    ["1", "1,", "1-", "####", "#### 1. a\n", "#### 4-6\n", "\\boxed{", "1=", "A:\n", "The answer is ", "<think>", "<<",
     "**", "\n", "1 1/", "½", "⁰", "e1", "Question:\n", "1. a\n", "So 1"],
)  # fmt: skip
@pytest.mark.parametrize("filter_name", FILTERS)
def test_degenerate_replies_of_10_5_characters_are_read(atom: str, filter_name: str) -> None:
    text = (atom * (10**5 // len(atom) + 1))[: 10**5]
    marked = extract("5 eggs\n#### 3\n" + text, filter_name)  # type: ignore[arg-type]
    assert marked.value in ("3", None)
    assert marked.value == "3" or atom == "<think>"


def test_noise_never_raises_and_values_are_canonical() -> None:
    rng = random.Random(20240611)
    words = [
        "####",
        "\\boxed{",
        "\\frac{",
        "<think>",
        "</think>",
        "The answer is ",
        "A:",
        "Answer:",
        "Question:",
        " 10^",
        "So",
    ]
    odd = ["½", "²", "１", "，", "−", "\u00a0", "٣", "\ud800", "e", "x", "th", "of", "<<"]
    pieces = [*"0123456789.,:/-+*=^%$#{}()[]<>|\\_~ \n\t\"'’", *words, *odd]
    found = 0
    for _ in range(20_000):
        text = "".join(rng.choices(pieces, k=rng.randrange(24)))
        for name in FILTERS:
            extraction = extract(text, name)
            if extraction.value is not None and "/" not in extraction.value:
                found += 1
                assert extraction.value == canonical(Decimal(extraction.value))
        states_marker_in_full(text)
    assert found > 5_000


def gsm8k(name: str) -> list[dict[str, object]]:
    root = Path(__file__).parent.parent
    path = Path(os.environ.get("ABHARNESS_GSM8K_DIR", root.parent / "shared" / "data" / "gsm8k")) / name
    if not path.is_file():
        pytest.skip(f"{path} is absent: set ABHARNESS_GSM8K_DIR to a folder with GSM8K's {name}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


# doc_id, model -> why this scorer and the published label differ. Nothing differs.
KNOWN_DISAGREEMENTS: dict[tuple[int, str], str] = {}


def test_agreement_with_the_published_labels_of_2640_model_solutions() -> None:
    rows = gsm8k("model_solutions.jsonl")
    differing = {
        (row["doc_id"], row["model"])
        for row in rows
        if is_right(str(row["text"]), str(parse_gold(str(row["gold"])))) is not row["is_correct"]
    }
    assert len(rows) == 2640
    assert differing == set(KNOWN_DISAGREEMENTS)


def test_without_the_final_marker_confident_answers_of_model_solutions_are_mostly_theirs() -> None:
    """The lower rules on real text: what `A: N` said must mostly be found in the working alone (measured: 97.3%)."""
    confident = same = guesses = 0
    for row in gsm8k("model_solutions.jsonl"):
        working, marker, stated = str(row["text"]).rpartition("\nA: ")
        value = parse_gold(stated) if marker else None
        if value is None:
            continue
        found = extract(working, "flexible-extract")
        guesses += found.low_confidence
        confident += not found.low_confidence
        same += not found.low_confidence and found.value is not None and equals(found.value, value)
    assert confident > 2500
    assert guesses < 60
    assert same / confident > 0.97


def test_without_the_final_marker_the_dataset_s_own_answers_are_found() -> None:
    """Measured: 1,284 of the 1,291 worked answers with a supported number; the others state another number last."""
    confident = same = 0
    for row in gsm8k("test.jsonl"):
        working, _, gold = str(row["answer"]).rpartition("\n#### ")
        found = extract(working, "flexible-extract")
        value = parse_gold(gold)
        assert value is not None
        confident += not found.low_confidence
        same += not found.low_confidence and found.value is not None and equals(found.value, value)
    assert confident > 1280
    assert same / confident > 0.99
