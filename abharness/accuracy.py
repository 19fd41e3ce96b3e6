"""GSM8K without the sending: dataset -> questions -> prompts, and replies -> scored answer records and their summary.

Everything here is pure apart from `load_questions`. Reading a number out of a reply is in `answers`; explaining why
two variants answered differently is in `flips`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from abharness.answers import FILTERS, FilterName, conclusion, equals, extract, parse_gold, states_marker_in_full
from abharness.errors import UsageError
from abharness.record import AnswerRecord, AnswerState, Extraction, TokenStep

if TYPE_CHECKING:
    from decimal import Decimal

PromptStyle = Literal["chat", "completion"]

INSTRUCTION = (
    'Solve the problem step by step. End with the final answer as "#### <number>" on a line of its own, '
    "with nothing after it."
)
STOP = ("Question:", "</s>", "<|im_end|>")
"""Stop sequences of a completion prompt, as in lm-eval's gsm8k task."""

_HUB_TIMEOUT_S = 10.0
_PROBLEMS_SHOWN = 5
_SHAPE = 'expected {"question": "...", "answer": "... #### N"} with N one number'


@dataclass(frozen=True, slots=True)
class Question:
    """One word problem.

    Attributes:
        doc_id: Its index in the split or file, from 0.
        answer: The worked answer, ending in `#### N`.
        gold: That N.
    """

    doc_id: int
    question: str
    answer: str
    gold: Decimal


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to send: `messages` for the chat endpoint or `text` for completions, never both.

    Attributes:
        stop: Stop sequences to send; empty for chat, where the template ends the turn.
    """

    messages: tuple[Mapping[str, str], ...] | None
    text: str | None
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """The outcome of one reply.

    Attributes:
        state: Under the deciding filter.
        extractions: One for each filter; `exact_match` is None in all of them where the reply was not scored.
        error: Why the state is `error`, else None.
    """

    state: AnswerState
    extractions: Mapping[FilterName, Extraction]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ExactMatch:
    """Right answers under one filter.

    Attributes:
        right: Answers equal to gold.
        scored: Answers that were compared: all but the truncated and the failed ones.
        total: Questions asked.
    """

    right: int
    scored: int
    total: int

    @property
    def rate(self) -> float | None:
        """Right over asked: truncated and failed answers are not right. None when nothing was asked."""
        return self.right / self.total if self.total else None


@dataclass(frozen=True, slots=True)
class AccuracySummary:
    """One launch's answers in figures.

    Attributes:
        asked: Answer records.
        states: Count of every state.
        exact_match: By filter.
        truncation_rate: Truncated over asked; None when nothing was asked.
        low_confidence: doc_ids whose value under the deciding filter is a guess (the last number of the text).
    """

    asked: int
    states: Mapping[AnswerState, int]
    exact_match: Mapping[FilterName, ExactMatch]
    truncation_rate: float | None
    low_confidence: tuple[int, ...]


def load_questions(dataset: str, split: str = "test") -> list[Question]:
    """Read a GSM8K-shaped dataset.

    Args:
        dataset: A dataset name on the Hugging Face hub (`openai/gsm8k`, configuration `main`), or the path of a JSON
            lines file with `question` and `answer` (ending in `#### N`); anything that ends in `.jsonl` or `.json`, or
            is a file, is a path.
        split: The hub dataset's split. A file is one split already.

    Returns:
        The questions in order, `doc_id` counting from 0.

    Raises:
        UsageError: The file or dataset cannot be read, or rows are not of this shape; with file and line of each.
    """
    path = Path(dataset)
    if path.suffix in (".jsonl", ".json") or path.is_file():
        return _from_file(path)
    return _from_hub(dataset, split)


def _from_file(path: Path) -> list[Question]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}", hint=f"one JSON object a line, {_SHAPE}") from error
    rows: list[tuple[str, Any]] = []
    problems: list[str] = []
    # Split at newlines only: JSON strings may hold U+2028, at which splitlines() would break.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append((f"{path}:{number}", json.loads(line)))
        except (ValueError, RecursionError) as error:
            problems.append(f"{path}:{number}: not JSON ({error}); {_SHAPE}")
    return _questions(rows, problems, str(path))


def _from_hub(name: str, split: str) -> list[Question]:
    # `datasets` takes seconds to import, and only this branch needs it.
    import datasets
    from huggingface_hub import HfApi, constants

    offline = "use a local JSON lines file (a path ending in .jsonl), or set HF_HUB_OFFLINE=1 to use a cached copy"
    try:
        if not constants.HF_HUB_OFFLINE:
            # One question with a short timeout first: load_dataset retries an unreachable hub for minutes.
            HfApi().dataset_info(name, timeout=_HUB_TIMEOUT_S)
        rows = datasets.load_dataset(name, "main", split=split)
    except Exception as error:  # the hub's clients raise their HTTP library's own classes, which vary by version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(f"dataset {name!r}, split {split!r}: cannot be loaded: {reason}", hint=offline) from error
    return _questions([(f"{name} {split} row {index}", row) for index, row in enumerate(rows)], [], f"{name} {split}")


def _questions(rows: Iterable[tuple[str, Any]], problems: list[str], source: str) -> list[Question]:
    questions: list[Question] = []
    for index, (where, row) in enumerate(rows):
        question, answer = (row.get("question"), row.get("answer")) if isinstance(row, Mapping) else (None, None)
        if not isinstance(question, str) or not question.strip() or not isinstance(answer, str):
            found = sorted(row) if isinstance(row, Mapping) else type(row).__name__
            problems.append(f"{where}: question or answer is missing, empty or no text (found {found}); {_SHAPE}")
            continue
        gold = parse_gold(conclusion(answer))
        if gold is None:
            problems.append(f"{where}: the answer ends in {answer[-40:]!r}; {_SHAPE}")
            continue
        questions.append(Question(index, question, answer, gold))
    if problems:
        more = len(problems) - _PROBLEMS_SHOWN
        shown = problems[:_PROBLEMS_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        raise UsageError("\n".join(shown), hint="correct or remove these rows")
    if not questions:
        raise UsageError(f"{source}: no questions in it", hint=f"one JSON object a line, {_SHAPE}")
    return questions


def _ranked(questions: Sequence[Question], seed: int) -> list[Question]:
    def rank(question: Question) -> bytes:
        return hashlib.sha256(f"{seed}:{question.doc_id}".encode()).digest()

    return sorted(questions, key=rank)


def draw(questions: Sequence[Question], num_questions: int, seed: int) -> list[Question]:
    """Draw questions without replacement, the same ones on every Python version.

    The order is by SHA-256 of the text `seed:doc_id`, and the draw is its beginning: with one seed, a draw of 8 is the
    first 8 of a draw of 128.

    Raises:
        UsageError: Fewer than one question, or more than there are.
    """
    if not 1 <= num_questions <= len(questions):
        raise UsageError(
            f"num_questions is {num_questions}: allowed are 1 to {len(questions)}, the questions that the dataset has"
        )
    return _ranked(questions, seed)[:num_questions]


def fewshot_examples(pool: Sequence[Question], k: int, seed: int, *, asked: Collection[Question]) -> list[Question]:
    """Draw k worked examples for the prompts.

    They are the end of the order whose beginning `draw` takes, so with one pool and seed the examples are disjoint from
    the asked questions by construction and the same for every number of questions.

    Raises:
        UsageError: The pool is too small, or an example is among the asked questions.
    """
    if not 0 <= k <= len(pool):
        raise UsageError(f"num_fewshot is {k}: allowed are 0 to {len(pool)}, the size of the pool")
    examples = _ranked(pool, seed)[len(pool) - k :]
    texts = {question.question for question in asked}
    leaked = [example.doc_id for example in examples if example.question in texts]
    if leaked:
        raise UsageError(
            f"few-shot examples {leaked} are among the {len(asked)} asked questions (pool {len(pool)}, examples {k})",
            hint="ask fewer questions, or take the examples from another split or file",
        )
    return examples


def build_prompt(question: Question, *, style: PromptStyle, fewshot: Sequence[Question] = ()) -> Prompt:
    r"""Build what is sent for one question.

    Completion follows lm-eval's gsm8k task: `Question: ...\nAnswer:` with examples before it, apart by a blank line,
    and its stop sequences. Chat gives the examples as alternating user and assistant turns, then the question; each
    user turn ends in the instruction (there is no system message: some chat templates refuse one). Worked answers
    are given as they are, `<<9*2=18>>` annotations included, as lm-eval does.

    Raises:
        UsageError: The question is one of the examples.
    """
    if any(example.question == question.question for example in fewshot):
        raise UsageError(f"question {question.doc_id} is one of its own few-shot examples")
    if style == "completion":
        shown = [f"Question: {example.question}\nAnswer: {example.answer}" for example in fewshot]
        return Prompt(None, "\n\n".join([*shown, f"Question: {question.question}\nAnswer:"]), STOP)
    messages = []
    for example in fewshot:
        messages.append({"role": "user", "content": f"{example.question}\n\n{INSTRUCTION}"})
        messages.append({"role": "assistant", "content": example.answer})
    messages.append({"role": "user", "content": f"{question.question}\n\n{INSTRUCTION}"})
    return Prompt(tuple(messages), None, ())


def questions_sha256(questions: Sequence[Question], prompts: Sequence[Prompt]) -> str:
    """Hash over doc ids, questions, golds and prompts in order: unequal hashes are not comparable runs."""
    digest = hashlib.sha256()
    for question, prompt in zip(questions, prompts, strict=True):
        item = [question.doc_id, question.question, str(question.gold), prompt.messages, prompt.text, prompt.stop]
        digest.update(json.dumps(item).encode() + b"\n")
    return digest.hexdigest()


def score(
    question: Question,
    text: str | None,
    *,
    finish_reason: str | None,
    error: str | None = None,
    decided_by: FilterName = "flexible-extract",
) -> Score:
    """Score one reply.

    A reply that hit the token limit (`finish_reason` `length`) is `truncated`, never right or wrong: any number in
    it is half-way working, and counting it wrong would make a shorter budget look like a worse model. One exception: a
    reply that had given `#### N` and ended that line before it was cut off. That is the answer in the form asked for,
    complete, and what the limit cut off is a run-on, usually an invented next question; it is scored. A marker on
    the cut line does not count: `#### 1` may have become `#### 18`.

    Only `finish_reason` `stop` says that the reply is whole. Any other (`abort`, none, ...) is an `error`.

    Args:
        question: What was asked.
        text: The answer text (`content`); None is an empty reply. Separate reasoning is never scored.
        finish_reason: As the server sent it.
        error: Why the request failed, when it did.
        decided_by: The filter whose result is the state.
    """
    if error is None and finish_reason not in ("stop", "length"):
        error = f"finish_reason {finish_reason!r} does not say that the reply is whole"
    if error is not None:
        return Score("error", {name: Extraction(value=None, method="error") for name in FILTERS}, error)
    reply = text or ""
    if finish_reason == "length" and not states_marker_in_full(reply):
        return Score("truncated", {name: Extraction(value=None, method="truncated") for name in FILTERS})
    extractions = {}
    for name in FILTERS:
        found = extract(reply, name)
        right = found.value is not None and equals(found.value, question.gold)
        extractions[name] = found.model_copy(update={"exact_match": right})
    decisive = extractions[decided_by]
    if decisive.value is None:
        return Score("no_answer", extractions)
    return Score("right" if decisive.exact_match else "wrong", extractions)


def answer_record(
    workload: str,
    question: Question,
    prompt: Prompt,
    text: str | None,
    *,
    finish_reason: str | None,
    generation: Mapping[str, Any],
    reasoning: str | None = None,
    tokens: list[TokenStep] | None = None,
    prompt_tokens: int | None = None,
    output_tokens: int | None = None,
    e2el_s: float | None = None,
    error: str | None = None,
    decided_by: FilterName = "flexible-extract",
) -> AnswerRecord:
    """Score one reply (see `score`) and make its line of `gsm8k.jsonl`.

    `arguments` has the layout of lm-eval's sample files: `arg_0` is the prompt (a chat's messages as JSON text),
    `arg_1` the generation settings. `exact_match` is 1.0 or 0.0, and None where the reply was not scored; an answer
    that was not found is `[invalid]` in `filtered_resps`, as lm-eval writes it.

    Args:
        workload: Its name in the spec.
        question: What was asked.
        prompt: What was sent.
        text: See `score`.
        finish_reason: See `score`.
        generation: Settings sent beside the prompt (`max_tokens`, `temperature`, ...), plain JSON data.
        reasoning: Separate reasoning text; kept, never scored.
        tokens: The generated tokens with their runners-up, when log-probabilities were asked for.
        prompt_tokens: From the server's usage.
        output_tokens: From the server's usage.
        e2el_s: Seconds from sending to the end of the stream.
        error: See `score`.
        decided_by: See `score`.
    """
    scored = score(question, text, finish_reason=finish_reason, error=error, decided_by=decided_by)
    sent = prompt.text if prompt.text is not None else json.dumps(prompt.messages, ensure_ascii=False)
    return AnswerRecord(
        workload=workload,
        doc_id=question.doc_id,
        doc={"question": question.question, "answer": question.answer},
        target=question.answer,
        arguments={"gen_args_0": {"arg_0": sent, "arg_1": {"until": list(prompt.stop), **generation}}},
        resps=[[text or ""]],
        filter=decided_by,
        finish_reason=finish_reason,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        reasoning=reasoning,
        tokens=tokens,
        e2el_s=e2el_s,
        **_conclusions(scored, decided_by),
    )


def rescored(record: AnswerRecord) -> AnswerRecord:
    """A recorded answer with everything that was concluded from the reply concluded again.

    Raises:
        ValueError: It holds no reply, or its target names no number.
    """
    if len(record.resps) != 1 or len(record.resps[0]) != 1:
        raise ValueError(f"question {record.doc_id}: one reply was expected")
    scored = _scored(record.target, record.resps[0][0], record.finish_reason, record.error, record.filter)
    if scored is None:
        raise ValueError(f"question {record.doc_id}: its target names no number")
    concluded = _conclusions(scored, record.filter)
    return (
        record
        if concluded == {name: getattr(record, name) for name in concluded}
        else record.model_copy(update=concluded)
    )


@functools.lru_cache(maxsize=4096)
def _scored(
    target: str, text: str, finish_reason: str | None, error: str | None, decided_by: FilterName
) -> Score | None:
    """A reply's score, None where the target names no number; launches of one variant often give the same reply."""
    gold = parse_gold(conclusion(target))
    if gold is None:
        return None
    question = Question(0, "", target, gold)  # only its gold counts
    return score(question, text, finish_reason=finish_reason, error=error, decided_by=decided_by)


def _conclusions(scored: Score, decided_by: FilterName) -> dict[str, Any]:
    decisive = scored.extractions[decided_by]
    return {
        "filtered_resps": ["[invalid]" if decisive.value is None else decisive.value],
        "exact_match": None if decisive.exact_match is None else float(decisive.exact_match),
        "state": scored.state,
        "extractions": {name: scored.extractions[name] for name in FILTERS},
        "error": scored.error,
    }


def summarise(records: Sequence[AnswerRecord]) -> AccuracySummary:
    """Count states, right answers under each filter, truncated and low-confidence answers."""
    states = Counter(record.state for record in records)
    matches = {}
    for name in FILTERS:
        results = [record.extractions[name].exact_match for record in records if name in record.extractions]
        matches[name] = ExactMatch(
            right=results.count(True), scored=sum(result is not None for result in results), total=len(records)
        )
    doubtful = [r.doc_id for r in records if r.filter in r.extractions and r.extractions[r.filter].low_confidence]
    return AccuracySummary(
        asked=len(records),
        states={state: states[state] for state in get_args(AnswerState)},
        exact_match=matches,
        truncation_rate=states["truncated"] / len(records) if records else None,
        low_confidence=tuple(doubtful),
    )
