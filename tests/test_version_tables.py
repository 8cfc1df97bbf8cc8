"""What is accepted was run, and the pages say so as the results have it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmcache_xpu import versions

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import matrix  # noqa: E402  # no package
import version_tables  # noqa: E402  # no package


@pytest.mark.parametrize("name", version_tables.PARTS)
def test_a_page_is_what_the_results_make(name):
    text = (ROOT / name).read_text()
    part = version_tables.PARTS[name]()
    assert version_tables.renewed(text, part) == text, "run `make docs`"


def test_what_is_accepted_passed_in_the_matrix_or_runs_in_ci():
    results = matrix.results()
    passed = {result.vllm for result in results if result.passed and not result.failed}
    in_ci = versions.installed().vllm
    assert set(versions.TESTED["vllm"]) == passed | {in_ci}
    assert {result.lmcache for result in results} <= set(versions.TESTED["lmcache"])
    assert {result.tests for result in results} <= set(version_tables.SELECTIONS)
    assert all(result.passed and not result.failed for result in results)
