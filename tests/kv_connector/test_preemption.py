"""A request is preempted while its KV cache is being stored, and its blocks are used anew.

The device is played: what is enqueued beside the engine runs when the engine's stream waits for it,
or else at the end, by when the blocks hold something else.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
from support.adapter import UnaskedClient
from support.caches import Spec, bits, build
from support.connectors import make, memory, slots_of
from support.halves import Facade, worker_side
from support.loads import ENDS, SPANS, STARTS
from support.steps import step
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from lmcache_xpu.gpu_connector.in_flight import InFlight
from lmcache_xpu.kv_connector.connector import LMCacheXPUConnector
from lmcache_xpu.kv_connector.scheduler import SchedulerSide
from lmcache_xpu.kv_connector.step_metadata import StepMetadata, written_blocks
from lmcache_xpu.transfer.devices import StoreHandle, TransferHandle
from lmcache_xpu.transfer.staging import Stager

BLOCK = 4
OLD = [4, 1, 3]  # blocks of the request that is preempted


class Late:
    """A store on a stream of its own."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def reached(self) -> bool:
        return self._run is None

    def wait(self) -> None:
        if self._run is not None:
            self._run()
            self._run = None

    def synchronize(self) -> None:
        self.wait()

    def seconds_until(self, later: Late) -> float:
        return 0.0


def stores_late(monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    begun: list[Late] = []
    store = Stager.store

    def later(self, *args):
        begun.append(Late(lambda: store(self, *args)))
        return StoreHandle(TransferHandle(begun[-1], begun[-1]), begun[-1])

    monkeypatch.setattr(Stager, "store", later)
    return begun


def preempted_during_its_store(hook: Any, new: list[int], monkeypatch) -> tuple[Any, Any]:
    """What the store brought to the host, and what it should have."""
    cache = build(Spec("BLHNC", layers=6))
    call = {"starts": STARTS, "ends": ENDS, "slot_mapping": slots_of(*OLD)[:11]}

    def store() -> tuple[Any, InFlight]:
        connector = make(cache)
        connector.overlap = InFlight(block_tokens=BLOCK)
        objs = [memory(connector, end - start) for start, end in zip(*SPANS, strict=True)]
        connector.batched_from_gpu(objs, kvcaches=cache.engine, **call)
        return objs, connector.overlap

    wanted, _ = store()
    begun = stores_late(monkeypatch)
    objs, overlap = store()
    assert [late.reached() for late in begun] == [False]

    ours = Facade(worker=worker_side(in_flight=overlap))
    written = written_blocks(step(new=[("another", new, 0)]), BLOCK, {})
    hook(ours, StepMetadata(new_blocks=written, tokens=1))
    cache.raw.zero_()  # as vLLM does with new blocks, while it prepares the step
    begun[0].wait()
    overlap.drain()
    return objs, wanted


def same(objs: Any, wanted: Any) -> bool:
    return all(
        torch.equal(bits(a.tensor), bits(b.tensor)) for a, b in zip(objs, wanted, strict=True)
    )


@pytest.mark.parametrize("new", [[4, 0], [0, 3], [1, 3, 4]])
def test_what_is_stored_is_what_the_request_computed(new: list[int], monkeypatch):
    hook = LMCacheXPUConnector.handle_preemptions
    assert same(*preempted_during_its_store(hook, new, monkeypatch))


def test_without_the_hook_it_would_be_what_came_after(monkeypatch):
    hook = KVConnectorBase_V1.handle_preemptions
    assert not same(*preempted_during_its_store(hook, [4, 0], monkeypatch))


def request(name: str = "r") -> Any:
    return SimpleNamespace(
        request_id=name,
        cache_salt=None,
        lora_request=None,
        prompt_embeds=None,
        skip_reading_prefix_cache=False,
    )


def test_blocks_that_another_connector_fills_are_protected_too(monkeypatch):
    """vLLM counts their tokens as computed; and they may be filled before the request runs."""
    adapter = SimpleNamespace(
        lookup_client=UnaskedClient(),
        load_specs={},
        build_connector_meta=lambda step: StepMetadata(),
        update_state_after_alloc=lambda request, tokens: None,
        request_finished=lambda request, blocks: (False, None),
    )
    side = SchedulerSide(adapter, SimpleNamespace(), BLOCK)
    monkeypatch.setattr(side, "_worker", lambda: None)
    side.admit(request(), 2 * BLOCK)
    side.allocated(request(), SimpleNamespace(get_block_ids=lambda: ([7, 8, 9, 5],)), 0)

    def written(**arguments: Any) -> frozenset[int]:
        now = step(**arguments)
        now.total_num_scheduled_tokens, now.num_scheduled_tokens = 1, {}
        blocks = side.describe(now).new_blocks
        assert blocks is not None
        return blocks

    assert written() == {9, 5}  # the first two were the engine's own
    assert written(new=[("r", [7, 8, 9, 5], 4 * BLOCK)]) == set()  # they are full by now
    side.finished(request(), [])
    assert not side._kept
