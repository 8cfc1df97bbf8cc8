"""The disk tier inside LMCache's own StorageManager, CPU pool, keys and memory objects."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from dataclasses import replace

import pytest
import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.pin_monitor import PinMonitor
from lmcache.v1.storage_backend.storage_manager import StorageManager

from lmcache_xpu.disk import chunk_store
from lmcache_xpu.disk.chunk_layout import ChunkLayout
from lmcache_xpu.disk.settings import DiskSettings, check_hash
from lmcache_xpu.disk.tier import DiskTier
from lmcache_xpu.errors import SettingsError

LAYERS, TOKENS, HEADS, DIM = 2, 16, 2, 64
SHAPE = torch.Size([2, LAYERS, TOKENS, HEADS * DIM])  # 16 KiB in bfloat16
CHUNK = SHAPE.numel() * 2
POOL_CHUNKS = 64  # 1 MiB


def make_config(path, *, chunks=1000, pool_chunks=POOL_CHUNKS, hot=False, **extra):
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=TOKENS,
        local_cpu=hot,
        max_local_cpu_size=pool_chunks * CHUNK / 2**30,
        pre_caching_hash_algorithm="sha256_cbor",
        storage_plugins=["disk"],
        extra_config={
            "storage_plugin.disk.module_path": "lmcache_xpu.disk.tier",
            "storage_plugin.disk.class_name": "DiskTier",
            "disk.path": str(path),
            "disk.gib": chunks * (CHUNK + 4096) / 2**30,
            **extra,
        },
    )
    PinMonitor.GetOrCreate(config)
    return config


def make_metadata(worker=0, world=1):
    return LMCacheMetadata(
        model_name="a/model",
        world_size=world,
        local_world_size=world,
        worker_id=worker,
        local_worker_id=worker,
        kv_dtype=torch.bfloat16,
        kv_shape=(LAYERS, 2, TOKENS, HEADS, DIM),
        role="worker",
        chunk_size=TOKENS,
    )


def make_key(number, **changes):
    fields = {
        "model_name": "a/model",
        "world_size": 1,
        "worker_id": 0,
        "chunk_hash": number,
        "dtype": torch.bfloat16,
    }
    return CacheEngineKey(**(fields | changes))


class Engine:
    """What LMCacheEngine does with its storage, on a real StorageManager."""

    def __init__(self, path, metadata=None, **settings):
        self.config = make_config(path, **settings)
        self.manager = StorageManager(self.config, metadata or make_metadata(), EventManager())
        self.pool = self.manager.local_cpu_backend
        self.tier = self.manager.storage_backends.get("disk")
        # All that was ever allocated: a lost reference would else be mended by the collector.
        self.lent = []
        self.pool.allocate = self._remember(self.pool.allocate)
        self.pool.batched_allocate = self._remember(self.pool.batched_allocate)

    def _remember(self, allocate):
        def remembering(*args, **kwargs):
            found = allocate(*args, **kwargs)
            self.lent += found if isinstance(found, list) else [found] if found else []
            return found

        return remembering

    def close(self):
        if not self.manager.loop.is_closed():
            self.manager.close()
            self.manager.loop.close()  # LMCache leaves that to the end of the process

    def allocate(self, content, shape=SHAPE, fmt=MemoryFormat.KV_2LTD):
        obj = self.manager.allocate(shape, torch.bfloat16, fmt=fmt, busy_loop=False)
        obj.tensor.copy_(content)
        return obj

    def store(self, numbers, wait=True):
        keys = [make_key(n) for n in numbers]
        self.manager.batched_put(keys, [self.allocate(content(n)) for n in numbers])
        if wait:
            self.settle()
        return keys

    def settle(self):
        deadline = time.monotonic() + 10
        while self.tier._writes._held:
            assert time.monotonic() < deadline, "a write did not end"
            time.sleep(0.002)

    def load(self, numbers):
        """Which chunks come back, their content checked, references dropped."""
        objs = self.manager.batched_get([make_key(n) for n in numbers], location="disk")
        loaded = []
        for number, obj in zip(numbers, objs, strict=True):
            if obj is not None:
                assert torch.equal(obj.tensor, content(number))
                assert obj.meta.fmt is MemoryFormat.KV_2LTD
                loaded.append(number)
                obj.ref_count_down()
        return loaded

    @property
    def pool_in_use(self):
        return self.pool.memory_allocator.pin_allocator.total_allocated_size

    def file(self, number):
        store = self.tier._store
        return store._path(self.tier._name(make_key(number)))


def content(number, shape=SHAPE):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


@pytest.fixture
def engines(tmp_path):
    opened = []

    def start(**settings):
        engine = Engine(settings.pop("path", tmp_path / "kv"), **settings)
        opened.append(engine)
        return engine

    yield start
    for engine in opened:
        engine.close()
        assert engine.pool_in_use == 0  # every reference and pin came back
        assert {(obj.get_ref_count(), obj.is_pinned) for obj in engine.lent} <= {(0, False)}


@pytest.fixture
def log():
    """The tier's log lines."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.lmcache_xpu.disk")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


