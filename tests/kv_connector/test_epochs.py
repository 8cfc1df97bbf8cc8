"""After a reset, or under other weights, nothing is found that was stored before."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from support.adapter import Adapter, Metadata, request
from support.scripts import run_script
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from lmcache_xpu.kv_connector import scheduler
from lmcache_xpu.kv_connector.epochs import EPOCH, Epoch, Epochs, WeightsChanged, WorkerEpoch
from lmcache_xpu.kv_connector.scheduler import SchedulerSide
from lmcache_xpu.kv_connector.worker_report import WorkerReport


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
        monkeypatch.setattr(scheduler, "written_blocks", lambda *args: frozenset())

    def look_up(self, name: str = "r", kept: int = 0, **of: Any) -> list[int]:
        """The tokens by which LMCache is asked."""
        self.side.admit(request(name, **of), kept)
        self.adapter.lookup_client.lookup([5, 6, 7], lookup_id=name)
        return self.adapter.asked[-1]

    def step(self, *names: str) -> Any:
        metadata = Metadata(*map(described, names))
        self.side.describe(
            metadata,
            SimpleNamespace(
                total_num_scheduled_tokens=1,
                scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
            ),
        )
        return metadata


@pytest.fixture
def one(monkeypatch):
    return Scheduler(monkeypatch)


@pytest.fixture
def other(monkeypatch):
    return Scheduler(monkeypatch)


def test_without_a_reset_keys_are_those_of_all_engines_with_these_weights(one):
    assert one.look_up() == [5, 6, 7]
    assert one.step("r").requests[0].token_ids == [5, 6, 7]


def test_each_reset_of_each_engine_gives_all_keys_another_name(one, other):
    asked = [one.look_up("a"), one.look_up("salted", cache_salt="s")]
    for number in range(3):
        assert one.side.reset()
        asked += [one.look_up(("a", number)), one.look_up(("s", number), cache_salt="s")]
    assert other.look_up() == [5, 6, 7]  # is left alone
    other.side.reset()
    asked.append(other.look_up("b"))
    firsts = [tokens[0] for tokens in asked]
    assert len(set(firsts)) == len(firsts)
    assert all(tokens[1:] == [6, 7] for tokens in asked)


def test_look_up_and_worker_see_the_same_name(one):
    one.side.reset()
    asked = one.look_up()
    step = one.step("r")
    assert step.requests[0].token_ids == asked
    assert step.requests[0].save_spec.can_save
    assert getattr(step, EPOCH).number == 1


def test_a_step_that_was_described_before_a_reset_keeps_its_names(one):
    """What it stores was computed before, and so has the right name."""
    one.look_up()
    step = one.step("r")
    one.side.reset()
    assert step.requests[0].token_ids == [5, 6, 7]
    assert step.requests[0].save_spec.can_save
    assert getattr(step, EPOCH).number == 0


def test_a_request_that_runs_through_a_reset_stores_nothing_until_it_begins_anew(one):
    before = one.look_up()
    one.step("r")
    one.side.reset()
    mixed = one.step("r").requests[0]
    assert not mixed.save_spec.can_save
    anew = one.look_up()  # it was preempted
    after = one.step("r").requests[0]
    assert after.save_spec.can_save
    assert len({tokens[0] for tokens in (before, mixed.token_ids, anew)}) == 3
    one.side.finished("r")
    assert one.side._epochs._names == {}


def test_what_was_promised_before_a_reset_is_taken_back(one):
    one.look_up("waits")
    one.side.reset()
    assert one.adapter.forgotten == ["waits"]
    assert one.adapter.load_specs == {}
    first, *rest = one.step().requests  # the worker unpins it
    assert (first.req_id, first.save_spec, first.load_spec, rest) == ("waits", None, None, [])


@pytest.mark.parametrize("pool", [None, Pool(cached=1), Pool(used=1)])
def test_what_vllm_kept_of_an_earlier_epoch_is_not_stored(one, pool):
    one.side.bind(pool)
    one.side.reset()
    current = one.look_up("new")
    kept = one.look_up("kept", kept=16)
    assert current[0] != kept[0]
    assert [meta.save_spec.can_save for meta in one.step("new", "kept").requests] == [True, False]
    one.side.bind(Pool())  # all is given back
    assert one.look_up("later", kept=16)[0] == current[0]
    one.side.bind(Pool(cached=3, used=2))  # of this epoch
    assert one.look_up("at last", kept=16)[0] == current[0]


def test_a_reset_that_empties_vllms_cache_lets_its_hits_be_stored(one):
    one.side.bind(Pool())
    one.side.reset()
    assert one.look_up("kept", kept=16) == one.look_up("new")


class Worker:
    """A worker's connector in this process."""

    def __init__(self, *, gone: bool = True) -> None:
        self.engine = SimpleNamespace(lookup=lambda *args, **kwargs: 256)
        self.refused: list[Any] = []
        self.forgotten = 0
        self.gone: bool | Exception = gone
        self.epoch = WorkerEpoch(self.engine, self, self.forget)
        self.begin_epoch = self.epoch.begin

    @property
    def weights_changed(self) -> WeightsChanged | None:
        return self.epoch.changed

    def refuse(self, requests: list[Any]) -> None:
        self.refused += requests

    def forget(self) -> bool:
        self.forgotten += 1
        if isinstance(self.gone, Exception):
            raise self.gone
        return self.gone


