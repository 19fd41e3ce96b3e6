"""YAML text and `--set` overrides -> plain data that remembers, for every path, its line and the text as written.

PyYAML's loader silently keeps the last of two equal keys and turns `on`, `0123`, `1:30` and an empty value into
something else. Both are ways to launch a server that was never asked for, so this loader refuses duplicate keys and
keeps what was written, for a message that can quote it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_NODES = 20_000  # aliases can nest a small file into gigabytes; no experiment is this large
MAX_INT_BITS = 63  # no count is larger, and Python refuses to print one of some thousand digits

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written.

    Attributes:
        place: `file:line`, or `--set KEY`.
        text: The scalar as written, or None for a mapping or list.
        from_command_line: True for `--set`, where everything is text to begin with.
    """

    place: str
    text: str | None
    from_command_line: bool = False

    @property
    def words(self) -> list[str]:
        """The text cut at its spaces, as a shell would have it."""
        return (self.text or "").split()


@dataclass(slots=True)
class Located:
    """Plain data and the origin of each path in it; `problems` holds what could not be read."""

    data: Any = None
    origins: dict[Path, Origin] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def origin(self, path: Path) -> Origin:
        """The origin of a path or of its nearest known ancestor."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins.get(path, Origin("?", None))


class _Builder:
    def __init__(self, located: Located, source: str, *, from_command_line: bool) -> None:
        self.located = located
        self.source = source
        self.from_command_line = from_command_line
        self.constructor = yaml.constructor.SafeConstructor()
        self.count = 0

    def place(self, node: yaml.Node) -> str:
        return self.source if self.from_command_line else f"{self.source}:{node.start_mark.line + 1}"

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.count += 1
        if self.count > MAX_NODES or len(path) > 50:
            raise yaml.YAMLError(f"more than {MAX_NODES} values or 50 levels (aliases expanded)")
        text = node.value if isinstance(node, yaml.ScalarNode) else None
        self.located.origins[path] = Origin(self.place(node), text, self.from_command_line)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path)
        assert isinstance(node, yaml.ScalarNode)
        try:
            value = self.constructor.construct_object(node)
            if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
                raise ValueError(f"an integer of more than {MAX_INT_BITS} bits")
            return value
        except (yaml.YAMLError, ValueError, OverflowError, KeyError, IndexError, AttributeError, TypeError) as error:
            # The constructors of tagged scalars (!!int x, a date of month 13) raise whatever they stumble over.
            self.located.problems.append(
                f"{self.place(node)}: {dotted(path)}: cannot read {node.value[:80]!r}: {error}"
            )
            return None

    def mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            where = self.place(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                what = "merge key '<<'" if isinstance(key_node, yaml.ScalarNode) else "a key that is not a plain text"
                self.located.problems.append(f"{where}: {dotted(path)}: {what} is not supported; write the keys out")
                continue
            # A key is a name: `on:` or `1:` below env is the variable "on" or "1", whatever YAML makes of it.
            key = key_node.value
            if key in result:
                first = self.located.origin((*path, key)).place
                self.located.problems.append(
                    f"{where}: {dotted((*path, key))}: duplicate key, first given at {first}; keep one of them"
                )
                continue
            result[key] = self.build(value_node, (*path, key))
        return result


def dotted(path: Path) -> str:
    """A path as people write it: `workloads[0].input_len`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else part)
    return text or "(top level)"


def load(text: str, source: str) -> Located:
    """Read one YAML document.

    Returns:
        The data with origins; syntax errors, duplicate keys and unreadable scalars are in `problems`.
    """
    located = Located()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            located.data = _Builder(located, source, from_command_line=False).build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        located.problems.append(f"{source}{line}: not valid YAML: {error.problem or error.context}")
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        located.problems.append(f"{source}: not valid YAML: {error or type(error).__name__}")
    return located


_STEP = re.compile(r"([^.\[\]]+)|\[(\d{1,9})\]")


def override(located: Located, assignment: str) -> None:
    """Apply one `--set dotted.key=value` to loaded data, in place.

    A list element is named by position (`workloads[0]`) or by its `name` (`workloads.decode`). The value is YAML
    (`[1, 2]`, `8`, `null`). Missing mappings on the way are created. What does not fit is added to `problems`.
    """
    key, equals, value = assignment.partition("=")
    source = f"--set {key}"
    steps: list[str | int] = [int(number) if number else name for name, number in _STEP.findall(key)]
    if not equals or not steps:
        located.problems.append(f"--set {assignment}: expected dotted.key=value, for example server.model=./my-model")
        return
    if steps[0] in ("variants", "server") and "env" in steps[:3]:
        # Names of environment variables have no dots, but be exact about what follows `env.`.
        cut = steps.index("env") + 1
        steps = [*steps[:cut], ".".join(str(step) for step in steps[cut:])] if steps[cut:] else steps
    part = load(value, source)
    located.problems += [problem.replace(f"{source}:1", source) for problem in part.problems]
    if part.problems:
        return
    if located.data is None:
        located.data = {}
    target: Any = located.data
    path: Path = ()
    for wanted in steps[:-1]:
        found = _step_into(target, wanted, create=True)
        if found is None:
            located.problems.append(f"{source}: {dotted((*path, wanted))}: there is no such element")
            return
        step, target = found
        path = (*path, step)
        located.origins.setdefault(path, Origin(source, None, from_command_line=True))
    last = _step_into(target, steps[-1], create=False)
    if last is not None:
        steps[-1] = last[0]
    settable = isinstance(target, dict) and isinstance(steps[-1], str)
    if settable or (isinstance(target, list) and last is not None):
        target[steps[-1]] = part.data
        path = (*path, steps[-1])
        for known in [old for old in located.origins if old[: len(path)] == path]:
            del located.origins[known]
        for below, origin in part.origins.items():
            located.origins[(*path, *below)] = Origin(source, origin.text, from_command_line=True)
    else:
        located.problems.append(f"{source}: {dotted((*path, steps[-1]))}: there is no such element")


def _step_into(target: Any, step: str | int, *, create: bool) -> tuple[str | int, Any] | None:
    if isinstance(target, dict) and isinstance(step, str):
        if step not in target or (create and target[step] is None):
            if not create:
                return None
            target[step] = {}
        return step, target[step]
    if isinstance(target, list):
        for index, item in enumerate(target):
            if index == step or (isinstance(item, dict) and item.get("name") == step):
                return index, item
    return None
