"""What a lie is and how it is told: a spec, faults of the fake server, files and edits in, an `Outcome` out.

A lie is carried out through the public command line against the fake server as a real process. Its honest twin is the
same setup without the lie; twins that are the same are run once a session. In every text of a setup these stand for:

    @TMP@ the test's own folder    @PYTHON@ this interpreter    @SITE@ the fake vLLM's folder    @PORT@ a free port
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from abharness.cli import main
from tests.conftest import FAKE_SITE, free_port

ROOT = Path(__file__).parent.parent.parent
QUESTIONS = ROOT / "experiments" / "data" / "grade-school-16.jsonl"

BASELINE = {"FAKE_SWITCH": None}
CANDIDATE = {"FAKE_SWITCH": "fast"}

DECODE = {
    "name": "decode", "kind": "decode", "input_len": 16, "output_len": 4, "max_concurrency": 1, "num_prompts": 4,
    "num_warmups": 0,
}  # fmt: skip
GSM8K = {
    "name": "gsm8k", "kind": "gsm8k", "num_questions": 8, "dataset": str(QUESTIONS), "max_concurrency": 8,
    "max_tokens": 300,
}  # fmt: skip

# The first completion, at readiness, is request 0; the cell's requests are 1 to 4. Times are long enough that a busy
# machine's scheduling is small beside them.
BASE: dict[str, Any] = {
    "experiment": "lie",
    "server": {
        "model": "some/model",
        "env": {
            "PYTHONPATH": "@SITE@",
            "HOME": "@TMP@/home",
            "FAKE_TPOT_S": "0.012",
            "FAKE_ANSWERS": str(QUESTIONS),
            "FAKE_SPEEDS": '{"fast": 1.5, "1": 1.5}',
        },
        "ready_timeout_s": 30,
    },
    "variants": {"baseline": {"env": BASELINE}, "candidate": {"env": CANDIDATE}},
    "design": {"launches_per_variant": 1},
    "workloads": [DECODE],
}


@dataclass(frozen=True, slots=True)
class Setup:
    """One experiment.

    Attributes:
        spec: What is merged over `BASE`; lists replace, mappings merge.
        faults: Faults of the fake server.
        files: Path below the test's folder to text; those in `bin/` can be executed.
        links: Path below the test's folder to where the symbolic link leads.
        arguments: Further arguments of `abharness run`.
        outside: Variables of the harness itself; it then runs in a process of its own.
        foreign_server: Another server listens on @PORT@ all the time.
    """

    spec: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    outside: Mapping[str, str] = field(default_factory=dict)
    foreign_server: bool = False

    def over(self, other: Setup) -> Setup:
        """This setup on top of another."""
        return Setup(
            merged(other.spec, self.spec),
            {**other.faults, **self.faults},
            {**other.files, **self.files},
            {**other.links, **self.links},
            (*other.arguments, *self.arguments),
            {**other.outside, **self.outside},
            other.foreign_server or self.foreign_server,
        )

    def key(self) -> str:
        """Equal for setups that are the same."""
        parts = [self.spec, self.faults, self.files, self.links, self.arguments, self.outside, self.foreign_server]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


Edit = Callable[[Path], list[str]]
"""Changes a copy of a run's folder; returns the arguments of `abharness compare`."""


def untouched(run: Path) -> list[str]:
    """The edit that changes nothing."""
    return [str(run)]


