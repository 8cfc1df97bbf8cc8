"""Module paths that users' settings hold, and what they name."""

from __future__ import annotations

import importlib

import pytest

pytest.importorskip("vllm")


@pytest.mark.parametrize(
    ("path", "name", "target"),
    [
        ("vllm_connector", "LMCacheXPUConnector", "stock.connector.LMCacheXPUConnector"),
        (
            "vllm_connector",
            "LMCacheXPUServerConnector",
            "connector.connector.LMCacheXPUServerConnector",
        ),
        ("vllm_connector", "LMCacheXPUScheduler", "vllm_hooks.scheduler.LMCacheXPUScheduler"),
    ],
)
def test_a_path_of_users_names_the_class(path: str, name: str, target: str):
    module, _, attribute = target.rpartition(".")
    owner = importlib.import_module(f"lmcache_xpu.{module}")
    alias = importlib.import_module(f"lmcache_xpu.{path}")
    assert getattr(alias, name) is getattr(owner, attribute)
