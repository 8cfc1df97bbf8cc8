"""This package's module of LMCache's server: with LMCache's sessions, keys and routing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.engine_context import MPCacheServerContext
from lmcache.v1.multiprocess.ext_server_module import (
    ExtServerModuleSpec,
    build_server_module_router,
    load_server_module_components,
)
from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest
from lmcache.v1.multiprocess.server import _is_liveness_target
from lmcache.v1.multiprocess.session import SessionManager
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from lmcache_xpu.mp_connector import server_module
from lmcache_xpu.mp_connector.hit_places import HELLO, LOCATE, RELEASE, Hit, places_of
from lmcache_xpu.mp_connector.server_module import HitPlaces
from lmcache_xpu.mp_connector.server_program import MODULE

CHUNK, LENGTH = 8, 4096
TOKENS = tuple(range(100, 132))


class Storage:
    """LMCache's storage manager: what is locked, and where it lies."""

    def __init__(self) -> None:
        self.places: dict[Any, int] = {}
        self.locked: list[Any] = []

    def unsafe_read(self, keys: list[Any]) -> tuple[list[Any], list[Any]]:
        there = [key for key in keys if key in self.places]
        self.locked += there
        return there, [
            SimpleNamespace(shm_offset=self.places[key], shm_byte_length=LENGTH) for key in there
        ]

    def finish_read_prefetched(self, keys: list[Any]) -> None:
        for key in keys:
            self.locked.remove(key)


class Context:
    """LMCache's context of a server, with what it makes keys of."""

    resolve_obj_keys = MPCacheServerContext.resolve_obj_keys

    def __init__(self) -> None:
        self.session_manager = SessionManager(TokenHasher(CHUNK), cleanup_interval=None)
        self.storage_manager = Storage()

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

    def ask(method: str, key: Any = None, **other: Any) -> bytes | None:
        payload = b"" if key is None else Hit.of_key(7, 0, key)._replace(**other).sent()
        answer = router.server_module_call(ServerModuleCallRequest(method, payload))
        return answer.payload if answer.success else None

    ask.components = components
    return ask


def test_chunks_are_located_in_their_order_and_stay_locked_until_they_are_released(context, ask):
    key = context.look_up()
    assert ask(HELLO) == b""
    places = places_of(ask(LOCATE, key))
    assert places == [(number * 10_000, LENGTH) for number in range(4)]
    assert len(context.storage_manager.locked) == 4
    assert ask(RELEASE, key) == b""
    assert context.storage_manager.locked == []
    assert ask(RELEASE, key) == b""  # once more does nothing
    assert context.storage_manager.locked == []


def test_a_part_of_a_hit_is_located(context, ask):
    key = context.look_up()
    assert places_of(ask(LOCATE, key, start=8, end=24)) == [(10_000, LENGTH), (20_000, LENGTH)]


def test_each_worker_has_objects_of_its_own(context, ask):
    key = context.look_up(world_size=2)
    assert len(places_of(ask(LOCATE, key))) == 4
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
    assert len(places_of(ask(LOCATE, key, number=1))) == 4  # of the next load


def test_the_end_of_a_question_that_found_nothing_ends_no_other(context, ask):
    """One asked early, whose request is in no step after all, is ended whatever its answer was."""
    key = context.look_up()
    first, place = next(iter(context.storage_manager.places.items()))
    del context.storage_manager.places[first]
    assert ask(LOCATE, key) == b""
    ask(RELEASE, key)
    context.storage_manager.places[first] = place
    assert len(places_of(ask(LOCATE, key, number=1))) == 4
    ask(RELEASE, key)
    assert len(context.storage_manager.locked) == 4  # the second question's, which is read
    ask(RELEASE, key, number=1)
    assert context.storage_manager.locked == []


def test_two_reads_of_a_range_end_one_by_one(context, ask):
    key = context.look_up()
    for number in range(2):
        assert len(places_of(ask(LOCATE, key, number=number))) == 4
    ask(RELEASE, key)
    assert len(context.storage_manager.locked) == 4
    ask(RELEASE, key, number=1)
    assert context.storage_manager.locked == []


def test_releases_of_questions_that_never_came_are_not_kept_for_ever(context, monkeypatch):
    monkeypatch.setattr(server_module, "_EARLY", 3)
    module, key = HitPlaces(context), context.look_up()
    for end in (8, 16, 24, 32):
        module.release(Hit.of_key(7, 0, key)._replace(end=end).sent())
    assert len(module._released) == 3
    assert len(places_of(module.locate(Hit.of_key(7, 0, key)._replace(end=8).sent()))) == 1


def test_what_a_worker_read_that_ended_without_a_word_is_unlocked(context, ask):
    key = context.look_up()
    assert len(places_of(ask(LOCATE, key))) == 4
    assert len(places_of(ask(LOCATE, key, instance_id=8, end=16))) == 2
    [module] = ask.components.modules
    assert _is_liveness_target(module)  # LMCache tells those alone
    module.drop_instance_state(7)
    assert len(context.storage_manager.locked) == 2
    module.drop_instance_state(7)
    ask(RELEASE, key, instance_id=8, end=16)
    assert context.storage_manager.locked == []


def test_the_status_of_the_server_says_how_many_hits_are_being_read(context):
    module, key = (
        HitPlaces.create(SimpleNamespace(engine_context=context, config_for=lambda _: {})),
        context.look_up(),
    )
    module.locate(Hit.of_key(7, 0, key).sent())
    assert module.report_status() == {"lmcache_xpu_hits_being_read": 1}
    assert module.context is context
    module.close()
