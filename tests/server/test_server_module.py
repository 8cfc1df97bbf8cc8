"""This package's module of LMCache's server: with LMCache's sessions, keys and routing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.engine_context import LayoutDescRegistry, MPCacheServerContext
from lmcache.v1.multiprocess.ext_server_module import (
    ExtServerModuleSpec,
    build_server_module_router,
    load_server_module_components,
)
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
from lmcache.v1.multiprocess.server import _is_liveness_target
from lmcache.v1.multiprocess.session import SessionManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from lmcache_xpu.cache import room
from lmcache_xpu.cache.hit_places import (
    ALIGN,
    COMMIT,
    LOCATE,
    REGISTER,
    RELEASE,
    RESERVE,
    Groups,
    Hit,
    Reservation,
    Rows,
    received,
    sent,
)
from lmcache_xpu.server.server_module import HitPlaces
from lmcache_xpu.server.server_program import MODULE

CHUNK, LENGTH = 8, 4096
TOKENS = tuple(range(100, 132))


class Storage:
    """LMCache's storage manager: what is locked, and where it lies."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}
        self.locked: list[Any] = []
        self.written: list[Any] = []  # reserved, and not published
        self.touched: list[Any] = []
        self._l1_manager = SimpleNamespace(register_listener=lambda _: None, reserve_write=None)
        self.l1_memory_desc = SimpleNamespace(align_bytes=1)

    def l2_adapters(self) -> list[Any]:
        return []

    def touch_l1_keys(self, keys: list[Any]) -> None:
        self.touched = keys

    def unsafe_read(self, keys: list[Any]) -> tuple[list[Any], list[Any]]:
        there = [key for key in keys if key in self.places]
        self.locked += there
        return there, [
            SimpleNamespace(shm_offset=self.places[key], shm_byte_length=LENGTH) for key in there
        ]

    def finish_read_prefetched(self, keys: list[Any]) -> None:
        for key in keys:
            self.locked.remove(key)

    def reserve_write(self, keys: list[Any], layout: Any) -> dict[Any, Any]:
        [shape] = layout.shapes
        self.written += [key for key in keys if key not in self.places]
        return {
            key: SimpleNamespace(shm_offset=number * 100, shm_byte_length=shape.numel())
            for number, key in enumerate(keys)
            if key not in self.places
        }

    def finish_write(self, keys: list[Any]) -> None:
        for key in keys:
            self.written.remove(key)
            self.places[key] = 7


class Context:
    """LMCache's context of a server, with what it makes keys of."""

    resolve_obj_keys = MPCacheServerContext.resolve_obj_keys

    def __init__(self) -> None:
        self.token_hasher = TokenHasher(CHUNK)
        self.session_manager = SessionManager(self.token_hasher, cleanup_interval=None)
        self.storage_manager = Storage()
        self.layout_desc_registry = LayoutDescRegistry()
        self._chunk_size = CHUNK

    @property
    def chunk_size(self) -> int:
        return self._chunk_size

    def look_up(self, **other: Any) -> IPCCacheServerKey:
        """Look a request up, whose four chunks are there; the key of its worker."""
        names = {"model_name": "model", "world_size": 1, "worker_id": None, "request_id": "request"}
        key = IPCCacheServerKey(token_ids=TOKENS, start=0, end=len(TOKENS), **{**names, **other})
        session = self.session_manager.get_or_create(key.request_id)
        session.set_tokens(list(key.token_ids))
        session.begin_lookup(key, (0,))
        mine = dataclasses.replace(key, worker_id=0)
        for number, name in enumerate(self.resolve_obj_keys(mine, [0])[0]):
            self.storage_manager.places[name] = number * 10_000
        return mine


@pytest.fixture
def context() -> Context:
    return Context()


@pytest.fixture
def ask(context):
    """Calls the module as the server's transport does, by LMCache's router."""
    components = load_server_module_components(
        [ExtServerModuleSpec(MODULE)],
        server_context=context,
        mp_config=None,
        coordinator_config=None,
        built_modules=(),
    )
    router = build_server_module_router(context, components.modules)
    assert router is not None

    def ask(method: str, key: Any = None, *, payload: bytes = b"", **other: Any) -> bytes | None:
        payload = payload if key is None else sent(Hit.of_key(7, 0, key)._replace(**other))
        answer = router.server_module_call(ServerModuleCallRequest(method, payload))
        return answer.payload if answer.success else None

    ask.components = components
    return ask


