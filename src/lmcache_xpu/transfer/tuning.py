"""Every tuned number of the data path, in one table with a row per type of device.

A new card is one row to fill; defaults are CUDA's values. Nothing else says how large a copy is, or
how far ahead it is enqueued. What a driver demands stands beside its cause and not here.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The numbers that suit one type of device.

    Args:
        measured_on: the machine that they were measured on.
        staging_bytes: device memory for staging, where no setting says it.
        buffer_bytes: most of a piece that is staged at once; it is half of that memory at most.
        upload_ring_bytes: pinned memory for row numbers and addresses on their way to the device.
        pool_bytes: an allocation of host memory from this size on is a pool, which is pinned.
        direct_bytes: segments of host memory below this size are moved by a kernel that addresses
            them, larger ones by the copy engine.
        direct_bytes_batched: the same where the driver takes many copies at once.
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
        async_bytes: of all loads that no step waits for, bytes that are under way behind a step.
        async_bytes_early: of one of these, bytes that may be under way when vLLM is told of it.
    """

    measured_on: str
    staging_bytes: int = 256 * MIB
    # The engine's thread enqueues each piece in 0.2 to 0.4 ms, and an engine in eager mode takes 1
    # to 1.4 for a layer: pieces are large, and layer groups (`most_layers`) are not.
    buffer_bytes: int = 128 * MIB
    # Not measured: a slot mapping of 1,000,000 tokens; most have a hundredth of that.
    upload_ring_bytes: int = 8 * MIB
    # Not measured. What is pinned stays pinned until the process ends. That is right for a pool,
    # and wrong for passing memory, whose addresses are given to others.
    pool_bytes: int = 64 * MIB
    # Of 288 KiB segments the kernel moves a third more than the copy engine, of 1 MiB hardly more;
    # but compute beside it is slowed more. So the kernel is for the small.
    direct_bytes: int = 512 * KIB
    direct_bytes_batched: int = 256 * KIB  # smaller ones were not measured
    # Both ways are as fast here, but one launch is enqueued much earlier than hundreds of copies.
    # That counts for more than the link's last GB/s up to the second size.
    direct_bytes_idle: int = 2 * MIB
    direct_launch_bytes: int = 256 * MIB
    # What the link gives to a kernel. A full grid would take the device from the engine.
    direct_programs: int = 32
    tile_words: int = 1024  # 2048 and 4096 are slower
    # torch splits the copy of a large row among its threads, while its index operations move a few
    # large rows in one thread, and twice.
    large_row_bytes: int = 64 * KIB
    # A guess: measured, 20. More on devices that compute more slowly.
    loaded_per_computed: int = 32
    load_us: int = 2000  # a guess
    single_layers: int = 2
    most_layers: int = 2  # see `buffer_bytes`
    least_layers: int = 8  # smaller copies are slower
    # The engine prepares its step meanwhile, and other requests' loads are enqueued.
    first_groups: int = 2
    groups_ahead: int = 2
    early_groups: int = 2
    # 10 ms of the link. More would only take the engine's thread, before its first layer and
    # behind it.
    ahead_bytes: int = 512 * MIB
    # 19 ms of a link that gives 42 GB/s beside a decoding engine.
    async_bytes: int = 768 * MIB
    # 12 ms of it, as vLLM took to bring the request into a step.
    async_bytes_early: int = 512 * MIB


TUNINGS = {
    "cuda": Tuning(measured_on="NVIDIA H200, PCIe 5 (55 GB/s); large_row_bytes: two x86-64 cores"),
    # No Intel GPU was measured. Nor would it be right to guess: these are CUDA's.
    "xpu": Tuning(measured_on="nothing: the values of cuda"),
    # Of these, transfers on the host use `large_row_bytes` and what decides on layer groups.
    "cpu": Tuning(
        measured_on="two x86-64 cores, large_row_bytes alone; the others are the values of cuda"
    ),
}


def tuning_of(device_type: str) -> Tuning:
    """Return the numbers for a type of device, as torch names it; XPU's for one without a row."""
    return TUNINGS.get(device_type, TUNINGS["xpu"])
