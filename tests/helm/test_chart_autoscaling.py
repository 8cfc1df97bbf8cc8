"""Who decides the number of pods, and by which numbers."""

from __future__ import annotations

from chart import KEDA, model


def test_the_autoscaler_scales_what_runs_the_engines():
    scaled = model(autoscaling=KEDA, settings={"disk_gib": 1}).one("ScaledObject")["spec"]
    assert scaled["scaleTargetRef"]["kind"] == "StatefulSet"


def test_keda_starts_from_zero_with_a_trigger_of_the_users():
    own = {"type": "nats-jetstream", "metadata": {"stream": "requests"}}
    zero = {"kind": "keda", "minReplicas": 0, "triggers": [own]}
    objects = model(autoscaling=zero)
    scaled = objects.one("ScaledObject")["spec"]
    assert (scaled["minReplicaCount"], scaled["triggers"]) == (0, [own])
    both = model(autoscaling={**KEDA, **zero}).one("ScaledObject")["spec"]["triggers"]
    assert [trigger.get("name") for trigger in both] == [None, "waiting", "ttft"]


def test_keda_logs_in_at_prometheus_and_has_a_number_for_when_it_is_away():
    scaled = model(autoscaling=KEDA).one("ScaledObject")["spec"]
    assert scaled["pollingInterval"] == 30
    assert "fallback" not in scaled
    assert not any("authenticationRef" in trigger for trigger in scaled["triggers"])
    changes = {
        "pollS": 10,
        "fallback": {"replicas": 3},
        "prometheusAuth": {"name": "prometheus", "modes": "bearer"},
    }
    scaled = model(autoscaling={**KEDA, **changes}).one("ScaledObject")["spec"]
    assert scaled["pollingInterval"] == 10
    assert scaled["fallback"] == {"failureThreshold": 3, "replicas": 3}
    reference = {"name": "prometheus", "kind": "TriggerAuthentication"}
    for trigger in scaled["triggers"]:
        assert trigger["authenticationRef"] == reference
        assert trigger["metadata"]["authModes"] == "bearer"
    # KEDA takes a fallback only where some trigger's metric is an average per pod.
    assert "AverageValue" in [trigger["metricType"] for trigger in scaled["triggers"]]
