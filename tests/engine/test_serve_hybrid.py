"""`lmcache-xpu serve MODEL` with nothing but a model that keeps states: it hits, and ends whole.

That what is hit is exact, byte by byte and group by group, is compared in test_local.py.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from support import tiny_models
from support.scripts import environment
from support.until import until
from support.whole_engine import of_session

from lmcache_xpu.harness.engine_process import free_port

pytestmark = pytest.mark.engine

START_S = 240
DOCUMENT = [300 + at * at % 600 for at in range(2100)]  # whose last whole block ends at 2,048
SHARED = 2048


class Served(NamedTuple):
    log: str
    hits: list[float]
    answered: list[int]
    code: int
    meanwhile: list[str]  # processes, by their command lines
    left: list[str]  # shared memory that they had


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory, port = tmp_path_factory.mktemp("serve"), free_port()
    model, log = tiny_models.qwen3_next(directory), directory / "log"
    program = [Path(sys.executable).with_name("lmcache-xpu"), "serve", model]
    sizes = ["--cpu-gib", "0.25", "--kv-cache-gib", "0.0625", "--max-model-len", "4096"]
    command = [*program, "--port", str(port), *sizes, "--enforce-eager"]
    env = environment(HF_HUB_OFFLINE="1")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*map(str, command), "--", "--load-format", "dummy"],
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            until(lambda: is_up(client, process), START_S)
            hits, answered = [], []
            for question in range(3):
                tokens = [*DOCUMENT, *(900 + at * (question + 2) % 97 for at in range(200))]
                body = {"prompt": tokens, "max_tokens": 4, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body)
                answer.raise_for_status()
                answered.append(answer.json()["usage"]["completion_tokens"])
                hits.append(hit_tokens(client))
            titles, held = of_session(process.pid)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
        until(lambda: not of_session(process.pid)[0], 30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    left = [str(path) for path in held if path.exists()]
    return Served(log.read_text(), hits, answered, code, list(titles.values()), left)


def is_up(client: httpx.Client, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "the engine ended"
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def hit_tokens(client: httpx.Client) -> float:
    """Tokens that did not have to be computed so far, from the cache or the engine's own."""
    text = client.get("/metrics").text
    names = ("external_prefix_cache_hits", "prefix_cache_hits")
    return sum(float(re.search(rf"vllm:{name}_total{{.*}} (\S+)", text)[1]) for name in names)


def test_no_server_is_started_beside_it(served: Served):
    assert "LMCache runs as a server" not in served.log
    assert len(served.meanwhile) > 1  # vLLM's own
    assert not any("cache_server" in line or "lmcache server" in line for line in served.meanwhile)


def test_a_new_question_about_a_document_hits_all_whole_blocks_of_it(served: Served):
    assert served.answered == [4, 4, 4]
    assert served.hits == [0, SHARED, 2 * SHARED]


def test_the_engine_ends_and_gives_its_memory_back(served: Served):
    assert served.code == 0
    assert served.left == []
