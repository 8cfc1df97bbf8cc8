"""End to end on CPU: what one engine has stored in a shared tier, another one finds, or computes.

As in test_engine.py bytes and tokens are compared. The cache is in the engine's process; layerwise
has no shared tier.
"""

from __future__ import annotations

import pytest
from support.real_engine import BLOCK, LENGTHS, cached
from support.scripts import environment, printed, run_probe
from support.servers import Server, needs_server
from support.shared_probe import CHUNKS

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = [pytest.mark.engine, needs_server]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("default", id="standard-default", marks=pytest.mark.matrix),
        pytest.param("newer", id="standard-newer"),
    ],
)
def steps(request, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """What the two engines saw, by step."""
    directory = tmp_path_factory.mktemp(f"shared-{request.param}")
    model = make_model(EXACT, directory)
    server = Server()
    server.start()
    place = (model, server.port, directory / "reference.json", request.param)
    try:
        return {
            "store": printed(run_probe("shared", "store", *place)),
            # Another engine has another hash seed.
            "find": printed(run_probe("shared", "find", *place, env=environment())),
        }
    finally:
        server.stop()
        server.client.close()


@pytest.mark.parametrize("name", LENGTHS)
def test_an_empty_server_has_nothing_and_is_filled(steps: dict[str, dict], name: str):
    prompts = steps["store"]["prompts"]
    assert len(prompts[name]["recompute"]) == 24
    assert prompts[name]["hit"] == 0
    assert steps["store"]["stored"] == CHUNKS


@pytest.mark.parametrize("state", ["whole", "stored again"])
@pytest.mark.parametrize("name", LENGTHS)
def test_a_hit_restores_every_byte_and_gives_the_recomputed_tokens(
    steps: dict[str, dict], name: str, state: str
):
    hit = steps["find"][state][name]
    assert hit["answer"] == steps["store"]["prompts"][name]["recompute"]
    assert hit["hit"] == cached(name)
    assert hit["restored"] >= cached(name) // BLOCK
    assert hit["left in the CPU tier"] == 0
    assert hit["loaded"] >= cached(name)  # from the server, and nowhere else


@pytest.mark.parametrize("name", LENGTHS)
def test_damaged_chunks_are_computed_and_stored_again(steps: dict[str, dict], name: str):
    hit = steps["find"]["damaged"][name]
    assert hit["answer"] == steps["store"]["prompts"][name]["recompute"]
    assert hit["restored"] >= cached(name) // BLOCK
    assert hit["loaded"] == 0
    assert steps["find"]["corrupt"] >= len(LENGTHS)
    assert steps["find"]["stored"] == CHUNKS


@pytest.mark.parametrize("name", LENGTHS)
def test_a_server_that_is_gone_costs_hits_alone(steps: dict[str, dict], name: str):
    hit = steps["find"]["server gone"][name]
    assert hit["answer"] == steps["store"]["prompts"][name]["recompute"]
    assert hit["restored"] >= cached(name) // BLOCK
    assert hit["loaded"] == 0
