"""LMCache's server beside the engine: memory, disk, port and metrics of the side-car, refusals."""

from __future__ import annotations

import pytest
from chart import (
    MODEL,
    container,
    engine_pod,
    environment,
    merged,
    model,
    render,
    settings,
    template,
    volume,
)
from support.cache_server_program import disk, options

from lmcache_xpu.launch.settings import SERVER_LACKS

SIDE_CAR = {"kind": "sideCar"}


def server(objects) -> dict:
    spec = engine_pod(objects)
    [side_car] = [each for each in spec["initContainers"] if each["name"] == "server"]
    return side_car


def variables(side_car: dict) -> dict[str, str]:
    return {item["name"]: item["value"] for item in side_car["env"]}


def mounts(item: dict) -> dict[str, str]:
    return {mount["mountPath"]: mount["name"] for mount in item["volumeMounts"]}


def test_it_starts_before_the_engine_and_ends_after_it():
    """As Kubernetes' side-cars do: an init container that goes on, with a probe for its start."""
    objects = model(cache=SIDE_CAR, files={"download": True})
    init = objects.engines()["m"]["spec"]["template"]["spec"]["initContainers"]
    assert [each["name"] for each in init] == ["download", "server"]
    assert init[1]["restartPolicy"] == "Always"
    for probe in ("startupProbe", "livenessProbe"):
        assert init[1][probe]["httpGet"] == {"path": "/healthcheck", "port": 5556}
    assert init[1]["image"] == container(objects.engines()["m"])["image"]


def test_engine_and_server_have_one_dev_shm_and_no_other_pod_has(monkeypatch):
    objects = model(cache=SIDE_CAR, settings={"cpu_gib": 8, "tensor_parallel": 2}, shmGib=3)
    engine = container(objects.engines()["m"])
    assert mounts(server(objects))["/dev/shm"] == mounts(engine)["/dev/shm"] == "shm"
    # What is lent, twice: after a crash the engine holds the old memory as well.
    assert volume(objects, "shm")["emptyDir"] == {"medium": "Memory", "sizeLimit": "35Gi"}
    spec = engine_pod(objects)
    assert not {"hostIPC", "hostNetwork", "hostPID"} & spec.keys()
    loaded = settings(objects, objects.engines()["m"], monkeypatch)
    assert (loaded.cache, loaded.server_url) == ("server", "ipc:///dev/shm/lmcache-xpu/server.sock")


def test_its_memory_is_the_servers_and_not_the_engines():
    objects = model(
        cache={**SIDE_CAR, "hostGib": 1, "cpus": 2, "resources": {"limits": {"cpu": "3"}}},
        settings={"cpu_gib": 8, "tensor_parallel": 2},
        hostGib=10,
        shmGib=2,
    )
    assert variables(server(objects))["CACHE_GIB"] == "16"
    assert server(objects)["resources"] == {
        "requests": {"cpu": "2", "memory": "17Gi"},
        "limits": {"memory": "33Gi", "cpu": "3"},
    }
    asked = container(objects.engines()["m"])["resources"]
    assert asked["requests"]["memory"] == asked["limits"]["memory"] == "12Gi"


@pytest.mark.parametrize("kind", ["volumeClaim", "emptyDir", "hostPath"])
def test_the_disk_tier_is_the_servers(kind, tmp_path, monkeypatch):
    objects = model(
        cache=SIDE_CAR,
        settings={"disk_gib": 100, "tensor_parallel": 2, "chunk_tokens": 512},
        disk={"kind": kind, "hostPath": "/mnt/kv"},
    )
    named = options(tmp_path, variables(server(objects)))
    assert named["--chunk-size"] == "512"
    tier = disk(named)["adapter_params"]
    owner = "kv-lmcache-xpu-m" if kind != "hostPath" else "serving.kv-lmcache-xpu-m"
    assert tier == {"disk.path": f"/var/cache/kv/{owner}", "disk.gib": 200}
    assert mounts(server(objects))["/var/cache/kv"] == "kv"
    assert "/var/cache/kv" not in mounts(container(objects.engines()["m"]))
    loaded = settings(objects, objects.engines()["m"], monkeypatch)
    assert (loaded.disk_path, loaded.disk_gib) == (None, None)


def test_without_a_size_it_has_no_disk_tier(tmp_path):
    objects = model(cache=SIDE_CAR)
    assert disk(options(tmp_path, variables(server(objects)))) is None
    assert "/var/cache/kv" not in mounts(server(objects))