@dataclass(frozen=True, slots=True)
class Lie:
    """One lie.

    Attributes:
        name: Short and unique.
        concludes: What somebody would wrongly conclude.
        exit_code: What the command must end with.
        code: Validity code that must invalidate the comparison; None where there is nothing to compare (a spec that is
            refused, records that are refused), or where the lie is told as the regression it is.
        says: Regular expression that the output must match: what was seen.
        honest: The twin.
        lie: What is put on top of the twin's setup, when the lie is told while it runs.
        edit: What is done to the twin's records, when the lie is told afterwards.
        honest_edit: The twin of the edit.
    """

    name: str
    concludes: str
    exit_code: int
    code: str | None
    says: str
    honest: Setup = Setup()
    lie: Setup | None = None
    edit: Edit | None = None
    honest_edit: Edit = untouched


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a setup or an edit.

    Attributes:
        text: The report, and what was told meanwhile.
        report: The report alone.
        comparison: As `abharness compare --format json` gives it now; None when nothing can be compared.
        run: The run's folder, if one was made.
        left: Processes of the launches that are still there.
    """

    exit_code: int
    text: str
    report: str
    comparison: dict[str, Any] | None
    run: Path | None
    left: list[str]

    @property
    def codes(self) -> list[str]:
        """The invalidating codes."""
        return self.comparison["codes"] if self.comparison else []

    @property
    def conclusions(self) -> list[str]:
        """What the report says of the decisive rows and of the answers, where it says that there is a difference."""
        found = re.findall(r"(?:faster|slower) in [1-9]\d*|answers got \w+", self.report)
        for line in self.report.splitlines():
            if re.match(r"(output|prefill)_throughput tok/s", line):
                found += re.findall(r"[+-]\d+\.\d+%", line)
        return found


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Two nested mappings as one; the second wins."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


def carry_out(setup: Setup, folder: Path) -> Outcome:
    """Run an experiment in a folder of its own, and compare its records once more."""
    (folder / "home").mkdir()
    (folder / "t").mkdir()
    port = free_port()
    known = {"@TMP@": str(folder), "@PYTHON@": sys.executable, "@SITE@": str(FAKE_SITE), "@PORT@": str(port)}

    def filled(text: str) -> str:
        return re.sub("@[A-Z]+@", lambda match: known[match[0]], text)

    for name, text in setup.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(filled(text))
        if name.startswith("bin/"):
            path.chmod(0o755)
    for name, target in setup.links.items():
        link, aim = folder / name, Path(filled(target))
        link.parent.mkdir(parents=True, exist_ok=True)
        if not aim.exists():
            aim.mkdir(parents=True)
        link.symlink_to(aim)
    spec = merged(BASE, setup.spec)
    if setup.faults:
        spec = merged(spec, {"server": {"env": {"FAKE_FAULTS": json.dumps(setup.faults)}}})
    text = json.dumps(spec, indent=1).replace('"@PORT@"', "@PORT@")  # the only one that is no text
    (folder / "lie.yaml").write_text(filled(text))
    argv = ["run", str(folder / "lie.yaml"), "-o", str(folder / "results"), *map(filled, setup.arguments)]
    outside = {name: filled(value) for name, value in setup.outside.items()}
    try:
        with foreign_server(port) if setup.foreign_server else contextlib.nullcontext():
            exit_code, out, err = command(argv, folder / "t", outside)
        return judged(exit_code, out, err, [str(folder / "results")], folder)
    finally:
        end_strays(folder)


def judge_records(arguments: list[str], folder: Path) -> Outcome:
    """Compare records as they are."""
    exit_code, out, err = command(["compare", *arguments], folder)
    return judged(exit_code, out, err, arguments, folder)


def judged(exit_code: int, out: str, err: str, arguments: list[str], folder: Path) -> Outcome:
    """Put an outcome together; the page can be made of whatever can be compared."""
    page = folder / "page.html"
    again, data, _ = command(["compare", "--format", "json", "--html", str(page), *arguments], folder)
    comparison = None
    if data:
        assert page.exists()
        (comparison,) = json.loads(data)["comparisons"]
        assert again == exit_code, f"run ended with {exit_code}, compare with {again}"
    runs = sorted((folder / "results").glob("*/*/experiment.json"))
    return Outcome(exit_code, out + err, out, comparison, runs[0].parent if runs else None, left_in(folder))


def command(argv: list[str], temporary: Path, outside: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """One command of `abharness`: exit status, stdout, stderr. Its temporary files go below a folder."""
    if outside:
        env = {**os.environ, "TMPDIR": str(temporary), **outside}
        done = subprocess.run(
            [sys.executable, "-m", "abharness.cli", *argv],
            env=env,
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr
    out, err = io.StringIO(), io.StringIO()
    before, tempfile.tempdir = tempfile.tempdir, str(temporary)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            exit_code = main(argv)
    finally:
        tempfile.tempdir = before
    return exit_code, out.getvalue(), err.getvalue()


def copy_of(run: Path, folder: Path) -> Path:
    """A run's folder copied to where it may be edited."""
    target = folder / "results" / run.parent.name / run.name
    shutil.copytree(run, target)
    return target


# Processes.


@contextlib.contextmanager
def foreign_server(port: int) -> Iterator[None]:
    """Somebody else's server, on our port, for every model name."""
    argv = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "m", "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "PYTHONPATH": str(FAKE_SITE)}
    process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        while "startup complete" not in process.stdout.readline():
            assert process.poll() is None
        yield
        assert process.poll() is None, "only processes of our own are ever ended"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)


def end_strays(folder: Path) -> None:
    """End what a server of this test left behind on purpose."""
    for file in folder.glob("*.pid"):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(file.read_text()))
            if "stray" in process.cmdline():
                process.kill()
                process.wait(10)


def left_in(folder: Path) -> list[str]:
    """Processes that were started below a folder and live; what was left behind on purpose does not count.

    The working directory tells them: an environment can be wiped, and a title changed.
    """
    strays = {int(file.read_text()) for file in folder.glob("*.pid")}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cwd().startswith(f"{folder}/") and process.pid not in strays:
                found.append(f"pid {process.pid}: {' '.join(process.cmdline())}")
    return found
