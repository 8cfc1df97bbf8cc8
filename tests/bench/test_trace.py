"""`bench trace`: what its replay says is what the tier's code does, and lies below the optimum."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import combinations, takewhile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.agent_sessions import write
from typer.testing import CliRunner

from lmcache_xpu.bench.trace import Request, hit_tokens, optimum, plain_lru, read, tiers
from lmcache_xpu.cli import app
from lmcache_xpu.errors import SettingsError
from loadtests.traces.formats import read_trace
from loadtests.traces.reuse import best_reuse

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "lmcache")
]
ROOT = Path(__file__).parents[2]
CHUNK = 256
EXAMPLES = ROOT / "loadtests/traces"


@pytest.fixture(scope="module")
def agents(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("agents"))


@pytest.fixture(scope="module")
def requests(agents) -> list[Request]:
    return read(agents, chunk_tokens=CHUNK, users=12)


def tier(requests: list[Request], room: int) -> Iterator[int]:
    """The chunks that memory alone hits with each request."""
    return (hit for hit, _ in tiers(requests, room))


def chunks_of(requests: list[Request]) -> int:
    return len({chunk for request in requests for chunk in request.chunks})


def prefix(request: Request, kept: object) -> int:
    return len(list(takewhile(lambda chunk: chunk in kept, request.chunks)))


def tail_first(requests: list[Request], room: int) -> Iterator[int]:
    """A cache that evicts the end of the prompt that was asked for longest ago, in plain words."""
    used: dict[int, tuple[int, int]] = {}  # by chunk: its last request, and minus its place there
    for number, request in enumerate(requests):
        yield prefix(request, used)
        used |= {chunk: (number, -place) for place, chunk in enumerate(request.chunks)}
        used = dict(sorted(used.items(), key=lambda item: item[1])[-room:])


def best_of_all(requests: list[Request], room: int) -> int:
    """The most chunks that are hit, over all that can be kept behind each request."""

    @cache
    def best(number: int, kept: frozenset[int]) -> int:
        if number == len(requests):
            return 0
        there = kept | set(requests[number].chunks)
        sets = combinations(sorted(there), min(room, len(there)))
        most = max(best(number + 1, frozenset(each)) for each in sets)
        return most + prefix(requests[number], kept)

    return best(0, frozenset())


@pytest.mark.parametrize("share", [64, 8, 3, 2, 1])
def test_the_replay_is_tail_first_lru_chunk_for_chunk(requests, share):
    """From a room that is smaller than a prompt to one that is never full."""
    room = chunks_of(requests) // share
    assert list(tier(requests, room)) == list(tail_first(requests, room))


def test_what_memory_lost_comes_from_the_disk_tier_tail_first_over_both(requests, tmp_path):
    """The disk's code is slow beside memory's: a part of the trace."""
    some = requests[:120]
    room = chunks_of(some) // 12
    alone = list(tier(some, room))
    for times in (2, 20):
        rows = list(tiers(some, room, times * room, tmp_path / str(times)))
        hits = [hit for hit, _ in rows]
        assert all(a <= hit for a, hit in zip(alone, hits, strict=True))
        assert all(read <= hit for hit, read in rows)
        assert sum(read for _, read in rows) >= sum(hits) - sum(alone) > 0
    # With a disk that holds all. What it reads goes to memory, which bounds a hit.
    assert hits == [min(hit, room) for hit in plain_lru(some, chunks_of(some))]


@pytest.mark.parametrize("share", [32, 12, 6, 4])
def test_the_tier_hits_more_than_plain_lru_and_less_than_the_optimum(requests, share):
    room = chunks_of(requests) // share
    policies = plain_lru, tier, optimum
    plain, ours, best = (hit_tokens(requests, each(requests, room), CHUNK) for each in policies)
    assert 0 < plain < ours < best


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=2, max_size=6)


@settings(max_examples=150, deadline=None)
@given(prompts=PROMPTS, room=st.integers(1, 4))
def test_nothing_beats_the_optimum_which_can_be_had(prompts, room):
    names: dict[tuple[int, ...], int] = {}
    requests = [
        Request(
            len(prompt) + 1,
            [names.setdefault(tuple(prompt[: n + 1]), len(names)) for n in range(len(prompt))],
        )
        for prompt in prompts
    ]
    assert sum(optimum(requests, room)) == best_of_all(requests, room)


@st.composite
def lines(draw) -> str:
    """Lines of Mooncake's or of vLLM's, whose last blocks may be short or missing."""
    size = draw(st.sampled_from([512, 16]))
    written = []
    for at in range(draw(st.integers(1, 8))):
        blocks = draw(st.lists(st.integers(0, 2), min_size=2, max_size=6))
        least = (len(blocks) - 1) * size + 1
        tokens = draw(st.integers(least, len(blocks) * size + (size == 512) * 700))
        fields = {"timestamp": at, "input_length": tokens, "output_length": 1, "hash_ids": blocks}
        written.append(json.dumps(fields))
    return "\n".join(written)


@settings(max_examples=80, deadline=None)
@given(text=lines(), chunk=st.sampled_from([20, 64, 256]))
def test_an_endless_cache_hits_what_the_load_test_says_can_be_reused(text, chunk, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "trace.jsonl"
    path.write_text(text)
    trace = read_trace(path, "auto")
    best = best_reuse(trace.requests, block_tokens=trace.block_tokens, chunk_tokens=chunk)
    if not best["distinct_tokens"]:
        with pytest.raises(SettingsError, match="no prompt of"):
            read(path, chunk_tokens=chunk, users=1)
        return
    requests = read(path, chunk_tokens=chunk, users=1)
    room = chunks_of(requests)
    assert room * chunk == best["distinct_tokens"]
    hits = plain_lru(requests, room)
    assert hit_tokens(requests, hits, chunk) == best["reusable_tokens"]


@pytest.mark.parametrize("name", ["example.jsonl", "example-agent.json"])
def test_the_examples_of_the_load_test_are_read_alike(name):
    trace = read_trace(EXAMPLES / name, "auto")
    best = best_reuse(trace.requests, block_tokens=trace.block_tokens, chunk_tokens=CHUNK)
    requests = read(EXAMPLES / name, chunk_tokens=CHUNK, users=1)
    assert [request.tokens for request in requests] == [r.input_tokens for r in trace.requests]
    hits = plain_lru(requests, chunks_of(requests))
    assert hit_tokens(requests, hits, CHUNK) == best["reusable_tokens"]


@pytest.mark.parametrize(
    ("users", "order"), [(1, [1, 2, 3, 4, 5, 6]), (2, [1, 3, 4, 5, 2, 6]), (3, [1, 3, 5, 4, 6, 2])]
)
def test_a_user_begins_a_session_when_the_last_is_over_and_pauses_for_an_hour_at_most(
    tmp_path, users, order
):
    """Sessions of two prompts each, whose lengths tell them apart."""
    for number, end_s in enumerate([7200, 1, 3590]):
        times = ((0.0, 2 * number + 1), (end_s, 2 * number + 2))
        steps = [{"t": at, "in": CHUNK * k, "hash_ids": []} for at, k in times]
        (tmp_path / f"{number}.json").write_text(json.dumps({"requests": steps}))
    requests = read(tmp_path, chunk_tokens=CHUNK, users=users)
    assert [request.tokens // CHUNK for request in requests] == order


def said(who: str, words: int, **fields: int) -> dict[str, object]:
    return {"from": who, "value": "word " * words, **fields}


def test_a_conversation_of_share_gpt_hits_all_that_was_said_before(tmp_path):
    """Words count one and a half tokens, where the file does not count them."""
    first = [said("human", 200), said("gpt", 1, num_tokens=300), said("human", 100), said("gpt", 9)]
    talks = [{"conversations": first}, {"conversations": [said("user", 400), said("gpt", 1)]}]
    path = tmp_path / "talks.json"
    path.write_text(json.dumps(talks))
    requests = read(path, chunk_tokens=CHUNK, users=2)
    assert [request.tokens for request in requests] == [300, 600, 750]  # in turn
    assert list(tier(requests, 10)) == [0, 0, 1]
    assert hit_tokens(requests, tier(requests, 10), CHUNK) == CHUNK


GOOD = '{"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}\n'


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", GOOD + '{"prompt": "Hi"}', "line 2 of .*KeyError: 'input_length'"),
        ("t.jsonl", GOOD + "timestamp,input", "line 2 of .*JSONDecodeError"),
        ("t.jsonl", GOOD + "[1]", "line 2 of .*TypeError"),
        ("t.jsonl", GOOD.replace("600", '"600"'), "line 1 of .*TypeError"),
        ("t.jsonl", GOOD.replace("600", "6"), "2 hash_ids of 16 tokens for 6 tokens"),
        ("t.jsonl", GOOD.replace("600", "60"), "2 hash_ids of 512 tokens for 60 tokens"),
        ("t.jsonl", GOOD.replace("600", "600.5"), "TypeError"),
        ("t.jsonl", GOOD.replace("[1, 2]", "[[1], 2]"), "TypeError"),
        ("t.jsonl", "", "no prompt of 256 tokens"),
        ("t.json", '[{"conversations": []}]', "no prompt of 256 tokens"),
        ("t.json", '[{"text": "Hi"}]', "t.json, which is no trace .*KeyError: 'conversations'"),
        ("t.json", '{"requests": [{"t": 0}]}', "KeyError: 'in'"),
        ("t.json", '{"requests": [], "block_size": 0}', "no prompt of 256 tokens"),
        ("t.json", '{"requests": [{"t": 0, "in": 1, "hash_ids": []}], "block_size": 0}', "Zero"),
        ("t.json", "", "JSONDecodeError"),
        ("t.json", None, "FileNotFoundError"),
    ],
)
def test_another_format_is_refused_with_the_place(tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SettingsError, match=rf"(?s){words}.*; expected .*Mooncake"):
        read(tmp_path / name, chunk_tokens=CHUNK, users=1)


def test_the_command_prints_a_row_for_each_size_and_writes_the_same(agents, tmp_path):
    words = ["bench", "trace", "--users", "12", "--tokens", "60000", "--tokens", "130001", "--json"]
    file = tmp_path / "figures.json"
    done = CliRunner().invoke(app, [*words, str(file), str(agents)], catch_exceptions=False)
    assert done.exit_code == 0
    page = json.loads(file.read_text())
    assert page["prompts"] == len(read(agents, chunk_tokens=CHUNK, users=12))
    assert [tier["tokens"] for tier in page["tiers"]] == [60160, 130048]  # whole chunks
    for row in page["tiers"]:
        computed, hit = row["computed"], row["hit"]
        assert 1 <= computed["optimum"] < computed["tier"] < computed["plain LRU"]
        tier_computes = page["tokens"] - hit["tier"]
        assert computed["tier"] == pytest.approx(tier_computes / page["endless_computes"])
        cells = f"{row['tokens']:,}", f"{hit['tier']:,}", f"{computed['tier']:.2f}"
        assert any(all(cell in line for cell in cells) for line in done.stdout.splitlines())


def test_the_command_draws_a_line_for_each_policy_and_counts_what_the_disk_read(agents, tmp_path):
    plot, file = tmp_path / "plot.svg", tmp_path / "figures.json"
    few = tmp_path / "few"
    few.mkdir()
    for each in sorted(agents.glob("*.json"))[:2]:
        (few / each.name).write_text(each.read_text())
    words = ["bench", "trace", "--tokens", "4096", "--tokens", "8192", "--disk-tokens", "65536"]
    more = ["--plot", str(plot), "--json", str(file), "--token-bytes", "1048576", str(few)]
    done = CliRunner().invoke(app, [*words, *more], catch_exceptions=False)
    assert done.exit_code == 0
    page = json.loads(file.read_text())
    small, large = page["tiers"]
    assert page["disk_tokens"] == 65536
    assert 0 < small["from_disk"] < small["hit"]["tier"] < large["hit"]["tier"]
    assert small["requests_per_s"] > 0
    assert any("4,096" in line and " 4 " in line for line in done.stdout.splitlines())  # GiB
    assert "replayed a second" in done.stdout
    drawn = ElementTree.fromstring(plot.read_text())
    lines = [each for each in drawn.iter() if each.tag.endswith("polyline")]
    assert [len(each.get("points", "").split()) for each in lines] == [2, 2, 2]
    texts = {each.text for each in drawn.iter() if each.tag.endswith("text")}
    assert {"tier", "plain LRU", "optimum", "4,096", "8,192", "1"} <= texts


def test_without_sizes_the_last_tier_holds_all_and_each_a_half_of_the_next(tmp_path):
    file = tmp_path / "figures.json"
    words = ["bench", "trace", str(EXAMPLES / "example.jsonl"), "--json", str(file)]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    tiers = json.loads(file.read_text())["tiers"]
    assert [tier["tokens"] // CHUNK for tier in tiers] == [2, 3, 5, 10, 20, 39, 78]
    assert set(tiers[-1]["computed"].values()) == {1.0}
