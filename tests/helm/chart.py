"""Render the chart with the real helm, and find objects in what it makes."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from lmcache_xpu.launch.fields import ENV_PREFIX
from lmcache_xpu.launch.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "lmcache-xpu"
CI_FILES = sorted((CHART / "ci").glob("*-values.yaml"))
HELM = Path(sys.executable).with_name("helm")
NAMESPACE = "serving"
sys.path.insert(0, str(ROOT / "helm"))  # chart_schema and chart_readme

# The smallest values that install.
REGISTRY = "registry.example.com/lmcache-xpu"
MODEL = {
    "image": {"registry": REGISTRY},
    "models": {"m": {"settings": {"model": "org/model"}, "gpu": {"renderGroups": [992]}}},
}

# The values.yaml of earlier charts and, by the version alone, of this one.
FROZEN = sorted((Path(__file__).parent / "frozen").glob("*.yaml"))
# What this chart does not take from them.
GONE = (("loadtest",), ("defaults", "router", "autoscaling"))

# Values that switch something on.
SECRET = {"name": "s", "key": "k"}
KEDA = {"kind": "keda", "prometheusUrl": "http://p:9090"}
VALKEY = {"enabled": True, "passwordSecret": SECRET}
ROUTER = {"kind": "vllmRouter"}
POOL = {"kind": "inferencePool", "endpointPicker": {"name": "epp"}}
ROUTE = {"enabled": True, "parentRefs": [{"name": "gateway"}]}


def helm(*args: str, values: Mapping | None = None) -> subprocess.CompletedProcess[str]:
    """Run helm; `values` go in as a values file."""
    from_stdin = ["-f", "-"] if values is not None else []
    return subprocess.run(
        [str(HELM), *args, *from_stdin],
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent"},
    )


def template(*args: str, values: Mapping | None = None) -> subprocess.CompletedProcess[str]:
    return helm("template", "kv", str(CHART), "-n", NAMESPACE, *args, values=values)


class Objects(list):
    """Rendered objects."""

    def of(self, kind: str) -> list[dict]:
        return [item for item in self if item["kind"] == kind]

    def one(self, kind: str, name: str | None = None) -> dict:
        matching = [o for o in self.of(kind) if name in (None, o["metadata"]["name"])]
        assert len(matching) == 1, f"{len(matching)} of {kind} {name or ''}, 1 expected"
        return matching[0]

    def pods(self) -> list[tuple[str, dict]]:
        """Every pod that the objects make: where it is from, and its spec."""
        pods = []
        for item in self:
            spec = item["spec"] if item["kind"] == "Pod" else {}
            if item["kind"] in ("Deployment", "StatefulSet") or item["kind"] == "Job":
                spec = item["spec"]["template"]["spec"]
            if spec:
                pods.append((f"{item['kind']}/{item['metadata']['name']}", spec))
        return pods

    def engines(self) -> dict[str, dict]:
        """The workloads that run engines, by model."""
        label = "app.kubernetes.io/component"
        return {
            item["metadata"]["labels"]["lmcache-xpu/model"]: item
            for item in [*self.of("Deployment"), *self.of("StatefulSet")]
            if item["metadata"]["labels"].get(label) == "engine"
        }


def without(values: Mapping, path: tuple[str, ...]) -> dict:
    """The values but for the one at this path."""
    key, *rest = path
    if not rest or key not in values:
        return {name: value for name, value in values.items() if name != key}
    return {**values, key: without(values[key], tuple(rest))}


def earlier_values(path: Path) -> dict:
    """The values of an earlier chart, but for those that are gone."""
    return functools.reduce(without, GONE, yaml.safe_load(path.read_text()))


def merged(base: Mapping, change: Mapping) -> dict:
    """As helm merges values files."""
    both = {
        key: merged(base[key], value)
        for key, value in change.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **change, **both}


def render(*args: str, **values: object) -> Objects:
    """The objects of the smallest release with these values merged in."""
    return rendered(template(*args, values=merged(MODEL, values)))


def render_file(path: Path) -> Objects:
    return rendered(template("-f", str(path)))


@functools.cache
def shapes() -> dict[str, Objects]:
    """Every file of ci/, rendered; not to be changed."""
    return {path.name.removesuffix("-values.yaml"): render_file(path) for path in CI_FILES}


def rendered(done: subprocess.CompletedProcess[str]) -> Objects:
    assert done.returncode == 0, done.stderr
    return Objects(item for item in yaml.safe_load_all(done.stdout) if item)


def model(**keys: object) -> Objects:
    """Rendered with these keys for the one model."""
    return render(models={"m": keys})


def engine_pod(objects: Objects) -> dict:
    """The spec of the pod of the one model's engine."""
    return objects.engines()["m"]["spec"]["template"]["spec"]


def volume(objects: Objects, name: str) -> dict:
    """A volume of that pod; empty where it has none of this name."""
    return next((v for v in engine_pod(objects)["volumes"] if v["name"] == name), {})


def container(workload: dict, name: str = "engine") -> dict:
    spec = workload["spec"]["template"]["spec"]
    [container_spec] = [c for c in spec["containers"] if c["name"] == name]
    return container_spec


def environment(workload: dict) -> dict[str, str]:
    """The variables that the engine's container would have; secrets as (secret NAME/KEY)."""
    engine = container(workload)
    variables: dict[str, str] = {}
    for item in engine["env"]:
        if "value" in item:
            variables[item["name"]] = item["value"]
        else:
            secret = item["valueFrom"]["secretKeyRef"]
            variables[item["name"]] = f"(secret {secret['name']}/{secret['key']})"
    return variables


def settings(objects: Objects, workload: dict, monkeypatch) -> Settings:
    """The settings that the pod's process would read, by the code that reads them."""
    engine = container(workload)
    assert engine["command"] == ["lmcache-xpu", "serve"], shlex.join(engine["command"])
    [model_name] = engine["args"]
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in environment(workload).items():
        monkeypatch.setenv(name, value)
    return Settings.load({"model": model_name})
