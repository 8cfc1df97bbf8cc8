"""What is set in LMCache's configuration: for each engine of one `serve`, for keys and copies."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from lmcache.v1.config import LMCacheEngineConfig
from support.scripts import run_in_fork, run_script

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.stock import config as lmcache_config


def applied(engine: int, extra: dict) -> LMCacheEngineConfig:
    """As the connector does, and then LMCache itself."""
    config = LMCacheEngineConfig.from_defaults()
    lmcache_config.apply(config, extra)
    lmcache_config.set_apart(config, extra, engine)
    lmcache_config.apply(config, extra)
    return config


@pytest.mark.parametrize("chosen", [{}, {"lmcache.extra_config": {"disk.path": "/d"}}])
def test_each_engine_has_a_number_of_its_own(chosen):
    for engine in range(3):
        config = applied(engine, dict(chosen))
        named = {"disk.engine": engine} if engine else {}
        assert (config.extra_config or {}) == {**chosen.get("lmcache.extra_config", {}), **named}


def test_scheduler_and_worker_in_one_process_share_what_was_set():
    extra: dict = {}
    scheduler, worker = applied(2, extra), applied(2, extra)
    assert scheduler.extra_config == worker.extra_config == {"disk.engine": 2}


def test_an_only_engine_is_left_alone():
    extra = {"lmcache.extra_config": {"disk.path": "/d"}}
    applied(0, extra)
    assert extra == {"lmcache.extra_config": {"disk.path": "/d"}}


def test_layers_that_several_devices_share_out_are_refused(monkeypatch):
    monkeypatch.setattr(lmcache_config, "load", LMCacheEngineConfig.from_defaults)
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=None),
        parallel_config=SimpleNamespace(pipeline_parallel_size=2),
    )
    with pytest.raises(SettingsError, match="pipeline"):
        lmcache_config.prepare(config)


def test_scheduler_and_worker_of_an_mla_model_may_share_a_process(monkeypatch):
    """And so LMCache's configuration, which the first of them has completed."""
    shared = LMCacheEngineConfig.from_defaults(pre_caching_hash_algorithm="sha256")
    monkeypatch.setattr(lmcache_config, "load", lambda: shared)
    parallel = {"pipeline_parallel_size": 1, "data_parallel_index": 0, "world_size": 1}
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=None),
        parallel_config=SimpleNamespace(**parallel),
        model_config=SimpleNamespace(use_mla=True),
    )
    for _ in ("worker", "scheduler"):
        assert lmcache_config.prepare(config).extra_config["save_only_first_rank"] is False


KEYS = """
import json
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache_xpu.versions.lmcache import in_process_module
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.stock.config import make_hash_safe
config = LMCacheEngineConfig.from_defaults(chunk_size=4)
metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.uint8, (3, 2, 256, 2, 8))
def keys():
    database = in_process_module("v1.token_database").ChunkedTokenDatabase(config, metadata)
    return [key.to_string() for _, _, key in database.process_tokens(list(range(8)))]
stock = keys()
try:
    make_hash_safe(config, {"lmcache.pre_caching_hash_algorithm": "builtin"})
    refused = None
except SettingsError as error:
    refused = str(error)
make_hash_safe(config, {})
print(json.dumps({"stock": stock, "ours": keys(), "refused": refused,
                  "algorithm": config.pre_caching_hash_algorithm}))
"""


@pytest.fixture(scope="module")
def keys() -> dict:
    return run_in_fork(KEYS)


@pytest.mark.xfail(strict=True, reason="known limit: LMCache keeps 64 bits of a chunk's hash")
def test_names_of_chunks_are_too_long_to_meet_by_chance(keys: dict):
    """known-limits.md: two prompts whose chunks have equal names would share them."""
    names = [key.split("@")[3] for key in keys["ours"]]
    assert min(len(name) * 4 for name in names) > 64, names


def test_keys_are_the_same_in_every_process(keys: dict):
    other = run_script(KEYS)
    assert keys["stock"] != other["stock"]  # LMCache's default without a fixed seed: never a hit
    assert keys["algorithm"] == "sha256"
    assert len(keys["ours"]) == 2
    assert keys["ours"] == other["ours"]
    assert "nothing would ever be found" in keys["refused"]


def test_a_fixed_seed_leaves_lmcache_s_choice_alone():
    printed_values = run_script(KEYS, PYTHONHASHSEED="0")
    assert (printed_values["algorithm"], printed_values["refused"]) == ("builtin", None)
    assert printed_values["ours"] == printed_values["stock"]


COPIES = """
import json
from lmcache.v1.config import LMCacheEngineConfig
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.stock.config import apply, keep_own_copies
def read(workers, **extra):
    config = LMCacheEngineConfig.from_defaults()
    settings = {"lmcache.extra_config": extra} if extra else {}
    apply(config, settings)
    keep_own_copies(config, settings, workers=workers)
    apply(config, settings)  # LMCache does so itself, later
    return [
        config.get_extra_config_value("save_only_first_rank", True),
        config.get_extra_config_value("disk.path", None),
        config.get_lookup_server_worker_ids(True, workers),
        config.get_extra_config_value("remote_enable_mla_worker_id_as0", True),
    ]
try:
    read(2, save_only_first_rank=True)
    refused = None
except SettingsError as error:
    refused = str(error)
print(json.dumps({
    "one": read(1), "two": read(2), "more": read(2, **{"disk.path": "/d"}), "refused": refused,
}))
"""


def test_each_worker_of_an_mla_model_keeps_its_own_copy():
    """LMCache's default is one copy, of which the other workers' connectors could make nothing."""
    pytest.importorskip("vllm")
    printed_values = run_in_fork(COPIES)
    assert printed_values["one"] == [False, None, [0], False]
    # What not all of them have was not found; and other layers are not the first worker's.
    assert printed_values["two"] == [False, None, [0, 1], False]
    assert printed_values["more"] == [False, "/d", [0, 1], False]
    assert "save_only_first_rank true with MLA on 2 devices" in printed_values["refused"]
