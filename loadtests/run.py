"""One run in one process: its sessions, its clock and what it leaves behind."""

from __future__ import annotations

import datetime
import gc
import logging
import platform
import secrets
from collections.abc import Iterator
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import orjson
from gevent.pool import Pool
from locust.env import Environment
from locust.runners import WorkerRunner

from loadtests.client import OK, StreamingClient
from loadtests.options import Options, parsed
from loadtests.preflight import served_models, workload_of
from loadtests.recorder import ENDS, META, Recorder, RunClock
from loadtests.scrape import Scraper
from loadtests.session import Session
from loadtests.traces.sessions import offered_qps, planned
from loadtests.workloads import WORKLOADS, Plan

__all__ = ["Run", "current", "start"]

SETTLE_S = 1.0  # users are made meanwhile
LOG = logging.getLogger("loadtests")

_current: Run | None = None


def current() -> Run | None:
    """This process's run; None before the first one."""
    return _current


def start(environment: Environment) -> Run:
    """Begin a run: warm the server up, then start the clock.

    Raises:
        ValueError: options that don't fit each other.
        RuntimeError: the server doesn't answer.
    """
    global _current
    _current = Run(environment)
    return _current


class Run:
    """What the users, the shape and the event hooks of this process share.

    The process that isn't a worker decides what has to be the same everywhere (salt, model,
    number of workers) and sends it along with Locust's options.
    """

    def __init__(self, environment: Environment) -> None:
        arguments, runner = parsed(environment), environment.runner
        self.options = Options.of(environment)
        self.users = int(arguments.num_users or 1)
        self.host = str(environment.host)
        self.workload = workload_of(environment)
        # A trace ends with its last request.
        self.limit_s = inf if self.workload == "trace" else self.options.duration_s
        self.ended_by = ""
        self.active = False
        self.is_worker = isinstance(environment.runner, WorkerRunner)
        if not self.is_worker:
            arguments.shared = self._decide(getattr(runner, "worker_count", 1))
        self.shared: dict[str, Any] = arguments.shared
        plan = Plan(options=self.options, users=self.users, salt=self.shared["salt"])
        self.plan = plan
        index = getattr(runner, "worker_index", 0)  # a master has none, and holds no sessions
        self._sessions: Iterator[Session] = islice(
            WORKLOADS[self.workload](plan), index, None, self.shared["workers"]
        )
        self.directory = self.options.report_dir or Path("reports", _stamp())
        if (self.directory / META).exists():  # of another run, e.g. the web page's last one
            self.directory /= _stamp()
        self.scraper: Scraper | None = None
        if not self.is_worker:
            self._warm_up()
        # What is there by now stays; to search it for garbage makes a pause of tens of ms.
        gc.collect()
        gc.freeze()
        self.clock = RunClock(delay_s=SETTLE_S)
        self.recorder = Recorder(
            self.clock, worker=index, directory=None if self.is_worker else self.directory
        )
        if not self.is_worker:
            pages = [url for url in self.options.metrics_url.split(",") if url]
            self.scraper = Scraper(self.host, pages, clock=self.clock, directory=self.directory)
            self.write_meta()
        self.active = True

    def next_session(self) -> Session | None:
        """The next one to be held in this process; None when there are no more."""
        return next(self._sessions, None)

    def client(self) -> StreamingClient:
        """A user's connection."""
        options = self.options
        return StreamingClient(
            self.host,
            model=self.shared["model"],
            api_key=options.api_key,
            connect_s=options.connect_s,
            silence_s=options.silence_s,
            request_s=options.request_s,
        )

    def over(self, *, users: int) -> bool:
        """Whether the run is to end, with so many users still there."""
        if self.clock.now() >= self.limit_s:
            self.ended_by = self.ended_by or ENDS[0]
        elif self.scraper is not None and self.scraper.away_s() > self.options.gone_s:
            self.ended_by = self.ended_by or "server gone"
        elif users == 0 and self.clock.now() > SETTLE_S:
            self.ended_by = self.ended_by or ENDS[1]
        return bool(self.ended_by)

    @property
    def complete(self) -> bool:
        """Whether it went on to its planned end."""
        return self.ended_by in ENDS

    def close(self) -> None:
        """Stop measuring; the files are whole after this."""
        self.active = False
        self.ended_by = self.ended_by or "interrupted"
        if self.scraper is not None:
            self.scraper.close()
            self.write_meta()
        self.recorder.close()

    def write_meta(self) -> None:
        """Write what the rows are to be read with."""
        options = self.options.model_dump(mode="json", exclude={"api_key"})
        meta: dict[str, Any] = {
            "workload": self.workload,
            "host": self.host,
            "users": self.users,
            **self.shared,
            "options": options,
            "lasted_s": min(self.clock.now(), self.limit_s),
            "ended_by": self.ended_by,
            "offered_qps": self.options.qps or None,
            "steady_from_s": 0.0,
            "client": {"python": platform.python_version(), "machine": platform.machine()},
        }
        if self.workload == "multi-round":
            rounds = self.plan.multi_round()
            meta |= {"offered_qps": rounds.offered_qps, "steady_from_s": rounds.gap_s}
        if self.workload == "trace":
            meta |= {"offered_qps": offered_qps(planned(self.options))}
        path = self.directory / META
        path.write_bytes(orjson.dumps(meta, option=orjson.OPT_INDENT_2) + b"\n")

    def _decide(self, workers: int) -> dict[str, Any]:
        salt = {"auto": "s" + secrets.token_hex(4), "none": ""}.get(
            self.options.salt, self.options.salt
        )
        return {
            "salt": salt,
            "model": self.options.model or served_models(self.host, self.options)[0],
            "workers": max(1, workers),
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def _warm_up(self) -> None:
        """What the original sends before it measures, and once a prompt as long as the load's.

        Kernels that are made for a length are made then; a server that fails is not measured.
        """
        options = self.options
        if not options.warm_up:
            return
        long = options.shared_system_prompt + options.user_history_prompt
        words = [*[100] * options.warm_up, long]

        def ask(i: int) -> str:
            text = f"WARMUP: Hi, I'm user {i}. Here are some text: {' '.join(['hi'] * words[i])}."
            with self.client() as client:
                reply = client.chat(
                    [{"role": "user", "content": text}],
                    max_tokens=options.answer_len,
                    ignore_eos=False,
                    headers={},
                )
            return "" if reply.outcome == OK else f"{reply.outcome} {reply.detail}"

        outcomes = [*Pool(64).imap(ask, range(options.warm_up)), ask(options.warm_up)]
        if failures := [failure for failure in outcomes if failure]:
            raise RuntimeError(
                f"found {len(failures)} of {len(words)} warm-up requests failed (first: "
                f"{failures[0]}); expected a server at {self.host} that answers."
            )


def _stamp() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H-%M-%S")
