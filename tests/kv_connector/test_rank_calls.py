"""How an engine's scheduler reaches its ranks, without an engine; real ones are in engine/."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
from vllm.distributed.kv_transfer import kv_transfer_state

from lmcache_xpu.kv_connector import rank_calls
from lmcache_xpu.kv_connector.rank_calls import RankCalls, remembering_executor


class Executor:
    """vLLM's, as far as it is called."""

    def __init__(self, engine_id: str | None) -> None:
        transfer = None if engine_id is None else SimpleNamespace(engine_id=engine_id)
        self.vllm_config = SimpleNamespace(kv_transfer_config=transfer)
        self.calls: list[Any] = []

    def collective_rpc(self, method: Any, **options: Any) -> str:
        self.calls.append((method, options))
        return "vLLM's answer"


Executor.collective_rpc = remembering_executor(Executor.collective_rpc)


def config(engine_id: str, pipeline: int = 1) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline),
        kv_transfer_config=SimpleNamespace(engine_id=engine_id),
    )


def test_an_executor_is_known_by_its_engine_from_its_first_call_and_while_it_lives():
    executor, other, without = Executor("a"), Executor("b"), Executor(None)
    assert RankCalls.of(config("a")) is None
    for each in (executor, other, without):
        assert each.collective_rpc("execute_model", args=(1,)) == "vLLM's answer"
        assert each.calls == [("execute_model", {"args": (1,)})]
    RankCalls.of(config("a")).begin_load("a load")
    assert [len(each.calls) for each in (executor, other, without)] == [2, 1, 1]
    del executor, each
    assert RankCalls.of(config("a")) is None
    assert RankCalls.of(config("b")) is not None


def test_a_load_is_begun_in_all_ranks_and_waited_for_by_nobody():
    executor = Executor("c")
    executor.collective_rpc("first")
    RankCalls.of(config("c")).begin_load("a load")
    method, options = executor.calls[-1]
    assert method is rank_calls._begin_load
    assert options == {"args": ("a load",), "non_block": True, "unique_reply_rank": 0}


def test_where_the_layers_are_shared_out_nothing_begins_early():
    executor = Executor("d")
    executor.collective_rpc("first")
    assert RankCalls.of(config("d", pipeline=2)) is None


def test_a_rank_passes_a_load_to_its_connector_if_that_takes_loads(monkeypatch):
    worker = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    begun: list[str] = []
    for connector in (SimpleNamespace(begin_load=begun.append), SimpleNamespace()):
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
        rank_calls._begin_load(worker, "a load")
    assert begun == ["a load"]
