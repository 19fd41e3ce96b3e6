"""Values on their way to disk or to a screen: secrets hidden, bytes that are no UTF-8 and control characters escaped.

A secret is known by the name of what holds it (a variable, a key, an argument), by its shape (`hf_...`, the password
in a URL), and once it was seen under such a name by itself: `remember` it, and `scrub` finds it in any text, as in a
server's log that echoes it. Only the standard library is needed here: the probe takes this file into servers.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

SECRET_NAME = re.compile(
    r"(^|[_.\-])(AUTH|KEY|PASS|PAT|TOKEN)S?([_.\-]|$)|[_.\-]PWD$"
    r"|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|AUTHORI[SZ]ATION|CREDENTIAL|PASSW(OR)?D|PASSPHRASE|SECRET|AUTHTOKEN",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"(://)([^/\s:@'\"]*)(:?)([^/\s@'\"]*)@")
_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[opsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}"
    r"|xox[abp]-[\w-]{10,}|AKIA[0-9A-Z]{16}|(?<=Bearer )[\w.~+/-]{8,}=*)"
)
_SHAPE_STARTS = ("hf_", "sk-", "gh", "glpat-", "xox", "AKIA", "Bearer ")

_SIZE = re.compile(r"\d+(\.\d+)?[kKmMgG]?")
"""As in `--max-num-batched-tokens 8k`, which is no secret."""

SHORTEST = 6
"""Characters of the shortest secret that is looked for by itself: `1` or `EMPTY` stand everywhere."""

UNBOUNDED = 16
"""From so many characters on a secret is found inside a longer word too; a shorter one might be part of a digest."""

_CONTROLS = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1: escape sequences begin with one of them
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these turn the direction of text round
    "\u00ad\u180e\u200b-\u200d\u2028\u2029\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb"  # not seen, or a line's end
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_UNSAFE = re.compile(f"[\t\n{_CONTROLS}]")
_UNSAFE_IN_LINES = re.compile(f"[{_CONTROLS}]")

_known: dict[str, str] = {}


def screen_safe(text: str, *, lines: bool = False) -> str:
    """The text scrubbed, and with everything escaped that a terminal would obey: escape sequences, bidi controls.

    Model answers, server logs and records are written by others: none of them may move the cursor, set a title, write
    the clipboard, or pass for a line of ours.

    Args:
        text: Anything.
        lines: The text is of several lines: line ends and tabs stay.
    """
    unsafe = _UNSAFE_IN_LINES if lines else _UNSAFE
    return unsafe.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), scrub(text))


def printable(text: str) -> str:
    """The text with bytes that are no UTF-8 escaped in hexadecimal."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def shell_word(text: str) -> str:
    """The text as one word of a shell that can be copied and pasted; with control characters, of bash, zsh or ksh."""
    if not _UNSAFE_IN_LINES.search(printable(text)) and printable(text) == text:
        return shlex.quote(text)
    raw = text.encode("utf-8", "surrogateescape")
    return "$'" + "".join(chr(one) if 32 <= one < 127 and one not in b"'\\" else f"\\x{one:02x}" for one in raw) + "'"


def is_secret(name: str, value: str) -> bool:
    """Whether a variable's value may not be written as it is."""
    return hidden(name, value) != printable(value)


def _digest(value: str) -> str:
    import hashlib  # takes a tenth of the start of `abharness --help`

    return f"<redacted {hashlib.sha256(value.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}>"


def remember(values: Iterable[str]) -> None:
    """Have secrets hidden from now on wherever they stand; such as are no more than a number or a word are not."""
    import json
    import urllib.parse

    for value in values:
        # What stands in records as it is (a digit, a name, a folder) cannot be hidden without spoiling them.
        plain = re.fullmatch(r"[a-z_]{1,11}|[0-9.]{1,11}|[0-9a-f]{1,11}", value) is not None
        if len(value) < SHORTEST or plain or (value.startswith("/") and Path(value).exists()):
            continue
        shown = _digest(value)
        quoted = json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]
        for form in (value, printable(value), *quoted, shlex.quote(value), urllib.parse.quote(value, safe="")):
            _known[form] = shown


