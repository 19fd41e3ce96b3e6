"""Checking a running fake server: what the verifying tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from abharness.hearing import hear
from abharness.record import EnvironmentCheck, Finding
from abharness.server import VllmServer
from abharness.verify import check_environment

Running = Callable[..., VllmServer]


def check(server: VllmServer, expected: dict[str, str | None], **options: Any) -> EnvironmentCheck:
    return check_environment(
        when="before_load",
        root_pid=server.pid,
        launched=server.command.env,
        expected=expected,
        sentinel=server.command.sentinel,
        log_text=server.log_text(),
        known=server.known(),
        **{"probes": hear(Path(server.command.env["ABHARNESS_PROBE_DIR"])), **options},
    )


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]