def test_a_worker_in_this_process_gives_back_its_room_at_once(monkeypatch):
    worker = Worker()
    one = Scheduler(monkeypatch, worker)
    assert one.side.reset()
    assert worker.forgotten == 1
    worker.epoch.begin_step(one.step())
    assert worker.forgotten == 1


@pytest.mark.parametrize("gone", [False, OSError("planted")])
def test_a_reset_says_when_something_is_still_there(monkeypatch, gone):
    worker = Worker()
    worker.gone = gone
    assert Scheduler(monkeypatch, worker).side.reset() is False


def test_a_worker_elsewhere_gives_back_its_room_with_the_next_step(one):
    worker = Worker()
    worker.epoch.begin_step(one.step())
    assert worker.forgotten == 0
    one.side.reset()
    for _ in range(2):
        worker.epoch.begin_step(one.step())
    assert worker.forgotten == 1
    assert worker.refused == []


def test_an_engine_that_was_reset_leaves_nothing_that_cannot_be_found():
    worker = Worker()
    worker.epoch.end()
    assert worker.forgotten == 0  # a restart finds it
    worker.epoch.begin(Epoch(1, "name"))
    worker.epoch.end()
    assert worker.forgotten == 2


def test_under_changed_weights_nothing_is_found_loaded_or_stored_before_another_epoch(one):
    worker = Worker()
    assert worker.engine.lookup([1], lookup_id="r") == 256
    one.look_up()
    step = one.step("r")
    worker.epoch.change_weights()
    assert worker.engine.lookup([1], lookup_id="r") == 0
    worker.epoch.begin_step(step)
    assert worker.refused == step.requests
    one.side.hear(WorkerReport(weights=worker.epoch.changed))
    # It was alive, so that its KV is of both.
    later = one.step("r")
    assert not later.requests[0].save_spec.can_save
    worker.epoch.begin_step(later)
    assert worker.refused == step.requests
    assert worker.epoch.changed is None
    assert worker.engine.lookup([1], lookup_id="r") == 256


def test_weights_that_change_after_a_reset_and_before_its_first_step_are_covered_by_it(one):
    """As in vLLM's way to update weights: pause and clear, update, resume."""
    worker = Worker()
    one.side.reset()
    worker.epoch.change_weights()
    step = one.step("r")
    worker.epoch.begin_step(step)
    assert worker.refused == []
    assert worker.epoch.changed is None


def test_a_change_that_was_heard_of_twice_begins_one_epoch(one):
    for _ in range(2):  # the second in the output of a step that was under way
        one.side.hear(WorkerReport(weights=WeightsChanged(0)))
    one.side.hear(WorkerReport())
    assert getattr(one.step(), EPOCH).number == 1


