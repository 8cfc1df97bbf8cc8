"""Where the variants run: engines started here, containers, or servers that are there already."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import httpx
import yaml

from lmcache_xpu.errors import EngineError
from lmcache_xpu.harness.engine_process import EngineProcess, free_port
from lmcache_xpu.harness.random_model import DEMO, make_model
from lmcache_xpu.launch.settings import variables
from loadtests.variants import Profile, Variant, settings_of

__all__ = ["Compose", "LocalEngines", "Servers", "Urls"]

# vLLM keeps one core from its worker, and with a KV connector another one unless none were left:
# engines with and without would compute on different numbers of cores.
RESERVED_CORES = ("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
WRITTEN_S = 3.0  # the disk tier writes on after an answer
START_S = 1800.0  # a large model on a card


class Servers(Protocol):
    """A place where a variant can run."""

    def running(self, variant: Variant) -> AbstractContextManager[str]:
        """Its address, while it runs. A disk tier keeps its files from one time to the next."""


class LocalEngines:
    """Engines on this machine's CPU, one at a time, with the demo's model.

    Args:
        profile: how small they are.
        work: for the model, the logs and the disk tier.
        disk: of this comparison alone.
    """

    def __init__(self, profile: Profile, *, work: Path, disk: Path) -> None:
        os.environ.update([RESERVED_CORES])
        self._profile, self._work, self._disk = profile, work, disk
        self._model = make_model(DEMO, work / "models")

    @contextmanager
    def running(self, variant: Variant) -> Iterator[str]:
        """Start an engine, and stop it in the end."""
        settings = settings_of(
            variant, self._profile, model=self._model, disk=self._disk, port=free_port()
        )
        with EngineProcess(settings, self._work / f"loadtest-{variant.name}.log") as engine:
            yield engine.url
            if variant.restarted:
                time.sleep(WRITTEN_S)


class Urls:
    """Servers that somebody else has started, by the variant's name."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._urls = urls

    @contextmanager
    def running(self, variant: Variant) -> Iterator[str]:
        """The address; nothing is started, and nothing restarted."""
        yield self._urls[variant.name]


class Compose:
    """A service of a compose file, made anew for each variant.

    Args:
        file: compose.yaml.
        service: the engine's service; its settings are LMCACHE_XPU_* in its environment.
        url: where it answers on this machine.
        work: for the file that overrides the environment.
    """

    def __init__(self, file: Path, *, service: str, url: str, work: Path) -> None:
        self._file, self._service, self._url, self._work = file, service, url, work

    @contextmanager
    def running(self, variant: Variant) -> Iterator[str]:
        """Bring the service up with the variant's settings, and down in the end."""
        override = self._work / f"compose-{variant.name}.yaml"
        override.write_text(yaml.safe_dump(self.override(variant)))
        command = ("docker", "compose", "-f", str(self._file), "-f", str(override))
        try:
            # It waits where the service has a health check, and ends when the service does.
            if subprocess.run([*command, "up", "--detach", "--wait", self._service]).returncode:
                raise EngineError(
                    f"service {self._service} of {self._file} did not start",
                    "a service that answers",
                    f"`docker compose logs {self._service}` has the cause.",
                )
            _wait(self._url)
            yield self._url
        finally:  # volumes stay: the disk tier is to be found again
            subprocess.run([*command, "rm", "--stop", "--force", self._service], check=False)

    def override(self, variant: Variant) -> dict[str, object]:
        """The part of a compose file that makes a service a variant."""
        values = dict(variant.settings)
        if "disk_path" in values:  # whole tiers go, not half of their settings
            values["disk_gib"] = values["disk_path"]
        environment = {**variables(values), **dict([RESERVED_CORES])}
        return {"services": {self._service: {"environment": environment}}}


def _wait(url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)
    raise EngineError(
        f"no answer from {url}/health for {START_S:.0f} s",
        "a server that answers",
        "`docker compose logs` has the cause.",
    )
