"""kernels/README.md tells every switch of the kernels, with its values, what it is when unset, and what a set turns on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from abharness import kernelfolder
from abharness.probe import MOST_REPORTED, REPORT_FUNCTION
from abharness.spec import kernel_name
from pq2 import switches
from tests.markdown import ROOT, anchors, links

README = ROOT / "kernels" / "README.md"
TEXT = README.read_text(encoding="utf-8")


def table(first: str) -> dict[str, list[str]]:
    """The rows of the table whose first column has this heading, by the `code` in their first cell."""
    found = re.search(rf"^\| {re.escape(first)} \|.*\n\| ---.*\n((?:\|.*\n)+)", TEXT, re.MULTILINE)
    assert found is not None, first
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found[1].splitlines()]
    return {row[0].strip("` "): row[1:] for row in rows}


def codes(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`(\w+)`", cell))


def test_every_switch_is_told_with_its_values_and_what_it_does() -> None:
    rows = table("variable")
    assert tuple(rows) == switches.NAMES
    for name, (values, unset, effect) in rows.items():
        assert codes(values) == (switches.SETS if name == switches.KERNELS else switches.VALUES), name
        assert effect
        if name == switches.KERNELS:
            told = dict(re.findall(r"`(\w+)` on (?:a )?(\w+)", unset))
            real = {switches.resolve({}, device).kernel_set: device for device in ("cuda", "cpu")}
            assert {name: device.lower() for name, device in told.items()} == real
        else:
            assert unset == "as the kernel set has it"


def test_every_kernel_set_is_told_with_the_paths_that_it_turns_on() -> None:
    rows = table("kernel set")
    assert tuple(rows) == switches.SETS
    heads = codes(next(line for line in TEXT.splitlines() if line.startswith("| kernel set |")))
    assert heads == tuple(switches.variable(path) for path in switches.PATHS)
    for name, cells in rows.items():
        choice = switches.resolve({switches.KERNELS: name}, "cuda")
        assert [codes(cell)[0] for cell in cells[:-1]] == [
            "on" if choice.on(path) else "off" for path in switches.PATHS
        ], name


def test_the_contract_is_the_one_that_is_held() -> None:
    rows = table("file")
    assert "register()" in rows[f"{kernelfolder.PLUGIN_MODULE}.py"][0]
    assert all(f"`{name}`" in TEXT for name in kernelfolder.LEFT_OUT)
    assert f"{REPORT_FUNCTION}()" in TEXT
    assert f"{MOST_REPORTED // 1024} KiB" in TEXT


@pytest.mark.parametrize("link", links(TEXT))
def test_every_link_leads_somewhere(link: str) -> None:
    target, _, anchor = link.partition("#")
    path = (README.parent / target).resolve()
    assert path.exists()
    assert not anchor or anchor in anchors(path.read_text(encoding="utf-8"))


FOLDERS = sorted(path.parent for path in (ROOT / "kernels").glob("*/__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_kernel_folder_of_this_repository_is_light_to_import(folder: Path) -> None:
    name = kernel_name(str(folder))
    code = f"import sys, {name}, {name}.switches; print([m for m in ('torch', 'triton', 'vllm') if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(folder.parent)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_kernels_is_no_package() -> None:
    """Hugging Face's `kernels` owns that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
