"""The project that `make up` is tried in."""

from __future__ import annotations

import pytest
from support.docker_project import Project


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "clone")
