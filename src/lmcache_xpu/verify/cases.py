"""What an engine with the connector is asked: prompts that it stores, and then finds again.

All functions that take an engine are jobs of its process; see `bench.engine.main`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_xpu.bench.engine import Blocks, Engine
from lmcache_xpu.model.kv_cache_groups import block_tokens
from lmcache_xpu.verify.asking import ANSWER, Asked, ask, clean

CHUNK = 256  # tokens; LMCache's default
CROWD_OVER, CROWD_MOST = 1.3, 32  # of the engine's KV cache, prompts
AT_ONCE = 4  # prompts that fit
LAST = 6  # tokens of a prompt's last block that are left for its answer
FLUSH_S = 3.0  # files are written behind answers


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt that is stored, and one that begins like it and is asked then."""

    name: str
    stored: int  # tokens of the first prompt
    shared: int = 0  # its tokens that the second one begins with; 0 for all
    new: int = 0  # tokens of the second one behind them
    own: int = 0  # blocks of the second one that vLLM's own cache has
    kept: bool = False  # whether vLLM's own cache is kept, so that nothing is left to load


@dataclass(slots=True)
class Pair:
    """What was stored, and what came of the prompt that was asked then."""

    case: str
    stored: Asked
    asked: Asked
    alone: bool = True  # else at once with others, whose number changes how results are rounded
    # Its blocks that were computed since: a cache that had dropped them holds them instead.
    recomputed: list[Blocks] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine says of its KV cache."""

    block_tokens: list[int]  # by group
    layers: list[list[str]]  # by group, those of a block's digests
    tokens: int  # of prompts that fit at once
    longest: int  # tokens of a prompt
    drafts: bool = False  # by layers with keys and values (EAGLE, MTP)
    ranks: int = 1  # that share each layer: its digests are those of one after another

    @property
    def block(self) -> int:
        """Tokens of the largest block."""
        return max(self.block_tokens)

    @property
    def chunk(self) -> int:
        """Tokens of a chunk: LMCache's default, of whole blocks."""
        return -(-CHUNK // self.block) * self.block

    @property
    def most(self) -> int:
        """Tokens of the longest prompt of which two fit."""
        return min(self.longest, self.tokens // 2)


def begin(engine: Engine, seed: int | None = None) -> Facts:
    """Let prompts be a seed's, or none of an earlier run, which a disk may hold; return facts."""
    engine.numbers.seed(os.urandom(16) if seed is None else seed)
    return facts(engine)


def facts(engine: Engine) -> Facts:
    """Return the facts of an engine."""
    config = engine.scheduler.kv_cache_config
    sizes = block_tokens(config)
    tokens = (config.num_blocks - 1) // len(sizes) * max(sizes)
    vllm_config = engine.scheduler.vllm_config
    drafter = vllm_config.speculative_config
    longest = engine.scheduler.max_model_len - ANSWER
    drafts = bool(drafter and drafter.use_eagle())
    ranks = vllm_config.parallel_config.tensor_parallel_size
    return Facts(sizes, engine.layers(), tokens, longest, drafts, ranks)


def cases(cache: Facts) -> list[Case]:
    """Return the cases of one prompt at a time, with lengths around blocks and chunks."""
    block, chunk = cache.block, cache.chunk
    inside = 3 * chunk + block + 13  # in a block, and behind one that begins no chunk
    # A drafter's layers compute a token with the one behind it, which drafts alone depend on.
    end = 2 * chunk + cache.drafts
    lengths = dict.fromkeys(
        (chunk - 1, chunk, chunk + 1, 3 * chunk + block - 1, 3 * chunk + block, inside)
    )
    wanted = [
        *(Case(f"the same prompt, {length} tokens", length) for length in lengths),
        Case("another question, inside a block", inside, 3 * chunk - 7, 60),
        Case("another question, at a chunk's end", inside, end, chunk + 9),
        Case("one block in vLLM's own cache", inside, own=1),
        Case("some chunks in vLLM's own cache", inside, own=2 * chunk // block),
        Case("all in vLLM's own cache", inside, kept=True),
        Case("another question, vLLM's own cache", inside, 2 * chunk + 9, 60, kept=True),
    ]
    return [case for case in wanted if max(case.stored, case.shared + case.new) <= cache.most]


def hit(engine: Engine, case: Case) -> Pair:
    """Store a prompt and ask its like; steps of both end at the same tokens.

    Where the hit ends inside a block, that is found out first with another prompt.
    """
    block = facts(engine).block
    ends = [*range(block, case.stored, block)]
    for _ in range(2):
        prompt = engine.prompt(case.stored)
        question = prompt[: case.shared or case.stored] + engine.prompt(case.new)
        # And one token more: the last of a hit is computed alone, which rounds otherwise.
        own = prompt[: case.own * block + 1] if case.own else []
        pair = _stored_and_asked(engine, case.name, prompt, question, ends, own, kept=case.kept)
        if pair.asked.cached in (0, *pair.stored.ends):
            break
        ends = sorted({*ends, pair.asked.cached})
    return pair


def _stored_and_asked(
    engine: Engine,
    name: str,
    prompt: list[int],
    question: list[int],
    ends: Sequence[int],
    own: Sequence[int] = (),
    *,
    kept: bool,
) -> Pair:
    """Store a prompt and ask its like; `own` is asked in between, and vLLM's own cache has it."""
    clean(engine)
    [stored] = ask(engine, [prompt], ends)
    if not kept:
        clean(engine)
    if own:
        ask(engine, [[*own]], ends)
    [asked] = ask(engine, [question], ends)
    return Pair(name, stored, asked)


def crowd(engine: Engine) -> list[Pair]:
    """Store prompts at once; ask some, all, which do not fit, and all of which some are aborted.

    Each answer needs one more block than its prompt, which preempts others where none is left.
    """
    cache = facts(engine)
    tokens = int(cache.tokens * CROWD_OVER)
    length = min(cache.longest - 3 * cache.block, max(2 * CHUNK, tokens // CROWD_MOST))
    sizes = [
        (length // cache.block + number % 3 + 1) * cache.block - LAST + number % 3
        for number in range(tokens // length + 1)
    ]
    prompts = [engine.prompt(size) for size in sizes]
    all_stored: list[Asked] = []
    for first in range(0, len(prompts), AT_ONCE):
        clean(engine)
        all_stored += ask(engine, prompts[first : first + AT_ONCE])
    third = range(0, len(prompts), 3)
    pairs = []
    recomputed: list[list[Blocks]] = [[] for _ in prompts]
    for name, count, aborted in (
        ("several at once", AT_ONCE, ()),
        ("more at once than fit", len(prompts), ()),
        ("more than fit, some aborted", len(prompts), third),
    ):
        clean(engine)
        answers = ask(engine, prompts[:count], aborted=aborted)
        for stored, asked, again in zip(all_stored, answers, recomputed, strict=False):
            if asked.answer and not stored.preemptions:
                pairs.append(Pair(name, stored, asked, alone=False, recomputed=[*again]))
            again.append(asked.computed(cache.block_tokens))
    for number in third[:AT_ONCE]:
        stored, asked = all_stored[number], alone(engine, prompts[number], ())
        pairs.append(Pair("asked again after an abort", stored, asked, False, recomputed[number]))
    return pairs


def store(engine: Engine, count: int) -> list[Asked]:
    """Store prompts for the next engine; wait until they may be on a disk."""
    cache = facts(engine)
    length = min(cache.longest, 2 * cache.chunk + 13)
    ends = range(cache.block, length, cache.block)
    stored = [alone(engine, engine.prompt(length), ends) for _ in range(count)]
    clean(engine)
    time.sleep(FLUSH_S)
    return stored


def ask_again(engine: Engine, name: str, all_stored: Sequence[Asked]) -> list[Pair]:
    """Ask prompts that an engine before this one stored."""
    return [Pair(name, stored, alone(engine, stored.prompt, stored.ends)) for stored in all_stored]


def alone(engine: Engine, prompt: list[int], ends: Sequence[int]) -> Asked:
    """Ask a prompt with nothing in vLLM's own cache, in steps that end at these tokens."""
    clean(engine)
    [asked] = ask(engine, [prompt], ends)
    return asked


def prompts(engine: Engine) -> list[list[int]]:
    """Make up prompts that end inside a block."""
    cache = facts(engine)
    lengths = (count * cache.chunk + cache.block + 13 for count in (1, 2, 3))
    return [engine.prompt(min(cache.most, length)) for length in lengths]


def twice(engine: Engine, prompts: Sequence[list[int]], *, kept: bool = False) -> list[Pair]:
    """Ask each prompt twice; in between vLLM's own cache is kept, or not."""
    block = facts(engine).block
    return [
        _stored_and_asked(engine, "", each, each, range(block, len(each), block), kept=kept)
        for each in prompts
    ]


def damage(directory: Path) -> int:
    """Flip a byte in the middle of each file of a directory; return how many files."""
    files = [path for path in directory.rglob("*") if path.is_file() and path.stat().st_size]
    for path in files:
        with path.open("r+b") as file:
            file.seek(middle := path.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(middle)
            file.write(bytes([byte ^ 0xFF]))
            file.flush()
            os.fsync(file.fileno())
    return len(files)
