"""Gluon's functions by the names that each version of Triton has for them."""

import importlib
from unittest import mock

import pytest
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from pq2 import compat


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    importlib.reload(compat)


NAMES = [(async_copy, "copy_async"), (tma, "bulk_copy")]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_newer_name_is_taken_where_the_older_one_raises(module, name: str) -> None:
    def removed() -> None:
        raise RuntimeError("has been removed; call async_load instead")

    newer = object()
    with mock.patch.multiple(module, create=True, async_load=newer, async_copy_global_to_shared=removed):
        assert getattr(importlib.reload(compat), name) is newer


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_older_name_is_taken_where_there_is_no_newer_one(module, name: str) -> None:
    older = object()
    with mock.patch.multiple(module, create=True, async_load=None, async_copy_global_to_shared=older):
        assert getattr(importlib.reload(compat), name) is older
