"""The compose stack of the tests: a copy of the files, settings of its own, and ways to ask it."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import httpx
from docker_host import ROOT, DockerHost

from lmcache_xpu.harness.client import Answer, Client
from lmcache_xpu.harness.engine_process import free_port

PROJECT = "lmcache-xpu-test"
FILES = ("compose.yaml", "docker", "monitoring")
IMAGES = {
    "CPU_TAG": "cpu",
    "ROUTER_TAG": "router",
    "LOADTEST_TAG": "loadtest",
    "PROMETHEUS_IMAGE": "prometheus",
    "VALKEY_IMAGE": "valkey",
    "GRAFANA_IMAGE": "grafana",
}


def tag(name: str) -> str:
    return f"lmcache-xpu-test/{name}"


class Stack:
    """A project directory with compose.yaml and .env, and what runs from it."""

    def __init__(self, host: DockerHost, folder: Path, model: Path, **settings: str) -> None:
        self.host = host
        self.folder = folder
        folder.mkdir()
        for name in FILES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        self.ports = {
            name: free_port()
            for name in (
                *("API_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT", "ROUTER_PORT"),
                "LOADTEST_PORT",
            )
        }
        self.settings = {
            "COMPOSE_PROJECT_NAME": PROJECT,
            "HF_HUB_OFFLINE": "1",
            "LMCACHE_XPU_MODEL": f"/models/{model.name}",
            "LMCACHE_XPU_SERVED_MODEL_NAME": "exact",
            "LMCACHE_XPU_DTYPE": "float32",
            "LMCACHE_XPU_MAX_MODEL_LEN": "4096",
            # Room for one and a half of the longest prompts: what is asked again is in the tiers.
            "LMCACHE_XPU_KV_CACHE_GIB": "0.024",
            "LMCACHE_XPU_CPU_GIB": "0.5",
            "LMCACHE_XPU_DISK_GIB": "1",
            "MODELS_DIR": str(model.parent),
            "SHM_SIZE": "1gb",
            "PULL_POLICY": "never",  # conftest.py has built them, with this machine's indexes
            **{variable: tag(name) for variable, name in IMAGES.items()},
            **{name: str(port) for name, port in self.ports.items()},
            **settings,
        }
        lines = [f"{name}={value}\n" for name, value in self.settings.items()]
        (folder / ".env").write_text("".join(lines))

    def up(self, *profiles: str, check: bool = True, **env: str):
        """`docker/up PROFILES`, as `make up` and `make up-cpu` do."""
        import subprocess

        done = subprocess.run(
            [str(self.folder / "docker/up"), *profiles],
            env={**self.host.env, "WAIT_S": "240", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert not (check and done.returncode), done.stdout[-6000:]
        return done

    def compose(self, *args: str, check: bool = True, timeout: float = 240):
        every = ("compose", "--project-directory", str(self.folder), "--profile", "*")
        return self.host.run(*every, *args, check=check, timeout=timeout, cwd=self.folder)

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "20", check=False)

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-log-prefix", service).stdout

    def inspect(self, service: str) -> dict:
        [container] = json.loads(self.host.run("inspect", f"{PROJECT}-{service}-1").stdout)
        return container

    def address(self, service: str, port: int = 8000) -> str:
        """Where a service that publishes nothing can be reached from this machine."""
        [network] = self.inspect(service)["NetworkSettings"]["Networks"].values()
        return f"http://{network['IPAddress']}:{port}"

    def wait_healthy(self, service: str, seconds: float = 200) -> None:
        end = time.monotonic() + seconds
        while self.inspect(service)["State"]["Health"]["Status"] != "healthy":
            assert time.monotonic() < end, self.logs(service)[-4000:]
            time.sleep(0.5)

    def url(self, port: str = "API_PORT") -> str:
        """Where a published port answers."""
        return f"http://127.0.0.1:{self.ports[port]}"

    def client(self, url: str | None = None) -> Client:
        key = self.settings.get("LMCACHE_XPU_API_KEY")
        return Client(url or self.url(), api_key=key, timeout_s=120)

    def samples(self, text: str, url: str | None = None) -> dict[str, float]:
        """Samples on /metrics whose line begins with `text`."""
        url = url or self.url()
        lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
        samples = (line.rpartition(" ") for line in lines if line.startswith(text))
        return {name: float(value) for name, _, value in samples}

    def query(self, expression: str) -> list:
        """What Prometheus answers now."""
        answer = httpx.get(
            f"{self.url('PROMETHEUS_PORT')}/api/v1/query",
            params={"query": expression},
            trust_env=False,
        ).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return answer["data"]["result"]


def words(seed: int, count: int = 250) -> str:
    """A text of its own for each seed; about eight tokens a word here."""
    return " ".join(str((seed * 7919 + i * 104729) % 99991) for i in range(count))


def conversation(seed: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": words(seed)}]


def ask(client: Client, messages: list[dict[str, str]], tokens: int = 24) -> Answer:
    return client.chat(messages, max_tokens=tokens)


def crowd_out(client: Client, first_seed: int) -> None:
    """Fill the engine's own cache with other prompts."""
    for seed in range(first_seed, first_seed + 8):
        ask(client, conversation(seed), tokens=2)
