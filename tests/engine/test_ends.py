"""An engine that fails ends: every process of it, with the reason in the log, nothing left.

Each failure is planted in one process of a server on CPU, at its start or with the first request;
or one process is killed. `make test-ranks` runs this.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_models import with_kv_heads
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


@pytest.fixture(scope="module")
def one_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_kv_heads(1, tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("process", ["worker0", "worker1"])
def test_ranks_wait_for_no_other_that_failed_to_share_its_cpu_tier(
    process: str, one_head: Path, tmp_path: Path
):
    fault = f"{process}:register_kv_caches"
    with WholeEngine(one_head, tmp_path / "log", ranks=2, fault=fault) as engine:
        assert not engine.wait_for_start()
        assert engine.wait_for_end(END_S) == {}
        assert f"planted in {process}" in engine.said()
        assert engine.memory_left() == []


@pytest.mark.parametrize("title", ["VLLM::Worker_TP0", "VLLM::Worker_TP1"])
def test_a_killed_rank_that_shares_its_cpu_tier_ends_the_other(
    title: str, one_head: Path, tmp_path: Path
):
    with WholeEngine(one_head, tmp_path / "log", ranks=2) as engine:
        assert engine.wait_for_start()
        assert engine.answers()
        engine.kill(title)
        assert engine.wait_for_end(END_S) == {}
        assert memory_for_the_next(engine) == []


@pytest.mark.parametrize(
    ("process", "death", "part", "loads"),
    [
        ("worker0", "loads", "lender", "step"),
        ("worker1", "loads", "borrower", "step"),
        ("worker0", "lends", "lender", "step"),
        ("worker0", "lends", "lender", "async"),
    ],
)
def test_a_rank_killed_in_a_load_of_one_cpu_tier_ends_the_other(
    process: str, death: str, part: str, loads: str, one_head: Path, tmp_path: Path
):
    """The other one is in the load, or a thread of it waits for word of that.

    The tier has no name by which the next engine could find it, and goes with the last process.
    """
    with WholeEngine(
        one_head,
        tmp_path / "log",
        ranks=2,
        fault=f"{process}:{death}",
        layerwise=True,
        loads=loads,
        prefix_caching=False,  # a prompt that is asked again is loaded
    ) as engine:
        assert engine.wait_for_start()
        assert engine.answers()
        assert not engine.answers()
        assert engine.wait_for_end(END_S) == {}
        assert f"planted in {process}, {death}: a {part}" in engine.said()
        assert memory_for_the_next(engine) == []