def test_chunks_are_located_in_their_order_and_stay_locked_until_they_are_released(context, ask):
    key = context.look_up()
    places = received(ask(LOCATE, key), Rows)
    assert places == [(0, number, number * 10_000, LENGTH) for number in range(4)]
    assert len(context.storage_manager.locked) == 4
    assert ask(RELEASE, key) == b""
    assert context.storage_manager.locked == []
    assert ask(RELEASE, key) == b""  # once more does nothing
    assert context.storage_manager.locked == []


def test_a_part_of_a_hit_is_located(context, ask):
    key = context.look_up()
    end = received(ask(LOCATE, key, start=8, end=24), Rows)
    assert end == [(0, 0, 10_000, LENGTH), (0, 1, 20_000, LENGTH)]


def test_each_worker_has_objects_of_its_own(context, ask):
    key = context.look_up(world_size=2)
    assert len(received(ask(LOCATE, key), Rows)) == 4
    assert ask(LOCATE, key, worker_id=1) == b""  # the other one has stored nothing
    assert len(context.storage_manager.locked) == 4


@pytest.mark.parametrize(
    "other",
    [{"model_name": "x"}, {"cache_salt": "x"}, {"world_size": 2}, {"request_id": "x"}],
    ids=lambda other: next(iter(other)),
)
def test_what_was_looked_up_otherwise_is_not_located(context, ask, other):
    assert ask(LOCATE, context.look_up(), **other) == b""
    assert context.storage_manager.locked == []


def test_a_hit_that_lacks_a_chunk_is_none_and_nothing_of_it_stays_locked(context, ask):
    key = context.look_up()
    del context.storage_manager.places[next(iter(context.storage_manager.places))]
    assert ask(LOCATE, key) == b""
    assert context.storage_manager.locked == []


def test_a_range_beyond_the_prompt_is_an_error_that_costs_the_hit_alone(context, ask):
    assert ask(LOCATE, context.look_up(), end=80) is None
    assert context.storage_manager.locked == []


def test_a_release_that_overtakes_its_question_leaves_nothing_locked(context, ask):
    """They run in threads of the server."""
    key = context.look_up()
    ask(RELEASE, key)
    assert ask(LOCATE, key) == b""
    assert context.storage_manager.locked == []
    assert len(received(ask(LOCATE, key, number=1), Rows)) == 4  # of the next load


def test_the_end_of_a_question_that_found_nothing_ends_no_other(context, ask):
    """One asked early, whose request is in no step after all, is ended whatever its answer was."""
    key = context.look_up()
    first, place = next(iter(context.storage_manager.places.items()))
    del context.storage_manager.places[first]
    assert ask(LOCATE, key) == b""
    ask(RELEASE, key)
    context.storage_manager.places[first] = place
    assert len(received(ask(LOCATE, key, number=1), Rows)) == 4
    ask(RELEASE, key)
    assert len(context.storage_manager.locked) == 4  # the second question's, which is read
    ask(RELEASE, key, number=1)
    assert context.storage_manager.locked == []


def test_two_reads_of_a_range_end_one_by_one(context, ask):
    key = context.look_up()
    for number in range(2):
        assert len(received(ask(LOCATE, key, number=number), Rows)) == 4
    ask(RELEASE, key)
    assert len(context.storage_manager.locked) == 4
    ask(RELEASE, key, number=1)
    assert context.storage_manager.locked == []


def test_releases_of_questions_that_never_came_are_not_kept_for_ever(context, monkeypatch):
    monkeypatch.setattr(room, "_MOST_RELEASED", 3)
    module, key = HitPlaces(context), context.look_up()
    for end in (8, 16, 24, 32):
        module.release(sent(Hit.of_key(7, 0, key)._replace(end=end)))
    assert len(module._room._released) == 3
    assert len(received(module.locate(sent(Hit.of_key(7, 0, key)._replace(end=8))), Rows)) == 1


def test_what_a_worker_read_that_ended_without_a_word_is_unlocked(context, ask):
    key = context.look_up()
    assert len(received(ask(LOCATE, key), Rows)) == 4
    assert len(received(ask(LOCATE, key, instance_id=8, end=16), Rows)) == 2
    [module] = ask.components.modules
    assert _is_liveness_target(module)  # LMCache tells those alone
    module.drop_instance_state(7)
    assert len(context.storage_manager.locked) == 2
    module.drop_instance_state(7)
    ask(RELEASE, key, instance_id=8, end=16)
    assert context.storage_manager.locked == []


