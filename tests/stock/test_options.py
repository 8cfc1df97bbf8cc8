"""LMCache's options: the page has what is served, and others are refused, however they come."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.scripts import run_in_fork

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.stock.config import SERVED, SERVED_EXTRA, check_features

pytest.importorskip("vllm")
from lmcache.v1 import config as lmcache_options
from lmcache.v1.config import LMCacheEngineConfig

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = lmcache_options._CONFIG_DEFINITIONS
PAGE = (ROOT / "docs/reference/lmcache-options.md").read_text()


def listed(heading):
    """Names in the table below a heading of the page."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [name for cell in cells for name in re.findall("`([^`]+)`", cell)]


def other_than(default, kind):
    """A value of an option's type that is not its default."""
    if kind is bool or isinstance(default, bool):
        return not default
    kinds = str(kind)
    if "list" in kinds:
        return [1] if "int" in kinds else ["a"]
    return "a" if "str" in kinds else 1.5 if "float" in kinds else 7


def test_the_page_has_what_is_served_and_lmcache_has_it_too():
    assert sorted(listed("Options")) == sorted(SERVED)
    assert sorted(listed("In `extra_config`")) == sorted(SERVED_EXTRA)
    assert set(DEFINITIONS) >= SERVED


def test_what_the_page_says_is_refused_is_an_option():
    assert set(listed("Why others are refused")) <= set(DEFINITIONS) - SERVED


def test_what_shows_a_served_option_is_there():
    tests = ROOT / "tests"
    files = {path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}
    named = set(re.findall(r"[\w/]*\btest_\w+\.py\b", PAGE))
    assert named
    assert named <= files


@pytest.mark.parametrize("name", sorted(set(DEFINITIONS) - SERVED))
def test_another_option_is_refused_unless_it_has_its_default(name):
    config = LMCacheEngineConfig.from_defaults()
    check_features(config)
    setattr(config, name, other_than(DEFINITIONS[name]["default"], DEFINITIONS[name]["type"]))
    with pytest.raises(SettingsError, match=rf"LMCache {name} .*; expected .*, its default\. \w"):
        check_features(config)


def test_another_key_of_extra_config_is_refused_and_a_plugin_s_is_not():
    own = {"storage_plugin.mine.path": "/a", "xpu.staging_mib": 7, "disk.path": "/b"}
    off = {"enable_nixl_storage": False}
    check_features(LMCacheEngineConfig.from_defaults(extra_config=own | off))
    with pytest.raises(SettingsError, match="extra_config dax_path True"):
        check_features(LMCacheEngineConfig.from_defaults(extra_config={"dax_path": True}))


@pytest.mark.parametrize(
    "name", ["skip_last_n_tokens", "lmcache.max_tokens_per_load", "lmcache.chunk_sise"]
)
def test_an_unknown_key_of_vllm_s_is_refused(name):
    config = LMCacheEngineConfig.from_defaults()
    check_features(config, {"lmcache.chunk_size": 256, "mine": 1, "skip_last_n_tokens": 0})
    with pytest.raises(SettingsError, match=re.escape(name)):
        check_features(config, {name: 1})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_local_cpu_size": 0}, "max_local_cpu_size 0"),
        ({"use_layerwise": True, "cache_policy": "LFU"}, "use_layerwise with cache_policy 'LFU'"),
    ],
)
def test_values_that_can_not_be_served_are_refused(options, sentence):
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        check_features(LMCacheEngineConfig.from_defaults(**options))


# Makes a connector in each way in which options come; prints what it said, and what it started.
MAKE = """
import json, os, sys, threading
from types import SimpleNamespace

import lmcache.integration.vllm.utils as utils
from vllm.platforms import current_platform

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.stock.connector import LMCacheXPUConnector

def make(extra):
    utils._config_instance = None
    before = set(threading.enumerate())
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    try:
        LMCacheXPUConnector(SimpleNamespace(kv_transfer_config=transfer), None, None)
    except SettingsError as error:
        return [str(error), [str(thread) for thread in set(threading.enumerate()) - before]]

ways = {"vllm": make({"lmcache.enable_async_loading": True})}
os.environ["LMCACHE_ENABLE_ASYNC_LOADING"] = "true"
ways["variable"] = make({})
del os.environ["LMCACHE_ENABLE_ASYNC_LOADING"]
os.environ["LMCACHE_EXTRA_CONFIG"] = '{"audit_backend_enabled": true}'
ways["extra_config"] = make(None)
del os.environ["LMCACHE_EXTRA_CONFIG"]
os.environ["LMCACHE_CONFIG_FILE"] = sys.argv[1] if len(sys.argv) > 1 else os.environ["FILE"]
ways["file"] = make({})
del os.environ["LMCACHE_CONFIG_FILE"]
os.environ["LMCACHE_ENABLE_P2P"] = "true"
ways["lmcache"] = make({})
print(json.dumps(ways))
"""


def test_it_is_refused_however_it_comes_before_anything_starts(tmp_path):
    (tmp_path / "lmcache.yaml").write_text("enable_async_loading: true\n")
    file = str(tmp_path / "lmcache.yaml")
    ways = run_in_fork(MAKE, FILE=file, LMCACHE_XPU_DEVICES="cpu,cuda,xpu")
    for way in ("vllm", "variable", "file"):
        said, started = ways[way]
        assert said.startswith(
            "found LMCache enable_async_loading True; expected False, its default. "
        )
        assert started == []
    assert ways["extra_config"][0].startswith("found LMCache extra_config audit_backend")
    assert ways["lmcache"][0].startswith("found an LMCache configuration that LMCache refuses")


# Why LMCache's own tiers are refused.
FLIPPED = """
import json, os, time
from pathlib import Path
import torch
from support.storage import CHUNK, SHAPE, TOKENS, content, make_key, make_metadata
from lmcache.v1.config import LMCacheEngineConfig
from lmcache_xpu.versions.lmcache import in_process_module
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.storage_manager import StorageManager

place = Path(os.environ["PLACE"])
config = LMCacheEngineConfig.from_defaults(
    chunk_size=TOKENS, max_local_cpu_size=64 * CHUNK / 2**30, **json.loads(os.environ["CONFIG"])
)
EventManager = in_process_module("v1.event_manager").EventManager
PinMonitor = in_process_module("v1.pin_monitor").PinMonitor
PinMonitor.GetOrCreate(config)
manager = StorageManager(config, make_metadata(), EventManager())
obj = manager.allocate(SHAPE, torch.bfloat16, fmt=MemoryFormat.KV_2LTD)
obj.tensor.copy_(content(1))
manager.batched_put([make_key(1)], [obj])
deadline = time.monotonic() + 20
while not (files := [f for f in place.rglob("*") if f.is_file() and f.stat().st_size >= CHUNK]):
    assert time.monotonic() < deadline, "nothing was stored"
    time.sleep(0.05)
time.sleep(0.5)
value = bytearray(files[0].read_bytes())
value[-1] ^= 0x40
files[0].write_bytes(value)
[backend] = [each for name, each in manager.storage_backends.items() if name != "LocalCPUBackend"]
loaded = backend.get_blocking(make_key(1))
wrong = None if loaded is None else not torch.equal(loaded.tensor, content(1))
print(json.dumps({"served": loaded is not None, "wrong": wrong}), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("way", ["local_disk", "remote_url"])
def test_lmcaches_own_tiers_serve_a_flipped_bit(tmp_path, way):
    """Why lmcache-options.md refuses them; when it fails, look at that again."""
    config = {
        "local_disk": {"local_disk": f"{tmp_path}/", "max_local_disk_size": 1},
        "remote_url": {"remote_url": f"fs://host:0{tmp_path}/"},
    }[way]
    printed_values = run_in_fork(
        FLIPPED,
        PLACE=str(tmp_path),
        CONFIG=json.dumps(config),
    )
    assert printed_values == {"served": True, "wrong": True}
