"""Which versions are tested, and what is said of others."""

from __future__ import annotations

import pytest

from lmcache_xpu import versions
from lmcache_xpu.errors import VersionError


def test_other_versions_than_the_tested_ones_are_refused_unless_allowed():
    tested = versions.Versions(lmcache="0.5.6", vllm="0.32.0", torch="2.13.0")
    assert tested.tested
    versions.check(tested, {})
    for other in (
        versions.Versions(lmcache="0.5.5", vllm="0.32.0", torch=None),
        versions.Versions(lmcache="0.5.6", vllm=None, torch=None),
    ):
        assert not other.tested
        with pytest.raises(VersionError, match=f"{other.lmcache} with vLLM {other.vllm}"):
            versions.check(other, {})
        with pytest.raises(VersionError):
            versions.check(other, {versions.UNTESTED_VARIABLE: "0"})
        versions.check(other, {versions.UNTESTED_VARIABLE: "1"})


def test_the_installed_versions_are_the_tested_ones():
    """The environment of constraints.txt and the matrix in the code must not drift apart."""
    assert versions.installed().tested
