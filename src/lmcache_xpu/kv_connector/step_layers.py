"""The layers to which vLLM comes in a step, each of which waits for its loads and is stored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmcache_xpu.cache_engine.factory import Adapter
    from lmcache_xpu.gpu_connector.in_flight import InFlight

__all__ = ["StepLayers"]


class StepLayers:
    """Of one worker. Called on the engine's thread.

    A drafter comes to its layers once for each token that it proposes, and its first time covers
    all. LMCache counts calls.

    Args:
        adapter: LMCache's connector.

    Attributes:
        numbers: of the layers, by the names that vLLM has for them.
        quiet: nothing is to be done at this step's layers.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.numbers: dict[str, int] = {}
        self._adapter = adapter
        self.quiet = False
        self._loaded: set[str] = set()  # that the engine came to in this step
        self._stored: set[str] = set()  # that it is done with

    def register(self, names: Iterable[str]) -> None:
        """Take the layers' names, in the order in which vLLM computes them."""
        self.numbers = {name: number for number, name in enumerate(names)}

    def begin_step(self) -> None:
        """Begin a step, in which vLLM has come to no layer yet."""
        self.quiet = False
        self._loaded.clear()
        self._stored.clear()

    def pass_over(self) -> None:
        """Do nothing at the layers of this step: nothing is loaded, and no layer stored."""
        self.quiet = True

    def wait(self, name: str, in_flight: InFlight | None) -> None:
        """Let the engine's stream wait for a layer of what this step loads."""
        if self.quiet or name in self._loaded:
            return
        self._loaded.add(name)
        self._adapter.wait_for_layer_load(name)  # of layerwise loads
        if in_flight is not None:
            in_flight.before_layer(self.numbers[name])

    def save(
        self, name: str, kv_layer: Any, attn_metadata: Any, in_flight: InFlight | None
    ) -> None:
        """Store a layer whose attention is enqueued, and enqueue more of this step's loads."""
        if self.quiet or name in self._stored:
            return
        self._stored.add(name)
        self._adapter.save_kv_layer(name, kv_layer, attn_metadata)
        if in_flight is not None:
            in_flight.after_layer(self.numbers[name])

    def save_left_out(self) -> None:
        """Store layers that vLLM left out of a step in which it came to some.

        It leaves its drafter out near the longest sequence. Without its layers a chunk would never
        be complete; what they hold decides no token.
        """
        if self._stored:
            for name in self.numbers.keys() - self._stored:
                self._adapter.save_kv_layer(name, None, None)
