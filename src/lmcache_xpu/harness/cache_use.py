"""What a running engine's cache has done, and whether it works, from its page of metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lmcache_xpu.harness.client import Page
from lmcache_xpu.metrics import FLOWS, Direction

CHUNK_TOKENS = 256  # LMCache's and our default; no metric says it
FULL = 0.95
# Reasons that cost hits, and need nobody.
HARMLESS = ("incomplete", "behind", "late", "missing", "overtaken", "unfilled")
TIERS = ("cpu", "disk", "shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """Counts since the engine started, or of a span of time; and levels now."""

    requests: float  # that have ended
    prompt_tokens: float  # of prompts that were started
    device_tokens: float  # prompt tokens in the engine's own cache
    cpu_tokens: float  # prompt tokens in each tier
    disk_tokens: float
    shared_tokens: float
    stored_tokens: dict[str, float]  # by tier: cpu, disk and shared
    evicted_chunks: float  # from the CPU tier; of models with several KV caches, parts of chunks
    preemptions: float  # requests whose KV cache had to make room
    fallbacks: float  # requests whose load ended in recomputing
    failures: dict[str, int]  # moves that failed, by direction, tier and reason: `load cpu late`
    cpu_bytes: float  # that the CPU tier holds now, and may hold
    cpu_limit_bytes: float
    disk_bytes: float  # the same of the disk tier
    disk_limit_bytes: float
    own_tokens: float  # that the engine's own cache holds when it is full; 0 if it does not say
    own_usage: float  # share of it that requests use now
    running: float  # requests now
    waiting: float

    @classmethod
    def between(cls, earlier: Page | None, page: Page) -> CacheUse:
        """Read the counts from a page, less those of an earlier one."""

        def count(name: str, **labels: str) -> float:
            before = 0.0 if earlier is None else earlier.sum(name, **labels)
            # An engine that was restarted in between counts from 0.
            return max(0.0, page.sum(name, **labels) - before)

        def moved(direction: Direction) -> dict[str, float]:
            name = "lmcache_xpu_tokens_total"
            return {tier: count(name, direction=direction, tier=tier) for tier in TIERS}

        external, loaded = count("vllm:external_prefix_cache_hits_total"), moved("load")
        # Each device of a model counts its own loads, and all of them pass the CPU tier: so these
        # are shares of what the engine says it was given.
        scale = external / loaded["cpu"] if loaded["cpu"] else 0.0
        disk, shared = (min(external, scale * loaded[tier]) for tier in TIERS[1:])
        errors = "lmcache_xpu_errors_total"
        failures: dict[str, int] = {}
        for sample in page.of(errors):
            labels = {name: sample.labels[name] for name in ("direction", "tier", "reason")}
            failures[" ".join(labels.values())] = int(count(errors, **labels))
        return cls(
            requests=count("vllm:request_success_total"),
            prompt_tokens=count("vllm:prompt_tokens_total"),
            device_tokens=count("vllm:prefix_cache_hits_total"),
            cpu_tokens=max(0.0, external - disk - shared),
            disk_tokens=disk,
            shared_tokens=shared,
            stored_tokens=moved("store"),
            evicted_chunks=count("lmcache_xpu_evicted_total", tier="cpu"),
            preemptions=count("vllm:num_preemptions_total"),
            fallbacks=count("lmcache_xpu_fallbacks_total"),
            failures={name: number for name, number in sorted(failures.items()) if number},
            cpu_bytes=page.sum("lmcache_xpu_cpu_used_bytes"),
            cpu_limit_bytes=page.sum("lmcache_xpu_cpu_limit_bytes"),
            disk_bytes=page.sum("lmcache_xpu_disk_used_bytes"),
            disk_limit_bytes=page.sum("lmcache_xpu_disk_limit_bytes"),
            own_tokens=_own_tokens(page),
            own_usage=max((s.value for s in page.of("vllm:kv_cache_usage_perc")), default=0.0),
            running=page.sum("vllm:num_requests_running"),
            waiting=page.sum("vllm:num_requests_waiting"),
        )

    @property
    def tier_tokens(self) -> float:
        """Prompt tokens that came from a tier."""
        return self.cpu_tokens + self.disk_tokens + self.shared_tokens

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens that no cache had."""
        return max(0.0, self.prompt_tokens - self.device_tokens - self.tier_tokens)

    def share(self, tokens: float) -> float:
        """Return a part of all prompt tokens."""
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def _own_tokens(page: Page) -> float:
    total = 0
    for sample in page.of("vllm:cache_config_info"):
        blocks, size = (sample.labels.get(key, "") for key in ("num_gpu_blocks", "block_size"))
        total += int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
    return total


