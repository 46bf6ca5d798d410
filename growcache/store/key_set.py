"""A set of keys in twelve bytes each: a hash, and the ordinal of the key in a catalog."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from growcache.seeding import Uint64Array, hash64

_MERGE_RATIO = 4  # a run is merged with a longer one of less than this many times its length
_LONGEST_RUN_KEYS = 1 << 24  # keys, because merging takes twice the memory for a moment

Ordinals = npt.NDArray[np.uint32]
KeysOf = Callable[[Sequence[int]], Sequence[str]]


class KeySet:
    """Hashes and ordinals in a few sorted runs, each several times longer than the next.

    The key of a known hash is read and compared, so two keys with one hash remain two keys.
    """

    def __init__(self, key_hash: Callable[[str], int] = hash64) -> None:
        self._hash = key_hash
        self._runs: list[tuple[Uint64Array, Ordinals]] = []
        self._colliding: set[str] = set()  # keys whose hash an earlier key has

    def add(self, keys: Sequence[str], first: int, keys_of: KeysOf) -> list[int]:
        """Add keys; return the places of the new ones, in order."""
        if not keys:
            return []
        hashes = np.fromiter(map(self._hash, keys), np.uint64, len(keys))
        known = self._find(hashes)
        if (known < 0).all() and len(np.unique(hashes)) == len(hashes):
            self._add_run(hashes, np.arange(first, first + len(keys), dtype=np.uint32))
            return list(range(len(keys)))
        return self._add_colliding(keys, hashes, known, first, keys_of)

    def _add_colliding(
        self,
        keys: Sequence[str],
        hashes: Uint64Array,
        known: npt.NDArray[np.int64],
        first: int,
        keys_of: KeysOf,
    ) -> list[int]:
        seen = np.flatnonzero(known >= 0)
        others = dict(zip(seen.tolist(), keys_of(known[seen].tolist()), strict=True))
        here: dict[int, str] = {}  # new hashes
        fresh: list[int] = []
        hashed: list[int] = []  # places among the fresh
        for place, (key, word) in enumerate(zip(keys, hashes.tolist(), strict=True)):
            other = others.get(place, here.get(word))
            if other == key or key in self._colliding:
                continue
            if other is None:
                here[word] = key
                hashed.append(len(fresh))
            else:
                self._colliding.add(key)
            fresh.append(place)
        if hashed:
            ordinals = np.array([first + number for number in hashed], np.uint32)
            self._add_run(hashes[[fresh[number] for number in hashed]], ordinals)
        return fresh

    def new_places(self, keys: Sequence[str]) -> list[int]:
        hashes = np.fromiter(map(self._hash, keys), np.uint64, len(keys))
        places: list[int] = np.flatnonzero(self._find(hashes) < 0).tolist()
        return places

    def _find(self, hashes: Uint64Array) -> npt.NDArray[np.int64]:
        found = np.full(len(hashes), -1, np.int64)
        for run, ordinals in self._runs:
            at = np.minimum(np.searchsorted(run, hashes), len(run) - 1)
            same = run[at] == hashes
            found[same] = ordinals[at[same]]
        return found

    def _add_run(self, hashes: Uint64Array, ordinals: Ordinals) -> None:
        self._runs.append(_sort_by_hash(hashes, ordinals))
        while len(self._runs) > 1:
            (longer, first), (shorter, second) = self._runs[-2:]
            together = len(longer) + len(shorter)
            if len(longer) >= _MERGE_RATIO * len(shorter) or together > _LONGEST_RUN_KEYS:
                break
            merged = np.concatenate([longer, shorter]), np.concatenate([first, second])
            self._runs[-2:] = [_sort_by_hash(*merged)]


def _sort_by_hash(hashes: Uint64Array, ordinals: Ordinals) -> tuple[Uint64Array, Ordinals]:
    order = np.argsort(hashes, kind="stable")
    return hashes[order], ordinals[order]
