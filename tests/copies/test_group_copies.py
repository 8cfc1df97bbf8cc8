"""Chunks of one group in an fp8 tier: rounded once, and never mixed with exact ones."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.asking import Asking
from support.lending import BLOCKS, CHUNK, Client, Connection, chunks_of, copies, filled, succeeds
from support.until import until

from lmcache_xpu.cache.local_client import LocalClient
from lmcache_xpu.cache.local_options import LocalCacheOptions
from lmcache_xpu.cache.protocol import KeyScope, TokenRange
from lmcache_xpu.cache.seals import SEAL_BYTES
from lmcache_xpu.copies.transfers import Transfers
from lmcache_xpu.errors import LayoutError

pytestmark = [
    pytest.mark.filterwarnings(rf"ignore::DeprecationWarning:{package}\..*")
    for package in ("torch", "opentelemetry", "lmcache")
]
STORED, LOADED = [3, 4, 9, 8, 20, 21], [10, 11, 12, 13, 14, 15]
SCOPE = KeyScope("m", 1, 0, 1, True, 1)
_names = itertools.count()


def layers(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Two layers of numbers of all sizes, also those that float8 does not reach."""
    made = {f"layer {n}": (filled(n) * 100).to(dtype) for n in range(2)}
    made["layer 0"][STORED[0], 0, 0, :4] = torch.tensor([1e4, -1e4, 2**-12, 0.0])
    return made


def rounded(values: torch.Tensor) -> torch.Tensor:
    """What float8_e4m3fn without scales makes of values: 4 binary digits, and no more than 448."""
    wide = values.to(torch.float64).clamp(-448, 448)
    step = torch.exp2(torch.floor(torch.log2(wide.abs().clamp_min(2**-6))) - 3)
    return (torch.round(wide / step) * step).to(values.dtype)


class Engine:
    """A worker of an engine, and the cache in its process."""

    def __init__(self, dtype: torch.dtype, tier_dtype: str, path=None) -> None:
        disk = {} if path is None else {"disk_path": path, "disk_gib": 0.01}
        options = LocalCacheOptions(
            chunk_tokens=CHUNK, cpu_gib=2**-10, tier_dtype=tier_dtype, **disk
        )
        self.is_closed = False
        self.asking = Asking(name=f"{path} {next(_names)}", options=options)
        self.cache, self.layers = self.asking.cache, layers(dtype)
        self.group = copies(self.layers)
        self.transfers = Transfers(LocalClient(self.cache, SCOPE), [self.group], 1.0, ())
        self.transfers.register()

    def tokens(self, blocks: list[int]) -> TokenRange:
        keys = self.asking.keys(1, 3)
        return TokenRange("r", keys, 0, 3 * CHUNK, blocks=[blocks])

    def store(self) -> bool:
        event = self.transfers.event()
        return succeeds(self.transfers.store(self.tokens(STORED), event, ()))

    def hit(self) -> int:
        """Load what any tier has."""
        keys = self.asking.keys(1, 3)
        handle = self.cache.find(keys, 3, in_memory=False)
        until(lambda: self.asking.hit_of(handle) is not None)
        if hit := self.asking.hits[handle]:
            event = self.transfers.event()
            assert succeeds(self.transfers.load(self.tokens(LOADED), event))
            assert hit == 3
        return hit

    def close(self) -> None:
        if not self.is_closed:
            self.transfers.close()
            self.cache.close()
        self.is_closed = True


@pytest.fixture
def engine():
    made = []

    def start(*args) -> Engine:
        made.append(Engine(*args))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_hit_is_the_rounding_of_what_was_stored_and_nothing_else_changes(engine, dtype):
    worker = engine(dtype, "fp8")
    before = [layer.clone() for layer in worker.layers.values()]
    assert worker.store()
    assert worker.hit() == 3
    for layer, was in zip(worker.layers.values(), before, strict=True):
        assert torch.equal(layer[LOADED], rounded(was[STORED]))
        assert not torch.equal(layer[LOADED], was[STORED])
        others = [block for block in range(BLOCKS) if block not in LOADED]
        assert torch.equal(layer[others], was[others])


@pytest.mark.parametrize(("dtype", "times"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_an_object_has_a_byte_for_each_element(dtype, times):
    exact, halved = copies(layers(dtype)), copies(layers(dtype))
    halved.hold_float8()
    assert (exact.object_bytes - SEAL_BYTES) == times * (halved.object_bytes - SEAL_BYTES)


@pytest.mark.parametrize(("first", "second"), [("fp8", "auto"), ("auto", "fp8")])
def test_what_one_type_has_on_disk_is_never_found_by_the_other(engine, tmp_path, first, second):
    writer = engine(torch.bfloat16, first, tmp_path)
    assert writer.store()
    [(_, disk)] = writer.cache._storage.l2_adapters()
    until(lambda: len(disk._store) == 3)
    writer.close()
    other = engine(torch.bfloat16, second, tmp_path)
    assert other.hit() == 0
    other.close()
    again = engine(torch.bfloat16, first, tmp_path)
    stored = [layer.clone()[STORED] for layer in again.layers.values()]
    assert again.hit() == 3
    exact = [torch.equal(a[LOADED], b) for a, b in zip(again.layers.values(), stored, strict=True)]
    assert exact == [first == "auto"] * 2


@pytest.mark.parametrize(
    ("options", "kind", "dtype"),
    [
        ({"recurrent": True, "block_tokens": CHUNK}, "states", torch.float32),
        ({}, "torch.uint8", torch.uint8),
        ({}, "torch.float8_e4m3fn", torch.float8_e4m3fn),
    ],
)
def test_what_has_no_error_to_spare_is_refused(options, kind, dtype):
    caches = {"layer": filled(0).to(dtype)}
    with pytest.raises(LayoutError, match=f"a KV cache of {kind}, and an fp8 tier.*tier_dtype"):
        copies(caches, **options).hold_float8()


def test_a_server_has_exact_chunks_alone():
    client, group = Client(), copies(layers(torch.bfloat16))
    size = group.object_bytes
    transfers = Transfers(Connection(client), [group], 0.3, ())
    transfers.register()
    try:
        assert group.object_bytes == size == client.sizes[0]
        assert succeeds(transfers.store(chunks_of(STORED), transfers.event(), ()))
    finally:
        transfers.close()
        client.close()
