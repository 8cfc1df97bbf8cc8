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


@pytest.mark.parametrize(
    ("version", "release", "changed"),
    [
        ("0.32.0", "0.32.0", False),
        ("0.32.0+xpu", "0.32.0", False),
        ("0.26.1.dev0+g568afb3a1.d20260907.xpu", "0.26.0", True),  # of Intel's llm-scaler
        ("0.30.1rc1.dev48+gabc", "0.30.1rc1.dev48", False),
        ("0.27.0.dev0+gabc", "0.27.0.dev0", False),
    ],
)
def test_the_release_that_a_build_was_made_from(monkeypatch, version, release, changed):
    monkeypatch.setattr(versions.metadata, "version", lambda name: version)
    installed = versions.installed()
    assert installed.vllm == release
    assert installed.changed == (version if changed else None)


def test_the_installed_versions_are_the_tested_ones():
    """The environment of constraints.txt and the matrix in the code must not drift apart."""
    assert versions.installed().tested
