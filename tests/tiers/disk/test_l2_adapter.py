"""The disk tier as an L2 adapter of LMCache's server: what comes back, is a miss, is kept."""

from __future__ import annotations

import os

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from support.server_disk import FILE, LAYOUT, OBJECT, content, make_key

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.disk.l2_adapter import DiskL2Adapter

# Round trip


def test_lmcache_makes_the_adapter_and_gets_its_objects_back(adapters):
    adapter = adapters()
    assert isinstance(adapter.tier, DiskL2Adapter)
    stored = adapter.store(range(5))
    assert (stored.is_successful(), stored.bytes_transferred()) == (True, 5 * OBJECT)
    assert adapter.look_up(range(7)) == [0, 1, 2, 3, 4]
    assert adapter.load(range(5)) == [0, 1, 2, 3, 4]
    counters = adapter.store_.counters
    assert (counters["stored"], counters["hits"], counters["bytes"]) == (5, 5, 5 * FILE)


def test_objects_are_found_after_a_restart(adapters):
    first = adapters()
    first.store(range(5))
    second = first.restarted(adapters)
    assert second.look_up(range(7)) == [0, 1, 2, 3, 4]
    assert second.load(range(5)) == [0, 1, 2, 3, 4]


def test_results_are_given_out_once(adapters):
    adapter = adapters()
    adapter.store([0])
    task = adapter.tier.submit_lookup_and_lock_task([make_key(0)], {0: LAYOUT})
    adapter.settle()
    assert adapter.tier.query_lookup_and_lock_result(task).test(0)
    assert adapter.tier.query_lookup_and_lock_result(task) is None
    assert adapter.tier.pop_completed_store_tasks() == {}
    assert len({fd(adapter.tier) for fd in DESCRIPTORS}) == 3


def test_tasks_at_once_have_results_of_their_own(adapters):
    adapter = adapters()
    adapter.store(range(0, 20, 2))
    keys = [make_key(n) for n in range(20)]
    looks = [adapter.tier.submit_lookup_and_lock_task([key], {0: LAYOUT}) for key in keys]
    objects = adapter.allocate(20)
    loads = [
        adapter.tier.submit_load_task([key], [obj]) for key, obj in zip(keys, objects, strict=True)
    ]
    fd = adapter.tier.get_load_event_fd()
    for number, (look, load) in enumerate(zip(looks, loads, strict=True)):
        loaded = adapter.wait(fd, lambda load=load: adapter.tier.query_load_result(load))
        adapter.settle()
        located = adapter.tier.query_lookup_and_lock_result(look)
        assert located.test(0) == loaded.test(0) == (number % 2 == 0)
        assert not loaded.test(0) or torch.equal(objects[number].tensor, content(number))


