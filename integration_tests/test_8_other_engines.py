"""Engines one after another on one disk directory: what one leaves, the next one finds or not.

The last one has more settings of its own: adapters, and the other failure policy.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from breaks import SETTINGS
from engine import CHUNK, Engine
from hits import hit
from prompts import tokens, whole
from safetensors.torch import save_file
from stack import SMALL, Kept, Stack

from lmcache_xpu.errors import EngineError
from lmcache_xpu.harness.random_model import EXACT, make_model
from lmcache_xpu.launch.engine_arguments import kv_transfer_config
from lmcache_xpu.launch.settings import Settings

pytestmark = pytest.mark.timeout(600)

RANK = 4


@dataclass(frozen=True)
class Killed:
    """What a killed engine leaves."""

    settings: dict[str, Any]
    prompt: list[int]
    answer: list[int]
    place: Path

    def weights(self, seed: int) -> None:
        """Put a model with other weights in the place of the one that is there."""
        shutil.rmtree(self.place, ignore_errors=True)
        model = dataclasses.replace(EXACT, seed=seed)
        make_model(model, self.place.parent).rename(self.place)


@pytest.fixture(scope="module")
def killed(starts: Stack, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """An engine has stored one prompt, and died by SIGKILL in a write of the next one's."""
    directory = tmp_path_factory.mktemp("killed")
    place, prompt = directory / "model", tokens("killed", 5 * CHUNK + 3)
    settings = {"disk_path": directory / "disk", "disk_gib": 0.25, "model": str(place)}
    left = Killed(settings, prompt, [], place)
    left.weights(1)
    with starts.start(**settings) as engine:
        answer = engine.ask(prompt).token_ids
        engine.settle()
        engine.plant("disk write", kill=True)
        with pytest.raises(EngineError, match="expected a whole answer"):
            engine.ask(tokens("killed second", 8 * CHUNK), 1500)
        engine.runner.kill()
    return dataclasses.replace(left, answer=answer)


@pytest.mark.promise("6 start and stop")
@pytest.mark.fails_without("seed", "drain", "api_key")
def test_after_sigkill_its_successor_finds_what_was_complete(killed: Killed, starts: Stack):
    """To the token, and no more. And it has an API key; asked to stop, it ends its answers first.

    Seen to fail with a hash seed that differs (nothing found), with drain_s 0 (no answer), and with
    a key that does not reach the engine.
    """
    length = len(killed.prompt)
    with starts.start(**killed.settings, drain_s=30, api_key="secret") as engine:
        assert hit(engine, killed.prompt) == (whole(length), whole(length))
        engine.forget()
        assert engine.ask(killed.prompt).token_ids == killed.answer
        assert not list(killed.settings["disk_path"].rglob("*.tmp"))
        assert engine.status("/v1/completions", model="exact", prompt="a") == 401
        drained = engine.answering(tokens("drained", 500), 100)
        with drained as answer, ThreadPoolExecutor(1) as threads:
            lines = answer.iter_lines()
            assert '"finish_reason":null' in next(lines)  # its first token: it runs
            rest = threads.submit(list, lines)
            engine.runner.stop()
            assert any('"finish_reason":"length"' in line for line in rest.result())


@pytest.mark.promise("4 faults")
@pytest.mark.fails_without("weights")
def test_what_another_engine_left_on_the_disk_is_not_taken(killed: Killed, starts: Stack):
    """Other weights under the same name, then another dtype.

    Each starts on the directory of the one before it: it finds nothing, computes its own answer,
    and finds that. Seen to fail with keys that know nothing of the weights: a hit, and the other
    model's answer.
    """
    prompt, answers = killed.prompt, [killed.answer]
    killed.weights(2)
    for changes in ({}, {"dtype": "bfloat16"}):
        with starts.start(**killed.settings, **changes) as engine:
            assert hit(engine, prompt) == (0, 0)
            answers.append(engine.ask(prompt).token_ids)
            engine.settle()
            assert hit(engine, prompt) == (whole(len(prompt)), 0)
    assert answers[0] != answers[1]


