"""Gluon's functions under one name, whatever the version of Triton (3.6 to 3.9): a kernel finds them as globals here."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.ampere import async_copy as _async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma as _tma

# Since 3.9 the former names are functions that raise, so the newer name is asked for first.
copy_async = getattr(_async_copy, "async_load", None) or _async_copy.async_copy_global_to_shared
commit_group = _async_copy.commit_group
wait_group = _async_copy.wait_group
mbarrier_arrive = _async_copy.mbarrier_arrive
bulk_copy = getattr(_tma, "async_load", None) or _tma.async_copy_global_to_shared
