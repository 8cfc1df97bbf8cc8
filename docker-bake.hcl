// `docker buildx bake` builds xpu; `docker buildx bake cpu` one of the others.
// What each was built and run on: docs/results/containers.md.

variable "REGISTRY" { default = "lmcache-xpu" }
variable "TAG" { default = "0.1.0" }

// The version of vLLM whose image the target xpu is built on. The build's self-check refuses one
// that this package does not accept (src/lmcache_xpu/versions).
variable "VLLM_VERSION" { default = "0.32.0" }

// Empty: the pinned LMCache. 0.5.7rc2 is a pre-release.
variable "LMCACHE_VERSION" { default = "" }

// Digests of the base images (`docker/digests`); empty: what the tag names today.
variable "DEBIAN_DIGEST" { default = "" }
variable "XPU_DIGEST" { default = "" }
variable "UBUNTU_DIGEST" { default = "" }
variable "SCALER_DIGEST" { default = "" }
variable "LLMD_DIGEST" { default = "" }
variable "UBI_DIGEST" { default = "" }
variable "ROCKY_DIGEST" { default = "" }
variable "LEGACY_DIGEST" { default = "" }

// Not empty: with SBOM and provenance, which Docker's default builder can't attach.
variable "RELEASE" { default = "" }

function "pinned" {
  params = [image, digest]
  result = digest == "" ? image : "${image}@${digest}"
}

group "default" { targets = ["xpu"] }

// What .github/workflows/release.yml publishes: the images that the chart names.
group "release" { targets = ["xpu", "cpu", "router", "loadtest"] }

target "_image" {
  dockerfile = "docker/Dockerfile"
  args = {
    BASE_IMAGE      = pinned("debian:bookworm-slim", DEBIAN_DIGEST)
    UBUNTU_IMAGE    = pinned("ubuntu:24.04", UBUNTU_DIGEST)
    LMCACHE_VERSION = LMCACHE_VERSION
  }
  attest = RELEASE == "" ? [] : ["type=sbom", "type=provenance,mode=max"]
  labels = {
    "org.opencontainers.image.version" = TAG
  }
}

target "wheel" {
  inherits = ["_image"]
  target   = "wheel"
  output   = ["type=local,dest=dist"]
}

// vLLM's own image for Intel GPUs, with LMCache and this package on top.
target "xpu" {
  inherits = ["_image"]
  target   = "xpu"
  args     = { XPU_IMAGE = pinned("vllm/vllm-openai-xpu:v${VLLM_VERSION}", XPU_DIGEST) }
  tags     = ["${REGISTRY}/xpu:${TAG}${VLLM_VERSION == "0.32.0" ? "" : "-vllm-${VLLM_VERSION}"}${LMCACHE_VERSION == "" ? "" : "-lmcache-${LMCACHE_VERSION}"}"]
}

// The same on images of others; docs/guides/images.md says what is known of each.
target "xpu-llm-scaler" {
  inherits = ["xpu"]
  args     = { XPU_IMAGE = pinned("intel/llm-scaler-vllm:0.26.0-b2", SCALER_DIGEST) }
  tags     = ["${REGISTRY}/xpu:${TAG}-llm-scaler"]
}

target "xpu-llm-d" {
  inherits = ["xpu"]
  args     = { XPU_IMAGE = pinned("ghcr.io/llm-d/llm-d-xpu:v0.9.0", LLMD_DIGEST) }
  tags     = ["${REGISTRY}/xpu:${TAG}-llm-d"]
}

target "xpu-ubi" {
  inherits = ["xpu"]
  args     = { XPU_IMAGE = pinned("intel/vllm:0.29.0-ubi10", UBI_DIGEST) }
  tags     = ["${REGISTRY}/xpu:${TAG}-ubi"]
}

target "xpu-rocky" {
  inherits = ["xpu"]
  args     = { XPU_IMAGE = pinned("intel/vllm:0.29.0-rockylinux10", ROCKY_DIGEST) }
  tags     = ["${REGISTRY}/xpu:${TAG}-rocky"]
}

// The same, built up from Ubuntu and Intel's packages.
target "xpu-ubuntu" {
  inherits = ["xpu"]
  args     = { XPU_IMAGE = "ubuntu-vllm" }
  tags     = ["${REGISTRY}/xpu:${TAG}-ubuntu"]
}

// End of life, for those who must stay on intel-extension-for-pytorch (archived in March 2026).
// vLLM 0.14.1 is outside of the tested versions: nothing of this package was run with it.
target "xpu-legacy" {
  inherits = ["xpu"]
  args = {
    XPU_IMAGE      = pinned("intel/vllm:0.14.1-xpu", LEGACY_DIGEST)
    ALLOW_UNTESTED = "1"
  }
  tags = ["${REGISTRY}/xpu:${TAG}-legacy"]
}

target "cpu" {
  inherits = ["_image"]
  target   = "cpu"
  tags     = ["${REGISTRY}/cpu:${TAG}${LMCACHE_VERSION == "" ? "" : "-lmcache-${LMCACHE_VERSION}"}"]
}

target "loadtest" {
  inherits = ["_image"]
  target   = "loadtest"
  tags     = ["${REGISTRY}/loadtest:${TAG}"]
}

target "router" {
  inherits = ["_image"]
  target   = "router"
  tags     = ["${REGISTRY}/router:${TAG}"]
}
