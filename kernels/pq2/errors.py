"""What can go wrong, by kind.

Pq2Error
├── FormatError        a tensor or a file is not what it says it is
├── SwitchError        a PQ2_* variable has a name or a value that is not known
├── PathUnavailable    the path asked for cannot run here (device, shape, library); nothing else runs in its stead
└── WrongResult        what was to be timed is wrong; it is not timed
"""

from __future__ import annotations


class Pq2Error(Exception):
    """Base of all; its text says what was found, where, and what is allowed."""


class FormatError(Pq2Error, ValueError):
    """A tensor or a file is not what it says it is."""


class SwitchError(Pq2Error, ValueError):
    """A PQ2_* variable has a name or a value that is not known."""


class PathUnavailable(Pq2Error, RuntimeError):
    """The path asked for cannot run here; nothing else runs in its stead."""


class WrongResult(Pq2Error):
    """What was to be timed is wrong; it is not timed."""
