"""Every tuned number of the data path, with a row per type of device.

Nothing else says how large a copy is, or how far ahead it is enqueued. A number that a driver
demands stands beside its cause instead.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The numbers that suit one type of device.

    Args:
        staging_bytes: device memory for staging, where no setting says it.
        buffer_bytes: most of a piece that is staged at once; it is half of that memory at most.
        pool_bytes: an allocation of host memory from this size on is a pool, which is pinned.
        direct_bytes: segments of host memory below this size are moved by a kernel that addresses
            them, larger ones by the copy engine.
        direct_bytes_idle: the same where the device has nothing else to do.
        direct_launch_bytes: a layer group up to this size is one launch of that kernel where the
            device has nothing else to do, whatever the size of its segments.
        direct_programs: programs that share a launch of that kernel.
        tile_words: words that one program of a kernel moves at once, a power of two.
        large_row_bytes: without Triton, rows from this size on are copied one by one.
        loaded_per_computed: loaded tokens per token to compute from which on copying takes longer
            than computing.
        load_us: microseconds that a load takes beside its copies.
        single_layers: of a load beside much computing, so many groups of one layer come first.
        most_layers: of a later group.
        least_layers: of a group beside little computing.
        first_groups: layer groups of a load that are enqueued at once.
        groups_ahead: layer groups of a load that are enqueued beyond the engine's layer.
        early_groups: of a load that begins before its step, so many groups of up to
            `direct_launch_bytes` come first.
        ahead_bytes: of all loads, bytes that are enqueued beyond what the engine waits for next.
    """

    staging_bytes: int = 256 * MIB
    # Each piece takes the engine's thread some time: pieces are large, layer groups are not.
    buffer_bytes: int = 128 * MIB
    # What is pinned stays pinned until the process ends: right for a pool, and wrong for passing
    # memory, whose addresses are given to others.
    pool_bytes: int = 64 * MIB
    # Compute beside the kernel is slowed more than beside the copy engine, so the kernel is for
    # small segments, which it moves faster.
    direct_bytes: int = 512 * KIB
    # Where the device is idle, one launch is enqueued earlier than hundreds of copies. Up to the
    # second size that counts for more than the link's last GB/s.
    direct_bytes_idle: int = 2 * MIB
    direct_launch_bytes: int = 256 * MIB
    # A full grid would take the device from the engine.
    direct_programs: int = 32
    tile_words: int = 1024
    # torch splits the copy of a large row among its threads, while its index operations move a few
    # large rows in one thread, and twice.
    large_row_bytes: int = 64 * KIB
    loaded_per_computed: int = 32
    load_us: int = 2000  # a guess
    single_layers: int = 2
    most_layers: int = 2
    least_layers: int = 8  # smaller copies are slower
    # The engine prepares its step meanwhile, and other requests' loads are enqueued.
    first_groups: int = 2
    groups_ahead: int = 2
    early_groups: int = 2
    # More would only take the engine's thread, before its first layer and behind it.
    ahead_bytes: int = 512 * MIB


# Measured on an NVIDIA H200, `large_row_bytes` on two x86-64 cores. No Intel GPU was measured: its
# numbers are the same until one is.
TUNINGS = {device_type: Tuning() for device_type in ("xpu", "cuda", "cpu")}


def tuning_of(device_type: str) -> Tuning:
    """Return the numbers for a type of device, as torch names it; XPU's for one without a row."""
    return TUNINGS.get(device_type, TUNINGS["xpu"])
