"""Two variants' answers to one question -> where they part, and whether a near-tie explains it.

Greedy decoding is not reproducible to the last bit: batch make-up and kernel choice move the logits by rounding steps,
and where the two best tokens are that close, either may win. Such a flip says nothing about quality; one at a clear
gap does. Imported by the comparison, so it needs records only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from abharness.record import AnswerRecord, TokenStep

NEAR_TIE_NATS = 0.25
"""Largest gap that rounding closes: two logits between 16 and 32, each off by one bfloat16 step of 0.125."""

RECORDED_NATS = 1e-3
"""What a difference of two recorded log-probabilities may be off by: they are float32 sums, kept to four decimals."""


@dataclass(frozen=True, slots=True)
class Flip:
    """How answer b differs from answer a.

    Attributes:
        doc_id: The question.
        identical_text: Reasoning and answer text are equal, character for character.
        answer_changed: The state, or the value under the deciding filter, differs.
        position: Index of the first token that differs; None when unknown (`reason`) or when no token differs.
        token_a: The token of a there; None where a has already ended.
        token_b: The token of b there; None where b has already ended.
        gap_a: Log-probability of a's token less that of its runner-up there, nats; None when not known.
        gap_b: The same for b.
        near_tie: Each variant's token is a candidate of the other no further than `NEAR_TIE_NATS` from the one it chose;
            None when that cannot be told.
        reason: Why `position` or `near_tie` is None; None when both are known.
        char_position: First differing character of `char_text`; position information only, not a token index.
        char_text: Which text that counts in.
    """

    doc_id: int
    identical_text: bool
    answer_changed: bool
    position: int | None = None
    token_a: str | None = None
    token_b: str | None = None
    gap_a: float | None = None
    gap_b: float | None = None
    near_tie: bool | None = None
    reason: str | None = None
    char_position: int | None = None
    char_text: Literal["reasoning", "answer"] | None = None


def explain_flip(a: AnswerRecord, b: AnswerRecord) -> Flip:
    """Find the first divergence of two answers to one question and how close the decision was there.

    Raises:
        ValueError: The records answer different questions.
    """
    if a.doc_id != b.doc_id:
        raise ValueError(f"answers to different questions: doc_id {a.doc_id} and {b.doc_id}")
    char_text, char_position = _first_character(a, b)
    flip = Flip(
        doc_id=a.doc_id,
        identical_text=char_text is None,
        answer_changed=a.state != b.state or _value(a) != _value(b),
        char_position=char_position,
        char_text=char_text,
    )
    if flip.identical_text:
        return replace(flip, reason="the texts are identical")
    if a.error or b.error:
        return replace(flip, reason=f"a request failed: {a.error or b.error}")
    if not a.tokens or not b.tokens:
        missing = " and ".join(name for name, record in (("a", a), ("b", b)) if not record.tokens)
        return replace(flip, reason=f"no tokens with log-probabilities were recorded in {missing}")
    pairs = enumerate(zip(a.tokens, b.tokens, strict=False))
    position = next((index for index, (one, two) in pairs if one.token != two.token), None)
    if position is None:
        if len(a.tokens) == len(b.tokens):
            return replace(flip, reason="the recorded tokens are equal though the texts differ")
        position = min(len(a.tokens), len(b.tokens))
    step_a = a.tokens[position] if position < len(a.tokens) else None
    step_b = b.tokens[position] if position < len(b.tokens) else None
    near_tie, reason = _near_tie(step_a, step_b)
    return replace(
        flip,
        position=position,
        token_a=step_a.token if step_a else None,
        token_b=step_b.token if step_b else None,
        gap_a=_gap(step_a),
        gap_b=_gap(step_b),
        near_tie=near_tie,
        reason=reason,
    )


def _near_tie(a: TokenStep | None, b: TokenStep | None) -> tuple[bool | None, str | None]:
    if a is None or b is None:
        ended = "a" if a is None else "b"
        return None, f"{ended} ended here; the log-probability of ending is not recorded"
    gap_a, gap_b = _gap(a), _gap(b)
    if gap_a is None or gap_b is None:
        lacking = " and ".join(name for name, gap in (("a", gap_a), ("b", gap_b)) if gap is None)
        return None, f"no top-2 log-probabilities at this token in {lacking}"
    both = (_within(a, b.token), _within(b, a.token))
    if False in both:
        return False, None
    if None in both:
        return None, "more than two tokens tie here, and the record keeps only the runner-up"
    return True, None


def _within(step: TokenStep, token: str) -> bool | None:
    """Whether a token is a near-tie of the chosen one; None where the record does not say."""
    assert step.logprob is not None
    assert step.runner_up_logprob is not None
    value = step.runner_up_logprob if token == step.runner_up else (step.close or {}).get(token)
    if value is not None:
        return abs(step.logprob - value) <= NEAR_TIE_NATS + RECORDED_NATS
    # Another candidate than the runner-up is at most as probable as that one.
    beyond = step.logprob - step.runner_up_logprob > NEAR_TIE_NATS + RECORDED_NATS
    return False if beyond or step.close is not None else None


def _gap(step: TokenStep | None) -> float | None:
    if step is None or step.logprob is None or step.runner_up_logprob is None:
        return None
    return step.logprob - step.runner_up_logprob


def _value(record: AnswerRecord) -> str | None:
    extraction = record.extractions.get(record.filter)
    return extraction.value if extraction else None


def _first_character(a: AnswerRecord, b: AnswerRecord) -> tuple[Literal["reasoning", "answer"] | None, int | None]:
    answers = [record.resps[0][0] if record.resps and record.resps[0] else "" for record in (a, b)]
    pairs: list[tuple[Literal["reasoning", "answer"], str, str]] = [
        ("reasoning", a.reasoning or "", b.reasoning or ""),
        ("answer", answers[0], answers[1]),
    ]
    for name, one, two in pairs:
        if one != two:
            shared = next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), None)
            return name, min(len(one), len(two)) if shared is None else shared
    return None, None
