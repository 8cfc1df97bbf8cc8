"""How LMCache and vLLM are patched, in processes of their own."""

from __future__ import annotations

import pytest
from support.scripts import run_script

from lmcache_xpu.errors import SettingsError
from lmcache_xpu.kv_connector import patches

PLUGIN = """
import json, sys
from vllm.plugins import load_general_plugins
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
load_general_plugins()
early = [name for name in ("lmcache", "lmcache_xpu.gpu_connector.standard") if name in sys.modules]
from lmcache.v1.gpu_connector.xpu_connectors import VLLMPagedMemXPUConnectorV2
import lmcache.v1.gpu_connector as factory
names = {
    name: KVConnectorFactory.get_connector_class_by_name(name).__module__
    for name in ("LMCacheXPUConnector", "LMCacheConnectorV1")
}
print(json.dumps({
    "early": early,
    "standard": VLLMPagedMemXPUConnectorV2.__module__,
    "create": hasattr(factory.CreateGPUConnector, "__lmcache_xpu__"),
    "names": names,
}))
"""


def test_the_plugin_gives_our_classes_under_every_name():
    found = run_script(PLUGIN)
    assert found["early"] == []  # a vLLM without LMCache must not pay for it
    assert found["standard"] == "lmcache_xpu.gpu_connector.standard"
    assert found["create"]
    assert set(found["names"].values()) == {"lmcache_xpu.vllm_connector"}


def test_the_off_switch_leaves_stock_names_alone():
    found = run_script(PLUGIN, LMCACHE_XPU_STOCK="1")
    assert found["standard"] == "lmcache.v1.gpu_connector.xpu_connectors"
    assert not found["create"]
    assert found["names"]["LMCacheConnectorV1"].startswith("vllm.")
    assert found["names"]["LMCacheXPUConnector"] == "lmcache_xpu.vllm_connector"


WRONG_VERSION = """
import json
from lmcache_xpu import versions
versions.TESTED["lmcache"] = ("9.9.9",)
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from lmcache.v1.gpu_connector.xpu_connectors import VLLMPagedMemXPUConnectorV2
said = None
try:
    KVConnectorFactory.get_connector_class_by_name("LMCacheConnectorV1")(None, None, None)
except Exception as error:
    said = f"{type(error).__name__}: {error}"
print(json.dumps({"said": said, "standard": VLLMPagedMemXPUConnectorV2.__module__}))
"""


def test_an_untested_version_is_refused_by_name_and_patches_nothing():
    found = run_script(WRONG_VERSION)
    assert found["said"].startswith("VersionError: found LMCache 0.5.6 with vLLM 0.32.0")
    assert "9.9.9" in found["said"]
    assert "LMCACHE_XPU_ALLOW_UNTESTED=1" in found["said"]
    assert found["standard"] == "lmcache.v1.gpu_connector.xpu_connectors"


def test_an_untested_version_goes_on_when_asked():
    found = run_script(WRONG_VERSION, LMCACHE_XPU_ALLOW_UNTESTED="1")
    assert not found["said"].startswith("VersionError")
    assert found["standard"] == "lmcache_xpu.gpu_connector.standard"


STEP = """
import gc
import json
from types import SimpleNamespace
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.worker.gpu_worker import Worker
from lmcache_xpu.kv_connector import garbage, patches
events = []
def execute_model(worker, step):
    events.append("vLLM")
    collects.append(gc.isenabled())
    if step is None:
        raise RuntimeError("planted")
    return "its output"
Worker.execute_model = execute_model
patches.install()
ours, other = SimpleNamespace(begin_step=events.append), SimpleNamespace()
found, collects = [], []
for connector, metadata in ((None, "no one's"), (other, "another's"), (ours, None), (ours, "ours")):
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    step = SimpleNamespace(kv_connector_metadata=metadata)
    garbage.put_off()
    found.append((Worker.execute_model(None, step), list(events)))
    collects.append(gc.isenabled())
    events.clear()
kv_transfer_state._KV_CONNECTOR_AGENT = None
garbage.put_off()
try:
    Worker.execute_model(None, None)
except RuntimeError:
    collects.append(gc.isenabled())
print(json.dumps([*found, collects]))
"""


def test_our_connector_hears_of_a_step_first():
    nobody, stock, idle, ours, _ = run_script(STEP)
    assert nobody == stock == idle == ["its output", ["vLLM"]]
    assert ours == ["its output", ["ours", "vLLM"]]


def test_garbage_is_collected_again_when_a_step_is_enqueued_or_has_failed():
    *_, collects = run_script(STEP)
    assert collects == [False, True] * 5


def test_served_devices():
    assert patches.served_devices({}) == ("xpu", "cpu")
    assert patches.served_devices({patches.DEVICES_VARIABLE: "xpu, cuda"}) == ("xpu", "cuda")
    with pytest.raises(SettingsError, match="tpus"):
        patches.served_devices({patches.DEVICES_VARIABLE: "tpus"})


CREATE = """
import json
from types import SimpleNamespace
import torch
from lmcache_xpu.kv_connector import patches
from lmcache_xpu.cache_engine.kv_cache_facts import EngineFacts
patches.install()
patches.install()
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector import CreateGPUConnector
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.integration.vllm.utils import vllm_layout_hints
config = LMCacheEngineConfig.from_defaults()
def metadata():
    return LMCacheMetadata("model", 1, 1, 0, 0, torch.uint8, (3, 2, 256, 2, 8))
mock = CreateGPUConnector(config, metadata(), EngineType.MOCK)
try:
    CreateGPUConnector(config, metadata(), EngineType.VLLM)
    outside = None
except Exception as error:
    outside = str(error)
facts = EngineFacts(device_type="cpu", kv_layout="BHLNC", opaque_blocks=False, heads=2,
                    head_size=12, block_size=16, namespace="+c24")
mine = metadata()
with patches.building(facts):
    ours = CreateGPUConnector(config, mine, EngineType.VLLM, layout_hints=vllm_layout_hints(None))
print(json.dumps({
    "mock": type(mock).__name__, "outside": outside, "ours": type(ours).__module__,
    "shape": list(ours.get_shape(5)), "metadata": [list(s) for s in mine.get_shapes(5)],
    "model": mine.model_name, "hint": ours._chunk_format.geometry.kv_layout,
}))
"""


