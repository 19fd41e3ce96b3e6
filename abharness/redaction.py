"""Values on their way to disk or to a screen: secrets hidden, bytes that are no UTF-8 and control characters escaped."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from typing import Any

SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH|CREDENTIAL|KEY|PASS|PASSWD|PASSWORD|SECRET|TOKEN)S?(_|$)",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")

_CONTROLS = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1: escape sequences begin with one of them
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these turn the direction of text round
    "\u00ad\u180e\u200b-\u200d\u2028\u2029\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb"  # not seen, or a line's end
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_UNSAFE = re.compile(f"[\t\n{_CONTROLS}]")
_UNSAFE_IN_LINES = re.compile(f"[{_CONTROLS}]")


def screen_safe(text: str, *, lines: bool = False) -> str:
    """The text with everything escaped that a terminal would obey instead of show: escape sequences, bidi controls.

    Model answers, server logs and records are written by others: none of them may move the cursor, set a title, write
    the clipboard, or pass for a line of ours.

    Args:
        text: Anything.
        lines: The text is of several lines: line ends and tabs stay.
    """
    unsafe = _UNSAFE_IN_LINES if lines else _UNSAFE
    return unsafe.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def printable(text: str) -> str:
    """The text with bytes that are no UTF-8 escaped in hexadecimal."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def shell_word(text: str) -> str:
    """The text as one word of a shell (bash, zsh, ksh) that can be shown, copied and pasted on one line."""
    if screen_safe(printable(text)) == text:
        return shlex.quote(text)
    raw = text.encode("utf-8", "surrogateescape")
    return "$'" + "".join(chr(one) if 32 <= one < 127 and one not in b"'\\" else f"\\x{one:02x}" for one in raw) + "'"


def is_secret(name: str, value: str) -> bool:
    """Whether a variable's value may not be written as it is: by its name, or for a password in a URL."""
    return bool(SECRET_NAME.search(name) or _URL_PASSWORD.search(value))


def hidden(name: str, value: str) -> str:
    """A variable's value as it may be written: a secret shows a digest, so that equal ones are still seen as equal."""
    if SECRET_NAME.search(name):
        return f"<redacted {hashlib.sha256(value.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}>"
    return printable(_URL_PASSWORD.sub(r"\1<redacted>@", value))


def redact_data(data: Any, name: str = "") -> Any:
    """JSON data as it may be written: texts below a secret's name are hidden."""
    if isinstance(data, dict):
        return {printable(str(key)): redact_data(value, str(key)) for key, value in data.items()}
    if isinstance(data, list):
        return [redact_data(value, name) for value in data]
    return hidden(name, data) if isinstance(data, str) else data


def redact(env: Mapping[str, str]) -> dict[str, str]:
    """An environment as it may be written."""
    return {printable(name): hidden(name, value) for name, value in env.items()}
