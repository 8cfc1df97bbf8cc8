"""What a run leaves behind: a row per request, and how late the client itself was.

Every process of a run has a `Recorder`. That of the only process, or of Locust's master, writes
files; a worker's hands its rows to the master with Locust's regular reports, so that rows reach
the files from other machines, too.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import IO, Any

import gevent
import orjson
import psutil

from loadtests.client import Reply
from loadtests.session import Sending, Session, Turn

__all__ = ["CLIENT", "ENDS", "META", "REQUESTS", "Recorder", "RunClock"]

META, REQUESTS, CLIENT = "meta.json", "rows.jsonl", "client.jsonl"
ENDS = ("time", "all sessions held")  # how a run ends that was not cut short
LAG_STEP_S = 0.01
LAG_WINDOW_S = 1.0

Row = dict[str, Any]


class RunClock:
    """Seconds since the run's start, which is when this is made; a `session.Clock`."""

    def __init__(self, *, delay_s: float = 0.0) -> None:
        self.origin_s = time.perf_counter() + delay_s

    def now(self) -> float:
        """Seconds since the run's start."""
        return time.perf_counter() - self.origin_s

    def sleep_until(self, moment_s: float) -> None:
        """Return at that moment; at once when it is over."""
        while (wait_s := moment_s - self.now()) > 0:
            gevent.sleep(wait_s)


class Recorder:
    """The rows of one process.

    Args:
        clock: of the run.
        worker: this process's number.
        directory: where to write; None keeps the rows for `take`.
    """

    def __init__(self, clock: RunClock, *, worker: int, directory: Path | None) -> None:
        self._clock, self._worker = clock, worker
        self._unsent: list[tuple[str, Row]] = []
        self._files: dict[str, IO[bytes]] = {}
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._files = {name: (directory / name).open("ab") for name in (REQUESTS, CLIENT)}
        self._lag = gevent.spawn(self._measure_lag)

    def request(self, session: Session, turn: Turn, sending: Sending, reply: Reply) -> None:
        """Keep what a request was and what became of it."""
        origin_s = self._clock.origin_s
        self._write(
            REQUESTS,
            {
                "worker": self._worker,
                "user_id": session.user_id,
                "question": turn.question,
                "round": turn.round,
                "intended_s": sending.intended_s,
                "due_s": sending.due_s,
                "late": sending.late,
                "started_s": reply.started_s - origin_s,
                "ended_s": reply.ended_s - origin_s,
                "outcome": reply.outcome,
                "detail": reply.detail,
                "ttft_s": reply.ttft_s,
                "tpot_s": reply.tpot_s,
                "e2e_s": reply.e2e_s,
                "gaps_s": [round(gap, 6) for gap in reply.gaps_s],
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": reply.completion_tokens,
                "cached_tokens": reply.cached_tokens,
            },
        )

    def take(self) -> list[tuple[str, Row]]:
        """Return a worker's rows since the last call."""
        rows, self._unsent = self._unsent, []
        return rows

    def put(self, rows: list[tuple[str, Row]]) -> None:
        """Write what a worker took."""
        for name, row in rows:
            self._write(name, row)

    def close(self) -> None:
        """Stop measuring and close the files."""
        self._lag.kill()
        for file in self._files.values():
            file.close()
        self._files = {}

    def _write(self, name: str, row: Row) -> None:
        if self._files:
            self._files[name].write(orjson.dumps(row) + b"\n")
            self._files[name].flush()
        else:
            self._unsent.append((name, row))

    def _measure_lag(self) -> None:
        """Once per window: the longest time by which this process came late to its own timer."""
        process = psutil.Process()
        process.cpu_percent()
        while True:
            worst_s, begin = 0.0, time.perf_counter()
            while (now := time.perf_counter()) - begin < LAG_WINDOW_S:
                gevent.sleep(LAG_STEP_S)
                worst_s = max(worst_s, time.perf_counter() - now - LAG_STEP_S)
            memory_mib = process.memory_info().rss / 2**20
            self._write(
                CLIENT,
                {
                    "worker": self._worker,
                    "at_s": self._clock.now(),
                    "lag_s": worst_s,
                    "cpu_percent": process.cpu_percent(),
                    "memory_mib": memory_mib,
                },
            )
