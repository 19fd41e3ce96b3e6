r"""A model's reply to a word problem -> the one number it gives as its answer, how that was found, and how sure it is.

The steps, each linear in the reply's length:

1. `<think>` blocks go; an unclosed one means that the answer never came (nothing is searched in a trace).
2. The reply is cut where it runs on into an invented next question or past an end-of-turn token.
3. Typography is undone: full-width digits, unicode minus, LaTeX `{,}` and `\$`, bold marks, `<<9*2=18>>` annotations.
4. `strict-match` takes the first `#### N`. `flexible-extract` takes the first of: `#### N`, the last `\boxed{N}`, the
   last final statement (`The answer is`, `A:`, `Answer:`, `So she needs 18 eggs for the 2 days.`), the only number,
   and failing all that the last number, marked `low_confidence`.

What is a number: `18`, `18.00`, `+7`, `-$5`, `$-5`, `7,250`, `.5`, `1/2`, `3 1/2`, `1.5e3`, `2 × 10^3`, `25%`, `18kg`.
What is not: ranges (`4-6`), times (`3:30`), dates (`5/12/2023`), versions, digits joined by commas that are no
thousands (`4,6`), powers, list numbering, step labels, parts of words (`x1`), and numbers in words. An ordinal counts
only after an explicit marker (`#### 5th`). A scale word is a unit, never a factor: `2 million` is 2.

The filter names are those of lm-evaluation-harness (lm_eval/tasks/gsm8k/gsm8k.yaml); the rules are more robust, so the
figures are not guaranteed to be its figures.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from abharness.record import Extraction

if TYPE_CHECKING:
    from collections.abc import Iterator

FilterName = Literal["strict-match", "flexible-extract"]
FILTERS: tuple[FilterName, ...] = ("strict-match", "flexible-extract")

# A final statement's number stands near its start; the bound keeps every rule linear on degenerate replies.
_STATEMENT_CHARS = 300

_THINK_TAG = re.compile(r"<(/?)(?:think|thinking|thought)>", re.IGNORECASE)
_END_TOKEN = re.compile(r"<\|[a-z_]{2,24}\|>|</s>|<eos>|<end_of_turn>")
_NEXT_QUESTION = re.compile(
    r"^[ \t*_#>]{0,8}(?:(?:Question|Problem|Exercise|Q)(?:[ \t]?[0-9]{1,4})?[ \t]?\*{0,2}:|(?:Human|User):)",
    re.MULTILINE,
)

_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_SUPERSCRIPT_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
# The em dash is left alone: it joins clauses ("the answer—18"), it is not a sign.
_ASCII = dict(zip("−﹣－–‒‑＋﹢．，：＝／％＄＃＊", "------++.,:=/%$#*", strict=True)) | {"。": ". "}
_ASCII |= dict.fromkeys("\u200b\u200c\u200d\u200e\u200f\u2060\ufeff", "")
_DIGIT_SPACE = re.compile("(?<=[0-9])(?:[\u00a0\u202f\u2009]|\\\\,)(?=[0-9]{3}(?![0-9]))")
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]{1,30})\}\{([0-9]{1,30})\}")
_LATEX_GROUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|operatorname)\{")
_LATEX_WORDS = re.compile(r"\\(?:left|right|!)|\\([,;: ()\[\]$%])|\\(times|cdot|div|approx|pounds|euro)\b")
_LATEX_SYMBOL = {"times": "×", "cdot": "×", "div": "÷", "approx": "≈", "pounds": "£", "euro": "€"}
_EMPHASIS = re.compile(r"\*\*|__|`")

_CURRENCY = "$€£¥₹₩₽"
_NUMBER = re.compile(
    rf"(?P<sign>[-+])?(?P<currency>[{_CURRENCY}] ?)?(?P<inner>[-+])?"
    r"(?P<run>(?:[0-9]+|\.[0-9]+)(?:[.,:/-][0-9]+)*)"
    r"(?:[eE](?P<exponent>[-+]?[0-9]+)(?![0-9A-Za-z]|\.[0-9])|"
    r" ?[×*xX] ?10 ?\^ ?\{?(?P<power>[-+]?[0-9]+)\}?)?"
)
_MIXED = re.compile(r" ([0-9]{1,30})/([0-9]{1,30})(?![0-9A-Za-z^]|[/.:,-][0-9])")
_PLAIN = re.compile(r"[0-9]*\.?[0-9]+")
_THOUSANDS = re.compile(r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3})(?:\.[0-9]+)?")
_RATIO = re.compile(r"([0-9]{1,30})/([0-9]{1,30})")
_ORDINAL = re.compile(r"(?:st|nd|rd|th)\b")
_LIST_ITEM = re.compile(r"^[ \t#>*-]{0,12}([0-9]{1,3})[.)]\*{0,2}[ \t]+(?=\S)", re.MULTILINE)
_NEGATIVE_WORD = re.compile(rf"\bnegative[ ]+(?=[{_CURRENCY}]?[0-9])", re.IGNORECASE)

_MARKER = re.compile(r"(?<!#)####(?!#)")
_BOXED = re.compile(r"\\f?box(?:ed)?[ \t]?\{")
_BRACE = re.compile(r"[{}]")
_STATEMENT = re.compile(
    r"(?i:\banswers?\b[^\n.!?:=0-9]{0,80}?(?:\bis\b|\bare\b|\bwas\b|\bbe\b|:|=))|^[ \t*_#>]{0,8}A[ \t]?:", re.MULTILINE
)
# "To find the answer: 16 - 3 = 13" opens the working.
_SEEKING = re.compile(
    r"\b(?:to|find|get|reach|determine|calculate|for)(?: (?:the|our|final|correct|an))*\s*$", re.IGNORECASE
)
_DECORATION = re.compile(
    r"(?:[\s*_\"'“”‘’(\[{<~≈=:]|\\f?box(?:ed)?\{|"
    r"(?:about|approximately|approx\.?|around|roughly|exactly|only|just|a total of|US|USD|EUR|GBP|Rs\.?)(?=[\s$0-9]))*",
    re.IGNORECASE,
)
_SPACED_SIGN = re.compile(rf"(?:-|minus|negative)\s+(?=[{_CURRENCY}]?[0-9.])", re.IGNORECASE)
_ARITHMETIC = re.compile(rf"[\s0-9.,{_CURRENCY}+\-*/×÷xX()\[\]%^]*")
_NAME = re.compile(r"[^0-9.!?;\n]{0,60}")
_OPERATOR_GAP = re.compile(rf"[ A-Za-z{_CURRENCY}/()]{{0,40}}[*×÷+/xX-][ A-Za-z{_CURRENCY}/()]{{0,40}}")
_SECOND_NUMBER = re.compile(rf"[\s{{}}]*(?:[-,;/+×÷]|\*{{1,2}}|\bto\b|\bor\b|\band\b)[\s{{}}]*[-+]?[{_CURRENCY}]?[0-9]")
_HEADING = re.compile(r"[.)]\*{0,2}[ \t]+[A-Za-z]|\*{0,2}:[ \t]*\S")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")

# Closed-class words before a number that say how, when or for whom: such a number is not what the sentence states.
_CIRCUMSTANCE = re.compile(
    r"\b(?:for|in|on|at|by|per|every|each|the|this|these|those|all|both|after|before|within|over|under|of|from|with|than|"
    r"since|until|during|between|through|her|his|their|its|my|your|our|another|other|first|last|next)[\s*_\"'(]*$",
    re.IGNORECASE,
)
_TOTAL_NOUNS = re.compile(
    r"\b(?:total|sum|profit|cost|amount|average|balance|value|price|difference) of\W*$", re.IGNORECASE
)
_LABEL = re.compile(r"\b(?:step|part|case|example|equation|question|problem|option)[\s*_\"'(]*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Token:
    """A run of digits: `value` is canonical text, or None where it is no single number."""

    start: int
    end: int
    value: str | None
    ordinal: bool


@dataclass(frozen=True, slots=True)
class _Answer:
    """The searched part of a reply. `text` is None when there is none, `why` then names the reason."""

    text: str | None
    why: str
    ran_on: bool


def canonical(value: Fraction | Decimal) -> str:
    """The canonical text of a number: plain decimal without superfluous zeros, or `n/d` where no decimal is exact."""
    if isinstance(value, Fraction):
        rest = value.denominator
        for prime in (2, 5):
            while rest % prime == 0:
                rest //= prime
        if rest != 1:
            return f"{value.numerator}/{value.denominator}"
        # Scaling by 10^k makes it whole: k digits after the point, k at most the denominator's bit length.
        places = value.denominator.bit_length()
        scaled = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
        text = f"{'-' if value < 0 else ''}{scaled[:-places]}.{scaled[-places:]}"
    else:
        text = format(value, "f")
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text.removeprefix("+"))
    whole, _, decimals = digits.partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    if whole == "0" and not decimals:
        return "0"
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"


def equals(value: str, gold: Decimal) -> bool:
    """Whether an extracted value is numerically the gold answer, exactly: no float, no rounding, sign included."""
    return value == canonical(gold)


def conclusion(worked: str) -> str:
    """What a worked answer of the dataset ends with: the text behind its last `####`; empty where there is none."""
    return worked.rpartition("####")[2].strip() if "####" in worked else ""


def parse_gold(text: str) -> Decimal | None:
    """The number of a dataset's `#### N`, or None when that is not one plain number."""
    bare = text.strip().replace("$", "")
    tokens = list(_tokens(_normalise(bare)))
    if len(tokens) != 1 or tokens[0].end - tokens[0].start != len(bare):
        return None
    value = tokens[0].value
    return None if value is None or "/" in value else Decimal(value)


