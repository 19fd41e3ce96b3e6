"""The command line where it goes wrong: an exit code never says more than is known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from abharness import compare
from abharness.cli import main
from tests.synthetic import Made, write_run

LAUNCHES: dict[Any, list[Made]] = {
    "baseline": [Made(speed=100.0), Made(speed=100.4)],
    "candidate": [Made(speed=108.2), Made(speed=108.9)],
}


def test_an_internal_error_is_exit_5_and_never_1(monkeypatch: Any, capsys: Any) -> None:
    """Python itself would exit with 1, which says that a regression was called."""

    def broken(*_arguments: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(compare, "compare_folders", broken)
    assert main(["compare", "somewhere"]) == 5
    assert "internal error: KeyError" in capsys.readouterr().err


def test_a_terminal_that_cannot_show_a_character_gets_its_escape(tmp_path: Path) -> None:
    run = write_run(tmp_path / "r", LAUNCHES, "design.launches_per_variant=2")
    done = subprocess.run(
        [sys.executable, "-m", "abharness.cli", "compare", str(run)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        cwd=Path(compare.__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xb1" in done.stdout
