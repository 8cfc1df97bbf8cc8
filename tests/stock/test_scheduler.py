"""Which requests LMCache is shown, and what workers are told of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from support.requests import request
from support.steps import step

from lmcache_xpu.errors import SeamError
from lmcache_xpu.stock import scheduler as module
from lmcache_xpu.stock.scheduler import StockScheduler, may_be_served

BLOCK = 16


class Lmcache:
    """LMCache's half of a connector, which has 32 tokens of each request."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.load_specs: dict[str, Any] = {}
        self.lookup_client = SimpleNamespace(
            clear_lookup_status=lambda name: self.heard.append(("cleared", name))
        )

    def get_num_new_matched_tokens(self, request: Any, kept: int) -> int:
        self.heard.append(("asked", request.request_id))
        self.load_specs[request.request_id] = object()
        return 32 - kept

    def update_state_after_alloc(self, request: Any, tokens: int) -> None:
        self.heard.append(("allocated", request.request_id, tokens))

    def build_connector_meta(self, step: Any) -> Any:
        self.heard.append(("step", [new.req_id for new in step.scheduled_new_reqs]))
        return SimpleNamespace(requests=[])

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, None]:
        self.heard.append(("finished", request.request_id))
        return False, None


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> StockScheduler:
    def without(step: Any, names: Any) -> Any:
        new = [each for each in step.scheduled_new_reqs if each.req_id not in names]
        return SimpleNamespace(
            scheduled_new_reqs=new, scheduled_cached_reqs=step.scheduled_cached_reqs
        )

    monkeypatch.setattr(module, "without", without)
    return StockScheduler(Lmcache(), BLOCK)


def heard(side: StockScheduler) -> list[Any]:
    return side._lmcache.heard


def blocks(*numbers: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(numbers),))


def described(side: StockScheduler, *new: str) -> Any:
    seen = step(new=[(name, [5, 6, 7], 32) for name in new])
    seen.num_scheduled_tokens = dict.fromkeys(new, 1)
    return side.describe(seen)


APART = {
    "salt": {"cache_salt": "s"},
    "adapter": {"lora": object()},
    "embeddings": {"prompt_embeds": object()},
    "image": {"mm_features": [object()]},
    "whole prompt": {"computed": True},
    "transfer": {"kv_transfer_params": {"lmcache.tag.a": "b"}},
}


@pytest.mark.parametrize("what", APART)
def test_lmcache_is_not_shown_what_its_keys_do_not_tell(side: StockScheduler, what: str):
    asked = request(**APART[what])
    assert may_be_served(request())
    assert not may_be_served(asked)
    assert side.matched_tokens(asked, 0) == 0
    side.allocated(asked, blocks(5, 6, 7), 0)
    described(side, "r")
    assert side.finished(asked, []) == (False, None)
    assert heard(side) == [("step", [])]


def test_others_are_shown(side: StockScheduler):
    assert side.matched_tokens(request(), 16) == 16
    side.allocated(request(), blocks(5, 6, 7), 16)
    assert described(side, "r").ended == ()
    side.finished(request(), [])
    assert heard(side) == [
        ("asked", "r"),
        ("allocated", "r", 16),
        ("step", ["r"]),
        ("finished", "r"),
    ]


def test_a_request_whose_load_failed_is_computed_until_it_ends(side: StockScheduler):
    side.matched_tokens(request(), 0)
    side.give_up_hits("r")
    assert side.matched_tokens(request(), 0) == 0
    described(side, "r")
    assert heard(side)[1:] == [("step", [])]
    side.finished(request(), [])
    assert side.matched_tokens(request(), 0) == 32  # another one of that name


def test_a_promise_that_breaks_is_told_as_a_failed_load(side: StockScheduler):
    side.matched_tokens(request(), 0)
    side.allocated(request(), blocks(5, 6, 7), 32)
    side.give_up_hits("r")
    told = described(side, "r")
    assert told.unserved == {5, 6}
    assert told.new_blocks >= {5, 6}
    assert heard(side)[-1] == ("step", [])


def test_a_step_that_can_not_be_described_moves_nothing(side: StockScheduler):
    side.matched_tokens(request(), 0)
    side.allocated(request(), blocks(5, 6, 7), 32)
    seen = step(new=[("r", [5, 6, 7], 32)])
    seen.num_scheduled_tokens = {"r": 1}
    told = side.describe_failed(seen)
    assert told.lmcache.requests == []
    assert told.unserved == {5, 6}


def test_what_was_only_looked_up_is_unpinned_with_the_next_step(side: StockScheduler):
    for name in ("scheduled", "aborted"):
        side.matched_tokens(request(name), 0)
    described(side, "scheduled")
    for name in ("scheduled", "aborted"):
        side.finished(request(name), [])
    assert described(side).ended == ("aborted",)
    assert described(side).ended == ()
    assert ("cleared", "aborted") in heard(side)
    assert ("cleared", "scheduled") not in heard(side)
    assert "aborted" not in side._lmcache.load_specs


def test_after_a_stop_lmcache_hears_of_nothing(side: StockScheduler, caplog):
    side.matched_tokens(request("running"), 0)
    described(side, "running")
    side.matched_tokens(request("waits"), 0)
    for _ in range(2):
        side.stop("the cache was reset")
    assert caplog.text.count("the cache was reset") == 1
    heard(side).clear()
    assert side.matched_tokens(request("waits"), 0) == 0
    assert described(side, "running", "waits").ended == ("waits",)
    side.finished(request("running"), [])
    assert heard(side) == [("step", [])]


def test_lmcache_without_a_look_up_client_is_refused():
    lmcache = Lmcache()
    lmcache.lookup_client = None
    with pytest.raises(SeamError, match="without a cache"):
        StockScheduler(lmcache, BLOCK)


def test_lmcache_has_its_own_list_of_a_preempted_request_s_blocks():
    seen = SimpleNamespace(resumed_req_ids=set(), new_block_ids=[([1],)])
    whole = SimpleNamespace(scheduled_cached_reqs=seen)
    assert module._with_own_blocks(whole) is whole
