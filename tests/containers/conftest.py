"""The images, built once, and the stack on them."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from docker_host import DockerHost
from stack import IMAGES, Stack, tag

from lmcache_xpu.harness.random_model import EXACT, make_model

SKIP = "SKIP_CONTAINERS"
LONGEST_S = 1500  # the first test waits for the builds


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.timeout(LONGEST_S))
        if os.environ.get(SKIP):
            item.add_marker(pytest.mark.skip(reason=f"{SKIP} is set"))


@pytest.fixture(scope="session")
def host():
    with DockerHost() as host:
        yield host


@pytest.fixture(scope="session")
def images(host):
    """All images that can be built here, and the stand-ins for those that can't be pulled."""
    begin = time.monotonic()
    backend = ["--build-arg", "TORCH_BACKEND="] if host.has_torch else []
    with ThreadPoolExecutor() as pool:  # what one downloads or exports, another one compiles
        builds = [
            pool.submit(host.build, tag("cpu"), "cpu", *backend),
            pool.submit(host.build, tag("router"), "router"),
            pool.submit(host.build, tag("loadtest"), "loadtest"),
            *(
                pool.submit(
                    host.build, tag(name), name, file="tests/containers/standins.Dockerfile"
                )
                for name in ("prometheus", "valkey", "grafana")
            ),
        ]
    for build in builds:
        build.result()
    print(f"images built in {time.monotonic() - begin:.0f} s")
    return {name: tag(name) for name in IMAGES.values()}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A small model whose answers are the same with and without a cache."""
    parent = tmp_path_factory.mktemp("models")
    for folder in (parent, *parent.parents[:2]):
        folder.chmod(0o755)  # pytest's are for their owner alone
    return make_model(EXACT, parent)


@pytest.fixture(scope="module")
def make_stack(host, images, model, tmp_path_factory):
    stacks = []

    def make(**settings: str) -> Stack:
        folder = Path(tmp_path_factory.mktemp("stack")) / "project"
        stacks.append(Stack(host, folder, model, **settings))
        return stacks[-1]

    yield make
    for stack in stacks:
        stack.down()
