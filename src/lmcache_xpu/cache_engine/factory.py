"""LMCache with the classes of this package, by its own seam: an adapter with a service factory.

LMCache's adapter for vLLM makes a service factory, and that makes what a scheduler or a worker
needs. The classes here override the steps that name a class. Nothing of LMCache is replaced, so
that other users of it in the process have it as it is.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import torch
from lmcache.banner import print_banner_once
from lmcache.integration.vllm.utils import ENGINE_NAME, lmcache_get_or_create_config
from lmcache.observability import LMCacheStatsLogger

from lmcache_xpu.cache_engine.engine import CacheEngine
from lmcache_xpu.cache_engine.guarded_connectors import LayerwiseConnector, StandardConnector
from lmcache_xpu.cache_engine.lookup_client import LookupClient
from lmcache_xpu.cache_engine.lookup_server import AnsweringTransport
from lmcache_xpu.cache_engine.offload_server import OffloadServer
from lmcache_xpu.cache_engine.rank_shard import BORROWER_GIB, rank_shard
from lmcache_xpu.cache_engine.token_database import TokenDatabase
from lmcache_xpu.gpu_connector.connector_options import ConnectorOptions
from lmcache_xpu.tiers.shard import ShardedMetadata
from lmcache_xpu.versions.lmcache import (
    LMCacheConnectorV1Impl,
    LMCacheEngineBuilder,
    LMCacheLookupServer,
    LMCacheManager,
    LookupClientFactory,
    VllmServiceFactory,
)

if TYPE_CHECKING:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata
    from vllm.config import VllmConfig

    from lmcache_xpu.cache_engine.kv_cache_facts import EngineFacts
    from lmcache_xpu.cache_engine.unfilled_blocks import UnfilledBlocks
    from lmcache_xpu.versions.lmcache import LMCacheConnectorMetadata

__all__ = ["Adapter", "CacheEngine", "ServiceFactory", "gpu_connector"]


class Adapter(LMCacheConnectorV1Impl):  # type: ignore[misc]  # untyped base
    """LMCache's connector for vLLM, with the parts of this package.

    Args:
        vllm_config: of the engine.
        role: vLLM's, of the scheduler or of a worker.
        facts: of the engine's KV cache.
        unfilled: the worker's record of failed loads; None in the scheduler.
    """

    layerwise_retrievers: list[Generator[Any, None, None]]

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: Any,
        facts: EngineFacts,
        unfilled: UnfilledBlocks | None = None,
    ) -> None:
        self.step: Any = None  # the worker's description of the step that is under way
        # LMCache's constructor with another service factory, for which it has no parameter.
        scheduler = role.name == "SCHEDULER"
        if scheduler:
            print_banner_once(sys.stderr)
        self._parent = self  # is asked for the metadata of the step
        self._vllm_config, self._role = vllm_config, role
        # Slots are planned on the host (see `slots`); LMCache would send them to the device.
        self.device = torch.device("cpu")
        self.kv_role = vllm_config.kv_transfer_config.kv_role
        self.worker_count = vllm_config.parallel_config.tensor_parallel_size
        self.config = config = lmcache_get_or_create_config()
        self._apply_extra_config(config, vllm_config)
        factory = ServiceFactory(config, vllm_config, role.name.lower(), facts, unfilled)
        self._manager = LMCacheManager(config, factory, connector=self)
        self._manager.start_services()
        self._init_connector_state(role, vllm_config, config)
        self._setup_metrics()

    def bind(self, step: LMCacheConnectorMetadata) -> None:
        """Begin a step: forget the layerwise loads of the last one."""
        self.step = step
        self.current_layer = 0
        self.layerwise_retrievers = []

    def clear(self) -> None:
        """End a step."""
        self.step = None

    def _get_connector_metadata(self) -> LMCacheConnectorMetadata:
        return self.step

    @property
    def _connector_metadata(self) -> LMCacheConnectorMetadata | None:
        return self.step

    def end_loads(self) -> None:
        """Bring layerwise loads to their ends, behind a drafter's layers: LMCache frees memory."""
        loads, self.layerwise_retrievers = self.layerwise_retrievers, []
        for load in loads:
            deque(load, maxlen=0)

    def drop_store(self, request: Any) -> None:
        """Store nothing of a request in this step; what a layerwise store published is removed.

        Args:
            request: LMCache's description, which is changed.
        """
        request.save_spec.can_save = False
        if (store := self._layerwise_save_storers.pop(request.req_id, None)) is not None:
            store.close()
            self.lmcache_engine.take_back(request.token_ids)


