"""The files of images, stack and monitoring agree with each other and with the settings."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from support.cache_server_program import disk, options

from lmcache_xpu import __version__, versions
from lmcache_xpu.launch.settings import CPU_KV_CACHE_GIB, ENV_PREFIX, Settings
from lmcache_xpu.launch.sizing import KVShape

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
    defaults = {n: d for n, d in used.items() if d and not n.endswith(("_DIR", "_DIR_2"))}
    assert {name: shown[name] for name in defaults} == defaults


STACKS_OWN = {"host", "port", "disk_path"}  # compose.yaml sets these
LINE = re.compile(rf"^(#?){ENV_PREFIX}([A-Z_0-9]+)=(.*)$", re.MULTILINE)


def test_the_example_has_every_setting_of_the_engine_once():
    names = [name.lower() for _, name, _ in LINE.findall(EXAMPLE)]
    assert sorted(names) == sorted(Settings.model_fields.keys() - STACKS_OWN)


def test_the_settings_of_the_example_are_allowed_and_its_comments_show_the_defaults():
    stacks = {"drain_s": "30"}
    needs = {"server_url": {"cache": "server"}}
    for commented, name, value in LINE.findall(EXAMPLE):
        field = name.lower()
        default = Settings.model_fields[field].default
        if commented and default not in (None, ()):
            assert value == stacks.get(field, str(default).lower()), name
        elif commented and value:  # an example; the text names the default
            assert Settings.load({"model": "m", field: value, **needs.get(field, {})})
    chosen = {
        name.lower(): value for commented, name, value in LINE.findall(EXAMPLE) if not commented
    }
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


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_what_serves_comes_back_after_a_reboot_and_any_number_of_crashes(name):
    """Docker does not start `on-failure` again when it starts itself. A load test may end."""
    expected = "on-failure:3" if name == "loadtest" else "unless-stopped"
    assert SERVICES[name]["restart"] == expected


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


def test_versions_are_those_of_the_package():
    environment = (ROOT / "scripts/environment.py").read_text()
    assert f'UV = "uv=={re.search(r"UV_VERSION=(.*)", DOCKERFILE)[1]}"' in environment
    bake = (ROOT / "docker-bake.hcl").read_text()
    for text in (DOCKERFILE, COMPOSE, EXAMPLE, bake):
        for version in re.findall(r"vllm-openai-xpu:v([\d.]+)", text):
            assert version in versions.TESTED["vllm"]
    assert re.search(r"ARG VLLM_VERSION=(.*)", DOCKERFILE)[1] in versions.TESTED["vllm"]
    for text in (COMPOSE, EXAMPLE, bake):
        assert set(re.findall(r"lmcache-xpu/\w+:([\d.]+)", text)) <= {__version__}
    assert f'"{__version__}"' in bake
    assert set(re.findall(r'VLLM_VERSION.*?"([\d.]+)"', bake)) <= set(versions.TESTED["vllm"])


def test_bake_builds_what_the_dockerfile_and_the_stack_have():
    bake = (ROOT / "docker-bake.hcl").read_text()
    targets = set(re.findall(r'^target "([a-z-]+)"', bake, re.MULTILINE))
    others = {f"xpu-{name}" for name in ("llm-scaler", "llm-d", "ubi", "rocky", "ubuntu", "legacy")}
    assert targets == {"wheel", "xpu", "cpu", "loadtest", "router"} | others
    stages = set(re.findall(r"^FROM .* AS ([a-z-]+)$", DOCKERFILE, re.MULTILINE))
    assert set(re.findall(r'target += "([a-z]+)"', bake)) <= stages
    built = {s["build"]["target"] for s in SERVICES.values() if "build" in s}
    assert built <= set(re.findall(r'target += "([a-z]+)"', bake))


def test_what_the_images_copy_reaches_their_build():
    """Docker is handed only what .dockerignore lets through."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = {line[1:] for line in lines if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    copied = {name for names in copies for name in names.split()}
    assert copied == let_through
    assert all((ROOT / name).exists() for name in copied)


def stage(name):
    """The lines of one stage of the Dockerfile."""
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    [text] = [part for part in stages if f" AS {name}\n" in part]
    return text


def test_every_image_with_an_engine_checks_itself_last():
    for name in ("cpu", "xpu"):
        steps = re.findall(r"^RUN (?:.*\\\n)*.*$", stage(name), re.MULTILINE)
        assert "lmcache-xpu doctor --build" in steps[-1]


