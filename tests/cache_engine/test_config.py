"""What of LMCache's configuration differs between the engines of one `serve`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from lmcache.v1.config import LMCacheEngineConfig

from lmcache_xpu.cache_engine import config as lmcache_config


def parallel(engine: int, devices: int = 2) -> SimpleNamespace:
    """As vLLM has it in an engine of a dense model: the rank is 0 in every one."""
    return SimpleNamespace(
        data_parallel_rank=0,
        data_parallel_size=1,
        data_parallel_index=engine,
        world_size=devices,
    )


def applied(engine: int, extra: dict) -> LMCacheEngineConfig:
    """As the connector does, and then LMCache itself."""
    config = LMCacheEngineConfig.from_defaults()
    lmcache_config.apply(config, extra)
    lmcache_config.set_apart(config, extra, parallel(engine))
    lmcache_config.apply(config, extra)
    return config


@pytest.mark.parametrize("given", [{}, {"lmcache.extra_config": {"disk.path": "/d"}}])
def test_each_engine_has_a_number_and_ports_of_its_own(given):
    first = LMCacheEngineConfig.from_defaults().internal_api_server_port_start
    ports = set()
    for engine in range(3):
        config = applied(engine, dict(given))
        named = {"disk.engine": engine} if engine else {}
        assert (config.extra_config or {}) == {**given.get("lmcache.extra_config", {}), **named}
        start = config.internal_api_server_port_start
        ports |= {start + at for at in range(3)}  # the scheduler's and two workers'
    assert ports == set(range(first, first + 9))


def test_scheduler_and_worker_in_one_process_share_what_was_set():
    extra: dict = {}
    scheduler, worker = applied(2, extra), applied(2, extra)
    assert scheduler.extra_config == worker.extra_config == {"disk.engine": 2}
    ports = {config.internal_api_server_port_start for config in (scheduler, worker)}
    assert len(ports) == 1


def test_an_only_engine_is_left_alone():
    extra = {"lmcache.extra_config": {"disk.path": "/d"}}
    applied(0, extra)
    assert extra == {"lmcache.extra_config": {"disk.path": "/d"}}
