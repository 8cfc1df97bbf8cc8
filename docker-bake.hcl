// `docker buildx bake` builds xpu; `docker buildx bake cpu` one of the others. Bases, versions and
// secrets are those of compose.yaml, which buildx reads as well, and so .env and the environment
// set them for both. Needs buildx 0.13 or newer. What was built where: docs/results/containers.md.

variable "REGISTRY" { default = "lmcache-xpu" }
variable "TAG" { default = "0.1.0" }

// Here for the tags; compose.yaml makes XPU_IMAGE of the first. The build's self-check refuses a
// version of vLLM that this package does not accept (src/lmcache_xpu/versions).
variable "VLLM_VERSION" { default = "0.32.0" }
variable "LMCACHE_VERSION" { default = "" }

// The images of others that are no default: `docker/digests` pins them too.
variable "SCALER_IMAGE" { default = "intel/llm-scaler-vllm:0.26.0-b2" }
variable "LLMD_IMAGE" { default = "ghcr.io/llm-d/llm-d-xpu:v0.9.0" }
variable "UBI_IMAGE" { default = "intel/vllm:0.29.0-ubi10" }

// Not empty: with SBOM and provenance, which Docker's default builder can't attach.
variable "RELEASE" { default = "" }

function "suffix" {
  params = [name, version]
  result = version == "" ? "" : "-${name}-${version}"
}

group "default" { targets = ["xpu"] }

// What .github/workflows/release.yml publishes: the images that the chart names.
group "release" { targets = ["xpu", "cpu", "router", "loadtest"] }

target "_image" {
  inherits = ["engine-cpu"]

  attest = RELEASE == "" ? [] : ["type=sbom", "type=provenance,mode=max"]
  labels = {
    "org.opencontainers.image.version" = TAG
  }
}

target "wheel" {
  inherits = ["_image"]
  target   = "wheel"
  tags     = []
  output   = ["type=local,dest=dist"]
}

// vLLM's own image for Intel GPUs, with LMCache and this package on top.
target "xpu" {
  inherits = ["_image"]
  target   = "xpu"
  tags     = ["${REGISTRY}/xpu:${TAG}${VLLM_VERSION == "0.32.0" ? "" : suffix("vllm", VLLM_VERSION)}${suffix("lmcache", LMCACHE_VERSION)}"]
}

// The same on images of others; docs/guides/images.md says what is known of each.
target "xpu-llm-scaler" {
  inherits = ["xpu"]
  args     = { XPU_IMAGE = SCALER_IMAGE }
  tags     = ["${REGISTRY}/xpu:${TAG}-llm-scaler"]
}

target "xpu-llm-d" {
  inherits = ["xpu"]
  args     = { XPU_IMAGE = LLMD_IMAGE }
  tags     = ["${REGISTRY}/xpu:${TAG}-llm-d"]
}

target "xpu-ubi" {
  inherits = ["xpu"]
  args     = { XPU_IMAGE = UBI_IMAGE }
  tags     = ["${REGISTRY}/xpu:${TAG}-ubi"]
}

// The same, built up from Ubuntu and Intel's packages.
target "xpu-ubuntu" {
  inherits = ["xpu"]
  args     = { XPU_IMAGE = "ubuntu-vllm" }
  tags     = ["${REGISTRY}/xpu:${TAG}-ubuntu"]
}

target "cpu" {
  inherits = ["_image"]
  target   = "cpu"
  tags     = ["${REGISTRY}/cpu:${TAG}${suffix("lmcache", LMCACHE_VERSION)}"]
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
