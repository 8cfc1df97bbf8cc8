"""The model that most engines here run, made once for a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_xpu.harness.random_model import EXACT, make_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def model(directory: Path) -> Path:
    return make_model(EXACT, directory)
