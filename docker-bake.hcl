// `docker buildx bake` builds xpu; `docker buildx bake cpu` one of the others.
// What each was built and run on: docs/results/containers.md.

variable "REGISTRY" { default = "lmcache-xpu" }
variable "TAG" { default = "0.1.0" }

group "default" { targets = ["xpu"] }

target "_image" {
  dockerfile = "docker/Dockerfile"
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
  args     = { XPU_IMAGE = "vllm/vllm-openai-xpu:v0.32.0" }
  tags     = ["${REGISTRY}/xpu:${TAG}"]
}

// The same, built up from Ubuntu and Intel's packages.
target "xpu-ubuntu" {
  inherits = ["_image"]
  target   = "xpu"
  args     = { XPU_IMAGE = "ubuntu-vllm" }
  tags     = ["${REGISTRY}/xpu:${TAG}-ubuntu"]
}

// End of life, for those who must stay on intel-extension-for-pytorch (archived in March 2026).
// vLLM 0.14.1 is outside of the tested versions: nothing of this package was run with it.
target "xpu-legacy" {
  inherits = ["_image"]
  target   = "xpu"
  args = {
    XPU_IMAGE      = "intel/vllm:0.14.1-xpu"
    ALLOW_UNTESTED = "1"
  }
  tags = ["${REGISTRY}/xpu:${TAG}-legacy"]
}

target "cpu" {
  inherits = ["_image"]
  target   = "cpu"
  tags     = ["${REGISTRY}/cpu:${TAG}"]
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
