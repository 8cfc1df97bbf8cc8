"""vLLM's KV connector: each hook goes to the scheduler's half or to a worker's.

vLLM makes one in its scheduler and one in each worker. It takes the blocks of all KV cache groups,
so vLLM's hybrid manager stays on. LMCache is imported when a connector is made: vLLM imports this
file first, to ask the class questions, and its CPU worker then looks through every loaded module in
a way that fails on one which LMCache brings.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform

from lmcache_xpu import versions
from lmcache_xpu.connector.request_guard import guarded
from lmcache_xpu.connector.stats import StatsHooks
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.vllm_hooks.patches import SECOND_ENGINES, WORKER_HOOKS, install
from lmcache_xpu.vllm_hooks.process_end import end_with_parent

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from lmcache_xpu.cache.protocol import Cache
    from lmcache_xpu.connector.scheduler_half import SchedulerHalf
    from lmcache_xpu.connector.step import WorkerReport
    from lmcache_xpu.connector.worker_half import WorkerHalf

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

PREFIX = "lmcache.mp."  # of LMCache's options in vLLM's extra configuration
SERVER_URLS, TIMEOUT, HEARTBEAT = (
    PREFIX + name for name in ("server_urls", "mq_timeout", "heartbeat_interval")
)
CACHE = "xpu.cache"  # of a cache in the engine's process
CONNECT_S = 60.0  # that a server has to listen
TIMEOUT_S = HEARTBEAT_S = 10.0  # without settings
REFUSED = ("lazy_offload", "eager_prefetch", "transfer_intermediate_tensors")


class LMCacheXPUServerConnector(StatsHooks, KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """LMCache's storage manager in this process, or its server, as vLLM's KV connector.

    Raises:
        VersionError: LMCache or vLLM is outside the tested versions, or can't serve this model.
        SettingsError: options of LMCache that this connector does not serve, or no server answers.
        LayoutError: a KV cache that can't be served.
    """

    scheduler_half: SchedulerHalf  # one of the two, by the role
    worker_half: WorkerHalf

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        end_with_parent()
        versions.check(versions.installed())
        options = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        url = None if CACHE in options else _checked_url(options)
        from lmcache_xpu.connector.scheduler_half import SchedulerHalf
        from lmcache_xpu.connector.worker_half import WorkerHalf
        from lmcache_xpu.model.kv_cache_groups import block_tokens, cache_groups

        groups = cache_groups(kv_cache_config)
        alignment = math.lcm(*filter(None, block_tokens(kv_cache_config)))
        is_worker = role is KVConnectorRole.WORKER
        client = _client(vllm_config, options, url, alignment, is_worker=is_worker)
        super().__init__(vllm_config, role, kv_cache_config)
        self.engine_id = vllm_config.kv_transfer_config.engine_id
        beat_s = float(options.get(HEARTBEAT, HEARTBEAT_S))
        if is_worker:
            install((WORKER_HOOKS, SECOND_ENGINES))
            self.worker_half = WorkerHalf(
                vllm_config, kv_cache_config, options, client, groups, beat_s
            )
        else:
            self.scheduler_half = SchedulerHalf(
                vllm_config, kv_cache_config, options, client, groups
            )
            client.start_heartbeat(beat_s)

    def shutdown(self) -> None:
        """End what this connector has started."""
        is_worker = self.role is KVConnectorRole.WORKER
        (self.worker_half if is_worker else self.scheduler_half).shutdown()

    # Called by vLLM's model runner

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take over the engine's KV cache."""
        self.worker_half.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begin a step, before vLLM may write new blocks."""
        self.worker_half.begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin this step's loads, those inside it first."""
        self.worker_half.load(forward_context, kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Let the engine's stream wait for a layer of what this step loads."""
        self.worker_half.in_steps.before_layer(layer_name)

    def save_kv_layer(self, layer_name: str, *_: Any, **__: Any) -> None:
        """Enqueue more of what this step loads. Stores are behind the step."""
        self.worker_half.in_steps.after_layer(layer_name)

    def wait_for_save(self) -> None:
        """Store what this step computed, beside the engine."""
        self.worker_half.store()

    def get_block_ids_with_load_errors(self) -> Collection[int]:
        """Block IDs whose loads failed since the last call."""
        return self.worker_half.take_unfilled()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """Loads that have ended; vLLM before 0.30 calls it, newer asks for transfer results."""
        ended, _ = self.worker_half.take_ended()
        return None, ended or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that have ended since the last call, and which of them failed; no stores."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        ended, failed = self.worker_half.take_ended()
        return KVConnectorTransferResults(
            finished_sending=set(), finished_recving=ended, failed_recving=failed
        )

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """What became of loads since the last call, and which step has ended."""
        return self.worker_half.report()

    def clear_connector_metadata(self) -> None:
        """Forget a step that is enqueued; the engine's thread waits for the device next."""
        super().clear_connector_metadata()
        self.worker_half.end_step()

    def change_weights(self) -> None:
        """The weights are about to change; called by vLLM's worker, see `worker_hooks`."""
        self.worker_half.change_weights()

    # Called by vLLM's scheduler

    def load_in_steps(self) -> None:
        """Let loads be inside steps; called by `scheduler`, which begins failed ones anew."""
        self.scheduler_half.load_in_steps()

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's pool of blocks."""
        if self.role is KVConnectorRole.SCHEDULER:
            self.scheduler_half.bind(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """A request has arrived; its look-up begins."""
        with guarded("on_new_request"):
            self.scheduler_half.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those that the engine has, and whether in background."""
        for _ in range(2):  # the second time nothing is looked up
            with guarded("get_num_new_matched_tokens"):
                return self.scheduler_half.matched_tokens(request, num_computed_tokens)
            self.scheduler_half.give_up_hits(request.request_id)
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """A request has its blocks, and will be in the next step, or waits for its load."""
        with guarded("update_state_after_alloc"):
            return self.scheduler_half.allocated(request, blocks, num_external_tokens)
        return self.scheduler_half.promises.fail([request.request_id])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers must know of a step."""
        with guarded("build_connector_meta"):
            return self.scheduler_half.describe(scheduler_output)
        return self.scheduler_half.describe_failed(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take what the workers report after a step."""
        from lmcache_xpu.connector.step import WorkerReport

        report = connector_output.kv_connector_worker_meta or WorkerReport()
        self.scheduler_half.end_step(report, connector_output.finished_recving or ())

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV events of the tiers since the last call; see `kv_events`."""
        with guarded("take_events"):
            if (events := self.scheduler_half.events) is not None:
                return events.take()
        return ()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do as `request_finished_all_groups`; vLLM calls that one, as this takes all groups."""
        return self.request_finished_all_groups(request, ())

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks may be freed at once."""
        with guarded("request_finished"):
            self.scheduler_half.finished(request)
        return False, None

    def give_up_hits(self, request_id: str) -> None:
        """A load inside a step failed: from now on its request is computed; see `scheduler`."""
        self.scheduler_half.give_up_hits(request_id)

    def reset_cache(self) -> bool | None:
        """Let nothing be found any more that was stored; False if a server keeps its room."""
        return self.scheduler_half.reset() if self.role is KVConnectorRole.SCHEDULER else None


def _client(
    config: VllmConfig, options: dict[str, Any], url: str | None, alignment: int, *, is_worker: bool
) -> Cache:
    """Return a client of the server at a URL; without one, of a cache in this process."""
    from lmcache_xpu.cache.local_cache import LocalCache
    from lmcache_xpu.cache.local_client import LocalClient
    from lmcache_xpu.cache.local_options import LocalCacheOptions
    from lmcache_xpu.cache.protocol import KeyScope
    from lmcache_xpu.cache.server_client import ServerClient
    from lmcache_xpu.server.server_socket import await_server

    scope = KeyScope.of(config)
    if url is not None:
        await_server(url, CONNECT_S)
        timeout_s = float(options.get(TIMEOUT, TIMEOUT_S))
        # The server knows workers by numbers of 63 bits.
        number = uuid.uuid4().int >> 65 if is_worker else None
        return ServerClient(url, scope, timeout_s, alignment, number)
    checked = LocalCacheOptions.read(options[CACHE])
    if not is_worker:
        return LocalClient(LocalCache.of_worker(config), scope)
    device = torch.device(current_platform.device_type)
    return LocalClient(LocalCache.make(config, checked, device, alignment), scope)


def _checked_url(options: dict[str, Any]) -> str:
    from lmcache_xpu.server.server_socket import SCHEME, check_socket

    url = options.get(SERVER_URLS)
    if not isinstance(url, str) or "," in url:
        raise SettingsError(f"{SERVER_URLS}={url!r}", "one URL, ipc:///DIRECTORY/SOCKET")
    check_socket(url)
    if not url.startswith(SCHEME):
        logger.warning(
            "LMCache's server at %s: everybody who reaches that port can read and replace the "
            "KV cache of all prompts (docs: troubleshooting#server-by-tcp)",
            url,
        )
    for name in REFUSED:
        if options.get(PREFIX + name):
            raise SettingsError(f"{PREFIX}{name}", "it to be off", "Leave it unset.")
    return url
