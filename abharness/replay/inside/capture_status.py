"""What the capture plugin tells the harness: one JSON file a process, written whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Refused(Exception):
    """What was asked for cannot be captured; the message is for the person who asked.

    Attributes:
        hint: What to do.
        kind: `usage`, where other arguments would do; `server`, where this server cannot be captured.
    """

    def __init__(self, message: str, hint: str, kind: str) -> None:
        super().__init__(message)
        self.hint = hint
        self.kind = kind


class Status:
    """The file `status-<pid>.json` of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data: dict[str, Any] = {"fault": None, "model": None}

    def write(self) -> None:
        """Write what is known by now."""
        # The process of this moment: one that was forked after the plugin was registered has a file of its own.
        path = self.folder / f"status-{os.getpid()}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"pid": os.getpid(), **self.data}, allow_nan=False), encoding="ascii")
        part.replace(path)

    def fault(self, error: BaseException) -> None:
        """Tell that there will be no capture, and why; the first reason stays."""
        if self.data["fault"] is None:
            known = isinstance(error, Refused)
            self.data["fault"] = {
                "message": str(error) if known else f"{type(error).__name__}: {error}",
                "hint": error.hint if isinstance(error, Refused) else None,
                "kind": error.kind if isinstance(error, Refused) else "fault",
            }
        self.write()
