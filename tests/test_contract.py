"""What src uses of vLLM and LMCache is declared in contract/, and is as the installed ones have it.

`make contract` compares all versions; here it is those in this environment, and sources made up
for the purpose, in which something is planted that has to be seen.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from contract import extension
from contract.change import Change
from contract.comparison import compare, unexpected
from contract.declaration import Passed, checked, declared, differences, stubs
from contract.extension import new_methods
from contract.modules import Modules
from contract.report import report
from contract.sources import installed
from contract.uses import PACKAGES, SOURCE, place, subclasses
from lmcache_xpu import versions
from lmcache_xpu.vllm_hooks.patches import PATCHES, STOCK_ENTRY
from lmcache_xpu.vllm_hooks.worker_hooks import WEIGHT_CHANGES, WorkerHooks

ROOT = Path(__file__).resolve().parents[1]
STUB = """
from typing import Any

CONSTANT: Any

class Pool:
    size: Any
    tokens: Any
    def __init__(self, size): ...
    def take(self, count, *, pin=...): ...
    async def fetch(self, key): ...

def convert(value): ...
"""
MODULE = """
from fake.inner import Base

CONSTANT, _ = 1, 2

class Pool(Base):
    def take(self, count, timeout=1.0, *, pin=False):
        self.tokens = 3

    async def fetch(self, key): ...

def convert(value, *, strict=False): ...
"""
INNER = """
from dataclasses import dataclass

@dataclass
class Base:
    size: int
    spare: int = 0
