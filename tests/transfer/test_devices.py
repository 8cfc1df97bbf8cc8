"""What differs between devices: each branch, and what vLLM's operations look like."""

from __future__ import annotations

import logging

import pytest
import torch
from support import caches
from support.intel import MACHINES
from support.intel import machine as machine  # a fixture

from lmcache_xpu.transfer.devices import (
    Pinning,
    address_table,
    has_triton,
    is_host,
    kernels_need,
    register_host,
    unregister_host,
    upload,
)

CPU, CUDA, XPU = map(torch.device, ("cpu", "cuda:0", "xpu:0"))
ADDRESSES = [0, 16, 2**47 - 1, 2**63 - 1, 2**63, 0xFFFF_D556_B640_0000, 2**64 - 1]
ADDRESS = 0xFFFF_D556_B640_0000
SCHEMAS = {
    "a number": "xpu_host_register(int ptr, int n_bytes) -> bool",  # 0.1.15.4 and 0.1.16.2
    "a tensor": "xpu_host_register(Tensor ptr, int n_bytes) -> bool",  # 4543b58
}


@pytest.fixture
def operation(request):
    """vllm-xpu-kernels' operation, which does what the test says."""
    with torch.library._scoped_library("_C", "FRAGMENT") as library:

        def define(schema: str, does) -> None:
            library.define(SCHEMAS[schema])
            library.impl("xpu_host_register", does, "CompositeExplicitAutograd")

        yield define


@pytest.mark.parametrize("answer", [True, False])
def test_memory_is_registered_by_number(operation, answer: bool):
    seen = []

    def register(ptr: int, n_bytes: int) -> bool:
        seen.append((ptr, n_bytes))
        return answer

    operation("a number", register)
    assert register_host(4096, 99, XPU) is answer
    assert seen == [(4096, 99)]


@pytest.mark.parametrize("address", [4096, ADDRESS])
@pytest.mark.parametrize("answer", [True, False])
def test_memory_is_registered_by_a_tensor(operation, answer: bool, address: int):
    seen = []

    def register(ptr: torch.Tensor, n_bytes: int) -> bool:
        assert ptr.dtype == torch.uint64
        assert ptr.device == CPU
        seen.append((ptr.tolist(), n_bytes))
        return answer

    operation("a tensor", register)
    assert register_host(address, 99, XPU) is answer
    assert seen == [([address], 99)]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_an_error_means_that_nothing_is_pinned(operation, schema: str, caplog):
    def register(ptr, n_bytes: int) -> bool:
        raise RuntimeError("UR_RESULT_ERROR_UNSUPPORTED_FEATURE")

    operation(schema, register)
    with caplog.at_level(logging.WARNING):
        assert register_host(4096, 99, XPU) is False
    assert "xpu:0 can't pin memory: RuntimeError: UR_RESULT_ERROR" in caplog.text


def test_without_the_operation_nothing_is_pinned(caplog):
    with caplog.at_level(logging.WARNING):
        assert register_host(4096, 99, XPU) is False
        assert register_host(4096, 99, CPU) is False
    assert not caplog.records


def test_cuda_s_call_is_cuda_s(monkeypatch, operation):
    """An error in it is no pinned memory either."""
    operation("a number", lambda ptr, n_bytes: pytest.fail("another device's"))

    class Runtime:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
            return 0 if size == 99 else 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    assert register_host(4096, 99, CUDA) is True
    assert register_host(4096, 98, CUDA) is False

    def missing() -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "cudart", missing)
    assert register_host(4096, 99, CUDA) is False


@pytest.mark.parametrize("takes", ["int ptr", "Tensor ptr"])
def test_memory_is_given_back_by_the_same_kind_of_argument(takes: str):
    seen = []
    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        library.define(f"xpu_host_unregister({takes}) -> bool")
        does = lambda ptr: seen.append(ptr if takes == "int ptr" else ptr.tolist()[0]) is None  # noqa: E731
        library.impl("xpu_host_unregister", does, "CompositeExplicitAutograd")
        unregister_host(4096, XPU)
    assert seen == [4096]


def test_giving_memory_back_ends_no_engine(monkeypatch, caplog):
    class Runtime:
        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
            raise RuntimeError(f"not registered: {address}")

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with caplog.at_level(logging.WARNING):
        unregister_host(4096, CUDA)
        unregister_host(4096, XPU)  # without an operation
        unregister_host(4096, CPU)
    [line] = caplog.messages
    assert "can't give back pinned memory: RuntimeError: not registered: 4096" in line


def test_registered_memory_is_for_copies_alone_on_xpu():
    assert kernels_need(CUDA) == Pinning.REGISTERED
    assert kernels_need(XPU) == Pinning.ALLOCATED


@MACHINES
def test_what_is_uploaded_is_what_was_given():
    uploads = [torch.randint(0, 99, (2, size)) for size in (1, 3, 100, 7, 0, 5000)]
    copies = [upload(tensor, torch.device(caches.DEVICE)) for tensor in uploads]
    for tensor, copy in zip(uploads, copies, strict=True):
        assert copy.device.type == caches.DEVICE
        assert torch.equal(copy.cpu(), tensor)


def test_the_host_alone_is_the_host():
    assert [is_host(device) for device in (CPU, CUDA, XPU)] == [True, False, False]
    assert [has_triton(device) for device in (CPU, XPU)] == [False, True]


def test_every_address_keeps_its_bits():
    table = address_table(ADDRESSES)
    assert table.dtype == torch.int64
    assert table.view(torch.uint64).tolist() == ADDRESSES
    assert [number % 2**64 for number in table.tolist()] == ADDRESSES


def test_no_addresses_are_an_empty_table():
    assert address_table([]).shape == (0,)
    assert address_table([]).dtype == torch.int64


@pytest.mark.parametrize("number", [-1, 2**64])
def test_what_is_no_address_is_an_error(number: int):
    with pytest.raises(OverflowError):
        address_table([number])
