"""Faults that were reported of connectors, planted in a real engine on CPU: `verify` sees each.

The model has attention and states. One engine with the connector is asked again and again, with one
fault at a time, and without any before and after.
"""

from __future__ import annotations

from functools import partial

import pytest
from packaging.version import Version
from rich.console import Console
from support import tiny_models
from support.planted_faults import AT_ONCE, EARLY, FAULTS, STATE, at_once, plant
from support.scripts import environment

from lmcache_xpu import versions
from lmcache_xpu.cli.verify import starter
from lmcache_xpu.launch.engine_arguments import kv_transfer_config
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.verify.cases import Case, begin, hit
from lmcache_xpu.verify.judge import Judge, Outcome, Result, do

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(400),  # two engines
    pytest.mark.skipif(
        Version(str(versions.installed().vllm)) < Version("0.32"),
        reason="faults are planted in what vLLM 0.32 has",
    ),
]
OPTIONS = ["--load-format", "dummy", "--mamba-cache-mode", "align", "--block-size", "128"]
SHARED = Case("another question", 402, 390, 40)
OWN = Case("vLLM's own cache", 402, kept=True)
SOUND = ("sound", "sound again")
# The only case in which a fault shows, where it does not show in all.
SHOWS_IN = {EARLY: AT_ONCE, STATE: OWN.name}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Result]]:
    model = str(tiny_models.qwen3_next(tmp_path_factory.mktemp("verify")))
    settings = Settings.load(
        {"model": model, "loads": "always", "chunk_tokens": 1, "cpu_gib": 0.25}
    )
    config = kv_transfer_config(settings) | {
        "kv_connector": "PlantedConnector",
        "kv_connector_module_path": "support.planted_faults",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        start = starter(model, config, None, OPTIONS, 200, Console(quiet=True))
        pairs = {}
        with start("connector") as child:
            facts = do(child, "start", begin)
            for fault in (SOUND[0], *FAULTS, SOUND[1]):
                do(child, "plant", partial(plant, fault=fault))
                names = {SHOWS_IN.get(fault, SHARED.name)}
                if fault == SOUND[0]:
                    names |= {*SHOWS_IN.values()}
                pairs[fault] = [
                    do(child, case.name, partial(hit, case=case))
                    for case in (SHARED, OWN)
                    if case.name in names
                ]
                if AT_ONCE in names:
                    pairs[fault] += do(child, AT_ONCE, at_once)
        with start("plain") as child:
            do(child, "start", begin)
            judge = Judge(facts, child, start)
            return {fault: judge.results(of_fault) for fault, of_fault in pairs.items()}


@pytest.mark.parametrize("fault", FAULTS, ids=FAULTS.values())
def test_a_planted_fault_is_seen(results: dict[str, list[Result]], fault: str):
    [result] = results[fault]
    assert result.outcome is Outcome.WRONG
    assert "layer model.layers." in result.different[0]


def test_there_is_no_false_alarm(results: dict[str, list[Result]]):
    sound = {result.case: result for name in SOUND for result in results[name]}
    assert sound.keys() == {SHARED.name, OWN.name, AT_ONCE}
    every = [result for name in SOUND for result in results[name]]
    assert not any(result.different or result.note for result in every)
    assert sound[OWN.name].own
    assert all(result.hit for result in every if result.case != OWN.name)
