"""It starts or says why not, and stops without losing an answer."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engine import CHUNK
from prompts import tokens, whole
from stack import HOOKS, Processes, Stack
from test_2_tiers import hit

from lmcache_xpu.demo.model import EXACT, make_model
from lmcache_xpu.errors import EngineError, SettingsError
from lmcache_xpu.settings import ENV_PREFIX, Settings

pytestmark = [pytest.mark.promise("6 start and stop"), pytest.mark.timeout(600)]


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
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(engine.ask, tokens("drained", 500), 200)
            time.sleep(0.5)
            engine.runner.stop()
            assert answer.result().completion_tokens == 200


@pytest.mark.promise("4 faults")
@pytest.mark.fails_without("weights")
def test_what_another_engine_left_on_the_disk_is_not_taken(killed: Killed, starts: Stack):
    """Other weights under the same name, another dtype, and keys from another hash seed.

    Each starts on the directory of the one before it: it finds nothing, computes its own answer,
    and finds that. The last one has the first one's weights again, and its answer.

    Seen to fail with keys that know nothing of the weights: a hit, and the other model's answer.
    """
    prompt, answers = killed.prompt, [killed.answer]
    engines: list[tuple[int, dict[str, Any]]] = [
        (2, {}),
        (2, {"dtype": "bfloat16"}),
        (1, {"env": {"PYTHONHASHSEED": "1"}}),
    ]
    for seed, changes in engines:
        killed.weights(seed)
        with starts.start(**killed.settings, **changes) as engine:
            assert hit(engine, prompt) == (0, 0)
            answers.append(engine.ask(prompt).token_ids)
            engine.settle()
            assert hit(engine, prompt) == (whole(len(prompt)), 0)
    assert answers[0] != answers[1]
    assert answers[0] == answers[3]


# A wrong value for each setting that has one; the others take any text. A new setting has no value
# here, so that its test fails until it gets one.
WRONG = {
    "port": "99999",
    "drain_s": "-1",
    "log_level": "loud",
    "device": "tpu",
    "dtype": "int4",
    "max_model_len": "0",
    "block_tokens": "x",
    "kv_cache_gib": "0",
    "memory_fraction": "1.5",
    "tensor_parallel": "0",
    "prefix_caching": "perhaps",
    "max_num_batched_tokens": "-5",
    "max_num_seqs": "0",
    "enforce_eager": "maybe",
    "offload": "some",
    "chunk_tokens": "0",
    "cpu_gib": "nan",
    "disk_gib": "-1",
    "remote_url": "http://cache:6379",
    "layerwise": "2",
    "save_decode": "no way",
    "hash_algorithm": "builtin",
    "overlap_load": "maybe",
    "overlap_store": "2",
    "staging_mib": "-1",
    "layers_at_once": "0",
}
ANY_TEXT = {
    "model",
    "host",
    "api_key",
    "served_model_name",
    "disk_path",
    "remote_password",
    "extra_args",
}


@pytest.mark.fails_without("settings")
@pytest.mark.parametrize("name", sorted(Settings.model_fields.keys() - ANY_TEXT))
def test_a_wrong_value_is_refused_by_name(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
):
    """Key, value and what is allowed, in one line, before anything has started.

    Seen to fail with settings that nobody checks.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    if part := request.config.getoption("--break"):
        hooks = {"HOOKS_DIRECTORY": str(tmp_path), "HOOKS_BREAK": part}
        env |= {"PYTHONPATH": str(HOOKS), **hooks}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lmcache-xpu")), "serve", "org/model", "--dry-run"],
        env={**env, ENV_PREFIX + name.upper(): WRONG[name]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert name in done.stderr
    assert "expected" in done.stderr
    assert WRONG[name] in done.stderr or "not shown" in done.stderr


@pytest.mark.fails_without("preflight")
def test_more_memory_than_there_is_is_refused(
    stack: Stack, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    """Before anything has started. Seen to fail without a look at the machine."""
    if not isinstance(stack, Processes):
        pytest.skip("processes only; tests/containers/test_mistakes.py has it for compose.yaml")
    if request.config.getoption("--break"):
        monkeypatch.setattr("lmcache_xpu.demo.engine.preflight", lambda *_: None)
        # Nor an engine: it would take all of the memory.
        monkeypatch.setattr("lmcache_xpu.demo.engine.command", lambda *_: ["sleep", "60"])
        monkeypatch.setattr("lmcache_xpu.demo.engine.EngineProcess._wait", lambda *_: None)
    with pytest.raises(SettingsError, match=r"CPU tier of 1e\+06 GiB"), stack.start(cpu_gib=1e6):
        pass
