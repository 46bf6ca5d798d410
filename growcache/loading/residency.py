"""Which shards stay in memory after they were read. Pure: values in, values out.

A pass reads every shard once. A page cache that is smaller than that forgets each just
before it is wanted again, and everything else of the machine on the way. So of a cache
beyond memory the same part of the shards stays from pass to pass, as much as there is
room for, and the others are let go as soon as they were read.
"""

from __future__ import annotations

# Of what could be had: the rest is for whatever else the machine does.
SHARE_OF_AVAILABLE = 0.5
WINDOWS = 2  # that are read, and read ahead

_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the multiples of it fill a circle evenly
_CIRCLE = 1 << 64


def kept_share(cache_bytes: int, available_bytes: int, window_bytes: int) -> float:
    """Return the share of the shards that stay in memory.

    Args:
        cache_bytes: of all shards that a pass reads.
        available_bytes: of memory, what of these shards is in the page cache included.
        window_bytes: of the shards of a window, which are in memory besides.

    >>> kept_share(10 * 10**9, 48 * 10**9, 10**9), kept_share(900 * 10**9, 40 * 10**9, 10**9)
    (1.0, 0.02)
    """
    room = SHARE_OF_AVAILABLE * max(0, available_bytes)
    if cache_bytes <= room:
        return 1.0
    return max(0.0, room - WINDOWS * window_bytes) / cache_bytes


def is_kept(number: int, share: float) -> bool:
    """Return whether a shard is among those that stay.

    Every reader says the same of a shard, and who stays at some share does at a larger one.

    Args:
        number: of the shard.
        share: of the shards that stay.
    """
    return (number * _STEP) % _CIRCLE < share * _CIRCLE
