"""Transfer handles: the events at which a store or a load begins, and is done."""

from __future__ import annotations

from typing import NamedTuple

from lmcache_xpu.transfer.devices import Event


class TransferHandle(NamedTuple):
    """Points in time of a store or a load."""

    begun: Event
    done: Event  # the target is complete; the source may be reused

    def seconds(self) -> float:
        """Return how long it took, once it is done."""
        return self.begun.seconds_until(self.done)


class StoreHandle(NamedTuple):
    """A store, and when the engine's blocks had been read."""

    transfer: TransferHandle
    gathered: Event
