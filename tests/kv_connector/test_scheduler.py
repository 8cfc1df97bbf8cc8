"""The scheduler's half: LMCache's adapter, the worker of its own engine, garbage."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from support.adapter import UnaskedClient

from lmcache_xpu.kv_connector import scheduler
from lmcache_xpu.kv_connector.garbage import GarbageCollection
from lmcache_xpu.kv_connector.load_policy import LoadPolicy
from lmcache_xpu.kv_connector.scheduler import SchedulerSide
from lmcache_xpu.kv_connector.step_metadata import StepMetadata
from lmcache_xpu.transfer.tuning import tuning_of


def step(resumed: set[str]) -> SimpleNamespace:
    cached = SimpleNamespace(
        req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=resumed
    )
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
    )


def test_blocks_that_the_worker_adds_to_a_resumed_request_are_not_added_twice():
    """In one process LMCache's tracker and vLLM's worker hold one list, and both extend it."""
    blocks = [7, 8]
    tracker = SimpleNamespace(allocated_block_ids=blocks)
    adapter = SimpleNamespace(
        lookup_client=UnaskedClient(),
        build_connector_meta=lambda step: SimpleNamespace(requests=[]),
        _request_trackers={"resumed": tracker},
    )
    side = SchedulerSide(adapter, SimpleNamespace(), block_size=16)
    side.describe(step({"resumed", "another connector's"}))
    blocks.append(9)  # the worker's
    assert tracker.allocated_block_ids == [7, 8]


@pytest.mark.parametrize(
    ("group", "same_engine"),
    [
        (None, False),  # in another process
        (SimpleNamespace(_vllm_config="ours"), False),  # another connector
        (SimpleNamespace(_vllm_config="another's", worker_side="a half"), False),
        (SimpleNamespace(_vllm_config="ours", worker_side="a half"), True),
    ],
)
def test_the_scheduler_finds_the_worker_of_its_own_engine(group, same_engine: bool, monkeypatch):
    from vllm.distributed import kv_transfer

    def config(engine: str) -> SimpleNamespace:
        return SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=engine))

    if group is not None:
        group = SimpleNamespace(**vars(group) | {"_vllm_config": config(group._vllm_config)})
    monkeypatch.setattr(kv_transfer, "has_kv_transfer_group", lambda: group is not None)
    monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: group)
    side = SchedulerSide(SimpleNamespace(lookup_client=UnaskedClient()), config("ours"), 16)
    assert side._worker() == ("a half" if same_engine else None)


@pytest.mark.parametrize("near", [False, True])
def test_garbage_waits_from_a_look_up_to_the_end_of_scheduling_or_of_the_step(near, monkeypatch):
    adapter = SimpleNamespace(
        lookup_client=UnaskedClient(), build_connector_meta=lambda step: StepMetadata()
    )
    side = SchedulerSide(adapter, None, 16)
    half = SimpleNamespace(collection=GarbageCollection(), epoch=SimpleNamespace(changed=None))
    monkeypatch.setattr(side, "_worker", lambda: half if near else None)
    monkeypatch.setattr(scheduler, "written_blocks", lambda *args: frozenset())
    asked = SimpleNamespace(
        request_id="r",
        cache_salt=None,
        lora_request=None,
        prompt_embeds=None,
        skip_reading_prefix_cache=False,
    )
    side.admit(asked, 0)
    assert not gc.isenabled()
    cached = SimpleNamespace(resumed_req_ids=set())
    side.describe(
        SimpleNamespace(
            scheduled_new_reqs=[],
            num_scheduled_tokens={},
            total_num_scheduled_tokens=1,
            scheduled_cached_reqs=cached,
        )
    )
    assert gc.isenabled() is not near
    half.collection.allow()
    assert gc.isenabled()


@pytest.mark.parametrize(("far", "waits"), [(0, False), (256, True)])
def test_what_workers_have_on_a_disk_is_fetched_while_its_request_waits(far: int, waits: bool):
    """Inside a step, one rank's slow disk would hold up everybody in it."""
    adapter = SimpleNamespace(
        lookup_client=UnaskedClient(far), get_num_new_matched_tokens=lambda request, kept: 512
    )
    side = SchedulerSide(adapter, SimpleNamespace(), 16, LoadPolicy("auto", tuning_of("cpu")))
    request = SimpleNamespace(
        request_id="r", num_tokens=520, block_hashes=[], mm_features=[], prompt_embeds=None
    )
    side.admit = lambda request, kept: None
    assert side.matched_tokens(request, 0) == (512, waits)
