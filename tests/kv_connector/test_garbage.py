"""Garbage collection waits, and is back afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lmcache_xpu.kv_connector import garbage


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    garbage.allow()
    gc.enable()


def test_it_is_put_off_until_it_is_allowed():
    garbage.put_off()
    garbage.put_off()  # another request
    assert not gc.isenabled()
    garbage.allow()
    assert gc.isenabled()


def test_what_somebody_else_has_disabled_stays_so():
    gc.disable()
    garbage.put_off()
    garbage.allow()
    assert not gc.isenabled()


def test_allowing_without_putting_off_changes_nothing():
    garbage.allow()
    assert gc.isenabled()
    gc.disable()
    garbage.allow()
    assert not gc.isenabled()