def test_lmcache_s_factory_is_ours_only_while_our_engine_is_built():
    found = run_script(CREATE)
    assert found["mock"] == "MockGPUConnector"
    assert found["outside"] == "No supported cpu connector found."  # LMCache's own answer
    assert found["ours"] == "lmcache_xpu.gpu_connector.standard"
    # The engine's content (12 elements a plane here), not what the model's heads suggest (8).
    assert found["shape"] == [2, 3, 5, 24]
    assert found["metadata"] == [[2, 3, 5, 24]]
    assert found["model"] == "model+c24.layers"
    assert found["hint"] == "BHLNC"  # LMCache's own hints would have refused this layout


KEYS = """
import json
import torch
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.token_database import ChunkedTokenDatabase
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.cache_engine.config import make_hash_safe
config = LMCacheEngineConfig.from_defaults(chunk_size=4)
metadata = LMCacheMetadata("model", 1, 1, 0, 0, torch.uint8, (3, 2, 256, 2, 8))
def keys():
    database = ChunkedTokenDatabase(config, metadata)
    return [key.to_string() for _, _, key in database.process_tokens(list(range(8)))]
stock = keys()
try:
    make_hash_safe(config, {"lmcache.pre_caching_hash_algorithm": "builtin"})
    refused = None
except SettingsError as error:
    refused = str(error)
make_hash_safe(config, {})
print(json.dumps({"stock": stock, "ours": keys(), "refused": refused,
                  "algorithm": config.pre_caching_hash_algorithm}))
"""


@pytest.mark.xfail(strict=True, reason="known limit: LMCache keeps 64 bits of a chunk's hash")
def test_names_of_chunks_are_too_long_to_meet_by_chance():
    """docs/known-limits.md: two prompts whose chunks have equal names would share them."""
    names = [key.split("@")[3] for key in run_script(KEYS)["ours"]]
    assert min(len(name) * 4 for name in names) > 64, names


def test_keys_are_the_same_in_every_process():
    one, other = run_script(KEYS), run_script(KEYS)
    assert one["stock"] != other["stock"]  # LMCache's default without a fixed seed: never a hit
    assert one["algorithm"] == "sha256"
    assert len(one["ours"]) == 2
    assert one["ours"] == other["ours"]
    assert "nothing would ever be found" in one["refused"]


def test_a_fixed_seed_leaves_lmcache_s_choice_alone():
    found = run_script(KEYS, PYTHONHASHSEED="0")
    assert (found["algorithm"], found["refused"]) == ("builtin", None)
    assert found["ours"] == found["stock"]


COPIES = """
import json
from lmcache.v1.config import LMCacheEngineConfig
from lmcache_xpu.errors import SettingsError
from lmcache_xpu.cache_engine.config import apply, keep_own_copies
def read(workers, **extra):
    config = LMCacheEngineConfig.from_defaults()
    settings = {"lmcache.extra_config": extra} if extra else {}
    apply(config, settings)
    keep_own_copies(config, settings, workers=workers)
    apply(config, settings)  # LMCache does so itself, later
    return [
        config.get_extra_config_value("save_only_first_rank", True),
        config.get_extra_config_value("disk.path", None),
        config.get_lookup_server_worker_ids(True, workers),
    ]
try:
    read(2, save_only_first_rank=True)
    refused = None
except SettingsError as error:
    refused = str(error)
print(json.dumps({
    "one": read(1), "two": read(2), "more": read(2, **{"disk.path": "/d"}), "refused": refused,
}))
"""


def test_each_worker_of_an_mla_model_keeps_its_own_copy():
    """LMCache's default is one copy, of which the other workers' connectors could make nothing."""
    pytest.importorskip("vllm")
    found = run_script(COPIES)
    assert found["one"] == [True, None, [0]]
    assert found["two"] == [False, None, [0, 1]]  # what not all of them have was not found
    assert found["more"] == [False, "/d", [0, 1]]
    assert "save_only_first_rank true with MLA on 2 devices" in found["refused"]


LATER_ENGINE = """
import json
from types import SimpleNamespace
from lmcache_xpu.kv_connector import patches
patches.install()
from lmcache.integration.vllm import utils
from vllm.platforms import interface
interface.set_assigned_physical_gpu_ids([1])  # as vLLM does on CPU in the second engine
config = SimpleNamespace(parallel_config=SimpleNamespace(
    rank=0, world_size=1, data_parallel_rank_local=1, nnodes_within_dp=1,
    distributed_executor_backend="mp", data_parallel_backend="mp"))
def asked():
    try:
        return utils.calculate_local_rank_and_world_size(config)
    except IndexError as error:
        return str(error)
without = asked()
with patches.building(object()):
    print(json.dumps({"without": without, "building": asked()}))
"""


def test_lmcache_starts_in_every_engine_of_data_parallelism():
    found = run_script(LATER_ENGINE)
    assert "out of range for assigned_physical_gpu_ids [1]" in found["without"]  # LMCache alone
    assert found["building"] == [0, 1]
