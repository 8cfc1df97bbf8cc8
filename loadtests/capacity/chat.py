"""The load of a capacity sweep: people who chat, each at a pace of their own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import gcd
from typing import Any

from loadtests.variants import PROFILES

__all__ = ["ENGINES", "HERE", "SERVERS", "Chat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """One user's habits, which stay the same whatever the number of users.

    The load is multi-round QA (multi_round.py) with Q = U / gap_s, so each user that is added
    brings the same requests per second and the same context to keep.

    Args:
        gap_s: between one user's sends.
        rounds: questions per user, at least 2.
        shared_words: of the system prompt that all users share.
        history_words: of the context that each user starts with.
        answer_tokens: of an answer.
        requests: that a step measures, at the least.
        start: the number of users to begin with.
    """

    gap_s: float
    rounds: int
    shared_words: int
    history_words: int
    answer_tokens: int
    requests: int
    start: int

    def qps(self, users: int) -> float:
        """Q of multi-round QA."""
        return users / self.gap_s

    def offered_qps(self, users: int) -> float:
        """Sends per second: users who have asked everything are replaced at once."""
        return self.qps(users) * self.rounds / (self.rounds - 1)

    def duration_s(self, users: int) -> float:
        """Length of a step: one gap until every user is there, and at least two to measure."""
        return self.gap_s + max(2 * self.gap_s, self.requests / self.offered_qps(users))

    def spreads(self, users: int) -> bool:
        """Whether so many users' sends are evenly spread, instead of falling together."""
        return gcd(users, self.rounds - 1) == 1

    def options(self, users: int) -> dict[str, object]:
        """Return the options of the load test for a step."""
        return {
            "--tags": "multi-round",
            "--users": users,
            "--qps": self.qps(users),
            "--num-rounds": self.rounds,
            "--shared-system-prompt": self.shared_words,
            "--user-history-prompt": self.history_words,
            "--answer-len": self.answer_tokens,
            "--duration-s": round(self.duration_s(users), 3),
            "--warm-up": 3,
        }

    def facts(self) -> dict[str, Any]:
        """Return the habits as capacity.json has them."""
        return asdict(self)


# For engines that are started here, on CPU. Their KV cache holds less than three users' prompts,
# which grow to 1,000 tokens, so that the first step is beyond it already.
HERE = Chat(
    gap_s=10,
    rounds=8,
    shared_words=100,
    history_words=600,
    answer_tokens=8,
    requests=30,
    start=4,
)
ENGINES = replace(PROFILES["long"], engine_tokens=2560, max_model_len=1280)

# For servers of any size.
SERVERS = Chat(
    gap_s=20,
    rounds=8,
    shared_words=1000,
    history_words=8000,
    answer_tokens=100,
    requests=60,
    start=8,
)
