"""Lies about kernel folders and about what their plugins report of themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lies.battery import Edit, Lie, Setup
from tests.lies.switches import env, faults, in_candidate, variants

PLUGIN = """\
import os

CHOICE = "fast" if os.environ.get("FAKE_SWITCH") == "fast" else "plain"
CALLS = {"fast": 0, "plain": 0}


def register():
    pass


def forward():
    CALLS[CHOICE] += 1


def abharness_report():
    given = {"FAKE_SWITCH": os.environ["FAKE_SWITCH"]} if "FAKE_SWITCH" in os.environ else {}
    return {"choice": f"kernel set {CHOICE}", "given": given, "calls": dict(CALLS)}
"""


def folder(plugin: str = PLUGIN, where: str = "mine") -> dict[str, str]:
    """Files of a kernel folder."""
    return {f"{where}/__init__.py": "", f"{where}/vllm_plugin.py": plugin}


def changed(*pairs: tuple[str, str], where: str = "mine") -> Setup:
    """The folder with another plugin: texts of the good one replaced."""
    plugin = PLUGIN
    for old, new in pairs:
        assert old in plugin
        plugin = plugin.replace(old, new)
    return Setup(files=folder(plugin, where))


def expecting(**conditions: str) -> dict[str, Any]:
    """A spec's part: what the candidate's plugin must report; `__` stands for a dot."""
    keys = {key.replace("__", "."): condition for key, condition in conditions.items()}
    return {"verify": {"expect_report": {"candidate": {"mine": keys}}}}


MINE = Setup(spec={"server": {"kernels": ["@TMP@/mine"]}}, files=folder())
EXPECTED = Setup(spec=expecting(choice="kernel set f.*", calls__fast=">0", calls__plain="==0")).over(MINE)
TWO_WORKERS = Setup(spec=env(FAKE_WORKERS="2")).over(EXPECTED)
FOUR = Setup(spec={"design": {"launches_per_variant": 2}, **env(COUNT_FILE="@TMP@/count")}).over(MINE)
VERSIONS = Setup(
    spec=variants({"env": {"FAKE_SWITCH": None}, "kernels": ["@TMP@/old/mine"]},
                  {"env": {"FAKE_SWITCH": None}, "kernels": ["@TMP@/new/mine"]}),
    files={**folder(where="old/mine"), **folder(PLUGIN.replace("kernel set", "newer set"), "new/mine")},
)  # fmt: skip

SAME = (
    Lie(
        "the plugin runs the same in both variants, and says so",
        "the switch makes no difference",
        3,
        "switch_not_recognised",
        r"^switch_not_recognised: .*FAKE_SWITCH: the plugin that was given it reports the same choice",
        MINE,
        changed(('"fast" if os.environ.get("FAKE_SWITCH") == "fast" else "plain"', '"plain"')),
    ),
    Lie(
        "the plugin does not run what was expected of it",
        "the switch makes no difference",
        4,
        "switch_not_recognised",
        r"plugin mine reports choice: expected 'kernel set f\.\*', and it is .kernel set plain. in pid \d+ \(EngineCore\)",
        EXPECTED,
        changed(('"fast" if os.environ.get("FAKE_SWITCH") == "fast" else "plain"', '"plain"')),
    ),
    Lie(
        "the plugin's kernels are never called",
        "the new kernels make no difference",
        4,
        "switch_not_recognised",
        r"plugin mine reports calls\.fast: expected '>0', and it is 0",
        EXPECTED,
        faults(plugin_not_called=in_candidate()),
    ),
    Lie(
        "one of the processes that run the model runs another path",
        "the whole model ran the new kernels",
        4,
        "switch_not_recognised",
        r"plugin mine reports calls\.fast: expected '>0', and it is 0 in pid \d+ \(Worker\)$",
        TWO_WORKERS,
        faults(plugin_not_called=in_candidate()),
    ),
    Lie(
        "what the plugin runs differs between launches of one variant",
        "every launch of a variant is a sample of the same server",
        3,
        "undeclared_difference",
        r"^undeclared_difference: .*report\.mine\.choice: differs between launches of the candidate",
        FOUR,
        changed(
            (
                "def register():\n    pass",
                "def register():\n"
                "    global CHOICE\n"
                "    if CHOICE == 'fast':\n"
                "        with open(os.environ['COUNT_FILE'], 'a+') as file:\n"
                "            file.write(os.environ['ABHARNESS_LAUNCH'] + ' ')\n"
                "            file.seek(0)\n"
                "            CHOICE = 'fast' if len(set(file.read().split())) == 1 else 'faster'\n"
                "        CALLS[CHOICE] = 0",
            )
        ),
    ),
    Lie(
        "the two versions are the same",
        "the new version makes no difference",
        2,
        None,
        r"what is in them is the same",
        VERSIONS,
        Setup(files=folder(where="new/mine")),
    ),
)

SILENT = (
    Lie(
        "the plugin has nothing to say",
        "it ran what was expected: nothing contradicts",
        4,
        "env_unverifiable",
        r"plugin mine: a report was expected, and there is none from .*it is loaded and has no abharness_report\(\)",
        EXPECTED,
        changed(("def abharness_report", "def other_report")),
    ),
    Lie(
        "the plugin fails when it is asked",
        "it ran what was expected: nothing contradicts",
        4,
        "env_unverifiable",
        r"it failed to report: KeyError\('lost'\)",
        EXPECTED,
        changed(('"calls": dict(CALLS)', '"calls": CALLS["lost"]')),
    ),
    Lie(
        "the plugin ends its process's answering thread when it is asked",
        "it ran what was expected: nothing contradicts",
        4,
        "env_unverifiable",
        r"it failed to report: SystemExit\(3\)",
        EXPECTED,
        changed(("    given =", "    raise SystemExit(3)\n    given =")),
    ),
    Lie(
        "the plugin reports what is no JSON",
        "it ran what was expected: nothing contradicts",
        4,
        "env_unverifiable",
        r"it failed to report: ValueError",
        EXPECTED,
        changed(('"calls": dict(CALLS)', '"calls": {"fast": float("nan"), "plain": 0}')),
    ),
    Lie(
        "the plugin reports without end",
        "it ran what was expected: nothing contradicts",
        4,
        "env_unverifiable",
        r"bytes of JSON, more than 16384",
        EXPECTED,
        changed(('"calls": dict(CALLS)', '"calls": dict(CALLS), "more": "x" * 20000')),
    ),
)

LOADED = (
    Lie(
        "the plugin of a kernel folder fails when it is loaded",
        "the new kernels make no difference",
        4,
        "plugin_not_active",
        r"plugin mine: .*Failed to load plugin mine",
        MINE,
        changed(("def register():\n    pass", "def register():\n    raise RuntimeError('no such GPU')")),
    ),
    Lie(
        "the plugin of a kernel folder is loaded in the API server only",
        "the new kernels make no difference",
        4,
        "plugin_not_active",
        r"plugin mine: seen loaded in .*not in .*\(EngineCore\)",
        MINE,
        faults(plugin_api_server_only=in_candidate(["mine"])),
    ),
    Lie(
        "another package of the same name comes first on the path",
        "the folder's kernels were measured",
        4,
        "plugin_not_active",
        r"kernels mine: pid .* imported .*/elsewhere/mine/vllm_plugin\.py, not the run's copy of .*/mine",
        MINE,
        Setup(spec=env(PYTHONPATH="@TMP@/elsewhere:@SITE@"), files=folder(where="elsewhere/mine")),
    ),
    Lie(
        "the plugin writes into the run's copy of itself",
        "every launch ran the code on record",
        4,
        "undeclared_difference",
        r"kernels mine: the run's copy .* was changed since it was made",
        MINE,
        changed(
            (
                "def register():\n    pass",
                "def register():\n"
                "    with open(os.path.join(os.path.dirname(__file__), 'table.json'), 'w') as file:\n"
                "        file.write('{}')",
            )
        ),
    ),
)


def edited(name: str, change: Callable[[dict[str, Any]], None]) -> Edit:
    """Changes a file of the candidate's first launch."""

    def edit(run: Path) -> list[str]:
        (path,) = run.glob(f"launches/1-candidate/{name}")
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
        return [str(run)]

    return edit


