"""Why a launch failed -> lines that say so: what happened, the server's last words, the command to start it by hand."""

from __future__ import annotations

import re

from abharness.record import Failure

LAST_WORDS = 12
"""Last lines of a failed server's log that are shown; launch.json has more."""

COMMAND_TITLE = "the command that starts its server by hand (secrets come from your own shell)"

_SHELL_WORD = re.compile(r"""(?:\$?'(?:[^'\\]|\\.)*'|"[^"]*"|\\.|[^\s'"\\])+""", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def what_happened(failure: Failure) -> str:
    """The failure in one statement."""
    code = f" ({failure.code})" if failure.code else ""
    return f"{failure.kind}{code} in phase {failure.phase}: {failure.message}"


def last_words(failure: Failure) -> list[str]:
    """The end of the server's log, each line behind a bar."""
    return [f"| {line}" for line in failure.log_tail[-LAST_WORDS:]]


def command_lines(command: str) -> list[str]:
    """A recorded command as lines that a shell takes as they are, each but the last ending in a backslash."""
    words = _SHELL_WORD.findall(command)
    if " ".join(words) != command:
        return [command]  # not as a launch writes it: left alone
    lines: list[str] = []
    for word in words:
        previous = lines[-1].strip() if lines else "&&"
        if previous.endswith("&&"):
            lines.append(word)
        elif _ASSIGNMENT.match(word) or word.startswith("--") or _ASSIGNMENT.match(previous):
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
