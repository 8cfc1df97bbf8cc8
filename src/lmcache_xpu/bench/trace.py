"""A trace of requests, replayed through the tiers' look-ups and eviction, without an engine."""

from __future__ import annotations

import heapq
import json
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise, takewhile
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from lmcache.v1.distributed.api import ObjectKey

from lmcache_xpu.cache.local_cache import LocalCache
from lmcache_xpu.cache.local_client import LocalLookUps
from lmcache_xpu.cache.local_options import LocalCacheOptions
from lmcache_xpu.cache.protocol import TokenRange
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.tiers.chunk_layout import object_name
from lmcache_xpu.tiers.disk.chunk_file import disk_bytes

MOONCAKE_TOKENS, TIMED_TOKENS, AGENT_TOKENS = 512, 16, 64  # of a block
NEXT_S, PAUSE_S = 60.0, 3600.0  # until the next session of a user, and at most until a request
ROUND_S, TOKENS_PER_WORD = 30.0, 1.5  # of a conversation that says neither
COLOURS = ("#0068b5", "#d9822b", "#6b7280")
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 360" font-family="sans-serif"'
OBJECT_BYTES = 4096  # of a chunk: LMCache gives its memory out in pages
STEP_CHUNKS = 8  # that are stored at once before a disk: an engine stores what a step computes
STORE_S = 30.0  # at most, until a disk has written these
EXPECTED = (
    "JSON lines of Mooncake or of vLLM's timed_trace, or coding agents' sessions or ShareGPT's "
    "conversations (.json)"
)


class Request(NamedTuple):
    """The tokens of a prompt, and the names of its whole chunks: equal names, equal prefixes."""

    tokens: int
    chunks: Sequence[int]


class _Prompt(NamedTuple):
    at: float  # s or ms, as the file has it
    tokens: int
    blocks: Sequence[Hashable]  # names; the last block may be cut short
    block_tokens: int


