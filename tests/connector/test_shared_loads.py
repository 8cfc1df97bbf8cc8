"""Requests that begin alike, of which one waits for its load."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache_xpu.connector.shared_loads import SharedLoads

BLOCK = 16


def request(name: str, prompt: str) -> SimpleNamespace:
    """A request whose blocks have a letter each; a hash stands for all letters up to its own."""
    hashes = [prompt[: end + 1] for end in range(len(prompt))]
    return SimpleNamespace(request_id=name, block_hashes=hashes)


@pytest.fixture
def loads() -> SharedLoads:
    """With a load of the second block to the fourth."""
    loads = SharedLoads()
    loads.begin(request("a", "abcde"), BLOCK, 4 * BLOCK)
    return loads


@pytest.mark.parametrize(
    ("prompt", "kept", "shares"),
    [
        ("abcdxy", 1, True),
        ("abxy", 1, True),
        ("abcdxy", 3, True),
        ("abcdxy", 0, False),  # the first block nobody loads
        ("abcdxy", 4, False),  # nor the fifth
        ("axcd", 1, False),
        ("xbcd", 1, False),
        ("ab", 2, False),  # it has all of its blocks
    ],
)
def test_a_request_waits_for_the_load_of_the_block_that_it_lacks_first(loads, prompt, kept, shares):
    assert loads.shares(request("b", prompt), kept * BLOCK, BLOCK) is shares


def test_nobody_waits_for_a_load_that_has_ended(loads):
    loads.end("a")
    assert not loads.shares(request("b", "abcd"), BLOCK, BLOCK)
