"""`lmcache-xpu bench load`: its loads, its figures, and the whole of it with a small engine."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lmcache_xpu.bench import jobs
from lmcache_xpu.bench.jobs import (
    Conversations,
    Decoding,
    Prompts,
    Request,
    drive,
    spread,
)
from lmcache_xpu.bench.report import Report
from lmcache_xpu.bench.runner import Result
from lmcache_xpu.bench.shapes import SHAPES, shape_named
from lmcache_xpu.bench.variants import variants_named
from lmcache_xpu.cli import app
from lmcache_xpu.launch.settings import Settings

STEP_S, LOAD_S = 0.01, 0.1  # of a step, and what a prompt adds to the step that it begins in


class ImitatedEngine:
    """Gives each request a token a step; a step in which prompts begin takes longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hits = "tier"
        self.now = 0.0
        self.running: dict[str, int] = {}
        self.began: list[tuple[float, list[int]]] = []
        self.forgotten = 0
        self.most = 0
        self._begin = 0
        self._next = 0
        monkeypatch.setattr(jobs.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(jobs.time, "sleep", self._sleep)

    def prompt(self, length: int) -> list[int]:
        self._next += 1
        return [self._next] * length

    def seconds(self, *prompts: list[int]) -> float:
        return 0.0

    def forget(self) -> None:
        assert not self.running
        self.forgotten += 1

    def add(self, prompt: list[int], tokens: int) -> str:
        self.began.append((self.now, prompt))
        self.running[str(len(self.began))] = tokens
        self._begin += 1
        return str(len(self.began))

    def step(self) -> list[SimpleNamespace]:
        self.now += STEP_S + LOAD_S * bool(self._begin)
        self._begin = 0
        self.most = max(self.most, len(self.running))
        self.running = {name: left - 1 for name, left in self.running.items()}
        token = [SimpleNamespace(token_ids=[7])]
        outputs = [
            SimpleNamespace(request_id=name, outputs=token, finished=not left)
            for name, left in self.running.items()
        ]
        self.running = {name: left for name, left in self.running.items() if left}
        return outputs

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def engine(monkeypatch):
    return ImitatedEngine(monkeypatch)


DECODING = Decoding(
    requests=3, prompt=4, tokens=300, hits=2, hit=Prompts(8, 2), answer=2, every_s=1.0
)
TALK = Conversations(users=3, rounds=3, history=10, new=2, answer=4, apart_s=0.05, pause_s=0.25)


def test_requests_are_asked_when_they_are_due(engine):
    requests = [Request([1], 2, at_s=0.5), Request([2], 2), Request([3], 1, at_s=0.5)]
    drive(engine, requests)
    assert engine.began == [(0, [2]), (0.5, [1]), (0.5, [3])]
    assert [len(request.times) for request in requests] == [2, 2, 1]
    assert requests[0].ttft_ms == pytest.approx((STEP_S + LOAD_S) * 1e3)


def test_a_hit_is_timed_from_when_it_was_due(engine):
    """It waits for the step that was on its way."""
    late = Request([2], 1, at_s=0.001)
    drive(engine, [Request([1], 3), late])
    assert late.ttft_ms == pytest.approx((2 * (STEP_S + LOAD_S) - 0.001) * 1e3)


def test_others_tokens_are_late_beside_hits_and_nowhere_else(engine):
    [figures] = DECODING.measure(engine)
    assert engine.forgotten == 2
    assert engine.most == DECODING.requests + 1
    assert figures["alone max"] == pytest.approx(STEP_S * 1e3)
    assert figures["with hits p50"] == pytest.approx(STEP_S * 1e3)
    assert figures["with hits max"] == pytest.approx((STEP_S + LOAD_S) * 1e3)
    assert "TTFT max" in figures
    assert "TTFT p99" not in figures  # of two
    assert figures["tokens/s alone"] == pytest.approx(DECODING.requests / STEP_S)
    assert figures["tokens/s with hits"] < figures["tokens/s alone"]


def test_hits_begin_with_what_was_computed_before(engine, monkeypatch):
    computed = []
    monkeypatch.setattr(engine, "seconds", computed.append)
    DECODING.measure(engine)
    hits = [prompt for _, prompt in engine.began if len(prompt) == 10]
    assert [prompt[:8] for prompt in hits] == computed


def test_what_is_new_was_not_computed_before(engine, monkeypatch):
    computed = []
    monkeypatch.setattr(engine, "seconds", computed.append)
    [figures] = replace(DECODING, new=True).measure(engine)
    assert not computed
    assert figures["TTFT max"] > 0


def test_a_conversation_goes_on_from_its_answers(engine):
    [figures] = TALK.measure(engine)
    prompts = [prompt for _, prompt in engine.began]
    assert len(prompts) == TALK.users * TALK.rounds
    last = [prompt for prompt in prompts if len(prompt) == 12 + 2 * (4 + 2)]
    assert len(last) == TALK.users
    for prompt in last:
        assert prompt[12:16] == prompt[18:22] == [7] * 4
        assert prompt[:12] in prompts
    assert {"TTFT, first p50", "TTFT, later p50", "ITL p99"} <= figures.keys()
    assert figures["requests/s"] == pytest.approx(9 / engine.now)


def test_few_values_have_no_percentiles():
    assert spread("x", [1.0] * 19) == {"x p50": 1, "x max": 1}
    values = spread("x", [float(value) for value in range(1, 102)])
    assert values == {"x p50": 51, "x p99": 100, "x max": 101}


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("devices", [1, 2])
def test_the_engine_is_too_small_and_the_one_with_room_is_not(shape, devices: int):
    """And each fits what one request of either load needs."""
    shape = shape.under_load().on_devices(devices)
    size = shape.model.kv_bytes_per_token / devices
    talk, decoding = shape.conversations, shape.decoding
    own, room = shape.settings["kv_cache_gib"] * 2**30, shape.room_gib * 2**30
    tokens = talk.users * (talk.history + talk.rounds * (talk.new + talk.answer))
    assert own < tokens * size < room
    assert shape.settings["cpu_gib"] * 2**30 > tokens * size
    beside = decoding.requests * (decoding.prompt + decoding.tokens)
    hit = decoding.hit.history + decoding.hit.new + decoding.answer
    longest = talk.history + talk.rounds * (talk.new + talk.answer)
    assert (beside + hit) * size < own
    assert max(hit, longest, shape.prompts[0].history) < shape.settings["max_model_len"]
    assert shape.settings["max_model_len"] * size < own


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_jobs_cross_to_the_engine(shape):
    loads = [
        pickle.loads(pickle.dumps(load.measure)).__self__
        for load in shape.under_load().requests.values()
    ]
    copying = replace(shape.decoding, hit=Prompts(shape.decoding.hit.history, 1))
    storing = replace(shape.decoding, new=True)
    assert loads == [shape.decoding, copying, storing, shape.conversations]


def test_the_engine_with_room_is_made_of_settings():
    shape = shape_named("small").under_load()
    [room] = variants_named(shape, ["room"])
    settings = Settings.load(room.values(shape, "model", "cpu", graphs=False))
    assert (settings.kv_cache_gib, settings.offload, room.hits) == (1, False, "own cache")


def test_hits_of_an_own_cache_are_not_forgotten(engine):
    engine.hits = "own cache"
    [figures] = DECODING.measure(engine)
    assert engine.forgotten == 0
    assert figures["TTFT max"] > 0


def results(engine):
    ours = Result("ours", "ours, standard")
    ours.rounds = {
        "decoding": DECODING.measure(engine) + DECODING.measure(engine),
        "copying": DECODING.measure(engine),
        "storing": replace(DECODING, new=True).measure(engine),
        "conversations": TALK.measure(engine),
    }
    return [ours, Result("lmcache", "LMCache, standard", error="AssertionError: layout")]


def test_figures_are_shown_and_written(engine):
    figures = Report(shape_named("small").under_load(), results(engine))
    console = Console(width=200, record=True, file=io.StringIO())
    figures.show(console)
    text = console.export_text()
    assert text.count("ours, standard") == 4  # in each table
    assert "LMCache, standard: AssertionError: layout" in text
    for words in ("2048 are cached", "2048 + 1 tokens arrives", "computed and stored", "tokens/s"):
        assert words in text
    [result, _] = json.loads(json.dumps(figures.as_dict()))["results"]
    assert set(result["medians"]) == set(result["rounds"])
    assert len(result["rounds"]["decoding"]) == 2


def test_what_was_measured_is_written_and_a_failed_engine_of_ours_is_an_error(
    engine, tmp_path, monkeypatch
):
    measured = results(engine)

    def run(shape, variants, jobs, *, save, repeats, **_):
        assert [*jobs] == ["storing"]
        assert [variant.name for variant in variants] == ["ours", "room"]
        assert repeats == 2
        save(measured)
        return measured

    monkeypatch.setattr("lmcache_xpu.bench.runner.run", run)
    monkeypatch.setattr("lmcache_xpu.bench.runner.machine", lambda: {"device": "cpu"})
    monkeypatch.setattr("signal.signal", lambda *_: None)  # this process keeps its own
    words = ["bench", "load", "--shape", "small", "--variant", "ours", "--variant", "room"]
    words += ["--load", "storing", "--repeats", "2", "--json", str(tmp_path / "x.json")]
    monkeypatch.setattr(sys, "argv", ["lmcache-xpu", *words])
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    page = json.loads((tmp_path / "x.json").read_text())
    assert (page["machine"], page["command"]) == (
        {"device": "cpu"},
        f"lmcache-xpu {' '.join(words)}",
    )
    measured[0].error = "RuntimeError: broken"
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 1


@pytest.mark.engine
@pytest.mark.tools
@pytest.mark.timeout(400)
def test_hits_beside_others_and_conversations_in_a_real_engine(tmp_path: Path):
    file = tmp_path / "figures.json"
    command = ["bench", "load", "--shape", "small", "--variant", "ours", "--json", str(file)]
    for name in ("decoding", "storing", "conversations"):  # copying is as decoding
        command += ["--load", name]
    program = Path(sys.executable).with_name("lmcache-xpu")
    done = subprocess.run([str(program), *command], capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(file.read_text())["results"]
    (decoding,), (talk,) = (result["rounds"][name] for name in ("decoding", "conversations"))
    assert result["rounds"]["storing"][0]["TTFT p50"] > 0
    assert 0 < decoding["alone p50"] <= decoding["alone max"]
    assert decoding["tokens/s with hits"] > 0
    # The history is loaded in later rounds, and computed in the first one.
    assert talk["TTFT, later p50"] < talk["TTFT, first p50"]
