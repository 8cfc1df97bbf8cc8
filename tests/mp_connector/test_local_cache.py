"""A cache in this process: LMCache's own tiers, asked as a scheduler and a worker ask."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.mp_connector.hit_places import (
    COMMIT,
    LOCATE,
    REGISTER,
    RELEASE,
    RESERVE,
    Groups,
    Hit,
    Reservation,
    rows_of,
)
from lmcache_xpu.mp_connector.local_cache import LocalCache, LocalCacheOptions
from lmcache_xpu.versions.lmcache_server import ServerModuleCallRequest, make_key

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "lmcache")
]
CHUNK, OBJECT, ROOM = 16, 4096, 64  # tokens, bytes, and objects
WORKER, CPU = 7, torch.device("cpu")


class Asking:
    """A scheduler and a worker of a cache with room for 64 objects.

    Args:
        windows: by KV cache group, the chunks that a hit needs; 0 for all.
    """

    def __init__(self, windows: tuple[int, ...] = (0,), name: str = "one") -> None:
        options = LocalCacheOptions(chunk_tokens=CHUNK, cpu_gib=ROOM * OBJECT / 2**30)
        self.cache = LocalCache.of_engine(engine(name), options, CPU)
        self.requests: Any = self.cache.requests()
        self.windows, self._count = windows, 0
        sizes = (OBJECT,) * len(windows)
        self._ask(REGISTER, Groups(WORKER, "model", 1, sizes, windows).sent())

    def _ask(self, method: str, payload: bytes) -> bytes:
        answer = self.requests.server_module_call(ServerModuleCallRequest(method, payload))
        assert answer.query()
        assert answer.result(0).success
        return answer.result(0).payload

    def _key(self, prompt: int, start: int, end: int, worker: int | None = 0) -> Any:
        tokens = tuple(prompt * 1000 + number for number in range(end * CHUNK))
        return make_key(
            tokens,
            model_name="model",
            world_size=1,
            worker_id=worker,
            start=start * CHUNK,
            end=end * CHUNK,
            request_id=f"{prompt} {self._count}",
            cache_salt="",
            request_configs=None,
            num_kv_readers=1,
        )

    def store(self, prompt: int, start: int, end: int) -> int:
        """Store chunks of a prompt; how many objects there was room for."""
        key = self._key(prompt, start, end)
        hit = Hit.of_key(WORKER, self._count, key, self.windows)
        sizes = (OBJECT,) * len(self.windows)
        asked = Reservation(hit, sizes, ((),) * len(sizes), key.token_ids)
        rows = rows_of(self._ask(RESERVE, asked.sent()))
        assert self._ask(COMMIT, hit.sent()) == b"1"
        return len(rows)

    def compute(self, prompt: int, chunks: int, step: int) -> None:
        """Look a prompt up, and store what is missing, so many chunks in a step."""
        there = self.hit(prompt, chunks, end=False)
        for start in range(there, chunks, step):
            self.store(prompt, start, min(chunks, start + step))
        self.requests.end_session(f"{prompt} {self._count}")

    def hit(self, prompt: int, chunks: int, *, end: bool = True) -> int:
        """Return the chunks of a prompt that can be loaded."""
        self._count += 1
        key = self._key(prompt, 0, chunks, None)
        self.requests.lookup(key, 1)
        found = self.requests.query_prefetch_status(key.request_id).result(0)
        hit = Hit.of_key(WORKER, self._count, self._key(prompt, 0, found), self.windows)
        if found:
            assert self._ask(LOCATE, hit.sent())
            self._ask(RELEASE, hit.sent())
        if end:
            self.requests.end_session(key.request_id)
        return int(found)

    @property
    def held(self) -> int:
        return int(self.cache.memory_use()[0] // OBJECT)


def engine(name: str, **parallel: int) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{"world_size": 1, "data_parallel_index": 0, **parallel}),
        kv_transfer_config=SimpleNamespace(engine_id=name),
    )


@pytest.fixture
def asking() -> Any:
    asking = Asking()
    yield asking
    asking.requests.close()


def test_both_halves_of_an_engine_share_a_cache_which_ends_with_the_last(asking):
    again = LocalCache.of_engine(engine("one"), LocalCacheOptions(), CPU)
    assert again is asking.cache
    assert LocalCache.of_engine(engine("two"), LocalCacheOptions(cpu_gib=0.001), CPU) is not again
    again.requests().close()
    assert asking.store(1, 0, 4) == 4
    assert asking.hit(1, 4) == 4


def test_an_engine_of_several_devices_has_none():
    with pytest.raises(SettingsError, match="an engine of 2 devices"):
        LocalCache.of_engine(engine("of two", world_size=2), LocalCacheOptions(), CPU)


@pytest.mark.parametrize("options", [{"cpu_gib": 0}, {"disk": "/d"}, {"chunk_tokens": "many"}])
def test_options_that_are_none_are_refused(options):
    with pytest.raises(SettingsError, match=r"xpu\.cache"):
        LocalCacheOptions.read(options)


def test_a_prompt_loses_its_end_to_the_next(asking):
    asking.compute(1, 60, 8)
    asking.compute(2, 8, 8)
    assert asking.held == ROOM
    assert (asking.hit(1, 60), asking.hit(2, 8)) == (56, 8)


def test_a_prompt_larger_than_the_memory_keeps_its_beginning(asking):
    asking.compute(1, 2 * ROOM, 8)
    assert asking.hit(1, 2 * ROOM) == ROOM


def test_what_is_read_is_not_evicted(asking):
    asking.compute(1, 60, 60)
    asking._count += 1
    key = asking._key(1, 0, 60, None)
    asking.requests.lookup(key, 1)
    assert asking.requests.query_prefetch_status(key.request_id).result(0) == 60
    asking.store(2, 0, 8)  # there is no room for all of it
    hit = Hit.of_key(WORKER, 99, asking._key(1, 0, 60), (0,))
    assert len(rows_of(asking._ask(LOCATE, hit.sent()))) == 60
    asking._ask(RELEASE, hit.sent())
    assert asking.store(3, 0, 8) == 8


@pytest.fixture(scope="module", params=[(0,), (0, 2)], ids=["one group", "two groups"])
def long_lived(request) -> Any:
    asking = Asking(request.param, "long-lived")
    yield asking
    asking.requests.close()


ACTS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 80), st.sampled_from([3, 8, 20])), max_size=12
)


@settings(max_examples=40, deadline=None)
@given(acts=ACTS)
def test_what_is_held_of_a_prompt_is_its_beginning(long_lived, acts):
    """After any stores and hits: the last prompt is held, and of all others no chunk in vain."""
    asking, groups = long_lived, len(long_lived.windows)
    asking.requests.clear(True)
    for prompt, chunks, step in acts:
        asking.compute(prompt, chunks, step)
        # The last chunks that fit are of one group more than of another, by a step at most.
        assert asking.hit(prompt, chunks) >= min(chunks, ROOM // groups - step * (groups - 1))
        if groups == 1:
            assert sum(asking.hit(number, 80) for number in range(1, 7)) == asking.held
