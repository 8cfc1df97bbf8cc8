"""An engine that fails ends: every process of it, with the reason in the log, nothing left.

Each failure is planted in one process of a server on CPU, at its start or with the first request;
or one process is killed. `make test PART=ranks` runs this.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.whole_engine import WholeEngine

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

END_S = 30.0


def memory_for_the_next(engine: WholeEngine) -> list[str]:
    """Shared memory that is left, but for that of vLLM's ranks on CPU.

    A rank that is killed leaves its name behind, which has a part that is drawn anew each time.
    """
    return [path for path in engine.memory_left() if "vllm_dist_" not in path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(EXACT, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    ("ranks", "process", "hook"),
    [
        (1, "scheduler", "__init__"),
        (1, "worker0", "register_kv_caches"),
        (2, "scheduler", "__init__"),
        (2, "worker1", "__init__"),
        (2, "worker1", "register_kv_caches"),
    ],
)
def test_a_failed_start_ends_every_process(
    ranks: int, process: str, hook: str, model: Path, tmp_path: Path
):
    fault = f"{process}:{hook}"
    with WholeEngine(model, tmp_path / "log", ranks=ranks, fault=fault) as engine:
        assert not engine.wait_for_start()
        assert engine.wait_for_end(END_S) == {}
        assert f"planted in {process}" in engine.said()
        assert engine.memory_left() == []


@pytest.mark.parametrize(
    ("ranks", "process", "hook"),
    [
        (1, "scheduler", "get_num_new_matched_tokens"),
        (1, "worker0", "wait_for_save"),
        (2, "scheduler", "build_connector_meta"),
        (2, "worker1", "start_load_kv"),
        (2, "worker1", "get_finished"),
    ],
)
def test_a_failure_with_a_request_ends_every_process(
    ranks: int, process: str, hook: str, model: Path, tmp_path: Path
):
    fault = f"{process}:{hook}"
    with WholeEngine(model, tmp_path / "log", ranks=ranks, fault=fault) as engine:
        assert engine.wait_for_start()
        assert not engine.answers()
        assert engine.wait_for_end(END_S) == {}
        assert f"planted in {process}" in engine.said()
        assert memory_for_the_next(engine) == []


@pytest.mark.parametrize(
    ("ranks", "title"),
    [(1, "VLLM::EngineCore"), (2, "VLLM::EngineCore"), (2, "VLLM::Worker_TP1")],
)
def test_a_killed_process_ends_the_others(ranks: int, title: str, model: Path, tmp_path: Path):
    with WholeEngine(model, tmp_path / "log", ranks=ranks) as engine:
        assert engine.wait_for_start()
        assert engine.answers()
        engine.kill(title)
        assert engine.wait_for_end(END_S) == {}
        assert engine.memory_left() == []
        assert "unexpectedly" in engine.said()  # vLLM's word for what it did not do


@pytest.mark.parametrize(("ranks", "process"), [(1, "worker0"), (2, "worker0"), (2, "worker1")])
@pytest.mark.parametrize("death", ["loads", "stores"])
def test_a_worker_killed_in_a_transfer_ends_the_others(
    ranks: int, process: str, death: str, model: Path, tmp_path: Path
):
    with WholeEngine(
        model,
        tmp_path / "log",
        ranks=ranks,
        fault=f"{process}:{death}",
        loads="async",
        prefix_caching=False,  # a prompt that is asked again is loaded
    ) as engine:
        assert engine.wait_for_start()
        if death == "loads":
            assert engine.answers()
            assert not engine.answers()
        else:
            engine.answers()  # the store is beside the step, and may be behind the answer
        assert engine.wait_for_end(END_S) == {}
        assert f"planted in {process}, {death}" in engine.said()
        assert memory_for_the_next(engine) == []
