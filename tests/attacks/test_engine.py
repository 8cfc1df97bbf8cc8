"""One client against the engine of all: what a request carries raises through no hook of vLLM."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("vllm")
import torch
from safetensors.torch import save

from lmcache_xpu.connector.connector import LMCacheXPUServerConnector
from lmcache_xpu.connector.tracked_request import BlockSizes, TrackedRequest
from lmcache_xpu.model import adapter_names
from lmcache_xpu.stock.scheduler import StockScheduler

CASES = 10_000
FIELDS = (
    *("disagg_spec", "ret_first_tok", "cached_token_stats", "do_remote_prefill", "request_id"),
    *("lmcache.skip_save", "lmcache.tag.user", "lmcache.max_offload_tokens", "receiver_host", "x"),
)


def value(chance: random.Random, depth: int = 0) -> Any:
    kinds = [None, True, 0, -1, 2**70, float("nan"), "", "no", "x" * 1000, b"b", [], {}]
    if depth < 3 and chance.random() < 0.4:
        if chance.random() < 0.5:
            return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
        return {field: value(chance, depth + 1) for field in chance.sample(FIELDS, 3)}
    return chance.choice(kinds)


def parameters(seed: int) -> Any:
    chance = random.Random(seed)
    if chance.random() < 0.05:
        return value(chance)
    return {field: value(chance) for field in chance.sample(FIELDS, chance.randrange(1, 5))}


def request(**fields: Any) -> Any:
    request = SimpleNamespace(
        request_id="r",
        cache_salt=None,
        lora_request=None,
        prompt_embeds=None,
        skip_reading_prefix_cache=False,
        mm_features=[],
        num_tokens=100,
        all_token_ids=[1] * 100,
        output_token_ids=[],
        _output_token_ids=[],
        status=None,
    )
    vars(request).update(fields)
    return request


def test_no_parameters_of_a_request_reach_lmcache_s_own_engine():
    side = StockScheduler.__new__(StockScheduler)
    side.lmcache, side.shown, side.failed, side.stopped = Mock(load_specs={}), set(), set(), False
    for seed in range(CASES):
        sent = request(kv_transfer_params=parameters(seed) or {})
        assert side.get_num_new_matched_tokens(sent, 0) == (0, False)
        side.update_state_after_alloc(sent, None, 0)
        assert side.request_finished(sent, [1, 2]) == (False, None)  # before its first token, too
    assert {call[0] for call in side.lmcache.method_calls} == {"lookup_client.clear_lookup_status"}


def test_no_parameters_of_a_request_raise_where_lmcaches_server_is_asked():
    for seed in range(CASES):
        sampling = SimpleNamespace(extra_args={"kv_transfer_params": parameters(seed)})
        sent = request(sampling_params=sampling, num_prompt_tokens=100, prompt_token_ids=[1] * 100)
        tracked = TrackedRequest(sent, "salt", BlockSizes(16, [16]))
        tracked.allocated([list(range(7))])
        store = tracked.store(100, answers=False)
        assert store is None or store.end <= 96


def test_a_request_that_no_hook_can_read_is_hidden_from_the_others():
    """Of the server's connector: it is computed, and the step goes on without it."""
    connector = LMCacheXPUServerConnector.__new__(LMCacheXPUServerConnector)
    failing = Mock(side_effect=KeyError("planted"))
    half = connector.scheduler_half = Mock(
        matched_tokens=failing, allocated=failing, describe=failing, finished=failing
    )
    half.describe_failed.return_value = "a step"
    assert connector.get_num_new_matched_tokens(request(), 0) == (0, False)
    connector.update_state_after_alloc(request(), None, 0)
    half.promises.fail.assert_called_once_with(["r"])
    assert connector.build_connector_meta(None) == "a step"
    assert connector.request_finished(request(), []) == (False, None)


def test_no_cut_of_an_adapters_files_raises(tmp_path, monkeypatch):
    """Nor is one that was cut taken for another: it has a name of its own, or none."""
    monkeypatch.setattr(adapter_names, "_BEGAN_NS", 2**63)
    monkeypatch.setattr(adapter_names, "_TICK_NS", 0)
    whole = {
        "adapter_config.json": b'{"r": 8, "lora_alpha": 16}',
        "adapter_model.safetensors": save({"a": torch.ones(8, 16), "b": torch.zeros(16, 8)}),
    }
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content)
    expected = adapter_names.adapter_name(str(tmp_path))
    assert expected is not None
    for seed in range(300):
        chance = random.Random(seed)
        cut = chance.choice(list(whole))
        for name, content in whole.items():
            kept = chance.randrange(len(content)) if name == cut else len(content)
            (tmp_path / name).write_bytes(content[:kept])
        if chance.random() < 0.1:
            (tmp_path / cut).unlink()
        assert adapter_names.adapter_name(str(tmp_path)) != expected