def other_version(record: dict[str, Any]) -> None:
    record["kernels"][0]["sha256"] = "0" * 64


def no_version(record: dict[str, Any]) -> None:
    record["kernels"] = []


def other_choice(evidence: dict[str, Any]) -> None:
    for check in evidence["environment"]:
        for probe in check["probes"]:
            for report in probe["reports"].values():
                report["choice"] = "kernel set plain"


def more_calls(evidence: dict[str, Any]) -> None:
    for check in evidence["environment"]:
        for probe in check["probes"]:
            probe["reports"]["mine"]["calls"]["fast"] = 1234


RECORDS = (
    Lie(
        "the variants had two versions of a folder that was declared equal",
        "the switch alone makes the difference",
        3,
        "undeclared_difference",
        r"^undeclared_difference: .*kernels\.mine: baseline .*; candidate '0000",
        MINE,
        edit=edited("launch.json", other_version),
    ),
    Lie(
        "a record does not say which version it had",
        "the folder's kernels were measured",
        3,
        "plugin_not_active",
        r"^plugin_not_active: .*kernels: declared mine, launched with none",
        MINE,
        edit=edited("launch.json", no_version),
    ),
    Lie(
        "a record's report is not what was expected",
        "the plugin ran what was expected: the launch completed",
        3,
        "switch_not_recognised",
        r"^switch_not_recognised: .*plugin mine reports choice: expected",
        EXPECTED,
        edit=edited("evidence.json", other_choice),
        honest_edit=edited("evidence.json", more_calls),
    ),
)

LIES = (*SAME, *SILENT, *LOADED, *RECORDS)
