"""The stack's compose file and example agree with each other and with the settings."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml
from support.cache_server_program import disk, options
from support.container_files import COMPOSE, DOCKERFILE, EXAMPLE, ROOT, SERVICES

from lmcache_xpu.launch.fields import CPU_KV_CACHE_GIB, ENV_PREFIX
from lmcache_xpu.launch.settings import Settings
from lmcache_xpu.launch.sizing import KVShape

REFERENCE = (ROOT / "docs/reference/settings.md").read_text()
ENGINES = {"engine-xpu", "engine-xpu-2", "engine-cpu", "engine-cpu-2"}


def test_each_variable_of_the_stack_is_in_the_reference():
    """With its default, which the page takes from compose.yaml: tests/test_reference.py."""
    used = set(re.findall(r"\$\{([A-Z_0-9]+)", COMPOSE))
    assert sorted(name for name in used if f"`{name}` |" not in REFERENCE) == []
    told = set(re.findall(r"^\| `([A-Z_0-9]+)` \|", REFERENCE, re.MULTILINE))
    diagnosis = {name for name in told if name.startswith(ENV_PREFIX)}
    assert told - diagnosis == {n for n in used if not n.startswith(ENV_PREFIX)} | {
        "COMPOSE_PROFILES",  # Compose's own
        "COMPOSE_FILE",
    }


LINE = re.compile(r"^(#?)([A-Z_0-9]+)=(.*)$", re.MULTILINE)


def test_the_example_has_the_ten_keys_that_are_set_first_and_says_where_the_rest_is():
    lines = LINE.findall(EXAMPLE)
    assert len(lines) == 10
    assert "docs/reference/settings.md has all of them" in EXAMPLE
    assert [name for _, name, _ in lines if f"`{name}` |" not in REFERENCE] == []


def test_the_settings_of_the_example_are_allowed():
    chosen = {
        name.removeprefix(ENV_PREFIX).lower(): value
        for commented, name, value in LINE.findall(EXAMPLE)
        if name.startswith(ENV_PREFIX) and not commented
    }
    assert len(chosen) == 4
    assert Settings.load({**chosen, "disk_path": "/d"})


def interpolated(text: str, **variables: str) -> str:
    """The text as compose makes it; for `:-` and `:+` a shell has the same rules."""
    script = f'printf %s "{text}"'
    done = subprocess.run(
        ["bash", "-c", script], env=variables, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.mark.parametrize(
    ("line", "disk_gib"),
    [
        ({}, None),
        ({"LMCACHE_XPU_DISK_GIB": ""}, None),
        ({"LMCACHE_XPU_DISK_GIB": "0"}, None),
        ({"LMCACHE_XPU_DISK_GIB": "50"}, 50),
    ],
)
def test_without_a_size_there_is_no_disk_tier(monkeypatch, line, disk_gib):
    """The chart agrees: tests/helm/test_chart_settings.py."""
    for name in ENGINES:
        environment = SERVICES[name]["environment"]
        for variable in ("LMCACHE_XPU_DISK_PATH", "LMCACHE_XPU_DISK_GIB"):
            monkeypatch.setenv(variable, interpolated(environment[variable], **line))
        settings = Settings.load({"model": "org/model"})
        assert (settings.disk_path is None) == (disk_gib is None)
        assert (settings.disk_gib or None) == disk_gib


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_no_service_has_rights_or_reaches_beyond_loopback(name):
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert not service.keys() & {"privileged", "cap_add", "ipc", "pid", "network_mode"}
    for port in service.get("ports", ()):
        assert re.match(r"\$\{(API|MONITORING)_ADDRESS:-127\.0\.0\.1\}:", port)


def test_engines_on_several_gpus_get_one_right_and_nothing_else_does():
    laid_over = yaml.safe_load((ROOT / "docker/several-cards.yaml").read_text())
    engines = {name for name in ENGINES if "xpu" in name}
    assert laid_over == {"services": {name: {"cap_add": ["SYS_PTRACE"]} for name in engines}}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_what_serves_comes_back_after_a_reboot_and_any_number_of_crashes(name):
    """Docker does not start `on-failure` again when it starts itself. A load test may end."""
    expected = "on-failure:3" if name == "loadtest" else "unless-stopped"
    assert SERVICES[name]["restart"] == expected


def test_files_of_this_directory_can_be_read_on_selinux_too():
    """Docker relabels what says so; a directory of the user's is not for the stack to relabel."""
    mounts = [mount for service in SERVICES.values() for mount in service.get("volumes", ())]
    ours = {mount for mount in mounts if mount.startswith("./")}
    assert len(ours) == 5
    assert {mount for mount in mounts if mount.endswith(",z")} == ours


def test_a_start_has_as_long_for_the_health_check_as_for_the_wait():
    wait_s = int(re.search(r"\$\{WAIT_S:-(\d+)\}", (ROOT / "docker/up").read_text())[1])
    periods = re.findall(r"--start-period=(\d+)m", DOCKERFILE)
    assert [60 * int(minutes) for minutes in periods] == [wait_s] * 2
    assert SERVICES["router"]["healthcheck"]["start_period"] == f"{wait_s // 60}m"


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
    first, second = SERVICES["engine-xpu"], SERVICES["engine-xpu-2"]
    assert first["environment"]["ZE_AFFINITY_MASK"] != second["environment"]["ZE_AFFINITY_MASK"]
    mounts = [{v for v in s["volumes"] if "/var/cache/kv" in v} for s in (first, second)]
    assert not mounts[0] & mounts[1]