def secrets_of(env: Mapping[str, str | None], argv: Sequence[str] = ()) -> list[str]:
    """The secrets in an environment and in arguments, those inside JSON and URLs too."""
    found = [value for name, value in env.items() if value and SECRET_NAME.search(name)]
    for value in (*env.values(), *argv):
        found += [match[4] or match[2] for match in _URL_LOGIN.finditer(value or "")]
        found += _secrets_in(_json_in(value or ""))
    return found + [argv[place].partition("=")[2] or argv[place] for place in _secret_places(argv)]


def _secrets_in(data: Any, name: str = "") -> list[str]:
    if isinstance(data, dict):
        return [secret for key, value in data.items() for secret in _secrets_in(value, str(key))]
    if isinstance(data, list):
        return [secret for value in data for secret in _secrets_in(value, name)]
    return [data] if isinstance(data, str) and SECRET_NAME.search(name) else []


def _json_in(text: str) -> Any:
    """The JSON object that a text ends with (`{...}`, `--option={...}`), or None."""
    start = text.find("{")
    if start < 0:
        return None
    import json

    try:
        return json.loads(text[start:])
    except (ValueError, RecursionError):
        return None


def scrub(text: str) -> str:
    """The text without any secret that is remembered or has the shape of one."""
    for form in sorted((form for form in _known if form in text), key=len, reverse=True):
        pattern = re.escape(form)
        text = re.sub(pattern if len(form) >= UNBOUNDED else rf"(?<![\w]){pattern}(?![\w])", _known[form], text)
    return _shaped(text)


def _shaped(text: str) -> str:
    if "://" in text and "@" in text:
        text = _URL_LOGIN.sub(lambda found: f"{found[1]}{found[2] + ':' if found[3] else ''}<redacted>@", text)
    if any(start in text for start in _SHAPE_STARTS):
        text = _SHAPES.sub(lambda found: _digest(found[0]), text)
    return text


def scrub_data(data: Any) -> Any:
    """JSON data with every text in it scrubbed."""
    if isinstance(data, dict):
        return {scrub(key): scrub_data(value) for key, value in data.items()}
    if isinstance(data, list):
        return [scrub_data(value) for value in data]
    return scrub(data) if isinstance(data, str) else data


def scrubbed_copy(source: Path, target: Path) -> None:
    """Copy a text file, scrubbed line by line; the target is written whole or not at all.

    Raises:
        OSError: One cannot be read, or the other not written.
    """
    part = target.with_name(f".{target.name}.part")
    try:
        with (
            source.open(encoding="utf-8", errors="surrogateescape", newline="") as lines,
            part.open("w", encoding="utf-8", errors="surrogateescape", newline="") as out,
        ):
            out.writelines(scrub(line) for line in lines)
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        error.filename = error.filename or str(target)
        raise


def hidden(name: str, value: str) -> str:
    """A variable's value as it may be written: a secret shows a digest, so that equal ones are still seen as equal.

    What is remembered plays no part: the probe hides the same value in another process, and the two are compared.
    """
    return _digest(value) if SECRET_NAME.search(name) else printable(_shaped(value))


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


def redact_argv(argv: Sequence[str]) -> list[str]:
    """Arguments as they may be written: `--api-key X`, `--api-key=X`, JSON with such a key, URLs with a password."""
    places = set(_secret_places(argv))
    shown = []
    for place, arg in enumerate(argv):
        flag, equals, value = arg.partition("=")
        if place not in places:
            shown.append(_redacted_json(arg))
        elif equals and arg.startswith("-"):
            shown.append(f"{flag}={_digest(value)}")
        else:
            shown.append(_digest(arg))
    return shown


def _secret_places(argv: Sequence[str]) -> list[int]:
    """Where in the arguments the values of secret ones stand."""
    places = []
    secret = False
    for place, arg in enumerate(argv):
        flag, equals, value = arg.partition("=")
        if arg.startswith("--"):
            named = SECRET_NAME.search(flag.lstrip("-")) is not None
            secret = named and not equals
            if named and equals and not _SIZE.fullmatch(value):
                places.append(place)
        elif secret and not _SIZE.fullmatch(arg):
            places.append(place)
    return places


def _redacted_json(arg: str) -> str:
    import json

    data = _json_in(arg)
    clean = redact_data(data)
    return printable(_shaped(arg)) if clean == data else arg[: arg.find("{")] + json.dumps(clean)