class ServiceFactory(VllmServiceFactory):  # type: ignore[misc]  # untyped base
    """Makes LMCache's parts of one scheduler or worker.

    Args:
        config: LMCache's configuration.
        vllm_config: of the engine.
        role: `scheduler` or `worker`.
        facts: of the engine's KV cache.
        unfilled: the worker's record of failed loads; None in the scheduler.
    """

    role: str
    metadata: LMCacheMetadata

    def __init__(
        self,
        config: LMCacheEngineConfig,
        vllm_config: VllmConfig,
        role: str,
        facts: EngineFacts,
        unfilled: UnfilledBlocks | None,
    ) -> None:
        super().__init__(config, vllm_config, role)
        self._facts = facts
        self._unfilled = unfilled

    def get_or_create_metadata(self) -> LMCacheMetadata:
        """Return LMCache's description of the engine.

        On CPU vLLM gives each engine of data parallelism a list of devices of its own, in which
        LMCache looks for a number that is not there. It is for LMCache's GPU connectors; so a
        worker counts the devices as a scheduler does.
        """
        try:
            return super().get_or_create_metadata()
        except IndexError:
            role, self.role = self.role, "scheduler"
            try:
                metadata = super().get_or_create_metadata()
            finally:
                self.role = role
            metadata.role = role
            return metadata

    def get_or_create_lmcache_engine(self) -> CacheEngine | None:
        """Return the worker's engine, with a GPU connector of this package; a scheduler has none.

        Raises:
            ValueError: another engine of the process has LMCache.
        """
        if self.role == "scheduler":
            super().get_or_create_lmcache_engine()  # makes its metrics
            return None
        from vllm.distributed.parallel_state import get_tp_group

        facts, metadata = self._facts, self.get_or_create_metadata()
        shard = rank_shard(metadata.worker_id, metadata.world_size, facts, self.lmcache_config)
        if facts.shares_cpu_tier and not shard.stores:
            self.lmcache_config.max_local_cpu_size = BORROWER_GIB
        self.metadata = metadata = ShardedMetadata.of(metadata, shard)
        connector = gpu_connector(self.lmcache_config, metadata, facts)
        assert self._unfilled is not None
        connector.unfilled = self._unfilled
        group = get_tp_group()
        self.lmcache_engine = EngineBuilder.get_or_create(
            ENGINE_NAME,
            self.lmcache_config,
            metadata,
            connector,
            group.broadcast,
            group.broadcast_object,
        )
        return self.lmcache_engine

    def maybe_create_offload_server(self) -> OffloadServer | None:
        """Return the worker's offload server, which ends with the engine."""
        if self.role != "worker":
            return None
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        self._ensure_engine()
        return OffloadServer(self.lmcache_engine, get_tensor_model_parallel_rank())

    def maybe_create_lookup_client(self) -> LookupClient | None:
        """Return the scheduler's look-up client.

        LMCache has others, and wraps some: for options that are refused, see `options`.
        """
        if self.role != "scheduler":
            return None
        metadata = self.get_or_create_metadata()
        transport = LookupClientFactory._create_zmq_client_transport(self.lmcache_config, metadata)
        return LookupClient(self.lmcache_config, metadata, transport, self._facts.block_size)

    def maybe_create_lookup_server(self) -> LMCacheLookupServer | None:
        """Return the look-up server of a worker; all are asked, see `config`."""
        if self.role != "worker":
            return None
        self._ensure_engine()
        engine, metadata = self.lmcache_engine, self.get_or_create_metadata()
        transport = LookupClientFactory._create_zmq_server_transport(metadata)
        return LMCacheLookupServer(engine, metadata, AnsweringTransport(transport, engine))


class EngineBuilder(LMCacheEngineBuilder):  # type: ignore[misc]  # untyped base
    """LMCache's registry of the engines in a process, of which it makes one of this package."""

    @classmethod
    def get_or_create(
        cls,
        instance_id: str,
        config: LMCacheEngineConfig,
        metadata: LMCacheMetadata,
        connector: StandardConnector | LayerwiseConnector,
        broadcast: Callable[..., Any],
        broadcast_object: Callable[..., Any],
    ) -> CacheEngine:
        """Make the engine, as LMCache makes its own.

        Raises:
            ValueError: there is one of this name already.
        """
        if instance_id in cls._instances:
            raise ValueError(f"LMCache has an engine {instance_id!r} in this process already")
        database = TokenDatabase(config, metadata)
        cls._stat_loggers[instance_id] = LMCacheStatsLogger(
            metadata, log_interval=10, config=config
        )
        engine = CacheEngine(config, metadata, database, connector, broadcast, broadcast_object)
        cls._instances[instance_id] = engine
        cls._cfgs[instance_id], cls._metadatas[instance_id] = config, metadata
        return engine


def gpu_connector(
    config: LMCacheEngineConfig, metadata: LMCacheMetadata, facts: EngineFacts
) -> StandardConnector | LayerwiseConnector:
    """Make the connector of an engine.

    Args:
        config: LMCache's configuration.
        metadata: LMCache's description of the engine. The shape of a chunk and the model's name
            become those of the engine's real content, which decide on keys.
        facts: of the engine's KV cache.
    """
    # With inline scales or unequal key and value sizes the engine's content is not what LMCache
    # derives from the model's heads.
    layers, planes, chunk_size, _, _ = metadata.kv_shape
    metadata.kv_shape = (layers, planes, chunk_size, facts.heads, facts.head_size)
    metadata.model_name += facts.namespace  # the part of every key that we may extend
    options = ConnectorOptions.from_lmcache(
        config,
        metadata,
        device=facts.device_type,
        layout_hints=None if facts.kv_layout is None else {"kv_layout": facts.kv_layout},
        opaque_blocks=facts.opaque_blocks,
    )
    kind = LayerwiseConnector if config.use_layerwise else StandardConnector
    connector: StandardConnector | LayerwiseConnector = kind(
        facts.heads * facts.head_size, layers, options=options
    )
    if not config.use_layerwise and planes > 1 and not facts.opaque_blocks:
        metadata.model_name += ".layers"  # bytes in another order than LMCache's format says
    if config.use_layerwise and (size := connector.groups[0][1]) > 1:
        # To LMCache a group of layers is a layer with as many times the heads.
        count, heads = len(connector.groups), facts.heads * size
        metadata.kv_shape = (count, planes, chunk_size, heads, facts.head_size)
        metadata.model_name += f".{size}layers"
    return connector