def test_metrics_are_in_memory_and_docker_waits_longer_than_the_engine():
    for name in ENGINES:
        service = SERVICES[name]
        where = service["environment"]["PROMETHEUS_MULTIPROC_DIR"]
        assert any(where.startswith(mount.partition(":")[0] + "/") for mount in service["tmpfs"])
    drain_s = int(re.search(r"LMCACHE_XPU_DRAIN_S:-(\d+)", COMPOSE)[1])
    assert int(re.search(r"STOP_GRACE:-(\d+)s", COMPOSE)[1]) > drain_s + 10


SERVERS = ("server-xpu", "server-cpu")
ENGINE_SIDE = {"tcp://lmcache:5555": "/dev/shm", "": "/shm"}


@pytest.mark.parametrize("url", ENGINE_SIDE)
def test_engines_map_the_memory_of_lmcaches_server_where_they_use_one(url):
    """It is a volume: that of one container would end, and come back as another, with it."""
    variables = {"LMCACHE_XPU_SERVER_URL": url} if url else {}
    for name in ENGINES:
        [mount] = [each for each in SERVICES[name]["volumes"] if each.startswith("shared-memory:")]
        source, target, option = interpolated(mount, **variables).split(":")
        # What an image has at that path is not for this volume.
        assert (source, target, option) == ("shared-memory", ENGINE_SIDE[url], "nocopy")
    for name in SERVERS:
        assert "shared-memory:/dev/shm:nocopy" in SERVICES[name]["volumes"]
    memory = yaml.safe_load(COMPOSE)["volumes"]["shared-memory"]["driver_opts"]
    assert (memory["type"], memory["device"]) == ("tmpfs", "tmpfs")
    assert "mode=1777" in memory["o"]
    size = re.search(r"SERVER_SHM_SIZE:-(\d+)g", memory["o"])[1]
    assert int(size) >= 2 * int(re.search(r"SERVER_GIB:-(\d+)", COMPOSE)[1])


def test_an_engine_starts_behind_a_server_that_is_there_and_alone_without():
    for name in ENGINES:
        assert SERVICES[name]["depends_on"] == {
            server: {"condition": "service_healthy", "required": False} for server in SERVERS
        }


def test_the_servers_of_the_stack_differ_in_their_image_alone_and_have_no_gpu():
    xpu, cpu = (SERVICES[name] for name in SERVERS)
    same = xpu.keys() - {"profiles", "image", "build"}
    assert {k: xpu[k] for k in same} == {k: cpu[k] for k in same}
    assert not {"devices", "group_add", "ports"} & same
    # `make up-cpu` starts the second where .env names the first.
    assert [each["profiles"] for each in (xpu, cpu)] == [["xpu-server"], ["cpu-server"]]


def test_the_address_in_the_guide_is_the_servers(tmp_path):
    [aliases] = {tuple(SERVICES[name]["networks"]["default"]["aliases"]) for name in SERVERS}
    environ = {
        name: interpolated(value, SERVER_DISK_GIB="7")
        for name, value in SERVICES["server-cpu"]["environment"].items()
    }
    named = options(tmp_path, environ)
    guide = (ROOT / "docs/guides/cache-server.md").read_text()
    assert f"LMCACHE_XPU_SERVER_URL=ipc://{named['socket']}\n" in guide
    host, _, port = named["pages"].partition(":")
    assert host == "0.0.0.0"
    assert disk(named)["adapter_params"]["disk.gib"] == 7
    assert any(v.endswith(":/var/cache/kv") for v in SERVICES["server-cpu"]["volumes"])
    scraped = yaml.safe_load((ROOT / "monitoring/prometheus.yaml").read_text())["scrape_configs"]
    [job] = [each for each in scraped if each["job_name"] == "lmcache-server"]
    [names] = job["dns_sd_configs"]
    assert (names["names"], str(names["port"])) == ([*aliases], port)
    assert f":{names['port']}/healthcheck" in str(SERVICES["server-cpu"]["healthcheck"]["test"])


# Weights in GiB, and what their configurations on the hub say of the KV cache: layers.
MODELS = {"Qwen/Qwen3-1.7B": (3.2, 28), "Qwen/Qwen3-8B": (15.3, 36)}


@pytest.mark.parametrize(("name", "card_gib"), [("Qwen/Qwen3-1.7B", 8), ("Qwen/Qwen3-8B", 24)])
def test_the_models_of_the_example_fit_the_cards_that_it_names(name, card_gib):
    assert f"LMCACHE_XPU_MODEL={name}" in EXAMPLE or f"{card_gib} GiB holds {name}" in EXAMPLE
    weights_gib, layers = MODELS[name]
    assert f"{weights_gib} GiB of weights" in EXAMPLE
    [length] = re.findall(r"^LMCACHE_XPU_MAX_MODEL_LEN=(\d+)$", EXAMPLE, re.MULTILINE)
    shape = KVShape(kind="GQA", layers=layers, width=2 * 8 * 128, dtype="bfloat16")
    kv_gib = int(length) * shape.token_bytes / 2**30
    spare_gib = 1  # for activations
    fraction = Settings.model_fields["memory_fraction"].default
    assert weights_gib + kv_gib + spare_gib < fraction * card_gib
    if f"LMCACHE_XPU_MODEL={name}" in EXAMPLE:
        assert kv_gib < CPU_KV_CACHE_GIB
