"""Our events with a router that reads them: vllm-router's policy `kv_aware`.

It is a program of its own that was not made for this package, so what it credits is what it
understood of the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("vllm_router")
from support.router import Router, router
from support.tier_events import BLOCK, CHUNK, Engine, groups, request
from vllm.distributed.kv_events import BlockStored

from lmcache_xpu.cache.local_options import CPU, DISK, SHARED

TOKENS = 4 * CHUNK + 3
WHOLE = 4 * CHUNK
CREDIT = {CPU: 0.8, DISK: 0.3, SHARED: 0.6}  # the router's defaults, of tokens that it finds


@pytest.fixture(scope="module")
def routed() -> Iterator[Router]:
    with router(BLOCK) as running_router:
        yield running_router


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + TOKENS))


class Publishing:
    """The half of an engine that publishes, told what its tiers hold."""

    def __init__(self) -> None:
        self._engine = Engine(groups(drafts=0))

    def changed(self, tier: str, tokens: list[int], *, held: bool = True) -> list[Any]:
        self._engine.told(request(tokens))
        self._engine.events.take()
        self._engine.change(tier, self._engine.keys(tokens), held=held)
        return self._engine.events.take()


@pytest.mark.parametrize("tier", [CPU, DISK, SHARED])
@pytest.mark.parametrize("holder", [0, 1])
def test_a_prompt_goes_to_the_engine_whose_tier_holds_it(routed: Router, tier: str, holder: int):
    tokens = prompt(10 * holder + 1 + list(CREDIT).index(tier))
    engine = Publishing()
    stored = engine.changed(tier, tokens)
    credited = int(CREDIT[tier] * WHOLE)
    assert routed.learns(
        holder, stored, tokens, lambda sent, credit: (sent, credit // 2) == (holder, credited // 2)
    )
    assert [routed.ask(tokens)[0] for _ in range(3)] == [holder] * 3
    removed = engine.changed(tier, tokens, held=False)
    assert routed.learns(holder, removed, tokens, lambda sent, credit: credit == 0)


def test_memory_counts_for_more_than_a_disk(routed: Router):
    tokens = prompt(50)
    on_disk, in_memory = Publishing().changed(DISK, tokens), Publishing().changed(CPU, tokens)
    assert routed.learns(0, on_disk, tokens, lambda sent, credit: sent == 0 and credit)
    assert routed.learns(1, in_memory, tokens, lambda sent, credit: sent == 1 and credit)


def test_whole_chunks_in_one_event_as_lmcache_publishes_them_are_not_understood(routed: Router):
    """Why this package has events of its own."""
    tokens = prompt(60)
    lmcaches = BlockStored(
        block_hashes=[5293056341884962908],
        parent_block_hash=None,
        token_ids=tokens[:CHUNK],
        block_size=CHUNK,
        lora_id=None,
        medium="cpu",
        lora_name=None,
    )
    routed.publish(1, [lmcaches])
    ours = Publishing().changed(CPU, prompt(61))
    # Events of one source come in their order.
    assert routed.learns(1, ours, prompt(61), lambda sent, credit: sent == 1 and credit)
    assert routed.ask(tokens)[1] == 0
