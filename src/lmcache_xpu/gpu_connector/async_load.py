"""A load that no step waits for: its request waits, while the engine computes others.

A thread of the worker fetches the chunks and gives them here; the engine's thread then enqueues
some of them with each step, behind the step's own work.

    fetching    add_load, hold                  from the thread that fetches
    moving      feed, arrived, wait, close      from the engine's thread

vLLM is told of a load when its last part is on its way: it takes two steps until the request is in
one. The first step after vLLM has heard waits on the device, where that was too early.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lmcache.v1.memory_management import MemoryObj

from lmcache_xpu.gpu_connector.load_pipeline import Finished, LoadPipeline


class AsyncLoad:
    """The load of one request, in layer groups of a size that suits a step.

    Attributes:
        tokens: number of tokens that it loads.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._pipeline: LoadPipeline | None = None
        self._objs: list[MemoryObj] = []
        self._finished: Finished | None = None

    def add_load(self, load: LoadPipeline, objs: Sequence[MemoryObj], finished: Finished) -> None:
        """Take over what was fetched. Its memory is held until it has been copied.

        Args:
            load: nothing of which is enqueued yet.
            objs: LMCache's memory of it; `hold` brings more.
            finished: is told how many seconds the load took.
        """
        self._pipeline, self._finished = load, finished
        self.hold(load, objs)

    def hold(self, load: LoadPipeline, objs: Sequence[MemoryObj]) -> None:
        """Hold more memory for the load."""
        for obj in objs:
            obj.ref_count_up()
        self._objs.extend(objs)

    def feed(self, room: int) -> int:
        """Enqueue layer groups of about `room` bytes, and return their bytes.

        The first group is ordered after what the engine has enqueued so far: a step before this one
        may still read the blocks that the load writes.
        """
        load, fed = self._pipeline, 0
        if load is None:
            return 0
        with load.enduring():
            if not load.enqueued:
                load.stager.follow_engine()
            while fed < room and (size := load.enqueue_next()):
                fed += size
        return fed

    @property
    def bytes_under_way(self) -> int:
        """Bytes that were enqueued and are not there yet."""
        return 0 if self._pipeline is None else self._pipeline.bytes_under_way()

    def arrived(self, within_bytes: int = 0) -> bool:
        """Whether all of it is in the engine's blocks, or it has failed and nothing moves.

        Args:
            within_bytes: so much may still be on its way; nothing can go wrong with that.
        """
        return self._pipeline is None or self._pipeline.arrived(within_bytes)

    def wait(self) -> None:
        """Let the engine's stream wait for what is on its way."""
        if self._pipeline is not None:
            self._pipeline.before_all()

    def close(self) -> tuple[float, torch.Tensor | None]:
        """Let go of the memory of a load that has arrived.

        Returns:
            Seconds that it took, and the slots `[tokens]` if it failed.
        """
        objs, self._objs = self._objs, []
        for obj in objs:
            obj.ref_count_down()
        load, self._pipeline = self._pipeline, None
        if load is None:
            return 0.0, None
        if load.failed_behind is not None:
            return 0.0, load.slots
        seconds = sum(handle.seconds() for handle in load.handles())
        assert self._finished is not None
        self._finished(seconds)
        return seconds, None

    def abandon(self) -> None:
        """Wait on this thread for what is under way, and let go of all memory."""
        if self._pipeline is not None:
            self._pipeline.synchronize(self._pipeline.enqueued)
            self.close()
