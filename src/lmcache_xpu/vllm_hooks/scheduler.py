"""vLLM's scheduler, in which a request whose load failed begins anew: vLLM's own by subclass.

Reached as `--scheduler-cls`, which vLLM has for schedulers of others. So nothing of vLLM is
replaced, as `vllm_hooks.failed_loads` is in an engine without a server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache_xpu.versions import vllm
from lmcache_xpu.vllm_hooks.failed_loads import beginning_anew, connectors_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["LMCacheXPUScheduler"]


class LMCacheXPUScheduler:
    """Makes a subclass of the scheduler that vLLM would choose, with or without running ahead.

    It tells connectors to LMCache's server that their loads may be inside steps.
    """

    def __new__(cls, *, vllm_config: VllmConfig, **options: Any) -> Any:
        """Make it; `options` are vLLM's."""
        return _beginning_anew_in(vllm.scheduler_class(vllm_config))(
            vllm_config=vllm_config, **options
        )


def _beginning_anew_in(base: type[Any]) -> type[Any]:
    class Scheduler(base):  # type: ignore[misc]  # which one is known at run time
        _handle_invalid_blocks = beginning_anew(base._handle_invalid_blocks)

        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            if self.recompute_kv_load_failures:
                for connector in connectors_of(self.connector):
                    if hasattr(connector, "load_in_steps"):
                        connector.load_in_steps()

    return Scheduler
