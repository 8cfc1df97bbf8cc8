"""The connector's facade around halves that a test makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from lmcache_xpu.cache_engine.unfilled_blocks import UnfilledBlocks
from lmcache_xpu.kv_connector.connector import LMCacheXPUConnector
from lmcache_xpu.kv_connector.worker import WorkerSide

BLOCK = 4


class Facade(LMCacheXPUConnector):
    """vLLM's class, without an engine behind it."""

    def __new__(cls, **halves: Any) -> Any:
        return KVConnectorBase_V1.__new__(cls)

    def __init__(self, *, worker: Any = None, scheduler: Any = None) -> None:
        role = KVConnectorRole.SCHEDULER if worker is None else KVConnectorRole.WORKER
        config: Any = SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_producer=True))
        KVConnectorBase_V1.__init__(self, config, role, None)
        self._ended = False
        if worker is not None:
            self.worker_side = worker
        else:
            self.scheduler_side = scheduler


Facade.__name__ = LMCacheXPUConnector.__name__  # by which vLLM sorts stats


class Adapter:
    """LMCache's connector in a worker: what it is told, and what it was told to load."""

    def __init__(self, *, use_layerwise: bool = False) -> None:
        self.step: Any = None
        self.seen: list[tuple[str, Any]] = []
        self.dropped: list[Any] = []
        self.invalid: set[int] = set()
        self.config = SimpleNamespace(
            extra_config=None, remote_storage_plugins=None, remote_url=None
        )
        self.lmcache_engine: Any = SimpleNamespace(
            gpu_connector=SimpleNamespace(failed_slots=[]),
            refuses_lookups=False,
            save_only_first_rank=False,
            metadata=SimpleNamespace(world_size=2, worker_id=0),
            use_layerwise=use_layerwise,
            settle=lambda: None,
            lender=None,
            borrower=None,
        )

    def bind(self, step: Any) -> None:
        self.step = step

    def clear(self) -> None:
        self.step = None

    def start_load_kv(self, context: Any, **kwargs: Any) -> None:
        self.seen.append(("load", (self.step, context.attn_metadata)))

    def wait_for_layer_load(self, layer: str) -> None:
        self.seen.append(("wait", layer))

    def save_kv_layer(self, layer: str, *rest: Any) -> None:
        self.seen.append(("save", layer))

    def wait_for_save(self) -> None:
        self.seen.append(("save", ""))

    def end_loads(self) -> None:
        """Nothing is loaded layer by layer."""

    def drop_store(self, request: Any) -> None:
        self.dropped.append(request)

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self.invalid = self.invalid, set()
        return blocks


def worker_side(
    adapter: Any = None, *, in_flight: Any = None, layers: tuple[str, ...] = (), **options: Any
) -> WorkerSide:
    """A worker's half between two steps."""
    side = WorkerSide(adapter or Adapter(), Any, UnfilledBlocks(BLOCK), block_size=BLOCK, **options)
    side.in_flight = in_flight
    side.layers.register(layers)
    return side
