"""Of one prompt the end goes first from a server's memory, whatever was stored and hit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.engine_context import LayoutDescRegistry, MPCacheServerContext
from lmcache.v1.multiprocess.session import SessionManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from lmcache_xpu.cache.hit_places import Groups, Hit, Reservation, Rows, received, sent
from lmcache_xpu.server.server_module import HitPlaces
from lmcache_xpu.tiers import EVICTION_POLICY, EVICTION_WATERMARK

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "lmcache")
]
CHUNK, OBJECT = 8, 2**16  # tokens, bytes
ROOM, LONGEST, PROMPTS = 24, 40, range(1, 5)  # chunks, chunks, prompts


class Context:
    """LMCache's context of a server, with what it makes keys of."""

    resolve_obj_keys = MPCacheServerContext.resolve_obj_keys
    chunk_size = CHUNK

    def __init__(self, storage: StorageManager) -> None:
        self.token_hasher = TokenHasher(CHUNK)
        self.session_manager = SessionManager(self.token_hasher, cleanup_interval=None)
        self.storage_manager, self.layout_desc_registry = storage, LayoutDescRegistry()


class Server:
    """This package's module, over LMCache's storage manager with room for `ROOM` chunks."""

    def __init__(self) -> None:
        memory = L1MemoryManagerConfig(ROOM * OBJECT, use_lazy=False, shm_name="")
        self.storage = StorageManager(
            StorageManagerConfig(
                L1ManagerConfig(memory),
                EvictionConfig(EVICTION_POLICY, EVICTION_WATERMARK),
                L2AdaptersConfig([]),
            )
        )
        self.context = Context(self.storage)
        self.module, self.numbers = HitPlaces(self.context), itertools.count()
        self.module.register(sent(Groups(1, "model", 1, (OBJECT,), (0,))))

    def key(self, prompt: int, start: int, end: int) -> IPCCacheServerKey:
        tokens = [prompt * 1000 + n // CHUNK for n in range(end * CHUNK)]
        return IPCCacheServerKey(
            token_ids=tuple(tokens),
            start=start * CHUNK,
            end=end * CHUNK,
            model_name="model",
            world_size=1,
            worker_id=0,
            request_id=f"prompt {prompt}",
        )

    def store(self, prompt: int, start: int, end: int) -> int:
        """Store chunks that are not there, as a worker does; return how many."""
        key = self.key(prompt, start, end)
        hit = Hit.of_key(1, next(self.numbers), key)
        asked = Reservation(hit, (OBJECT,), ((),), key.token_ids)
        rows = received(self.module.reserve(sent(asked)), Rows)
        self.module.commit(sent(hit))
        return len(rows)

    def held(self, prompt: int) -> set[int]:
        [keys] = self.context.resolve_obj_keys(self.key(prompt, 0, LONGEST), [0])
        objects = self.storage._l1_manager._objects
        return {number for number, key in enumerate(keys) if key in objects}

    def clear(self) -> None:
        self.storage.clear()
        assert not any(map(self.held, PROMPTS))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.storage.close()


@settings(max_examples=30, deadline=None)
@given(
    acts=st.lists(
        st.tuples(st.sampled_from(PROMPTS), st.integers(1, LONGEST), st.sampled_from([3, 8, 12])),
        max_size=6,
    )
)
@example(acts=[(1, LONGEST, 8)])
@example(acts=[(1, 20, 8), (2, 12, 8), (1, 20, 8), (3, 8, 8)])
def test_what_a_server_holds_of_a_prompt_is_its_beginning(server: Server, acts):
    server.clear()
    for prompt, count, step in acts:
        for start in range(0, count, step):
            server.store(prompt, start, min(start + step, count))
        for each in PROMPTS:
            held = server.held(each)
            assert held == set(range(len(held))), (each, held)
        assert server.held(prompt) >= set(range(min(count, ROOM)))