def extract(text: str, filter_name: FilterName) -> Extraction:
    """Find the answer in a reply.

    Args:
        text: The reply's answer text (`content`), never its separate reasoning.
        filter_name: `strict-match` or `flexible-extract`.

    Returns:
        The value as canonical text (see `canonical`) or None with the reason in `method`: `empty`, `unfinished_think`,
        `not_one_number` (the explicit answer is a range, a list, a time), `no_marker`, `no_number`. Not yet compared
        with anything: `exact_match` is None.
    """
    answer = _answer_part(text)
    if answer.text is None:
        return Extraction(value=None, method=answer.why)
    prepared = _normalise(answer.text)
    marker = _marker(prepared)
    if marker is not None:
        return _explicit(marker[0], "marker")
    if filter_name == "strict-match":
        return Extraction(value=None, method="no_marker")
    boxed = _boxed(prepared)
    if boxed is not None:
        return _explicit(boxed, "boxed")
    statement = _last_statement(prepared)
    if statement is not None:
        return _explicit(statement, "final_statement")
    numbers = [token for token in _tokens(prepared) if token.value is not None and not token.ordinal]
    numbers = _without_labels(prepared, numbers)
    if not numbers:
        return Extraction(value=None, method="no_number")
    concluded = _conclusion(_sentence_around(prepared, numbers[-1].start))
    if concluded is not None:
        return Extraction(value=concluded, method="final_statement")
    if len({number.value for number in numbers}) == 1:
        return Extraction(value=numbers[-1].value, method="only_number")
    return Extraction(value=numbers[-1].value, method="last_number", low_confidence=True)


