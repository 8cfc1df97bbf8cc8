"""Engines that come and go in one process leave nothing, and a process ends by itself.

LMCache's engine, servers, sockets and tiers are real here, around our connector; vLLM is not.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from support.scripts import run_script

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.stock.worker import StockWorker

PROCESS = """
import gc, json, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
import psutil, torch
from support import storage
from support.caches import Spec, build
from lmcache.integration.vllm import utils
from lmcache_xpu.versions.lmcache import LMCacheEngineBuilder, in_process_module
from lmcache_xpu.stock.ending import end_lmcache, end_with_process
from lmcache_xpu.stock.gpu_connectors import StandardConnector
from lmcache_xpu.stock.unfilled_blocks import UnfilledBlocks

LookupClientFactory = in_process_module("v1.lookup_client.factory").LookupClientFactory
tokens = list(range(64))
cache = build(Spec("LBHNC", layers=2, blocks=8, tokens=16, dim=64))
POOL_CHUNKS = 4096  # 64 MiB


class Engine:
    def __init__(self, number, disk):
        config = storage.make_config(disk, pool_chunks=POOL_CHUNKS)
        utils._config_instance = config
        metadata = storage.make_metadata()
        metadata.engine_id = f"engine {number}"
        metadata.kv_connector_extra_config = {}
        connector = StandardConnector.from_metadata(metadata, device="cpu")
        connector.unfilled = UnfilledBlocks(16)
        engine = LMCacheEngineBuilder.get_or_create(
            "vllm-instance", config, metadata, connector,
            lambda tensor, src: tensor, lambda value, src: value,
        )
        engine.post_init()
        connector.initialize_kvcaches_ptr(kvcaches=cache.engine)
        client = LookupClientFactory.create_lookup_client(config, metadata, None)
        self.lmcache = SimpleNamespace(
            config=config,
            _manager=SimpleNamespace(health_monitor=None),
            lookup_server=LookupClientFactory.create_lookup_server(engine, metadata),
            lookup_client=client,
            lmcache_engine=engine,
        )
        self.ended = False
        self.engine = engine
        end_with_process(self)
        self.found = client.lookup(tokens, lookup_id="before")
        engine.store(tokens, kvcaches=cache.engine, slot_mapping=torch.arange(64), offset=0)
        for _ in range(200):
            client.reqs_status.clear()
            self.stored = client.lookup(tokens, lookup_id="after")
            engine.lookup_unpin("after")
            if self.stored == 64:
                break
            threading.Event().wait(0.01)
        self.stored = min(self.stored, client.lookup(tokens, lookup_id="load"))
        loaded = engine.retrieve(
            tokens, torch.ones(64, dtype=torch.bool), kvcaches=cache.engine,
            slot_mapping=torch.arange(64), vllm_cached_tokens=0, req_id="load",
        )
        engine.lookup_unpin("load")
        self.stored = min(self.stored, int(loaded.sum()))

    def shutdown(self):
        if not self.ended:  # as the connector does
            self.ended = True
            end_lmcache(self.lmcache)

    def fill(self):
        self.engine.storage_manager.local_cpu_backend.memory_allocator.buffer.fill_(1)
        return state()["mib"]


def state():
    gc.collect()
    process = psutil.Process()
    return {
        "mib": process.memory_info().rss / 2**20,
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "sockets": len(process.net_connections("all")),
        "engines": len(LMCacheEngineBuilder._instances),
    }


disk, rounds = Path(sys.argv[1] if len(sys.argv) > 1 else DISK), ROUNDS
states, counts, filled = [], [], []
for number in range(rounds + 1):
    engine = Engine(number, disk)
    counts.append((engine.found, engine.stored))
    filled.append(engine.fill())
    engine.shutdown()
    if number == 0:
        engine.shutdown()  # as when a process ends, too
    del engine
    # A socket's thread and its files may take a moment longer than the socket.
    end = time.monotonic() + 5
    while time.monotonic() < end and any(
        (now := state())[what] > (states or [now])[0][what]
        for what in ("threads", "files", "sockets")
    ):
        time.sleep(0.05)
    states.append(now)
kept = Engine("that is left", disk)
print(json.dumps({"states": states, "counts": counts, "filled": filled}))
"""


def test_five_engines_leave_memory_threads_files_and_sockets_as_they_were(tmp_path):
    """And the last one, which nobody ends, does not keep the process from ending."""
    script = PROCESS.replace("DISK", repr(str(tmp_path / "kv"))).replace("ROUNDS", "5")
    result = run_script(script, timeout=100, PYTHONHASHSEED="0")
    first, *rest = result["states"]
    assert len(rest) == 5
    for state, filled in zip(rest, result["filled"][1:], strict=True):
        for what in ("threads", "files", "sockets"):
            assert state[what] <= first[what], (what, result["states"])
        assert state["engines"] == 0
        assert filled - state["mib"] > 48, "a pool has 64 MiB"
        assert state["mib"] < first["mib"] + 16
    assert result["counts"][0] == [0, 64]
    assert result["counts"][1:] == [[64, 64]] * 5, "the disk's directory was free each time"


def test_a_second_engine_in_the_process_of_one_that_runs_is_refused():
    worker = object.__new__(StockWorker)
    worker._lmcache = SimpleNamespace(kv_caches={"layer": None})
    with pytest.raises(SettingsError, match="a second engine in the process"):
        worker.register({})
