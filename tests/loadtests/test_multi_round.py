"""The arithmetic of multi-round QA, on a clock that is only counted."""

from __future__ import annotations

from itertools import islice

import pytest

from loadtests.multi_round import MultiRound
from loadtests.session import Session, Turn, play


class FakeClock:
    def __init__(self):
        self.now_s = 0.0

    def now(self):
        return self.now_s

    def sleep_until(self, moment_s):
        self.now_s = max(self.now_s, moment_s)


def parameters(**changed):
    usual = {"users": 10, "rounds": 5, "qps": 0.5, "shared_words": 3, "history_words": 2}
    return MultiRound(**{**usual, "answer_tokens": 4, **changed})


def hold(rounds, *, until_s, latency_s=0.0):
    """Every send of a run, with a user for each session: (session, turn, sending, sent, ended)."""
    sends = []
    for session in rounds.sessions():
        if session.first_send_s > until_s:
            break
        clock = FakeClock()

        def ask(turn, sending, session=session, clock=clock):
            sent_s = clock.now()
            clock.now_s += latency_s
            sends.append((session, turn, sending, sent_s, clock.now_s))

        play(session, clock, ask)
    return [send for send in sends if send[3] < until_s]


@pytest.mark.parametrize(
    ("users", "rounds", "qps", "offered"),
    [(10, 5, 0.5, 0.625), (10, 10, 0.5, 0.5556), (10, 2, 0.5, 1.0), (320, 10, 2.1, 2.3333),
     (15, 20, 1, 1.0526), (7, 3, 0.3, 0.45)],
)  # fmt: skip
def test_the_steady_rate_is_q_r_over_r_minus_1(users, rounds, qps, offered):
    plan = parameters(users=users, rounds=rounds, qps=qps)
    assert plan.offered_qps == pytest.approx(offered, rel=1e-3)
    begin_s, length_s = plan.gap_s * 2, 40 * plan.gap_s
    sends = hold(plan, until_s=begin_s + length_s)
    sent = sum(begin_s <= sent_s for *_, sent_s, _ in sends)
    assert sent / length_s == pytest.approx(offered, rel=0.02)
    assert not any(sending.late for _, _, sending, *_ in sends)
    assert all(sending.intended_s == sending.due_s == sent_s for _, _, sending, sent_s, _ in sends)


def test_users_are_there_from_the_start_and_of_staggered_age():
    """Ages by hand: gap 20 s, joins each 8 s; user i is 80 - 8 i seconds old."""
    first = {s.user_id: s for s in islice(parameters().sessions(), 15) if s.user_id <= 10}
    assert 1 not in first  # has asked everything
    ages_s = {i + 1: 80 - 8 * i for i in range(1, 10)}
    for user, age_s in ages_s.items():
        asked = age_s // 20 + 1
        turns = list(first[user].turns())
        assert [t.question for t in turns] == list(range(asked + 1, 6))
        assert turns == [] or turns[0].round == 1
        assert first[user].first_send_s == pytest.approx(20 - age_s % 20)


def test_one_joins_at_once_and_then_one_per_gap():
    joins = [s.first_send_s for s in islice(parameters().sessions(), 40) if s.user_id > 10]
    assert joins == pytest.approx([8.0 * i for i in range(len(joins))])


def test_sessions_come_in_the_order_of_their_first_sends():
    sends = [s.first_send_s for s in islice(parameters(users=33, rounds=7).sessions(), 99)]
    assert sends == sorted(sends)


def test_texts_are_the_originals_without_a_salt():
    session = next(s for s in parameters().sessions() if s.user_id == 11)
    first, second, *_ = session.turns()
    assert first.prompt == (
        "Hi, here's some system prompt: hi hi hi.For user 11, here are some other context: hi hi."
        "Here's question #1: can you tell me a new long story with a happy ending?"
    )
    assert second.prompt == (
        "Here's question #2: can you tell me a new long story with a happy ending?"
    )


def test_a_salt_takes_the_place_of_a_word():
    plain, salted, bare = (
        next(iter(parameters(**o).sessions())).turns().__next__().prompt
        for o in ({}, {"salt": "xyz"}, {"salt": "xyz", "shared_words": 0})
    )
    assert salted == plain.replace("prompt: hi", "prompt: xyz")
    assert "context: xyz hi." in bare


def test_a_late_question_is_sent_on_the_answer_and_the_next_one_a_gap_later():
    turns = [Turn(question=k, round=k, prompt="", answer="", answer_tokens=1) for k in range(1, 5)]
    clock, seen = FakeClock(), []
    latencies_s = iter([13.0, 2.0, 10.0, 1.0])

    def ask(turn, sending):
        seen.append((clock.now(), sending.due_s, sending.intended_s, sending.late))
        clock.now_s += next(latencies_s)

    play(Session(user_id=1, first_send_s=5.0, gap_s=10.0, turns=lambda: turns), clock, ask)
    assert seen == [
        (5.0, 5.0, 5.0, False),
        (18.0, 15.0, 15.0, True),  # the answer ended at 18
        (28.0, 28.0, 25.0, False),  # a gap after the send, not after the plan
        (38.0, 38.0, 35.0, False),
    ]


def test_slow_answers_make_more_users_than_planned():
    """Latency 8 s with gaps of 5 s: twice the users, once the first ones are gone."""
    plan = parameters(users=10, rounds=5, qps=2.0)
    sends = hold(plan, until_s=400.0, latency_s=8.0)
    span = {}
    for session, _, _, sent_s, ended_s in sends:
        begin_s, _ = span.get(session.user_id, (sent_s, 0))
        span[session.user_id] = begin_s, ended_s
    for moment_s in range(200, 300, 7):
        active = sum(begin_s <= moment_s < ended_s for begin_s, ended_s in span.values())
        assert active == pytest.approx(20, abs=1)
    assert sum(sending.late for _, _, sending, *_ in sends) > len(sends) / 2


def test_sessions_without_a_plan_are_never_late():
    turns = [Turn(question=1, round=1, prompt="", answer="", answer_tokens=1)] * 2
    clock, seen = FakeClock(), []

    def ask(turn, sending):
        seen.append((sending.due_s, sending.intended_s, sending.late))
        clock.now_s += 3

    clock.now_s = 7.0
    play(Session(user_id=1, first_send_s=None, gap_s=None, turns=lambda: turns), clock, ask)
    assert seen == [(7.0, 7.0, False), (10.0, 10.0, False)]


@pytest.mark.parametrize("wrong", [{"rounds": 1}, {"qps": 0}, {"users": 0}])
def test_parameters_without_a_schedule_are_refused(wrong):
    with pytest.raises(ValueError, match="expected at least 1 user, at least 2 rounds"):
        parameters(**wrong)