@dataclass(frozen=True, slots=True)
class Advice:
    """A sentence, and whether all is well, could be better, or something has to be repaired."""

    outcome: Literal["ok", "hint", "wrong"]
    text: str


def advise(use: CacheUse) -> list[Advice]:
    """Say whether the cache works, then what would make it better; the answer is the first."""
    return [_answer(use), *_hints(use)]


def _answer(use: CacheUse) -> Advice:
    stored, own = use.stored_tokens["cpu"], "All that came back was still in the engine's own cache"
    if not use.prompt_tokens:
        text = "No prompt has come yet: there is nothing to say."
    elif use.tier_tokens:
        text = (
            f"The cache works: {use.share(use.tier_tokens):.0%} of all prompt tokens came from the "
            "tiers and were not computed again."
        )
    elif use.device_tokens and stored > use.own_tokens > 0:
        text = f"{own}. What has left it is in the tiers, and nobody has asked for it again."
    elif use.device_tokens:
        text = f"{own}. Everything fits there, so a tier can't help."
    elif stored:
        text = (
            "No prompt came back yet: none began as an earlier one did. If yours do, look for what "
            "differs at their start: a date, a name, a cache_salt."
        )
    elif use.requests and use.prompt_tokens / use.requests >= 2 * CHUNK_TOKENS:
        text = (
            f"Nothing was stored of {use.prompt_tokens:,.0f} prompt tokens: see the engine's log."
        )
        return Advice("wrong", text)
    else:
        text = (
            f"No prompt was long enough to be stored: a chunk has {CHUNK_TOKENS} tokens, unless "
            "chunk_tokens says otherwise."
        )
    return Advice("ok", text)


def _hints(use: CacheUse) -> Iterator[Advice]:
    if use.evicted_chunks and not use.disk_limit_bytes and not use.stored_tokens["shared"]:
        text = (
            f"The CPU tier is full and has evicted {use.evicted_chunks:,.0f} chunks: a larger one "
            "(cpu_gib) or a disk tier (disk_path, disk_gib) would keep them."
        )
        yield Advice("hint", text)
    if use.disk_limit_bytes and use.disk_bytes >= FULL * use.disk_limit_bytes:
        text = "The disk tier is full and evicts: a larger one (disk_gib) would keep more."
        yield Advice("hint", text)
    if use.preemptions:
        text = (
            f"{use.preemptions:,.0f} times a request had to make room for others: the engine's own "
            "cache is small for so many at once."
        )
        yield Advice("hint", text)
    reasons = {f"{flow.direction} {flow.tier}": flow.reasons for flow in FLOWS}
    for name, count in use.failures.items():
        direction, tier, reason = name.split(" ")
        raised = "The move raised: the log has the cause"
        meaning = reasons.get(f"{direction} {tier}", {}).get(reason, raised)
        text = f"{count:,} times a {direction} failed in the {tier} tier, {reason}: {meaning}."
        yield Advice("hint" if reason in HARMLESS else "wrong", text)
    if use.fallbacks:
        text = f"{use.fallbacks:,.0f} requests were computed anew because a load failed: "
        yield Advice("wrong", f"{text}see the engine's log.")
