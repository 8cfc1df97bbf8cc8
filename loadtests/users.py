"""The Locust user: holds one session after the other and tells Locust and the recorder."""

from __future__ import annotations

from locust import User, tag, task
from locust.exception import StopUser

from loadtests.client import OK, Reply
from loadtests.run import Run, current
from loadtests.session import Sending, Session, Turn, play

__all__ = ["SessionUser", "TaggedUser"]

FAILED_PAUSE_S = 1.0  # or a server that refuses would be asked thousands of times per second


class RequestError(Exception):
    """How a failure shows in Locust's statistics."""


class SessionUser(User):
    """Takes the run's next session, holds it, and so on until there are none left.

    Locust's statistics get four kinds of entries: `chat` is the whole request, `TTFT`, `gap` and
    `TPOT` are times within it. Percentiles in Locust's tables are rounded; the rows are exact.
    """

    abstract = True

    def on_start(self) -> None:
        """Connect to the run; Locust calls this in each new user's own greenlet."""
        run = current()
        assert run is not None, "Locust starts users after test_start"
        self.run_: Run = run
        self.streaming = run.client()

    def on_stop(self) -> None:
        """Close the connection."""
        self.streaming.close()

    def hold(self) -> None:
        """Hold one session."""
        session = self.run_.next_session()
        if session is None:
            raise StopUser
        messages: list[dict[str, str]] = []
        play(
            session,
            self.run_.clock,
            lambda turn, sending: self._ask(messages, session, turn, sending),
        )

    def _ask(
        self, messages: list[dict[str, str]], session: Session, turn: Turn, sending: Sending
    ) -> None:
        run = self.run_
        if turn.round == 1 or turn.fresh:
            messages.clear()
        question = {"role": "user", "content": turn.prompt}
        reply = self.streaming.begin()
        try:
            self.streaming.finish(
                reply,
                [*messages, question],
                max_tokens=turn.answer_tokens,
                ignore_eos=run.options.ignore_eos,
                tokens=turn.tokens,
                headers={
                    # The names that routers keep a user on one engine by.
                    "x-user-id": str(session.user_id),
                    "x-session-id": f"{run.shared['salt']}-{session.user_id}",
                    "x-request-id": f"{run.shared['salt']}-{session.user_id}-{turn.question}",
                },
            )
        finally:  # also when the run ends and this greenlet with it
            run.recorder.request(session, turn, sending, reply)
        self._tell_locust(turn, reply)
        answer = turn.answer if run.options.canned else reply.text
        if reply.outcome == OK or run.options.canned:
            messages += [question, {"role": "assistant", "content": answer}]
        if reply.outcome != OK:
            run.clock.sleep_until(run.clock.now() + FAILED_PAUSE_S)

    def _tell_locust(self, turn: Turn, reply: Reply) -> None:
        failed = reply.outcome != OK
        times = {"chat": reply.e2e_s}
        if not failed and reply.ttft_s is not None:
            times["TTFT"] = reply.ttft_s
        if not failed and reply.tpot_s is not None:
            times["TPOT"] = reply.tpot_s
        for kind, seconds in times.items():
            self.environment.events.request.fire(
                request_type=kind,
                name=f"round {turn.round}",
                response_time=seconds * 1e3,
                response_length=len(reply.text),
                exception=RequestError(reply.outcome) if failed else None,
                context={},
            )
        if (gaps_s := reply.gaps_s) and not failed:
            self.environment.events.request.fire(
                request_type="gap",
                name="longest between chunks",
                response_time=max(gaps_s) * 1e3,
                response_length=0,
                exception=None,
                context={},
            )


class TaggedUser(SessionUser):
    """One task per workload; `--tags` chooses which one the users have."""

    abstract = True

    @tag("multi-round")
    @task
    def multi_round(self) -> None:
        """LMCache's multi-round QA."""
        self.hold()

    @tag("conversations")
    @task
    def conversations(self) -> None:
        """The conversations of a file."""
        self.hold()

    @tag("long-documents")
    @task
    def long_documents(self) -> None:
        """Each document repeatedly, in the worst order."""
        self.hold()

    @tag("agents")
    @task
    def agents(self) -> None:
        """Agents with a shared prompt."""
        self.hold()

    @tag("trace")
    @task
    def trace(self) -> None:
        """Recorded traffic."""
        self.hold()

    @tag("no-reuse")
    @task
    def no_reuse(self) -> None:
        """The control."""
        self.hold()
