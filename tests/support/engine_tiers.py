"""Tiers in the engine's process that lose chunks, or have no room; see `engine_probe`."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Sequence
from concurrent.futures import wait
from typing import Any

from support.real_engine import CHUNK, Engine, prompt
from support.server_workers import busy, half, wait_for

LONGER = 15 * CHUNK + 30  # tokens
# Of a prompt's six chunks, those that memory has and those that the disk has.
CHUNKS = 6
PARTS = {
    "memory lost the end": (range(4), range(6)),
    "memory lost the beginning": (range(3, 6), range(6)),
    "the disk lost the end": (range(6), range(4)),
    "the disk lost the beginning": (range(6), range(3, 6)),
    "each lost another end": (range(3), range(2, 5)),
    "each lost every second": ((0, 2, 4), (1, 3, 5)),
    "both lost one": ((0, 1, 2, 4, 5), (0, 1, 4, 5)),
    "memory lost all": ((), range(6)),
    "both lost the first": (range(1, 6), range(1, 6)),
}
SALTS = itertools.count()


def settle(engine: Engine) -> None:
    """Wait until all that was computed is stored, on the disk too."""
    wait_for(engine, busy, until=False)
    engine.llm.collective_rpc(write_all)


def write_all(worker) -> None:
    for adapter in adapters():
        wait(list(adapter._writes.pending.values()))


def local() -> Any:
    return half()._client.local


def adapters() -> list[Any]:
    return [adapter for _, adapter in local()._storage.l2_adapters()]


def locks(worker) -> dict[str, int]:
    """Chunks in memory that somebody reads or writes."""
    status = local()._storage.report_status()["l1_manager"]
    return {name: status[f"{name}_locked_count"] for name in ("read", "write")}


def memory_use(worker) -> tuple[int, int]:
    return local().memory_use()


def recompute(engine: Engine, tokens: list[int]) -> list[int]:
    """The right answer, for which nothing is found."""
    engine.forget()
    return engine.ask(tokens, cache_salt=f"recompute {next(SALTS)}")


def again(engine: Engine, tokens: list[int], answer: list[int]) -> dict[str, Any]:
    """Ask with an empty cache; how much was found, and whether the answer is the same."""
    engine.forget()
    hits = engine.external_hits()
    right = engine.ask(tokens) == answer
    settle(engine)
    return {"right": right, "hit": engine.external_hits() - hits}


def forget_in_memory(worker, keys: Sequence[Any]) -> None:
    local()._storage._l1_manager.delete(list(keys))


def forget_on_disk(worker, keys: Sequence[Any]) -> None:
    [disk] = adapters()
    disk.delete(list(keys))


class Lookups:
    """Remembers the keys of the prompt that was looked up last."""

    def __init__(self) -> None:
        cache = local()
        find = cache.find
        self.prompt: Any = None

        def seen(prompt: Any, chunks: int, **options: Any) -> Any:
            self.prompt = prompt
            return find(prompt, chunks, **options)

        cache.find = seen

    def keys(self, chunks: Sequence[int]) -> list[Any]:
        [keys] = self.prompt.by_group
        return [keys[chunk] for chunk in chunks]


def parts(engine: Engine, seen: Lookups) -> dict[str, list[dict[str, Any]]]:
    """Prompts of which memory and disk have lost some chunks; asked, and asked again."""
    report = {}
    for number, (name, (memory, disk)) in enumerate(PARTS.items()):
        tokens = prompt(CHUNKS * CHUNK + 40 + number)
        engine.forget()
        answer = engine.ask(tokens)
        settle(engine)
        chunks = range(CHUNKS)
        lost = [[chunk for chunk in chunks if chunk not in kept] for kept in (memory, disk)]
        engine.llm.collective_rpc(forget_in_memory, args=(seen.keys(lost[0]),))
        engine.llm.collective_rpc(forget_on_disk, args=(seen.keys(lost[1]),))
        report[name] = [again(engine, tokens, answer) for _ in range(2)]
    return report


def full_disk(engine: Engine) -> dict[str, Any]:
    """A disk without room: memory serves, and then nobody does; later the disk does."""
    from lmcache_xpu.tiers.disk import chunk_store

    tokens, write = prompt(3 * CHUNK + 31), chunk_store.write_chunk

    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    chunk_store.write_chunk = full
    engine.forget()
    answer = engine.ask(tokens)
    settle(engine)
    report = {"memory": again(engine, tokens, answer)}
    local()._storage.clear(force=True)
    report["nobody"] = again(engine, tokens, answer)
    chunk_store.write_chunk = write
    local()._storage.clear(force=True)
    report["stored"] = again(engine, tokens, answer)
    local()._storage.clear(force=True)
    report["disk"] = again(engine, tokens, answer)
    return report


def full_memory(engine: Engine) -> dict[str, Any]:
    """Memory of which somebody holds all: for what is new, and for what the disk has."""
    from lmcache_xpu.cache.protocol import TokenRange

    cache, others = local(), local().prompt_keys("held")
    others.extend([number.to_bytes(32, "big") for number in range(64)])
    tokens, new = prompt(3 * CHUNK + 32), prompt(3 * CHUNK + 33)
    answers = [recompute(engine, new)]
    engine.forget()
    answers.append(engine.ask(tokens))
    settle(engine)
    cache._storage.clear(force=True)
    all_others = TokenRange("held", others, 0, 64 * cache.chunk_tokens)
    held = len(cache.reserve(-1, all_others, [[]]).result().rows)
    report: dict[str, Any] = {"held": held}
    pairs = list(zip((new, tokens), answers, strict=True))
    report["held by others"] = [again(engine, *pair) for pair in pairs]
    cache.commit(-1)
    settle(engine)
    report["given back"] = [again(engine, *pair) for pair in pairs for _ in range(2)]
    return report


def longer_than_memory(engine: Engine) -> list[dict[str, Any]]:
    """A prompt with more chunks than memory has room for."""
    tokens = prompt(LONGER)
    engine.forget()
    answer = engine.ask(tokens)
    settle(engine)
    return [again(engine, tokens, answer) for _ in range(2)]
