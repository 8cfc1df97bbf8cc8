"""A connector knows of changed weights."""

from __future__ import annotations

import re

import pytest
from support.scripts import run_in_fork

pytest.importorskip("vllm")

ONCE = """
import json
from vllm.v1.worker.worker_base import WorkerWrapperBase
from lmcache_xpu.vllm_hooks import patches
class Worker:
    def compile_or_warm_up_model(self):
        return type(self).__name__
wrapper = object.__new__(WorkerWrapperBase)
wrapper.worker = Worker()
patches.install()  # by the connector, which vLLM makes when the worker exists
name = wrapper.compile_or_warm_up_model()
once = type(wrapper.worker)
try:
    wrapper.missing
except AttributeError as error:
    missing = str(error)
wrapper.compile_or_warm_up_model()
print(json.dumps([name, type(wrapper.worker) is once, missing]))
"""


def test_a_worker_is_hooked_once_and_keeps_its_name_and_its_methods():
    name, once, missing = run_in_fork(ONCE)
    assert (name, once) == ("Worker", True)
    assert "'Worker' object has no attribute 'missing'" in missing


WEIGHTS = """
import inspect
import json
from types import SimpleNamespace
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase
public = [name for name, _ in inspect.getmembers(Worker, callable) if not name.startswith("_")]
from lmcache_xpu.vllm_hooks import patches
from lmcache_xpu.vllm_hooks.worker_hooks import WEIGHT_CHANGES
class FakeWorker:
    pass
events = []
for name in WEIGHT_CHANGES:
    setattr(FakeWorker, name, lambda self, *args, name=name: events.append(name) or args)
del FakeWorker.discard  # as in an earlier vLLM
patches.install()
wrapper = object.__new__(WorkerWrapperBase)
wrapper.worker = FakeWorker()
ours = SimpleNamespace(change_weights=lambda: events.append("told"))
among_others = SimpleNamespace(_connectors=[SimpleNamespace(), ours])
changes = [name for name in WEIGHT_CHANGES if hasattr(wrapper, name)]
heard = []
for connector in (None, SimpleNamespace(), ours, among_others):
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    for name in changes:
        events.clear()
        assert getattr(wrapper, name)(7) == (7,)
        heard.append([name, *events])
print(json.dumps([public, list(WEIGHT_CHANGES), changes, heard]))
"""
HARMLESS = {
    "compute_weight_checksums",
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "supports_draft_weight_updates",
    "get_model",
    "get_draft_model",
    "get_model_inspection",
    "apply_model",  # runs what it is given
    "compile_or_warm_up_model",
    "execute_model",
    "save_tensorized_model",
    "update_max_model_len",
}


def test_our_connector_hears_of_changing_weights_before_they_do():
    public, names, changes, heard = run_in_fork(WEIGHTS)
    assert changes == [name for name in names if name != "discard"]
    rounds = [heard[at : at + len(changes)] for at in range(0, len(heard), len(changes))]
    untold = [[name, name] for name in changes]
    assert rounds[:2] == [untold, untold]
    told = [[name, "told", name] for name in changes]
    assert rounds[2:] == [told, told]
    suspects = {name for name in public if re.search("weight|model|sleep|wake|discard", name)}
    assert suspects == {*names} | HARMLESS
