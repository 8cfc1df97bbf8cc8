"""What each workload asks, and when."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from loadtests.options import Options, stage_users
from loadtests.workloads import WORKLOADS, Plan


def sessions(workload, count, *, users=3, salt="s1", **options):
    small = {"shared_system_prompt": 4, "user_history_prompt": 6, "num_rounds": 3, "answer_len": 2}
    plan = Plan(options=Options(**{"qps": 2.0} | small | options), users=users, salt=salt)
    return list(islice(WORKLOADS[workload](plan), count))


def prompts(workload, count, **options):
    return [[turn.prompt for turn in s.turns()] for s in sessions(workload, count, **options)]


def test_without_reuse_no_two_prompts_begin_alike():
    asked = prompts("no-reuse", 50)
    assert all(len(turns) == 1 and len(turns[0].split()) == 10 for turns in asked)
    assert len({turns[0][:10] for turns in asked}) > 45  # the salt, then letters


def test_documents_are_asked_in_the_order_that_an_lru_cache_likes_least():
    held = sessions("long-documents", 99, documents=4)
    assert [s.user_id for s in held] == [1, 2, 3, 4] * 3
    turns = [next(iter(s.turns())) for s in held]
    assert [turn.round for turn in turns] == [1] * 4 + [2] * 4 + [3] * 4
    assert all(turn.fresh for turn in turns)
    texts = [turn.prompt.split(" Question")[0] for turn in turns]
    assert texts[:4] == texts[4:8] == texts[8:]
    assert len(set(texts)) == 4
    assert [s.first_send_s for s in held] == [i / 2 for i in range(12)]


def test_agents_share_a_beginning_and_nothing_else():
    first, second = prompts("agents", 2)
    shared = first[0].partition(" Task ")[0]
    assert len(shared.split()) == 4
    assert second[0].startswith(shared + " Task 2: ")
    assert not set(first[1:]) & set(second[1:])
    assert [s.first_send_s for s in sessions("agents", 3)] == [0, 1.5, 3]  # 3 requests, 2 per s
    assert all(s.gap_s is None for s in sessions("agents", 3))


@pytest.mark.parametrize("workload", ["multi-round", "no-reuse", "long-documents", "agents"])
def test_texts_follow_from_seed_and_salt(workload):
    assert prompts(workload, 5) == prompts(workload, 5)
    again = prompts(workload, 5, salt="s2")
    assert all(a[0] != b[0] for a, b in zip(prompts(workload, 5), again, strict=True))
    if workload != "multi-round":  # has nothing that is drawn
        assert prompts(workload, 5, seed=1) != prompts(workload, 5)


def test_without_a_rate_everybody_goes_on_at_once():
    for workload in ("no-reuse", "long-documents", "agents"):
        assert all(s.first_send_s is s.gap_s is None for s in sessions(workload, 5, qps=0))


def test_a_file_of_conversations(tmp_path):
    def said(who, value, **more):
        return {"from": who, "value": value, **more}

    talks = [
        [said("system", "be nice"), said("human", "a"), said("gpt", "b c d e", num_tokens=9)],
        [
            said("gpt", "hello"),
            said("human", "x"),
            said("gpt", "y z w"),
            said("human", "no answer"),
        ],
        [],
    ]
    file = tmp_path / "talks.json"
    file.write_text(json.dumps([{"conversations": talk} for talk in talks]))
    held = sessions("conversations", 9, conversations=file, answer_len=4, salt="")
    asked = [[(t.prompt, t.answer, t.answer_tokens) for t in s.turns()] for s in held]
    assert asked == [[("a", "b c d e", 4)], [("x", "y z w", 4)]]
    assert [(s.first_send_s, s.gap_s) for s in held] == [(0, 1.5), (0.5, 1.5)]
    assert prompts("conversations", 1, conversations=file) == [["s1 a"]]


def test_a_file_without_conversations_is_refused(tmp_path):
    file = tmp_path / "talks.json"
    file.write_text("[]")
    with pytest.raises(ValueError, match="no conversation; expected"):
        sessions("conversations", 1, conversations=file)


def test_stages_are_users_over_time():
    at = {0: 10, 59: 10, 60: 20, 89: 20, 90: 5, 1000: 5}
    assert {s: stage_users("60:10,30:20,10:5", s) for s in at} == at
    with pytest.raises(ValueError, match="could not convert"):
        stage_users("soon:10", 0)
