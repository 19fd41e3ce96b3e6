"""Gluon's functions by the names that each version of Triton has for them."""

import importlib
from unittest import mock

import pytest
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from pq2 import compat


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    importlib.reload(compat)


def test_the_newer_name_is_taken_where_the_older_one_raises() -> None:
    def removed() -> None:
        raise RuntimeError("has been removed; call async_load instead")

    newer = object()
    with mock.patch.multiple(async_copy, create=True, async_load=newer, async_copy_global_to_shared=removed):
        assert importlib.reload(compat).copy_async is newer


def test_the_older_name_is_taken_where_there_is_no_newer_one() -> None:
    older = object()
    with mock.patch.multiple(async_copy, create=True, async_load=None, async_copy_global_to_shared=older):
        assert importlib.reload(compat).copy_async is older
