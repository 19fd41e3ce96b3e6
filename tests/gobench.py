"""A strict reader of the Go benchmark format, by the rules of golang.org/x/perf/benchfmt: it refuses what that ignores."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass
class Line:
    """One result: its configuration, name, count and measurements by unit."""

    config: dict[str, str]
    name: str
    iterations: int
    values: dict[str, float]


@dataclass
class File:
    lines: list[Line] = field(default_factory=list)
    better: dict[str, str] = field(default_factory=dict)


KEY = re.compile(r"([a-z][^\sA-Z:]*):(?:$|[ \t]+(.*)$)")


def parse(text: str) -> File:
    done = File()
    config: dict[str, str] = {}
    for line in text.splitlines():
        words = line.split()
        if not words:
            continue
        if line.startswith("Benchmark"):
            name, count, *rest = words
            assert re.fullmatch(r"Benchmark[A-Z]\w*(/[^/=\s]+=[^/\s]+)*", name), name
            # `-8` at the end of a name would be taken for GOMAXPROCS.
            assert not re.search(r"-[0-9]+$", name), name
            assert rest, line
            assert len(rest) % 2 == 0, line
            units = rest[1::2]
            assert len(set(units)) == len(units), line
            for unit in units:
                # These parts of a unit would be scaled, or counted in powers of 1024.
                assert not {"ns", "MB", "B", "bytes"} & set(re.split(r"[-*/]", unit.partition("/")[0])), unit
            values = dict(zip(units, map(float, rest[::2]), strict=True))
            assert all(value == value and abs(value) != float("inf") for value in values.values()), line
            done.lines.append(Line(dict(config), name, int(count), values))
        elif words[0] == "Unit":
            key, equals, value = words[2].partition("=")
            assert len(words) == 3, line
            assert (key, equals) == ("better", "="), line
            assert value in ("higher", "lower"), line
            assert words[1] not in done.better, line
            done.better[words[1]] = value
        else:
            match = KEY.fullmatch(line)
            assert match, f"neither a result nor a unit nor a configuration: {line!r}"
            config[match[1]] = match[2] or ""
    return done