def states_marker_in_full(text: str) -> bool:
    """Whether `#### N` was given and its line had ended: cut off later, the number itself is still whole."""
    answer = _answer_part(text)
    if answer.text is None:
        return False
    prepared = _normalise(answer.text)
    marker = _marker(prepared)
    if marker is None or marker[0].value is None:
        return False
    return answer.ran_on or "\n" in prepared[marker[1] :]


def _answer_part(text: str) -> _Answer:
    inside = False
    kept: list[str] = []
    position = 0
    for tag in _THINK_TAG.finditer(text):
        if tag.group(1):
            # A closing tag nobody opened: the chat template opened it, and all before it is the trace.
            if not inside:
                kept.clear()
            inside = False
        elif not inside:
            kept.append(text[position : tag.start()])
            inside = True
        position = tag.end()
    if inside:
        return _Answer(None, "unfinished_think", ran_on=False)
    kept.append(text[position:])
    answer = "\n".join(kept)
    end = len(answer)
    for token in _END_TOKEN.finditer(answer):
        if answer[: token.start()].strip():
            end = token.start()
            break
    # A header before any digit restates the question; one after the working starts a new, invented question.
    first_digit = re.search(r"\d", answer)
    for header in _NEXT_QUESTION.finditer(answer, first_digit.end(), end) if first_digit else ():
        end = header.start()
        break
    kept_part = answer[:end]
    if not kept_part.strip():
        return _Answer(None, "empty", ran_on=False)
    return _Answer(kept_part, "", ran_on=end < len(answer))


def _ascii(char: str) -> str:
    if char.isascii():
        return char
    if char.isdecimal():
        return str(unicodedata.decimal(char))
    mapped = _ASCII.get(char)
    if mapped is not None:
        return mapped
    if unicodedata.decomposition(char).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKD", char).replace("\u2044", "/")
    return char