def test_in_one_process_a_look_up_after_a_change_is_in_another_epoch_already(monkeypatch):
    worker = Worker()
    one = Scheduler(monkeypatch, worker)
    before = one.look_up("before")
    worker.epoch.change_weights()
    after = one.look_up("after")
    assert before[0] != after[0]
    assert worker.epoch.changed is None
    assert worker.forgotten == 1
    assert one.step("after").requests[0].save_spec.can_save


def test_vllm_carries_what_any_rank_says():
    def output(said: WeightsChanged | None) -> ModelRunnerOutput:
        report = said and WorkerReport(weights=said)
        carried = KVConnectorOutput(kv_connector_worker_meta=report)
        return ModelRunnerOutput.with_kv_conn_output_only(carried)

    said = (None, WeightsChanged(3), WeightsChanged(2), None)
    carried = KVOutputAggregator(4).aggregate([output(one) for one in said], 0)
    assert carried is not None
    assert carried.kv_connector_output is not None
    assert carried.kv_connector_output.kv_connector_worker_meta.weights.number == 3


WEIGHTS = """
import inspect
import json
from types import SimpleNamespace
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.worker.gpu_worker import Worker
public = [name for name, _ in inspect.getmembers(Worker, callable) if not name.startswith("_")]
from lmcache_xpu.kv_connector import patches
events = []
for name in patches.WEIGHT_CHANGES:
    setattr(Worker, name, lambda worker, *args, name=name, **kwargs: events.append(name) or args)
patches.install()
ours = SimpleNamespace(change_weights=lambda: events.append("told"))
among_others = SimpleNamespace(_connectors=[SimpleNamespace(), ours])
found = []
for connector in (None, SimpleNamespace(), ours, among_others):
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    for name in patches.WEIGHT_CHANGES:
        events.clear()
        assert getattr(Worker, name)(None, 7) == (7,)
        found.append([name, *events])
print(json.dumps([public, list(patches.WEIGHT_CHANGES), found]))
"""
HARMLESS = {
    "compute_weight_checksums",
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "supports_draft_weight_updates",
    "get_model",
    "get_draft_model",
    "get_model_inspection",
    "apply_model",  # runs what it is given
    "compile_or_warm_up_model",
    "execute_model",
    "save_tensorized_model",
    "update_max_model_len",
}


def test_our_connector_hears_of_changing_weights_before_they_do():
    public, changes, found = run_script(WEIGHTS)
    rounds = [found[at : at + len(changes)] for at in range(0, len(found), len(changes))]
    untold = [[name, name] for name in changes]
    assert rounds[:2] == [untold, untold]
    told = [[name, "told", name] for name in changes]
    assert rounds[2:] == [told, told]
    suspects = {name for name in public if re.search("weight|model|sleep|wake|discard", name)}
    assert suspects == {*changes} | HARMLESS


def test_names_of_an_epoch_go_with_their_requests():
    epochs = Epochs()
    epochs.admit("r", 0)
    epochs.begin()
    assert epochs.of("r") != epochs.current.name
    assert not epochs.is_only("r")
    assert not epochs.is_only("never heard of")
    epochs.finished("r")
    assert epochs.of("r") == epochs.current.name


def test_a_refused_step_loads_and_stores_nothing_and_reports_what_it_lacks():
    from lmcache_xpu.cache_engine.engine import Guard

    guard: Any = object.__new__(Guard)
    guard._unfilled, guard._block_size = set(), 4
    spec = SimpleNamespace(vllm_cached_tokens=4, lmcache_cached_tokens=12, can_load=True)
    waits = SimpleNamespace(vllm_cached_tokens=0, lmcache_cached_tokens=12, can_load=False)
    loads = described("loads")
    loads.load_spec, loads.slot_mapping = spec, torch.arange(40, 56)
    saves = described("saves")
    saves.load_spec, saves.slot_mapping = waits, torch.arange(80, 96)
    nothing = SimpleNamespace(load_spec=None, save_spec=None, slot_mapping=torch.empty(0))
    guard.refuse([loads, saves, nothing])
    assert guard._unfilled == {11, 12}  # not 10, which vLLM has itself
    assert [one.load_spec for one in (loads, saves)] == [None, None]
    assert [one.save_spec.can_save for one in (loads, saves)] == [False, False]
