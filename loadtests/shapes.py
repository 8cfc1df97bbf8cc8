"""How many Locust users there are: enough to hold the sessions, until the run is over."""

from __future__ import annotations

from typing import ClassVar

from locust import LoadTestShape

from loadtests.options import parsed, stage_users
from loadtests.run import current
from loadtests.traces.sessions import trace_users

__all__ = ["SessionShape"]

SPAWN_PER_S = 100.0  # all at once: when a session begins is the workload's to say
# Without strict concurrency sessions join on time even when those before are slow. Each needs a
# user; more than this many times the nominal number have to wait, and are counted as late.
USERS_PER_SESSION = 4


class SessionShape(LoadTestShape):
    """Users for the run's sessions; ends the run when its time, or its sessions, are over."""

    use_common_options: ClassVar[bool] = True  # -u is the workload's number of users

    def tick(self) -> tuple[int, float] | None:
        """Users and spawn rate now; None ends the run."""
        assert self.runner is not None
        run = current()
        if run is not None and run.active:
            if run.over(users=self.get_current_user_count()):
                return None
            at_s = run.clock.now()
        else:
            at_s = 0.0  # this tick starts the run
        # As they were given: the run's start, which this tick may be, says what is wrong with them.
        arguments = parsed(self.runner.environment)
        users = int(arguments.num_users or 1)
        if arguments.stages:
            return stage_users(arguments.stages, at_s), SPAWN_PER_S
        if arguments.tags == ["trace"]:
            return trace_users(arguments), SPAWN_PER_S
        if arguments.qps and not arguments.enforce_strict_concurrent_users:
            users *= USERS_PER_SESSION
        return users, SPAWN_PER_S
