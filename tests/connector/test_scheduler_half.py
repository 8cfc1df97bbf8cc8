"""The scheduler's half: what vLLM is answered, and what the workers are told of a step."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

from lmcache_xpu.connector import scheduler_half, tracked_request
from lmcache_xpu.connector.connector import LMCacheXPUServerConnector
from lmcache_xpu.connector.load_policy import LoadPolicy
from lmcache_xpu.connector.scheduler_half import SchedulerHalf
from lmcache_xpu.connector.step import WorkerReport
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


@pytest.fixture
def make(monkeypatch):
    """Makes a half, with a worker in its process or not."""
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


# What becomes of a hit


@pytest.mark.parametrize(
    ("engine", "allowed"),
    [
        ({}, True),
        ({"groups": 2}, True),
        ({"ranks": 2}, False),
        ({"zeroes": True}, False),
        ({"groups": 2, "recurrent": True}, False),
        ({"groups": 2, "states": 1, "zeroes": True}, True),
        ({"groups": 3, "states": 1, "zeroes": True, "window": 128}, False),
        ({"groups": 2, "states": 1, "ranks": 2}, False),
        ({"groups": 2, "window": 128}, False),
    ],
    ids=[
        *("alone", "groups", "ranks", "zeroes", "states from a server", "states"),
        *("states and windows alone", "states and ranks", "windows alone"),
    ],
)
def test_loads_are_inside_steps_where_they_can_and_the_scheduler_says_so(make, engine, allowed):
    half = make(**engine)
    assert half.policy.loads == "async"
    half.load_in_steps()
    assert half.policy.loads == ("auto" if allowed else "async")


def test_states_are_waited_for_where_vllm_would_lack_a_block(make):
    """Of a request of 1,000 tokens: 63 blocks of attention, and 3 of its states."""
    for free, waits in ((66, False), (65, True)):
        half = make(groups=2, states=1, loads="step", free=free)
        half.load_in_steps()
        assert half.matched_tokens(request(shared_prefix_boundary=0), 0) == (768, waits)


def test_what_a_step_loads_is_not_zeroed(make):
    half = make(groups=2, states=1, loads="step")
    half.load_in_steps()
    asked = request(shared_prefix_boundary=0)
    half.matched_tokens(asked, 0)
    half.allocated(asked, blocks(63, groups=2), 768)
    output = step(("a", 768, 232))
    output.new_block_ids_to_zero = [1, 2, 48, 49, 63, 70]
    half.describe(output)
    assert output.new_block_ids_to_zero == [49, 63, 70]


@pytest.mark.parametrize(
    ("loads", "answer"), [("step", (768, False)), ("async", (768, True)), ("auto", (768, False))]
)
def test_what_is_chosen_is_answered(make, loads, answer):
    half = make(loads=loads)
    assert half.matched_tokens(request(), 0) == (768, True)  # nobody begins it anew
    half.load_in_steps()
    assert half.matched_tokens(request(), 0) == answer


@pytest.mark.parametrize(
    ("kept", "answer"), [(0, (768, True)), (300, (468, True)), (768, (0, False)), (900, (0, False))]
)
def test_what_vllm_has_itself_is_not_loaded(make, kept, answer):
    assert make().matched_tokens(request(), kept) == answer


def test_of_a_whole_prompt_the_last_token_is_computed(make):
    assert make().matched_tokens(request(HIT), 0) == (HIT - 1, True)


def test_while_the_server_looks_vllm_asks_again(make):
    half = make()
    half._lookups.hit = None
    assert half.matched_tokens(request(), 0) == (None, True)
    half._lookups.hit = HIT
    assert half.matched_tokens(request(), 0) == (HIT, True)
    assert half._keys.begun == 1


def test_a_request_is_looked_up_when_it_arrives(make):
    half = make()
    half.arrived(request())
    assert half._lookups.calls == [("begin", "a", 768)]
    assert half.matched_tokens(request(), 0) == (768, True)
    assert half._keys.begun == 1


@pytest.mark.parametrize("why", ["whole prompt", "session", "epochs"])
def test_some_are_looked_up_when_they_are_scheduled(make, why):
    half = make()
    half._keys.is_mixed = why == "epochs"
    whole = why == "whole prompt"
    half.arrived(request(skip_reading_prefix_cache=whole, resumable=why == "session"))
    assert half._lookups.calls == []
    assert not half._requests


def test_the_server_hears_whether_anybody_waits_beside_a_request(make):
    for engines, alone in ((1, True), (2, False)):
        half = make(engines=engines)
        half.matched_tokens(request(), 0)
        assert half._lookups.asked == [("a", 768, alone)]
    half = make()
    half.policy._running = {"other"}
    half.matched_tokens(request(), 0)
    assert half._lookups.asked == [("a", 768, False)]


@pytest.mark.parametrize("why", ["failed", "whole prompt", "broken"])
def test_some_requests_are_not_looked_up(make, why):
    half = make()
    if why == "failed":
        half.give_up_hits("a")
    if why == "broken":
        half.promises.fail(["a"])
    asked = request(skip_reading_prefix_cache=why == "whole prompt")
    assert half.matched_tokens(asked, 0) == (0, False)
    assert half._lookups.asked == []


def waiting(half, **fields):
    """A request that waits for its load."""
    waits = request(request_id="waits", block_hashes=list("abcdefgh" * 8), **fields)
    assert half.matched_tokens(waits, 0) == (HIT, True)
    half.allocated(waits, blocks(63), HIT)
    return waits


def test_a_request_that_begins_alike_is_asked_for_again_until_the_load_has_ended(make):
    half = make(loads="async")
    first, second = waiting(half), request(request_id="b", block_hashes=list("abcdefgh" * 8))
    assert half.matched_tokens(second, 0) == (None, True)
    half.describe(step())
    assert half.matched_tokens(second, 0) == (None, True)
    half.allocated(first, blocks(63), 0)  # vLLM goes on with it
    assert half.matched_tokens(second, HIT) == (0, False)


@pytest.mark.parametrize(
    ("loads", "kept", "released"),
    [("async", 0, (0, HIT)), ("async", CHUNK + 16, (CHUNK, HIT)), ("step", 0, (0, HIT))],
)
def test_what_no_worker_was_told_of_is_unlocked(make, loads, kept, released):
    half, asks = make(loads=loads, worker=True), request()
    half.load_in_steps()
    half.matched_tokens(asks, kept)
    half.allocated(asks, blocks(63), HIT - kept)
    half._lookups.calls.clear()
    half.describe_failed(step(("a", HIT, 232)))
    calls = [call for call in half._lookups.calls if call[0] == "release"]
    assert calls == [("release", *released)]
    half.describe_failed(step())
    assert len([call for call in half._lookups.calls if call[0] == "release"]) == len(calls)


@pytest.mark.parametrize("why", ["it failed", "it ended", "it has what is loaded"])
def test_it_waits_no_longer_than_that(make, why):
    half = make(loads="async")
    first, second = waiting(half), request(request_id="b", block_hashes=list("abcdefgh" * 8))
    half.describe(step())
    if why == "it failed":
        assert half.matched_tokens(first, 0) == (0, False)
    elif why == "it ended":
        half.finished(first)
    kept = 0 if why != "it has what is loaded" else HIT
    assert half.matched_tokens(second, kept) == (HIT - kept, kept < HIT)


@pytest.mark.parametrize(("options", "other"), [({"keeps_prefixes": False}, "a"), ({}, "x")])
def test_others_load_their_own(make, options, other):
    """Where vLLM has no prefix cache, and of another prompt."""
    half = make(loads="async", **options)
    waiting(half)
    second = request(request_id="b", block_hashes=list(f"{other}bcdefgh" * 8))
    assert half.matched_tokens(second, 0) == (HIT, True)


def test_a_request_whose_load_brought_nothing_is_computed(make):
    """vLLM asks again, though the request has its blocks: else it would wait for ever."""
    half = make()
    half.matched_tokens(request(), 0)
    half.allocated(request(), blocks(63), 768)
    assert [load.end for load in half.describe(step()).waiting] == [768]
    assert half.matched_tokens(request(), 0) == (0, False)
    half.allocated(request(), blocks(63), 0)
    assert half.describe(step(("a", 0, 512))).stores[0].end == 512
    assert len(half._lookups.asked) == 1


def test_a_preempted_request_begins_anew(make):
    half = make()
    half.matched_tokens(request(), 0)
    half.allocated(request(), blocks(63), 768)
    half.describe(step(("a", 768, 232)))
    again = request(status=RequestStatus.PREEMPTED)
    assert half.matched_tokens(again, 0) == (768, True)
    assert half.matched_tokens(again, 0) == (768, True)
    assert half._keys.begun == 2


# Blocks and locks


def test_chunks_that_nobody_loads_are_unlocked(make):
    for tokens, kept, unlocked in ((768, 0, 0), (468, 300, 288), (0, 800, 768)):
        half = make()
        half.matched_tokens(request(), kept)
        half.allocated(request(), blocks(63), tokens)
        assert ("release", 0, unlocked) in half._lookups.calls
        assert ("forget", "a") in half._lookups.calls


def test_a_hit_that_is_computed_unlocks_all_and_is_not_stored_again(make, monkeypatch):
    half = make()
    half.load_in_steps()
    monkeypatch.setattr(LoadPolicy, "computes", lambda *_: True)
    assert half.matched_tokens(request(1100), 0) == (0, False)
    half.allocated(request(1100), blocks(69), 0)
    assert ("release", 0, 768) in half._lookups.calls
    told = half.describe(step(("a", 0, 1100)))
    assert (told.computed_hits, told.loads, told.waiting) == (1, [], [])
    assert [(store.start, store.end) for store in told.stores] == [(768, 1024)]


def test_a_load_names_the_chunks_that_vllm_lacks(make):
    half = make()
    half.matched_tokens(request(), 300)
    half.allocated(request(), blocks(63), 468)
    [load] = half.describe(step()).waiting
    assert (load.request_id, load.start, load.end, load.kept) == ("a", 256, 768, 32)
    assert load.blocks == [list(range(17, 49))]
    assert (load.salt, len(load.tokens)) == ("salt 1", 1000)
    assert half.describe(step()).waiting == []  # told once


# Stores


def stored(half, *steps):
    """Chunks that steps store: (first token, the one behind the last)."""
    half._lookups.hit = 0
    return [[(store.start, store.end) for store in half.describe(each).stores] for each in steps]


def test_a_prompt_is_stored_chunk_by_chunk_as_it_is_computed(make):
    half = make()
    half._lookups.hit = 0
    half.matched_tokens(request(), 0)
    half.allocated(request(), blocks(32), 0)
    more = (list(range(40, 71)),)
    steps = (
        step(("a", 0, 300)),
        step(cached=[("a", 300, 212, None)]),
        step(cached=[("a", 512, 488, more)]),
    )
    assert stored(half, *steps) == [[(0, 256)], [(256, 512)], [(512, 768)]]


@pytest.mark.parametrize(("answers", "end"), [(False, 512), (True, 768)])
def test_answers_are_stored_where_that_was_chosen(make, answers, end):
    half = make(answers=answers)
    half._lookups.hit = 0
    asked = request(800, prompt=600)
    half.matched_tokens(asked, 0)
    half.allocated(asked, blocks(60), 0)
    assert stored(half, step(("a", 0, 800))) == [[(0, end)]]


def test_no_more_is_stored_than_there_are_blocks_for(make):
    half = make()
    half._lookups.hit = 0
    half.matched_tokens(request(), 0)
    half.allocated(request(), blocks(20), 0)
    assert stored(half, step(("a", 0, 1000))) == [[(0, 256)]]


@pytest.mark.parametrize("why", ["client", "name", "consumer", "failed", "reset"])
def test_some_requests_store_nothing(make, why):
    half = make(producer=why != "consumer")
    half._lookups.hit = 0
    half._keys.stores = why != "name"
    asked = request(options={"lmcache.max_offload_tokens": 0} if why == "client" else None)
    half.matched_tokens(asked, 0)
    half.allocated(asked, blocks(63), 0)
    if why == "failed":
        half.end_step(WorkerReport({"a"}), {"a"})
    if why == "reset":
        assert half.reset()
    assert stored(half, step(("a", 0, 1000))) == [[]]


def test_a_store_names_what_it_was_computed_from_where_loads_are_inside_steps(make):
    for allowed, sources in ((False, {}), (True, {"a": list(range(1, 49))})):
        half = make()
        half._lookups.hit = 0
        if allowed:
            half.load_in_steps()
        half.matched_tokens(request(), 0)
        half.allocated(request(), blocks(63), 0)
        assert half.describe(step(("a", 0, 1000))).sources == sources


def windows_first(half):
    """Let the second group alone keep all of a prompt; its blocks begin at 101."""
    whole = half._whole
    half._whole = dataclasses.replace(whole, number=1)
    return SimpleNamespace(get_block_ids=lambda: ([0] * 63, list(range(101, 164))))


def test_of_several_groups_a_store_names_the_blocks_that_no_window_gives_back(make):
    half = make(groups=2)
    blocks = windows_first(half)
    half.load_in_steps()
    half._lookups.hit = 0
    half.matched_tokens(request(), 0)
    half.allocated(request(), blocks, 0)
    assert half.describe(step(("a", 0, 1000))).sources == {"a": list(range(101, 149))}


def test_of_several_groups_a_load_that_nobody_described_names_them_too(make):
    """By them vLLM's scheduler knows its request."""
    half, asks = make(groups=2), request()
    blocks = windows_first(half)
    half.load_in_steps()
    half.matched_tokens(asks, CHUNK)
    half.allocated(asks, blocks, HIT - CHUNK)
    unserved = half.describe_failed(step(("a", HIT, 232))).unserved
    assert unserved.blocks == set(range(101 + CHUNK // BLOCK, 101 + HIT // BLOCK))


def test_damage_is_told_to_who_names_chunks(make):
    half = make()
    half.end_step(WorkerReport(damaged={"a"}), ())
    assert ("damaged", "a") in half._keys.told


def test_a_reset_lets_requests_that_are_looked_up_ask_anew(make):
    half = make()
    half._lookups.hit = None
    half.matched_tokens(request(), 0)
    assert half.reset()
    half.matched_tokens(request(), 0)
    assert half._keys.begun == 2


def test_a_request_that_ends_leaves_nothing(make):
    half = make()
    half.matched_tokens(request(), 0)
    half.finished(request())
    assert not half._requests
    assert ("end", "a") in half._lookups.calls


# A worker in this process


def test_it_begins_a_step_that_loads(make):
    for worker in (True, False):
        half = make(worker=worker, loads="step")
        half.load_in_steps()
        half.describe(step())
        assert half.beside.begun == []
        half.matched_tokens(request(), 0)
        half.allocated(request(), blocks(63), 768)
        told = half.describe(step(("a", 768, 232)))
        assert [load.end for load in told.loads] == [768]
        assert half.beside.begun == ([told] if worker else [])


def test_the_connection_ends_with_the_connector(make):
    half = make()
    half.shutdown()
    half._client.close.assert_called_once_with()


# The facade


def test_a_look_up_that_fails_is_made_again_without_the_server():
    connector = LMCacheXPUServerConnector.__new__(LMCacheXPUServerConnector)
    connector.scheduler_half = Mock()
    connector.scheduler_half.matched_tokens.side_effect = [KeyError("planted"), (0, False)]
    assert connector.get_num_new_matched_tokens(request(), 0) == (0, False)
    connector.scheduler_half.give_up_hits.assert_called_once_with("a")


def test_steps_end_where_states_can_be_hit_again(make):
    """At first where earlier prompts parted, then below the prompt's end."""
    half = make(recurrent=True)
    half._lookups.hit, half._lookups.shared = 0, lambda tokens: 256
    asked = request(shared_prefix_boundary=0)
    half.matched_tokens(asked, 0)
    assert asked.shared_prefix_boundary == 256
    half._ends.go_on(asked, 256)
    assert asked.shared_prefix_boundary == 512
