"""Requests that wait for their loads: the scheduler's half."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from lmcache_xpu.kv_connector.async_loads import AsyncLoads
from lmcache_xpu.kv_connector.step_metadata import StepMetadata
from lmcache_xpu.versions.lmcache import LoadSpec, ReqMeta

BLOCK, CHUNK = 4, 8


def request(name: str, tokens: int = 40, *, prefix: str = "a", computed: int = 0):
    hashes = [f"{prefix}{block}" for block in range(tokens // BLOCK)]
    return SimpleNamespace(
        request_id=name,
        all_token_ids=list(range(tokens)),
        num_tokens=tokens,
        num_computed_tokens=computed,
        block_hashes=hashes,
        sampling_params=None,
    )


@pytest.fixture
def adapter():
    return SimpleNamespace(load_specs={}, config=SimpleNamespace(chunk_size=CHUNK))


@pytest.fixture(autouse=True)
def _no_options(monkeypatch):
    monkeypatch.setattr(
        "lmcache_xpu.kv_connector.async_loads.extract_request_configs", lambda params: None
    )


@pytest.fixture
def loads(adapter) -> AsyncLoads:
    return AsyncLoads(adapter, BLOCK, lambda name, tokens: tokens)


def begin(loads: AsyncLoads, adapter, asked, *, kept: int = 0, promised: int = 32) -> None:
    """A request has its blocks, and waits."""
    adapter.load_specs[asked.request_id] = LoadSpec(kept, promised, can_load=True)
    loads.choose(asked.request_id, waits=True)
    assert loads.allocated(asked, list(range(10)), promised - kept) is None


def described(loads: AsyncLoads, *requests: ReqMeta) -> StepMetadata:
    loads.describe(metadata := StepMetadata(list(requests)))
    return metadata


def test_the_workers_hear_of_a_load_once_and_lmcache_not_at_all(loads, adapter):
    begin(loads, adapter, request("one"), kept=BLOCK)
    assert adapter.load_specs == {}
    (load,) = described(loads).loads
    assert load.req_id == "one"
    assert load.token_ids == list(range(32))
    assert load.slot_mapping.tolist() == list(range(32))
    assert (load.load_spec.vllm_cached_tokens, load.load_spec.lmcache_cached_tokens) == (BLOCK, 32)
    assert described(loads).loads == []


def test_who_was_not_chosen_loads_in_its_step(loads, adapter):
    spec = adapter.load_specs["one"] = LoadSpec(0, 32, can_load=True)
    loads.choose("one", waits=True)
    loads.choose("one", waits=False)  # asked again: there was no room
    assert loads.allocated(request("one"), list(range(10)), 32) is None
    assert adapter.load_specs == {"one": spec}
    assert described(loads).loads == []


def test_who_loads_nothing_does_not_wait(loads, adapter):
    """Another connector of a MultiConnector loads for it."""
    loads.choose("one", waits=True)
    assert loads.allocated(request("one"), [], 0) is None
    assert described(loads).loads == []


@pytest.mark.parametrize(
    ("tokens", "there", "promised"),
    [
        (40, 32, 32),  # all
        (32, 31, 32),  # all, and the last token is computed anew
        (40, 20, 16),  # a part: LMCache stores again what is not a whole chunk
        (32, 4, 0),
    ],
)
def test_lmcache_stores_from_what_has_arrived(loads, adapter, tokens, there, promised):
    begin(loads, adapter, request("one", tokens))
    described(loads)
    assert loads.allocated(request("one", tokens, computed=there), list(range(10)), 0) == there
    assert adapter.load_specs["one"] == LoadSpec(there, promised, can_load=False)
    meta = ReqMeta("one", [], None, load_spec=adapter.load_specs["one"])
    described(loads, meta)
    assert meta.load_spec is None  # the worker loads nothing again
    meta = ReqMeta("one", [], None, load_spec="another load")
    described(loads, meta)
    assert meta.load_spec == "another load"


def test_of_whom_nothing_has_arrived_is_looked_up_again(loads, adapter):
    begin(loads, adapter, request("one"))
    assert loads.missed("one")
    assert not loads.missed("one")
    assert not loads.missed("never asked")


@pytest.mark.parametrize(
    ("other", "kept", "shares"),
    [
        (request("two"), 0, True),
        (request("two"), 3 * BLOCK, True),
        (request("two"), 8 * BLOCK, False),  # the load ends before
        (request("two", prefix="b"), 0, False),
        (request("two", tokens=BLOCK - 1), 0, False),  # no whole block
    ],
)
def test_others_that_begin_alike_wait_for_the_same_blocks(loads, adapter, other, kept, shares):
    first = request("one")
    assert not loads.shares(other, kept)
    begin(loads, adapter, first)
    assert not loads.shares(first, 0)
    assert loads.shares(other, kept) == shares
    loads.allocated(request("one", computed=32), list(range(10)), 0)
    assert not loads.shares(other, kept)


def test_what_another_has_of_vllms_own_is_not_waited_for(loads, adapter):
    begin(loads, adapter, request("one"), kept=2 * BLOCK)
    assert not loads.shares(request("two"), 0)  # vLLM lost the blocks before
    assert loads.shares(request("two"), 2 * BLOCK)


def test_who_has_ended_lets_others_go_on(loads, adapter):
    begin(loads, adapter, request("one"))
    loads.finished("one")
    assert not loads.shares(request("two"), 0)
    assert not loads.missed("one")
    (load,) = described(loads).loads  # vLLM keeps its blocks until the load has ended
    assert load.req_id == "one"


def test_the_first_step_after_vllm_has_heard_names_whose_loads_have_arrived(loads):
    loads.hear({"one"})
    loads.hear(())
    assert described(loads).arrived == {"one"}
    assert described(loads).arrived == frozenset()
