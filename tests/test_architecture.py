"""Who may import whom, and what must stay light: held by parsing the imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "abharness"
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
REPLAY = PACKAGE / "replay"
REPLAY_MODULES = sorted(f"replay.{path.stem}" for path in REPLAY.glob("*.py") if path.stem != "__init__")
INSIDE = sorted((REPLAY / "inside").glob("*.py"))

# What a module may import of ours. Leaves first; a doer takes pids, URLs and texts, never a spec or a plan.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "arguments": {"replay.parser"},
    "atomic": set(),
    "base": set(),
    "windows": {"base"},
    "witnesses": {"base"},
    "record": {"base", "windows", "witnesses"},
    "storage": {"atomic", "base", "errors", "record", "redaction"},
    "redaction": set(),
    "yamlload": set(),
    "spec": {"record"},
    "git": set(),
    "kernelfolder": {"cache", "errors", "git", "probe", "witnesses"},
    "kernelspec": {"reported", "spec"},
    "reported": {"judge", "record", "witnesses"},
    "specload": {"errors", "kernelspec", "metrics", "plan", "record", "redaction", "spec", "yamlload"},
    "cache": {"errors"},
    "energy": {"windows"},
    "metrics": {"gpuchecks", "record", "windows"},
    "shares": set(),
    "stats": set(),
    "gpuchecks": {"record", "windows"},
    "codes": set(),
    "checks": {"gpuchecks", "prompts", "record"},
    "executed": {"kernels", "record", "spec", "timeline"},
    "flips": {"record"},
    "answers": {"record"},
    "plan": {"record", "redaction", "spec", "witnesses"},
    "warmup": {"plan"},
    "samples": {"atomic", "energy", "errors", "windows"},
    "timeline": set(),
    "kineto": {"errors", "timeline"},
    "nsys": {"errors", "timeline"},
    "trace": {"atomic", "errors", "kineto", "nsys", "timeline"},
    "kernels": {"timeline"},
    "traceview": {"errors", "kernels", "timeline"},
    "runs": {"accuracy", "errors", "executed", "metrics", "record", "samples", "storage", "trace"},
    "judge": {"record", "redaction", "witnesses"},
    "facts": {"judge", "plan", "record", "reported", "runs", "spec"},
    "effects": {"executed", "facts", "judge", "kernels", "record", "reported", "runs", "spec", "validity"},
    "validity": {"codes", "executed", "facts", "judge", "plan", "record", "reported", "runs", "spec", "stats"},
    "cells": {"gpuchecks", "metrics", "record", "runs", "spec", "stats"},
    "paired": {"answers", "cells", "checks", "codes", "flips", "record", "spec", "stats", "validity"},
    "waivers": {"codes", "errors", "validity"},
    "diagnostics": {"cells", "record", "spec", "stats"},
    "floors": {"cells", "paired", "runs", "stats", "validity"},
    "compare": {
        "cells",
        "checks",
        "diagnostics",
        "effects",
        "errors",
        "executed",
        "floors",
        "gpuchecks",
        "metrics",
        "paired",
        "plan",
        "record",
        "runs",
        "shares",
        "spec",
        "stats",
        "validity",
        "waivers",
    },
    "failures": {"record"},
    "index": {"cells", "compare", "record", "runs"},
    "terminal": {"redaction"},
    "indexview": {"compare", "index", "redaction", "spec", "terminal"},
    "exported": {"compare", "runs"},
    "benchserve": {"exported", "metrics", "record", "runs"},
    "benchfmt": {"cells", "exported", "metrics", "record", "runs", "spec"},
    "longcsv": {"answers", "cells", "exported", "metrics", "paired", "runs"},
    "lmeval": {"answers", "exported", "record", "runs", "spec"},
    "export": {"benchfmt", "benchserve", "errors", "exported", "lmeval", "longcsv", "runs", "storage"},
    "schemas": {"compare", "events", "record", "spec"},
    "report": {
        "cells",
        "codes",
        "compare",
        "executed",
        "failures",
        "index",
        "indexview",
        "kernels",
        "paired",
        "record",
        "redaction",
        "spec",
        "stats",
        "terminal",
        "waivers",
    },
    "answerdiff": {"answers", "flips", "record"},
    "plots": {"record", "spec"},
    "trails": {"gpuchecks", "plots", "record", "samples"},
    "proofs": {"effects", "judge", "plan", "record", "reported", "runs", "spec"},
    "page": {
        "answerdiff",
        "cells",
        "compare",
        "errors",
        "failures",
        "metrics",
        "paired",
        "plots",
        "proofs",
        "record",
        "report",
        "runs",
        "samples",
        "spec",
        "terminal",
        "trails",
    },
    "webpage": {"compare", "index", "page", "redaction", "runs"},
    "envblock": {"redaction", "witnesses"},
    "procfs": {"envblock", "redaction", "witnesses"},
    "probe": {"redaction"},
    "hearing": {"probe", "procfs", "witnesses"},
    "verify": {"judge", "procfs", "record", "reported", "witnesses"},
    "resources": {"errors", "procfs", "witnesses"},
    "tree": {"procfs"},
    "locks": set(),
    "claims": {"base", "errors", "locks", "procfs", "redaction", "resources", "spec", "storage", "tree"},
    "guard": {"claims"},
    "server": {"claims", "errors", "procfs", "redaction", "resources", "tree", "witnesses"},
    "telemetry": {"errors", "samples", "windows"},
    "sampler": {"energy", "errors", "samples", "telemetry", "windows"},
    "compilation": {"windows"},
    "hostload": {"windows"},
    "observe": {"compilation", "endpoints", "hostload", "metrics", "record", "sampler"},
    "prompts": {"errors"},
    "sse": {"record"},
    "workers": set(),
    "beside": set(),
    "loadgen": {"errors", "prompts", "record", "sse", "workers"},
    "endpoints": {"errors", "prompts", "record"},
    "ask": {"errors", "record", "workers"},
    "accuracy": {"answers", "errors", "record"},
    "environments": {"cache", "errors", "storage"},
    "models": {"cache", "errors", "storage"},
    "gguf_to_hf": set(),
    "timeleft": {"record"},
    "events": {"base", "record"},
    "eventstream": {"compare", "errors", "events", "progress", "record", "redaction", "timeleft"},
    "progress": {"failures", "record", "redaction", "terminal", "timeleft"},
    "signals": set(),
}
ASSEMBLERS = {"launch", "load", "tracing", "runner", "prepare", "provenance", "inspection", "commands", "cli"}

# Of `replay`: what each of its modules may import, of the package and of the rest.
REPLAY_ALLOWED: dict[str, set[str]] = {
    "replay.parser": set(),
    "replay.captures": {"base", "errors", "storage"},
    "replay.records": {"base", "errors", "storage", "windows"},
    "replay.sizes": {"errors", "replay.captures", "yamlload"},
    "replay.attribution": {"errors", "timeline"},
    "replay.serving": {"errors", "metrics", "record", "replay.attribution", "runs", "timeline", "windows"},
    "replay.calibration": {"errors", "replay.attribution", "replay.records"},
    "replay.tuning": {"replay.records"},
    "replay.validation": {"errors", "replay.records", "replay.serving"},
    "replay.view": {
        "replay.attribution",
        "replay.calibration",
        "replay.captures",
        "replay.records",
        "replay.tuning",
        "replay.validation",
        "windows",
    },
    "replay.process": {"errors"},
    "replay.capturing": {"errors", "probe", "storage"},
}
REPLAY_ASSEMBLERS = {"replay.measure", "replay.actions", "replay.actions_capture"}


def imports(module: str, *, top_level: bool = False) -> set[str]:
    """Modules that one imports, ours as `abharness.x` and others by their first name."""
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    found: set[str] = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add(f"abharness.{node.module}")
        elif isinstance(node, ast.ImportFrom) and node.module in ("abharness", "abharness.replay"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names if alias.name != "__version__"}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("module", [*MODULES, *REPLAY_MODULES])
def test_import_rule(module: str) -> None:
    ours = {name.removeprefix("abharness.") for name in imports(module) if name.startswith("abharness.")}
    allowed, assemblers = {**ALLOWED, **REPLAY_ALLOWED}, ASSEMBLERS | REPLAY_ASSEMBLERS
    assert module in allowed or module in assemblers, f"say in this test what {module} may import"
    if module in allowed:
        assert ours <= allowed[module]
    else:
        assert "cli" not in ours


@pytest.mark.parametrize("path", INSIDE, ids=lambda path: path.stem)
def test_what_runs_in_the_servers_environment_needs_only_what_is_there(path: Path) -> None:
    """torch, safetensors and vLLM, and of ours what is copied beside it: by relative imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    foreign: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            foreign |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            foreign.add(node.module.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1
    assert foreign - sys.stdlib_module_names <= {"torch", "safetensors", "vllm"}


def test_the_probe_runs_in_somebody_elses_server_on_the_standard_library_alone() -> None:
    foreign = (imports("probe") | imports("redaction")) - {"abharness.redaction"}
    assert {name.partition(".")[0] for name in foreign} <= sys.stdlib_module_names


def test_every_rule_is_about_a_module_that_exists() -> None:
    assert set(ALLOWED) | ASSEMBLERS == set(MODULES)
    assert set(REPLAY_ALLOWED) | REPLAY_ASSEMBLERS == set(REPLAY_MODULES)


def test_only_the_assemblers_see_both_spec_and_doers() -> None:
    doers = {
        "server",
        "verify",
        "loadgen",
        "ask",
        "endpoints",
        "accuracy",
        "telemetry",
        "environments",
        "models",
        "kernelfolder",
    }
    doers |= {"compilation", "observe", "sampler", "trace", "kineto", "nsys"}
    for doer in doers:
        assert not ALLOWED[doer] & {"spec", "plan"}


@pytest.mark.parametrize(("arguments", "absent"), [
    (["--help"], ["aiohttp", "openai", "pynvml", "scipy", "datasets", "torch", "pydantic", "rich", "shtab", "yaml"]),
    (["compare", "nowhere"], ["aiohttp", "openai", "pynvml", "scipy", "numpy", "datasets", "pyarrow", "rich", "torch",
                              "matplotlib", "jinja2"]),
    (["export", "nowhere", "--to", "x"], ["aiohttp", "openai", "pynvml", "datasets", "pyarrow", "torch", "matplotlib"]),
    (["completion", "bash"], ["aiohttp", "openai", "pynvml", "scipy", "datasets", "pyarrow", "torch", "pydantic"]),
    (["replay", "show", "nowhere"], ["aiohttp", "openai", "datasets", "pyarrow", "torch", "matplotlib"]),
    (["trace", "nowhere"], ["aiohttp", "openai", "pynvml", "scipy", "datasets", "pyarrow", "torch", "pydantic"]),
])  # fmt: skip
def test_light_commands_import_no_heavy_package(arguments: list[str], absent: list[str]) -> None:
    code = (
        "import sys\nfrom abharness.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        f"print([name for name in {absent!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_module_is_longer_than_500_lines() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in lengths.items() if lines > 500} == {}


def test_the_readme_names_every_module() -> None:
    """The codes are in docs/reference/codes.md, held by test_docs."""
    readme = (PACKAGE.parent / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| module | turns what into what |") :]
    known = [*MODULES, *REPLAY_MODULES]
    assert [module for module in known if f"`{module}`" not in table] == []
    named = {
        name for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`([\w.]+)`", row)
    }
    assert sorted(named - set(known)) == []
