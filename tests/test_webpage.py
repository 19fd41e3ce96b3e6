"""The page of a run: what it shows, that it needs nothing else, and that hostile text stays text. In a real Chromium."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from abharness.cli import main
from abharness.plan import config_hash
from abharness.record import Failure, RunRecord
from abharness.samples import Sample, write_samples
from abharness.specload import load_spec
from abharness.storage import read_model
from tests.synthetic import Made, gpu, write_run
from tests.test_run import QUESTIONS, run, run_dir

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is a development dependency")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

HOSTILE = (
    "<script>window.pwned = 1; console.log('pwned')</script><img src=x onerror=\"window.pwned = 2\">"
    "</pre></style><svg onload=alert(1)></svg>{{ 7 * 7 }} &lt; \u202eevil\u202c \x1b[31mred\x07 'quoted' \"double\"\n#### 4"
)


@dataclass
class Seen:
    """What a browser did with a page."""

    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)


@pytest.fixture
def browser() -> Iterator[Any]:
    if CHROMIUM is None and "CI" in os.environ:
        pytest.fail("CI brings a Chromium (.ci/run); there is none")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        # A container's root may not use the sandbox of user namespaces.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        made = driver.chromium.launch(executable_path=CHROMIUM, args=[*options, "--disable-gpu"])
        yield made
        made.close()


def opened(browser: Any, file: Path, *, width: int = 1280, scheme: str = "light") -> tuple[Any, Seen]:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    seen = Seen()
    page.on("console", lambda message: seen.console.append(message.text))
    page.on("pageerror", lambda error: seen.console.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("dialog", lambda dialog: (seen.dialogs.append(dialog.message), dialog.dismiss()))
    page.goto(file.as_uri())
    return page, seen


def screenshot(page: Any, name: str, tmp_path: Path) -> None:
    """Kept where SCREENSHOTS says, to be looked at."""
    page.screenshot(path=Path(os.environ.get("SCREENSHOTS", tmp_path)) / f"{name}.png", full_page=True)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run on servers of which one answers with hostile text."""
    folder = tmp_path_factory.mktemp("hostile")
    rows = [json.loads(line) for line in QUESTIONS.read_text().splitlines()]
    answers = folder / "answers.jsonl"
    answers.write_text("".join(json.dumps({**row, "answer": HOSTILE}) + "\n" for row in rows))
    spec = "\n".join([f"variants.candidate.env.FAKE_ANSWERS={answers}", f"question=Is {HOSTILE!r} safe?"]).splitlines()
    code = run(folder, *(part for text in spec for part in ("--set", text)))
    assert code in (0, 1)
    return run_dir(folder) / "report.html"


def synthetic(tmp_path: Path, *, launches: int = 4, **of_candidate: Any) -> Path:
    made: dict[Any, list[Made]] = {
        "baseline": [Made(speed=100 + k / 10) for k in range(launches)],
        "candidate": [Made(speed=108 + k / 10, **of_candidate) for k in range(launches)],
    }
    return write_run(tmp_path / "run", made, f"design.launches_per_variant={launches}")


def page_of(tmp_path: Path, *folders: Path) -> str:
    file = tmp_path / "page.html"
    main(["compare", *map(str, folders), "--html", str(file)])
    return file.read_text(encoding="utf-8")


