"""What Compose makes of its files: the stack for Intel GPUs, too, which can not run here."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from docker_host import ROOT


def render(host, *profiles: str, files: str = "compose.yaml", **environment: str) -> dict:
    options = [option for profile in profiles for option in ("--profile", profile)]
    options += [option for file in files.split(":") for option in ("-f", str(ROOT / file))]
    done = host.run(
        *("compose", "--env-file", str(ROOT / ".env.example")),
        *(*options, "config", "--format", "json"),
        env={"COMPOSE_PROFILES": "", **environment},
    )
    return json.loads(done.stdout)


def test_the_example_is_one_engine_on_an_intel_gpu(host):
    services = render(host, "xpu")["services"]
    assert set(services) == {"engine-xpu"}
    engine = services["engine-xpu"]
    [device] = engine["devices"]
    assert "/dev/dri" in str(device)
    assert engine["group_add"] == ["992", "44"]
    assert engine["ulimits"] == {"memlock": -1}
    assert engine["stop_grace_period"] == "1m0s"
    assert engine["build"]["args"] == {
        "BASE_IMAGE": "debian:bookworm-slim",
        "UBUNTU_IMAGE": "ubuntu:24.04",
        "XPU_IMAGE": "vllm/vllm-openai-xpu:v0.32.0",
        "LMCACHE_VERSION": "",
        "TORCH_BACKEND": "cpu",
    }
    [port] = engine["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", "8000", 8000)
    assert engine["environment"] | {"LMCACHE_XPU_DISK_GIB": "50"} == engine["environment"]
    targets = {volume["target"]: volume["type"] for volume in engine["volumes"]}
    assert targets == {
        "/cache": "volume",
        "/dev/dri/by-path": "bind",
        "/models": "volume",
        "/shm": "volume",
        "/var/cache/kv": "volume",
    }


def test_engines_of_several_gpus_keep_all_but_one_right_from_their_containers(host):
    page = (ROOT / "docs/guides/several-cards.md").read_text()
    [files] = set(re.findall(r"`COMPOSE_FILE=(\S+)`", page))
    plain, laid_over = render(host, "*")["services"], render(host, "*", files=files)["services"]
    assert not any("cap_add" in service for service in plain.values())
    for name in ("engine-xpu", "engine-xpu-2"):
        assert laid_over[name].pop("cap_add") == ["SYS_PTRACE"]
    assert laid_over == plain


def test_no_image_of_this_project_is_pulled(host):
    """Nobody of this project has its names on Docker Hub."""
    for service in render(host, "*")["services"].values():
        assert service.get("pull_policy") == ("build" if "build" in service else None)


def test_a_key_in_single_quotes_is_the_same_for_the_router_and_its_engines(host, tmp_path):
    key = """a$b #c"d\\e,-f${HOME}"""
    (tmp_path / ".env").write_text(f"LMCACHE_XPU_MODEL=m\nLMCACHE_XPU_API_KEY='{key}'\n")
    (tmp_path / "compose.yaml").write_text((ROOT / "compose.yaml").read_text())
    done = host.run(
        *("compose", "--profile", "router", "--profile", "cpu", "config", "--format", "json"),
        cwd=tmp_path,
    )
    services = json.loads(done.stdout)["services"]
    written = key.replace("$", "$$")  # as a Compose file has it
    assert services["router"]["environment"]["API_KEY"] == written
    assert services["engine-cpu"]["environment"]["LMCACHE_XPU_API_KEY"] == written


@pytest.mark.parametrize(
    ("profiles", "services"),
    [
        (("cpu",), {"engine-cpu"}),
        (("xpu", "monitoring"), {"engine-xpu", "prometheus", "grafana"}),
        (("xpu", "xpu-2", "router"), {"engine-xpu", "engine-xpu-2", "router"}),
        (("cpu", "cpu-2", "shared-cache"), {"engine-cpu", "engine-cpu-2", "valkey"}),
        (("cpu", "cpu-2", "cpu-server"), {"engine-cpu", "engine-cpu-2", "server-cpu"}),
        (("xpu", "xpu-server"), {"engine-xpu", "server-xpu"}),
        (("loadtest",), {"loadtest"}),
    ],
)
def test_profiles_bring_their_services(host, profiles, services):
    assert set(render(host, *profiles)["services"]) == services


@pytest.mark.parametrize(
    ("gib", "path"), [("", ""), ("0", "/var/cache/kv"), ("50", "/var/cache/kv")]
)
def test_a_disk_tier_has_a_size(host, gib, path):
    """Of 0 GiB it has a directory, and the engine knows that there is no tier."""
    environment = render(host, "cpu", LMCACHE_XPU_DISK_GIB=gib)["services"]["engine-cpu"][
        "environment"
    ]
    disk = [environment[f"LMCACHE_XPU_DISK_{name}"] for name in ("GIB", "PATH")]
    assert disk == [gib, path]