# Round trip


def test_lmcache_creates_the_tier_and_gets_its_chunks_back(engines):
    engine = engines()
    assert isinstance(engine.tier, DiskTier)
    engine.store(range(5))
    assert engine.load(range(5)) == [0, 1, 2, 3, 4]
    assert engine.pool_in_use == 0
    counters = engine.tier.counters
    assert (counters.stored, counters.hits, counters.bytes) == (5, 5, 5 * (CHUNK + 4096))


def test_chunks_are_found_after_a_restart(engines):
    first = engines()
    first.store(range(5))
    first.close()
    second = engines()
    assert second.manager.batched_contains([make_key(n) for n in range(6)])[0] == 5
    assert second.load(range(5)) == [0, 1, 2, 3, 4]


def test_loaded_chunks_go_to_the_hot_cache(engines):
    engine = engines(hot=True)
    engine.store(range(3))
    engine.pool.clear()
    assert engine.manager.contains(make_key(0)) == "disk"
    assert engine.load(range(3)) == [0, 1, 2]
    assert engine.manager.contains(make_key(0)) == "LocalCPUBackend"
    assert engine.pool_in_use == 3 * CHUNK
    assert all(engine.pool.hot_cache[make_key(n)].get_ref_count() == 1 for n in range(3))
    engine.pool.clear()


@pytest.mark.parametrize(
    ("shape", "fmt"),
    [
        (SHAPE, MemoryFormat.KV_2LTD),
        (torch.Size([2, LAYERS, 5, HEADS * DIM]), MemoryFormat.KV_2LTD),  # not a full chunk
        (torch.Size([1, LAYERS, TOKENS, 72]), MemoryFormat.KV_MLA_FMT),
        (torch.Size([TOKENS, 2, HEADS * DIM]), MemoryFormat.KV_T2D),
    ],
)
def test_shape_and_format_survive(engines, shape, fmt):
    first = engines()
    obj = first.allocate(content(1, shape), shape, fmt)
    first.manager.batched_put([make_key(1)], [obj])
    first.settle()
    first.close()
    loaded = engines().tier.get_blocking(make_key(1))
    assert torch.equal(loaded.tensor, content(1, shape))
    assert loaded.meta.fmt is fmt
    assert loaded.get_num_tokens() == shape[fmt.token_dim()]
    assert loaded.get_ref_count() == 1
    loaded.ref_count_down()


@pytest.mark.parametrize(
    "other",
    [
        make_key(0, model_name="another/model"),
        make_key(0, world_size=2),
        make_key(0, worker_id=1),
        make_key(0, dtype=torch.float16),
        make_key(0, request_configs={"lmcache.tag.user": "b"}),
        make_key(0).get_first_layer(),
    ],
)
def test_a_key_is_all_of_its_parts(engines, other):
    engine = engines()
    engine.store([0])
    assert engine.tier.contains(make_key(0))
    assert not engine.tier.contains(other)


def test_tags_that_lmcache_writes_alike_are_told_apart(engines):
    engine = engines()
    one = make_key(0, request_configs={"lmcache.tag.a": "b@c%d"})
    two = make_key(0, request_configs={"lmcache.tag.a": "b", "lmcache.tag.c": "d"})
    assert one.to_string() == two.to_string()
    engine.manager.batched_put([one], [engine.allocate(content(0))])
    engine.settle()
    assert engine.tier.contains(one)
    assert not engine.tier.contains(two)


def test_another_shape_of_the_model_does_not_find_the_chunks(engines):
    first = engines()
    first.store([0])
    first.close()
    deeper = replace(make_metadata(), kv_shape=(LAYERS + 1, 2, TOKENS, HEADS, DIM))
    assert engines(metadata=deeper).load([0]) == []


