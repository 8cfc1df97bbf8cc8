"""The Triton kernel for tests: on the accelerator if there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
from support.caches import DEVICE

INTERPRET = {"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {}

# Triton looks at the variable when a kernel is defined, and again when it runs. It is set for
# these alone, because processes that other tests start would inherit it.
with pytest.MonkeyPatch.context() as patch:
    for variable, value in INTERPRET.items():
        patch.setenv(variable, value)
    from lmcache_xpu.transfer import gather_scatter_triton as gather_scatter_triton

TritonTransfer = gather_scatter_triton.TritonTransfer


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """Of a module that imports this."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in INTERPRET.items():
            patch.setenv(variable, value)
        yield