def words(page: str) -> str:
    """The page as a reader sees it: without markup, white space in single blanks."""
    body = page[page.index("<body>") :]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_a_model_that_answers_with_script_runs_none(browser: Any, hostile: Path, tmp_path: Path) -> None:
    page, seen = opened(browser, hostile)
    assert seen.console == []
    assert seen.dialogs == []
    assert seen.requests == [hostile.as_uri()]
    assert page.evaluate("window.pwned") is None
    assert page.evaluate("document.querySelectorAll('script, img, iframe, object, embed, link, form').length") == 0
    names = page.evaluate("[...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())")
    assert [name for name in names if name.startswith("on")] == []
    text = page.inner_text("body")
    assert "<script>window.pwned = 1; console.log('pwned')</script>" in text
    assert "{{ 7 * 7 }}" in text
    # What turns the reading direction, or steers a terminal, is shown by its number.
    assert r"\u202eevil\u202c \x1b[31mred\x07" in text
    assert not {"\u202e", "\x1b", "\x07"} & set(hostile.read_text(encoding="utf-8"))
    screenshot(page, "hostile", tmp_path)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_wide_and_narrow_screens_in_light_and_dark(
    browser: Any, hostile: Path, tmp_path: Path, width: int, scheme: str
) -> None:
    page, seen = opened(browser, hostile, width=width, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    assert dark == (scheme == "dark")
    ink = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
    assert ink == page.evaluate("getComputedStyle(document.body).color")
    edges = page.evaluate("[...document.querySelectorAll('figure')].map(e => e.getBoundingClientRect().right)")
    assert max(edges) <= width
    assert seen.console == []
    screenshot(page, f"{scheme}-{width}", tmp_path)


def test_on_paper_nothing_is_folded_away(browser: Any, hostile: Path) -> None:
    page, _ = opened(browser, hostile, scheme="dark")
    folded = """[...document.querySelectorAll('details:not([open]) pre')].map(
        e => e.checkVisibility({contentVisibilityAuto: true}) && e.getBoundingClientRect().height > 10)"""
    assert set(page.evaluate(folded)) == {False}
    page.emulate_media(media="print", color_scheme="dark")
    # What was not rendered until now is laid out in one of the next frames.
    page.wait_for_function(f"({folded}).every(Boolean)", timeout=10_000)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_the_question_and_the_verdict_come_first(tmp_path: Path) -> None:
    text = words(page_of(tmp_path, synthetic(tmp_path)))
    assert text.startswith("made Is it faster? Candidate: faster in 1, slower in 0")


def test_every_launch_is_a_point_and_every_median_a_line(tmp_path: Path) -> None:
    page = page_of(tmp_path, synthetic(tmp_path))
    plot = page[page.index("<figcaption>output_throughput</figcaption>") :]
    plot = plot[: plot.index("</svg>")]
    # The large points have a rim of ink; the small ones inside a launch have none.
    points = re.findall(r'<use [^>]*style="fill: var\(--(\w+)\); stroke: var\(--ink\)', plot)
    assert sorted(points) == ["baseline"] * 4 + ["candidate"] * 4
    assert "medians: baseline 100.2, candidate 108.2 tok/s" in plot
    assert re.search(
        r"stroke-dasharray[^>]*var\(--candidate\)|var\(--candidate\)[^>]*stroke-dasharray|stroke-dasharray", plot
    )


def test_two_concurrencies_make_a_curve(hostile: Path) -> None:
    page = hostile.read_text(encoding="utf-8")
    assert "<figcaption>decode of 16 + 16 tokens: output_throughput</figcaption>" in page
    assert 'aria-label="output_throughput over max_concurrency, both variants"' in page


def test_ids_of_plots_never_meet(hostile: Path) -> None:
    page = hostile.read_text(encoding="utf-8")
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(plots) > 6
    ids = [name for plot in set(plots) for name in set(re.findall(r' id="([^"]+)"', plot))]
    assert len(ids) == len(set(ids))
    for plot in plots:
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', plot)) <= set(re.findall(r' id="([^"]+)"', plot))


def test_answers_stand_side_by_side_with_the_token_at_which_they_part(tmp_path: Path) -> None:
    page = page_of(tmp_path, synthetic(tmp_path, answers={3: "It is <b>4.\n#### 4"}))
    text = words(page)
    assert "question 3: 3 against 4 (right: 3; they part at token 6)" in text
    assert "<mark>3</mark>." in page
    assert "<mark>&lt;</mark>b&gt;4." in page
    assert "diverges at token 6; more than two tokens tie here, and the record keeps only the runner-up" in text
    # exp(-0.7) and exp(-0.72), as recorded.
    assert '"<" 49.7%, "?" 48.7%' in text