# Misses and damage


def test_none_from_the_first_miss_on(engines):
    engine = engines()
    engine.store([0, 1, 3])
    objs = engine.manager.batched_get([make_key(n) for n in range(4)], location="disk")
    assert [obj is not None for obj in objs] == [True, True, False, False]
    for obj in objs[:2]:
        obj.ref_count_down()
    assert engine.tier.counters.misses == 2
    assert engine.tier.get_blocking(make_key(9)) is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "foreign", "delete", "swap"])
def test_damage_is_a_miss_and_never_wrong_bytes(engines, damage):
    engine = engines()
    engine.store(range(4))
    path = engine.file(2)
    raw = bytearray(path.read_bytes())
    match damage:
        case "truncate":
            os.truncate(path, 6000)
        case "flip":
            raw[9000] ^= 4
            path.write_bytes(raw)
        case "foreign":
            path.write_bytes(b"something else")
        case "delete":
            path.unlink()
        case "swap":
            path.write_bytes(engine.file(3).read_bytes())
    assert engine.load(range(4)) == [0, 1]
    assert engine.pool_in_use == 0
    assert not engine.tier.contains(make_key(2))
    engine.store([2])  # and it can be stored anew
    assert engine.load(range(4)) == [0, 1, 2, 3]


def test_a_lost_chunk_is_reported_until_its_lookup_ends(engines):
    engine = engines()
    key = engine.store([0])[0]
    assert engine.manager.batched_contains([key], pin=True)[0] == 1
    engine.file(0).unlink()
    assert engine.load([0]) == []
    assert engine.tier.contains(key)  # LMCache asks again before it loads
    assert not engine.tier.contains(key, pin=True)  # a new lookup learns the truth
    engine.manager.batched_unpin([key], ["disk"])
    assert not engine.tier.contains(key)


def test_a_pool_smaller_than_the_request(engines, log):
    first = engines()
    first.store(range(8))
    first.close()
    engine = engines(pool_chunks=5)
    objs = engine.manager.batched_get([make_key(n) for n in range(8)], location="disk")
    assert [obj is not None for obj in objs] == [True] * 5 + [False] * 3
    for obj in objs[:5]:
        obj.ref_count_down()
    assert [line for line in log if "CPU pool" in line] != []


# Size and pins


def test_the_size_holds_and_counts_earlier_runs(engines, tmp_path):
    first = engines(chunks=10)
    first.store(range(10))
    first.close()
    engine = engines(chunks=10)
    engine.store(range(10, 14))
    files = list((tmp_path / "kv" / "kv-worker-0").glob("*.lmxkv"))
    assert len(files) == 10
    assert engine.tier.counters.evicted == 4
    # Of one batch the end goes first: it is of no use without the beginning.
    assert engine.load(range(6)) == [0, 1, 2, 3, 4, 5]
    assert [n for n in range(10) if engine.tier.contains(make_key(n))] == [0, 1, 2, 3, 4, 5]


def test_looked_up_chunks_are_not_evicted(engines, log):
    engine = engines(chunks=3)
    keys = engine.store(range(3))
    assert engine.manager.batched_contains(keys, pin=True) == (3, {"disk": keys})
    engine.store([7])
    assert not engine.tier.contains(make_key(7))
    assert engine.load(range(3)) == [0, 1, 2]
    assert [line for line in log if "no room" in line] != []
    engine.manager.batched_unpin(keys, ["disk"])
    engine.store([7])
    assert engine.tier.contains(make_key(7))
    assert engine.tier._store._index._pins == {}


def test_pin_and_unpin(engines):
    engine = engines()
    key = engine.store([0])[0]
    assert engine.tier.pin(key)
    assert engine.tier.unpin(key)
    assert not engine.tier.unpin(key)
    assert not engine.tier.pin(make_key(1))
    assert not engine.tier.unpin(make_key(1))


def test_remove_and_clear(engines):
    engine = engines()
    keys = engine.store(range(4))
    assert engine.manager.remove(keys[0], ["disk"]) == 1
    assert engine.manager.remove(keys[0], ["disk"]) == 0
    engine.tier.pin(keys[1])
    assert engine.manager.clear(["disk"]) == 2 * TOKENS
    assert engine.load([1]) == [1]


