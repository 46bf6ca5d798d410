"""Which shards stay in memory after they were read. Pure: values in, values out.

A pass reads every shard once. A page cache that is smaller than that forgets each just
before it is wanted again, and everything else of the machine on the way. So of a cache
beyond memory the same part of the shards stays from pass to pass, as much as there is
room for, and the others are let go as soon as they were read.
"""

from __future__ import annotations

# Of what could be had: the rest is for whatever else the machine does, and for the windows
# that are being read.
SHARE_OF_AVAILABLE = 0.5

_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: the multiples of it fill a circle evenly
_CIRCLE = 1 << 64


def kept_share(cache_bytes: int, available_bytes: int) -> float:
    """Return the share of the shards that stay in memory.

    Args:
        cache_bytes: of all shards that a pass reads.
        available_bytes: of memory, what of these shards is in the page cache included.

    >>> kept_share(10 * 10**9, 48 * 10**9), kept_share(1000 * 10**9, 40 * 10**9)
    (1.0, 0.02)
    """
    room = SHARE_OF_AVAILABLE * max(0, available_bytes)
    return 1.0 if cache_bytes <= room else room / cache_bytes


def is_kept(number: int, share: float) -> bool:
    """Return whether a shard is among those that stay.

    Every reader says the same of a shard, and who stays at some share does at a larger one.

    Args:
        number: of the shard.
        share: of the shards that stay.
    """
    return (number * _STEP) % _CIRCLE < share * _CIRCLE
