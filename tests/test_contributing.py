"""The guide for a new version names every file in which a version stands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from lmcache_xpu.versions import TESTED

ROOT = Path(__file__).resolve().parents[1]
# What was measured, stored or recorded with a version keeps it: history, not a place to change.
HISTORY = (
    *("CHANGELOG.md", "CONTRIBUTING.md", "docs/results/", "docs/performance.md"),
    *("docs/concepts/disk-tier.md", "docs/guides/send-a-report.md"),
    "docs/pictures/",
    *("tests/stored_by/", "tests/harness/pages/", "tests/bases/"),
)
VERSION = re.compile(
    "|".join(rf"(?<![\d.]){re.escape(v)}(?![\d])" for v in sum(TESTED.values(), ()))
)


def test_the_guide_lists_every_file_that_names_an_accepted_version():
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    _, _, section = guide.partition("## A new version of vLLM or LMCache")
    table = re.search(r"\n\n((?: {3}\|.*\n)+)", section)
    assert table
    rows = [row.split("|")[1] for row in table.group(1).splitlines()[2:]]
    listed = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert listed == files_with_a_version()


def files_with_a_version() -> set[str]:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return {
        name
        for name in tracked
        if not name.startswith(HISTORY) and VERSION.search(text_of(ROOT / name))
    }


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except (UnicodeDecodeError, FileNotFoundError):
        return ""  # a picture; or deleted and not committed yet
