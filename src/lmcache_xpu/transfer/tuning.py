"""Every tuned number of the data path: how large a copy is, and how far ahead it is enqueued.

A number that a driver demands stands beside its cause instead.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 2**10, 2**20


@dataclass(kw_only=True)
class Tuning:
    """The numbers of the data path, and of the choice between loading and computing."""

    # Device memory for staging, where no setting says it, and most of a piece that is staged at
    # once. Each piece takes the engine's thread some time: pieces are large, layer groups are not.
    staging_bytes: int = 256 * MIB
    buffer_bytes: int = 128 * MIB
    # An allocation of host memory from this size on is a pool, which is pinned. What is pinned
    # stays pinned until the process ends: wrong for passing memory, whose addresses are given to
    # others.
    pool_bytes: int = 64 * MIB
    # Segments of host memory below this size are moved by a kernel that addresses them, larger ones
    # by the copy engine, beside which computing is slowed less.
    direct_bytes: int = 512 * KIB
    # The same where the device is idle: one launch is enqueued earlier than hundreds of copies. A
    # layer group up to the second size is one launch, whatever the size of its segments.
    direct_bytes_idle: int = 2 * MIB
    direct_launch_bytes: int = 256 * MIB
    # Programs that share such a launch. A full grid would take the device from the engine.
    direct_programs: int = 32
    tile_words: int = 1024  # that one program of a kernel moves at once, a power of two
    # Loaded tokens per token to compute from which on copying takes longer than computing.
    loaded_per_computed: int = 32
    load_us: int = 2000  # that a load takes beside its copies; a guess
    # Layers of the first and the later groups of a load beside much computing, and the least of a
    # group beside little: smaller copies are slower.
    single_layers: int = 2
    most_layers: int = 2
    least_layers: int = 8
    # Layer groups that are enqueued at once, and beyond the engine's layer. The engine prepares its
    # step meanwhile, and other requests' loads are enqueued.
    first_groups: int = 2
    groups_ahead: int = 2
    # Of a load that begins before its step, so many groups of `direct_launch_bytes` come first.
    early_groups: int = 2
    # Of all loads, enqueued before their step. More would only take the engine's thread.
    ahead_bytes: int = 512 * MIB


# Measured on an NVIDIA H200. No Intel GPU was measured: its numbers are the same until one is.
TUNING = Tuning()