"""
PLANTED = {
    "method renamed": ("def take(", "def grab(", "Pool.take: is not there"),
    "parameter gone": ("count,", "number,", "parameter count is gone"),
    "required parameter": ("timeout=1.0", "timeout", "new required parameter timeout"),
    "keyword only": ("self, count, timeout=1.0, *,", "self, *, count,", "a keyword only now"),
    "no longer optional": ("pin=False", "pin", "parameter pin is required now"),
    "coroutine no more": ("async def", "def", "is not a coroutine any more"),
    "property": (
        "    def take(self, count",
        "    @property\n    def take(self, a",
        "a property now",
    ),
    "attribute gone": ("self.tokens = 3", "pass", "Pool.tokens: is not there"),
    "constant gone": ("CONSTANT, _", "OTHER, _", "fake.pool.CONSTANT: is not there"),
    "class is a function": ("class Pool(Base):", "def Pool():", "is a function now"),
    "function's parameter": ("convert(value", "convert(thing", "parameter value is gone"),
    "base class gone": ("from fake.inner import Base", "Base = object", "size: is not there"),
}


def test_src_uses_nothing_that_is_not_declared():
    command = (sys.executable, "-m", "mypy", "--config-file", "contract/mypy.ini")
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, (
        f"{checked.stdout}\nDeclare in contract/stubs what src uses of vLLM and LMCache."
    )


def test_every_override_is_declared():
    upstream, declarations = Modules(installed()), stubs()
    missing = [
        f"{each.base}.{method}, overridden in {place(f'{each.base}.{method}')}"
        for each in subclasses()
        for method in each.methods
        if not (method.startswith("__") and method != "__init__")
        and upstream.find(f"{each.base}.{method}") is not None
        and declarations.find(f"{each.base}.{method}") is None
    ]
    assert subclasses()
    assert not missing, f"Declare in contract/stubs: {missing}"


def test_what_is_replaced_or_hooked_at_run_time_is_declared():
    names = [patch.name for patch in PATCHES]
    names += [STOCK_ENTRY.partition("[")[0]]
    hooked = [*WEIGHT_CHANGES, *(name for name in vars(WorkerHooks) if not name.startswith("_"))]
    assert "sleep" in hooked
    names += [f"vllm.v1.worker.gpu_worker.Worker.{name}" for name in hooked]
    assert not [name for name in names if stubs().find(name) is None]


def test_options_and_variables_of_vllm_are_declared():
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    variables = set(re.findall(r"\bVLLM_[A-Z_]+\b", text))
    arguments = (SOURCE / "lmcache_xpu" / "launch" / "engine_arguments.py").read_text()
    options = set(re.findall(r'"--(?:no-)?([a-z-]+)"', arguments))
    holders = ("vllm.engine.arg_utils.EngineArgs", "vllm.entrypoints.common.cli_args.FrontendArgs")
    names = {option.replace("-", "_") for option in options}
    assert variables
    assert options
    assert not {name for name in variables if stubs().find(f"vllm.envs.{name}") is None}
    assert not {
        name for name in names if not any(stubs().find(f"{holder}.{name}") for holder in holders)
    }


def test_nothing_is_declared_that_src_does_not_use():
    members = [
        name for package in PACKAGES for name, each in declared(package) if not each.is_class
    ]
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.py"))
    words = set(re.findall(r"\w+", text))
    words |= {option.replace("-", "_") for option in re.findall(r'"--(?:no-)?([a-z-]+)"', text)}
    unused = [name for name in members if name.rpartition(".")[2] not in words]
    assert members
    assert not [name for name in unused if not name.endswith(".__init__")]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_installed_version_is_as_declared(package):
    version = getattr(versions.installed(), package)
    assert unexpected(package, version, compare(package, version, installed())) == []


@pytest.fixture
def sources(tmp_path):
    """A package as its stub declares it: in the folders `stubs` and `there`."""
    files = {
        "stubs/fake/pool.pyi": STUB,
        "there/fake/pool.py": MODULE,
        "there/fake/inner.py": INNER,
    }
    files |= {"stubs/fake/__init__.pyi": "", "there/fake/__init__.py": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_sources_that_fit_have_no_changes(sources):
    assert compare("fake", "1.0", sources / "there", sources / "stubs") == ()


@pytest.mark.parametrize(("before", "after", "told"), PLANTED.values(), ids=list(PLANTED))
def test_a_planted_change_is_told(sources, before, after, told):
    module = sources / "there" / "fake" / "pool.py"
    assert before in module.read_text()
    module.write_text(module.read_text().replace(before, after))
    changes = compare("fake", "1.0", sources / "there", sources / "stubs")
    assert any(told in f"{change.name}: {change.what}" for change in changes), changes


def test_a_module_that_moved_is_told(sources):
    (sources / "there" / "fake" / "pool.py").rename(sources / "there" / "fake" / "pools.py")
    changes = compare("fake", "1.0", sources / "there", sources / "stubs")
    told = {change.name: change.what for change in changes}
    moved = "its module is not there; fake/pools.py has that name"
    assert told.keys() == {"fake.pool.CONSTANT", "fake.pool.Pool", "fake.pool.convert"}
    assert told["fake.pool.Pool"] == told["fake.pool.convert"] == moved


def test_a_new_parameter_of_a_method_that_ours_overrides_is_told(tmp_path):
    module = "vllm/distributed/kv_transfer/kv_connector/v1/base"
    text = "class KVConnectorBase_V1:\n    def wait_for_save(self{}): ...\n"
    for name, parameter in (("stubs/{}.pyi", ""), ("there/{}.py", ", step=None")):
        path = tmp_path / name.format(module)
        path.parent.mkdir(parents=True)
        path.write_text(text.format(parameter))
    [change] = compare("vllm", "1.0", tmp_path / "there", tmp_path / "stubs")
    assert "new parameter step" in change.what
    assert "connector.py:" in change.text


def test_a_keyword_that_is_not_passed_any_more_is_told(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "runner.py").write_text("connector.start_load_kv(attn_metadata=None)")
    entry = Passed("vllm.runner", "start_load_kv", ("attn_metadata", "step"), SpecifierSet(">=1"))
    monkeypatch.setattr(extension, "passed", lambda: (entry,))
    changes = [each.name for each in compare("vllm", "1.0", tmp_path)]
    assert "vllm.runner(step)" in changes
    assert "vllm.runner(attn_metadata)" not in changes


def test_an_attribute_that_a_replaced_constructor_sets_is_told(tmp_path):
    module = "vllm/distributed/kv_transfer/kv_connector/v1/lmcache_connector"
    path = tmp_path / f"{module}.py"
    path.parent.mkdir(parents=True)
    body = "self._kv_cache_events = None\n        self.pending = {}\n"
    path.write_text(f"class LMCacheConnectorV1:\n    def __init__(self, config):\n        {body}")
    changes = [each.name for each in compare("vllm", "1.0", tmp_path)]
    constructor = f"{module.replace('/', '.')}.LMCacheConnectorV1.__init__"
    assert f"{constructor}(pending)" in changes
    assert f"{constructor}(_kv_cache_events)" not in changes


def test_only_differences_of_other_versions_are_expected():
    oldest, *_, newest = checked("vllm")
    lacking = [each.name for each in differences() if not each.versions.contains(oldest)]
    lacking = [name for name in lacking if name.startswith("vllm.")]
    changes = [Change(name, "is not there") for name in lacking]
    assert unexpected("vllm", oldest, changes) == []
    [text] = unexpected("vllm", oldest, changes[1:])
    assert text.startswith(lacking[0])
    assert "differences.toml says that it is not" in text
    texts = unexpected("vllm", newest, changes)
    assert sum("is not there" in text for text in texts) == len(changes)


def test_new_methods_of_classes_that_ours_extend_are_named(tmp_path):
    module = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
    for name, method in (("old", "shutdown"), ("new", "suspend")):
        path = tmp_path / name / module
        path.parent.mkdir(parents=True)
        path.write_text(f"class KVConnectorBase_V1:\n    def {method}(self): ...\n")
    [name] = new_methods("vllm", tmp_path / "old", tmp_path / "new")
    assert name.endswith("KVConnectorBase_V1.suspend")


def test_the_page_has_every_difference_as_it_is_declared():
    page = (ROOT / "docs" / "results" / "contract.md").read_text()
    assert rows(report({})) == rows(page), "make contract ARGS='--report docs/results/contract.md'"


def rows(page):
    """What a page says of each name, but for the file that uses it, which may change any day."""
    table = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    return {(cells[0], cells[1], cells[-1]) for cells in table}