def test_engines_of_a_server_have_its_dev_shm_and_no_disk_tier(host):
    services = render(
        host,
        *("cpu", "cpu-2", "cpu-server"),
        LMCACHE_XPU_CACHE="server",
        LMCACHE_XPU_SERVER_URL="ipc:///dev/shm/lmcache-xpu/server.sock",
        LMCACHE_XPU_DISK_GIB="",
        SERVER_DISK_GIB="9",
    )["services"]
    for name, service in services.items():
        [shared] = [v for v in service["volumes"] if v["source"] == "shared-memory"]
        assert (shared["target"], shared["volume"]["nocopy"]) == ("/dev/shm", True), name
    for name in ("engine-cpu", "engine-cpu-2"):
        assert services[name]["environment"]["LMCACHE_XPU_DISK_PATH"] == ""
    assert services["server-cpu"]["environment"]["CACHE_DISK_GIB"] == "9"


def test_two_engines_get_a_gpu_each(host):
    services = render(host, "xpu", "xpu-2", GPUS="0")["services"]
    masks = [services[name]["environment"]["ZE_AFFINITY_MASK"] for name in sorted(services)]
    assert masks == ["0", "1"]


NAMES = re.findall(r'^target "([a-z].*)"', (ROOT / "docker-bake.hcl").read_text(), re.MULTILINE)
FILES = ("compose.yaml", "docker-bake.hcl", "docker/no-secret")


@pytest.fixture
def bake(host, tmp_path):
    """Return the targets that bake would build, by what stands in `.env` and the environment."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())

    def run(text: str = "", *names: str, **environment: str) -> dict:
        (tmp_path / ".env").write_text(text)
        asked = ("buildx", "bake", "--print", *(names or NAMES))
        done = host.run(*asked, env=environment, cwd=tmp_path, stderr=subprocess.PIPE)
        return json.loads(done.stdout)["target"]

    return run


def secrets_of(target: dict) -> dict[str, str]:
    """Id and file of each secret: buildx wrote them as one text until 0.15."""
    pairs = [
        dict(part.split("=") for part in secret.split(",")) if isinstance(secret, str) else secret
        for secret in target["secret"]
    ]
    return {pair["id"]: pair["src"] for pair in pairs}


def test_bake_names_every_image_without_a_setting(bake):
    targets = bake()
    assert targets.keys() == set(NAMES)
    for target in targets.values():
        assert target["args"]["BASE_IMAGE"] == "debian:bookworm-slim"
        assert secrets_of(target) == dict.fromkeys(("uv", "pip", "apt"), "docker/no-secret")
    assert not targets["wheel"].get("tags")
    assert targets["xpu-ubuntu"]["args"]["XPU_IMAGE"] == "ubuntu-vllm"


def test_bases_and_secrets_of_the_settings_reach_every_target(bake, tmp_path):
    bases = {"BASE_IMAGE": "mirror/debian:12", "UBUNTU_IMAGE": "mirror/ubuntu:24.04"}
    files = {"uv": "uv.toml", "pip": "pip.conf", "apt": "apt.sources"}
    for name in files.values():
        (tmp_path / name).touch()
    lines = [f"{name}={value}" for name, value in bases.items()]
    lines += ["XPU_IMAGE=mirror/xpu:1", "UV_TOML=./uv.toml", "PIP_CONF=./pip.conf"]
    targets = bake("\n".join([*lines, "APT_SOURCES=./apt.sources\n"]))
    for name, target in targets.items():
        assert target["args"].items() >= bases.items(), name
        assert secrets_of(target) == files, name
    for name in ("xpu", "cpu", "wheel"):
        assert targets[name]["args"]["XPU_IMAGE"] == "mirror/xpu:1"


def test_bake_takes_versions_and_the_registry_from_the_environment(bake):
    named = {"VLLM_VERSION": "0.1.2", "LMCACHE_VERSION": "9", "REGISTRY": "r.example"}
    targets = bake("VLLM_VERSION=0.0.0\n", "xpu", "router", **named)
    assert targets["xpu"]["args"]["XPU_IMAGE"] == "vllm/vllm-openai-xpu:v0.1.2"
    assert targets["xpu"]["args"]["LMCACHE_VERSION"] == "9"
    assert targets["xpu"]["tags"] == ["r.example/xpu:0.1.0-vllm-0.1.2-lmcache-9"]
    assert targets["router"]["tags"] == ["r.example/router:0.1.0"]
