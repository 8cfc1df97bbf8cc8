"""Models with several KV cache groups, in each place for the cache: bytes, tokens and hits.

A document is asked about twice, with steps longer than any chunk. The engine's own cache is zeroed
before each question, and every block of every group that a load fills is compared.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import tiny_models
from support.cache_server import CacheServer
from support.scripts import printed, run_probe

pytestmark = pytest.mark.engine


class Family(NamedTuple):
    """A model, and what a hit of 2,048 tokens loads of it."""

    kind: str  # in `hybrid_probe`
    make: Callable[[Path], Path]
    groups: int
    states: bool = False


FAMILIES = (
    Family("windows", tiny_models.gemma3, 4),
    Family("windows alone", tiny_models.mistral, 1),
    Family("heads of two sizes", tiny_models.gemma4, 4),
    Family("sinks", tiny_models.gpt_oss, 2),
    Family("stretches", tiny_models.llama4, 4),
    Family("states", tiny_models.qwen3_next, 4, states=True),
    Family("states, dense", tiny_models.qwen3_5, 4, states=True),
)
FROM_SERVER_OFTEN = ("windows", "states")  # the others: `make test PART=models`
STEP, WAITS = "step", "async"  # the setting of loads
CASES = [
    pytest.param(
        place,
        family,
        loads,
        id=f"{family.kind}, {place}, {loads}",
        marks=pytest.mark.matrix
        if place == "server" and family.kind not in FROM_SERVER_OFTEN
        else (),
    )
    for place in ("local", "server")
    for family in FAMILIES
    # From a server states are waited for, whatever the setting.
    for loads in ((WAITS,) if family.states and place == "server" else (WAITS, STEP))
]


@pytest.fixture
def cache(place: str, family: Family, tmp_path: Path) -> Iterator[object]:
    """Where the probe's cache is: the path of a disk tier, or the URL of a server."""
    if place == "local":
        yield tmp_path / "disk"
        return
    server = CacheServer(tmp_path / "server.log", states=family.states)
    server.start()
    yield server.url
    server.kill()


@pytest.mark.parametrize(("place", "family", "loads"), CASES)
def test_groups_are_exact(
    place: str, family: Family, loads: str, cache: object, tmp_path: Path
) -> None:
    done = run_probe("hybrid", family.kind, family.make(tmp_path), cache, loads)
    if done.returncode == -signal.SIGILL:  # vLLM 0.26's gated delta nets on a Xeon
        pytest.skip("vLLM's kernels for this model stop at an instruction of this CPU")
    report = printed(done)
    assert list(report["ways"]) == [loads]
    groups, states = family.groups, family.states
    assert report["blocks"] == report["blocks without"]
    prompts = report["prompts"].values()
    assert [prompt["first"] for prompt in prompts] == [0, 0]
    # The whole chunks of the document: of states these are blocks.
    assert [prompt["hit"] for prompt in prompts] == ([1792, 2176] if states else [1792, 2048])
    at_end = [2048, 2432] if states else [2048, 2304]
    assert [prompt["same prompt"] for prompt in prompts] == at_end
    assert all(len(prompt["compared"]) == groups for prompt in prompts)
    assert [prompt["different"] for prompt in prompts] == [[], []]
    assert all(prompt["same answer"] for prompt in prompts)
    # Its last token is computed; of states, its last block.
    whole = {"hit": 1920 if states else 2047, "same answer": True}
    assert report["a prompt of whole chunks"] == whole
    # Longer than what states are kept for: in the process they are kept where the second one parts.
    of_states = [0, 0, 1792] if place == "local" else [0, 0, 0]
    assert report["long questions"] == (of_states if states else [0, 1792, 1792])
    assert report["groups of a planted fault"] == list(range(groups))
    failed = report["after a failed load"]
    assert failed["promised"] > 0
    assert failed["same answer"]
