"""Why this package brings no device plug-in for LMCache: the smallest case (docs: lmcache-server).

LMCache has a backend for `xpu`. A second one, installed beside it, stops LMCache where such a
device is. If a test fails with a newer LMCache, a plug-in may be the better way to pin memory.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.scripts import environment

PLUGIN = """
from lmcache.v1.platform.base.device_spec import DeviceSpec


class Second(DeviceSpec):
    device_type = torch_module_name = "xpu"
    backend_name = "second"

    def is_available(self):
        return True
"""
RESOLVE = """
import torch

torch.xpu.is_available = lambda: True

from lmcache.v1.platform import resolve_device_ops

print(type(resolve_device_ops("xpu")))
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The directory that the plug-in is installed in."""
    (tmp_path / "second.py").write_text(PLUGIN)
    metadata = tmp_path / "second-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: second\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[lmcache.device_plugins]\nsecond = second:Second\n")
    return tmp_path


def resolve(plugin: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = environment([plugin], **variables)
    return subprocess.run(
        [sys.executable, "-c", RESOLVE], env=env, capture_output=True, text=True, timeout=120
    )


def test_a_second_backend_for_a_device_stops_every_lmcache_of_its_environment(plugin):
    done = resolve(plugin)
    assert done.returncode
    assert "Set LMCACHE_DEVICE_BACKEND=" in done.stderr


def test_until_a_variable_names_one(plugin):
    done = resolve(plugin, LMCACHE_DEVICE_BACKEND="second")
    assert done.returncode == 0, done.stderr
    assert "DeviceOps" in done.stdout
