"""What sets the KV of a request apart beside its tokens, as LMCache's `cache_salt`.

LMCache names an object by the model's name, the rank, the salt and the tokens. The salt is here a
digest of everything else: the client's own salt, the LoRA adapter, embeddings, the weights, how
blocks are packed, and the epoch.

Weights that change in a running engine leave tokens as they were. So each reset begins an epoch,
whose name, drawn at random, is part of every key. The first epoch has no name: its keys are those
of all engines with these weights, before and after a restart.

An object that is damaged stays in the server, under its key, and is not stored again. So prompts
with the same first chunk as one whose load found it get other keys from then on.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from lmcache_xpu.model.adapter_names import adapter_name
from lmcache_xpu.model.kv_cache_facts import packing_marks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MOST_DAMAGED = 4096  # first chunks that are remembered


class Keys:
    """The salts of one engine's requests."""

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int
    ) -> None:
        self.epoch = 0  # number of the current one
        self.pool: BlockPool | None = None  # vLLM's blocks, from soon after the start on
        self._epoch_name = ""
        self._is_mixed = False
        self._chunk_tokens = chunk_tokens
        self._first_chunks: dict[str, str] = {}  # digests, by request
        self._damaged: OrderedDict[str, int] = OrderedDict()  # how often, by first chunk
        self._adapters: dict[str, str] = {}  # paths, by request
        groups = [
            f"{type(group.kv_cache_spec).__name__}.{group.kv_cache_spec.block_size}"
            for group in kv_cache_config.kv_cache_groups
        ]
        self._namespace = " ".join([*packing_marks(vllm_config, kv_cache_config), *groups])

    @property
    def is_mixed(self) -> bool:
        """Whether vLLM's own prefix cache may hold blocks of an earlier epoch."""
        self._is_mixed = self._is_mixed and not self._pool_is_empty()
        return self._is_mixed

    def admit(self, request: Request, kept: int) -> tuple[str, bool]:
        """Return the salt of a request that begins from nothing, and whether it may be stored.

        A request that may not be stored has a salt of its own, under which nothing is found. Of it
        vLLM's own prefix cache has `kept` tokens.
        """
        name, salt, epoch = request.request_id, salt_of(request), self._epoch_name
        may_store = not (self.is_mixed and kept) and salt is not None
        if not may_store:
            salt, epoch = uuid.uuid4().hex, ""
        if request.lora_request is not None:
            self._adapters[name] = request.lora_request.lora_path
        parts = self._namespace, salt, epoch
        tokens = array("q", request.all_token_ids[: self._chunk_tokens]).tobytes()
        chunk = self._first_chunks[name] = _digest(repr(parts).encode() + tokens)
        return _digest(repr((*parts, self._damaged.get(chunk, 0))).encode()), may_store

    def damaged(self, request_id: str) -> None:
        """Let nothing be found any more of prompts with the same first chunk as a request."""
        if (chunk := self._first_chunks.get(request_id)) is None:
            return
        self._damaged[chunk] = self._damaged.get(chunk, 0) + 1
        self._damaged.move_to_end(chunk)
        if len(self._damaged) > MOST_DAMAGED:
            self._damaged.popitem(last=False)

    def outdated(self) -> list[str]:
        """Return the requests whose adapter's files have changed: their KV has no name any more."""
        return [name for name, path in self._adapters.items() if adapter_name(path) is None]

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._adapters.pop(request_id, None)
        self._first_chunks.pop(request_id, None)

    def reset(self) -> None:
        """Begin an epoch: what was stored before is never found again.

        Requests that have begun must neither load nor store until they are admitted anew.
        """
        self.epoch += 1
        self._epoch_name = uuid.uuid4().hex
        self._is_mixed = not self._pool_is_empty()

    def _pool_is_empty(self) -> bool:
        """Whether vLLM holds no KV at all; one of its blocks is never used."""
        pool = self.pool
        if pool is None or len(pool.cached_block_hash_to_block):
            return False
        return bool(pool.get_num_free_blocks() >= pool.num_gpu_blocks - 1)


def salt_of(request: Request) -> str | None:
    """Return what sets a request's KV apart beside its tokens; empty if nothing does.

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


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()