def test_lmcache_s_interface_of_a_module(context):
    build = SimpleNamespace(engine_context=context, config_for=lambda _: {})
    module = HitPlaces.create(build)
    assert module.report_status() == {}
    assert module.context is context
    module.close()


# Several KV cache groups: the second keeps a window of two chunks, the third one state.

WINDOWS, SIZES = (0, 2, 1), (64, 32, 16)


def groups_of(worker: int = 7, sizes: tuple[int, ...] = SIZES) -> bytes:
    return sent(Groups(worker, "model", 1, sizes, WINDOWS))


def reservation(key: IPCCacheServerKey, number: int = 0, skipped: Any = ((), (), ())) -> bytes:
    hit = Hit.of_key(7, number, key, WINDOWS)
    tokens = getattr(key, "token_bytes", None)
    return sent(Reservation(hit, SIZES, skipped, key.token_ids if tokens is None else tokens))


def test_the_first_engine_has_chunks_rounded_up_to_its_blocks(context, ask):
    """Those of the second have to fit."""
    assert ask(ALIGN, payload=b"4") == b"8"  # they fit
    assert ask(ALIGN, payload=b"12") == b"8"
    other = HitPlaces(context)
    assert other.align(b"12") == b"12"
    assert other.align(b"16") == b"12"
    session = context.session_manager.get_or_create("r")
    session.set_tokens(list(range(30)))
    assert len(session.get_hashes(0)) == 2  # LMCache cuts tokens so


def test_look_ups_know_the_groups_of_an_engine_until_its_last_worker_ends(context, ask):
    registry = context.layout_desc_registry
    for worker in (7, 8, 7):  # once more, as with a server that was lost
        ask(REGISTER, payload=groups_of(worker))
    assert registry.find_attn_desc("model", 1).num_chunks_in_sw == [-1, 2, 1]
    layouts = registry.find_group_layout_descs("model", 1)
    assert [layout.shapes[0].numel() for layout in layouts.values()] == list(SIZES)
    ask(REGISTER, payload=groups_of(7, ()))
    assert registry.find("model", 1) is not None
    [module] = ask.components.modules
    module.drop_instance_state(8)  # without a word
    assert registry.find("model", 1) is None


def test_what_is_reserved_is_nobodys_until_it_is_committed_and_then_every_groups(context, ask):
    key = dataclasses.replace(context.look_up(), start=16)
    context.storage_manager.places.clear()
    rows = received(ask(RESERVE, payload=reservation(key, skipped=((), (), (0,)))), Rows)
    # The last group lacks its first chunk: the state was overwritten.
    assert [row[:2] for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)]
    assert {row[0]: row[3] for row in rows} == dict(enumerate(SIZES))
    assert ask(LOCATE, key, windows=WINDOWS) == b""
    hit = Hit.of_key(7, 0, key, WINDOWS)
    assert ask(COMMIT, payload=sent(hit)) == b"1"
    assert ask(COMMIT, payload=sent(hit)) == b""  # once
    assert [row[:2] for row in received(ask(LOCATE, key, windows=WINDOWS), Rows)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 1),
    ]
    assert len(context.storage_manager.locked) == 5
    ask(RELEASE, key, windows=WINDOWS)
    assert context.storage_manager.locked == []


def test_what_is_there_is_not_reserved_again(context, ask):
    key = context.look_up()  # the first group's chunks are there
    rows = received(ask(RESERVE, payload=reservation(key)), Rows)
    assert {row[0] for row in rows} == {1, 2}


def test_what_a_worker_left_half_written_is_published_as_lmcache_does(context, ask):
    """A seal says that it is not whole; and its room is evicted like any other's."""
    key = context.look_up()
    ask(RESERVE, payload=reservation(key))
    assert context.storage_manager.written
    [module] = ask.components.modules
    module.drop_instance_state(7)
    assert context.storage_manager.written == []
    assert ask(COMMIT, payload=sent(Hit.of_key(7, 0, key, WINDOWS))) == b""


@pytest.mark.parametrize("tokens", [(1, 2**63 + 5, 4), b"\x00\x01\n\x02"])
def test_reservations_arrive_as_they_were_sent(tokens):
    """A number that stands for an image has 64 bits; packed tokens may hold any byte."""
    hit = Hit(7, 3, "request", "model", 1, "salt", 0, 8, 24, WINDOWS)
    asked = Reservation(hit, SIZES, ((), (1,), ()), tokens)
    assert received(sent(asked), Reservation) == asked
