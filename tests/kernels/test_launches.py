"""Launch tables: what is chosen for a shape, and what a table may hold."""

import json

import pytest

from pq2 import dispatch, launches, switches
from pq2.errors import FormatError
from pq2.launches import Direct, Entry, Single

SINGLE = {"path": "single", "block_n": 4, "block_g": 8, "num_warps": 1}
DIRECT = {"path": "direct", "block_n": 16, "warps_k": 8, "warps_n": 1, "sg": 2}


def _table(tuned: dict) -> launches.Table:
    return launches.read_table(json.dumps({"tuned": tuned}))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, launches.Table]:
    found: dict[str, launches.Table] = {}
    monkeypatch.setattr(launches, "table", lambda arch: (arch, found[arch]))
    return found


def _first(m: int, n: int, k: int, kernel_set: str = "tuned") -> tuple[int, ...] | None:
    return next((tuple(entry.launch) for entry in launches.candidates("sm_90", kernel_set, m, n, k)), None)


def test_a_weight_without_an_entry_takes_the_nearest_of_its_k(tables: dict[str, launches.Table]) -> None:
    def entry(block_n: int) -> list[dict]:
        return [{**SINGLE, "block_n": block_n}]

    tables["sm_90"] = _table(
        {"1": {"default": entry(1), "1024x5120": entry(2), "8192x5120": entry(4), "4096x4096": entry(8)}}
    )
    assert _first(1, 8192, 5120) == (4, 8, 1)
    assert _first(1, 2000, 5120) == (2, 8, 1)  # twice 1024, a quarter of 8192
    assert _first(1, 4000, 5120) == (4, 8, 1)
    assert _first(1, 8192, 4096) == (8, 8, 1)
    assert _first(1, 8192, 6144) == (1, 8, 1)  # no such K


def test_a_number_of_rows_takes_the_next_larger_one(tables: dict[str, launches.Table]) -> None:
    tables["sm_90"] = _table(
        {rows: {"default": [{**DIRECT, "block_n": block_n}]} for rows, block_n in (("16", 32), ("2", 16), ("64", 64))}
    )
    assert [_first(m, 100, 128)[0] for m in (1, 2, 3, 16, 17, 64)] == [16, 16, 32, 32, 64, 64]
    assert _first(65, 100, 128) is None
    assert _first(1, 100, 128, "exact") is None  # a set that the table does not have


def test_entries_that_are_switched_off_or_do_not_fit_are_passed_over() -> None:
    def path(m: int, k: int, **given: str) -> str | None:
        choice = switches.resolve({f"PQ2_{name.upper()}": value for name, value in given.items()}, "cuda")
        entry = dispatch.entry_for(choice, "sm_90", m, 5120, k)
        return entry.path if entry else None

    # The interpreter has `single` alone; what needs Gluon is tried by the tests on a GPU.
    assert path(1, 5120) == "single"
    assert path(1, 5120, single="off") is None
    assert path(1, 5120, kernels="legacy") is None
    assert path(8, 5120) is None


def test_an_architecture_without_a_table_takes_the_older_one() -> None:
    assert launches.table("sm_120") == ("sm_86", launches.table("sm_86")[1])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "fast"}, "path 'fast': there are single, single_ring, direct, ring, prefill, prefill_wgmma"),
        ({**SINGLE, "stages": 3}, "single has block_n, block_g, num_warps, integers"),
        ({"path": "single", "block_n": 4, "block_g": 8}, "single has block_n, block_g, num_warps, integers"),
        ({**SINGLE, "block_n": "4"}, "single has block_n, block_g, num_warps, integers"),
        ({**SINGLE, "block_n": True}, "single has block_n, block_g, num_warps, integers"),
    ],
)
def test_an_entry_that_is_none_is_refused(entry: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        _table({"1": {"default": [entry]}})


def test_any_serves_all_rows_that_no_other_key_does(tables: dict[str, launches.Table]) -> None:
    tables["sm_90"] = _table({"16": {"default": [DIRECT]}, "any": {"default": [{**DIRECT, "block_n": 64}]}})
    assert [_first(m, 100, 128)[0] for m in (16, 17, 10**6)] == [16, 64, 64]
    assert launches.rows_name(launches.ANY) == "any"


def test_a_table_needs_a_default() -> None:
    with pytest.raises(FormatError, match="tuned, 8 rows: no default"):
        _table({"8": {"5120x6144": [DIRECT]}})


def test_an_entry_is_written_as_it_is_read() -> None:
    assert launches.read_entry(SINGLE) == Entry("single", Single(4, 8, 1))
    assert launches.write_entry(Entry("direct", Direct(16, 8, 1, 2))) == DIRECT
