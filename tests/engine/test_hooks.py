"""What the connector tells of itself, in real engines on CPU: alone, and in a MultiConnector.

The other connector there is vLLM's ExampleConnector, which keeps whole prompts in files.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from support.hooks_probe import LAST, LONG, OTHER
from support.real_engine import BLOCK, CHUNK, prompt
from support.scripts import printed, run_probe

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

HIT = LONG // CHUNK * CHUNK
VISITS = ("cold", "salted", "hit", "salted hit")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(EXACT, tmp_path_factory.mktemp("models")))


def probe(order: str, model: str) -> Iterator[dict[str, Any]]:
    directory = tempfile.mkdtemp()  # the names of sockets are short
    done = run_probe("hooks", order, model, directory)
    shutil.rmtree(directory)
    yield printed(done)


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[dict[str, Any]]:
    yield from probe("alone", model)


@pytest.fixture(scope="module", params=["first", "behind"])
def several(request: pytest.FixtureRequest, model: str) -> Iterator[dict[str, Any]]:
    for group in probe(request.param, model):
        yield {**group, "order": request.param}


def blocks(events: list[dict[str, Any]], medium: str) -> dict[int, tuple[Any, ...]]:
    """What was told of each block that was stored in a medium."""
    told: dict[int, tuple[Any, ...]] = {}
    for event in events:
        if event["type"] != "BlockStored" or event["medium"] != medium:
            continue
        parent, size = event["parent_block_hash"], event["block_size"]
        for at, block in enumerate(event["block_hashes"]):
            tokens = tuple(event["token_ids"][at * size : (at + 1) * size])
            keys = event["extra_keys"][at]
            fact = (parent, size, tokens, keys and tuple(keys), event["group_idx"])
            assert told.setdefault(block, fact) == fact
            parent = block
    return told


def check_hits(report: dict[str, Any]) -> None:
    visits = report["visits"]
    for name in VISITS:
        assert visits[name]["answer"] == visits["cold"]["answer"], name
        assert visits[name]["restored"] >= HIT // BLOCK, name
    assert visits["longer"]["answer"] == visits["longer cold"]["answer"]
    assert visits["longer"]["answer"] != visits["cold"]["answer"]
    for name in ("hit", "salted hit", "longer"):
        assert visits[name]["hit"] == HIT, name
    assert visits["cold"]["hit"] == 0
    assert report["locks"] == 0, "a lock outlives its request"


def check_blocks(report: dict[str, Any], media: tuple[str, ...]) -> None:
    """Each block of a tier is told as vLLM told of it when the engine had it."""
    engine = blocks(report["events"], "GPU")
    first, salted = (
        [fact for fact in engine.values() if fact[3] == keys] for keys in (None, ("s",))
    )
    assert first
    assert [fact[2] for fact in salted] == [tuple(prompt(LONG)[:BLOCK])]
    for medium in media:
        told = blocks(report["events"], medium)
        assert told
        assert {block: engine[block] for block in told} == told
        tokens = {token for fact in told.values() for token in fact[2]}
        assert max(tokens) < 2**31
        assert salted[0] in told.values()


def test_a_hit_is_exact(alone: dict[str, Any]):
    check_hits(alone)
    assert alone["visits"]["salted"]["hit"] == alone["visits"]["longer cold"]["hit"] == 0


def test_tiers_are_told_of_in_vllms_blocks_and_the_requests_own_tokens(alone: dict[str, Any]):
    check_blocks(alone, ("CPU", "STORAGE"))
    told = blocks(alone["events"], "STORAGE")
    for length in (LONG, OTHER):
        whole = length // CHUNK * CHUNK
        parts = [tuple(prompt(length)[at : at + BLOCK]) for at in range(0, whole, BLOCK)]
        assert set(parts) <= {fact[2] for fact in told.values()}


def test_what_the_cpu_tier_evicts_is_told(alone: dict[str, Any]):
    """What is told to be there in the end is as much as fits, and what came last."""
    there: set[int] = set()
    for event in alone["events"]:
        if event.get("medium") == "CPU":
            change = there.update if event["type"] == "BlockStored" else there.difference_update
            change(event["block_hashes"])
    told = blocks(alone["events"], "CPU")
    assert CHUNK // BLOCK < len(there) < len(told)
    assert tuple(prompt(LAST)[:BLOCK]) in {told[block][2] for block in there}


def test_what_is_found_again_is_told_again(alone: dict[str, Any]):
    """vLLM says that all is gone when its own cache is reset."""
    types = [(event["type"], event.get("medium")) for event in alone["events"]]
    assert types.count(("AllBlocksCleared", None)) > 3
    start = tuple(prompt(LONG)[:BLOCK])
    times = [
        event
        for event in alone["events"]
        if event.get("medium") == "CPU" and tuple(event.get("token_ids", ())[:BLOCK]) == start
    ]
    assert len(times) > 2


def test_a_router_sends_the_prompts_to_the_engine_that_published_these(alone: dict[str, Any]):
    pytest.importorskip("vllm_router")
    import msgspec
    from support.router import router
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    kinds = {"BlockStored": BlockStored, "BlockRemoved": BlockRemoved}
    for medium, credit in (("CPU", 0.8), ("STORAGE", 0.3)):
        events = [
            msgspec.convert(event, kinds[event["type"]])
            for event in alone["events"]
            if event.get("medium") == medium
        ]
        tokens = prompt({"CPU": LAST, "STORAGE": OTHER}[medium])
        whole = len(tokens) // CHUNK * CHUNK
        with router(BLOCK) as routed:
            assert routed.learns(
                1,
                events,
                tokens,
                lambda sent, got, want=int(credit * whole): (sent, got) == (1, want),
            )


def test_the_api_servers_process_shows_what_the_engines_counted(alone: dict[str, Any]):
    assert alone["counted"] == alone["counted by the worker"]
    assert alone["counted"]["tokens load cpu"] == 3 * HIT
    moved = alone["counted"]["tokens store cpu"]
    assert moved == alone["counted"]["tokens store disk"] > 3 * HIT


def test_vllms_log_has_the_numbers(alone: dict[str, Any]):
    [line] = alone["lines"]
    assert f"load_cpu_tokens={3 * HIT}, " in line
    assert f"store_disk_tokens={int(alone['counted']['tokens store disk'])}, " in line
    assert "disk_limit_gib=1.0" in line


def test_hits_that_another_process_looked_up_have_no_tier(alone: dict[str, Any]):
    """The scheduler is told how much there is, and not where: see `hit_sources`."""
    assert alone["sources"]["external_unspecified"] == 3 * HIT
    assert alone["sources"]["host"] == 0


def test_hits_are_exact_beside_another_connector(several: dict[str, Any]):
    """Ours loads what it has first; behind the other one, what that one does not know."""
    check_hits(several)
    ours = {"first": 3 * HIT, "behind": HIT}[several["order"]]
    assert several["counted"]["tokens load cpu"] == ours


def test_events_pass_through(several: dict[str, Any]):
    check_blocks(several, ("CPU", "STORAGE"))


def test_stats_pass_through_and_count_once(several: dict[str, Any]):
    """vLLM writes a line every ten seconds, of what came since the line before."""
    lines = several["lines"]
    assert lines
    assert all("LMCacheXPUServerConnector={" in line for line in lines)
    stored = re.findall(r"'store_cpu_tokens': (\d+)", "\n".join(lines))
    assert sum(map(int, stored)) == several["counted"]["tokens store cpu"]
    assert all(int(tokens) % CHUNK == 0 for tokens in stored)


def test_blocks_are_protected_before_each_step_is_prepared(several: dict[str, Any]):
    steps = several["steps"]
    assert steps
    assert steps == ["protected", "prepared"] * (len(steps) // 2)
