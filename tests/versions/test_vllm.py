"""What differs between versions of vLLM, on both sides of each change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import BlockRemoved
from vllm.v1.core import kv_cache_utils

from lmcache_xpu.versions import vllm


class Earlier:
    """Of vLLM 0.26's scheduler, what is asked here."""

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        request.preempted = True


class Later:
    """Of vLLM 0.27's and younger."""

    def _preempt_request(
        self, request: Any, timestamp: float, drop_stale_output: bool = False
    ) -> None:
        request.dropping = drop_stale_output


def test_what_is_under_way_of_a_preempted_request_is_dropped():
    request = SimpleNamespace()
    vllm.preempt(Later(), request, 0.0, 1)
    assert request.dropping


@pytest.mark.parametrize(
    ("in_flight", "placeholders", "dropped"),
    [
        pytest.param(512, 0, 0, id="this step alone, which computes a part of the prompt"),
        pytest.param(512, 1, 0, id="this step alone, which answers and is skipped"),
        pytest.param(513, 2, 1, id="a later step answers as well"),
        pytest.param(600, 1, 1, id="a later step answers first"),
        pytest.param(1024, 0, 0, id="a later step computes a part of the prompt"),
    ],
)
def test_vllm_0_26_is_told_how_many_outputs_are_dropped(in_flight, placeholders, dropped):
    request = SimpleNamespace(num_in_flight_tokens=in_flight, num_output_placeholders=placeholders)
    vllm.preempt(Earlier(), request, 0.0, 512)
    assert request.preempted
    assert request.async_tokens_to_discard == dropped
    assert request.num_output_placeholders == 0


def test_an_event_gets_the_fields_that_it_has():
    class Removed(msgspec.Struct):
        """As before vLLM 0.29."""

        block_hashes: list[int]

    assert vllm.event_fields(BlockRemoved, ownership="local") == {"ownership": "local"}
    assert vllm.event_fields(Removed, ownership="local") == {}


def test_events_have_the_keys_without_the_tags_of_vllm_0_31(monkeypatch):
    assert vllm.event_extra_keys([("lora", "adapter"), None][1:]) == [None]
    monkeypatch.delattr(kv_cache_utils, "to_event_extra_keys")
    assert vllm.event_extra_keys([("adapter",), None]) == [("adapter",), None]


def test_what_came_later_has_its_only_value_before():
    assert vllm.is_transferred(SimpleNamespace())
    assert not vllm.is_transferred(SimpleNamespace(enable_kv_transfer=False))
    assert vllm.tokens_per_state(SimpleNamespace()) == 1
    assert vllm.tokens_per_state(SimpleNamespace(tokens_per_state=4)) == 4


def test_older_specs_are_read_by_their_names():
    old = SimpleNamespace(num_kv_heads=8, block_size=64, real_page_size_bytes=64 * 8 * 512)
    new = SimpleNamespace(num_heads=8, state_content_size_bytes=512)
    for spec in (old, new):
        assert (vllm.kv_heads(spec), vllm.content_bytes(spec)) == (8, 512)
