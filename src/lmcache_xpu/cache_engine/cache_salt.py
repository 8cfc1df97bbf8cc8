"""Requests whose KV differs although their tokens don't: each gets keys of its own.

LMCache names a chunk by its tokens. Not in them: the `cache_salt` with which a client keeps its
entries from others, the LoRA adapter, embeddings given in place of tokens, and the epoch of an
engine that was reset (see `epochs`). LMCache's own tags don't reach its layerwise mode. So the
first token of such a request is exchanged, in what LMCache hashes and nowhere else, for a number
that no token has; every key of the request follows from it.

Nothing is found for a request that must compute its whole prompt, e.g. for `prompt_logprobs`. vLLM
takes no hit for it, and LMCache, which does not know, ends the engine when it is preempted.

This is the scheduler's half of a connector, where the request is known. The worker sees only the
exchanged token, in lists that LMCache uses for nothing but keys.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lmcache_xpu.cache_engine.adapter_names import adapter_name

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["CacheSalts", "salt_of"]


def salt_of(request: Request) -> str | None:
    """Return what sets this request's KV apart beside its tokens; empty if nothing does.

    Returns:
        None where nobody can say it: nothing of the request may be looked up or stored.
    """
    if request.prompt_embeds is not None:
        return None
    parts: dict[str, object] = {}
    if request.cache_salt:
        parts["salt"] = request.cache_salt
    if (lora := request.lora_request) is not None:
        # By content as well: an adapter may change under its name, and disks remember.
        if (name := adapter_name(lora.lora_path)) is None:
            return None
        parts["lora"] = [lora.lora_name, name]
    return json.dumps(parts) if parts else ""


def salted(token_ids: Sequence[int], salt: str) -> list[int]:
    """The tokens to hash, of which the first stands for the salt as well."""
    digest = hashlib.sha256(f"{token_ids[0]} {salt}".encode()).digest()
    # Beyond any vocabulary, within the 64 bits of LMCache's messages.
    first = int.from_bytes(digest[:8], "big") >> 1 | 1 << 62
    return [first, *token_ids[1:]]


class CacheSalts:
    """Exchanges tokens for one scheduler's connector, and unpins what aborted requests looked up.

    Args:
        adapter: LMCache's connector; its look-up client asks here from now on.
        epoch_of: gives what a request's keys have of its epoch; empty if nothing.
    """

    def __init__(self, adapter: Any, epoch_of: Callable[[str], str] = lambda _: "") -> None:
        self._adapter = adapter
        self._epoch_of = epoch_of
        self._salts: dict[str, str] = {}
        self._computed: set[str] = set()
        self._unnamed: set[str] = set()  # nothing of these is stored
        self._adapters: dict[str, str] = {}  # paths, by request
        self._looked_up: set[str] = set()
        self._admitted: Request | None = None  # the last one
        self._abandoned: list[str] = []
        adapter.lookup_client.salts = self

    def admit(self, request: Request) -> None:
        """Before a request is looked up."""
        self._admitted = request
        request_id = request.request_id
        if (salt := salt_of(request)) is None:
            self._salts[request_id] = uuid.uuid4().hex
            self._unnamed.add(request_id)
            self.compute(request_id)
        elif salt:
            self._salts.setdefault(request_id, salt)
        if request.lora_request is not None:
            self._adapters[request_id] = request.lora_request.lora_path
        if request.skip_reading_prefix_cache:
            self.compute(request.request_id)

    def compute(self, request_id: str) -> None:
        """Find nothing for a request until it ends."""
        self._computed.add(request_id)

    def computes(self, request_id: str) -> bool:
        """Return whether nothing may be found for a request."""
        return request_id in self._computed

    def look_up(self, request_id: str, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens to look a request up by; what is found is pinned until it is loaded."""
        self._looked_up.add(request_id)
        return self.named(request_id, token_ids)

    def admitted(self, request_id: str) -> Request | None:
        """Return the request of this name, if it is the one that was admitted last."""
        request = self._admitted
        return request if request is not None and request.request_id == request_id else None

    def salt(self, request_id: str) -> str:
        """Return what a request's first token stands for beside itself; empty for most."""
        return self._salts.get(request_id, "") + self._epoch_of(request_id)

    def named(self, request_id: str, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens by which LMCache is to name a request's chunks; most are its own."""
        salt = self.salt(request_id)
        return salted(token_ids, salt) if salt and len(token_ids) else token_ids

    def mark(self, metadata: Any) -> None:
        """Complete what the worker is told to load and store in a step."""
        for meta in metadata.requests:
            self._looked_up.discard(meta.req_id)  # the worker unpins it after this step
            meta.token_ids = self.named(meta.req_id, meta.token_ids)
            if not self._has_name(meta.req_id) and meta.save_spec is not None:
                meta.save_spec.can_save = False
        if self._abandoned:
            from lmcache_xpu.versions.lmcache import ReqMeta

            for req_id in self._abandoned:
                nothing = torch.empty(0, dtype=torch.long)
                metadata.add_request(ReqMeta(req_id, token_ids=[], slot_mapping=nothing))
            self._abandoned.clear()

    def _has_name(self, request_id: str) -> bool:
        """Whether a request's KV can be named; an adapter's files may have changed meanwhile."""
        path = self._adapters.get(request_id)
        return request_id not in self._unnamed and (path is None or adapter_name(path) is not None)

    def loads(self, request_id: str) -> None:
        """When a worker was told to load for a request that waits, and to unpin it then."""
        self._looked_up.discard(request_id)

    def finished(self, request_id: str) -> None:
        """When a request has ended, in whatever way.

        One that was looked up and never scheduled has left pins in the worker, and entries in
        LMCache's adapter. The worker hears of it with the next step.
        """
        self._salts.pop(request_id, None)
        self._computed.discard(request_id)
        self._unnamed.discard(request_id)
        self._adapters.pop(request_id, None)
        if self.admitted(request_id) is not None:
            self._admitted = None  # vLLM's request, with all of its tokens
        if request_id in self._looked_up:
            self._abandon(request_id)

    def forget_lookups(self) -> None:
        """Take back what was promised to requests that are not scheduled yet: they ask again."""
        for request_id in tuple(self._looked_up):
            self._abandon(request_id)

    def _abandon(self, request_id: str) -> None:
        self._looked_up.discard(request_id)
        self._abandoned.append(request_id)
        self._adapter.lookup_client.clear_lookup_status(request_id)
        self._adapter.load_specs.pop(request_id, None)
        self._adapter._requests_priority.pop(request_id, None)
