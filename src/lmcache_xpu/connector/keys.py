"""What sets the KV of a request apart beside its tokens, as LMCache's `cache_salt`.

LMCache's server names an object by the model's name, the rank, the salt and the tokens. The salt is
here a digest of everything else: the client's own salt, the adapter, embeddings, the weights, how
blocks are packed, and the epoch of an engine that was reset (see `connector.epochs`).

An object that is damaged stays in the server, under its key, and is not stored again. So prompts
that begin as one whose load found it get other keys from then on.
"""

from __future__ import annotations

import hashlib
import uuid
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from lmcache_xpu.connector.cache_salt import salt_of
from lmcache_xpu.connector.epochs import Epochs
from lmcache_xpu.model.adapter_names import adapter_name
from lmcache_xpu.model.kv_cache_facts import packing_marks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["Keys"]


_BEGINNINGS = 4096  # with damaged objects that are remembered


class Keys:
    """The salts of one engine's requests.

    Args:
        vllm_config: of the engine.
        kv_cache_config: of its KV cache.
        chunk_tokens: tokens of a chunk.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._beginnings: dict[str, str] = {}  # of requests
        self._generations: OrderedDict[str, int] = OrderedDict()
        self._unnamed: set[str] = set()  # requests of which nothing is stored
        self._adapters: dict[str, str] = {}  # paths, by request
        groups = [
            f"{type(group.kv_cache_spec).__name__}.{group.kv_cache_spec.block_size}"
            for group in kv_cache_config.kv_cache_groups
        ]
        self._namespace = " ".join([*packing_marks(vllm_config, kv_cache_config), *groups])
        self._epochs = Epochs()

    def bind(self, pool: BlockPool) -> None:
        """Take vLLM's pool of blocks."""
        self._epochs.pool = pool

    @property
    def epoch(self) -> int:
        """Number of the current epoch."""
        return self._epochs.current.number

    @property
    def is_mixed(self) -> bool:
        """Whether vLLM's own prefix cache may hold blocks of an earlier epoch."""
        return self._epochs.is_mixed

    def admit(self, request: Request, kept: int) -> str:
        """Return the salt of a request that begins from nothing.

        Args:
            request: vLLM's.
            kept: tokens that vLLM's own prefix cache has of it.
        """
        self._epochs.admit(request.request_id, kept)
        if request.lora_request is not None:
            self._adapters[request.request_id] = request.lora_request.lora_path
        if (salt := salt_of(request)) is None:
            self._unnamed.add(request.request_id)
            salt = uuid.uuid4().hex
        parts = self._namespace, salt, self._epochs.of(request.request_id)
        tokens = array("q", request.all_token_ids[: self._chunk_tokens]).tobytes()
        beginning = self._beginnings[request.request_id] = _digest(repr(parts).encode() + tokens)
        return _digest(repr((*parts, self._generations.get(beginning, 0))).encode())

    def damaged(self, request_id: str) -> None:
        """Let nothing be found any more of prompts that begin as a request does."""
        if (beginning := self._beginnings.get(request_id)) is None:
            return
        self._generations[beginning] = self._generations.get(beginning, 0) + 1
        self._generations.move_to_end(beginning)
        if len(self._generations) > _BEGINNINGS:
            self._generations.popitem(last=False)

    def may_store(self, request_id: str) -> bool:
        """Whether a request's KV has a name, and is of the current epoch alone."""
        return self._epochs.is_only(request_id) and request_id not in self._unnamed

    def outdated(self) -> list[str]:
        """Return the requests whose adapter's files have changed: their KV has no name any more."""
        return [name for name, path in self._adapters.items() if adapter_name(path) is None]

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._adapters.pop(request_id, None)
        self._beginnings.pop(request_id, None)
        self._unnamed.discard(request_id)
        self._epochs.finished(request_id)

    def reset(self) -> None:
        """Let nothing be found any more that was stored before."""
        self._epochs.begin()


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=16).hexdigest()
