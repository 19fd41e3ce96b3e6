"""`--allow CODE[:NAME]` -> which findings a reader of a comparison accepts, by name; they are kept and printed.

A waiver says "I know of this, and it cannot matter here". It can set aside a difference or a disturbance. It cannot
stand in for evidence: codes of failed proofs and of work that was not done are not `waivable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from abharness.codes import CODES, code_of
from abharness.errors import UsageError
from abharness.validity import Seen

NAMED_CODE = "undeclared_difference"
"""Waived by the name of the difference only: there is no waiver for whatever may differ."""


@dataclass(frozen=True, slots=True)
class Waiver:
    """One accepted kind of finding.

    Attributes:
        code: A waivable validity code.
        name: For `undeclared_difference` the name of what differs, a final `*` for names that begin so. For other
            codes a part of the place where it was found; None for every place.
    """

    code: str
    name: str | None = None

    def __str__(self) -> str:
        return self.code if self.name is None else f"{self.code}:{self.name}"

    def covers(self, item: Seen) -> bool:
        """Whether a finding is one of those accepted."""
        if item.finding.code != self.code:
            return False
        if self.name is None:
            return True
        if self.code != NAMED_CODE:
            return self.name in item.where
        if item.name is None:
            return False
        return item.name == self.name or (self.name.endswith("*") and item.name.startswith(self.name[:-1]))


def parse_waivers(texts: Sequence[str]) -> tuple[Waiver, ...]:
    """Read the values of `--allow`, each once.

    Raises:
        UsageError: No such code, one that cannot be waived, or a difference without its name.
    """
    return tuple(dict.fromkeys(_parse(text) for text in texts))


def _parse(text: str) -> Waiver:
    code, colon, name = text.partition(":")
    waivable = ", ".join(sorted(known for known, meaning in CODES.items() if meaning.waivable))
    if code not in CODES:
        raise UsageError(
            f"--allow {text}: there is no code {code!r}; expected CODE or CODE:NAME with CODE one of {waivable}",
            hint="a difference is waived as 'undeclared_difference:NAME', with the name that the report prints",
        )
    if not CODES[code].waivable:
        raise UsageError(
            f"--allow {text}: {code} cannot be waived: {CODES[code].meaning}",
            hint=f"no waiver makes a failed proof a proof, or mends work that was not done; can be waived: {waivable}",
        )
    if code == NAMED_CODE and name in ("", "*"):
        raise UsageError(
            f"--allow {text}: {code} needs the name of the difference",
            hint="for example 'undeclared_difference:env.LEAK', or 'undeclared_difference:version.*' for all that "
            "begin so",
        )
    if colon and not name:
        raise UsageError(f"--allow {text}: nothing after the colon", hint=f"give {code}, or {code}:PART-OF-THE-PLACE")
    return Waiver(code, name if colon else None)


def waived(item: Seen, waivers: Sequence[Waiver]) -> bool:
    """Whether a finding is accepted."""
    return any(waiver.covers(item) for waiver in waivers)


def stands(item: Seen, waivers: Sequence[Waiver]) -> bool:
    """Whether a finding withholds the verdict from what it is about."""
    return code_of(item.finding.code).invalidates and not waived(item, waivers)


def used(waivers: Sequence[Waiver], found: Sequence[Seen]) -> list[Waiver]:
    """The waivers that something was waived by."""
    return [waiver for waiver in waivers if any(waiver.covers(item) for item in found)]


def watermark(waivers: Sequence[Waiver], *, verdict: bool) -> str:
    """What the summary says of waivers that were used; empty without any."""
    if not waivers:
        return ""
    names = ", ".join(map(str, waivers))
    return f" This verdict stands on waivers: {names}." if verdict else f" Waived: {names}."


def flag(item: Seen) -> str | None:
    """The flag that waives a finding, quoted for a shell; None when it cannot be waived."""
    code = item.finding.code
    if not code_of(code).waivable or (code == NAMED_CODE and not item.name):
        return None
    return quoted(Waiver(code, item.name if code == NAMED_CODE else None))


def quoted(waiver: Waiver) -> str:
    """A waiver as it stands on a command line."""
    text = str(waiver).replace("'", "'\"'\"'")
    return f"--allow '{text}'"
