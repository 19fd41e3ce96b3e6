"""The battery: every lie ends in its own code and exit status, and its honest twin passes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from abharness.codes import CODES
from tests.lies import clocks, folders, kernels, load, records, servers, switches
from tests.lies.battery import Lie, Outcome, Setup, carry_out, copy_of, judge_records

LIES: tuple[Lie, ...] = (
    *switches.LIES,
    *folders.LIES,
    *servers.LIES,
    *load.LIES,
    *records.LIES,
    *clocks.LIES,
    *kernels.LIES,
)

BUSY_TRIES = 4
"""Times that a twin is run: a machine that is busy with something else is told to be, and that is no lie."""


@pytest.fixture(scope="session")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Outcomes of the honest twins, by the key of their setup."""
    return {}


def twin(lie: Lie, told: dict[str, Outcome], factory: pytest.TempPathFactory) -> Outcome:
    key = lie.honest.key()
    for _ in range(BUSY_TRIES):
        if key in told and told[key].codes != ["client_bound"]:
            break
        told[key] = carry_out(lie.honest, factory.mktemp("honest"))
    return told[key]


def outcome_of(lie: Lie, told: dict[str, Outcome], folder: Path, factory: pytest.TempPathFactory) -> Outcome:
    if lie.lie is not None:
        return carry_out(lie.lie.over(lie.honest), folder)
    honest = twin(lie, told, factory)
    assert lie.edit is not None
    assert honest.run is not None
    return judge_records(lie.edit(copy_of(honest.run, folder)), folder)


ALL = [pytest.param(lie, id=lie.name) for lie in LIES]


@pytest.mark.parametrize("lie", ALL)
def test_the_honest_twin_passes(
    lie: Lie, told: dict[str, Outcome], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    honest = twin(lie, told, tmp_path_factory)
    if lie.edit is not None and honest.run is not None:
        honest = judge_records(lie.honest_edit(copy_of(honest.run, tmp_path)), tmp_path)
        if lie.concludes == records.FASTER:
            assert "faster in 1" in honest.text, "what the lie is kept from saying can be said"
    assert (honest.exit_code, honest.codes) == (0, []), honest.text
    assert honest.left == []


@pytest.mark.parametrize("lie", ALL)
def test_the_lie_is_told_apart(
    lie: Lie, told: dict[str, Outcome], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outcome = outcome_of(lie, told, tmp_path, tmp_path_factory)
    assert (outcome.exit_code, outcome.left) == (lie.exit_code, []), outcome.text
    assert re.search(lie.says, outcome.text, re.MULTILINE), outcome.text
    if lie.code is not None:
        assert lie.code in outcome.codes, outcome.text
        assert CODES[lie.code].invalidates
        assert re.search(rf"^{lie.code}: .+", outcome.report, re.MULTILINE), outcome.text
        assert re.search(r"^  next: .+", outcome.report, re.MULTILINE), outcome.text
    if lie.exit_code == 1:
        assert outcome.conclusions == ["answers got worse"]
    else:
        assert outcome.conclusions == []
    if lie.exit_code == 2:
        assert outcome.report == ""
        assert "error" in outcome.text


def test_every_name_is_used_once() -> None:
    names = [lie.name for lie in LIES]
    assert len(set(names)) == len(names) >= 45


def test_equal_setups_share_a_twin_and_others_do_not() -> None:
    assert Setup().key() == Setup(spec={}).key()
    assert Setup().key() != Setup(faults={"no_metrics": True}).key()
