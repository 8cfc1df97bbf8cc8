"""Typos, wrong units and missing values end with a message that says what to change."""

from __future__ import annotations

import pytest
from chart import CHART, MODEL, helm, merged, template

ZERO = {"minReplicas": 0}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        # Typos.
        ({"modles": {}}, ["Additional property modles is not allowed"]),
        ({"defaults": {"replica": 1}}, ["defaults: Additional property replica"]),
        (
            {"models": {"m": {"settings": {"cpu_gb": 3}}}},
            ["models.m.settings: Additional property cpu_gb"],
        ),
        ({"models": {"m": {"gpu": {"knid": "dra"}}}}, ["models.m.gpu: Additional property knid"]),
        # Wrong units.
        (
            {"models": {"m": {"settings": {"cpu_gib": "64Gi"}}}},
            ["models.m.settings.cpu_gib: Invalid type. Expected: number, given: string"],
        ),
        (
            {"models": {"m": {"settings": {"disk_gib": "1Ti"}}}},
            ["models.m.settings.disk_gib: Invalid type. Expected: [number,null], given: string"],
        ),
        (
            {"models": {"m": {"settings": {"drain_s": "60s"}}}},
            ["models.m.settings.drain_s: Invalid type. Expected: integer, given: string"],
        ),
        (
            {"defaults": {"startup": {"limitS": "30m"}}},
            ["defaults.startup.limitS: Invalid type. Expected: integer, given: string"],
        ),
        ({"valkey": {"gib": "32Gi"}}, ["valkey.gib: Invalid type. Expected: number"]),
        # Values that can't be.
        (
            {"models": {"m": {"settings": {"memory_fraction": 90}}}},
            ["models.m.settings.memory_fraction: Must be less than or equal to 1"],
        ),
        ({"defaults": {"gpu": {"kind": "cuda"}}}, ["defaults.gpu.kind must be one of", "dra"]),
        (
            {"defaults": {"gpu": {"renderGroups": "render"}}},
            ["defaults.gpu.renderGroups: Invalid type. Expected: [array,null]"],
        ),
        ({"models": {"My_Model": {}}}, ['Property name of "My_Model" does not match']),
        (
            {"models": {"m": {"apiKeySecret": {"name": "s"}}}},
            ["models.m.apiKeySecret: Has a dependency on key"],
        ),
        (
            {"models": {"m": {"settings": {"api_key": "secret"}}}},
            ["models.m.settings: Additional property api_key"],
        ),
        (
            {"models": {"m": {"settings": {"remote_url": "redis://:pass@host"}}}},
            ["models.m.settings.remote_url: Does not match pattern"],
        ),
        ({"defaults": {"router": {"policy": "kv"}}}, ["defaults.router.policy must be one of"]),
        # What has to be set, and how.
        ({"models": None}, ["models is empty", "--set models.qwen.settings.model="]),
        ({"models": {"n": {}}}, ["models.n.settings.model is not set", "a name on the hub"]),
        (
            {"models": {"m": {"gpu": {"renderGroups": None}}}},
            ["models.m.gpu.renderGroups is not set", "getent group render"],
        ),
        (
            {"models": {"m": {"settings": {"disk_gib": 1}, "disk": {"kind": "hostPath"}}}},
            ["models.m.disk.hostPath is not set"],
        ),
        ({"defaults": {"ingress": {"enabled": True}}}, ["models.m.ingress.host is not set"]),
        (
            {"defaults": {"autoscaling": {"kind": "keda"}}},
            ["models.m.autoscaling.prometheusUrl is not set"],
        ),
        (
            {"defaults": {"router": {"kind": "inferencePool"}}},
            ["models.m.router.endpointPicker.name is not set"],
        ),
        (
            {"defaults": {"files": {"cache": "existingClaim"}}},
            ["models.m.files.claimName is not set"],
        ),
        ({"valkey": {"enabled": True}}, ["valkey.passwordSecret is not set"]),
        # What earlier charts had.
        (
            {"loadtest": {}},
            ['loadtest must be one of the following: "gone: run the image loadtest'],
        ),
        (
            {"models": {"m": {"router": {"autoscaling": {"enabled": True}}}}},
            ["models.m.router.autoscaling must be one of", '"gone: set router.replicas"'],
        ),
        ({"defaults": {"engineImage": "a/b"}}, ["defaults.engineImage: Does not match pattern"]),
        # What would fail, or be taken and do nothing, in the cluster.
        (
            {"defaults": {"httpRoute": {"enabled": True}}},
            ["models.m.httpRoute.parentRefs is empty"],
        ),
        (
            {"defaults": {"autoscaling": {"minReplicas": 5}}},
            ["models.m.autoscaling.minReplicas is 5; expected at most maxReplicas, 4"],
        ),
        (
            {"defaults": {"autoscaling": {"kind": "keda", "prometheusUrl": "http://p", **ZERO}}},
            ["models.m.autoscaling.minReplicas is 0; expected at least 1", "autoscaling.triggers"],
        ),
        (
            {"defaults": {"autoscaling": {"kind": "keda", "triggers": [{"type": "cpu"}], **ZERO}}},
            ["models.m.autoscaling.minReplicas is 0; expected at least 1"],
        ),
        (
            {"defaults": {"autoscaling": {"kind": "hpa", "triggers": [{"type": "nats"}], **ZERO}}},
            ["models.m.autoscaling.minReplicas is 0; expected at least 1"],
        ),
        ({"fullnameOverride": "KV|a.b"}, ["fullnameOverride: Does not match pattern"]),
        (
            {"defaults": {"podLabels": {"a": "b c"}}},
            ["defaults.podLabels.a: Does not match pattern"],
        ),
        ({"commonLabels": {"app.kubernetes.io/name": "x"}}, ["commonLabels"]),
        ({"commonLabels": {"a b": "x"}}, ["commonLabels: Does not match pattern"]),
        ({"models": {"valkey": {}}}, ["models.valkey has the name of another part of the chart"]),
        (
            {"models": {"m-engine": MODEL["models"]["m"]}},
            ["models.m-engine has the name of a part of models.m"],
        ),
        (
            {
                "models": {
                    "m": {
                        "settings": {"model": "/models/x"},
                        "files": {"download": True, "modelClaim": "c"},
                    }
                }
            },
            ["files.download is on, and settings.model is the directory /models/x"],
        ),
        (
            {"image": {"digests": {"xpu": "0.1"}}},
            ["image.digests.xpu: Does not match pattern"],
        ),
    ],
)
def test_mistakes_are_named(values, says):
    done = template(values=merged(MODEL, values))
    assert done.returncode != 0
    for text in says:
        assert text in done.stderr
    if values == {"models": None}:  # `helm lint` of the chart alone has nothing to say
        return
    linted = helm("lint", str(CHART), values=merged(MODEL, values))
    assert linted.returncode != 0
    assert any(says[0] in line for line in linted.stdout.splitlines() if "executing" not in line)


def test_what_the_mistakes_are_changes_of_is_right():
    assert template(values=MODEL).returncode == 0


def test_an_empty_model_takes_all_from_the_defaults():
    values = {**MODEL, "models": {"m": {}}, "defaults": MODEL["models"]["m"]}
    assert template(values=values).returncode == 0
