"""The chart's own alerts, by Prometheus's tool: pods that are gone, and pods that never came."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from chart import render

OBJECT = "kv-lmcache-xpu-m"
KINDS = {
    "deployment": ({}, "kube_deployment_spec_replicas"),
    "statefulset": ({"disk_gib": 1}, "kube_statefulset_replicas"),
}


def rules(kind: str) -> list[dict]:
    """The rules of this release: the last group."""
    settings, _ = KINDS[kind]
    objects = render(monitor={"rules": True}, models={"m": {"settings": settings}})
    return objects.one("PrometheusRule")["spec"]["groups"][-1]["rules"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_rules_look_at_the_models_own_workload(kind):
    chosen = f'{{namespace="serving", {kind}="{OBJECT}"}}'
    for rule in rules(kind):
        assert f"kube_{kind}_status_replicas_ready{chosen}" in rule["expr"]
        assert f"{KINDS[kind][1]}{chosen}" in rule["expr"]
    assert {rule["alert"]: rule["for"] for rule in rules(kind)} == {
        "NothingReady": "5m",
        "ReplicasMissing": "42m",  # 1,800 s for a start, and what comes before it
    }


def fires(tmp_path: Path, kind: str, minute: int, names: list[str], **values: str) -> None:
    """Check which alerts fire at a minute, where the three series have these values."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed: the rules were not run")
    series = {
        "ready": f"kube_{kind}_status_replicas_ready",
        "wanted": KINDS[kind][1],
        "generation": f"kube_{kind}_metadata_generation",
    }
    inputs = [
        {"series": f'{series[name]}{{namespace="serving", {kind}="{OBJECT}"}}', "values": value}
        for name, value in {"wanted": "2x300", "generation": "1x300", **values}.items()
    ]
    expected = [
        {"labels": f'{{alertname="{name}", model="m", namespace="serving"}}', "value": 1}
        for name in names
    ]
    expression = 'count by (alertname, model, namespace) (ALERTS{alertstate="firing"})'
    case = {"expr": expression, "eval_time": f"{minute}m", "exp_samples": expected}
    tests = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, "promql_expr_test": [case]}],
    }
    groups = {"groups": [{"name": "chart", "rules": rules(kind)}]}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(groups))
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [promtool, "test", "rules", "tests.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_pods_that_served_and_are_gone_page_within_13_minutes(tmp_path, kind):
    fires(tmp_path, kind, 128, [], ready="2x119 0x180")
    fires(tmp_path, kind, 132, ["NothingReady"], ready="2x119 0x180")
    # And until they are back.
    both = ["NothingReady", "ReplicasMissing"]
    fires(tmp_path, kind, 170, both, ready="2x119 0x180")
    fires(tmp_path, kind, 250, ["ReplicasMissing"], ready="2x119 0x180")


@pytest.mark.parametrize(
    ("minute", "names", "values"),
    [
        # A first start.
        (30, [], {"ready": "0x30 2x270"}),
        (60, ["ReplicasMissing"], {"ready": "0x300"}),
        # An upgrade, whose start takes half an hour.
        (145, [], {"ready": "2x119 0x30 2x100", "generation": "1x118 2x180"}),
        # Scaled to none.
        (200, [], {"ready": "2x119 0x180", "wanted": "2x119 0x180"}),
        # One of two is enough for clients to be served.
        (150, [], {"ready": "2x119 1x180"}),
        (200, ["ReplicasMissing"], {"ready": "2x119 1x180"}),
    ],
)
def test_what_is_meant_or_may_take_its_time_wakes_nobody(tmp_path, minute, names, values):
    fires(tmp_path, "deployment", minute, names, **values)
