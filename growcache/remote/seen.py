"""Which keys a catalog has, in some 25 bytes each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from growcache.seeding import hash64

_RECENT = 1 << 15  # keys; a dict entry takes some 150 bytes


class SeenKeys:
    """A set of keys that remembers a hash and an ordinal for each.

    A hash that is known is looked up and its key compared, so two keys of one hash are two keys.
    """

    def __init__(self, key_hash: Callable[[str], int] = hash64) -> None:
        self._hash = key_hash
        self._recent: dict[int, int] = {}
        self._hashes: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)  # sorted
        self._ordinals: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._doubles: dict[str, int] = {}  # keys whose hash another key had before

    def load(self, keys: Iterable[Sequence[str]]) -> None:
        """Take in the keys of ordinals 0, 1, …, all different, in pieces of any length."""
        parts = [np.fromiter(map(self._hash, some), np.uint64, len(some)) for some in keys]
        hashes = np.concatenate(parts) if parts else np.zeros(0, np.uint64)
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._ordinals = hashes[order], order.astype(np.int64)

    def same_hash(self) -> list[int]:
        """Return the ordinals of loaded keys that share their hash with an earlier one."""
        again = np.flatnonzero(self._hashes[1:] == self._hashes[:-1]) + 1
        return [int(ordinal) for ordinal in self._ordinals[again]]

    def note_double(self, key: str, ordinal: int) -> None:
        """Remember a key that `same_hash` found."""
        self._doubles[key] = ordinal

    def add(self, key: str, ordinal: int, key_of: Callable[[int], str]) -> bool:
        """Add a key; return whether it was new.

        Args:
            key: the key.
            ordinal: of the key, if it is new.
            key_of: looks up the key of an earlier ordinal.
        """
        hashed = self._hash(key)
        known = self._find(hashed)
        if known is None:
            self._recent[hashed] = ordinal
            if len(self._recent) >= max(_RECENT, len(self._hashes) // 8):
                self._merge()
            return True
        if key_of(known) == key or key in self._doubles:
            return False
        self._doubles[key] = ordinal
        return True

    def _find(self, hashed: int) -> int | None:
        if (recent := self._recent.get(hashed)) is not None:
            return recent
        at = int(np.searchsorted(self._hashes, np.uint64(hashed)))
        if at < len(self._hashes) and int(self._hashes[at]) == hashed:
            return int(self._ordinals[at])
        return None

    def _merge(self) -> None:
        count = len(self._recent)
        hashes = np.fromiter(self._recent.keys(), np.uint64, count)
        ordinals = np.fromiter(self._recent.values(), np.int64, count)
        hashes = np.concatenate([self._hashes, hashes])
        ordinals = np.concatenate([self._ordinals, ordinals])
        order = np.argsort(hashes, kind="stable")
        self._hashes, self._ordinals = hashes[order], ordinals[order]
        self._recent = {}
