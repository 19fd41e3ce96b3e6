"""The problems that the tiny model is trained on and asked: worked right, in GSM8K's shape, and never both."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from abharness.accuracy import load_questions

SCRIPT = Path(__file__).parent.parent / "experiments" / "tiny" / "problems.py"
COUNT = 3000


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_problems", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_problems"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_step_is_right_and_the_last_one_is_the_answer(made: ModuleType) -> None:
    stories = set()
    for problem in itertools.islice(made.problems(0, held_out=False), COUNT):
        steps = re.findall(r"(\d+)([-+*/])(\d+)=<<(.+?)=(-?\d+)>>(-?\d+)", problem.answer)
        assert len(steps) >= 2
        for left, sign, right, shown, inside, result in steps:
            assert shown == f"{left}{sign}{right}"
            assert inside == result
            a, b = int(left), int(right)
            assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == int(result)
            assert int(result) >= 0
        *_, last = problem.answer.splitlines()
        assert last == f"#### {steps[-1][-1]}"
        stories.add(re.sub(r"\d+|[A-Z]\w+", "", problem.question)[:12])
    assert len(made.STORIES) == 12
    assert len(stories) > 12


def test_what_is_held_out_is_never_trained_on_and_seeds_repeat(made: ModuleType) -> None:
    trained = {one.question for one in itertools.islice(made.problems(0, held_out=False), COUNT)}
    asked = [one.question for one in itertools.islice(made.problems(0, held_out=True), 128)]
    assert len(trained) == COUNT
    assert len(set(asked)) == 128
    assert not trained & set(asked)
    again = itertools.islice(made.problems(0, held_out=True), 128)
    other = itertools.islice(made.problems(1, held_out=True), 128)
    assert [one.question for one in again] == asked
    assert [one.question for one in other] != asked


def test_the_script_prints_what_an_answer_check_reads(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--held-out", "16", "--seed", "3"], capture_output=True, text=True, check=True
    )
    path = tmp_path / "held-out.jsonl"
    path.write_text(done.stdout)
    questions = load_questions(str(path))
    assert len(questions) == 16
    assert all(question.gold == int(question.answer.rpartition("####")[2]) for question in questions)
