"""LMCache's connector to its server, with the parts of this package.

It is LMCache's own by subclass. Requests are looked up, kept and ended by LMCache's code. What is
different:

    transfers   this package's, in threads beside the engine (`transfer_context`)
    keys        name the weights, adapters, embeddings and epochs too (`keys`)
    loads       inside the step of their request, where that pays and vLLM's scheduler is ours
    failures    of a load: its request is computed, and stores nothing that came of it
    blocks      are freed when their request ends; a step that writes some waits for their stores

vLLM makes one in its scheduler and one in each worker; each has its half of the work.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from lmcache_xpu import versions
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.kv_connector.orphans import end_with_parent
from lmcache_xpu.mp_connector.adapters import SERVER_URLS
from lmcache_xpu.mp_connector.kv_cache_groups import cache_groups
from lmcache_xpu.mp_connector.scheduler_half import SchedulerHalf
from lmcache_xpu.mp_connector.server_socket import SCHEME, await_server, check_socket
from lmcache_xpu.mp_connector.worker_half import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["ServerConnector"]

logger = logging.getLogger("vllm.lmcache_xpu")  # vLLM prints its own loggers only

PREFIX = "lmcache.mp."  # of LMCache's options in vLLM's extra configuration
CONNECT_S = 60.0  # that a server has to listen
REFUSED = ("lazy_offload", "eager_prefetch", "transfer_intermediate_tensors")


class ServerConnector(SchedulerHalf, WorkerHalf):
    """LMCache's connector to its server, with this package's transfers and keys.

    Raises:
        VersionError: LMCache or vLLM is outside the tested versions, or can't serve this model.
        SettingsError: options of LMCache that this connector does not serve, or no server answers.
        LayoutError: a KV cache that can't be served.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        end_with_parent()
        versions.check(versions.installed())
        options = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
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
        groups = cache_groups(kv_cache_config)
        if len(groups) > 1:
            versions.check_groups(versions.installed())
        await_server(url, CONNECT_S)
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        except ConnectionError as error:
            raise SettingsError(
                f"a server at {url} that is none of LMCache's, or hangs ({error})",
                "one that answers",
                "Start it anew, or leave server_url unset and `lmcache-xpu serve` does.",
            ) from error
        # Newer vLLM hears of requests, each as a whole: of a part LMCache would count tokens twice.
        self._report_request_errors = hasattr(KVConnectorBase_V1, "get_transfer_results")
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler_adapter = self.own_scheduler_adapter(self.scheduler_adapter, options)
            self.start_scheduler(vllm_config, kv_cache_config, options, groups)
        else:
            self.start_worker(vllm_config, kv_cache_config, options, groups)

    def shutdown(self) -> None:
        """End what this connector has started."""
        self.collection.allow()
        super().shutdown()
