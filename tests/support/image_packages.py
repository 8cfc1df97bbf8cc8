"""What vLLM's images for Intel GPUs have, with LMCache beside it, of the packages both ask for."""

from __future__ import annotations

from packaging.version import Version

from lmcache_xpu.versions import TESTED

_TO_0_28 = {
    "grpcio": "1.81.1",
    "grpcio-status": "1.81.1",
    "opentelemetry-api": "1.43.0",
    "opentelemetry-exporter-otlp": "1.43.0",
    "opentelemetry-exporter-prometheus": "0.64b0",
    "opentelemetry-sdk": "1.43.0",
    "prometheus-client": "0.25.0",
    "protobuf": "7.35.1",
}
_FROM_0_29 = {
    "grpcio": "1.83.0",
    "grpcio-status": "1.83.0",
    "opentelemetry-api": "1.44.0",
    "opentelemetry-exporter-otlp": "1.44.0",
    "opentelemetry-exporter-prometheus": "0.65b0",
    "opentelemetry-sdk": "1.44.0",
    "prometheus-client": "0.26.0",
    "protobuf": "7.35.1",
}
IMAGE_PACKAGES: dict[str, dict[str, str]] = {
    vllm: _TO_0_28 if Version(vllm) < Version("0.29") else _FROM_0_29 for vllm in TESTED["vllm"]
}
