"""The lanes of nodes: fixed shares of the population.

The key of a part determines its lane permanently.

Up to `FEW_NODES` nodes own shares of 256 lanes. With more nodes, some would own none of these.
Each lane is then divided into 256 fine lanes, which are shared out instead.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from growcache.seeding import derive_seed, finalize64, stream64

LANES = 256
FINE_LANES = 65_536  # a fine lane is in the lane of its number modulo LANES
FEW_NODES = 16

Mask = npt.NDArray[np.bool_]


def owned_lanes(node: int, nodes: int) -> str | None:
    """Return a node's lanes for `Edition.lanes`, by rendezvous hashing; None for all lanes.

    An additional node takes lanes from all others, and no lane moves between two of these.
    """
    if nodes == 1:
        return None
    if nodes > FEW_NODES:
        return f"{node}/{nodes}"
    return np.packbits(_owners(nodes) == node).tobytes().hex()


@lru_cache(maxsize=64)
def lane_mask(lanes: str | None) -> Mask:
    """Return whether each fine lane is among those that `owned_lanes` returned.

    >>> [int(lane_mask(owned_lanes(0, nodes)).sum()) for nodes in (1, 3, 100)]
    [65536, 20992, 817]
    """
    if lanes is None:
        found = np.ones(FINE_LANES, np.bool_)
    elif "/" in lanes:
        node, nodes = map(int, lanes.split("/"))
        found = _owners_of_fine_lanes(nodes) == node
    else:
        owned = np.unpackbits(np.frombuffer(bytes.fromhex(lanes), np.uint8)).astype(np.bool_)
        found = np.tile(owned, FINE_LANES // LANES)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=4)
def _owners(nodes: int) -> npt.NDArray[np.int64]:
    owners = [
        max(range(nodes), key=lambda one: derive_seed("lane", lane, one))
        for lane in range(LANES)
    ]
    return np.array(owners)


@lru_cache(maxsize=4)
def _owners_of_fine_lanes(nodes: int) -> npt.NDArray[np.int64]:
    """Return the owner of each fine lane.

    Nodes after the first few take fine lanes from all. The others stay where they were.
    """
    seed = np.full(FINE_LANES, _word(derive_seed("fine lanes")))
    words = stream64(seed, np.arange(FINE_LANES, dtype=np.uint64))
    best = np.zeros(FINE_LANES, np.uint64)
    owners = np.zeros(FINE_LANES, np.int64)
    for node in range(nodes):
        scores = finalize64(words ^ _word(derive_seed("fine lanes", node)))
        won = scores > best
        best[won], owners[won] = scores[won], node
    few = np.tile(_owners(FEW_NODES), FINE_LANES // LANES)
    return np.where(owners < FEW_NODES, few, owners)


def _word(seed: int) -> np.uint64:
    return np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
