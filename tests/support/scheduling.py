"""A scheduler's half with imitations of what it asks, for tests of what it answers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from vllm.v1.request import RequestStatus

from lmcache_xpu.connector import scheduler_half, tracked_request
from lmcache_xpu.connector.scheduler_half import SchedulerHalf
from lmcache_xpu.model.kv_cache_groups import CacheGroup

CHUNK, BLOCK, HIT = 256, 16, 768


class LookUps:
    """The server's answers, and what it was told."""

    def __init__(self):
        self.hit = HIT
        self.asked: list[tuple[str, int, bool]] = []
        self.calls: list[tuple[object, ...]] = []

    def find(self, tokens, *, is_alone):
        self.asked.append((tokens.request_id, tokens.end, is_alone))
        return self.hit

    def begin(self, tokens):
        self.calls.append(("begin", tokens.request_id, tokens.end))

    def release(self, tokens, hit_tokens):
        self.calls.append(("release", tokens.start, tokens.end))

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args)) or True


class Keys:
    """Salts that say how often a request began."""

    def __init__(self, *_):
        self.begun = self.epoch = 0
        self.stores = True
        self.is_mixed = False
        self.told: list[object] = []

    def admit(self, request, kept):
        self.begun += 1
        return f"salt {self.begun}", self.stores

    def outdated(self):
        return []

    def __getattr__(self, name):
        return lambda *args: self.told.append((name, *args))


def maker(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SchedulerHalf]:
    """Return a function that makes a half, with a worker in its process or not."""
    monkeypatch.setattr(scheduler_half, "Keys", Keys)
    monkeypatch.setattr(
        tracked_request,
        "extract_request_configs_from_request",
        lambda r: r.options,
        raising=False,
    )

    def make(
        *,
        ranks: int = 1,
        engines: int = 1,
        zeroes: bool = False,
        groups: int = 1,
        loads: str = "auto",
        worker: bool = False,
        answers: bool = False,
        producer: bool = True,
        keeps_prefixes: bool = True,
        recurrent: bool = False,
        states: int = 0,
        window: int | None = None,
        free: int = 1000,
    ) -> SchedulerHalf:
        beside = SimpleNamespace(begun=[])
        beside.begin_ahead = beside.begun.append
        monkeypatch.setattr(scheduler_half, "worker_half", lambda _: beside if worker else None)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=ranks, data_parallel_size=engines),
            kv_transfer_config=SimpleNamespace(is_kv_producer=producer),
            cache_config=SimpleNamespace(enable_prefix_caching=keeps_prefixes),
            speculative_config=None,
            num_speculative_tokens=0,
            kv_events_config=None,
        )
        spec = SimpleNamespace(block_size=BLOCK)
        kv_cache = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * groups,
            needs_kv_cache_zeroing=zeroes,
        )
        stored = [
            CacheGroup(
                number=number,
                layers=(),
                block_tokens=BLOCK,
                window=CHUNK if number >= groups - states else window,
                recurrent=recurrent or number >= groups - states,
            )
            for number in range(groups)
        ]
        options = {"xpu.loads": loads, "lmcache.mp.save_decode_cache": answers}
        local = Mock() if states else None
        client = Mock(chunk_tokens=CHUNK, local=local, lookups=lambda policy: LookUps())
        half = SchedulerHalf(config, kv_cache, options, client, stored)
        half.beside = beside
        if states:
            half._keys.pool = SimpleNamespace(get_num_free_blocks=lambda: free)
            client.local = None  # requests here have tokens, and no hashes
        return half

    return make


def request(tokens: int = 1000, prompt: int | None = None, features=(), **fields):
    made = SimpleNamespace(
        request_id="a",
        num_tokens=tokens,
        all_token_ids=list(range(tokens)),
        prompt_token_ids=list(range(prompt or tokens)),
        num_prompt_tokens=prompt or tokens,
        skip_reading_prefix_cache=False,
        mm_features=list(features),
        mm_hashes=None,
        status=RequestStatus.WAITING,
        options=None,
    )
    vars(made).update(fields)
    return made


def blocks(count: int, groups: int = 1):
    ids = tuple(list(range(1, 1 + count)) for _ in range(groups))
    return SimpleNamespace(get_block_ids=lambda: ids)


def step(*new, cached=(), resumed=(), scheduled=None):
    """vLLM's step: of new requests (name, computed, scheduled), of others also new blocks."""
    names = [row[0] for row in (*new, *cached)]
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=n, num_computed_tokens=c, block_ids=([],)) for n, c, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[row[0] for row in cached],
            num_computed_tokens=[row[1] for row in cached],
            new_block_ids=[row[3] for row in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=dict(zip(names, [row[2] for row in (*new, *cached)], strict=True)),
        total_num_scheduled_tokens=sum(row[2] for row in (*new, *cached)),
    )
