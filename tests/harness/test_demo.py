"""The demo's flow and figures, with an engine that only counts."""

from __future__ import annotations

import io
import os
import re
import socket
from collections import OrderedDict
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lmcache_xpu.cli import app
from lmcache_xpu.errors import EngineError, SettingsError
from lmcache_xpu.harness import demo
from lmcache_xpu.harness.client import Answer, CacheCounts
from lmcache_xpu.harness.random_model import corpus
from lmcache_xpu.launch.preflight import check_file
from lmcache_xpu.tiers.disk.lock import DirectoryLock

CHUNK = 256


class FakeEngine:
    """Holds the two conversations used last; its tiers hold everything, the disk for good."""

    disk: set[tuple[str, int]]
    started: list
    running = 0
    wrong = lose = False

    def __init__(self, settings, log):
        self.settings, self.log, self.url = settings, log, "http://engine"
        self.own = OrderedDict()
        self.counts = dict.fromkeys(CacheCounts._fields, 0)
        self.requests = []

    def __enter__(self):
        type(self).running += 1
        self.started.append(self)
        return self

    def __exit__(self, *_):
        type(self).running -= 1

    def ask(self, messages):
        text = "\n".join(message["content"] for message in messages)
        who, length = text[:60], len(text) // 4
        self.requests.append(messages)
        own = min(self.own.get(who, 0), length)
        self.own[who] = length
        self.own.move_to_end(who)
        while len(self.own) > 2:
            self.own.popitem(last=False)
        hits = 0 if self.lose else max((n for w, n in self.disk if w == who), default=0)
        external = max(0, min(hits, length) // CHUNK * CHUNK - own)
        self.disk.add((who, length))
        for name, value in {
            "prompt": length,
            "prefix_hits": own,
            "external_hits": external,
        }.items():
            self.counts[name] += value
        computed = length - own - external
        tokens = (hash(text) + (self.wrong and external > 0),)
        return Answer(
            text=f"answer {len(messages)}",
            token_ids=tokens,
            ttft_s=0.01 + computed / 1000,
            prompt_tokens=length,
            completion_tokens=16,
        )


class FakeClient:
    def __init__(self, url, *, model):
        self.engine = FakeEngine.started[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def chat(self, messages, *, max_tokens):
        return self.engine.ask(messages)

    def complete(self, prompt, *, max_tokens):
        self.engine.ask([{"content": prompt}])

    def counts(self):
        return CacheCounts(**self.engine.counts)


@pytest.fixture
def engine(monkeypatch):
    class Engine(FakeEngine):
        disk, started, running = set(), [], 0

    monkeypatch.setattr(FakeEngine, "started", Engine.started, raising=False)
    monkeypatch.setattr(demo, "EngineProcess", Engine)
    monkeypatch.setattr(demo, "Client", FakeClient)
    monkeypatch.setattr(demo, "make_model", lambda spec, parent: parent / "model")
    return Engine


def test_every_row_has_the_source_it_names(engine, tmp_path, capsys):
    rows = demo.tell(work=tmp_path)
    assert [row.source for row in rows] == [
        "recomputed and stored",
        "engine's own cache",
        "CPU tier",
        "disk tier after a restart",
    ]
    recomputed, own, cpu, disk = rows
    assert recomputed.hit_tokens == 0
    for row in (own, cpu, disk):
        assert row.hit_rate > 0.9, row
        assert row.median_s < recomputed.median_s / 10, row
    # Both engines got the same third questions, and only the second one after a restart.
    first, second = engine.started
    assert engine.running == 0
    users = demo.USERS
    assert len(first.requests) == 1 + 2 * users + 2 * users
    assert len(second.requests) == 1 + 2 * users
    third = [messages for messages in first.requests[1:] if len(messages) == 6]
    assert third == second.requests[1 : 1 + users]
    assert len({messages[0]["content"] for messages in third}) == users
    shown = capsys.readouterr().out
    assert "10 of 10 answers" in shown
    assert "answer 2" not in shown  # random words, which look like a fault
    words = "".join(shown.split())  # a long path is cut into lines
    for step in ("a small Llama", "conversations, two questions each", "engine-2.log"):
        assert step.replace(" ", "") in words


def test_an_answer_that_differs_fails_the_demo_after_its_table(engine, tmp_path, capsys):
    engine.wrong = True
    with pytest.raises(EngineError, match="10 of 10 answers not from the tiers, or other tokens"):
        demo.tell(work=tmp_path)
    assert "CPU tier" in capsys.readouterr().out


def test_an_answer_that_was_recomputed_proves_nothing(engine, tmp_path):
    engine.lose = True
    with pytest.raises(EngineError, match="10 of 10 answers not from the tiers"):
        demo.tell(work=tmp_path)


def test_the_next_pages_exist():
    pages = re.findall(r"docs/\S+\.md", demo.NEXT)
    assert len(pages) == 2
    assert all((Path(__file__).parents[2] / page).exists() for page in pages)


def test_the_disk_tier_stays_and_the_next_demo_empties_it(engine, tmp_path):
    demo.tell(work=tmp_path)
    disk = engine.started[-1].settings.disk_path
    disk.mkdir()
    (disk / "chunk").touch()
    engine.disk.clear()
    assert demo.tell(work=tmp_path)[0].hit_tokens == 0
    assert not disk.exists()  # this engine writes nothing


def test_a_disk_tier_in_use_is_left_alone(engine, tmp_path):
    (tmp_path / "disk/rank").mkdir(parents=True)
    lock = DirectoryLock(tmp_path / "disk/rank", 0)
    with pytest.raises(SettingsError, match=f"disk/rank in use by process {os.getpid()}"):
        demo.tell(work=tmp_path)
    lock.release()
    assert (tmp_path / "disk/rank/lock").exists()
    assert engine.started == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--work", "/proc/x"), "--work /proc/x, which can't be written"),
        (("--port", "99999"), "port=99999"),
        (("--port", "0"), "port=0"),
    ],
)
def test_what_would_fail_later_is_refused_in_a_line(engine, tmp_path, monkeypatch, options, said):
    """Before anything is made: neither a model nor an engine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process keeps its own
    monkeypatch.setattr(demo, "make_model", None)
    done = CliRunner().invoke(app, ["demo", *options])
    assert done.exit_code == 2
    assert done.stderr.startswith("lmcache-xpu: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert engine.started == []


def test_a_port_that_is_taken_is_refused_before_the_model_is_made(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "make_model", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SettingsError, match="not available"):
            demo.tell(work=tmp_path, port=taken.getsockname()[1])


def test_trying_a_file_leaves_it_as_it_is(tmp_path):
    check_file(tmp_path / "new", "--json")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").write_text("figures")
    check_file(tmp_path / "old", "--json")
    assert (tmp_path / "old").read_text() == "figures"


def test_the_engines_own_cache_is_smaller_than_what_the_users_say(engine, tmp_path):
    """Otherwise it would never ask LMCache, and the table would measure nothing."""
    demo.tell(work=tmp_path)
    settings = engine.started[0].settings
    tokens = settings.kv_cache_gib * 2**30 / demo.DEMO.kv_bytes_per_token
    conversation = demo.TEXT_CHARACTERS / 4.2
    assert settings.max_model_len <= tokens < 3 * conversation < demo.USERS * conversation
    assert settings.cpu_gib * 2**30 > 2 * demo.USERS * conversation * (demo.DEMO.kv_bytes_per_token)
    assert settings.host == "127.0.0.1"
    assert len(corpus()) > (demo.USERS + 1) * demo.TEXT_CHARACTERS


def test_too_little_space_is_told_at_once(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "FREE_GIB", 1e9)
    with pytest.raises(SettingsError, match=r"GiB free in .*; expected 1e\+09 GiB"):
        demo.tell(work=tmp_path)
    assert engine.started == []


def test_a_given_port_is_used(engine, tmp_path):
    demo.tell(work=tmp_path, port=12345)
    assert {e.settings.port for e in engine.started} == {12345}
    assert all(isinstance(e.log, Path) for e in engine.started)


def test_a_step_is_named_and_timed_where_the_output_is_no_terminal():
    lines = io.StringIO()
    with demo.doing(Console(file=lines), "waiting"):
        pass
    assert lines.getvalue().startswith("waiting ...\n")
    assert lines.getvalue().endswith("s  waiting: done\n")


def test_a_step_that_fails_is_not_done():
    lines = io.StringIO()
    with pytest.raises(KeyError), demo.doing(Console(file=lines), "waiting"):
        raise KeyError
    assert lines.getvalue() == "waiting ...\n"
