"""Multi-round QA, as LMCache's own benchmark of that name defines it.

With U users, R rounds and Q queries per second, a user's sends are U/Q seconds apart, and a new
user joins every (R-1)/Q seconds. So U users are there at a time, and the rate of sends is not Q but
Q * R / (R-1): a user asks R questions in the time of R-1 gaps.

At the start there are U users of staggered age: user i has asked as many questions as fit into
(R-1) * (U-i) / Q seconds, plus one. What they asked is not sent; their first real question comes
with an empty history, hence with shared prompt and context. The first of them has asked
everything and is gone at once; a new one joins at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import count

from loadtests.session import Session, Turn

__all__ = ["MultiRound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiRound:
    """The parameters, and the sessions that follow from them.

    Args:
        users: U, at a time.
        rounds: R, questions per user; at least 2.
        qps: Q, which the rate of sends comes close to for large R.
        shared_words: S, length of the system prompt that all users share.
        history_words: H, length of the context that each user starts with.
        answer_tokens: A, length of an answer.
        init_user_id: the first user's number is one more.
        salt: replaces the first word of the shared prompt (or context), so that another run's
            cache is not hit; empty leaves the texts exactly as the original's.
    """

    users: int
    rounds: int
    qps: float
    shared_words: int
    history_words: int
    answer_tokens: int
    init_user_id: int = 0
    salt: str = ""

    def __post_init__(self) -> None:
        if self.rounds < 2 or self.users < 1 or self.qps <= 0:
            raise ValueError(
                f"found users={self.users}, num_rounds={self.rounds}, qps={self.qps:g}; expected "
                "at least 1 user, at least 2 rounds (users join (R-1)/Q seconds apart) and a rate "
                "above 0."
            )

    @property
    def gap_s(self) -> float:
        """Between one user's sends."""
        return self.users / self.qps

    @property
    def join_gap_s(self) -> float:
        """Between users' arrivals."""
        return (self.rounds - 1) / self.qps

    @property
    def offered_qps(self) -> float:
        """Sends per second once the first gap is over."""
        return self.qps * self.rounds / (self.rounds - 1)

    def sessions(self) -> Iterator[Session]:
        """All sessions, without an end, in the order of their first sends."""
        joining = ((i * self.join_gap_s, self._joining(i)) for i in count())
        staggered = sorted(
            (self._staggered(i) for i in range(1, self.users)), key=lambda pair: pair[0]
        )
        return (session for _, session in merge(joining, staggered, key=lambda pair: pair[0]))

    def _staggered(self, i: int) -> tuple[float, Session]:
        """User i of those that are there at the start; 0 has asked everything already."""
        # age / gap = (R-1) * (U-i) / U, in whole numbers: floats may fall short of a whole one.
        gaps, rest = divmod((self.rounds - 1) * (self.users - i), self.users)
        first_send_s = self.gap_s * (1 - rest / self.users)
        user_id = self.init_user_id + 1 + i
        return first_send_s, Session(
            user_id=user_id,
            first_send_s=first_send_s,
            gap_s=self.gap_s,
            turns=self._turns(user_id, skipped=gaps + 1),
        )

    def _joining(self, i: int) -> Session:
        user_id = self.init_user_id + 1 + self.users + i
        return Session(
            user_id=user_id,
            first_send_s=i * self.join_gap_s,
            gap_s=self.gap_s,
            turns=self._turns(user_id, skipped=0),
        )

    def _turns(self, user_id: int, *, skipped: int) -> Callable[[], Iterator[Turn]]:
        def turns() -> Iterator[Turn]:
            for question in range(skipped + 1, self.rounds + 1):
                prompt = (
                    f"Here's question #{question}: can you tell me a new long story with a happy "
                    "ending?"
                )
                if question == skipped + 1:
                    prompt = self._opening(user_id) + prompt
                yield Turn(
                    question=question,
                    round=question - skipped,
                    prompt=prompt,
                    answer=" ".join([f"{user_id}.{question}", *["a"] * (self.answer_tokens - 1)]),
                    answer_tokens=self.answer_tokens,
                )

        return turns

    def _opening(self, user_id: int) -> str:
        shared, history = ["hi"] * self.shared_words, ["hi"] * self.history_words
        if self.salt and (first := shared or history):
            first[0] = self.salt
        return (
            f"Hi, here's some system prompt: {' '.join(shared)}.For user {user_id}, here are some "
            f"other context: {' '.join(history)}."
        )
