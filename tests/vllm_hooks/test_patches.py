"""How LMCache and vLLM are patched, in processes of their own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
from support.scripts import run_in_fork, run_script

from lmcache_xpu import versions
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.versions.lmcache import in_process_module
from lmcache_xpu.vllm_hooks import patches

PLUGIN = """
import json, sys
from vllm.plugins import load_general_plugins
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
load_general_plugins()
early = [name for name in ("lmcache", "lmcache_xpu.gpu_connector.standard") if name in sys.modules]
from vllm.v1.worker.worker_base import WorkerWrapperBase
names = {
    name: KVConnectorFactory.get_connector_class_by_name(name).__module__
    for name in ("LMCacheXPUConnector", "LMCacheConnectorV1")
}
print(json.dumps({
    "early": early,
    "hooked": hasattr(WorkerWrapperBase.__getattr__, "__lmcache_xpu__"),
    "names": names,
}))
"""


def test_the_plugin_gives_our_connector_under_both_names():
    printed_values = run_script(PLUGIN)
    assert printed_values["early"] == []  # a vLLM without LMCache must not pay for it
    assert printed_values["hooked"]
    assert set(printed_values["names"].values()) == {"lmcache_xpu.stock.connector"}


def test_the_off_switch_leaves_stock_names_alone():
    printed_values = run_in_fork(PLUGIN, LMCACHE_XPU_STOCK="1")
    assert not printed_values["hooked"]
    assert printed_values["names"]["LMCacheConnectorV1"].startswith("vllm.")
    assert printed_values["names"]["LMCacheXPUConnector"] == "lmcache_xpu.stock.connector"


STATUS = """
import dataclasses, json
from lmcache_xpu.vllm_hooks import patches
from lmcache_xpu.versions.lmcache import in_process_module
print(json.dumps(dataclasses.asdict(patches.status())))
"""


def test_status_shows_each_attribute_that_is_replaced():
    """There are at most five, and one is LMCache's."""
    replaced = run_in_fork(STATUS)["patches"]
    assert len(replaced) == len(patches.PATCHES) + 1 <= 5
    assert [name for name in replaced if not name.startswith("vllm.")] == [
        "lmcache.observability.PrometheusLogger._metadata_to_labels"
    ]
    assert set(replaced.values()) == {True}
    assert [name for name in replaced if "LMCacheConnectorV1" in name]
    off = run_in_fork(STATUS, LMCACHE_XPU_STOCK="1")["patches"]
    assert len(off) == len(patches.PATCHES)


UNSERVED = """
import json
from types import SimpleNamespace
from vllm.plugins import load_general_plugins
load_general_plugins()
import torch
from lmcache.utils import EngineType
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache_xpu.versions.lmcache import in_process_module
factory = in_process_module("v1.gpu_connector")
xpu_connectors = in_process_module("v1.gpu_connector.xpu_connectors")
factory.torch_device_type = "xpu"  # a machine with one, as far as LMCache sees
factory.torch_dev = SimpleNamespace(device_count=lambda: 1, set_device=lambda number: None)
for name in ("VLLMPagedMemXPUConnectorV2", "VLLMPagedMemLayerwiseXPUConnector"):
    getattr(xpu_connectors, name).from_metadata = classmethod(lambda cls, *rest: cls)
made = []
for layerwise in (False, True):
    config = LMCacheEngineConfig.from_defaults(use_layerwise=layerwise)
    metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.uint8, (3, 2, 256, 2, 8))
    made.append(factory.CreateGPUConnector(config, metadata, EngineType.VLLM).__module__)
print(json.dumps(made))
"""


def test_a_device_that_is_not_served_keeps_lmcaches_own_classes():
    """Ours would come without any check, layout or namespace."""
    modules = run_in_fork(UNSERVED, LMCACHE_XPU_DEVICES="cpu")
    assert modules == [in_process_module("v1.gpu_connector.xpu_connectors").__name__] * 2


@pytest.mark.parametrize(("devices", "ours"), [("xpu", False), ("cpu,xpu", True)])
def test_there_vllm_gets_its_own_connector_for_lmcache(devices: str, ours: bool, monkeypatch):
    from vllm.platforms import current_platform

    from lmcache_xpu.stock import connector

    made: list[Any] = []
    monkeypatch.setattr(connector, "LMCacheConnectorV1", lambda *arguments: made.append(arguments))
    ours_begins: Any = Mock(side_effect=RuntimeError("ours"))
    monkeypatch.setattr(connector, "prepare", ours_begins)
    assert current_platform.device_type == "cpu"
    monkeypatch.setenv(patches.DEVICES_VARIABLE, devices)
    arguments: Any = ("configuration", "role", "KV cache")
    with pytest.raises(RuntimeError, match="ours") if ours else nullcontext():
        connector.LMCacheXPUConnector(*arguments)
    assert made == ([] if ours else [arguments])


WRONG_VERSION = """
import json
from lmcache_xpu import versions
versions.TESTED["lmcache"] = ("9.9.9",)
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.worker.worker_base import WorkerWrapperBase
hooked = hasattr(WorkerWrapperBase.__getattr__, "__lmcache_xpu__")
said = None
try:
    KVConnectorFactory.get_connector_class_by_name("LMCacheConnectorV1")(None, None, None)
except Exception as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps({"said": said, "hooked": hooked}))
"""


def test_an_untested_version_is_refused_by_name_and_patches_nothing():
    printed_values = run_in_fork(WRONG_VERSION)
    installed = versions.installed()
    expected = f"VersionError: found LMCache {installed.lmcache} with vLLM {installed.vllm}"
    assert printed_values["said"].startswith(expected)
    assert "9.9.9" in printed_values["said"]
    assert "LMCACHE_XPU_ALLOW_UNTESTED=1" in printed_values["said"]
    assert not printed_values["hooked"]


def test_an_untested_version_goes_on_when_asked():
    printed_values = run_in_fork(WRONG_VERSION, LMCACHE_XPU_ALLOW_UNTESTED="1")
    assert not printed_values["said"].startswith("VersionError")
    assert printed_values["hooked"]


DEFAULT = """
import importlib, json, sys
from lmcache_xpu.vllm_hooks import patches
patches.install((patches.SECOND_ENGINES,))
patch = patches.SECOND_ENGINES
print(json.dumps(patch.absent() or patch.in_place(importlib.import_module(patch.module))))
"""


def test_the_default_connector_lets_another_engine_start_in_its_process():
    """With the variable that `serve` sets for it; LMCache brings what vLLM can't look through."""
    assert run_in_fork(DEFAULT, LMCACHE_XPU_STOCK="1") is True


def test_served_devices():
    assert patches.served_devices({}) == ("xpu", "cpu")
    assert patches.served_devices({patches.DEVICES_VARIABLE: "xpu, cuda"}) == ("xpu", "cuda")
    with pytest.raises(SettingsError, match="tpus"):
        patches.served_devices({patches.DEVICES_VARIABLE: "tpus"})


def test_a_module_that_a_version_lacks_is_no_patch_that_is_missing():
    """vLLM 0.26 has no vllm.triton_utils.dispatcher."""
    mandatory = patches.Patch("no_such_module_of_vllm", "name", lambda original: original)
    optional = patches.Patch(
        "no_such_module_of_vllm", "name", lambda original: original, optional=True
    )
    assert optional.absent()
    assert not mandatory.absent()