def test_answers_without_tokens_part_at_a_character_and_claim_no_probability(tmp_path: Path) -> None:
    folder = synthetic(tmp_path, answers={3: "It is 4.\n#### 4"})
    for file in folder.glob("launches/*/gsm8k.jsonl"):
        lines = [{**json.loads(line), "tokens": None} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = words(page_of(tmp_path, folder))
    assert "they part at character 6 of the answer" in text
    assert "%, " not in text[text.index("question 3:") : text.index("Evidence")]


def test_every_witness_of_every_switch_is_shown(tmp_path: Path) -> None:
    text = words(page_of(tmp_path, synthetic(tmp_path)))
    evidence = text[text.index("Evidence") : text.index("Clocks and power")]
    assert "SWITCH baseline unset unset in 8 of 8 unset in 8 of 8" in evidence
    assert 'SWITCH candidate "1" "1" in 8 of 8 "1" in 8 of 8' in evidence


def test_an_unreadable_process_is_shown_as_that(tmp_path: Path) -> None:
    folder = synthetic(tmp_path)
    file = folder / "launches" / "1-candidate" / "evidence.json"
    data = json.loads(file.read_text())
    data["environment"][0]["processes"][0] |= {"state": "unreadable", "reason": "wiped", "started_with": {}}
    file.write_text(json.dumps(data))
    text = words(page_of(tmp_path, folder))
    assert '"1" in 7 of 8, unreadable in 1 of 8' in text
    assert "No verdict: env_unverifiable" in text
    assert "7 ok, 1 unreadable" in text


def sampled(folder: Path, label: str, *, throttled: range = range(0), count: int = 100) -> None:
    """GPU samples for one launch, with a sampling record and a dip of one sample."""
    launch = folder / "launches" / label
    record = json.loads((launch / "launch.json").read_text())
    record["sampling"] = {
        "interval_s": 0.1, "started_s": 0, "ended_s": count / 10, "samples": count, "cpu_s": 0.1,
        "memory_before_bytes": {"GPU-0": 0},
    }  # fmt: skip
    (launch / "launch.json").write_text(json.dumps(record))
    samples = [
        Sample(
            sm_clock_mhz=1200.0 if index == count // 2 else 1980.0, mem_clock_mhz=2619.0, power_w=500.0, temperature_c=50.0,
            utilization=1.0, memory_used_bytes=1, energy_j=index * 50.0, power_limit_w=700.0,
            reasons=("hw_thermal_slowdown",) if index in throttled else (), t_s=index / 10, uuid="GPU-0",
        )
        for index in range(count)
    ]  # fmt: skip
    write_samples(launch / "telemetry.parquet", samples)


def test_clocks_over_time_show_windows_and_throttling_and_lose_no_dip(tmp_path: Path) -> None:
    folder = synthetic(tmp_path, gpus=[gpu()])
    sampled(folder, "0-baseline", count=5000)
    sampled(folder, "1-candidate", throttled=range(20, 60))
    page = page_of(tmp_path, folder)
    part = page[page.index("<h2>Clocks and power</h2>") :]
    first, second = (
        part[part.index(f"<figcaption>launch {label}") :].partition("</svg>")[0]
        for label in ("0-baseline", "1-candidate")
    )
    assert "fill: var(--window)" in first
    assert "var(--throttled)" not in first
    assert "var(--throttled)" in second
    # 5,000 samples are drawn with fewer points, and the one low sample is among them.
    (clock, *_) = re.findall(r'<path d="([^"]*)"[^>]*stroke: var\(--baseline\)', first)
    heights = [float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", clock)]
    assert len(heights) < 1000
    assert max(heights) - min(heights) > 20
    assert len(first) < 60_000
    assert "<figcaption>launch 2-candidate" not in part


def test_a_launch_without_a_gpu_says_so_in_place_of_clocks(tmp_path: Path) -> None:
    text = words(page_of(tmp_path, synthetic(tmp_path)))
    assert "Clocks and power Not known:" in text


def test_damaged_samples_are_unknown_and_cost_nothing_else(tmp_path: Path) -> None:
    folder = synthetic(tmp_path, gpus=[gpu()])
    sampled(folder, "0-baseline")
    sampled(folder, "1-candidate")
    (folder / "launches" / "1-candidate" / "telemetry.parquet").write_bytes(b"PAR1 no more")
    text = words(page_of(tmp_path, folder))
    assert "telemetry.parquet cannot be read" in text[text.index("Clocks and power") :]


def test_a_failed_launch_shows_its_last_words_and_its_command(tmp_path: Path) -> None:
    failure = Failure(
        kind="ServerDied", message="exit code 1", phase="ready", log_tail=["Traceback", "RuntimeError: <no> memory"],
        command="cd /x && env A=1 python -m vllm",
    )  # fmt: skip
    page = page_of(tmp_path, synthetic(tmp_path, status="failed", failure=failure))
    assert "ServerDied in phase ready: exit code 1" in page
    assert "<pre>Traceback\nRuntimeError: &lt;no&gt; memory</pre>" in page
    assert "cd /x &amp;&amp; env A=1 python -m vllm" in page


def recorded_spec(page: str) -> str:
    (found,) = re.findall(r"<summary>the spec, with every default</summary>\n<pre>(.*?)</pre>", page, re.DOTALL)
    return html.unescape(found)


def test_the_spec_on_the_page_runs_the_same_configuration_again(tmp_path: Path) -> None:
    folder = synthetic(tmp_path)
    again = tmp_path / "again.yaml"
    again.write_text(recorded_spec(page_of(tmp_path, folder)))
    assert config_hash(load_spec(again)) == read_model(folder / "experiment.json", RunRecord).config_hash


def test_that_of_an_aa_does_with_aa_and_is_refused_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made: dict[Any, list[Made]] = {"baseline": [Made()] * 4, "candidate": [Made()] * 4}
    folder = write_run(tmp_path / "aa", made, aa=True)
    page = page_of(tmp_path, folder)
    assert "abharness run made.yaml --aa" in page
    again = tmp_path / "made.yaml"
    spec = {**yaml.safe_load(recorded_spec(page))}
    spec["server"]["model"] = str(tmp_path)
    again.write_text(yaml.safe_dump(spec))
    capsys.readouterr()
    assert main(["run", str(again), "--aa", "--dry-run"]) == 0
    assert "the baseline runs against itself" in capsys.readouterr().out
    assert main(["run", str(again), "--dry-run"]) == 2
    assert "to run one server against itself: --aa" in capsys.readouterr().err


def test_several_runs_are_one_page_with_an_index(tmp_path: Path) -> None:
    one, two = synthetic(tmp_path / "a"), synthetic(tmp_path / "b")
    page = page_of(tmp_path, tmp_path)
    assert words(page).startswith("2 runs 2 runs: 2 faster. experiment run verdict")
    assert 'href="#experiment-2"' in page
    assert page.count("<article") == 2
    assert str(one) in page
    assert str(two) in page


def test_a_page_of_many_launches_stays_small_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    for number in range(60):
        synthetic(tmp_path / str(number), launches=8)
    page = page_of(tmp_path, tmp_path)
    assert len(page) < 6_000_000
    assert page.count("<svg") == 160
    assert "20 plots were left out to keep this file small" in page


@pytest.mark.parametrize("name", ["nowhere/page.html", "."])
def test_a_file_that_cannot_be_is_refused_before_anything(tmp_path: Path, capsys: Any, name: str) -> None:
    assert main(["compare", str(synthetic(tmp_path)), "--html", str(tmp_path / name)]) == 2
    assert "expected a file in a folder that exists" in capsys.readouterr().err


def test_the_exit_code_is_the_comparisons(tmp_path: Path) -> None:
    slower: dict[Any, list[Made]] = {
        "baseline": [Made(speed=108 + k / 10) for k in range(4)],
        "candidate": [Made(speed=100 + k / 10) for k in range(4)],
    }
    folder = write_run(tmp_path / "r", slower)
    assert main(["compare", str(folder), "--html", str(tmp_path / "page.html")]) == 1


def test_a_page_that_cannot_be_written_does_not_cost_the_verdict(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("abharness.plots.launches_plot", None)
    assert run(tmp_path, "--only", "prefill") in (0, 1)
    told = capsys.readouterr()
    assert "prefill input_len=32" in told.out
    assert "warning: no " in told.err
    assert (run_dir(tmp_path) / "report.md").exists()
    assert not (run_dir(tmp_path) / "report.html").exists()
