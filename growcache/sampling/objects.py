"""The objects that samples are drawn from: all that are listed, or those of one subset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np

from growcache.remote.catalog import Catalog
from growcache.remote.store import Entry
from growcache.sampling.draws import Ints
from growcache.sampling.growing import Growing
from growcache.sampling.subsets import Subsets
from growcache.seeding import hash64


@dataclass(frozen=True, slots=True)
class Subset:
    """What is listed of one subset of a split.

    Attributes:
        name: in the configuration.
        objects: of it.
        groups: that these objects are of; no group is in two subsets.
        sizes: of the objects, bytes.
        used: whether it is the one that is drawn from.
    """

    name: str
    objects: int
    groups: int
    sizes: Ints
    used: bool


class Objects:
    """A numbering of the objects that are drawn from, in the order of the listing.

    Numbers never change: the catalog is append-only, and whether an object is drawn from
    follows from its key.

    Args:
        catalog: the listing.
        subsets: of which only one is drawn from; None: all objects are.
    """

    def __init__(self, catalog: Catalog, subsets: Subsets | None = None) -> None:
        self._catalog = catalog
        self._subsets = subsets
        self._ordinals = Growing(np.dtype(np.int64))  # in the catalog, of those drawn from
        # Of every entry of the catalog that was looked at:
        self._places = Growing(np.dtype(np.int8))
        self._groups = Growing(np.dtype(np.uint64))

    def look(self, listed: int) -> None:
        """Sort out the first ``listed`` entries of the catalog.

        Raises:
            ConfigError: one cannot be told to be of a subset.
        """
        first = len(self._places)
        if self._subsets is None or listed <= first:
            return
        for keys in self._catalog.keys(first, listed):
            groups = self._subsets.groups(keys)
            places = self._subsets.places(groups)
            drawn = np.flatnonzero(places == self._subsets.used) + len(self._places)
            self._ordinals.extend(drawn)
            self._places.extend(places)
            self._groups.extend(np.fromiter(map(hash64, groups), np.uint64, len(groups)))

    def among(self, listed: int) -> int:
        """Return how many of the first ``listed`` entries of the catalog are drawn from."""
        if self._subsets is None:
            return listed
        self.look(listed)
        return int(np.searchsorted(self._ordinals.values, listed))

    def entries(self, numbers: Ints) -> list[Entry]:
        """Return objects by their numbers."""
        if self._subsets is None:
            return self._catalog.entries(numbers)
        return self._catalog.entries(self._ordinals.values[numbers])

    def sizes(self, start: int, stop: int) -> Ints:
        """Return the bytes of the objects from one number to another."""
        if self._subsets is None:
            return self._catalog.sizes[start:stop]
        sizes: Ints = self._catalog.sizes[self._ordinals.values[start:stop]]
        return sizes

    def keys(self, start: int, stop: int) -> Iterator[str]:
        """Yield the keys of the objects from one number to another."""
        if self._subsets is None:
            return chain.from_iterable(self._catalog.keys(start, stop))
        ordinals = self._ordinals.values[start:stop]
        if not len(ordinals):
            return iter(())
        first, last = int(ordinals[0]), int(ordinals[-1]) + 1
        listed = chain.from_iterable(self._catalog.keys(first, last))
        mine = self._places.values[first:last] == self._subsets.used
        return compress(listed, mine)

    def subsets(self) -> list[Subset]:
        """Return what is listed of each subset; nothing without a split."""
        if self._subsets is None:
            return []
        places = self._places.values
        sizes = self._catalog.sizes[: len(places)]
        found = []
        for n, name in enumerate(self._subsets.names):
            mine = places == n
            groups = len(np.unique(self._groups.values[mine]))
            used = n == self._subsets.used
            found.append(Subset(name, int(mine.sum()), groups, sizes[mine], used))
        return found
