"""The workloads by name, each of them a stream of sessions."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

from loadtests.multi_round import MultiRound
from loadtests.options import Options
from loadtests.session import Session, Turn
from loadtests.share_gpt import Talk, read_share_gpt
from loadtests.traces.sessions import planned, trace_sessions

__all__ = ["WORKLOADS", "Plan"]

LETTERS = string.ascii_lowercase  # as words: hardly a tokenizer makes more than one token of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a workload's sessions follow from.

    Args:
        options: of the run.
        users: at a time.
        salt: a word that begins texts, or nothing.
    """

    options: Options
    users: int
    salt: str

    def multi_round(self) -> MultiRound:
        """The parameters of multi-round QA."""
        options = self.options
        return MultiRound(
            users=self.users,
            rounds=options.num_rounds,
            qps=options.qps,
            shared_words=options.shared_system_prompt,
            history_words=options.user_history_prompt,
            answer_tokens=options.answer_len,
            init_user_id=options.init_user_id,
            salt=self.salt,
        )

    def text(self, *key: object, words: int) -> str:
        """Words that are always the same for a seed, a salt and a key; the salt comes first."""
        drawn = random.Random(f"{self.options.seed} {self.salt} {key}")
        text = drawn.choices(LETTERS, k=words)
        text[:1] = [f"{self.salt}{text[0]}"] if words else []
        return " ".join(text)

    def first_send_s(self, number: int, *, requests: float = 1) -> float | None:
        """When session `number` of so many requests each begins, at `qps` requests per second."""
        return number * requests / self.options.qps if self.options.qps else None


def multi_round(plan: Plan) -> Iterator[Session]:
    """LMCache's multi-round QA; see multi_round.py."""
    return plan.multi_round().sessions()


def no_reuse(plan: Plan) -> Iterator[Session]:
    """One question with a text that nobody else has: the control, in which no cache can help."""
    options = plan.options
    words = options.shared_system_prompt + options.user_history_prompt
    for number in count():
        user_id = options.init_user_id + 1 + number

        def prompt(_: int, user_id: int = user_id) -> str:
            return plan.text("alone", user_id, words=words)

        yield Session(
            user_id=user_id,
            first_send_s=plan.first_send_s(number),
            gap_s=None,
            turns=partial(_turns, plan, user_id, prompt, 1),
        )


def long_documents(plan: Plan) -> Iterator[Session]:
    """Each document is asked `num_rounds` times, and between that all the others are.

    A cache that drops what was used longest ago, and is a little too small for all documents,
    never has the one that is asked for.
    """
    options, number = plan.options, count()
    for question in range(1, options.num_rounds + 1):
        for document in range(options.documents):
            yield Session(
                user_id=options.init_user_id + 1 + document,
                first_send_s=plan.first_send_s(next(number)),
                gap_s=None,
                turns=partial(_document_turn, plan, document, question),
            )


def _document_turn(plan: Plan, document: int, question: int) -> Iterator[Turn]:
    text = plan.text("document", document, words=plan.options.user_history_prompt)
    yield Turn(
        question=question,
        round=question,
        fresh=True,
        prompt=f"{text} Question {question}: what does this text say about {question}?",
        answer="",
        answer_tokens=plan.options.answer_len,
    )


def agents(plan: Plan) -> Iterator[Session]:
    """Agents that share a long system prompt and go on at once, with a tool's result each time."""
    options = plan.options
    shared = plan.text("tools", words=options.shared_system_prompt)
    for number in count():
        agent = options.init_user_id + 1 + number

        def prompt(step: int, agent: int = agent) -> str:
            result = plan.text("result", agent, step, words=options.user_history_prompt)
            return f"{shared} Task {agent}: {result}" if step == 1 else f"Tool result: {result}"

        yield Session(
            user_id=agent,
            first_send_s=plan.first_send_s(number, requests=options.num_rounds),
            gap_s=None,
            turns=partial(_turns, plan, agent, prompt, options.num_rounds),
        )


def conversations(plan: Plan) -> Iterator[Session]:
    """The conversations of a file in ShareGPT's format, up to `num_rounds` questions of each.

    Raises:
        ValueError: no file, or it has no conversation.
    """
    options = plan.options
    if options.conversations is None:
        raise ValueError("found no conversations; expected --conversations FILE in ShareGPT format")
    return _talks(plan, read_share_gpt(options.conversations, options.num_rounds))


def _talks(plan: Plan, talks: list[Talk]) -> Iterator[Session]:
    options, requests = plan.options, sum(map(len, talks)) / len(talks)
    for number, talk in enumerate(talks):
        user_id = options.init_user_id + 1 + number
        yield Session(
            user_id=user_id,
            first_send_s=plan.first_send_s(number, requests=requests),
            gap_s=plan.users / options.qps if options.qps else None,
            turns=partial(_talk_turns, plan, talk),
        )


def _talk_turns(plan: Plan, talk: Talk) -> Iterator[Turn]:
    for k, (question, answer, tokens) in enumerate(talk, 1):
        yield Turn(
            question=k,
            round=k,
            prompt=f"{plan.salt} {question}" if k == 1 and plan.salt else question,
            answer=answer,
            answer_tokens=min(tokens, plan.options.answer_len),
        )


def trace(plan: Plan) -> Iterator[Session]:
    """The requests of a file; see traces/sessions.py.

    Raises:
        ValueError: no file, or it can't be read.
    """
    options = plan.options
    return trace_sessions(planned(options), options, key=f"{options.seed} {plan.salt}")


WORKLOADS: dict[str, Callable[[Plan], Iterator[Session]]] = {
    "multi-round": multi_round,
    "conversations": conversations,
    "long-documents": long_documents,
    "agents": agents,
    "no-reuse": no_reuse,
    "trace": trace,
}


def _turns(plan: Plan, user_id: int, prompt: Callable[[int], str], rounds: int) -> Iterator[Turn]:
    tokens = plan.options.answer_len
    for k in range(1, rounds + 1):
        yield Turn(
            question=k,
            round=k,
            prompt=prompt(k),
            answer=plan.text("answer", user_id, k, words=tokens),
            answer_tokens=tokens,
        )
