"""Grade-school problems made by rules, each with a worked solution that ends in `#### N`, in the shape of GSM8K's files.

    python problems.py --held-out 128 --seed 1 > held-out.jsonl

A problem is one of the stories below with names, things and numbers drawn for it. Which problems are held out is decided
by a hash of the question, so a model that was trained on any number of others has not seen them, whatever the seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HELD_OUT = 50
"""One problem of so many is held out."""

GIRLS = ("Mia", "Ada", "Nora", "Lena", "Ruth", "Iris", "Zoe", "Clara", "Emma", "Hana")
BOYS = ("Tom", "Ben", "Omar", "Luis", "Jack", "Noah", "Paul", "Ivan", "Kofi", "Sam")
THINGS = (
    "apples", "pears", "books", "stickers", "marbles", "shells", "coins", "cards", "pencils", "buttons", "cookies", "beads",
    "stamps", "lamps", "plums",
)  # fmt: skip
HOLDERS = (("box", "boxes"), ("bag", "bags"), ("shelf", "shelves"), ("basket", "baskets"), ("jar", "jars"))
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem.

    Attributes:
        question: The text.
        answer: The worked solution, its last line `#### N`.
    """

    question: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether it must not be trained on."""
        digest = hashlib.sha256(self.question.encode()).digest()
        return int.from_bytes(digest[:4], "big") % HELD_OUT == 0


class Draw:
    """The numbers, names and things of one problem, and its solution as it is worked out."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        girl = rng.random() < 0.5
        self.name, self.other = rng.sample(GIRLS if girl else BOYS, 2)
        self.they, self.their = ("she", "her") if girl else ("he", "his")
        self.thing, self.second = rng.sample(THINGS, 2)
        self.holder, self.holders = rng.choice(HOLDERS)
        self.day, self.next_day = rng.sample(DAYS, 2)
        self.lines: list[str] = []

    def number(self, low: int, high: int) -> int:
        """A whole number, both ends included."""
        return self.rng.randint(low, high)

    def step(self, text: str, left: int, sign: str, right: int) -> int:
        """Work out one step; `{}` in the text is the calculation with its result, as GSM8K writes it."""
        result = {"+": left + right, "-": left - right, "*": left * right, "/": left // max(right, 1)}[sign]
        shown = f"{left}{sign}{right}"
        self.lines.append(text.format(f"{shown}=<<{shown}={result}>>{result}"))
        return result

    def done(self, question: str, result: int) -> Problem:
        """The problem with this result."""
        return Problem(question, "\n".join([*self.lines, f"#### {result}"]))


def _boxes(d: Draw) -> Problem:
    count, each, more = d.number(2, 9), d.number(2, 12), d.number(2, 20)
    whole = d.step(f"In the {d.holders} are {{}} {d.thing}.", count, "*", each)
    result = d.step(f"Together there are {{}} {d.thing}.", whole, "+", more)
    return d.done(
        f"{d.name} has {count} {d.holders} with {each} {d.thing} each, and {more} more {d.thing} on the table. How many "
        f"{d.thing} does {d.they} have?",
        result,
    )


def _gives(d: Draw) -> Problem:
    first, got = d.number(10, 60), d.number(2, 30)
    gave = d.number(2, first + got - 1)
    held = d.step(f"{d.name} then has {{}} {d.thing}.", first, "+", got)
    result = d.step(f"After giving some away, {d.they} has {{}} left.", held, "-", gave)
    return d.done(
        f"{d.name} has {first} {d.thing}. {d.other} gives {d.name} {got} more. Then {d.name} gives {gave} of {d.their} "
        f"{d.thing} to a friend. How many {d.thing} does {d.name} have left?",
        result,
    )


def _buys(d: Draw) -> Problem:
    count, price = d.number(2, 9), d.number(2, 12)
    paid = count * price + d.number(1, 30)
    cost = d.step(f"The {d.thing} cost {{}} dollars.", count, "*", price)
    result = d.step(f"{d.name} gets back {{}} dollars.", paid, "-", cost)
    return d.done(
        f"{d.name} buys {count} {d.thing} for {price} dollars each and pays with {paid} dollars. How many dollars does "
        f"{d.they} get back?",
        result,
    )


def _two_prices(d: Draw) -> Problem:
    a, price_a, b, price_b = d.number(2, 9), d.number(2, 9), d.number(2, 9), d.number(2, 9)
    first = d.step(f"The {d.thing} cost {{}} dollars.", a, "*", price_a)
    other = d.step(f"The {d.second} cost {{}} dollars.", b, "*", price_b)
    result = d.step("In total that is {} dollars.", first, "+", other)
    return d.done(
        f"{d.name} buys {a} {d.thing} at {price_a} dollars each and {b} {d.second} at {price_b} dollars each. How "
        f"many dollars does {d.they} spend?",
        result,
    )


def _shares(d: Draw) -> Problem:
    people, each = d.number(2, 9), d.number(2, 12)
    extra = d.number(1, 15)
    whole = people * each
    left = d.step(f"There are {{}} {d.thing} to share.", whole + extra, "-", extra)
    result = d.step(f"Each friend gets {{}} {d.thing}.", left, "/", people)
    return d.done(
        f"{d.name} has {whole + extra} {d.thing}, keeps {extra} and shares the rest equally among {people} friends. "
        f"How many {d.thing} does each friend get?",
        result,
    )


def _days(d: Draw) -> Problem:
    each, days, eaten = d.number(3, 12), d.number(2, 9), d.number(1, 20)
    eaten = min(eaten, each * days - 1)
    whole = d.step(f"{d.name} collects {{}} {d.thing}.", each, "*", days)
    result = d.step(f"{d.name} still has {{}} of them.", whole, "-", eaten)
    return d.done(
        f"Every day {d.name} collects {each} {d.thing}. After {days} days {d.they} has lost {eaten} of them. How many "
        f"{d.thing} does {d.they} still have?",
        result,
    )


def _more_than(d: Draw) -> Problem:
    first, more = d.number(5, 60), d.number(2, 30)
    other = d.step(f"{d.other} has {{}} {d.thing}.", first, "+", more)
    result = d.step(f"Together they have {{}} {d.thing}.", first, "+", other)
    return d.done(
        f"{d.name} has {first} {d.thing}. {d.other} has {more} more than {d.name}. How many {d.thing} do they have "
        f"together?",
        result,
    )


def _times_as_many(d: Draw) -> Problem:
    first, times = d.number(2, 20), d.number(2, 6)
    other = d.step(f"{d.other} has {{}} {d.thing}.", first, "*", times)
    result = d.step(f"The difference is {{}} {d.thing}.", other, "-", first)
    return d.done(
        f"{d.name} has {first} {d.thing}, and {d.other} has {times} times as many. How many more {d.thing} does {d.other} "
        "have?",
        result,
    )


def _week(d: Draw) -> Problem:
    first, second, third = d.number(5, 40), d.number(5, 40), d.number(5, 40)
    sum_ = d.step(f"In two days {d.they} reads {{}} pages.", first, "+", second)
    result = d.step("In all that is {} pages.", sum_, "+", third)
    return d.done(
        f"{d.name} reads {first} pages on {d.day}, {second} pages on {d.next_day} and {third} pages the day after. "
        f"How many pages does {d.they} read?",
        result,
    )


def _earns(d: Draw) -> Problem:
    wage, hours, spent = d.number(5, 15), d.number(2, 9), d.number(2, 20)
    spent = min(spent, wage * hours - 1)
    whole = d.step(f"{d.name} earns {{}} dollars.", wage, "*", hours)
    result = d.step(f"{d.name} has {{}} dollars left.", whole, "-", spent)
    return d.done(
        f"{d.name} earns {wage} dollars an hour and works {hours} hours. {d.name} spends {spent} dollars on lunch. "
        f"How many dollars does {d.they} have left?",
        result,
    )


def _fills(d: Draw) -> Problem:
    each, count = d.number(3, 12), d.number(2, 9)
    have = d.number(1, each * count - 1)
    whole = d.step(f"The {d.holders} hold {{}} {d.thing}.", count, "*", each)
    result = d.step(f"{d.name} needs {{}} more.", whole, "-", have)
    return d.done(
        f"{d.name} wants to fill {count} {d.holders} with {each} {d.thing} each and has {have} {d.thing}. How many more "
        f"{d.thing} does {d.they} need?",
        result,
    )


def _half(d: Draw) -> Problem:
    half, more = d.number(3, 40), d.number(2, 30)
    sold = d.step(f"On {d.next_day} {d.they} sells {{}} {d.thing}.", 2 * half, "/", 2)
    two = d.step(f"On both days {d.they} sells {{}} {d.thing}.", 2 * half, "+", sold)
    result = d.step(f"There were {{}} {d.thing}.", two, "+", more)
    return d.done(
        f"{d.name} sells {2 * half} {d.thing} on {d.day} and half as many on {d.next_day}. {more} {d.thing} are "
        f"left. How many {d.thing} were there?",
        result,
    )


STORIES: tuple[Callable[[Draw], Problem], ...] = (
    _boxes, _gives, _buys, _two_prices, _shares, _days, _more_than, _times_as_many, _week, _earns, _fills, _half,
)  # fmt: skip


def problems(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Problems without end, those held out or the others; no question twice."""
    rng = random.Random(f"{seed} {held_out}")
    seen: set[str] = set()
    while True:
        made = rng.choice(STORIES)(Draw(rng))
        if made.held_out == held_out and made.question not in seen:
            seen.add(made.question)
            yield made


def main() -> int:
    """Print held-out problems as JSON lines."""
    parser = argparse.ArgumentParser(description="Print grade-school problems that no model here was trained on.")
    parser.add_argument("--held-out", type=int, default=128, metavar="N", help="how many, default: 128")
    parser.add_argument("--seed", type=int, default=1, help="default: 1")
    given = parser.parse_args()
    found = problems(given.seed, held_out=True)
    for _ in range(given.held_out):
        made = next(found)
        sys.stdout.write(json.dumps({"question": made.question, "answer": made.answer}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
