"""Two engines of one `serve` (data parallelism), each with a cache and a disk tier of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from lmcache_xpu.harness.engine_process import EngineProcess, free_port
from lmcache_xpu.harness.random_model import EXACT, make_model
from lmcache_xpu.launch.settings import Settings

pytestmark = pytest.mark.engine

CHUNK, CHUNKS = 256, 3
PROMPT = [300 + 7 * at % 3000 for at in range(CHUNK * CHUNKS + 20)]


class Answers(NamedTuple):
    computed: str
    loaded: str
    hits: float


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def answers(place: Path) -> list[Answers]:
    """The same prompt twice to each engine, while both run."""
    settings = Settings.load(
        {
            "model": str(make_model(EXACT, place / "models")),
            "port": free_port(),
            "device": "cpu",
            "dtype": "float32",
            "data_parallel": 2,
            "block_tokens": 128,
            "cpu_gib": 0.125,
            "kv_cache_gib": 0.0625,
            "max_model_len": 1024,
            "disk_path": place / "kv",
            "disk_gib": 0.5,
            "enforce_eager": True,
            "prefix_caching": False,  # so that the second answer is LMCache's
        }
    )
    with (
        EngineProcess(settings, place / "log", start_s=280) as engine,
        httpx.Client(base_url=engine.url, timeout=60) as client,
    ):

        def ask(rank: int) -> str:
            body = {"model": settings.model, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
            headers = {"X-data-parallel-rank": str(rank)}
            answer = client.post("/v1/completions", json=body, headers=headers)
            answer.raise_for_status()
            return answer.json()["choices"][0]["text"]

        def hits(rank: int) -> float:
            name = rf'vllm:external_prefix_cache_hits_total{{engine="{rank}".*}} (\S+)'
            return float(re.search(name, client.get("/metrics").text)[1])

        replies = []
        for rank in (0, 1):
            computed = ask(rank)
            assert hits(rank) == 0  # nothing of the other engine's
            replies.append(Answers(computed, ask(rank), hits(rank)))
    return replies  # what was queued for the disk is there now


def test_each_engine_loads_what_it_stored(answers: list[Answers]):
    for reply in answers:
        assert reply.computed == reply.loaded == answers[0].computed
        assert reply.hits == CHUNK * CHUNKS


def test_each_engine_writes_to_a_directory_of_its_own(place: Path, answers: list[Answers]):
    assert answers
    first, second = (
        {file.name: file.stat().st_size for file in directory.glob("*.lmxkv")}
        for directory in (place / "kv").iterdir()
    )
    assert len(first) == CHUNKS
    assert first == second
