"""Which requests LMCache is shown, and how."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from support.requests import request
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from lmcache_xpu.stock.half import StockHalf
from lmcache_xpu.stock.scheduler import StockScheduler, as_shown, may_be_served

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "vllm", "lmcache", "transformers")
]


class Lmcache:
    """LMCache's half of a connector, which has 32 tokens of each request."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.load_specs: dict[str, Any] = {}
        self.cleared: list[str] = []
        self.lookup_client = SimpleNamespace(clear_lookup_status=self.cleared.append)

    def get_num_new_matched_tokens(self, request: Any, kept: int) -> int:
        self.heard.append(("asked", request.request_id))
        self.load_specs[request.request_id] = object()
        return 32 - kept

    def update_state_after_alloc(self, request: Any, tokens: int) -> None:
        self.heard.append(("allocated", request.request_id, tokens))

    def build_connector_meta(self, step: Any) -> Any:
        self.heard.append(("step", [new.req_id for new in step.scheduled_new_reqs]))
        return "a step"

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, None]:
        self.heard.append(("finished", request.request_id))
        return False, None


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> StockScheduler:
    monkeypatch.setattr(
        StockHalf, "__init__", lambda self, lmcache: setattr(self, "lmcache", lmcache)
    )
    return StockScheduler(Lmcache())


def new_request(name: str, prompt: list[int], prefill: list[int] | None = None) -> NewRequestData:
    return NewRequestData(
        req_id=name,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=([1],),
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=prefill,
    )


def described(side: StockScheduler, *new: str) -> None:
    step = SchedulerOutput.make_empty()
    step.scheduled_new_reqs = [new_request(name, [1, 2]) for name in new]
    assert side.build_connector_meta(step) == "a step"


APART = {
    "salt": {"cache_salt": "s"},
    "adapter": {"lora": object()},
    "embeddings": {"prompt_embeds": object()},
    "image": {"mm_features": [object()]},
    "whole prompt": {"computed": True},
    "transfer": {"kv_transfer_params": {"lmcache.tag.a": "b"}},
    "empty transfer": {"kv_transfer_params": {}},
}


@pytest.mark.parametrize("what", APART)
def test_lmcache_is_not_shown_what_its_keys_do_not_tell(side: StockScheduler, what: str):
    asked = request(**APART[what])
    assert may_be_served(request())
    assert not may_be_served(asked)
    assert side.get_num_new_matched_tokens(asked, 0) == (0, False)
    side.update_state_after_alloc(asked, None, 0)
    described(side, "r")
    assert side.request_finished(asked, []) == (False, None)
    assert side.lmcache.heard == [("step", [])]


def test_others_are_shown(side: StockScheduler):
    assert side.get_num_new_matched_tokens(request(), 16) == (16, False)
    side.update_state_after_alloc(request(), None, 16)
    described(side, "r")
    side.request_finished(request(), [])
    assert side.lmcache.heard == [
        ("asked", "r"),
        ("allocated", "r", 16),
        ("step", ["r"]),
        ("finished", "r"),
    ]


def test_a_request_whose_load_failed_is_computed_until_it_ends(side: StockScheduler):
    side.get_num_new_matched_tokens(request(), 0)
    side.give_up_hits("r")
    assert side.get_num_new_matched_tokens(request(), 0) == (0, False)
    described(side, "r")
    assert side.lmcache.heard[1:] == [("step", [])]
    side.request_finished(request(), [])
    assert side.get_num_new_matched_tokens(request(), 0) == (32, False)  # another one of that name


def test_a_request_that_ends_unscheduled_leaves_no_answer_to_one_of_its_name(side: StockScheduler):
    side.get_num_new_matched_tokens(request(), 0)
    side.request_finished(request(), [])
    assert side.lmcache.cleared == ["r"]
    assert side.lmcache.load_specs == {}


def test_after_a_reset_lmcache_hears_of_nothing(side: StockScheduler, caplog):
    side.get_num_new_matched_tokens(request("running"), 0)
    for _ in range(2):
        assert side.reset_cache()
    assert caplog.text.count("The cache was reset") == 1
    side.lmcache.heard.clear()
    assert side.get_num_new_matched_tokens(request("new"), 0) == (0, False)
    described(side, "running", "new")
    side.request_finished(request("running"), [])
    assert side.lmcache.heard == [("step", [])]


# A step as LMCache sees it


def test_lmcache_sees_the_answers_of_requests_that_the_newer_runner_resumes():
    seen = SchedulerOutput.make_empty()
    seen.scheduled_new_reqs = [
        new_request("resumed", [1, 2], [1, 2, 3]),
        new_request("new", [1, 2], [1, 2]),
        new_request("other runner's", [1, 2]),
        new_request("hidden", [1, 2]),
    ]
    told = as_shown(seen, {"resumed", "new", "other runner's"})
    assert [new.prompt_token_ids for new in told.scheduled_new_reqs] == [[1, 2, 3], [1, 2], [1, 2]]
    # vLLM's own description stays as it is.
    assert len(seen.scheduled_new_reqs) == 4
    assert seen.scheduled_new_reqs[0].prompt_token_ids == [1, 2]


def test_hidden_requests_are_left_out_and_others_keep_what_is_theirs():
    seen = SchedulerOutput.make_empty()
    seen.scheduled_cached_reqs = CachedRequestData(
        req_ids=["a", "b", "c"],
        resumed_req_ids={"b"},
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[([1],), ([2],), None],
        num_computed_tokens=[100, 101, 102],
        num_output_tokens=[1, 0, 7],
    )
    cached = as_shown(seen, {"b", "c", "unknown"}).scheduled_cached_reqs
    assert cached.req_ids == ["b", "c"]
    assert (cached.new_block_ids, cached.num_computed_tokens) == ([([2],), None], [101, 102])
    assert (cached.num_output_tokens, cached.new_token_ids) == ([0, 7], [])
    assert cached.resumed_req_ids == {"b"}
    cached.new_block_ids[0][0].append(3)  # LMCache adds to its list, and vLLM's worker to this one
    assert seen.scheduled_cached_reqs.new_block_ids[1] == ([2],)
