"""Records <-> files: atomic writing, appending that survives a crash, careful reading of old and broken files."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from abharness.atomic import replacing
from abharness.base import Model
from abharness.errors import NewerRecord, RecordError, first_line
from abharness.record import SCHEMA_VERSION
from abharness.redaction import scrub, scrub_data

LARGEST_NUMBER = 1e15
"""Of any unit on record; what is larger is damage, and would overflow where it is squared or taken to a power."""


def write_text_atomic(path: Path, text: str) -> None:
    """Write a text file whole or not at all.

    Raises:
        OSError: With the path in it; an existing file is untouched.
    """
    # Half a surrogate pair, as a server may send it, is escaped: a report is not lost for one character.
    with replacing(path) as out:
        out.write(scrub(text).encode("utf-8", errors="backslashreplace"))


def write_json(path: Path, data: Any) -> None:
    """Write JSON data, indented, atomically; NaN and infinity are refused."""
    write_text_atomic(path, json.dumps(scrub_data(data), indent=1, allow_nan=False) + "\n")


def write_model(path: Path, model: Model) -> None:
    """Write one record as indented JSON, atomically."""
    write_json(path, model.model_dump(mode="json"))


def append_lines(path: Path, lines: Sequence[Model]) -> None:
    """Append records as JSON lines and sync: lines written before a crash stay whole.

    Raises:
        OSError: With the path in it; the file is as it was.
    """
    text = "".join(json.dumps(scrub_data(line.model_dump(mode="json")), allow_nan=False) + "\n" for line in lines)
    with path.open("ab", buffering=0) as out:
        before = out.tell()
        try:
            # Unbuffered: what does not fit is not tried again when the file is closed.
            rest = memoryview(text.encode("utf-8", errors="backslashreplace"))
            while rest:
                rest = rest[out.write(rest) :]
            os.fsync(out.fileno())
        except OSError as error:
            out.truncate(before)
            error.filename = error.filename or str(path)
            raise


M = TypeVar("M", bound=Model)


def _migrate(data: dict[str, Any], path: Path) -> dict[str, Any]:
    version = data.get("schema_version")
    if version is not None and (type(version) is not int or version < 1):
        raise RecordError(f"{path}: schema version {version!r}", hint="the file is damaged")
    if version is not None and version > SCHEMA_VERSION:
        raise NewerRecord(
            f"{path}: schema version {version!r}, this abharness reads up to {SCHEMA_VERSION}",
            hint="upgrade abharness to the version that wrote it",
        )
    return data


def _no_constants(_constant: str) -> None:
    # json.loads calls this for NaN, Infinity and -Infinity: a missing value, never a number.
    return None


def _integer(text: str) -> int:
    if len(text) > 19:
        raise ValueError(f"a number out of range: {text[:30]}")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if abs(value) > LARGEST_NUMBER:
        raise ValueError(f"a number out of range: {text[:30]}")
    return value


# A JSON text with every digit as 0, exponents as e and what may stand before a number as a blank: a number that may be
# too large is then one of these. Inside a text it may look so too; that only costs time.
_SHAPE = bytes.maketrans(b"123456789E:,[-\n\t\r", b"000000000e       ")
_MANY_DIGITS = b" " + b"0" * 16
_EXPONENT = re.compile(rb"(?:^| )[0.]+e[+0]")


def _plain(text: bytes) -> bool:
    """Whether every number of a JSON text is in range, so that a quick parser reads the same as the careful one."""
    shape = text.translate(_SHAPE)
    if _MANY_DIGITS in shape:
        return False
    return not any(mark in shape for mark in (b"0e0", b"0e+")) or _EXPONENT.search(shape) is None


def _loads(text: bytes) -> Any:
    if _plain(text):
        with contextlib.suppress(ValueError):  # NaN, half a surrogate pair, damage: the careful one knows what to say
            return from_json(text, allow_inf_nan=False, cache_strings="keys")
    return json.loads(text, parse_constant=_no_constants, parse_float=_number, parse_int=_integer)


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object; bare NaN and infinities are read as missing.

    Raises:
        RecordError: Missing, not JSON, or no object.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: {error}") from error
    try:
        data = _loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: not JSON: {error}", hint="the file is damaged; rerun with --resume") from error
    if not isinstance(data, dict):
        raise RecordError(f"{path}: a JSON object was expected, found {type(data).__name__}")
    return data


def read_model(path: Path, kind: type[M]) -> M:
    """Read one JSON record.

    Raises:
        RecordError: Missing, not JSON, of a newer schema version, or not of this shape.
    """
    data = read_json(path)
    try:
        return kind.model_validate(_migrate(data, path))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise RecordError(f"{path}: {where}: {first['msg']} ({error.error_count()} problem(s) in all)") from error


def packed(path: Path) -> Path:
    """The gzip of a file of lines, as a published record may hold it."""
    return path.with_name(f"{path.name}.gz")


def read_lines(path: Path, kind: type[M]) -> tuple[list[M], list[str]]:
    """Read JSON lines, keeping every whole line; where there is no such file, its gzip (`NAME.gz`), as published.

    Returns:
        The records, and one warning for each line that was dropped (a half-written last line, damage).

    Raises:
        RecordError: The file cannot be opened.
    """
    try:
        raw = path.read_bytes() if path.exists() else gzip.decompress(packed(path).read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise RecordError(f"{path}: {error}") from error
    records: list[M] = []
    warnings: list[str] = []
    plain = _plain(raw)
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(_line(line, kind, plain=plain))
        except (ValueError, RecursionError) as error:
            reason = first_line(error)
            warnings.append(f"{path}:{number}: line dropped: {reason}")
    return records, warnings


def _line(line: bytes, kind: type[M], *, plain: bool) -> M:
    if plain:
        with contextlib.suppress(ValueError):
            return kind.model_validate_json(line)
    return kind.model_validate(_loads(line))
