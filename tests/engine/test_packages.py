"""vLLM, LMCache and this package serve with the packages that vLLM has for Intel GPUs.

LMCache's own metadata allows none of these versions (test_install.py), so that it works with them
has to be seen: they are laid over the CPU environment, and hits are compared byte by byte.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.installation import pins, uv
from support.real_engine import BLOCK, LENGTHS, cached
from support.scripts import environment, printed, run_probe

from lmcache_xpu import versions
from lmcache_xpu.harness.random_model import EXACT, make_model

pytestmark = pytest.mark.engine

LAID = (
    "grpcio",
    "numpy",
    "opentelemetry-api",
    "opentelemetry-exporter-otlp",
    "opentelemetry-sdk",
    "prometheus-client",
    "protobuf",
)


# Of the vLLM that is installed: its image, and what it brings without that.
BASES = [
    f"vllm-{versions.installed().vllm}",
    pytest.param(f"ubuntu-{versions.installed().vllm}", marks=pytest.mark.matrix),
]


@pytest.fixture(scope="module", params=BASES)
def base(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def overlay(base: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the base's packages, and the exporter of LMCache that fits them."""
    directory = tmp_path_factory.mktemp(base)
    constraints = directory / "constraints.txt"
    constraints.write_text("".join(f"{n}=={v}\n" for n, v in pins(base).items()))
    wanted = (*LAID, "grpcio-status", "opentelemetry-exporter-prometheus")
    target = directory / "packages"
    uv("install", "--target", str(target), "-c", str(constraints), *wanted)
    return target


@pytest.fixture(scope="module")
def served(overlay: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    directory = tmp_path_factory.mktemp("served")
    model = str(make_model(EXACT, directory))
    env = environment(first=[overlay])
    return printed(run_probe("packages", model, directory / "disk", *LAID, env=env))


def test_the_engine_ran_with_the_packages_of_the_base(served: dict, base: str, overlay: Path):
    assert served["versions"] == {name: pins(base)[name] for name in LAID}
    assert all(Path(file).is_relative_to(overlay) for file in served["from"])


@pytest.mark.parametrize("name", LENGTHS)
def test_a_hit_restores_every_byte_and_gives_the_recomputed_tokens(served: dict, name: str):
    hit = served["hits"][name]
    assert len(hit["recompute"]) == 24
    assert hit["answer"] == hit["recompute"]
    assert hit["hit"] == cached(name)
    assert hit["restored"] >= cached(name) // BLOCK
