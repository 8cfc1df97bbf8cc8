"""Garbage collection waits, and is back afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lmcache_xpu.vllm_hooks.garbage import GarbageCollection


@pytest.fixture
def collection() -> Iterator[GarbageCollection]:
    gc.enable()
    yield GarbageCollection()
    gc.enable()


def test_it_is_put_off_until_it_is_allowed(collection):
    collection.put_off()
    collection.put_off()  # another request
    assert not gc.isenabled()
    collection.allow()
    assert gc.isenabled()


def test_what_somebody_else_has_disabled_stays_so(collection):
    gc.disable()
    collection.put_off()
    collection.allow()
    assert not gc.isenabled()


def test_allowing_without_putting_off_changes_nothing(collection):
    collection.allow()
    assert gc.isenabled()
    gc.disable()
    collection.allow()
    assert not gc.isenabled()
