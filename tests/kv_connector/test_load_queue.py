"""Loads that requests wait for: the worker's half."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from lmcache_xpu.cache_engine.unfilled_blocks import UnfilledBlocks
from lmcache_xpu.kv_connector.load_policy import LoadSpeeds
from lmcache_xpu.kv_connector.load_queue import LoadQueue
from lmcache_xpu.transfer.tuning import tuning_of
from lmcache_xpu.versions.lmcache import LoadSpec, ReqMeta

BLOCK, CHUNK, GROUP = 4, 8, 100 * 2**20


class Pipeline:
    """A load whose groups arrive when the test says so."""

    def __init__(self, groups: int = 1, *, fails: bool = False) -> None:
        self.slots = torch.arange(8)
        self.failed_behind = None
        self.enqueued = self.there = 0
        self.calls: list[str] = []
        self._groups, self._fails = groups, fails
        self.stager = SimpleNamespace(follow_engine=lambda: self.calls.append("follow"))

    @contextmanager
    def enduring(self):
        try:
            yield
        except RuntimeError:
            self.failed_behind = "here"

    def enqueue_next(self) -> int:
        if self._fails:
            raise RuntimeError("planted")
        if self.enqueued == self._groups:
            return 0
        self.enqueued += 1
        return GROUP

    def bytes_under_way(self) -> int:
        return (self.enqueued - self.there) * GROUP

    def arrived(self, within_bytes: int = 0) -> bool:
        if self.failed_behind is not None:
            return True
        return self.enqueued == self._groups and self.bytes_under_way() <= within_bytes

    def before_all(self) -> None:
        self.calls.append("wait")

    def synchronize(self, groups: int) -> None:
        self.calls.append("synchronize")
        self.there = self.enqueued

    def handles(self) -> list:
        return [SimpleNamespace(seconds=lambda: 0.5)]


class Memory:
    def __init__(self) -> None:
        self.references = 1

    def ref_count_up(self) -> None:
        self.references += 1

    def ref_count_down(self) -> None:
        self.references -= 1


class Engine:
    """LMCache's engine: each load is a pipeline of the test's."""

    use_layerwise = False
    config = SimpleNamespace(chunk_size=CHUNK)

    def __init__(self) -> None:
        self.pipelines: dict[str, Pipeline] = {}
        self.there: dict[str, int] = {}  # tokens, where it is less than all
        self.memory = Memory()
        self.far: dict[str, int] = {}  # tokens on a disk
        self.unpinned: list[str] = []
        self.masks: list[int] = []
        self.counted: list[float] = []
        self.open = threading.Event()
        self.open.set()

    def retrieve(self, tokens, mask, *, req_id, load_owner, **arguments):
        self.open.wait(10)
        self.masks.append(int(mask.sum()))
        if req_id not in self.pipelines:
            raise RuntimeError("planted")
        load_owner.add_load(self.pipelines[req_id], [self.memory], self.counted.append)
        return torch.arange(len(mask)) < self.there.get(req_id, len(mask))

    def far_tokens(self, request: str) -> int:
        return 0 if request in self.unpinned else self.far.get(request, 0)

    def lookup_unpin(self, request: str) -> None:
        self.unpinned.append(request)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def unfilled() -> UnfilledBlocks:
    return UnfilledBlocks(BLOCK)


@pytest.fixture
def queue(engine, unfilled):
    queue = LoadQueue(engine, unfilled)
    queue.register([torch.zeros(1)])
    yield queue
    engine.open.set()
    queue.close()


def asked(name: str, *, kept: int = 0, end: int = 2 * CHUNK) -> ReqMeta:
    slots = torch.arange(end) + 100 * BLOCK
    return ReqMeta(name, list(range(end)), slots, load_spec=LoadSpec(kept, end, can_load=True))


def moved(queue: LoadQueue, engine: Engine, fetched: int) -> set[str]:
    """Move when so many loads have been fetched."""
    deadline = time.monotonic() + 10
    while len(engine.unpinned) < fetched and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)  # the thread hands over what it has unpinned
    return queue.move()


def test_who_has_all_is_named_once_and_the_memory_is_given_back(queue, engine):
    load = engine.pipelines["one"] = Pipeline(groups=8)
    queue.begin([asked("one")])
    assert moved(queue, engine, 1) == set()
    assert load.calls == ["follow"]  # blocks may still be read by a step that was enqueued
    assert load.enqueued == 8
    assert engine.memory.references == 2
    load.there = 3
    assert queue.move() == {"one"}  # the rest will be there when the request is in a step
    assert (queue.move(), engine.memory.references, engine.counted) == (set(), 2, [])
    load.there = 8
    assert (queue.move(), engine.memory.references, engine.counted) == (set(), 1, [0.5])
    assert queue.take_speeds() == LoadSpeeds(near=2 * CHUNK / 0.5)
    assert queue.take_speeds() == LoadSpeeds()
    assert engine.unpinned == ["one"]


def test_the_step_after_vllm_has_heard_waits_for_the_rest(queue, engine):
    for name in ("one", "two"):
        engine.pipelines[name] = Pipeline(groups=3)
    queue.begin([asked("one"), asked("two")])
    assert moved(queue, engine, 2) == {"one", "two"}
    queue.await_told(frozenset({"two", "another engine's"}))
    assert engine.pipelines["one"].calls == ["follow"]
    assert engine.pipelines["two"].calls == ["follow", "wait"]


def test_so_much_is_under_way_that_the_link_stays_busy_and_no_more(queue, engine):
    most = tuning_of("cpu").async_bytes // GROUP + 1
    first, second = engine.pipelines["one"], engine.pipelines["two"] = (
        Pipeline(groups=most + 2),
        Pipeline(groups=most + 2),
    )
    queue.begin([asked("one"), asked("two")])
    moved(queue, engine, 2)
    assert (first.enqueued, second.enqueued) == (most, 0)
    queue.move()
    assert (first.enqueued, second.enqueued) == (most, 0)
    first.there = most
    queue.move()
    assert (first.enqueued, second.enqueued) == (most + 2, most - 2)


def test_a_step_does_not_wait_for_what_is_fetched(queue, engine):
    engine.open.clear()  # a slow disk
    engine.pipelines["one"] = Pipeline()
    queue.begin([asked("one")])
    assert queue.move() == set()
    engine.open.set()
    assert moved(queue, engine, 1) == {"one"}


def test_chunks_that_vllm_has_whole_are_not_fetched(queue, engine):
    engine.pipelines["one"] = Pipeline()
    queue.begin([asked("one", kept=CHUNK + BLOCK, end=4 * CHUNK)])
    moved(queue, engine, 1)
    assert engine.masks == [3 * CHUNK]


def test_what_did_not_arrive_is_recorded_before_vllm_is_told(queue, engine, unfilled):
    engine.pipelines["part"] = Pipeline()
    engine.there["part"] = CHUNK
    queue.begin([asked("part", kept=BLOCK)])
    assert moved(queue, engine, 1) == {"part"}
    assert unfilled.take() == {102, 103}


def test_a_fetch_that_fails_is_recorded_and_the_next_goes_on(queue, engine, unfilled, caplog):
    engine.pipelines["two"] = Pipeline()
    queue.begin([asked("one", kept=BLOCK), asked("two")])
    assert moved(queue, engine, 2) == {"one", "two"}
    assert unfilled.take() == {101, 102, 103}
    assert engine.unpinned == ["one", "two"]
    assert "A load failed and is computed instead" in caplog.text


def test_a_copy_that_fails_is_recorded_and_its_memory_given_back(queue, engine, unfilled):
    engine.pipelines["one"] = Pipeline(fails=True)
    queue.begin([asked("one")])
    assert moved(queue, engine, 1) == {"one"}
    assert unfilled.take() == {0, 1}  # the pipeline's own
    assert engine.memory.references == 1
    assert engine.counted == []
    assert queue.take_speeds() == LoadSpeeds()


def test_under_changed_weights_nothing_is_loaded(queue, engine, unfilled):
    engine.pipelines["one"] = Pipeline()
    queue.refuse([asked("one", kept=BLOCK)])
    assert moved(queue, engine, 1) == {"one"}
    assert engine.pipelines["one"].enqueued == 0
    assert engine.unpinned == ["one"]
    assert unfilled.take() == {101, 102, 103}


def test_the_end_waits_for_what_is_under_way_and_holds_nothing(queue, engine):
    engine.pipelines["moving"] = Pipeline(groups=3)
    engine.pipelines["fetched"] = Pipeline(groups=3)
    queue.begin([asked("moving")])
    moved(queue, engine, 1)
    queue.begin([asked("fetched")])
    while len(engine.unpinned) < 2:
        time.sleep(0.001)
    queue.close()
    assert engine.pipelines["moving"].calls[-1] == "synchronize"
    assert engine.memory.references == 1
    queue.close()


def test_layer_by_layer_the_generator_is_taken_to_its_end(queue, engine):
    ended = []

    def retrieve_layer(tokens, mask, *, req_id, load_owner, **arguments):
        load_owner.add_load(engine.pipelines[req_id], [], engine.counted.append)
        for _ in range(3):
            load_owner.hold(engine.pipelines[req_id], [engine.memory])
            yield
        ended.append(req_id)

    engine.use_layerwise, engine.retrieve_layer = True, retrieve_layer
    engine.pipelines["one"] = Pipeline(groups=5)
    queue.begin([asked("one")])
    moved(queue, engine, 1)
    assert ended == ["one"]
    assert engine.memory.references == 4


def test_speeds_are_told_once_that_of_a_disk_by_itself(queue, engine):
    engine.pipelines = {"near": Pipeline(), "far": Pipeline()}
    engine.far["far"] = 6
    engine.open.clear()
    queue.begin([asked("far")])
    threading.Timer(0.05, engine.open.set).start()
    engine.pipelines["far"].there = 1
    moved(queue, engine, 1)
    speeds = queue.take_speeds()
    assert speeds.near == 2 * asked("far").load_spec.lmcache_cached_tokens  # in half a second
    assert speeds.far is not None
    assert 0 < speeds.far <= 6 / 0.05
    assert queue.take_speeds() == LoadSpeeds()
    engine.pipelines["near"].there = 1
    queue.begin([asked("near")])
    moved(queue, engine, 1)
    assert queue.take_speeds().far is None
