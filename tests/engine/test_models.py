"""End to end on CPU: MLA, also on two workers, and drafters.

As in test_local.py bytes and tokens are compared, and a hit that was recomputed does not count.
Windows and states are there as well.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models
from support.models_probe import LONGEST
from support.real_engine import BLOCK, CHUNK, LENGTHS
from support.scripts import environment, printed, run_probe

from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

# So deep that a load is cut, and that a drafter's layers are a cut of their own.
DEEP = dataclasses.replace(EXACT, name="deep", layers=tiny_models.LAYERS, qk_gain=2.0)
# The one of vLLM's that needs no AMX; it wants these blocks, and prompts that are not cut.
MLA = {
    "attention_config": {"backend": "CPU_MLA"},
    "block_size": 16,
    "max_num_batched_tokens": 2 * LONGEST,
    "kv_cache_memory_bytes": 2**28,
}
# Layers of each drafter.
DRAFTERS = {"eagle": 1, "mla, mtp": 1, "draft model": tiny_models.LAYERS}


class Models:
    """The models of all cases."""

    def __init__(self, directory: Path) -> None:
        self.deep = make_model(DEEP, directory)
        self.eagle = tiny_models.eagle(directory, self.deep)
        self.mla = tiny_models.mla(directory)

    def of(self, case: str) -> tuple[Path, dict[str, Any]]:
        """The model of a case, and vLLM's options."""

        def drafting(method: str, **options: Any) -> dict[str, Any]:
            config = {"method": method, "num_speculative_tokens": 2, **options}
            return {"speculative_config": config}

        cases: dict[str, tuple[Path, dict[str, Any]]] = {
            "mla, two workers": (self.mla, {**MLA, "tensor_parallel_size": 2}),
            "mla, mtp": (self.mla, {**MLA, **drafting("mtp", attention_backend="CPU_MLA")}),
            "ngram": (self.deep, drafting("ngram", prompt_lookup_min=1, prompt_lookup_max=3)),
            "eagle": (self.deep, drafting("eagle", model=str(self.eagle))),
            "draft model": (self.deep, drafting("draft_model", model=str(self.deep))),
        }
        return cases[case]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


CASES = (
    "mla, mtp",
    "ngram",
    "eagle",
    # What these put together others have: ranks are in test_server_ranks.py.
    pytest.param("mla, two workers", marks=pytest.mark.matrix),
    pytest.param("draft model", marks=pytest.mark.matrix),
)


@pytest.fixture(scope="module", params=CASES)
def report(request, models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a case's engine did, by prompt; and its log."""
    case = request.param
    model, options = models.of(case)
    two = "tensor_parallel_size" in options
    env = environment(VLLM_CPU_OMP_THREADS_BIND="0|1") if two else None
    options = {"skip_tokenizer_init": True, **options}
    directory = tmp_path_factory.mktemp("run")
    done = run_probe("models", case, model, directory, json.dumps(options), env=env)
    return {"case": case, **printed(done), "log": done.stdout + done.stderr}


def hit_tokens(case: str, name: str) -> int:
    """What a hit may restore: whole chunks, and never the last token of a prompt."""
    if case.startswith("mla"):
        return int(name) * CHUNK
    whole = LENGTHS.get(name, LONGEST - 1) // CHUNK * CHUNK
    return whole - 1 if whole == LENGTHS.get(name) else whole


def test_a_hit_restores_every_byte_on_every_worker_and_gives_the_computed_tokens(report):
    case, block = report["case"], 16 if report["case"].startswith("mla") else BLOCK
    prompts = {k: v for k, v in report["prompts"].items() if k != "not waited for"}
    layers = tiny_models.LAYERS + DRAFTERS.get(case, 0)
    for name, seen in prompts.items():
        assert seen["answer"] == seen["computed"], name
        assert len(seen["answer"]) > 20 or name == "longest"
        assert seen["hit"] == hit_tokens(case, name)
        assert seen["layers"] == [layers] * (2 if case == "mla, two workers" else 1)
        assert seen["missed"] == 0, name
        if name != "longest":  # of which a drafter's last blocks were never computed
            assert min(seen["restored"]) >= hit_tokens(case, name) // block, name
    assert (report["drafted"] > 0) is (case != "mla, two workers")


def test_an_engine_that_does_not_wait_for_the_model_s_layers_is_still_seen(report):
    """vLLM asks for failed loads before a drafter has run: its layers are not waited for yet."""
    if (seen := report["prompts"].get("not waited for")) is None:
        pytest.skip("planted in one case: an engine with a drafter")
    assert seen["answer"] == seen["computed"]
    assert seen["missed"] > 0
