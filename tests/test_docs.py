"""The documentation names everything that there is, and nothing that there is not."""

from __future__ import annotations

import hashlib
import re
import shlex
from pathlib import Path

import pytest
import yaml

from abharness import __version__, arguments
from abharness.codes import CODES
from abharness.compare import EXIT_CODES
from abharness.metrics import METRICS
from abharness.replay import captures
from abharness.replay.capturing import PLUGIN as CAPTURE_PLUGIN
from abharness.spec import PROBE_PLUGIN
from abharness.specload import parse_spec
from tests import reference
from tests.markdown import ROOT, anchors, code_spans, fences, links, pages, shown

PAGES = pages()
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
NO_VERDICT = DOCS / "howto" / "read-a-no-verdict.md"

OTHERS = {"ignore_eos", "min_tokens", "my_kernels"}
"""Names in `code` that look like ours and are others': of vLLM's API, and of the reader's own kernels."""


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_the_tables_are_as_the_code_has_them(page: Path) -> None:
    """Where this fails: `python -m tests.reference`, and look at what it wrote."""
    after, unknown = reference.rendered(text(page))
    assert unknown == []
    assert after == text(page)


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_link_and_anchor_leads_somewhere(page: Path) -> None:
    broken = []
    for link in links(text(page)):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (anchor and anchor not in anchors(text(path))):
            broken.append(link)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    index = DOCS / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in links(text(index))}
    assert [shown(page) for page in PAGES if page not in linked and page != index] == []


@pytest.mark.parametrize(
    ("page", "kind", "names"),
    [
        ("cli.md", "cli", reference.commands()),
        ("spec.md", "spec", reference.SPEC_MODELS),
        ("records.md", "record", reference.RECORD_MODELS),
        ("replays.md", "replay", reference.REPLAY_MODELS),
        ("records.md", "parquet", reference.PARQUET),
        ("events.md", "event", reference.EVENT_MODELS),
        ("codes.md", "codes", ["invalidating", "advice", "thresholds"]),
    ],
)
def test_every_command_section_and_record_has_its_table(page: str, kind: str, names: list[str]) -> None:
    written = re.findall(rf"<!-- generated: {kind} (.+?) -->", text(REFERENCE / page))
    needed = [name for name in names if kind != "cli" or reference.arguments(reference.commands()[name])]
    assert sorted(written) == sorted(needed)


def test_every_command_has_a_section_and_an_example_in_its_help() -> None:
    headings = re.findall(r"^## abharness (.+)$", text(REFERENCE / "cli.md"), re.MULTILINE)
    assert sorted(headings) == sorted(reference.commands())
    without = [
        name for name, parser in reference.commands().items() if "example: abharness" not in (parser.epilog or "")
    ]
    assert without == []


def test_every_argument_is_explained() -> None:
    bare = [
        f"{name} {action.dest}"
        for name, parser in reference.commands().items()
        for action in reference.arguments(parser)
        if not action.help and action.dest != "spec"
    ]
    assert bare == []


@pytest.mark.parametrize("kind", ["SPEC_MODELS", "RECORD_MODELS", "REPLAY_MODELS"])
def test_every_key_and_field_is_explained(kind: str) -> None:
    models = getattr(reference, kind)
    bare = [f"{name}.{field}" for name in models for field, _, _, told in reference.fields(models[name]) if not told]
    assert bare == []


def test_every_key_of_an_event_is_explained() -> None:
    models = reference.EVENT_MODELS
    bare = [f"{name}.{key}" for name in models for key, _, told in reference.event_fields(models[name]) if not told]
    assert bare == []


@pytest.mark.parametrize("kind", ["SPEC_MODELS", "RECORD_MODELS", "REPLAY_MODELS"])
def test_nothing_is_explained_that_is_no_field(kind: str) -> None:
    models = getattr(reference, kind)
    stale = [
        f"{name}.{field}" for name, model in models.items() for field in reference.field_docs(model)
        if field not in model.model_fields
    ]  # fmt: skip
    assert stale == []


def test_the_spec_of_the_reference_is_valid_and_names_every_key() -> None:
    (example, *_) = [fence.text for fence in fences(text(REFERENCE / "spec.md")) if fence.language == "yaml"]
    spec = parse_spec(example, "docs/reference/spec.md")
    assert spec.trace is not None
    kernels = spec.verify.expect_kernels["candidate"]
    sections = [spec, spec.server, spec.design, *spec.workloads, spec.telemetry, spec.trace, spec.verify, kernels]
    missing = [key for section in sections for key in type(section).model_fields if f"{key}:" not in example]
    assert missing == []
    assert "python" in example


def test_the_exit_codes_are_those_of_the_help() -> None:
    told = dict(re.findall(r"^  (\d+) +(.+)$", arguments.EXIT_CODES, re.MULTILINE))
    first_table = text(REFERENCE / "exit-codes.md").split("\n\n`abharness verify-env`", 1)[0]
    assert dict(re.findall(r"^\| (\d+) \| (.+) \|$", first_table, re.MULTILINE)) == told
    assert {str(code) for code in EXIT_CODES.values()} <= set(told)


