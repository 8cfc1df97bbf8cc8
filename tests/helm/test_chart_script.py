"""`helm test`'s script against servers that answer as an engine would, right and wrong.

Against a real engine it runs in test_chart_engine.py.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from chart import CHART
from stub_server import Stub

METRICS = """\
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="{blocks}"}} 1.0
vllm:external_prefix_cache_hits_total{{engine="0",model_name="m"}} {hits}
"""


def run(port: int, model: str = "m") -> subprocess.CompletedProcess[str]:
    program = CHART / "files" / "chat_twice.py"
    return subprocess.run(
        [sys.executable, "-I", program, f"http://127.0.0.1:{port}", model],
        capture_output=True,
        text=True,
        timeout=60,
        env={},
    )


@pytest.fixture
def engine():
    """An engine of 16 * 1000 tokens; `engine(hits)` are what its counter says, one by one."""
    made = []

    def make(hits, metrics: str = METRICS) -> Stub:
        counter = iter(hits)

        def answer(path: str) -> object:
            if path == "/v1/models":
                return {"data": [{"id": "m", "max_model_len": 32768}]}
            if path == "/metrics":
                return metrics.format(blocks=1000, hits=next(counter))
            return {"usage": {"prompt_tokens": 3000}}

        made.append(Stub(answer))
        return made[-1]

    yield make
    for stub in made:
        stub.shutdown()
        stub.server_close()


def chats(stub: Stub) -> int:
    return sum(path == "/v1/chat/completions" for _, path, _ in stub.seen)


def test_hits_of_the_second_chat_are_a_pass(engine):
    stub = engine([0, 5000, 7816])
    done = run(stub.port)
    assert done.returncode == 0, done.stderr
    assert "2816 of 3000 tokens came from a tier" in done.stdout
    # The first and the last, and between them as much as the engine's own cache holds.
    assert chats(stub) == 2 + 6


def test_no_hit_of_the_second_chat_is_a_failure_also_when_there_were_others_before(engine):
    done = run(engine(itertools.repeat(5000)).port)
    assert done.returncode == 1
    assert "raise settings.cpu_gib or disk_gib" in done.stderr


def test_an_engine_without_offload_is_named_as_one(engine):
    metrics = METRICS.splitlines()[0] + "\n"
    done = run(engine(itertools.repeat(0), metrics).port)
    assert done.returncode == 1
    assert "is offload switched on?" in done.stderr


def test_another_model_is_named(engine):
    done = run(engine([]).port, model="other")
    assert done.returncode == 1
    assert "serves m, not other" in done.stderr
