"""Streams and events of an imitated device: they run nothing, but note what they order."""

from __future__ import annotations

import threading

from support.races import Actor


class Order:
    """What orders a device's streams and the host's threads; there is one at a time.

    Args:
        streams: are imitated; else they are the real ones.
    """

    here: Order | None = None

    def __init__(self, *, streams: bool) -> None:
        self.actors: list[Actor] = []
        self._engine_thread = threading.get_ident()
        self._hosts = self.actor("the host"), self.actor("another thread of the host")
        Order.here = self
        self.streams = [Stream()] if streams else []  # the current one last; the engine's first

    def actor(self, name: str) -> Actor:
        number = len(self.actors)
        self.actors.append(Actor(f"{name} ({number})", number))
        return self.actors[-1]

    @property
    def host(self) -> Actor:
        """This thread."""
        return self._hosts[not self.on_engine_thread]

    @property
    def on_engine_thread(self) -> bool:
        return threading.get_ident() == self._engine_thread

    def join(self) -> None:
        """Order this thread behind the others."""
        for host in self._hosts:
            self.host.after(host.clock)

    def synchronize(self, device: object = None) -> None:
        for actor in self.actors:
            self.host.after(actor.clock)

    def launch(self) -> Actor:
        """The current stream, for what is enqueued now."""
        actor = self.streams[-1].actor
        actor.after(self.host.clock)
        return actor


class Stream:
    """As `torch.Stream`."""

    def __init__(self, device: object = None, *, priority: int = 0) -> None:
        self.actor = Order.here.actor("a stream")

    def __enter__(self) -> Stream:
        Order.here.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        Order.here.streams.pop()

    def wait_stream(self, other: Stream) -> None:
        self.actor.after(other.actor.clock)


class Event:
    """As `torch.Event`. To the engine's thread the device is never ahead of what it waited for."""

    def __init__(self, device: object = None) -> None:
        self._clock: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        actor = (stream or Order.here.streams[-1]).actor
        actor.after(Order.here.host.clock)
        actor.step()
        self._clock = dict(actor.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Order.here.streams[-1]).actor.after(self._clock)

    def synchronize(self) -> None:
        Order.here.host.after(self._clock)

    def query(self) -> bool:
        if not Order.here.on_engine_thread:
            self.synchronize()
        clock = Order.here.host.clock
        return all(clock.get(number, 0) >= time for number, time in self._clock.items())
