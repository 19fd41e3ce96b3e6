"""Values on their way to disk or to a screen: secrets hidden, bytes that are no UTF-8 escaped."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

SECRET_NAME = re.compile(
    r"(^|_)(API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTH|CREDENTIAL|KEY|PASS|PASSWD|PASSWORD|SECRET|TOKEN)S?(_|$)",
    re.IGNORECASE,
)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")


def printable(text: str) -> str:
    """The text with bytes that are no UTF-8 escaped in hexadecimal."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


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
