"""The lanes of nodes: fixed shares of the population, which each part is in by its key, for ever."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from growcache.seeding import derive_seed

LANES = 256


def owned_lanes(node: int, nodes: int) -> str | None:
    """Return the lanes of a node, as in `Edition.lanes`, by rendezvous hashing; None for all.

    An added node takes lanes from all others, and no lane moves between two of these.
    """
    if nodes == 1:
        return None
    owners = [
        max(range(nodes), key=lambda one: derive_seed("lane", lane, one))
        for lane in range(LANES)
    ]
    return np.packbits(np.array(owners) == node).tobytes().hex()


def lane_mask(lanes: str | None) -> npt.NDArray[np.bool_]:
    """Return whether each lane is among those that `owned_lanes` returned.

    >>> int(lane_mask(owned_lanes(0, 3)).sum()), int(lane_mask(None).sum())
    (82, 256)
    """
    if lanes is None:
        return np.ones(LANES, np.bool_)
    return np.unpackbits(np.frombuffer(bytes.fromhex(lanes), np.uint8)).astype(np.bool_)