def make_adapter(directory: Path, seed: int) -> Path:
    """A LoRA adapter for EXACT with random weights, large enough to change its answers."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 64, "target_modules": ["v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps({**config, "bias": "none"}))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(EXACT.layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        keys = EXACT.kv_heads * EXACT.head_dim
        weights[f"{name}.lora_A.weight"] = torch.randn(RANK, EXACT.hidden, generator=generator)
        weights[f"{name}.lora_B.weight"] = torch.randn(keys, RANK, generator=generator)
    save_file(weights, directory / "adapter_model.safetensors")
    return directory


@pytest.fixture(scope="module")
def adapters_kept(
    killed: Killed,
    starts: Stack,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Kept]:
    """The first one's weights, another hash seed, two adapters; a failed load fails its request."""
    killed.weights(1)
    places = tmp_path_factory.mktemp("adapters")
    modules = [f"{name}={make_adapter(places / name, seed)}" for seed, name in enumerate("ab")]
    extra = [
        "--enable-prompt-embeds",
        "--enable-lora",
        "--max-lora-rank",
        "8",
        "--lora-modules",
        *modules,
    ]
    broken = SETTINGS.get(request.config.getoption("--break"), {})
    transfer = kv_transfer_config(Settings.load({**SMALL, **killed.settings, **broken}))
    transfer["kv_load_failure_policy"] = "fail"
    extra += ["--kv-transfer-config", json.dumps(transfer)]
    other = {"env": {"PYTHONHASHSEED": "1"}, "extra_args": tuple(extra)}
    with Kept(starts, **killed.settings, **other) as kept:
        yield kept


@pytest.fixture
def adapters(adapters_kept: Kept) -> Engine:
    return adapters_kept.engine()


@pytest.mark.promise("4 faults")
@pytest.mark.fails_without("other_seed")
def test_what_another_hash_seed_left_on_the_disk_is_not_taken(adapters: Engine, killed: Killed):
    """All else is as it was in the engine that stored it. Seen to fail with the same hash seed."""
    prompt = killed.prompt
    assert hit(adapters, prompt) == (0, 0)
    assert adapters.ask(prompt).token_ids == killed.answer
    adapters.settle()
    assert hit(adapters, prompt) == (whole(len(prompt)), 0)


@pytest.mark.promise("8 security")
@pytest.mark.fails_without("chunk")
def test_entries_of_an_adapter_are_for_that_adapter(adapters: Engine):
    """Keys hold the adapter twice: vLLM's hashes of blocks have it as well.

    Seen to fail with chunks of half the size.
    """
    prompt = tokens("adapters", 3 * CHUNK + 150)
    answers = {}
    for name in ("exact", "a", "b"):
        adapters.forget()
        before = adapters.counts()
        answers[name] = adapters.ask(prompt, model=name).token_ids
        assert (adapters.counts() - before).external_hits == 0
    assert len(set(answers.values())) == 3
    for name in ("exact", "a", "b"):
        adapters.forget()
        before = adapters.counts()
        assert adapters.ask(prompt, model=name).token_ids == answers[name]
        assert (adapters.counts() - before).external_hits == 3 * CHUNK


@pytest.mark.promise("4 faults")
@pytest.mark.fails_without("report")
def test_with_the_policy_fail_a_failed_load_fails_its_request_alone(adapters: Engine):
    """An error for the client, never a wrong token; the engine and the next request go on.

    Seen to fail when vLLM does not hear of the blocks.
    """
    prompt = tokens("fails", 4 * CHUNK + 77)
    expected = adapters.ask(prompt).token_ids
    adapters.forget()
    adapters.plant("before load")
    with pytest.raises(EngineError):
        adapters.ask(prompt)
    assert adapters.alive()
    adapters.forget()
    assert adapters.ask(prompt).token_ids == expected


@pytest.mark.promise("4 faults")
@pytest.mark.fails_without("chunk")
def test_embeddings_in_place_of_tokens(adapters: Engine):
    """They have no name: the request is computed, the others hit.

    Seen to fail with chunks of half the size.
    """
    torch.save(torch.zeros(300, EXACT.hidden), buffer := io.BytesIO())
    embeddings = base64.b64encode(buffer.getvalue()).decode()
    body = {"model": "exact", "prompt_embeds": embeddings, "max_tokens": 4}
    assert adapters.status("/v1/completions", **body) == 200
    assert adapters.alive()
    prompt = tokens("beside embeddings", 3 * CHUNK + 150)
    expected = adapters.ask(prompt).token_ids
    adapters.settle()
    assert hit(adapters, prompt) == (3 * CHUNK, 0)
    adapters.forget()
    assert adapters.ask(prompt).token_ids == expected
