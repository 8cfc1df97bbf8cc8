"""An API server that knows a few objects: what `lookup` in the chart's templates sees."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from chart import CHART as CHART_FOLDER
from chart import MODEL, NAMESPACE, Objects, helm, merged, rendered
from stub_server import Stub

# Kinds by group: the plural, and the kind.
KINDS = {
    "v1": {
        "services": "Service",
        "secrets": "Secret",
        "persistentvolumeclaims": "PersistentVolumeClaim",
    },
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
}


def _paths(objects: list[dict]) -> dict[str, dict]:
    paths = {}
    for item in objects:
        version = item["apiVersion"]
        [plural] = [plural for plural, kind in KINDS[version].items() if kind == item["kind"]]
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        name = item["metadata"]["name"]
        paths[f"{root}/namespaces/{NAMESPACE}/{plural}/{name}"] = item
    return paths


def _discovery(path: str) -> dict | None:
    if path == "/version":
        return {"major": "1", "minor": "36", "gitVersion": "v1.36.2"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        version = {"groupVersion": "apps/v1", "version": "v1"}
        group = {"name": "apps", "versions": [version], "preferredVersion": version}
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
    group_version = path.removeprefix("/apis/").removeprefix("/api/")
    if group_version in KINDS:
        resources = [
            {"name": plural, "kind": kind, "namespaced": True, "verbs": ["get"]}
            for plural, kind in KINDS[group_version].items()
        ]
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": group_version,
            "resources": resources,
        }
    return None


def _absent() -> dict:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404}


@contextmanager
def cluster(objects: list[dict]) -> Iterator[Stub]:
    """Serve these objects, each with its namespace left out, on loopback."""
    held = _paths(objects)

    def answer(path: str) -> dict:
        plain = urlsplit(path).path
        return held.get(plain) or _discovery(plain) or _absent()

    stub = Stub(answer, status=lambda body: body.get("code", 200))
    try:
        yield stub
    finally:
        stub.shutdown()
        stub.server_close()


def upgrade(live: list[dict], **values: object):
    """What `helm upgrade` would render where these objects live, or how it would refuse."""
    with cluster(live) as api:
        return helm(
            "template",
            "kv",
            str(CHART_FOLDER),
            *("-n", NAMESPACE, "--dry-run=server", "--is-upgrade"),
            f"--kube-apiserver=http://127.0.0.1:{api.port}",
            values=merged(MODEL, values),
        )


def upgraded(live: list[dict], **values: object) -> Objects:
    return rendered(upgrade(live, **values))