def test_the_program_in_an_image_has_oneapis_environment(tmp_path):
    """Also where nothing has read its scripts, and where there are none."""
    programs, oneapi = tmp_path / "bin", tmp_path / "oneapi"
    programs.mkdir()
    echo = 'echo "$ONEAPI_READ" "$@"'
    for name, line in {"vllm": ":", "lmcache-xpu": echo, "lmcache": echo}.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:{os.environ['PATH']}", "ONEAPI_ROOT": str(oneapi)}
    program = (ROOT / "docker/lmcache-xpu", "serve", "a b")
    done = subprocess.run(program, env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (" serve a b\n", "")
    script = ROOT / "tests/containers/setvars.sh"
    (oneapi / "ccl/latest/env").mkdir(parents=True)
    shutil.copy(script, oneapi)
    shutil.copy(script, oneapi / "ccl/latest/env/vars.sh")
    done = subprocess.run(program, env=environ, capture_output=True, text=True, check=True)
    scripts = (f"{oneapi}/{name} --force;" for name in ("setvars.sh", "ccl/latest/env/vars.sh"))
    assert done.stdout == f"{''.join(scripts)} serve a b\n"
    (tmp_path / "lmcache").symlink_to(ROOT / "docker/lmcache-xpu")
    program = (tmp_path / "lmcache", "server")
    done = subprocess.run(program, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.endswith(" server\n")


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
            metrics = re.findall(r"((?:vllm|lmcache)\w*:?\w+|up)\{(.*?)\}", target["expr"])
            assert metrics or "hw_" in target["expr"]
            for metric, labels in metrics:
                model = ["model"] * metric.startswith("vllm:")  # others have no such label
                chosen = re.findall(r'\w+=~"\$(\w+)"', labels)
                # LMCache's server is an instance of its own, of several models perhaps.
                servers = metric.startswith("lmcache_mp_") or 'job="lmcache-server"' in labels
                names_chosen = ["namespace"] if servers else ["namespace", *model, "instance"]
                assert chosen == names_chosen, target["expr"]
        if panel["type"] != "row":
            assert panel["description"]


def test_without_a_choice_the_dashboard_shows_engines_that_have_no_namespace():
    """In Docker there is none: `.*` matches a label that is not there, a list of names does not."""
    dashboard = json.loads((ROOT / "monitoring/dashboards/lmcache-xpu.json").read_text())
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "model", "instance"]
    for name in ("namespace", "model"):
        assert (variables[name]["allValue"], variables[name]["includeAll"]) == (".*", True)
        assert variables[name]["current"]["value"] == "$__all"
    # Metrics of this package have no model: all engines are those of the chosen models.
    assert "allValue" not in variables["instance"]
    assert "$namespace" in variables["instance"]["query"]["query"]
    assert "$model" in variables["instance"]["query"]["query"]


RULES = yaml.safe_load((ROOT / "monitoring/alerts.yaml").read_text())["groups"][0]["rules"]


def test_every_alert_says_what_and_what_to_do():
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs/guides/alerts.md").read_text(), re.MULTILINE)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description", "runbook"}
        assert rule["alert"] in sections
        assert rule["annotations"]["runbook"] == f"docs/guides/alerts.md#{rule['alert'].lower()}"
    of_the_chart = {"ReplicasMissing"}
    assert set(sections) == {rule["alert"] for rule in RULES} | of_the_chart


def test_every_alert_is_tried_firing_and_not_firing():
    """By promtool in the tests of the images, and here, where it is installed."""
    cases = (ROOT / "tests/containers/alerts_test.yaml").read_text()
    tried = set(re.findall(r'alertname="(\w+)"', cases))
    assert tried == {rule["alert"] for rule in RULES}
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed; the tests of the images run it")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "monitoring/alerts.yaml", folder)
        shutil.copy(ROOT / "tests/containers/alerts_test.yaml", folder)
        done = subprocess.run(
            [promtool, "test", "rules", "alerts_test.yaml"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_leave_other_teams_engines_alone_and_say_whose_they_are():
    for rule in RULES:
        for name in re.findall(r"vllm:\w+", rule["expr"]):
            assert f'{name}{{job="lmcache-xpu"' in rule["expr"], rule["alert"]
        if "sum by" in rule["expr"]:
            assert "sum by (namespace, pod, instance" in rule["expr"], rule["alert"]


def test_backpressure_wakes_nobody():
    [errors] = [rule["expr"] for rule in RULES if rule["alert"] == "TransferErrors"]
    assert 'reason!~"behind|crowded|pool_full|incomplete"' in errors


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


def test_the_address_in_the_example_is_the_servers(tmp_path):
    [aliases] = {tuple(SERVICES[name]["networks"]["default"]["aliases"]) for name in SERVERS}
    environ = {
        name: interpolated(value, SERVER_DISK_GIB="7")
        for name, value in SERVICES["server-cpu"]["environment"].items()
    }
    named = options(tmp_path, environ)
    url = re.search(r"^#LMCACHE_XPU_SERVER_URL=tcp://(\w+):(\d+)$", EXAMPLE, re.MULTILINE)
    assert (url[1], url[2]) == (*aliases, named["--port"])
    assert named["--host"] == "0.0.0.0"
    assert disk(named)["adapter_params"]["disk.gib"] == 7
    assert any(v.endswith(":/var/cache/kv") for v in SERVICES["server-cpu"]["volumes"])
    scraped = yaml.safe_load((ROOT / "monitoring/prometheus.yaml").read_text())["scrape_configs"]
    [job] = [each for each in scraped if each["job_name"] == "lmcache-server"]
    [names] = job["dns_sd_configs"]
    assert (names["names"], str(names["port"])) == ([*aliases], named["--http-port"])
    assert f":{names['port']}/healthcheck" in str(SERVICES["server-cpu"]["healthcheck"]["test"])


def test_the_program_of_lmcache_in_the_xpu_image_is_the_wrapper_too():
    assert "ln -s lmcache-xpu bin/lmcache" in stage("xpu")
    for name in ("xpu", "cpu"):
        assert "docker/cache-server" in stage(name)


def test_the_stacks_alerts_reach_an_alertmanager():
    assert SERVICES["alertmanager"]["profiles"] == ["alerts"]
    prometheus = yaml.safe_load((ROOT / "monitoring/prometheus.yaml").read_text())
    [manager] = prometheus["alerting"]["alertmanagers"]
    assert manager["dns_sd_configs"] == [{"names": ["alertmanager"], "type": "A", "port": 9093}]
    routes = yaml.safe_load((ROOT / "monitoring/alertmanager.yaml").read_text())
    assert routes["route"]["receiver"] in {each["name"] for each in routes["receivers"]}


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
