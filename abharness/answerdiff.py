"""Two answers to one question -> what a page shows side by side: what they share, where they part, what follows. Pure.

Where the tokens are on record the place is a token, with the probability of each candidate there; where they are not, it
is a character, and no probability is claimed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from abharness.answers import conclusion
from abharness.flips import Flip
from abharness.record import AnswerRecord, TokenStep

SHARED_SHOWN = 240
"""Characters of the shared beginning that are shown before the place."""

REST_SHOWN = 700
"""Characters that are shown after it."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate for the token at the place; `probability` from 0 to 1, None where the record does not say."""

    token: str
    probability: float | None


@dataclass(frozen=True, slots=True)
class Half:
    """One variant's answer from where the two part.

    Attributes:
        state: `right`, `wrong`, `truncated`, `no_answer` or `error`.
        answer: The number found, or why there is none.
        marked: The token (or character) that differs; empty where this answer has ended.
        rest: What follows, as far as it is shown.
        cut: Characters of `rest` that are not.
        choices: The chosen token first, then the others, most probable first.
    """

    state: str
    answer: str
    marked: str
    rest: str
    cut: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class AnswerDiff:
    """Two answers side by side.

    Attributes:
        question: As it was asked.
        target: The right answer.
        place: Where they part, in words.
        shared: The end of what both say before that.
        skipped: Characters before `shared` that are not shown.
    """

    doc_id: int
    question: str
    target: str
    place: str
    shared: str
    skipped: int
    baseline: Half
    candidate: Half


def answer_diff(baseline: AnswerRecord, candidate: AnswerRecord, flip: Flip, given: tuple[str, str]) -> AnswerDiff:
    """Lay two answers side by side.

    Args:
        baseline: The first variant's.
        candidate: The second's, to the same question.
        flip: Where they part, by `flips.explain_flip`.
        given: Both answers as a person reads them.
    """
    records = (baseline, candidate)
    if flip.position is not None and baseline.tokens and candidate.tokens:
        at = flip.position
        shared = "".join(step.token for step in baseline.tokens[:at])
        tokens = [record.tokens or [] for record in records]
        marks = [steps[at].token if at < len(steps) else "" for steps in tokens]
        rests = ["".join(step.token for step in steps[at + 1 :]) for steps in tokens]
        choices = [_choices(steps[at]) if at < len(steps) else () for steps in tokens]
        place = f"token {at}"
    else:
        texts = [_text(record, flip.char_text) for record in records]
        at = len(texts[0]) if flip.char_position is None else flip.char_position
        shared, marks, rests = texts[0][:at], [text[at : at + 1] for text in texts], [text[at + 1 :] for text in texts]
        choices = [(), ()]
        place = f"character {at} of the {flip.char_text or 'answer'}"
    halves = [
        Half(record.state, answer, mark, rest[:REST_SHOWN], max(0, len(rest) - REST_SHOWN), choice)
        for record, answer, mark, rest, choice in zip(records, given, marks, rests, choices, strict=True)
    ]
    return AnswerDiff(
        doc_id=baseline.doc_id,
        question=baseline.doc.get("question", ""),
        target=conclusion(baseline.target),
        place=place,
        shared=shared[-SHARED_SHOWN:],
        skipped=max(0, len(shared) - SHARED_SHOWN),
        baseline=halves[0],
        candidate=halves[1],
    )


def _text(record: AnswerRecord, which: str | None) -> str:
    if which == "reasoning":
        return record.reasoning or ""
    return record.resps[0][0] if record.resps and record.resps[0] else ""


def _choices(step: TokenStep) -> tuple[Choice, ...]:
    others = dict(step.close or {})
    if step.runner_up is not None and step.runner_up_logprob is not None:
        others[step.runner_up] = step.runner_up_logprob
    others.pop(step.token, None)
    ordered = sorted(others.items(), key=lambda item: -item[1])
    return (
        Choice(step.token, None if step.logprob is None else _probability(step.logprob)),
        *(Choice(token, _probability(logprob)) for token, logprob in ordered),
    )


def _probability(logprob: float) -> float:
    return math.exp(min(logprob, 0.0))