def test_every_code_that_takes_the_verdict_away_is_told_one_by_one() -> None:
    sections = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", text(NO_VERDICT), re.MULTILINE | re.DOTALL))
    assert sorted(sections) == sorted(name for name, code in CODES.items() if code.invalidates)
    for name, section in sections.items():
        waiver = re.search(r"^\*\*Waive\*\*: (no|yes)", section, re.MULTILINE)
        assert waiver is not None, name
        assert (waiver[1] == "yes") is CODES[name].waivable, name
        assert "**Seen**" in section, name
        assert "**Why it counts**" in section, name
        assert "**Next**" in section, name


def test_every_metric_is_defined() -> None:
    definitions = text(REFERENCE / "metrics.md").split("## Definitions", 1)[1].split("\n## ", 1)[0]
    names = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`[^|]+) \|", definitions, re.MULTILINE))))
    described = {metric.name for metric in METRICS}
    # The 99th percentiles are told together, except where they are something else.
    assert {name for name in described if not name.endswith("_p99")} | {"itl_p99"} == names


def known_names() -> set[str]:
    """Everything in snake case that a page may name as ours."""
    names = set(CODES) | {metric.name for metric in METRICS}
    for models in (reference.SPEC_MODELS, reference.RECORD_MODELS, reference.REPLAY_MODELS, reference.EVENT_MODELS):
        names |= {field for model in models.values() for field in model.model_fields}
    names |= {path.stem for path in (ROOT / "abharness").glob("*.py")} | {
        path.stem for path in (ROOT / "tests").rglob("*.py")
    }
    names |= {PROBE_PLUGIN, CAPTURE_PLUGIN}
    names |= {field for model in (captures.Capture, captures.Layer) for field in model.model_fields}
    events = [model.model_fields.get("event") for model in reference.EVENT_MODELS.values()]
    names |= {event.default for event in events if event is not None}
    names |= set(reference.PARQUET["telemetry"][1]) | set(reference.PARQUET["kernels"][1])
    return names | OTHERS


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_no_page_names_a_code_key_or_metric_that_there_is_not(page: Path) -> None:
    names = known_names()
    written = reference.MARKED.sub("", text(page))
    found = {span for span in code_spans(written) if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", span)}
    assert sorted(found - names - names_of_code(page)) == []


def names_of_code(page: Path) -> set[str]:
    """Functions and constants of the package, which CONTRIBUTING alone names."""
    if page.name != "CONTRIBUTING.md":
        return set()
    source = "\n".join(text(path) for folder in ("abharness", "tests") for path in (ROOT / folder).rglob("*.py"))
    return set(re.findall(r"\b(?:def|class) (\w+)", source)) | set(re.findall(r"^    (\w+)[:=]", source, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_command_line_of_a_page_is_one_that_the_parser_takes(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = arguments.make_parser()
    refused = []
    for line in command_lines(page):
        words = shlex.split(line, comments=True)
        try:
            parser.parse_args(
                words[1 : next((i for i, word in enumerate(words) if word in ("|", ">", "2>", "&&")), None)]
            )
        except SystemExit as error:
            if error.code:
                refused.append(f"{line}: {capsys.readouterr().err.splitlines()[-1]}")
    assert refused == []


def command_lines(page: Path) -> list[str]:
    """Calls of abharness in a page's blocks, and in its `code` where they are whole."""
    lines = []
    for fence in fences(text(page)):
        if fence.language in ("bash", "console", "text", "yaml"):
            joined = fence.text.replace("\\\n", " ")
            for line in joined.splitlines():
                call = re.match(r"^(?:\$ |nohup |.*&& |.*run: |\s*- |\s*)(?:\.venv/bin/)?(abharness (?!\s).*)$", line)
                lines += [call[1].removesuffix("&").strip()] if call and "(" not in call[1].split("#")[0] else []
    for span in code_spans(text(page)):
        if re.match(r"abharness [a-z-]+ ", span) and not re.search(r"[\[(|]|\.\.\.|<", span):
            lines.append(span)
    return lines


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_block_of_yaml_can_be_read(page: Path) -> None:
    for fence in fences(text(page)):
        if fence.language == "yaml":
            yaml.safe_load(fence.text)


def test_no_page_names_a_machine_path() -> None:
    told = [shown(page) for page in PAGES if re.search(r"/(root|home|work)/", text(page))]
    assert told == []


def test_the_license_is_whole() -> None:
    """The text as the Apache Software Foundation publishes it begins with an empty line."""
    digest = hashlib.sha256(b"\n" + (ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_the_changelog_has_the_version_of_the_package() -> None:
    headings = re.findall(r"^## \[(.+?)\]", text(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert __version__ in headings