def test_engines_reach_its_socket_and_monitors_its_metrics_alone(tmp_path):
    objects = model(cache=SIDE_CAR)
    named = options(tmp_path, variables(server(objects)))
    assert named["socket"] == "/dev/shm/lmcache-xpu/server.sock"
    assert named["pages"] == "0.0.0.0:5556"
    rules = objects.one("NetworkPolicy", "kv-lmcache-xpu-m-engine")["spec"]["ingress"]
    [rule] = [rule for rule in rules if rule["ports"] != [{"port": "http", "protocol": "TCP"}]]
    assert rule["ports"] == [{"port": 5556, "protocol": "TCP"}]
    assert [list(peer) for peer in rule["from"]] == [["namespaceSelector"]]
    nobody = render(networkPolicy={"monitors": []}, models={"m": {"cache": SIDE_CAR}})
    rules = nobody.one("NetworkPolicy", "kv-lmcache-xpu-m-engine")["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in rules] == ["http"]


@pytest.mark.parametrize(
    ("kind", "endpoints"),
    [("podMonitor", "podMetricsEndpoints"), ("serviceMonitor", "endpoints")],
)
def test_its_metrics_are_a_job_of_their_own_where_it_is(kind, endpoints):
    def ports(**keys) -> dict[str, str]:
        objects = render(monitor={"kind": kind}, models={"m": keys})
        monitor = objects.one(kind[0].upper() + kind[1:])["spec"]
        return {e["port"]: e["relabelings"][0]["replacement"] for e in monitor[endpoints]}

    assert ports() == {"http": "lmcache-xpu"}
    assert ports(cache=SIDE_CAR) == {"http": "lmcache-xpu", "server-metrics": "lmcache-server"}
    objects = model(cache=SIDE_CAR)
    port = {"name": "server-metrics", "containerPort": 5556}
    assert server(objects)["ports"] == [port]
    service = objects.one("Service", "kv-lmcache-xpu-m-engine")["spec"]["ports"]
    assert {"name": "server-metrics", "port": 5556, "targetPort": 5556} in service
    assert len(model().one("Service", "kv-lmcache-xpu-m-engine")["spec"]["ports"]) == 1


def test_without_it_nothing_of_it_is_there():
    objects = model()
    assert "initContainers" not in objects.engines()["m"]["spec"]["template"]["spec"]
    assert (
        not {"LMCACHE_XPU_CACHE", "LMCACHE_XPU_SERVER_URL"}
        & environment(objects.engines()["m"]).keys()
    )


WRONG = {
    "remote_url": "redis://a:6379",
    "layerwise": True,
    "kv_events": "tcp://*:5557",
    "tier_dtype": "fp8",
}


def refused(**keys) -> str:
    done = template(values=merged(MODEL, {"models": {"m": keys}}))
    assert done.returncode != 0
    return done.stderr


def test_every_setting_that_the_server_lacks_is_refused_here():
    """Before a pod runs that would end with the same message."""
    assert WRONG.keys() - {"remote_url"} == SERVER_LACKS.keys()  # which the side-car isn't told
    for name, value in WRONG.items():
        message = refused(cache=SIDE_CAR, settings={name: value})
        assert f"models.m.cache.kind is sideCar with {name}=" in message


def test_what_is_as_it_has_to_be_is_taken():
    same = {name: value for name, value in SERVER_LACKS.items() if value is not None}
    assert model(cache=SIDE_CAR, settings=same).engines()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"settings": {"server_url": "tcp://a:1"}}, "expected neither: the chart sets both"),
        ({"settings": {"cache": "in-process"}}, "expected neither: the chart sets both"),
        ({"settings": {"offload": False}}, "nothing would use the server"),
    ],
)
def test_wrong_combinations_are_refused(keys, message):
    assert message in refused(cache=SIDE_CAR, **keys)


def test_a_shared_valkey_is_refused_beside_it():
    valkey = {"enabled": True, "passwordSecret": {"name": "s", "key": "k"}}
    values = merged(MODEL, {"valkey": valkey, "models": {"m": {"cache": SIDE_CAR}}})
    assert (
        "sideCar with remote_url=redis://kv-lmcache-xpu-valkey:6379"
        in template(values=values).stderr
    )


@pytest.mark.parametrize(
    ("chosen", "is_server"),
    [
        ({}, False),
        ({"data_parallel": 2}, False),
        ({"cache": "in-process"}, False),
        ({"tensor_parallel": 2}, True),
        ({"pipeline_parallel": 2}, True),
        ({"tensor_parallel": 2, "layerwise": True}, False),
        ({"tensor_parallel": 2, "offload": False}, False),
        ({"cache": "server"}, True),
    ],
)
def test_the_engines_container_has_room_for_the_server_that_serve_starts(
    chosen, is_server, monkeypatch
):
    """Twice what it lends, as the side-car's pod has."""
    objects = model(settings={"cpu_gib": 8, **chosen}, hostGib=10, shmGib=3)
    [workload] = objects.engines().values()
    loaded = settings(objects, workload, monkeypatch)
    assert (loaded.is_server and loaded.offload) is is_server
    lent = 8 * loaded.devices
    memory = {k: v["memory"] for k, v in container(workload)["resources"].items()}
    tiers = lent if loaded.offload else 0
    limit = 13 + tiers + (lent if is_server else 0)
    assert memory == {"requests": f"{13 + tiers}Gi", "limits": f"{limit}Gi"}
    size = volume(objects, "shm")["emptyDir"]["sizeLimit"]
    assert size == f"{3 + 2 * lent if is_server else 3}Gi"
    assert "initContainers" not in engine_pod(objects)


@pytest.mark.parametrize("chosen", [{"cache": "server"}, {"tensor_parallel": 2}])
def test_what_the_server_lacks_is_refused_in_the_engines_container_too(chosen):
    for name in SERVER_LACKS:
        if name == "layerwise" and "cache" not in chosen:
            continue  # it is what such an engine may have in place of a server
        message = refused(settings={name: WRONG[name], **chosen})
        assert f"models.m.settings.{name} is" in message
        assert "LMCache runs as a server" in message


def test_a_server_in_the_engines_container_may_be_told_what_it_does_anyway():
    assert model(settings={"cache": "server", "tier_dtype": "auto"}).engines()


def test_several_devices_and_a_cache_in_process_are_refused_here():
    message = refused(settings={"cache": "in-process", "pipeline_parallel": 2})
    assert "in-process with an engine of 2 devices" in message


def test_a_server_of_the_node_takes_no_memory_of_the_pod(monkeypatch):
    url = "tcp://127.0.0.1:7000"
    objects = model(settings={"cache": "server", "server_url": url}, shmGib=3)
    assert settings(objects, objects.engines()["m"], monkeypatch).server_url == url
    assert volume(objects, "shm")["emptyDir"]["sizeLimit"] == "3Gi"