# Writes


def refuse(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_the_chunk_and_one_line(engines, log, monkeypatch):
    engine = engines()
    engine.store([0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        engine.store(range(1, 6))
    assert engine.pool_in_use == 0
    assert engine.load([0]) == [0]
    assert engine.load([1]) == []
    assert len([line for line in log if "No space left" in line]) == 1
    assert engine.tier.counters.dropped == 5
    engine.store(range(1, 6))  # room again
    assert engine.load(range(6)) == [0, 1, 2, 3, 4, 5]


def test_queued_writes_hold_at_most_half_the_pool(engines, log, monkeypatch):
    engine = engines(pool_chunks=20, **{"disk.threads": 1})
    go = threading.Event()
    write = chunk_store.write_chunk
    monkeypatch.setattr(chunk_store, "write_chunk", lambda *a: (go.wait(10), write(*a)))
    engine.store(range(14), wait=False)
    assert engine.pool_in_use == 10 * CHUNK
    assert engine.tier.exists_in_put_tasks(make_key(0))
    assert not engine.tier.contains(make_key(0))
    engine.store([0, 20], wait=False)  # 0 is on its way already
    assert engine.pool_in_use == 10 * CHUNK
    go.set()
    engine.settle()
    assert engine.pool_in_use == 0
    assert engine.load(range(14)) == list(range(10))
    assert engine.tier.counters.dropped == 5
    assert [line for line in log if "slower" in line] != []


def test_a_stored_chunk_is_not_written_again(engines):
    engine = engines()
    engine.store([0])
    engine.store([0])
    assert engine.tier.counters.stored == 1


def test_completion_is_reported_for_what_was_stored(engines, monkeypatch):
    engine = engines()
    done = []
    objs = [engine.allocate(content(n)) for n in range(2)]

    def callback(key):
        done.append(key)
        raise RuntimeError("not our problem")

    monkeypatch.setattr(logging.getLogger("vllm.lmcache_xpu.disk"), "disabled", True)
    futures = engine.tier.batched_submit_put_task(
        [make_key(0), make_key(1)], objs, on_complete_callback=callback
    )
    for future in futures:
        future.result(10)
    assert sorted(key.chunk_hash for key in done) == [0, 1]
    assert [obj.get_ref_count() for obj in objs] == [1, 1]
    for obj in objs:
        obj.ref_count_down()


def test_serialised_and_blended_chunks_are_not_stored(engines):
    engine = engines()
    obj = engine.allocate(content(0))
    obj.metadata.cached_positions = torch.arange(TOKENS)
    engine.manager.batched_put([make_key(0)], [obj])
    engine.settle()
    assert not engine.tier.contains(make_key(0))
    assert engine.tier.counters.dropped == 1


def test_close_ends_the_writes_before_the_pool_is_freed(engines, monkeypatch):
    """LMCache closes the pool first; a write after that would store freed memory as valid."""
    engine = engines()
    freed_at_write = []
    write = chunk_store.write_chunk

    def slow(*args):
        time.sleep(0.05)
        freed_at_write.append(engine.pool.memory_allocator._unregistered)
        write(*args)

    monkeypatch.setattr(chunk_store, "write_chunk", slow)
    engine.store(range(6), wait=False)
    engine.close()
    assert freed_at_write == [False] * 6
    assert engines().load(range(6)) == list(range(6))


def test_what_cannot_be_written_in_time_is_let_go(engines, monkeypatch):
    engine = engines(**{"disk.threads": 1})
    monkeypatch.setattr("lmcache_xpu.disk.writer._DRAIN_SECONDS", 0.1)
    write = chunk_store.write_chunk
    monkeypatch.setattr(chunk_store, "write_chunk", lambda *a: (time.sleep(0.3), write(*a)))
    engine.store(range(6), wait=False)
    engine.close()
    assert engine.pool_in_use == 0
    assert engine.tier.counters.stored == 1
    assert engine.tier.counters.dropped == 5


def test_after_close_nothing_is_stored_or_found(engines):
    engine = engines()
    engine.store([0])
    obj = engine.allocate(content(1))
    engine.tier.close()
    engine.tier.close()
    assert engine.tier.batched_submit_put_task([make_key(1)], [obj]) == []
    obj.ref_count_down()
    assert engine.tier.batched_get_blocking([make_key(0), make_key(1)]) == [None, None]


# Layerwise and asynchronous loads


LAYER_SHAPE = torch.Size([TOKENS, 2, HEADS * DIM])


def store_layers(engine, numbers):
    for layer in range(LAYERS):
        keys = [make_key(n).split_layers(LAYERS)[layer] for n in numbers]
        objs = engine.manager.batched_allocate(
            LAYER_SHAPE, torch.bfloat16, len(numbers), fmt=MemoryFormat.KV_T2D, busy_loop=False
        )
        for number, obj in zip(numbers, objs, strict=True):
            obj.tensor.copy_(content(100 * layer + number, LAYER_SHAPE))
        engine.manager.batched_put(keys, objs)
    engine.settle()


def layer_major(numbers):
    return [[make_key(n).split_layers(LAYERS)[layer] for n in numbers] for layer in range(LAYERS)]


def load_layers(engine, numbers):
    """As `LMCacheEngine.retrieve_layer`: what came of each layer, references and pins dropped."""
    handed_over, counts = [], []
    for task in engine.manager.layerwise_batched_get(layer_major(numbers), location="disk"):
        objs = task.result(10)
        layer = len(counts)
        for number, obj in zip(numbers, objs, strict=False):
            assert torch.equal(obj.tensor, content(100 * layer + number, LAYER_SHAPE))
        counts.append(len(objs))
        handed_over += objs
    for obj in handed_over:
        obj.ref_count_down()
    for obj in handed_over:  # after the copies are done: the memory must have lasted until here
        assert obj.is_valid()
        assert obj.is_pinned
        obj.unpin()
    return counts


def test_layerwise_load(engines):
    engine = engines()
    store_layers(engine, range(3))
    first_layers = [make_key(n).get_first_layer() for n in range(3)]
    assert all(engine.manager.contains(key) == "disk" for key in first_layers)
    assert load_layers(engine, range(3)) == [3, 3]
    assert engine.pool_in_use == 0


def test_a_layer_that_cannot_be_loaded_shortens_its_list(engines):
    engine = engines()
    store_layers(engine, range(3))
    lost = make_key(1).split_layers(LAYERS)[1]
    os.truncate(engine.tier._store._path(engine.tier._name(lost)), 5000)
    assert load_layers(engine, range(3)) == [3, 1]
    assert engine.pool_in_use == 0


def test_a_chunk_without_one_of_its_layers_is_stored_anew(engines):
    engine = engines()
    store_layers(engine, [0])
    first, second = make_key(0).split_layers(LAYERS)
    assert engine.tier.contains(first)
    engine.tier.remove(second)
    assert not engine.tier.contains(first)  # what store_layer asks
    store_layers(engine, [0])
    assert load_layers(engine, [0]) == [1, 1]


def test_a_lookup_of_some_layers_pins_none(engines):
    engine = engines()
    store_layers(engine, [0])
    layers = make_key(0).split_layers(LAYERS)
    engine.tier.remove(layers[1])
    assert engine.manager.batched_contains(layers, pin=True) == (0, {})
    assert engine.tier._store._index._pins == {}


def test_prefetch(engines):
    engine = engines()
    keys = engine.store(range(3))

    async def prefetch():
        assert await engine.tier.batched_async_contains("id", [*keys, make_key(9)], pin=True) == 3
        return await engine.tier.batched_get_non_blocking("id", keys, {"cum_chunk_lengths": []})

    objs = asyncio.run_coroutine_threadsafe(prefetch(), engine.manager.loop).result(10)
    assert [torch.equal(o.tensor, content(n)) for n, o in enumerate(objs)] == [True] * 3
    assert not any(obj.is_pinned for obj in objs)  # LMCache drops a reference, no more
    for obj in objs:
        obj.ref_count_down()
    assert engine.tier._store._index._pins == {}
    assert engine.tier.get_non_blocking(make_key(9)).result(10) is None


# Several workers, and settings


def test_workers_share_the_path(engines, tmp_path):
    zero = engines(metadata=make_metadata(0, 2))
    one = engines(metadata=make_metadata(1, 2))
    zero.store([0])
    one.store([1])
    assert zero.load([0]) == [0]
    assert zero.load([1]) == []
    assert one.load([1]) == [1]
    assert (tmp_path / "kv" / "kv-worker-0").stat().st_mode & 0o777 == 0o700


def test_fewer_workers_than_before_leave_nothing_behind(engines, tmp_path):
    one = engines(metadata=make_metadata(1, 2))
    one.store([0])
    one.close()
    engines()
    assert list((tmp_path / "kv" / "kv-worker-1").glob("*.lmxkv")) == []


def test_a_directory_in_use_is_refused_with_the_reason(engines, tmp_path, monkeypatch):
    monkeypatch.setattr(
        chunk_store.ChunkStore.__init__,
        "__kwdefaults__",
        {"pin_seconds": 300.0, "lock_seconds": 0.0},
    )
    engine = engines()
    engine.store([0])
    other = engines()
    assert other.tier is None
    assert engine.load([0]) == [0]
    with pytest.raises(SettingsError, match=f"in use by process {os.getpid()}"):
        DiskTier(other.config, make_metadata(), other.pool)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("disk.path", None),
        ("disk.path", ""),
        ("disk.path", 5),
        ("disk.gib", None),
        ("disk.gib", 0),
        ("disk.gib", -1.0),
        ("disk.gib", "100"),
        ("disk.gib", True),
        ("disk.gib", float("nan")),
        ("disk.gib", float("inf")),
        ("disk.threads", 0),
        ("disk.threads", 2.0),
        ("disk.threads", True),
        ("disk.gb", 5),
    ],
)
def test_wrong_settings_are_named(name, value):
    extra = {"disk.path": "/cache", "disk.gib": 1, name: value, "other": "is not ours"}
    with pytest.raises(SettingsError, match=name):
        DiskSettings.parse(extra)


def test_settings():
    found = DiskSettings.parse({"disk.path": "/cache", "disk.gib": 0.5})
    assert (str(found.path), found.limit_bytes, found.threads) == ("/cache", 2**29, 4)


def test_a_hash_that_changes_with_the_process_is_refused(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    check_hash("sha256_cbor")
    for algorithm in ("builtin", "xxhash"):
        with pytest.raises(SettingsError, match="PYTHONHASHSEED"):
            check_hash(algorithm)
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(SettingsError):
        check_hash("builtin")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    check_hash("builtin")


def test_without_a_pool_there_is_no_tier(tmp_path):
    with pytest.raises(SettingsError, match="max_local_cpu_size"):
        DiskTier(make_config(tmp_path), make_metadata(), None)


# Load from many sides at once


def test_stores_and_loads_at_once_neither_mix_nor_stop(engines):
    engine = engines(chunks=20, pool_chunks=40)
    failures = []

    def work(seed):
        try:
            for turn in range(25):
                numbers = [(seed * 7 + turn * 3 + i) % 30 for i in range(4)]
                keys = [make_key(n) for n in numbers]
                objs = []
                for number in numbers:
                    obj = engine.manager.allocate(SHAPE, torch.bfloat16, busy_loop=False)
                    if obj is None:
                        break
                    obj.tensor.copy_(content(number))
                    objs.append(obj)
                engine.manager.batched_put(keys[: len(objs)], objs)
                found, _ = engine.manager.batched_contains(keys, pin=True)
                engine.load(numbers[:found])
                engine.manager.batched_unpin(keys[:found], ["disk"])
                if turn % 5 == 0:
                    engine.tier.remove(keys[0])
        except BaseException as error:  # for the test's thread, which fails by it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    engine.settle()
    assert failures == []
    assert engine.pool_in_use == 0
    assert engine.tier._store._index._pins == {}
    assert engine.tier.counters.bytes <= 20 * (CHUNK + 4096)
    assert engine.tier.counters.corrupt == 0


def test_tokens_of_a_group_of_layers_are_counted_once():
    one = ChunkLayout((torch.Size([256, 2, 16]),), (torch.bfloat16,), MemoryFormat.KV_T2D)
    two = ChunkLayout((torch.Size([512, 2, 16]),), (torch.bfloat16,), MemoryFormat.KV_T2D)
    all_layers = ChunkLayout((torch.Size([2, 8, 256, 16]),), (torch.int8,), MemoryFormat.KV_2LTD)
    latent = ChunkLayout((torch.Size([512, 16]),), (torch.bfloat16,), MemoryFormat.KV_MLA_FMT)
    assert one.tokens(16) == two.tokens(32) == all_layers.tokens(16) == latent.tokens(32) == 256
