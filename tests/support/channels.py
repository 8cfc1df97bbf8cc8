"""Channels from the first rank to others, in one process."""

from __future__ import annotations

import queue

from lmcache_xpu.cache_engine.loans import ORDERS


class Channels:
    """To each of some borrowers, in this process."""

    def __init__(self, borrowers: int) -> None:
        self.queues = [[queue.Queue() for _ in range(borrowers)] for _ in range(ORDERS)]

    def of_lender(self):
        return [Sending(queues) for queues in self.queues]

    def of(self, borrower: int):
        return [Receiving(queues[borrower]) for queues in self.queues]


class Sending:
    def __init__(self, queues) -> None:
        self.queues = queues

    def send(self, message) -> None:
        for each in self.queues:
            each.put(message)


class Receiving:
    def __init__(self, messages) -> None:
        self.messages = messages

    def receive(self):
        return self.messages.get(timeout=5)
