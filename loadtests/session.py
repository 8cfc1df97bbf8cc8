"""What a user does: sessions of turns, and the pace at which they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Clock", "Sending", "Session", "Turn", "play"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question.

    Args:
        question: its number in the session, from 1.
        round: which request of its conversation it is; the first is sent without any history.
        prompt: the user message that is added to the conversation.
        answer: what the conversation goes on with when answers are canned.
        answer_tokens: length of the answer to ask for.
        fresh: it starts a conversation of its own, whatever its round.
        tokens: ids of the whole prompt, which is then sent as it is, without a conversation.
        gap_s: from the send before to this one, instead of the session's.
    """

    question: int
    round: int
    prompt: str
    answer: str
    answer_tokens: int
    fresh: bool = False
    tokens: Sequence[int] = ()
    gap_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One user's visit.

    Args:
        user_id: sent as a header, for routers that keep a user on one engine.
        first_send_s: when its first question is due, seconds after the run's start; None: as soon
            as somebody is free to ask it.
        gap_s: from one send to the next one; None: as soon as the answer is there.
        turns: its questions; made when they are needed.
    """

    user_id: int
    first_send_s: float | None
    gap_s: float | None
    turns: Callable[[], Iterable[Turn]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """When a turn is sent, in seconds after the run's start.

    Args:
        intended_s: by the plan, had nothing ever been late.
        due_s: by the rule: `gap_s` after the send before.
        late: it could not be sent when due, since an answer had not ended (or, for a session's
            first question, since all users were busy).
    """

    intended_s: float
    due_s: float
    late: bool


class Clock(Protocol):
    """Time since the run's start."""

    def now(self) -> float:
        """Seconds since the run's start."""

    def sleep_until(self, moment_s: float) -> None:
        """Return at that moment; at once when it is over."""


def play(session: Session, clock: Clock, ask: Callable[[Turn, Sending], None]) -> None:
    """Hold one session. `ask` sends a question and returns when its answer has ended.

    A question is due `gap_s` after the send before. When the answer hasn't ended by then, the
    question is sent on its end, and the next one is due `gap_s` after that: no catching up.
    """
    due_s = planned_s = session.first_send_s
    sent_s = None
    for turn in session.turns():
        if sent_s is not None:
            gap_s = session.gap_s if turn.gap_s is None else turn.gap_s
            planned_s = _after(gap_s, sent_s if planned_s is None else planned_s)
            due_s = _after(gap_s, sent_s)
        late = due_s is not None and clock.now() > due_s
        if due_s is not None:
            clock.sleep_until(due_s)
        sent_s = clock.now()
        ask(
            turn,
            Sending(
                intended_s=sent_s if planned_s is None else planned_s,
                due_s=sent_s if due_s is None else due_s,
                late=late,
            ),
        )


def _after(gap_s: float | None, moment_s: float) -> float | None:
    return None if gap_s is None else moment_s + gap_s
