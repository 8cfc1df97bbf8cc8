"""After a reset, or under other weights, nothing is found that was stored before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from support.adapter import Adapter, request
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from lmcache_xpu.kv_connector import scheduler as scheduler_module
from lmcache_xpu.kv_connector.epochs import Epoch, Epochs, WeightsChanged, WorkerEpoch
from lmcache_xpu.kv_connector.garbage import GarbageCollection
from lmcache_xpu.kv_connector.scheduler import SchedulerSide
from lmcache_xpu.kv_connector.worker_report import WorkerReport
from lmcache_xpu.versions.lmcache import LMCacheConnectorMetadata


class Pool:
    """vLLM's blocks; one of them is never used."""

    def __init__(self, *, cached: int = 0, used: int = 0) -> None:
        self.num_gpu_blocks = 10
        self.cached_block_hash_to_block = dict.fromkeys(range(cached))
        self.used = used

    def get_num_free_blocks(self) -> int:
        return 9 - self.used


def described(name: str) -> Any:
    save = SimpleNamespace(can_save=True)
    return SimpleNamespace(req_id=name, token_ids=[5, 6, 7], save_spec=save, load_spec=None)


class Scheduler:
    """The scheduler's half, beside a worker in this process or without one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, worker: Any = None) -> None:
        self.adapter = Adapter()
        self.side = SchedulerSide(self.adapter, None, 16)  # type: ignore[arg-type]
        monkeypatch.setattr(self.side, "_worker", lambda: worker)
        monkeypatch.setattr(scheduler_module, "written_blocks", lambda *args: frozenset())

    def finish(self, name: str) -> None:
        self.adapter.request_finished = lambda *request: (False, None)
        self.side.finished(request(name), [])

    def look_up(self, name: str = "r", kept: int = 0, **of: Any) -> list[int]:
        """The tokens by which LMCache is asked."""
        self.side.admit(request(name, **of), kept)
        self.adapter.lookup_client.lookup([5, 6, 7], lookup_id=name)
        return self.adapter.asked[-1]

    def step(self, *names: str) -> Any:
        requests = [described(name) for name in names]
        self.adapter.build_connector_meta = lambda step: LMCacheConnectorMetadata(requests)
        return self.side.describe(
            SimpleNamespace(
                scheduled_new_reqs=[],
                num_scheduled_tokens={},
                total_num_scheduled_tokens=1,
                scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            )
        )


@pytest.fixture
def scheduler(monkeypatch):
    return Scheduler(monkeypatch)


@pytest.fixture
def other(monkeypatch):
    return Scheduler(monkeypatch)


def test_without_a_reset_keys_are_those_of_all_engines_with_these_weights(scheduler):
    assert scheduler.look_up() == [5, 6, 7]
    assert scheduler.step("r").requests[0].token_ids == [5, 6, 7]


def test_each_reset_of_each_engine_gives_all_keys_another_name(scheduler, other):
    asked = [scheduler.look_up("a"), scheduler.look_up("salted", cache_salt="s")]
    for number in range(3):
        assert scheduler.side.reset()
        asked += [
            scheduler.look_up(("a", number)),
            scheduler.look_up(("s", number), cache_salt="s"),
        ]
    assert other.look_up() == [5, 6, 7]  # is left alone
    other.side.reset()
    asked.append(other.look_up("b"))
    firsts = [tokens[0] for tokens in asked]
    assert len(set(firsts)) == len(firsts)
    assert all(tokens[1:] == [6, 7] for tokens in asked)


def test_look_up_and_worker_see_the_same_name(scheduler):
    scheduler.side.reset()
    asked = scheduler.look_up()
    step = scheduler.step("r")
    assert step.requests[0].token_ids == asked
    assert step.requests[0].save_spec.can_save
    assert step.epoch.number == 1


def test_a_step_that_was_described_before_a_reset_keeps_its_names(scheduler):
    """What it stores was computed before, and so has the right name."""
    scheduler.look_up()
    step = scheduler.step("r")
    scheduler.side.reset()
    assert step.requests[0].token_ids == [5, 6, 7]
    assert step.requests[0].save_spec.can_save
    assert step.epoch.number == 0


def test_a_request_that_runs_through_a_reset_stores_nothing_until_it_begins_anew(scheduler):
    before = scheduler.look_up()
    scheduler.step("r")
    scheduler.side.reset()
    mixed = scheduler.step("r").requests[0]
    assert not mixed.save_spec.can_save
    anew = scheduler.look_up()  # it was preempted
    after = scheduler.step("r").requests[0]
    assert after.save_spec.can_save
    assert len({tokens[0] for tokens in (before, mixed.token_ids, anew)}) == 3
    scheduler.finish("r")
    assert scheduler.side._epochs._names == {}


def test_what_was_promised_before_a_reset_is_taken_back(scheduler):
    scheduler.look_up("waits")
    scheduler.side.reset()
    assert scheduler.adapter.forgotten == ["waits"]
    assert scheduler.adapter.load_specs == {}
    first, *rest = scheduler.step().requests  # the worker unpins it
    assert (first.req_id, first.save_spec, first.load_spec, rest) == ("waits", None, None, [])


@pytest.mark.parametrize("pool", [None, Pool(cached=1), Pool(used=1)])
def test_what_vllm_kept_of_an_earlier_epoch_is_not_stored(scheduler, pool):
    scheduler.side.bind(pool)
    scheduler.side.reset()
    current = scheduler.look_up("new")
    kept = scheduler.look_up("kept", kept=16)
    assert current[0] != kept[0]
    assert [meta.save_spec.can_save for meta in scheduler.step("new", "kept").requests] == [
        True,
        False,
    ]
    scheduler.side.bind(Pool())  # all is given back
    assert scheduler.look_up("later", kept=16)[0] == current[0]
    scheduler.side.bind(Pool(cached=3, used=2))  # of this epoch
    assert scheduler.look_up("at last", kept=16)[0] == current[0]


def test_a_reset_that_empties_vllms_cache_lets_its_hits_be_stored(scheduler):
    scheduler.side.bind(Pool())
    scheduler.side.reset()
    assert scheduler.look_up("kept", kept=16) == scheduler.look_up("new")


class Worker:
    """A worker's connector in this process."""

    def __init__(self, *, gone: bool = True) -> None:
        self.engine = SimpleNamespace(refuses_lookups=False)
        self.refused: list[Any] = []
        self.forgotten = 0
        self.gone: bool | Exception = gone
        self.epoch = WorkerEpoch(self.engine, self, self.forget)
        self.collection = GarbageCollection()

    def refuse(self, requests: list[Any]) -> None:
        self.refused += requests

    def forget(self) -> bool:
        self.forgotten += 1
        if isinstance(self.gone, Exception):
            raise self.gone
        return self.gone


