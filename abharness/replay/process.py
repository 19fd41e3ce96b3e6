"""A worker in the server's environment (`inside/worker.py`): started, asked, ended; its answers or its errors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from abharness.errors import ReplayError, UsageError

PACKAGE = "abharness_replay"
"""The name under which `inside` is imported there."""
END_WAIT_S = 10.0
TAIL_LINES = 15


def install(site: Path) -> None:
    """Copy what runs in the server's environment into a folder for its PYTHONPATH."""
    target = site / PACKAGE
    target.mkdir(parents=True, exist_ok=True)
    for source in sorted((Path(__file__).parent / "inside").glob("*.py")):
        shutil.copyfile(source, target / source.name)


class Worker:
    """A running worker; a context manager that ends it on every way out."""

    def __init__(self, python: Path, env: Mapping[str, str], paths: Sequence[Path]) -> None:
        """A worker to be started.

        Args:
            python: Interpreter with torch and safetensors.
            env: Its environment; PYTHONPATH in it stays first.
            paths: Folders that come onto the end of its PYTHONPATH.
        """
        self._python = python
        self._env = dict(env)
        self._paths = list(paths)
        self._process: subprocess.Popen[str] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        self._scratch = tempfile.TemporaryDirectory(prefix="ab-replay-")
        site = self.scratch / "site"
        install(site)
        given = [part for part in (self._env.get("PYTHONPATH"), *map(str, self._paths), str(site)) if part]
        env = self._env | {"PYTHONPATH": os.pathsep.join(given), "PYTHONUNBUFFERED": "1"}
        self._log = (self.scratch / "log").open("w+", encoding="utf-8", errors="replace")
        try:
            self._process = subprocess.Popen(
                [str(self._python), "-m", f"{PACKAGE}.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=env,
                cwd=self.scratch,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            self._close()
            raise UsageError(
                f"{self._python} cannot be started: {error.strerror}", hint="give --python PATH"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self._close()

    @property
    def scratch(self) -> Path:
        """A folder that lasts as long as the worker."""
        assert self._scratch is not None
        return Path(self._scratch.name)

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Have something done and wait for it.

        Raises:
            UsageError: It refuses what it was asked; the message says why.
            ReplayError: It failed, or is gone.
        """
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
            raise ReplayError(
                f"the process that replays ended ({how}) when asked to {do}{self._tail()}",
                hint="it needs torch and safetensors: --python names the interpreter, as server.python in a spec",
            )
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise UsageError(answer["refused"])
        if "failed" in answer:
            lines = answer["traceback"].rstrip().splitlines()[-TAIL_LINES:]
            raise ReplayError(f"{do} failed: {answer['failed']}\n" + "\n".join(f"  | {line}" for line in lines))
        done: dict[str, Any] = answer["done"]
        return done

    def _tail(self) -> str:
        self._log.flush()
        text = Path(self._log.name).read_text(encoding="utf-8", errors="replace")
        lines = text.rstrip().splitlines()[-TAIL_LINES:]
        return "".join(f"\n  | {line}" for line in lines)

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(END_WAIT_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            process.stdout.close()
        self._log.close()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None
