"""Make the chart's values.schema.json: `make helm-docs` runs this.

What a value may be is written here; what it means, in values.yaml. The part for `settings` is
made from `Settings`, so that the chart knows every setting and no other, with the same limits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from lmcache_xpu.launch.settings import Settings

SCHEMA = Path(__file__).resolve().parent / "lmcache-xpu" / "values.schema.json"

# The chart decides these, or takes them from secrets.
CHARTS_OWN = {"port", "disk_path"} | {
    name for name, field in Settings.model_fields.items() if SecretStr in get_args(field.annotation)
}

# Of pydantic's: Helm merges the defaults in before it checks, and titles say nothing.
DROPPED = ("title", "default", "required")

# Of another API, which checks it.
Any_ = dict[str, Any]
Texts = dict[str, str]
# Kubernetes refuses others, and those that select pods are the chart's own.
Label = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
SELECTORS = [
    *(f"app.kubernetes.io/{part}" for part in ("name", "instance", "component")),
    "lmcache-xpu/model",
]
LABEL_NAME = r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$"
Labels = Annotated[
    dict[str, Label],
    Field(
        json_schema_extra={
            "propertyNames": {"pattern": LABEL_NAME, "not": {"enum": SELECTORS}},
        }
    ),
]
Gib = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[int, Field(ge=0)]
# With a tag or a digest: what comes without one is `latest`.
ImageName = Annotated[str, Field(pattern=r"^([^:@]+(:[0-9]+/[^:@]+)?[:@][A-Za-z0-9_.:-]+)?$")]
# A part of objects' names; empty: the chart's own.
ObjectName = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,18}[a-z0-9])?$")]


def gone(instead: str) -> Any:
    """The type of a value that earlier charts had: Helm's message says what to do instead."""
    return Annotated[Any, Field(json_schema_extra={"enum": [f"gone: {instead}"]})]


class Values(BaseModel):
    """A part of the values; keys that it does not have are mistakes."""

    model_config = ConfigDict(extra="forbid")


class SecretKey(Values):
    model_config = ConfigDict(
        json_schema_extra={"dependencies": {"name": ["key"], "key": ["name"]}}
    )

    name: str = Field(min_length=1)
    key: str = Field(min_length=1)


class Image(Values):
    registry: str
    tag: str = Field(pattern=r"^[A-Za-z0-9_.-]*$")
    digests: dict[
        Literal["xpu", "cpu", "router"],
        Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")],
    ]
    pullPolicy: Literal["IfNotPresent", "Always", "Never"]


class Cache(Values):
    kind: Literal["inProcess", "sideCar"]
    cpus: Annotated[float, Field(gt=0)] | str
    hostGib: Gib
    resources: Any_


class Disk(Values):
    kind: Literal["volumeClaim", "hostPath", "emptyDir"]
    storageClassName: str
    hostPath: str = Field(pattern="^(/.*)?$")
    whenDeleted: Literal["Retain", "Delete"]
    whenScaled: Literal["Retain", "Delete"]


class Gpu(Values):
    kind: Literal["devicePlugin", "dra", "none"]
    resource: str = Field(pattern=r"^[a-z0-9.-]+/[a-z0-9._-]+$")
    count: Count | None
    renderGroups: list[Annotated[int, Field(ge=0)]] | None
    sysPtrace: bool | None
    deviceIds: list[Annotated[str, Field(pattern="^[0-9a-f]{4}$")]]
    nodeAffinity: bool
    deviceClassName: str
    selectors: list[str]


class Files(Values):
    cache: Literal["emptyDir", "volumeClaim", "existingClaim"]
    cacheGib: Gib
    claimName: str
    storageClassName: str
    accessMode: Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]
    tokenSecret: SecretKey
    download: bool
    downloadS: Seconds
    revision: str
    include: list[str]
    exclude: list[str]
    modelClaim: str


class Startup(Values):
    limitS: Count


class Probes(Values):
    startup: Any_
    readiness: Any_
    liveness: Any_


class Stop(Values):
    preStopS: Seconds
    marginS: Seconds


class Service(Values):
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"]
    port: Annotated[int, Field(ge=1, le=65535)]
    annotations: Texts
    spec: Annotated[
        Any_,
        Field(
            json_schema_extra={"propertyNames": {"not": {"enum": ["type", "ports", "selector"]}}}
        ),
    ]


class Pod(Values):
    """Labels, annotations and place of pods that are no engine."""

    labels: Labels
    annotations: Texts
    nodeSelector: Texts
    tolerations: list[Any_]
    affinity: Any_
    topologySpreadConstraints: list[Any_]
    priorityClassName: str
    schedulerName: str


# Of earlier charts.
RouterAutoscaling = gone("set router.replicas")
LoadtestJob = gone("run the image loadtest, docs/guides/kubernetes-operations.md#load-test")


class EndpointPicker(Values):
    name: str
    podSelector: Any_
    port: Annotated[int, Field(ge=1, le=65535)]
    failureMode: Literal["FailOpen", "FailClose"]


class Router(Values):
    kind: Literal["none", "vllmRouter", "inferencePool"]
    policy: Literal["cache_aware", "consistent_hash", "round_robin", "random", "power_of_two"]
    replicas: Count
    front: bool
    image: ImageName
    extraArgs: list[str]
    extraEnv: list[Any_]
    resources: Any_
    spread: bool
    autoscaling: RouterAutoscaling
    pod: Pod
    endpointPicker: EndpointPicker