def read(path: Path, *, chunk_tokens: int, users: int) -> list[Request]:
    """Read a file, or a folder of agents' sessions, in the order in which prompts are sent.

    Each of the `users`, agents at work, begins its next session a minute after the last. Raises
    SettingsError: it can't be read, or is no trace.
    """
    prompts, sessions, place = list[_Prompt](), list[list[_Prompt]](), str(path)
    try:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            place, text = str(file), file.read_text()
            if file.suffix == ".json":
                session = json.loads(text)
                if isinstance(session, list):
                    sessions += [list(_rounds(n, each)) for n, each in enumerate(session)]
                    continue
                scope = "" if session.get("hash_id_scope") == "global" else file.name
                block = session.get("block_size", AGENT_TOKENS)
                sessions.append(list(_steps(session["requests"], scope, 0, block)))
                continue
            for number, line in enumerate(text.splitlines(), 1):
                place = f"line {number} of {file}"
                entry = json.loads(line)
                tokens, names = entry["input_length"], entry["hash_ids"]
                block = TIMED_TOKENS if tokens <= len(names) * TIMED_TOKENS else MOONCAKE_TOKENS
                prompts.append(_Prompt(entry["timestamp"], tokens, names, block))
        place = str(path)
        prompts += _at_once(filter(None, sessions), users)
        requests = list(_requests(sorted(prompts, key=itemgetter(0)), chunk_tokens))
    except (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
        what = f"{place}, which is no trace ({type(error).__name__}: {error})"
        raise SettingsError(what, EXPECTED) from error
    if not any(request.chunks for request in requests):
        raise SettingsError(f"no prompt of {chunk_tokens} tokens in {path}", EXPECTED)
    return requests


def _steps(steps: list[dict[str, Any]], scope: str, begin: float, block: int) -> Iterator[_Prompt]:
    for number, step in enumerate(steps):
        at = begin + step["t"]
        if step.get("type") == "subagent":  # an agent that is called, and waited for
            yield from _steps(step["requests"], scope and f"{scope} {number} {at}", at, block)
        else:
            yield _Prompt(at, step["in"], [(scope, name) for name in step["hash_ids"]], block)


def _rounds(number: int, entry: dict[str, Any]) -> Iterator[_Prompt]:
    """Yield the prompts of one of ShareGPT's conversations: each has all that was said before."""
    tokens = 0
    for place, message in enumerate(entry["conversations"]):
        if message["from"] in ("gpt", "assistant") and tokens:
            blocks = [(number, name) for name in range(-(-tokens // TIMED_TOKENS))]
            yield _Prompt(place * ROUND_S / 2, tokens, blocks, TIMED_TOKENS)
        words = len(message["value"].split())
        tokens += max(1, int(message.get("num_tokens") or words * TOKENS_PER_WORD))


def _at_once(sessions: Iterable[list[_Prompt]], users: int) -> Iterator[_Prompt]:
    free = [0.0] * users
    for session in sessions:
        at = heapq.heappop(free)
        session.sort(key=itemgetter(0))
        for earlier, later in pairwise([session[0], *session]):
            at += min(later.at - earlier.at, PAUSE_S)
            yield later._replace(at=at)
        heapq.heappush(free, at + NEXT_S)


def _requests(prompts: Iterable[_Prompt], chunk_tokens: int) -> Iterator[Request]:
    # A prefix of blocks is a node of a tree, by its parent and its last block.
    nodes: dict[tuple[int, Hashable], int] = {}
    chunks: dict[tuple[int, int], int] = {}  # by the node that holds the end, and the end
    for _, tokens, blocks, size in prompts:
        if len(blocks) > -(-tokens // size):
            raise ValueError(f"{len(blocks)} hash_ids of {size} tokens for {tokens} tokens")
        node, path = 0, []
        for name in [*blocks, object()]:  # nobody else has what is behind the blocks
            path.append(node := nodes.setdefault((node, name), len(nodes) + 1))
        ends = range(chunk_tokens, tokens + 1, chunk_tokens)
        places = [(path[min(-(-end // size) - 1, len(blocks))], end) for end in ends]
        yield Request(tokens, tuple(chunks.setdefault(place, len(chunks)) for place in places))


def hit_tokens(requests: list[Request], hits: Iterable[int], chunk_tokens: int) -> int:
    """Return the tokens of hits of so many chunks; a prompt's last token is computed always."""
    return sum(min(hit * chunk_tokens, r.tokens - 1) for r, hit in zip(requests, hits, strict=True))


class _Key(ObjectKey):  # type: ignore[misc]
    """A chunk's only key, equal to itself alone: to hash its fields would take long."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def tiers(
    requests: list[Request], room: int, disk: int = 0, directory: Path | None = None
) -> Iterator[tuple[int, int]]:
    """Yield the chunks that each request hits, and those of them that the disk has read.

    The prompt is stored then. `room` is in chunks of memory, and `disk` in chunks of a tier in a
    directory, empty at first. It is waited for, so it drops nothing for being slow.
    """
    options: dict[str, Any] = {"chunk_tokens": 1, "cpu_gib": room * OBJECT_BYTES / 2**30}
    if disk:
        options |= {"disk_path": directory, "disk_gib": disk * disk_bytes(OBJECT_BYTES) / 2**30}
    names = {chunk for request in requests for chunk in request.chunks}
    keys = {chunk: _Key(chunk.to_bytes(8), "", 0) for chunk in names}
    read = list[int]()
    policy: Any = SimpleNamespace(
        reads=lambda chunks: True, was_read=lambda chunks, seconds: read.append(chunks)
    )
    with closing(LocalCache(LocalCacheOptions.read(options), torch.device("cpu"), "")) as cache:
        cache.register([OBJECT_BYTES], [0])
        lookups = LocalLookUps(cache, policy)
        for number, request in enumerate(requests):
            prompt, chunks = cache.prompt_keys(""), len(request.chunks)
            prompt.by_group[0].extend(map(keys.__getitem__, request.chunks))
            tokens = TokenRange(str(number), prompt, 0, chunks)
            while (hit := lookups.find(tokens, is_alone=True)) is None:
                time.sleep(0)
            lookups.forget(tokens.request_id)
            yield hit, read.pop() if read else 0
            if disk and hit:  # the disk hears from a load what was used
                cache.locate(number, replace(tokens, end=hit))
                cache.release(number)
            else:
                cache.unlock(prompt, hit, 0, hit)
            for first in range(hit, chunks, step := STEP_CHUNKS if disk else max(1, chunks)):
                store = TokenRange("", prompt, first, min(chunks, first + step))
                if disk:
                    _store_and_wait(cache, store, number)
                else:
                    cache.reserve(number, store, [()])
                    cache.commit(number)


def _store_and_wait(cache: LocalCache, tokens: TokenRange, number: int) -> None:
    """Store chunks, and wait until the disk tier needs their memory no more."""
    [(_, disk)] = cache._storage.l2_adapters()
    keys = tokens.tokens.by_group[0][tokens.start : tokens.end]
    is_held, before = [object_name(key) in disk._store for key in keys], disk.report_status()
    chunks = [chunk for _, chunk, *_ in cache.reserve(number, tokens, [()]).result().rows]
    cache.commit(number)
    missing, deadline = sum(not is_held[chunk] for chunk in chunks), time.monotonic() + STORE_S
    is_free = cache._storage._l1_manager.is_key_evictable
    while time.monotonic() < deadline:
        after = disk.report_status()
        ended = sum(after[name] - before[name] for name in ("stored", "dropped"))
        if ended >= missing and all(is_free(keys[chunk]) for chunk in chunks):
            break
        time.sleep(0.0001)


def plain_lru(requests: list[Request], room: int) -> Iterator[int]:
    """Yield the chunks that are hit where the beginning of a prompt is evicted first."""
    kept: OrderedDict[int, None] = OrderedDict()
    for request in requests:
        yield _hit(request, kept)
        for chunk in request.chunks:
            kept[chunk] = None
            kept.move_to_end(chunk)
        while len(kept) > room:
            kept.popitem(last=False)


def optimum(requests: list[Request], room: int) -> Iterator[int]:
    """Yield the chunks that are hit where those go that are asked for last (Belady)."""
    uses: dict[int, deque[float]] = defaultdict(deque)
    for number, request in enumerate(requests):
        for chunk in request.chunks:
            uses[chunk].append(number)
    kept: dict[int, float] = {}  # the next use of a chunk
    last: list[tuple[float, int, int]] = []  # minus its next use and its place, and the chunk
    for request in requests:
        yield _hit(request, kept)
        for place, chunk in enumerate(request.chunks):
            uses[chunk].popleft()
            kept[chunk] = next(iter(uses[chunk]), float("inf"))
            heapq.heappush(last, (-kept[chunk], -place, chunk))
        while len(kept) > room:
            use, _, chunk = heapq.heappop(last)
            if kept.get(chunk) == -use:
                del kept[chunk]


def _hit(request: Request, kept: Container[int]) -> int:
    return sum(1 for _ in takewhile(kept.__contains__, request.chunks))


POLICIES = {"plain LRU": plain_lru, "optimum": optimum}  # beside those of the tiers


def draw(tokens: Sequence[int], computed: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG picture with a line for each policy, over tiers of so many tokens.

    Lines are tokens computed, over those of endless memory: a ratio for each tier.
    """
    most = max(map(max, computed.values()))

    def x(place: int) -> float:
        return 60 + 520 * place / max(1, len(tokens) - 1)

    def y(ratio: float) -> float:
        return 320 - 280 * ratio / most

    parts = [SVG + ' font-size="12">', '<path d="M60 40V320H580" fill="none" stroke="#9ca3af"/>']
    for ratio in {1.0, most}:
        parts.append(f'<text x="55" y="{y(ratio):.0f}" text-anchor="end">{ratio:.3g}</text>')
    for place, size in enumerate(tokens):
        parts.append(f'<text x="{x(place):.0f}" y="340" text-anchor="middle">{size:,}</text>')
    for (name, ratios), colour, at in zip(computed.items(), COLOURS, (60, 160, 260), strict=True):
        points = " ".join(f"{x(place):.0f},{y(ratio):.1f}" for place, ratio in enumerate(ratios))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{at}" y="20" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])
