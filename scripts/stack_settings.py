"""The part of docs/reference/settings.md about what .env sets beside the engine's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator

from environment import ROOT
from markdown_table import rows

# ${NAME:-default}, whose default may have a variable too.
VARIABLE = re.compile(r"\$\{([A-Z_0-9]+)(?::?[-+]((?:[^${}]|\$\{[^}]*\})*))?\}")
DIRECTORY = "absolute or starting with ./; default: a volume"
CHAPTERS = {
    "What runs": {
        "COMPOSE_PROFILES": "Profiles: `xpu` or `cpu`; with it `monitoring`, `alerts`, `loadtest`,"
        " `shared-cache`, `xpu-server` or `cpu-server`, or `router` with `xpu-2` or `cpu-2`",
        "HF_TOKEN": "Token for models of the hub that need one",
        "MODELS_DIR": f"Directory of models, which `/models/NAME` is in, {DIRECTORY}",
        "STOP_GRACE": "How long Docker waits before it kills; has to be longer than"
        " `LMCACHE_XPU_DRAIN_S`, which is 30 in the stack",
        "SHM_SIZE": "Shared memory of the engine's processes. Where LMCache's server runs in the"
        " engine's container: twice the CPU tiers of all its GPUs",
    },
    "GPUs": {
        "RENDER_GID": "Group of `/dev/dri/renderD*`; `make up` finds the first one's",
        "VIDEO_GID": "Group of `/dev/dri/card*`",
        "GPUS": "GPUs of the engine, by number: `0` or `0,1` (`ZE_AFFINITY_MASK`); default: all",
        "GPUS_2": "GPUs of the second engine; then set `GPUS` as well",
        "COMPOSE_FILE": "`compose.yaml:docker/several-cards.yaml` gives an engine of several GPUs"
        " [the right that oneCCL needs](../guides/several-cards.md#the-right-that-oneccl-needs)",
    },
    "Tiers": {
        "KV_DIR": f"Directory of the disk tier, writable for user 10001, {DIRECTORY}",
        "KV_DIR_2": "The same of the second engine; each needs its own",
        "SHARED_CACHE_MB": "Memory of the shared tier's server (profile `shared-cache`), MB",
        "SERVER_GIB": "Memory that LMCache's server lends to all engines, GiB",
        "SERVER_SHM_SIZE": "Shared memory of server and engines: twice `SERVER_GIB`, and some more",
        "SERVER_DISK_GIB": "Disk tier of LMCache's server, GiB; default: none",
        "SERVER_DIR": f"Its directory, {DIRECTORY}",
    },
    "Addresses and ports": {
        "API_ADDRESS": "Address of this machine that API and router listen on",
        "API_PORT": "Port of the engine",
        "ROUTER_PORT": "Port of the router",
        "ROUTER_POLICY": "`cache_aware`, `round_robin`, `consistent_hash`, ... of vllm-router",
        "MONITORING_ADDRESS": "Address that the web pages listen on",
        "PROMETHEUS_PORT": "Port of Prometheus",
        "PROMETHEUS_RETENTION": "How long Prometheus keeps its data",
        "GRAFANA_PORT": "Port of Grafana",
        "ALERTMANAGER_PORT": "Port of Alertmanager",
        "LOADTEST_PORT": "Port of the load test's page",
        "LOADTEST_TARGET": "Where the load test asks: the engine, or `http://router:30000`",
        "REPORTS_DIR": f"Directory of its reports, writable for user 10001, {DIRECTORY}",
    },
    "Images": {
        "PULL_POLICY": "`build`: `make up` builds the images each time, which takes seconds without"
        " changes; `never`: it starts what is here, and pulls nothing; `missing`: those of"
        " a registry of yours",
        "BASE_IMAGE": "What all images of Debian are built on, and the tools of the others",
        "XPU_IMAGE": "What the image `xpu` is built on",
        "VLLM_VERSION": "The version in the name of it",
        "UBUNTU_IMAGE": "What `xpu-ubuntu` is built on",
        "LMCACHE_VERSION": "Another LMCache than the pinned one",
        "TORCH_BACKEND": "PyTorch's own index for the image `cpu`; empty where `UV_TOML` names one",
        "UV_TOML": "Build secret for a"
        " [private mirror](../guides/build-images.md#a-private-mirror): uv's",
        "PIP_CONF": "The same: pip's",
        "APT_SOURCES": "The same: apt's",
        "XPU_TAG": "Name of the image `xpu` in the stack",
        "CPU_TAG": "Name of the image `cpu`",
        "ROUTER_TAG": "Name of the image `router`",
        "LOADTEST_TAG": "Name of the image `loadtest`",
        "VALKEY_IMAGE": "The shared tier's server; Redis serves as well",
        "PROMETHEUS_IMAGE": "Prometheus",
        "GRAFANA_IMAGE": "Grafana",
        "ALERTMANAGER_IMAGE": "Alertmanager",
    },
}


def defaults(compose: str) -> dict[str, str]:
    """The variables of compose.yaml, each with its default; empty where there is none."""
    values: dict[str, str] = {}
    for name, default in VARIABLE.findall(compose):
        values[name] = values.get(name) or default
        values |= dict(VARIABLE.findall(default))
    return values


def shown(name: str, default: str) -> str:
    """A default as a cell of the table."""
    if not default or default == "docker/no-secret" or name.endswith(("_DIR", "_DIR_2")):
        return "unset"
    return "`" + re.sub(r"\$\{\w+:-(.*?)\}", r"\1", default) + "`"


def chapters() -> Iterator[str]:
    """Yield the chapters' lines."""
    values = defaults((ROOT / "compose.yaml").read_text())
    yield from ("## The Compose stack", "")
    yield "`.env` sets these too, and the environment of `make up` before it. `$` and ` #` mean"
    yield "something there: write keys, passwords and tokens in single quotes."
    for name, variables in CHAPTERS.items():
        body = ((f"`{v}`", text, shown(v, values.get(v, ""))) for v, text in variables.items())
        yield from ("", f"### {name}", "", rows(("variable", "what it is", "default"), body))
