"""Dashboard and alerts name what exists, and agree with their page and their tests."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile

import pytest
import yaml
from support.container_files import ROOT, SERVICES


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
    of_the_chart = {"NothingReady", "ReplicasMissing"}
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
    assert 'reason!~"behind|crowded|pool_full|incomplete|late|missing|overtaken|unfilled"' in errors


def test_the_stacks_alerts_reach_an_alertmanager():
    assert SERVICES["alertmanager"]["profiles"] == ["alerts"]
    prometheus = yaml.safe_load((ROOT / "monitoring/prometheus.yaml").read_text())
    [manager] = prometheus["alerting"]["alertmanagers"]
    assert manager["dns_sd_configs"] == [{"names": ["alertmanager"], "type": "A", "port": 9093}]
    routes = yaml.safe_load((ROOT / "monitoring/alertmanager.yaml").read_text())
    assert routes["route"]["receiver"] in {each["name"] for each in routes["receivers"]}