def _latex(match: re.Match[str]) -> str:
    if match.group(2):
        return _LATEX_SYMBOL[match.group(2)]
    return match.group(1) if match.group(1) in ("$", "%") else (" " if match.group(1) else "")


def _emphasis(match: re.Match[str]) -> str:
    before, after = match.string[match.start() - 1 : match.start()], match.string[match.end() : match.end() + 1]
    # Between two operands it is an operator (2**3); dropping it there would glue two numbers into one.
    return match.group() if before.isalnum() and after.isalnum() else ""


def _normalise(text: str) -> str:
    if not text.isascii():
        text = _SUPERSCRIPT.sub(lambda match: "^" + match.group().translate(_SUPERSCRIPT_DIGITS), text)
        text = "".join(map(_ascii, text))
    text = _ANNOTATION.sub("", text)
    text = _DIGIT_SPACE.sub(",", text.replace("{,}", ","))
    text = _FRACTION.sub(r" \1/\2", text)
    text = _LATEX_GROUP.sub("{", text)
    text = _LATEX_WORDS.sub(_latex, text).replace("$$", " ")
    text = _EMPHASIS.sub(_emphasis, text)
    return _NEGATIVE_WORD.sub("-", text)


def _tokens(text: str, position: int = 0) -> Iterator[_Token]:
    while (match := _NUMBER.search(text, position)) is not None:
        token = _token(text, match)
        yield token
        position = token.end


def _token(text: str, match: re.Match[str]) -> _Token:
    start, end, run = match.start(), match.end(), match.group("run")
    before = text[max(0, start - 2) : start]
    previous = before[-1:] if before.isascii() else ""
    # After an operand a minus subtracts, after a letter it is a hyphen: `$16-$3`, `item-4`.
    signed = bool(match.group("sign")) and not (previous.isalnum() or previous in tuple(")]}%"))
    sign = match.group("inner") or (match.group("sign") if signed else "")
    if run.startswith(".") and (previous.isalpha() or previous == "."):
        run, previous = run[1:], ""  # `Rs.50`, `...5`
    hidden = previous == "^" or before == "^{" or text.startswith("^", end)
    if not signed and not match.group("currency"):
        hidden = hidden or previous.isalpha() or (previous == "_" and before[:1].isalpha())
    value = None if hidden else _run_value(run)
    scale = match.group("exponent") or match.group("power")
    mixed = _MIXED.match(text, end) if run.isdecimal() and len(run) <= 30 and scale is None else None
    if value is not None and scale is not None:
        # Exponents past two digits are noise, and their plain text would not fit in memory.
        plausible = isinstance(value, Decimal) and len(scale.lstrip("+-")) <= 2
        value = Decimal(f"{value:f}e{scale}") if plausible else None
    elif value is not None and mixed is not None and int(mixed.group(1)) < int(mixed.group(2)):
        value, end = Fraction(run) + Fraction(int(mixed.group(1)), int(mixed.group(2))), mixed.end()
    ordinal = _ORDINAL.match(text, end) is not None
    if value is None:
        return _Token(start, end, None, ordinal)
    shown = canonical(value)
    return _Token(start, end, f"-{shown}" if sign == "-" and shown != "0" else shown, ordinal)


def _run_value(run: str) -> Fraction | Decimal | None:
    if _PLAIN.fullmatch(run):
        return Decimal(run)
    if _THOUSANDS.fullmatch(run):
        return Decimal(run.replace(",", ""))
    ratio = _RATIO.fullmatch(run)
    if ratio is not None and int(ratio.group(2)) != 0:
        return Fraction(int(ratio.group(1)), int(ratio.group(2)))
    return None


def _leading(text: str) -> _Token | None:
    """The number that a statement's tail begins with, after decoration, a name and `=`, or an equation's left side."""
    tail = text[:_STATEMENT_CHARS]
    while True:
        tail = tail[_match_end(_DECORATION, tail) :]
        left, equals_sign, right = tail.partition("=")
        if not equals_sign or not _is_expression(left):
            break
        tail = right
    tail = _SPACED_SIGN.sub("-", tail, count=1) if _SPACED_SIGN.match(tail) else tail
    match = _NUMBER.match(tail)
    if match is None:
        return None
    token = _token(tail, match)
    if _SECOND_NUMBER.match(tail, token.end):
        token = replace(token, value=None)
    # The tail ends where the text does: its end is the way back to a position in the text.
    return replace(token, end=len(text[:_STATEMENT_CHARS]) - len(tail) + token.end)


