"""A run killed with SIGKILL at one point of its life, what is then left of it, and what `--resume` makes of it.

    point     after 1.5 | phase "decode" + 0.2 | file "evidence.json"

The point is told in what the run shows to anybody: seconds, what it says, a file in its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SENTINEL = "ABHARNESS_LAUNCH"
POLL_S = 0.01


@dataclass(frozen=True)
class Point:
    """When the harness is killed.

    Attributes:
        line: Regular expression; first a line of what the run says must match it (`Scene.said`).
        file: Glob below the run folder; then such a file must be there.
        delay_s: And then so long.
    """

    line: str | None = None
    file: str | None = None
    delay_s: float = 0.0

    def __str__(self) -> str:
        where = f"line {self.line!r}" if self.line else f"file {self.file}" if self.file else "start"
        return f"{where} + {self.delay_s:.2f} s"


@dataclass
class Scene:
    """One experiment in a folder of its own.

    Attributes:
        folder: Everything goes there; its `tmp` is the run's TMPDIR, by which its processes are known.
        arguments: Of `abharness run`, less the output folder.
        port: Of its servers.
        shared: Names in /dev/shm that its processes were seen to use.
        events: It says what it does as events.
    """

    folder: Path
    arguments: list[str]
    port: int
    shared: set[str] = field(default_factory=set)
    events: bool = True

    def __post_init__(self) -> None:
        self.tmp = self.folder / "tmp"
        self.tmp.mkdir(parents=True, exist_ok=True)
        self.stderr = self.folder / "stderr.txt"

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Start the run (or go on with it)."""
        argv = [sys.executable, "-m", "abharness.cli", "run", *self.arguments, "-o", str(self.folder / "results")]
        env = {**os.environ, "TMPDIR": str(self.tmp)}
        with self.stderr.open("wb") as err, (self.folder / "stdout.txt").open("wb") as out:
            argv += ["--set", f"server.port={self.port}", *(["--json"] if self.events else []), *more]
            return subprocess.Popen(argv, env=env, stdout=out, stderr=err)

    def said(self) -> str:
        """What the run said: its events as lines, `launch 1/2 baseline: PHASE`, then stderr."""
        lines = []
        prefix = ""
        for raw in (self.folder / "stdout.txt").read_text(errors="replace").splitlines() if self.events else ():
            try:
                event = json.loads(raw)
            except ValueError:
                continue  # not written to its end yet
            if event["event"] == "launch_started":
                prefix = f"launch {event['index'] + 1}/{event['total']} {event['variant']}: "
            if "name" in event or "text" in event:
                lines.append(f"{prefix}{event.get('name') or event.get('text')}")
            if event["event"] == "finished" and event["error"]:
                lines.append(f"error: {event['error']['message']}")
        return "\n".join([*lines, self.stderr.read_text(errors="replace")])

    def wait_for(self, point: Point, harness: subprocess.Popen[bytes]) -> bool:
        """Wait for the point; False when the run was over before."""
        while not self._reached(point):
            if harness.poll() is not None:
                return False
            time.sleep(POLL_S if point.line else 0)
        deadline = time.monotonic() + point.delay_s
        while time.monotonic() < deadline:
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
        return harness.poll() is None

    def _reached(self, point: Point) -> bool:
        if point.line is not None and not re.search(point.line, self.said(), re.MULTILINE):
            return False
        return point.file is None or any((self.folder / "results").rglob(point.file))

    def kill(self, harness: subprocess.Popen[bytes], *, guard: bool) -> None:
        """SIGKILL the harness, and its guard too where asked; nobody sees the other die first."""
        self.note_shared_memory()
        harness.send_signal(signal.SIGSTOP)
        for child in psutil.Process(harness.pid).children() if guard else []:
            if "abharness.guard" in child.cmdline():
                child.kill()
        harness.kill()
        harness.wait()

    def processes(self) -> list[psutil.Process]:
        """Everything of the run that lives, the guard too."""
        found = []
        for process in psutil.process_iter():
            try:
                env, argv = process.environ(), process.cmdline()
            except (psutil.Error, OSError):
                continue
            own = SENTINEL in env and env.get("TMPDIR", "").startswith(str(self.tmp))
            if own or ("abharness.guard" in argv and argv[-1].startswith(str(self.tmp))):
                found.append(process)
        return found

    def note_shared_memory(self) -> None:
        """Remember which names in /dev/shm the run's processes have in use."""
        for process in self.processes():
            folder = Path(f"/proc/{process.pid}")
            try:
                names = {str(fd.readlink()) for fd in (folder / "fd").iterdir()}
                names |= set(re.findall(r"/dev/shm/\S+", (folder / "maps").read_text()))
            except OSError:
                continue
            self.shared |= {name for name in names if name.startswith("/dev/shm/")}

    def left(self) -> list[str]:
        """What of the run is still held: processes, port, shared memory, scratch folder."""
        found = [f"pid {one.pid}: {' '.join(one.cmdline())[:80]}" for one in self.processes() if one.is_running()]
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if any(int(row[1].rpartition(":")[2], 16) == self.port and row[3] == "0A" for row in listening):
            found.append(f"port {self.port}")
        return (
            found + [name for name in self.shared if Path(name).exists()] + [str(path) for path in self.tmp.iterdir()]
        )

    def wait_until_clear(self, within_s: float) -> list[str]:
        """Wait until nothing is left; what is, when the time is over."""
        deadline = time.monotonic() + within_s
        while left := self._left_now():
            if time.monotonic() > deadline:
                return left
            time.sleep(0.1)
        return []

    def _left_now(self) -> list[str]:
        try:
            return self.left()
        except psutil.Error:
            return ["a process that ends"]

    def records(self) -> dict[str, str]:
        """Digest of everything that is kept of each completed launch, by its path."""
        found = {}
        for done in (self.folder / "results").rglob("launches/*/launch.json"):
            for path in done.parent.rglob("*"):
                if path.is_file():
                    found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        return found

    def measured(self) -> int:
        """Whole lines of requests and answers on disk, set-aside attempts included."""
        files = [*(self.folder / "results").rglob("requests.jsonl"), *(self.folder / "results").rglob("gsm8k.jsonl")]
        return sum(path.read_bytes().count(b"\n") for path in files)