class PrometheusAuth(Values):
    name: str = Field(min_length=1)
    kind: Literal["TriggerAuthentication", "ClusterTriggerAuthentication"]
    modes: str = Field(min_length=1)


class Fallback(Values):
    failureThreshold: Count
    replicas: Annotated[int, Field(ge=0)]


class Autoscaling(Values):
    kind: Literal["none", "hpa", "keda"]
    minReplicas: Annotated[int, Field(ge=0)]
    maxReplicas: Count
    cpuPercent: Annotated[int, Field(ge=1)]
    prometheusUrl: str = Field(pattern="^(https?://.*)?$")
    prometheusAuth: PrometheusAuth
    waitingRequests: Annotated[float, Field(gt=0)]
    ttftS: Annotated[float, Field(gt=0)]
    cooldownS: Seconds
    pollS: Count
    fallback: Fallback
    triggers: list[Any_]


class DisruptionBudget(Values):
    enabled: bool
    maxUnavailable: int | Annotated[str, Field(pattern="^[0-9]+%$")]


class Ingress(Values):
    enabled: bool
    className: str
    host: str
    tlsSecret: str
    annotations: Texts


class HttpRoute(Values):
    enabled: bool
    parentRefs: list[Any_]
    hostnames: list[str]


class Model(Values):
    replicas: Annotated[int, Field(ge=0)]
    engineImage: ImageName
    settings: Any_  # replaced by what Settings says
    cache: Cache
    disk: Disk
    gpu: Gpu
    files: Files
    apiKeySecret: SecretKey
    remotePasswordSecret: SecretKey
    cpus: Annotated[float, Field(gt=0)] | str
    hostGib: Gib
    shmGib: Gib
    scratchGib: Gib
    resources: Any_
    strategy: Any_
    probes: Probes
    startup: Startup
    stop: Stop
    annotations: Texts
    user: Count
    podSecurityContext: Any_
    containerSecurityContext: Any_
    podLabels: Labels
    podAnnotations: Texts
    nodeSelector: Texts
    tolerations: list[Any_]
    affinity: Any_
    spread: bool
    topologySpreadConstraints: list[Any_]
    priorityClassName: str
    runtimeClassName: str
    schedulerName: str
    extraEnv: list[Any_]
    extraEnvFrom: list[Any_]
    extraVolumes: list[Any_]
    extraVolumeMounts: list[Any_]
    initContainers: list[Any_]
    service: Service
    router: Router
    autoscaling: Autoscaling
    podDisruptionBudget: DisruptionBudget
    ingress: Ingress
    httpRoute: HttpRoute


class Monitor(Values):
    kind: Literal["none", "serviceMonitor", "podMonitor"]
    labels: Texts
    intervalS: Count
    rules: bool
    dashboard: bool
    dashboardLabels: Texts


class NetworkPolicy(Values):
    enabled: bool
    clients: list[Any_]
    monitors: list[Any_]
    extraIngress: list[Any_]
    hub: list[Any_]
    extraEgress: list[Any_]


class Valkey(Values):
    enabled: bool
    image: ImageName
    passwordSecret: SecretKey
    tlsSecret: str
    gib: Gib
    cpus: Annotated[float, Field(gt=0)] | str
    pod: Pod


class ServiceAccount(Values):
    create: bool
    name: str
    annotations: Texts


class Tests(Values):
    timeoutS: Count
    pod: Pod


class Chart(Values):
    """All values."""

    nameOverride: ObjectName
    fullnameOverride: ObjectName
    commonLabels: Labels
    image: Image
    imagePullSecrets: list[Any_]
    clusterUsers: bool
    ipv6: bool
    models: dict[Name, Model]
    defaults: Model
    monitor: Monitor
    networkPolicy: NetworkPolicy
    valkey: Valkey
    otherPods: Pod
    serviceAccount: ServiceAccount
    tests: Tests
    loadtest: LoadtestJob
    extraObjects: list[Any_ | str]
    # Helm passes these to every chart that is a dependency of another.
    global_: Any_ = Field(alias="global")


def settings_schema() -> dict[str, Any]:
    """What `settings` may hold: the settings of `lmcache-xpu serve` that are left to users."""
    whole = Settings.model_json_schema()
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name: part for name, part in whole["properties"].items() if name not in CHARTS_OWN
        },
    }


def _plain(node: Any) -> Any:
    """The schema as Helm's messages read best: `null` beside a type, nothing required."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _plain(value) for key, value in node.items() if key not in DROPPED}
    options = node.get("anyOf", [])
    if {"type": "null"} in options and len(options) == 2:
        other = next(option for option in options if option != {"type": "null"})
        if isinstance(other.get("type"), str):
            node = {**node, **other, "type": [other["type"], "null"]}
            del node["anyOf"]
    return node


def schema() -> str:
    """The text of values.schema.json."""
    whole = Chart.model_json_schema(by_alias=True)
    whole["$defs"]["Settings"] = settings_schema()
    whole["$defs"]["Model"]["properties"]["settings"] = {"$ref": "#/$defs/Settings"}
    models = whole["properties"]["models"]
    # By key, so that a wrong name is called one.
    [(pattern, model)] = models.pop("patternProperties").items()
    models |= {"propertyNames": {"pattern": pattern}, "additionalProperties": model}
    whole = {"$schema": "http://json-schema.org/draft-07/schema#", **_plain(whole)}
    return json.dumps(whole, indent=2) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(schema())