def _is_expression(left: str) -> bool:
    if _ARITHMETIC.fullmatch(left) or _NAME.fullmatch(left):
        return True
    tokens = list(_tokens(left))
    gaps = [left[one.end : two.start + 1] for one, two in pairwise(tokens)]
    return bool(gaps) and all(_OPERATOR_GAP.match(gap) for gap in gaps)


def _match_end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return match.end() if match else 0


def _line_from(text: str, position: int) -> tuple[int, str]:
    """The rest of the line, or the next line with text on it when the rest is blank; and where it starts."""
    while position < len(text) and text[position].isspace():
        position += 1
    end = text.find("\n", position, position + _STATEMENT_CHARS)
    return position, text[position : end if end >= 0 else position + _STATEMENT_CHARS]


def _marker(text: str) -> tuple[_Token, int] | None:
    """The first `#### N` that is an answer and the position after its number; else a non-number there; else None."""
    unclear: tuple[_Token, int] | None = None
    last_char = len(text.rstrip())
    heading = 1
    for marker in _MARKER.finditer(text):
        position, line = _line_from(text, marker.end())
        token = _leading(line)
        if token is None:
            continue
        if token.value == str(heading) and _HEADING.match(line, token.end) and position + len(line) < last_char:
            # `#### 1. Compute the cost` with more below it is a Markdown heading, and 2. comes next.
            heading += 1
            continue
        found = (token, position + token.end)
        if token.value is not None:
            return found
        unclear = unclear or found
    return unclear


def _boxed(text: str) -> _Token | None:
    for box in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for brace in _BRACE.finditer(text, box.end(), box.end() + _STATEMENT_CHARS):
            depth += 1 if brace.group() == "{" else -1
            if depth == 0:
                token = _leading(text[box.end() : brace.start()])
                if token is not None:
                    return token
                break
    return None


def _last_statement(text: str) -> _Token | None:
    for statement in reversed(list(_STATEMENT.finditer(text))):
        if _SEEKING.search(text[max(0, statement.start() - 40) : statement.start()]):
            continue
        _, line = _line_from(text, statement.end())
        token = _leading(line)
        if token is not None and token.value is not None:
            return token
        sentence = _SENTENCE_END.split(line, maxsplit=1)[0]
        value = _conclusion(sentence)
        if value is not None:
            return _Token(0, 0, value, ordinal=False)
        if token is not None:
            return token
    return None


def _sentence_around(text: str, position: int) -> str:
    """The sentence that holds a position, at most `_STATEMENT_CHARS` to either side of it."""
    low, high = max(0, position - _STATEMENT_CHARS), position + _STATEMENT_CHARS
    window, inside = text[low:high], position - low
    start = max((end.end() for end in _SENTENCE_END.finditer(window) if end.end() <= inside), default=0)
    return _SENTENCE_END.split(window[start:], maxsplit=1)[0]


def _conclusion(sentence: str) -> str | None:
    """What a sentence states: the result of its last equation, or its only number that is no circumstance."""
    result = sentence.rpartition("=")[2]
    stated = set()
    for token in _tokens(result):
        if token.ordinal or token.value is None:
            continue
        before = result[max(0, token.start - 30) : token.start]
        if _CIRCUMSTANCE.search(before) and not _TOTAL_NOUNS.search(before):
            continue
        stated.add(token.value)
    return stated.pop() if len(stated) == 1 else None


def _without_labels(text: str, numbers: list[_Token]) -> list[_Token]:
    """Leave out list numbering (1., 2., ... in sequence) and step labels."""
    numbering: set[int] = set()
    expected = 1
    for item in _LIST_ITEM.finditer(text):
        if int(item.group(1)) in (1, expected):
            numbering.add(item.start(1))
            expected = int(item.group(1)) + 1
    kept = []
    for number in numbers:
        labelled = _LABEL.search(text[max(0, number.start - 30) : number.start])
        if number.start not in numbering and not labelled:
            kept.append(number)
    return kept


def _explicit(token: _Token, method: str) -> Extraction:
    if token.value is None:
        return Extraction(value=None, method="not_one_number")
    return Extraction(value=token.value, method=method)
