"""The files of images, stack and monitoring agree with each other and with the settings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lmcache_xpu import __version__, versions
from lmcache_xpu.launch.settings import ENV_PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()
COMPOSE = (ROOT / "compose.yaml").read_text()
SERVICES = yaml.safe_load(COMPOSE)["services"]
EXAMPLE = (ROOT / ".env.example").read_text()
ENGINES = {"engine-xpu", "engine-xpu-2", "engine-cpu", "engine-cpu-2"}


@pytest.mark.parametrize("file", ["docker/Dockerfile", "tests/containers/standins.Dockerfile"])
def test_hadolint_has_nothing_to_say(file):
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([program, ROOT / file], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_each_variable_of_the_stack_is_in_the_example_with_its_default():
    used = dict(re.findall(r"\$\{([A-Z_0-9]+):-([^}]*)\}", COMPOSE))
    assert set(re.findall(r"\$\{([A-Z_0-9]+)", COMPOSE)) == set(used)
    shown = dict(re.findall(r"^#?([A-Z_0-9]+)=(.*)$", EXAMPLE, re.MULTILINE))
    assert set(used) <= set(shown)
    # A directory has a volume's name as its default, which the text says.
    named = {name for name in used if name.endswith(("_DIR", "_DIR_2"))}
    others = {n: d for n, d in used.items() if d and n not in named and n not in MEANT}
    assert {n: shown[n] for n in others} == others


MEANT = {"LMCACHE_XPU_CPU_GIB"}  # a setting of its own in the example


def test_each_setting_in_the_example_is_one_and_has_its_default():
    fields = Settings.model_fields
    chosen = {"model", "cpu_gib", "disk_gib", "drain_s"}  # the stack's or the example's own
    shown = re.findall(rf"^(#?){ENV_PREFIX}([A-Z_0-9]+)=(.*)$", EXAMPLE, re.MULTILINE)
    for commented, name, value in shown:
        field = fields[name.lower()]
        if commented and value and name.lower() not in chosen | {"remote_url"}:
            assert str(field.default).lower() == value, name
    # What an operator decides is there; all settings are in `serve --help`.
    assert {"model", "cpu_gib", "layerwise", "chunk_tokens", "api_key", "tensor_parallel"} <= {
        name.lower() for _, name, _ in shown
    }


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_service_has_rights_or_reaches_beyond_loopback(name):
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert not service.keys() & {"privileged", "cap_add", "ipc", "pid", "network_mode"}
    for port in service.get("ports", ()):
        assert re.match(r"\$\{(API|MONITORING)_ADDRESS:-127\.0\.0\.1\}:", port)


def test_engines_differ_in_their_device_alone():
    """What was run on CPU is what will run on Intel GPUs, but for these lines."""
    gpu = {"devices", "group_add", "ulimits"}
    for suffix in ("", "-2"):
        xpu, cpu = SERVICES[f"engine-xpu{suffix}"], SERVICES[f"engine-cpu{suffix}"]
        assert xpu.keys() - cpu.keys() == gpu
        assert not cpu.keys() - xpu.keys()
        same = cpu.keys() - {"profiles", "image", "build", "environment", "volumes"}
        assert {k: xpu[k] for k in same} == {k: cpu[k] for k in same}
        assert xpu["environment"].keys() - cpu["environment"].keys() == {"ZE_AFFINITY_MASK"}
        assert set(xpu["volumes"]) - set(cpu["volumes"]) == {"/dev/dri/by-path:/dev/dri/by-path:ro"}


def test_two_engines_share_no_gpu_and_no_disk_tier():
    one, two = SERVICES["engine-xpu"], SERVICES["engine-xpu-2"]
    assert one["environment"]["ZE_AFFINITY_MASK"] != two["environment"]["ZE_AFFINITY_MASK"]
    mounts = [{v for v in s["volumes"] if "/var/cache/kv" in v} for s in (one, two)]
    assert not mounts[0] & mounts[1]


def test_metrics_are_in_memory_and_docker_waits_longer_than_the_engine():
    for name in ENGINES:
        service = SERVICES[name]
        where = service["environment"]["PROMETHEUS_MULTIPROC_DIR"]
        assert any(where.startswith(mount.partition(":")[0] + "/") for mount in service["tmpfs"])
    drain_s = int(re.search(r"LMCACHE_XPU_DRAIN_S:-(\d+)", COMPOSE)[1])
    assert int(re.search(r"STOP_GRACE:-(\d+)s", COMPOSE)[1]) > drain_s + 10


def test_versions_are_those_of_the_package():
    bootstrap = (ROOT / "scripts/bootstrap.py").read_text()
    assert f'UV = "uv=={re.search(r"UV_VERSION=(.*)", DOCKERFILE)[1]}"' in bootstrap
    bake = (ROOT / "docker-bake.hcl").read_text()
    for text in (DOCKERFILE, COMPOSE, EXAMPLE, bake):
        for found in re.findall(r"vllm-openai-xpu:v([\d.]+)", text):
            assert found in versions.TESTED["vllm"]
    assert re.search(r"ARG VLLM_VERSION=(.*)", DOCKERFILE)[1] in versions.TESTED["vllm"]
    for text in (COMPOSE, EXAMPLE, bake):
        assert set(re.findall(r"lmcache-xpu/\w+:([\d.]+)", text)) <= {__version__}
    assert f'"{__version__}"' in bake


def test_bake_builds_what_the_dockerfile_and_the_stack_have():
    bake = (ROOT / "docker-bake.hcl").read_text()
    targets = set(re.findall(r'^target "([a-z-]+)"', bake, re.MULTILINE))
    assert targets == {"wheel", "xpu", "xpu-ubuntu", "xpu-legacy", "cpu", "loadtest", "router"}
    stages = set(re.findall(r"^FROM .* AS ([a-z-]+)$", DOCKERFILE, re.MULTILINE))
    assert set(re.findall(r'target += "([a-z]+)"', bake)) <= stages
    built = {s["build"]["target"] for s in SERVICES.values() if "build" in s}
    assert built <= set(re.findall(r'target += "([a-z]+)"', bake))


def stage(name):
    """The lines of one stage of the Dockerfile."""
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    [text] = [part for part in stages if f" AS {name}\n" in part]
    return text


def test_every_image_with_an_engine_checks_itself_last():
    for name in ("cpu", "xpu"):
        steps = re.findall(r"^RUN (?:.*\\\n)*.*$", stage(name), re.MULTILINE)
        assert "lmcache-xpu doctor --build" in steps[-1]


def test_bases_of_others_are_taken_as_they_are():
    """None of these has ensurepip, and not each has its Python in the same place."""
    for name in ("ubuntu-vllm", "xpu-install", "xpu"):
        assert "-m venv" not in stage(name)
    for name in ("xpu-install", "xpu"):
        assert "/opt/venv" not in stage(name)


def test_panels_use_names_that_exist_and_one_way_to_choose_engines():
    dashboard = json.loads((ROOT / "monitoring/dashboards/lmcache-xpu.json").read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(target)))
            assert used <= names, panel["title"]
            assert "hw_" in target["expr"] or 'instance=~"$instance"' in target["expr"]
        if panel["type"] != "row":
            assert panel["description"]


def test_every_alert_says_what_and_what_to_do():
    rules = yaml.safe_load((ROOT / "monitoring/alerts.yaml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}
