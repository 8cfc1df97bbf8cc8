"""End to end on CPU: MLA on two workers, windows, and drafters; what is refused, and how.

As in test_engine.py bytes and tokens are compared, and a hit that was recomputed does not count.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import tiny_models
from support.hits import check_one_copy
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
RECOMPUTED = "they are recomputed"


class Models:
    """The models of all cases."""

    def __init__(self, directory: Path) -> None:
        self.deep = make_model(DEEP, directory)
        self.eagle = tiny_models.eagle(directory, self.deep)
        self.mla = tiny_models.mla(directory)
        self.gemma3 = tiny_models.gemma3(directory)
        self.qwen3_next = tiny_models.qwen3_next(directory)

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
            "gemma3": (self.gemma3, {}),
            "qwen3-next": (self.qwen3_next, {"load_format": "dummy"}),
            "draft model": (self.deep, drafting("draft_model", model=str(self.deep))),
        }
        return cases[case]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def run(case: str, mode: str, models: Models, disk: Path) -> subprocess.CompletedProcess[str]:
    env = environment()
    model, options = models.of(case)
    if "tensor_parallel_size" in options:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    options = {"skip_tokenizer_init": True, **options}
    return run_probe("models", case, model, disk, mode, json.dumps(options), env=env)


@pytest.fixture(
    scope="module",
    params=[
        ("mla, mtp", "layerwise"),
        ("ngram", "standard"),
        ("eagle", "layerwise"),
        ("gemma3", "standard"),
        # What each of these puts together others have: MLA on two workers in standard mode is in
        # test_tp_sizes.py, and two that hold the same in layerwise mode in test_one_copy.py.
        pytest.param(("mla, two workers", "layerwise"), marks=pytest.mark.matrix),
        pytest.param(("mla, two workers", "standard"), marks=pytest.mark.matrix),
        pytest.param(("mla, mtp", "standard"), marks=pytest.mark.matrix),
        pytest.param(("ngram", "layerwise"), marks=pytest.mark.matrix),
        pytest.param(("eagle", "standard"), marks=pytest.mark.matrix),
    ],
    ids=", ".join,
)
def report(request, models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a case's engine did, by prompt; and its log."""
    done = run(*request.param, models, tmp_path_factory.mktemp("disk"))
    case, _ = request.param
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
    layers = tiny_models.LAYERS + (case in ("eagle", "mla, mtp"))
    for name, seen in prompts.items():
        assert seen["answer"] == seen["computed"], name
        assert len(seen["answer"]) > 20 or name == "longest"
        assert seen["hit"] == hit_tokens(case, name)
        assert seen["layers"] == [layers] * (2 if case == "mla, two workers" else 1)
        assert seen["missed"] == 0, name
        if name != "longest":  # of which a drafter's last blocks were never computed
            assert min(seen["restored"]) >= hit_tokens(case, name) // block, name
    assert (RECOMPUTED in report["log"]) is ("not waited for" in report["prompts"])
    assert (report["drafted"] > 0) is (case in ("eagle", "mla, mtp", "ngram"))


def test_what_workers_hold_alike_is_in_memory_once(report):
    """MLA's latent."""
    first, *others = report["memory"]
    for other in others:
        check_one_copy(first, other)
    assert len(others) == (report["case"] == "mla, two workers")


def test_an_engine_that_does_not_wait_for_the_model_s_layers_is_still_seen(report):
    """vLLM asks for failed loads before a drafter has run: its layers are not waited for yet."""
    if (seen := report["prompts"].get("not waited for")) is None:
        pytest.skip("planted in one case: an engine with a drafter")
    assert report["log"].count(RECOMPUTED) == 1
    assert seen["answer"] == seen["computed"]
    assert seen["missed"] > 0


def test_what_windows_cost_is_said(report):
    said = (
        "6 of 8 layers attend to a window; with offload the whole prompt is kept for them too: 4.0"
    )
    assert (said in report["log"]) is (report["case"] == "gemma3")


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("qwen3-next", "found layers of linear_attention in a qwen3_next; expected attention in"),
        ("draft model", "found speculative decoding with the method 'draft_model'; expected ngram"),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(case, said, models: Models, tmp_path):
    done = run(case, "standard", models, tmp_path)
    assert done.returncode == 1
    assert f"SettingsError: {said}" in done.stderr
    assert "Failed to promote" not in done.stdout + done.stderr
