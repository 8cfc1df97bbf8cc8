"""What the chart's tests share."""

from __future__ import annotations

import sys

import pytest
from chart import CI_FILES, ROOT, render_file

sys.path.insert(0, str(ROOT / "helm"))  # chart_schema and chart_readme


@pytest.fixture(scope="session")
def shapes():
    """Every file of ci/, rendered."""
    return {path.name.removesuffix("-values.yaml"): render_file(path) for path in CI_FILES}
