"""Grade-school problems made by rules, each with a worked solution that ends in `#### N`, in the shape of GSM8K's files.

    python problems.py --held-out 128 --seed 1 > held-out.jsonl

A problem is one of the stories below with names, things and numbers drawn for it. Which problems are held out is decided
by a hash of the question, so a model that was trained on any number of others has not seen them, whatever the seeds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import operator
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

HELD_OUT = 50
"""One problem of so many is held out."""

GIRLS = ("Mia", "Ada", "Nora", "Lena", "Ruth", "Iris", "Zoe", "Clara", "Emma", "Hana")
BOYS = ("Tom", "Ben", "Omar", "Luis", "Jack", "Noah", "Paul", "Ivan", "Kofi", "Sam")
THINGS = (
    "apples", "pears", "books", "stickers", "marbles", "shells", "coins", "cards", "pencils", "buttons", "cookies",
    "beads", "stamps", "lamps", "plums",
)  # fmt: skip
HOLDERS = ("boxes", "bags", "shelves", "baskets", "jars")
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


@dataclass(frozen=True, slots=True)
class Story:
    """A kind of problem.

    Attributes:
        question: Its text, with the names of what is drawn in braces.
        drawn: Name -> least and largest value of a number that is drawn.
        steps: The solution: the name of each result, its sentence (`{}` is the calculation, as GSM8K writes it), and what
            is calculated: two names with a sign between them. The last result is the answer.
        given: From the drawn numbers those that the question gives besides, so that nothing is negative or broken.
    """

    question: str
    drawn: Mapping[str, tuple[int, int]]
    steps: tuple[tuple[str, str, str], ...]
    given: Callable[[dict[str, int]], dict[str, int]] = lambda _: {}

    def tell(self, rng: random.Random) -> Problem:
        """One problem of this kind."""
        girl = rng.random() < 0.5
        name, other = rng.sample(GIRLS if girl else BOYS, 2)
        thing, second = rng.sample(THINGS, 2)
        day, next_day = rng.sample(DAYS, 2)
        words = {
            "name": name, "other": other, "they": "she" if girl else "he", "their": "her" if girl else "his",
            "thing": thing, "second": second, "holders": rng.choice(HOLDERS), "day": day, "next_day": next_day,
        }  # fmt: skip
        numbers = {key: rng.randint(low, high) for key, (low, high) in self.drawn.items()}
        numbers |= self.given(numbers)
        question = self.question.format(**words, **numbers)
        lines, result = [], 0
        for key, sentence, calculation in self.steps:
            left, sign, right = calculation.split()
            one, two = (int(part) if part.isdecimal() else numbers[part] for part in (left, right))
            result = numbers[key] = SIGNS[sign](one, two)
            shown = f"{one}{sign}{two}"
            lines.append(sentence.format(f"{shown}=<<{shown}={result}>>{result}", **words))
        return Problem(question, "\n".join([*lines, f"#### {result}"]))


SIGNS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}

STORIES = (
    Story(
        "{name} has {count} {holders} with {each} {thing} each, and {more} more {thing} on the table. How many {thing} "
        "does {they} have?",
        {"count": (2, 9), "each": (2, 12), "more": (2, 20)},
        (
            ("inside", "In the {holders} are {} {thing}.", "count * each"),
            ("all", "Together there are {} {thing}.", "inside + more"),
        ),
    ),
    Story(
        "{name} has {first} {thing}. {other} gives {name} {got} more. Then {name} gives {gave} of {their} {thing} to a "
        "friend. How many {thing} does {name} have left?",
        {"first": (10, 60), "got": (2, 30), "share": (1, 99)},
        (
            ("held", "{name} then has {} {thing}.", "first + got"),
            ("left", "After giving some away, {they} has {} left.", "held - gave"),
        ),
        lambda n: {"gave": max(2, (n["first"] + n["got"]) * n["share"] // 100)},
    ),
    Story(
        "{name} buys {count} {thing} for {price} dollars each and pays with {paid} dollars. How many dollars does "
        "{they} get back?",
        {"count": (2, 9), "price": (2, 12), "change": (1, 30)},
        (
            ("cost", "The {thing} cost {} dollars.", "count * price"),
            ("back", "{name} gets back {} dollars.", "paid - cost"),
        ),
        lambda n: {"paid": n["count"] * n["price"] + n["change"]},
    ),
    Story(
        "{name} buys {a} {thing} at {price_a} dollars each and {b} {second} at {price_b} dollars each. How many "
        "dollars does {they} spend?",
        {"a": (2, 9), "price_a": (2, 9), "b": (2, 9), "price_b": (2, 9)},
        (
            ("cost_a", "The {thing} cost {} dollars.", "a * price_a"),
            ("cost_b", "The {second} cost {} dollars.", "b * price_b"),
            ("all", "In total that is {} dollars.", "cost_a + cost_b"),
        ),
    ),
    Story(
        "{name} has {whole} {thing}, keeps {kept} and shares the rest equally among {people} friends. How many {thing} "
        "does each friend get?",
        {"people": (2, 9), "part": (2, 12), "kept": (1, 15)},
        (
            ("rest", "There are {} {thing} to share.", "whole - kept"),
            ("each", "Each friend gets {} {thing}.", "rest / people"),
        ),
        lambda n: {"whole": n["people"] * n["part"] + n["kept"]},
    ),
    Story(
        "Every day {name} collects {each} {thing}. After {days} days {they} has lost {lost} of them. How many {thing} "
        "does {they} still have?",
        {"each": (3, 12), "days": (2, 9), "gone": (1, 20)},
        (
            ("found", "{name} collects {} {thing}.", "each * days"),
            ("left", "{name} still has {} of them.", "found - lost"),
        ),
        lambda n: {"lost": min(n["gone"], n["each"] * n["days"] - 1)},
    ),
    Story(
        "{name} has {first} {thing}. {other} has {more} more than {name}. How many {thing} do they have together?",
        {"first": (5, 60), "more": (2, 30)},
        (
            ("others", "{other} has {} {thing}.", "first + more"),
            ("all", "Together they have {} {thing}.", "first + others"),
        ),
    ),
    Story(
        "{name} has {first} {thing}, and {other} has {times} times as many. How many more {thing} does {other} have?",
        {"first": (2, 20), "times": (2, 6)},
        (
            ("others", "{other} has {} {thing}.", "first * times"),
            ("more", "The difference is {} {thing}.", "others - first"),
        ),
    ),
    Story(
        "{name} reads {one} pages on {day}, {two} pages on {next_day} and {three} pages the day after. How many pages "
        "does {they} read?",
        {"one": (5, 40), "two": (5, 40), "three": (5, 40)},
        (
            ("both", "In two days {they} reads {} pages.", "one + two"),
            ("all", "In all that is {} pages.", "both + three"),
        ),
    ),
    Story(
        "{name} earns {wage} dollars an hour and works {hours} hours. {name} spends {spent} dollars on lunch. How many "
        "dollars does {they} have left?",
        {"wage": (5, 15), "hours": (2, 9), "lunch": (2, 20)},
        (
            ("earned", "{name} earns {} dollars.", "wage * hours"),
            ("left", "{name} has {} dollars left.", "earned - spent"),
        ),
        lambda n: {"spent": min(n["lunch"], n["wage"] * n["hours"] - 1)},
    ),
    Story(
        "{name} wants to fill {count} {holders} with {each} {thing} each and has {have} {thing}. How many more {thing} "
        "does {they} need?",
        {"count": (2, 9), "each": (3, 12), "share": (1, 99)},
        (
            ("room", "The {holders} hold {} {thing}.", "count * each"),
            ("more", "{name} needs {} more.", "room - have"),
        ),
        lambda n: {"have": max(1, n["count"] * n["each"] * n["share"] // 100)},
    ),
    Story(
        "{name} sells {first} {thing} on {day} and half as many on {next_day}. {left} {thing} are left. How many "
        "{thing} were there?",
        {"half": (3, 40), "left": (2, 30)},
        (
            ("sold", "On {next_day} {they} sells {} {thing}.", "first / 2"),
            ("both", "On both days {they} sells {} {thing}.", "first + sold"),
            ("all", "There were {} {thing}.", "both + left"),
        ),
        lambda n: {"first": 2 * n["half"]},
    ),
)


def problems(seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Problems without end, those held out or the others; no question twice."""
    rng = random.Random(f"{seed} {held_out}")
    seen: set[str] = set()
    while True:
        made = rng.choice(STORIES).tell(rng)
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
