"""A release that was installed with the values of an earlier chart is upgraded to today's."""

from __future__ import annotations

from pathlib import Path

import pytest
from chart import FROZEN, MODEL, Objects, earlier_values, merged, rendered, template

TODAY = [path for path in FROZEN if "-" not in path.stem]

# What Kubernetes doesn't change in an object of that kind.
IMMUTABLE = {
    "Deployment": ["selector"],
    "StatefulSet": ["selector", "serviceName", "volumeClaimTemplates", "podManagementPolicy"],
    "PersistentVolumeClaim": ["accessModes", "storageClassName", "resources"],
}
SHAPES = {
    "deployment": {},
    "claims": {"settings": {"disk_gib": 100}, "disk": {"storageClassName": "fast"}},
    "hub": {"files": {"cache": "volumeClaim"}},
    "router": {"router": {"kind": "vllmRouter"}},
    "dra": {"gpu": {"kind": "dra"}, "settings": {"tensor_parallel": 2}},
}


def values(path: Path, shape: str) -> dict:
    chosen = merged(MODEL, {"models": {"m": SHAPES[shape]}})
    return {**earlier_values(path), **chosen}


def fixed(objects: Objects) -> dict[tuple[str, str], dict]:
    return {
        (item["kind"], item["metadata"]["name"]): {
            field: item["spec"].get(field) for field in IMMUTABLE[item["kind"]]
        }
        for item in objects
        if item["kind"] in IMMUTABLE
    }


def test_an_earlier_chart_has_its_values_here_beside_todays():
    assert len(TODAY) == 1
    assert len(FROZEN) >= 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("path", FROZEN, ids=lambda path: path.stem)
def test_an_upgrade_to_todays_values_is_taken_and_changes_nothing_immutable(path, shape):
    installed = rendered(template(values=values(path, shape)))
    after = rendered(template(values=values(TODAY[0], shape)))
    assert fixed(after) == fixed(installed)