DESCRIPTORS = (
    DiskL2Adapter.get_store_event_fd,
    DiskL2Adapter.get_lookup_and_lock_event_fd,
    DiskL2Adapter.get_load_event_fd,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "another/model"},
        {"kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)},
        {"object_group_id": 1},
        {"cache_salt": "somebody"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_key_is_all_of_its_parts(adapters, changes):
    adapter = adapters()
    adapter.store([0])
    assert adapter.look_up([0]) == [0]
    assert adapter.look_up([0], **changes) == []
    assert adapter.load([0], **changes) == []
    adapter.store([0], **changes)
    assert adapter.restarted(adapters).load([0], **changes) == [0]


@pytest.mark.parametrize(
    "other",
    [
        MemoryLayoutDesc(LAYOUT.shapes, [torch.float16]),  # of as many bytes
        MemoryLayoutDesc([torch.Size([2, 4, 8, 128])], LAYOUT.dtypes),
        MemoryLayoutDesc([torch.Size([2, 2, 8, 128])], LAYOUT.dtypes),
    ],
)
def test_another_layout_is_a_miss_until_it_is_stored_itself(adapters, other):
    adapter = adapters()
    adapter.store([0])
    assert adapter.look_up([0], other) == []
    assert adapter.load([0], other) == []
    assert adapter.load([0]) == [0]  # nothing was removed
    assert adapter.store([0], other).is_successful()
    assert adapter.look_up([0], other) == [0]
    assert adapter.load([0], other) == [0]
    assert adapter.look_up([0]) == []


def test_an_object_of_several_shapes_comes_back(adapters):
    adapter = adapters()
    layout = MemoryLayoutDesc(
        [torch.Size([2, 1, 16, 64]), torch.Size([1, 1, 8, 32])], [torch.bfloat16, torch.float32]
    )
    [obj] = adapter.allocate(1, layout)
    memory = memoryview(obj.byte_array).cast("B")
    memory[:] = expected = os.urandom(len(memory))
    assert adapter.submit_store([make_key(0)], [obj]).is_successful()
    memory[:] = bytes(len(memory))
    assert adapter.look_up([0], layout) == [0]
    task = adapter.tier.submit_load_task([make_key(0)], [obj])
    loaded = adapter.wait(
        adapter.tier.get_load_event_fd(), lambda: adapter.tier.query_load_result(task)
    )
    assert loaded.test(0)
    assert bytes(memory) == expected


def test_what_is_there_is_not_written_again(adapters):
    adapter = adapters()
    adapter.store([0, 1])
    before = adapter.file(0).stat().st_ino
    assert adapter.store([0, 1, 2]).bytes_transferred() == OBJECT
    assert adapter.file(0).stat().st_ino == before


# Bound and eviction


def test_the_bound_holds_and_the_least_recently_used_go(adapters):
    adapter = adapters(files=4)
    adapter.store([0, 1])
    adapter.store([2, 3])
    adapter.look_up([0, 1])
    adapter.tier.submit_unlock([make_key(0), make_key(1)])
    adapter.settle()
    adapter.store([4, 5])
    assert adapter.look_up(range(6)) == [0, 1, 4, 5]
    assert adapter.store_.counters["bytes"] == 4 * FILE


def test_of_one_prompt_the_end_goes_first_in_all_groups(adapters):
    adapter = adapters(files=4)
    for group in (0, 1):
        adapter.store([0, 1], object_group_id=group)
    keys = [make_key(n, object_group_id=group) for group in (0, 1) for n in (0, 1)]
    adapter.tier.submit_touch(keys)
    adapter.settle()
    adapter.store([7, 8])
    assert adapter.look_up([0, 1], object_group_id=0) == [0]
    assert adapter.look_up([0, 1], object_group_id=1) == [0]


def test_the_bound_counts_earlier_runs_and_a_smaller_one_evicts(adapters):
    first = adapters()
    first.store(range(5))
    second = first.restarted(adapters, files=3)
    assert len(second.look_up(range(5))) == 3
    assert second.store_.counters["bytes"] == 3 * FILE


# What LMCache is told


class Listener(L2AdapterListener):
    def __init__(self):
        self.held = set()

    def on_l2_keys_stored(self, keys, sizes):
        self.held |= set(keys)

    def on_l2_keys_accessed(self, keys):
        assert keys

    def on_l2_keys_deleted(self, keys):
        self.held -= set(keys)


def test_lmcache_hears_what_is_there_what_comes_and_what_goes(adapters):
    first = adapters()
    first.store([0, 1])
    first.store([2], cache_salt="somebody")
    adapter, listener = first.restarted(adapters, files=4), Listener()
    adapter.tier.register_listener(listener)
    salted = make_key(2, cache_salt="somebody")
    assert listener.held == {make_key(0), make_key(1), salted}
    adapter.store([3])
    adapter.tier.delete([make_key(0)])
    adapter.store([4, 5])  # evicts 1, which is the oldest
    adapter.settle()
    assert listener.held == {make_key(n) for n in (3, 4, 5)} | {salted}


def test_its_status_says_where_it_is_and_how_full(adapters, tmp_path):
    adapter = adapters()
    adapter.store([0])
    status = adapter.tier.report_status()
    assert status["is_healthy"]
    assert status["directory"] == str(tmp_path / "kv" / "kv-server")
    assert (status["bytes"], status["stored"], status["pending"]) == (FILE, 1, 0)


# Start and end


def test_a_second_server_in_the_directory_does_not_start(adapters):
    adapters()
    with pytest.raises(SettingsError, match=f"in use by process {os.getpid()}"):
        adapters()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"disk.path": "/tmp/kv"},
        {"disk.path": "/tmp/kv", "disk.gib": 0},
        {"disk.path": "/tmp/kv", "disk.gib": 1, "disk.threads": 0},
        {"disk.path": "/tmp/kv", "disk.gib": 1, "disk.engine": -1},
        {"disk.path": "/tmp/kv", "disk.gib": 1, "path": "/tmp"},
    ],
)
def test_wrong_settings_stop_the_server(params):
    with pytest.raises(SettingsError):
        DiskL2Adapter(params)


def test_files_of_the_in_process_tier_stay_as_they_are(adapters, tmp_path):
    other = tmp_path / "kv" / "kv-worker-0" / f"{0:064x}.lmxkv"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"theirs")
    adapter = adapters(files=1)
    adapter.store([0, 1, 2])
    adapter.restarted(adapters)
    assert other.read_bytes() == b"theirs"


def test_a_close_ends_queued_writes_and_then_touches_no_memory(adapters):
    adapter = adapters(threads=1)
    objects = adapter.filled(range(20))
    adapter.tier.submit_store_task([make_key(n) for n in range(20)], objects)
    adapter.tier.close()
    for obj in objects:
        obj.tensor.zero_()
    again = adapters()
    assert again.look_up(range(20)) == list(range(20))
    assert again.load(range(20)) == list(range(20))