def test_a_worker_in_this_process_gives_back_its_room_at_once(monkeypatch):
    worker = Worker()
    scheduler = Scheduler(monkeypatch, worker)
    assert scheduler.side.reset()
    assert worker.forgotten == 1
    worker.epoch.begin_step(scheduler.step())
    assert worker.forgotten == 1


@pytest.mark.parametrize("gone", [False, OSError("planted")])
def test_a_reset_says_when_something_is_still_there(monkeypatch, gone):
    worker = Worker()
    worker.gone = gone
    assert Scheduler(monkeypatch, worker).side.reset() is False


def test_a_worker_elsewhere_gives_back_its_room_with_the_next_step(scheduler):
    worker = Worker()
    worker.epoch.begin_step(scheduler.step())
    assert worker.forgotten == 0
    scheduler.side.reset()
    for _ in range(2):
        worker.epoch.begin_step(scheduler.step())
    assert worker.forgotten == 1
    assert worker.refused == []


def test_an_engine_that_was_reset_leaves_nothing_that_cannot_be_found():
    worker = Worker()
    worker.epoch.end()
    assert worker.forgotten == 0  # a restart finds it
    worker.epoch.begin(Epoch(1, "name"))
    worker.epoch.end()
    assert worker.forgotten == 2


def test_under_changed_weights_nothing_is_found_loaded_or_stored_before_another_epoch(scheduler):
    worker = Worker()
    scheduler.look_up()
    step = scheduler.step("r")
    worker.epoch.change_weights()
    assert worker.engine.refuses_lookups
    worker.epoch.begin_step(step)
    assert worker.refused == step.requests
    scheduler.side.end_step(WorkerReport(weights=worker.epoch.changed))
    # It was alive, so that its KV is of both.
    later = scheduler.step("r")
    assert not later.requests[0].save_spec.can_save
    worker.epoch.begin_step(later)
    assert worker.refused == step.requests
    assert worker.epoch.changed is None
    assert not worker.engine.refuses_lookups


def test_weights_that_change_after_a_reset_and_before_its_first_step_are_covered_by_it(scheduler):
    """As in vLLM's way to update weights: pause and clear, update, resume."""
    worker = Worker()
    scheduler.side.reset()
    worker.epoch.change_weights()
    step = scheduler.step("r")
    worker.epoch.begin_step(step)
    assert worker.refused == []
    assert worker.epoch.changed is None


def test_a_change_that_was_heard_of_twice_begins_one_epoch(scheduler):
    for _ in range(2):  # the second in the output of a step that was under way
        scheduler.side.end_step(WorkerReport(weights=WeightsChanged(0)))
    scheduler.side.end_step(WorkerReport())
    assert scheduler.step().epoch.number == 1


def test_in_one_process_a_look_up_after_a_change_is_in_another_epoch_already(monkeypatch):
    worker = Worker()
    scheduler = Scheduler(monkeypatch, worker)
    before = scheduler.look_up("before")
    worker.epoch.change_weights()
    after = scheduler.look_up("after")
    assert before[0] != after[0]
    assert worker.epoch.changed is None
    assert worker.forgotten == 1
    assert scheduler.step("after").requests[0].save_spec.can_save


def test_vllm_carries_what_any_rank_says():
    def output(said: WeightsChanged | None) -> ModelRunnerOutput:
        report = said and WorkerReport(weights=said)
        carried = KVConnectorOutput(kv_connector_worker_meta=report)
        return ModelRunnerOutput.with_kv_conn_output_only(carried)

    said = (None, WeightsChanged(3), WeightsChanged(2), None)
    carried = KVOutputAggregator(4).aggregate([output(said_by_rank) for said_by_rank in said], 0)
    assert carried is not None
    assert carried.kv_connector_output is not None
    assert carried.kv_connector_output.kv_connector_worker_meta.weights.number == 3


def test_names_of_an_epoch_go_with_their_requests():
    epochs = Epochs()
    epochs.admit("r", 0)
    epochs.begin()
    assert epochs.of("r") != epochs.current.name
    assert not epochs.is_only("r")
    assert not epochs.is_only("never heard of")
    epochs.finished("r")
    assert epochs.of("r") == epochs.current.name
