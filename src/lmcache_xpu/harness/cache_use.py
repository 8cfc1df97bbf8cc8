"""What a running engine's cache has done, and whether it works, from its page of metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmcache_xpu.harness.client import Page
from lmcache_xpu.metrics import FLOWS

CHUNK_TOKENS = 256  # LMCache's and our default; no metric says it
FULL = 0.95
# Reasons that cost hits, and need nobody.
HARMLESS = ("incomplete", "behind", "late", "missing", "overtaken", "unfilled")


@dataclass(frozen=True, slots=True)
class Failures:
    """Moves that failed for one reason.

    Args:
        direction: store or load.
        tier: cpu, disk, shared or server.
        reason: as `lmcache_xpu_errors_total` has it.
        count: how many.
        meaning: what it means, and what to do.
    """

    direction: str
    tier: str
    reason: str
    count: int
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """Counts since the engine started, or of a span of time; and levels now.

    Args:
        requests: that have ended.
        prompt_tokens: of prompts that were started.
        device_tokens: prompt tokens in the engine's own cache.
        cpu_tokens, disk_tokens, shared_tokens: prompt tokens in each tier.
        looked_up_tokens: prompt tokens looked up in the tiers.
        stored_tokens: by tier, cpu, disk and shared.
        evicted_chunks: that left the CPU tier; of models with several KV caches, parts of chunks.
        preemptions: requests whose KV cache had to make room.
        fallbacks: requests whose load ended in recomputing.
        failures: moves that failed, by reason.
        cpu_bytes, cpu_limit_bytes: that the CPU tier holds now, and may hold.
        disk_bytes, disk_limit_bytes: the same of the disk tier.
        own_tokens: that the engine's own cache holds when it is full; 0 if it does not say.
        own_usage: share of it that requests use now.
        running, waiting: requests now.
    """

    requests: float
    prompt_tokens: float
    device_tokens: float
    cpu_tokens: float
    disk_tokens: float
    shared_tokens: float
    looked_up_tokens: float
    stored_tokens: dict[str, float]
    evicted_chunks: float
    preemptions: float
    fallbacks: float
    failures: tuple[Failures, ...] = ()
    cpu_bytes: float = 0.0
    cpu_limit_bytes: float = 0.0
    disk_bytes: float = 0.0
    disk_limit_bytes: float = 0.0
    own_tokens: float = 0.0
    own_usage: float = 0.0
    running: float = 0.0
    waiting: float = 0.0

    @classmethod
    def between(cls, earlier: Page | None, page: Page) -> CacheUse:
        """Read the counts from a page, less those of an earlier one."""

        def count(name: str, **labels: str) -> float:
            before = 0.0 if earlier is None else earlier.sum(name, **labels)
            # An engine that was restarted in between counts from 0.
            return max(0.0, page.sum(name, **labels) - before)

        external = count("vllm:external_prefix_cache_hits_total")
        loaded = {
            tier: count("lmcache_xpu_tokens_total", direction="load", tier=tier)
            for tier in ("cpu", "disk", "shared")
        }
        # Each device of a model counts its own loads, and all of them pass the CPU tier: so these
        # are shares of what the engine says it was given.
        scale = external / loaded["cpu"] if loaded["cpu"] else 0.0
        disk, shared = (min(external, scale * loaded[tier]) for tier in ("disk", "shared"))
        errors = "lmcache_xpu_errors_total"
        reasons = {
            (sample.labels["direction"], sample.labels["tier"], sample.labels["reason"])
            for sample in page.of(errors)
        }
        failures = [
            Failures(d, t, r, int(count(errors, direction=d, tier=t, reason=r)), _meaning(d, t, r))
            for d, t, r in sorted(reasons)
        ]
        return cls(
            requests=count("vllm:request_success_total"),
            prompt_tokens=count("vllm:prompt_tokens_total"),
            device_tokens=count("vllm:prefix_cache_hits_total"),
            cpu_tokens=max(0.0, external - disk - shared),
            disk_tokens=disk,
            shared_tokens=shared,
            looked_up_tokens=count("vllm:external_prefix_cache_queries_total"),
            stored_tokens={
                tier: count("lmcache_xpu_tokens_total", direction="store", tier=tier)
                for tier in loaded
            },
            evicted_chunks=count("lmcache_xpu_evicted_total", tier="cpu"),
            preemptions=count("vllm:num_preemptions_total"),
            fallbacks=count("lmcache_xpu_fallbacks_total"),
            failures=tuple(failure for failure in failures if failure.count),
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


def _meaning(direction: str, tier: str, reason: str) -> str:
    reasons = [flow.reasons for flow in FLOWS if (flow.direction, flow.tier) == (direction, tier)]
    return next(iter(reasons), {}).get(reason, "The move raised: the log has the cause")


def _own_tokens(page: Page) -> float:
    total = 0
    for sample in page.of("vllm:cache_config_info"):
        blocks, size = (sample.labels.get(key, "") for key in ("num_gpu_blocks", "block_size"))
        total += int(blocks) * int(size) if blocks.isdigit() and size.isdigit() else 0
    return total


@dataclass(frozen=True, slots=True)
class Advice:
    """One sentence.

    Args:
        outcome: ok; hint: it could be better; wrong: something has to be mended.
        text: the sentence.
    """

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


def _hints(use: CacheUse) -> list[Advice]:
    hints = []
    if use.evicted_chunks and not use.disk_limit_bytes and not use.stored_tokens["shared"]:
        hints.append(
            f"The CPU tier is full and has evicted {use.evicted_chunks:,.0f} chunks: a larger one "
            "(cpu_gib) or a disk tier (disk_path, disk_gib) would keep them."
        )
    if use.disk_limit_bytes and use.disk_bytes >= FULL * use.disk_limit_bytes:
        hints.append("The disk tier is full and evicts: a larger one (disk_gib) would keep more.")
    if use.preemptions:
        hints.append(
            f"{use.preemptions:,.0f} times a request had to make room for others: the engine's own "
            "cache is small for so many at once."
        )
    advice = [Advice("hint", text) for text in hints]
    for error in use.failures:
        text = (
            f"{error.count:,} times a {error.direction} failed in the {error.tier} tier, "
            f"{error.reason}: {error.meaning}."
        )
        advice.append(Advice("hint" if error.reason in HARMLESS else "wrong", text))
    if use.fallbacks:
        text = f"{use.fallbacks:,.0f} requests were computed anew because a load failed: "
        advice.append(Advice("wrong", f"{text}see the engine's log."))
    return advice
