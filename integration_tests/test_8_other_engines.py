"""An engine with settings of its own: adapters, no disk tier, the other failure policy."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from breaks import SETTINGS
from engine import CHUNK, Engine
from prompts import tokens
from safetensors.torch import save_file
from stack import SMALL, Kept, Stack
from test_2_tiers import CPU_CHUNKS, fill, hit

from lmcache_xpu.demo.model import EXACT
from lmcache_xpu.errors import EngineError
from lmcache_xpu.settings import Settings

RANK = 4


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
    starts: Stack, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Kept]:
    """Two adapters; no disk tier; a load that fails fails its request."""
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
    transfer = Settings.load({**SMALL, "model": "m", **broken})._kv_transfer()
    transfer["kv_load_failure_policy"] = "fail"
    extra += ["--kv-transfer-config", json.dumps(transfer)]
    with Kept(starts, extra_args=tuple(extra)) as kept:
        yield kept


@pytest.fixture
def adapters(adapters_kept: Kept) -> Engine:
    return adapters_kept.engine()


@pytest.mark.promise("8 security")
@pytest.mark.fails_without("salt")
def test_entries_of_an_adapter_are_for_that_adapter(adapters: Engine):
    """Seen to fail with LMCache's own keys: each is a hit, and the answers are the first one's."""
    prompt = tokens("adapters", 3 * CHUNK + 7)
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


@pytest.mark.promise("2 tiers")
@pytest.mark.fails_without("roomy")
def test_without_a_disk_tier_what_was_evicted_is_computed_again(adapters: Engine):
    """Seen to fail with a CPU tier that does not evict."""
    prompt = tokens("no disk", 4 * CHUNK + 77)
    adapters.ask(prompt)
    assert hit(adapters, prompt) == (4 * CHUNK, 0)
    fill(adapters, "no disk", CPU_CHUNKS)
    assert hit(adapters, prompt) == (0, 0)


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
@pytest.mark.xfail(strict=True, reason="known limit: LMCache's connector needs token ids")
def test_embeddings_in_place_of_tokens(adapters: Engine):
    """docs/known-limits.md: vLLM's option for them, off by default, has to stay off."""
    torch.save(torch.zeros(300, EXACT.hidden), buffer := io.BytesIO())
    embeddings = base64.b64encode(buffer.getvalue()).decode()
    body = {"model": "exact", "prompt_embeds": embeddings, "max_tokens": 4}
    assert adapters.status("/v1/completions", **body) == 200
    assert adapters.alive()
