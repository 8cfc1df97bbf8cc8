"""What the connector asks a cache for, in the engine's process or in LMCache's server.

Each half has a `Cache`. The scheduler's half asks by `CacheLookUps`, a worker's by `CachePlaces`.

    Cache         `LocalClient`   `ServerClient`
    CacheLookUps  `LocalLookUps`  `LookUps`
    CachePlaces   `LocalCache`    `ServerPlaces`
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

from lmcache_xpu.cache.hit_places import ObjectSlots
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.metrics import Flow

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T")
Skipped = Sequence[Sequence[int]]  # by KV cache group, chunks that a worker lacks


@dataclass(frozen=True, slots=True)
class TokenRange:
    """Whole chunks of a request, to be looked up, loaded or stored."""

    request_id: str
    tokens: Any  # all of the request, as LMCache's keys have them; `PromptKeys` in this process
    start: int  # first token of the range
    end: int  # the one after the last
    salt: str = ""  # what sets the request's KV apart beside its tokens; see `keys`
    options: dict[str, Any] | None = None  # LMCache's, of the request
    blocks: Sequence[Sequence[int]] = ()  # by KV cache group of vLLM, block IDs of the range
    kept: int = 0  # leading tokens that vLLM's own prefix cache has; a load leaves them out


class KeyScope(NamedTuple):
    """What keys hold of an engine, and of one of its workers."""

    model_name: str
    world_size: int  # parts of a chunk, each of which a worker stores
    worker_id: int  # number of the part
    readers: int  # workers that load each part
    is_writer: bool  # this worker stores its part
    tensor_parallel: int  # ranks that share out the heads

    @classmethod
    def of(cls, config: VllmConfig) -> Self:
        """Return the scope of a worker. MLA's KV is the same on all ranks of a stage.

        Raises SettingsError for ranks that share out the tokens of a prompt.
        """
        from lmcache.integration.vllm.utils import mla_only  # imports vLLM

        parallel, model = config.parallel_config, config.model_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if (size := getattr(parallel, name)) > 1:
                fix = "Serve this model without KV-cache offload (--no-offload)."
                raise SettingsError(f"{name}={size}", "1: each rank has all tokens", fix)
        ranks, rank, tensor = parallel.world_size, parallel.rank, parallel.tensor_parallel_size
        if not mla_only(model):
            return cls(model.model, ranks, rank, 1, True, tensor)
        return cls(model.model, ranks // tensor, rank // tensor, tensor, not rank % tensor, tensor)


class Cache(Protocol):
    """One half's connection to a cache."""

    chunk_tokens: int
    scope: KeyScope
    # Set while the cache answers. Whoever misses an answer clears it; the heartbeat sets it when
    # look-ups are answered again.
    healthy: threading.Event
    local: Any  # the `LocalCache` in this process; None at a server
    requests: Any  # LMCache's `RequestClient` of a server; None in this process
    instance_id: int | None  # of a worker; None of a scheduler
    timeout_s: float  # that the cache has for an answer
    load_flow: Flow
    store_flow: Flow

    def key(self, tokens: TokenRange, *, worker: bool) -> Any:
        """Return what names a range of tokens in questions, with the same `start` and `end`.

        It names this `worker`'s part of the chunks, or the parts of all workers.
        """

    def lookups(self, policy: ReadPolicy) -> CacheLookUps:
        """Return the look-ups of a scheduler; the policy is of a cache in this process."""

    def places(self, sizes: Sequence[int], windows: Sequence[int], timeout_s: float) -> CachePlaces:
        """Return how the cache is asked by a worker that stores such objects; waits for it.

        By KV cache group: bytes of an object, and the chunks at the end of a hit that it needs, 0
        for all. Raises SettingsError for a server that can't be asked.
        """

    def start_heartbeat(
        self, interval_s: float, recovered: Callable[[], bool] = ..., lost: Callable[[], None] = ...
    ) -> None:
        """Ping the cache from now on, in a thread; it has the interval for each answer.

        `recovered` is called when a lost cache answers look-ups again, and says whether it may be
        used; `lost` after each ping that the cache did not answer.
        """

    def stop_heartbeat(self) -> None:
        """Ping no more, and wait for a ping that has begun."""

    def close(self) -> None:
        """End the connection; may be called again."""


class ReadPolicy(Protocol):
    """Whether a disk or a shared tier is read. Called by the scheduler's thread."""

    def reads(self, tokens: int) -> bool:
        """Whether so many tokens are to be read into memory."""

    def was_read(self, tokens: int, seconds: float) -> None:
        """Take how long it took to read tokens into memory."""


class CacheLookUps(Protocol):
    """The look-ups of a scheduler's requests, called by its thread. A lost cache has no hit."""

    def begin(self, tokens: TokenRange) -> None:
        """Begin to look for whole chunks of a request that has arrived; waits for nothing."""

    def find(self, tokens: TokenRange, *, is_alone: bool) -> int | None:
        """Return the tokens of a request's hit, whose chunks stay locked; waits milliseconds.

        None while the cache looks: vLLM asks again in its next step. `is_alone`: nobody else waits
        for a token.
        """

    def shared(self, tokens: TokenRange) -> int:
        """Return the tokens of a prefix of whole chunks that all layers of whole attention have.

        Where layers keep states, or a window, that may be more than can be hit; nothing is locked.
        """

    def forget(self, request_id: str) -> None:
        """Forget a look-up, whose chunks a load or `release` unlocks."""

    def release(self, tokens: TokenRange, hit_tokens: int) -> None:
        """Unlock a range of a hit of so many tokens: nobody will load it."""

    def give_back(self, request_id: str) -> None:
        """Forget a look-up, and unlock its chunks."""

    def end(self, request_id: str) -> None:
        """Do as `give_back` for a request that has ended; behind the answer, if that is to come."""

    def end_step(self) -> None:
        """A step of vLLM ends: `find` may wait anew."""

    def reset(self) -> bool:
        """Remove what was stored and nobody reads; whether that succeeded. Waits for the cache."""


@dataclass(eq=False)
class Answer(Generic[T]):
    """What a cache answers, as a future; this one has come."""

    value: T

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it comes within so many seconds; without a timeout it is waited for."""
        return True

    def result(self, timeout: float | None = None) -> T:
        """Return it; waits as `wait` does.

        Raises:
            TimeoutError: it has not come.
            TransferError: it has another form than expected.
        """
        return self.value


class CachePlaces(Protocol):
    """Where the chunks of a worker are. Called by any thread; only answers are waited for.

    Each question has a number that no other has, and a key of its cache.
    """

    is_sealed: bool  # objects have seals, see `seals`: others write to the memory too

    def locate(self, number: int, key: Any) -> Answer[ObjectSlots | None]:
        """Ask where the chunks of a hit are, which are locked; None if one is missing."""

    def release(self, number: int, key: Any) -> None:
        """Unlock what a question has located; nothing of it is read any more."""

    def reserve(self, number: int, key: Any, skipped: Skipped) -> Answer[ObjectSlots]:
        """Ask where to store those chunks that the cache lacks, as far as there is room.

        Nobody finds them until `commit`; a store that fails needs `give_up`. Chunks to leave out
        are counted from the key's first one.
        """

    def commit(self, number: int, key: Any) -> Answer[bool]:
        """Let others find what a question has reserved; whether it was still reserved."""

    def give_up(self, number: int) -> None:
        """Forget what a question has reserved: it will not be written."""

    def leave(self) -> None:
        """The worker ends; waits for nothing."""
