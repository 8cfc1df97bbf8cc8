"""The imitated Intel GPU: it is as PyTorch makes one, and sees what would be wrong on one."""

from __future__ import annotations

import pytest
import torch
from support.caches import Spec, build, view_of
from support.imitated_streams import Event, Stream
from support.imitation import GPU, ON_HOST, XPU
from support.intel import INTEL
from support.intel import machine as machine  # a fixture
from support.kernels import TritonTransfer

from lmcache_xpu.transfer.slots import Rows

UNPINNED, REGISTERED, PINNED = INTEL
ON_ONE = pytest.mark.parametrize("machine", [PINNED], indirect=True, ids=str)


@ON_ONE
def test_addresses_lie_at_the_top_and_devices_do_not_mix(machine):
    there = torch.zeros(4, dtype=torch.int64, device="xpu")
    assert there.device == there[1:].device == XPU
    assert there.data_ptr() >= 2**63
    assert there[1:].data_ptr() == there.data_ptr() + 8
    host = torch.arange(4)
    assert host.data_ptr() < 2**63
    with pytest.raises(RuntimeError, match="same device"):
        there + host
    there.copy_(host)
    assert there.cpu().tolist() == [0, 1, 2, 3]
    assert (there + 1).tolist() == [1, 2, 3, 4]
    assert host.to("xpu").device == XPU


@ON_ONE
def test_memory_is_pinned_where_it_was_allocated_so(machine):
    host = torch.arange(4)
    assert not host.is_pinned()
    assert not host.to("xpu").is_pinned()
    assert host.pin_memory().is_pinned()
    assert torch.empty(3, pin_memory=True)[1:].is_pinned()


def test_nothing_of_it_is_left_behind():
    assert GPU.here is None
    assert not hasattr(torch.ops._C, "xpu_host_register")
    assert torch.zeros(1).data_ptr() < 2**63


@pytest.mark.skipif(not ON_HOST, reason="an accelerator's own streams are not looked at")
@ON_ONE
@pytest.mark.parametrize("wait", ["nothing", "an event", "a stream", "the host"])
@pytest.mark.parametrize("then", ["a read", "a write"])
@pytest.mark.parametrize("first", ["a read", "a write"])
def test_a_missing_wait_is_seen(machine, first: str, then: str, wait: str):
    def access(kind: str, data: torch.Tensor) -> None:
        _ = data.add_(1) if kind == "a write" else data.clone()

    data = torch.zeros(8, device="xpu")
    stream, later_stream = Stream(), Stream()
    for each in (stream, later_stream):
        each.wait_stream(GPU.here.streams[0])
    with stream:
        access(first, data[:5])
        event = Event()
        event.record()
    with later_stream:
        access(then, data[5:])  # other bytes
        if wait == "an event":
            event.wait()
        elif wait == "a stream":
            later_stream.wait_stream(stream)
        elif wait == "the host":
            assert not event.query()
            event.synchronize()
            assert event.query()
        if wait == "nothing" and "a write" in (first, then):
            with pytest.raises(RuntimeError, match="without a wait"):
                access(then, data[4:])
            GPU.here.faults.clear()
        else:
            access(then, data[4:])


@pytest.mark.skipif(not ON_HOST, reason="an accelerator's own streams are not looked at")
@ON_ONE
@pytest.mark.parametrize("waited", [True, False])
def test_the_host_s_missing_wait_is_seen(machine, waited: bool):
    host, there = torch.zeros(8, pin_memory=True), torch.ones(8, device="xpu")
    host.copy_(there, non_blocking=True)
    event = Event()
    event.record()
    if waited:
        event.synchronize()
        assert host.tolist() == [1] * 8
        return
    with pytest.raises(RuntimeError, match=r"the host.* reads without a wait"):
        host.tolist()
    GPU.here.faults.clear()


@pytest.mark.parametrize(
    ("machine", "pinned", "says"),
    [
        (UNPINNED, True, "a kernel addresses memory of the host"),
        pytest.param(
            REGISTERED,
            False,
            "a kernel addresses memory that was not allocated pinned",
            marks=pytest.mark.skipif(not ON_HOST, reason="an accelerator would be lost by it"),
        ),
    ],
    indirect=["machine"],
    ids=str,
)
def test_kernels_that_go_where_they_must_not_are_seen(machine, pinned: bool, says: str):
    cache = build(Spec("LBNHC"))
    host = torch.zeros(4096, dtype=torch.uint8, pin_memory=pinned)
    table = torch.tensor([host.data_ptr()]).to("xpu")
    rows = Rows(torch.zeros(1, dtype=torch.int64, device="xpu"), None)
    form = host[:64].view(1, 2, 1, 1, 32)
    with pytest.raises(Exception, match=says):
        TritonTransfer.of(view_of(cache)).gather(rows, form, table=table)
    GPU.here.faults.clear()
