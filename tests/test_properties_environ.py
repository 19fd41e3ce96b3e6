"""The environment reader on any block: given back whole, or called unreadable; a variable is never wrongly unset."""

from __future__ import annotations

import struct

from hypothesis import assume, given
from hypothesis import strategies as st

from abharness.envblock import ExecLayout, find_layout, judge_block, parse_environ, shows_title

START = 0x7FFC_0000_1000

byte_texts = st.binary(max_size=12).map(lambda raw: raw.replace(b"\0", b""))
names = byte_texts.map(lambda raw: raw.replace(b"=", b"")).filter(bool)
environments = st.dictionaries(names, byte_texts, min_size=1, max_size=8)


def text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def laid_out(env: dict[bytes, bytes]) -> tuple[bytes, ExecLayout]:
    """The block that the kernel makes of an environment, and the pointers that it lays out beside it."""
    entries = [name + b"=" + value + b"\0" for name, value in env.items()]
    places = [START + sum(map(len, entries[:index])) for index in range(len(entries))]
    return b"".join(entries), ExecLayout(1, len(entries), tuple(places))


def bounds(block: bytes) -> tuple[int, int]:
    return START, START + len(block)


@given(environments, st.booleans())
def test_what_was_written_is_read_back(env: dict[bytes, bytes], final_nul: bool) -> None:
    block, layout = laid_out(env)
    wanted = {text(name): text(value) for name, value in env.items()}
    assert parse_environ(block if final_nul else block.removesuffix(b"\0")).variables == wanted
    read = judge_block(block, bounds(block), layout)
    assert (read.state, read.layout_checked, read.variables) == ("ok", True, wanted)


@given(st.lists(st.tuples(names, byte_texts), min_size=1, max_size=6))
def test_of_equal_names_the_first_counts(pairs: list[tuple[bytes, bytes]]) -> None:
    block = b"\0".join(name + b"=" + value for name, value in pairs)
    first: dict[str, str] = {}
    for name, value in pairs:
        first.setdefault(text(name), text(value))
    assert parse_environ(block).variables == first


@given(st.binary(max_size=200))
def test_any_block_has_an_outcome(block: bytes) -> None:
    read = parse_environ(block)
    if read.state == "ok":
        assert read.reason is None
        entries = block.removesuffix(b"\0").split(b"\0")
        assert all(b"=" in entry for entry in entries)
        assert len(read.variables) + len(read.nameless) <= len(entries)
    else:
        assert read.state == "unreadable"
        assert read.reason
        assert not read.variables


@given(environments, st.data())
def test_a_block_wiped_in_part_is_unreadable(env: dict[bytes, bytes], data: st.DataObject) -> None:
    """NUL bytes over any part of a block that change it at all."""
    block, layout = laid_out(env)
    start = data.draw(st.integers(0, len(block) - 1))
    end = data.draw(st.integers(start + 1, len(block)))
    wiped = block[:start] + bytes(end - start) + block[end:]
    read = judge_block(wiped, bounds(wiped), layout)
    assert (read.state == "ok") is (wiped == block)
    assert wiped == block or not read.variables


@given(environments, st.binary(min_size=1, max_size=40))
def test_a_block_that_a_title_ran_into_is_unreadable_or_lost_its_first_variable(
    env: dict[bytes, bytes], title: bytes
) -> None:
    """Any bytes over its beginning. A title that ends exactly where an entry begins cannot be told from entries, but
    the first variable is then no longer what it was: a sentinel in that place proves the others."""
    block, layout = laid_out(env)
    overrun = title[: len(block)] + block[len(title) :]
    name, value = next(iter(env.items()))
    assume(overrun != block and name + b"=" + value + b"\0" not in title)
    read = judge_block(overrun, bounds(overrun), layout)
    assert read.state == "unreadable" or read.variables.get(text(name)) != text(value)


@given(environments, st.data())
def test_a_block_read_in_part_is_unreadable(env: dict[bytes, bytes], data: st.DataObject) -> None:
    block, _ = laid_out(env)
    cut = data.draw(st.integers(1, len(block) - 1)) if len(block) > 1 else 1
    assert judge_block(block[:cut], bounds(block), None).state == "unreadable"


@given(environments, st.data())
def test_moved_pointers_raise_no_doubt(env: dict[bytes, bytes], data: st.DataObject) -> None:
    """setenv points an entry to the heap; unsetenv drops one and moves up those behind it."""
    block, layout = laid_out(env)
    pointers = [p for p in layout.pointers if data.draw(st.booleans())]
    pointers += data.draw(st.lists(st.integers(0, START - 1) | st.integers(START + len(block), 2**48), max_size=3))
    assert judge_block(block, bounds(block), ExecLayout(1, layout.envc, tuple(pointers))).layout_checked


@given(
    st.lists(st.integers(1, 2**63), max_size=4),
    st.lists(st.integers(1, 2**63), max_size=6),
    st.integers(0, 2),
    st.binary(min_size=16, max_size=64).map(lambda raw: raw[: len(raw) // 8 * 8]).filter(lambda raw: raw.strip(b"\0")),
)
def test_the_number_of_entries_is_found_whatever_was_dropped(
    argv: list[int], envp: list[int], dropped: int, auxv: bytes
) -> None:
    dropped = min(dropped, len(envp))
    slots = [*envp[: len(envp) - dropped], *[0] * dropped]
    words = [len(argv), *argv, 0, *slots, 0]
    stack = struct.pack(f"@{len(words)}N", *words) + auxv + b"rest"
    found = find_layout(stack, auxv)
    if stack.find(auxv) == len(words) * 8:
        assert found == ExecLayout(len(argv), len(envp), tuple(filter(None, slots)))


@given(st.binary(max_size=256), st.binary(max_size=64))
def test_any_stack_has_an_outcome(stack: bytes, auxv: bytes) -> None:
    found = find_layout(stack, auxv)
    assert found is None or found.envc >= len(found.pointers)


@given(st.binary(max_size=200), st.tuples(st.integers(0, 2**48), st.integers(0, 2**48)), st.integers(-1, 9))
def test_any_block_and_layout_have_an_outcome(block: bytes, where: tuple[int, int], envc: int) -> None:
    read = judge_block(block, where, None if envc < 0 else ExecLayout(1, envc, (where[0] + envc,)))
    assert read.state in ("ok", "unreadable")
    assert (read.state == "ok") == (read.reason is None)


@given(st.lists(byte_texts, min_size=1, max_size=5))
def test_arguments_as_laid_out_at_exec_are_no_title(argv: list[bytes]) -> None:
    assert shows_title(b"".join(arg + b"\0" for arg in argv), len(argv)) is False


@given(st.lists(byte_texts.filter(bool), min_size=2, max_size=5), st.binary(min_size=1, max_size=60))
def test_a_title_over_more_than_one_argument_shows(argv: list[bytes], title: bytes) -> None:
    raw = b"".join(arg + b"\0" for arg in argv)
    title = title.replace(b"\0", b"")[: len(raw)]
    over = title + bytes(len(raw) - len(title))
    assert shows_title(over, len(argv)) is not False or over.count(b"\0") == len(argv)
