"""What breaks costs a recomputation: no wrong token, no dead engine, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import pytest
from engine import CHUNK, Engine
from prompts import tokens, whole
from test_2_tiers import CPU_CHUNKS, fill, hit

from lmcache_xpu.disk import chunk_file

pytestmark = pytest.mark.promise("4 faults")

LAYERS = 4
LENGTH = 4 * CHUNK + 77


def chunk_files(disk: Path) -> list[Path]:
    return sorted(disk.rglob("*.lmxkv"), key=lambda file: file.stat().st_mtime_ns)


def leaks(engine: Engine) -> dict[str, object]:
    """What must be the same after a fault as before: all that outlives a request."""
    engine.settle()
    seen = engine.inside("look")
    left = {name: seen[name] for name in ("references", "pins", "lookup_pins", "storers")}
    # What the pool has given out beyond what the CPU tier holds.
    left["unaccounted_bytes"] = (seen["allocated_bytes"] or 0) - seen["held_bytes"]
    return left


CLEAN = {"references": [], "pins": [], "lookup_pins": 0, "storers": 0, "unaccounted_bytes": 0}


def fallbacks(engine: Engine) -> float:
    return engine.metrics().sum("lmcache_xpu_fallbacks_total")


def errors(engine: Engine, direction: str, tier: str) -> float:
    return engine.metrics().sum("lmcache_xpu_errors_total", direction=direction, tier=tier)


GUARDED = pytest.mark.fails_without("guard")
# In standard mode a copy is beside the engine's steps, and says itself what it left unfilled.
COPYING = (
    pytest.mark.fails_without("guard", mode="layerwise"),
    pytest.mark.fails_without("report", mode="standard"),
)
LOADS = [
    pytest.param("plan load", marks=GUARDED),
    pytest.param("check load", marks=GUARDED),
    pytest.param("before load", marks=COPYING),
    pytest.param("after load", marks=COPYING),
    pytest.param("get", marks=GUARDED),
]
STORES = ["plan store", "check store", "before store", "after store", "put"]


def layers_of(mode: str, point: str) -> list[int]:
    """The first layer and the last that something begins with; the standard mode stores at once."""
    if mode == "layerwise" and point in ("before store", "after store"):
        return [0, LAYERS - 2]  # two of them move together
    if mode == "layerwise" and point in ("before load", "after load"):
        return [0, LAYERS - 1]
    return [0, 1] if point in ("before load", "after load") else [0]


@pytest.mark.fails_without("withhold", "counters", "references")
@pytest.mark.parametrize("point", LOADS)
def test_a_load_that_raises_is_computed_instead(engine: Engine, mode: str, point: str):
    """At each step of a load; the prompt goes on beyond what was stored.

    Its new chunks are computed in the step whose load failed, from blocks that hold anything. A
    third request finds what that step stored.

    Seen to fail with that step's stores (wrong tokens in the third answer), with errors let
    through (the engine ends), not reported to vLLM or not counted, and with references kept.
    """
    if mode == "layerwise" and point == "get":
        pytest.skip("the layerwise mode gets its chunks in another way")
    for layer in layers_of(mode, point):
        prompt = tokens((point, mode, layer), LENGTH)
        longer = prompt[: 4 * CHUNK] + tokens((point, layer, "more"), 2 * CHUNK + 5)
        expected = engine.recompute(longer).token_ids
        engine.ask(prompt)
        engine.forget()
        before = fallbacks(engine), errors(engine, "load", "cpu")
        engine.plant(point, layer)
        assert engine.ask(longer).token_ids == expected
        assert not engine.planted()
        assert (fallbacks(engine), errors(engine, "load", "cpu")) > before
        found, _ = hit(engine, longer)
        assert found == whole(len(longer))
        engine.forget()
        assert engine.ask(longer).token_ids == expected
    assert "planted at" in engine.runner.log()
    assert leaks(engine) == CLEAN


@pytest.mark.fails_without("guard", "counters")
@pytest.mark.parametrize("point", STORES)
def test_a_store_that_raises_is_left_out(engine: Engine, mode: str, point: str):
    """At each step of a store.

    Seen to fail with errors let through (the engine ends) or not counted.
    """
    if mode == "layerwise" and point == "check store":
        pytest.skip("checked with the plan, before the first layer")
    for layer in layers_of(mode, point):
        prompt = tokens((point, mode, layer), LENGTH)
        expected = engine.recompute(prompt).token_ids
        before = errors(engine, "store", "cpu")
        engine.plant(point, layer)
        assert engine.ask(prompt).token_ids == expected
        assert not engine.planted()
        assert errors(engine, "store", "cpu") > before
        engine.settle()
        assert hit(engine, prompt)[0] in (0, whole(LENGTH))  # and stores it now
        engine.settle()
        assert hit(engine, prompt)[0] == whole(LENGTH)
        engine.forget()
        assert engine.ask(prompt).token_ids == expected
    assert leaks(engine) == CLEAN


@pytest.mark.fails_without("counters")
def test_a_full_disk_stores_less(engine: Engine, disk: Path):
    """A write that finds no space. Seen to fail with errors that are not counted."""
    prompt = tokens("full disk", LENGTH)
    expected = engine.recompute(prompt).token_ids
    before = engine.metrics().sum("lmcache_xpu_errors_total", tier="disk", reason="full")
    engine.settle()
    engine.plant("disk write")
    assert engine.ask(prompt).token_ids == expected
    engine.settle()
    assert not engine.planted()
    after = engine.metrics().sum("lmcache_xpu_errors_total", tier="disk", reason="full")
    assert after == before + 1
    assert "could not be stored and was dropped" in engine.runner.log()
    assert not list(disk.rglob("*.tmp"))
    fill(engine, "after the full disk", CPU_CHUNKS)
    engine.forget()
    assert engine.ask(prompt).token_ids == expected
    assert leaks(engine) == CLEAN


def truncated(file: Path, _: list[Path]) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flipped(file: Path, _: list[Path]) -> None:
    with file.open("r+b") as opened:
        opened.seek(-100, os.SEEK_END)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))


def swapped(file: Path, others: list[Path]) -> None:
    shutil.copyfile(others[0], file)


def another_version(file: Path, _: list[Path]) -> None:
    """An intact header that says it is of a later version of this package."""
    with file.open("r+b") as opened:
        raw = bytearray(opened.read(chunk_file.HEADER_BYTES))
        struct.pack_into("<I", raw, 8, chunk_file._VERSION + 1)
        struct.pack_into("<I", raw, chunk_file._CRC_AT, 0)
        struct.pack_into("<I", raw, chunk_file._CRC_AT, zlib.crc32(raw))
        opened.seek(0)
        opened.write(raw)


def unreadable(file: Path, _: list[Path]) -> None:
    file.unlink()
    file.mkdir()  # reading it fails for root as well


def deleted(file: Path, _: list[Path]) -> None:
    file.unlink()


def directory_deleted(file: Path, _: list[Path]) -> None:
    shutil.rmtree(file.parent)


DAMAGES = [
    truncated,
    pytest.param(flipped, marks=pytest.mark.fails_without("checksum")),
    swapped,
    another_version,
    unreadable,
    deleted,
    directory_deleted,
]


@pytest.mark.fails_without("counters")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss(
    engine: Engine, disk: Path, damage: Callable[[Path, list[Path]], None]
):
    """In the middle of a prompt that goes on.

    Seen to fail with errors that are not counted; `flipped` also without the checksum, with wrong
    tokens.
    """
    assert engine.runner, "needs the disk tier's files"
    prompt = tokens(("damage", damage.__name__), LENGTH)
    longer = prompt[: 4 * CHUNK] + tokens((damage.__name__, "more"), 2 * CHUNK + 5)
    expected = engine.recompute(longer).token_ids
    engine.settle()
    others = chunk_files(disk)
    engine.ask(prompt)
    engine.settle()
    own = [file for file in chunk_files(disk) if file not in others]
    assert engine.inside("clear") > 0  # the disk tier is the only one left
    before = fallbacks(engine)
    damage(own[len(own) // 2], [file for file in chunk_files(disk) if file not in own])
    engine.forget()
    assert engine.ask(longer).token_ids == expected
    assert fallbacks(engine) > before
    engine.settle()
    engine.forget()
    assert engine.ask(longer).token_ids == expected
    assert hit(engine, longer)[0] == whole(len(longer))
    assert leaks(engine) == CLEAN


@pytest.mark.fails_without("finished", "references")
def test_a_client_that_hangs_up_leaves_nothing(small: Engine):
    """While its prompt waits, loads or is answered: five at a time, where four fit.

    Seen to fail when nobody unpins what one that waited had looked up, and with references kept.
    """
    engine = small
    prompts = [tokens(("hangs up", number), 2500) for number in range(5)]
    expected = engine.recompute(prompts[0]).token_ids
    for prompt in prompts:
        engine.ask(prompt, 1)
    for wait_s in (0.0, 0.01, 0.03, 0.1):
        engine.forget()
        with ThreadPoolExecutor(len(prompts)) as threads:
            list(threads.map(hang_up, repeat(engine), prompts, repeat(wait_s)))
    engine.forget()
    with contextlib.ExitStack() as running:
        for prompt in prompts[:4]:
            running.enter_context(engine.answering(prompt))
        until(engine, "vllm:num_requests_running", 4)
        with engine.answering(prompts[4]):  # looked up, and waits for their room
            until(engine, "vllm:num_requests_waiting", 1)
    time.sleep(1)
    engine.forget()
    assert engine.ask(prompts[0]).token_ids == expected
    assert leaks(engine) == CLEAN


def hang_up(engine: Engine, prompt: list[int], wait_s: float) -> None:
    with engine.answering(prompt):
        time.sleep(wait_s)


def until(engine: Engine, name: str, value: float) -> None:
    deadline = time.monotonic() + 20
    while (now := engine.metrics().sum(name)) < value:
        assert time.monotonic() < deadline, f"{name} is {now}, not {value} or more"
        time.sleep(0.05)


@pytest.mark.fails_without("blocks", "references")
def test_a_cpu_tier_too_small_for_a_request_stores_what_fits(small: Engine):
    """16 chunks at a time do not fit with what is being written; nothing waits for ever.

    Seen to fail with loads that leave out a block, and with references kept.
    """
    engine = small
    prompt = tokens("large", 4096 - 16)
    expected = engine.recompute(prompt).token_ids
    for _ in range(3):
        engine.forget()
        assert engine.ask(prompt).token_ids == expected
    fill(engine, "after the large one", CPU_CHUNKS)
    engine.forget()
    assert engine.ask(prompt).token_ids == expected
    assert leaks(engine) == CLEAN


@pytest.mark.fails_without("computed")
def test_a_request_for_prompt_logprobs_may_be_preempted(small: Engine):
    """It arrives last, finds three that leave it little room, and has to give way to them.

    Seen to fail when LMCache looks it up: an assertion of its ends the engine.
    """
    engine = small
    prompt = tokens("logprobs", 4 * CHUNK + 77)
    expected = engine.recompute(prompt, 120).token_ids
    engine.ask(prompt, 1)
    engine.forget()
    before = engine.metrics().sum("vllm:num_preemptions_total")
    with contextlib.ExitStack() as stack:
        # 28 blocks each, full 64 tokens later; with the prompt's 9 all but two are taken.
        others = [tokens(("beside", number), 28 * 128 - 64) for number in range(3)]
        beside = [stack.enter_context(engine.answering(other, 100)) for other in others]
        assert engine.ask(prompt, 120, prompt_logprobs=0).token_ids == expected
        assert all('"finish_reason":"length"' in answer.read().decode() for answer in beside)
    assert engine.metrics().sum("vllm:num_preemptions_total") > before
    assert engine.alive()
