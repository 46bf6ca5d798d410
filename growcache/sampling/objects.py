"""The objects that samples are drawn from: all that are listed, or those of one subset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.errors import ConfigError
from growcache.remote.catalog import Catalog
from growcache.remote.tables import NONE as NO_ROW
from growcache.sampling.draws import Ints
from growcache.sampling.growing import Growing
from growcache.sampling.messages import Stop
from growcache.sampling.mixed import AnyLabels, AnyPairs
from growcache.sampling.pairs import Complete
from growcache.sampling.subsets import NONE, Subsets
from growcache.seeding import hash64

SHOWN = 10  # objects without labels that a message names

Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Subset:
    """What is listed of one subset of a split.

    Attributes:
        name: in the configuration.
        objects: of it.
        groups: that these objects are of; no group is in two subsets.
        sizes: of the objects, bytes.
        sources: of the objects.
        used: whether it is the one that is drawn from.
    """

    name: str
    objects: int
    groups: int
    sizes: Ints
    sources: Ints
    used: bool


class Objects:
    """A numbering of the objects that are drawn from, in the order of the listing.

    Numbers never change: the catalog is append-only, and whether an object is drawn from
    follows from its key, the split and the table of labels.

    Args:
        catalog: the listing.
        subsets: of which only one is drawn from; None: all objects are.
        pairs: which entries of the catalog are one object; None: each is one.
        skips: whether objects without labels or partners are left out; else they are an error.
        firsts: the number of the first URL of each source.

    Attributes:
        labels: that samples get; None: none. Set before the first look.
    """

    def __init__(
        self,
        catalog: Catalog,
        subsets: Subsets | None = None,
        pairs: AnyPairs | None = None,
        *,
        skips: bool = False,
        firsts: Sequence[int] = (0,),
    ) -> None:
        self._catalog = catalog
        self._subsets = subsets
        self._pairs = pairs
        self._skips = skips
        self._url_firsts = np.array(firsts)
        self.labels: AnyLabels | None = None
        self._unlabelled = 0
        self._finished = False
        self._missing: list[tuple[int, str]] = []  # the first of these
        # In the catalog, of those drawn from; of pairs of the last members, and of all:
        self._ordinals = Growing(np.dtype(np.int64))
        self._members = Growing(np.dtype(np.int64))
        self._looked = 0  # entries of the catalog that are sorted out
        self._found = Growing(np.dtype(np.int64))  # pairs: their first members' ordinals
        # Where there are several: of those drawn from, and of all.
        self._sources = Growing(np.dtype(np.int64))
        self._found_sources = Growing(np.dtype(np.int64))
        # Of each object, where there is a split; `NONE` where it has no labels:
        self._places = Growing(np.dtype(np.int8))
        self._groups = Growing(np.dtype(np.uint64))

    @property
    def _all(self) -> bool:
        """Whether every entry of the catalog is an object that is drawn from."""
        whole = self._subsets is None and self.labels is None and self._pairs is None
        return whole and not self._mixed

    @property
    def _mixed(self) -> bool:
        return len(self._url_firsts) > 1

    def look(self, listed: int) -> None:
        """Sort out the first ``listed`` entries of the catalog.

        Raises:
            ConfigError: one cannot be told to be of a subset, or has no labels.
        """
        if self._all or listed <= self._looked:
            return
        for stores, keys in self._catalog.names(self._looked, listed):
            if self._pairs is None:
                drawn = self._sorted_out(stores, keys)
                self._ordinals.extend(np.flatnonzero(drawn) + self._looked)
                self._note_sources(stores, drawn)
            else:
                self._pair_up(self._pairs.take(self._looked, stores, keys))
            self._looked += len(keys)
        if self._unlabelled and not self._skips:
            raise ConfigError(self.complaint())

    def finish(self) -> None:
        """Note that the catalog is all there is.

        Raises:
            ConfigError: an object is not whole.
        """
        self._finished = True
        if self._pairs is not None and self._pairs.unmatched and not self._skips:
            raise ConfigError(self._pairs.complaint(SHOWN))

    @property
    def unmatched(self) -> int:
        """How many would be drawn from, had they labels, or (once all is listed) partners."""
        lacking = self._pairs.unmatched if self._pairs is not None and self._finished else 0
        return self._unlabelled + lacking

    @property
    def listed(self) -> int:
        """How many objects there are, whole or not, of all subsets."""
        if self._pairs is None:
            return len(self._catalog)
        return len(self._found) + self._pairs.unmatched

    def _pair_up(self, whole: Complete) -> None:
        drawn = self._sorted_out(whole.stores, whole.keys)
        self._found.extend(whole.members[:, 0])
        self._ordinals.extend(whole.lasts[drawn])
        self._members.extend(whole.members[drawn].ravel())
        self._note_sources(whole.stores, drawn)

    def _note_sources(self, stores: Sequence[int], drawn: Mask) -> None:
        if self._mixed:
            sources = np.searchsorted(self._url_firsts, np.asarray(stores), side="right") - 1
            self._found_sources.extend(sources)
            self._sources.extend(sources[drawn])

    def _sorted_out(self, stores: list[int], keys: list[str]) -> Mask:
        """Return which of some entries are drawn from."""
        rows = None if self.labels is None else self.labels.rows(stores, keys)
        labelled = np.ones(len(keys), np.bool_) if rows is None else rows != NO_ROW
        wanted = self._of_the_subset(keys, rows, labelled)
        for i in np.flatnonzero(wanted & ~labelled).tolist():
            self._unlabelled += 1
            if len(self._missing) < SHOWN:
                self._missing.append((stores[i], keys[i]))
        return wanted & labelled

    def _of_the_subset(self, keys: list[str], rows: Ints | None, labelled: Mask) -> Mask:
        if self._subsets is None:
            return np.ones(len(keys), np.bool_)
        label = self._subsets.label
        if label is None:
            groups = self._subsets.groups(keys)
        else:
            assert self.labels is not None
            assert rows is not None
            groups = self.labels.texts(label, rows)
        places = self._subsets.places(groups)
        self._places.extend(np.where(labelled, places, NONE))
        self._groups.extend(np.fromiter(map(hash64, groups), np.uint64, len(groups)))
        wanted: Mask = places == self._subsets.used
        return wanted if label is None else wanted | ~labelled

    def complaint(self) -> str:
        """Say which objects have no labels, or not all fields."""
        if not self._unlabelled:
            return self._pairs.complaint(SHOWN) if self._pairs is not None else ""
        assert self.labels is not None
        looked = self._unlabelled + len(self._ordinals)
        return self.labels.complaint(self._missing, self._unlabelled, looked)

    def among(self, listed: int) -> int:
        """Return how many of the first ``listed`` entries of the catalog are drawn from."""
        if self._all:
            return listed
        self.look(listed)
        return int(np.searchsorted(self._ordinals.values, listed))

    def stops(self, numbers: Ints) -> list[Stop]:
        """Return visits to objects by their numbers, as if each were one part."""
        stops = self._bare_stops(numbers)
        if self.labels is None:
            return stops
        stores, keys = [one.entry.store for one in stops], [one.entry.key for one in stops]
        joined = self.labels.joined(stores, keys)
        return [replace(one, joined=more) for one, more in zip(stops, joined, strict=True)]

    def _bare_stops(self, numbers: Ints) -> list[Stop]:
        if self._pairs is None:
            ordinals = numbers if self._all else self._ordinals.values[numbers]
            return [Stop(entry) for entry in self._catalog.entries(ordinals)]
        rows = [[int(n) for n in row if n >= 0] for row in self._rows[numbers]]
        entries = iter(self._catalog.entries(list(chain.from_iterable(rows))))
        members = ([next(entries) for _ in row] for row in rows)
        return [Stop(first, partners=tuple(others)) for first, *others in members]

    @property
    def _rows(self) -> Ints:
        """The ordinals of pairs' members; int64 [objects, fields], -1 behind the last."""
        assert self._pairs is not None
        rows: Ints = self._members.values.reshape(-1, self._pairs.width)
        return rows

    def _firsts(self, start: int, stop: int) -> Ints:
        """Return the ordinals of objects; of pairs those of their first members."""
        if self._pairs is None:
            return self._ordinals.values[start:stop]
        return self._rows[start:stop, 0]

    def sources(self, start: int, stop: int) -> Ints:
        """Return the sources of the objects from one number to another."""
        if not self._mixed:
            return np.zeros(stop - start, np.int64)
        return self._sources.values[start:stop]

    def numbers(self, source: int, start: int, stop: int) -> Ints:
        """Return which objects are those from a place to another among all of a source."""
        if not self._mixed:
            return np.arange(start, min(stop, self.among(len(self._catalog))))
        return np.flatnonzero(self._sources.values == source)[start:stop]

    def counts(self, listed: int) -> Ints:
        """Return how many of the first ``listed`` entries are drawn from; int64 [sources]."""
        drawn = self.among(listed)
        if not self._mixed:
            return np.array([drawn])
        return np.bincount(self.sources(0, drawn), minlength=len(self._url_firsts))

    def sizes(self, start: int, stop: int) -> Ints:
        """Return the bytes of the objects from one number to another; of their first fields."""
        if self._all:
            return self._catalog.sizes[start:stop]
        sizes: Ints = self._catalog.sizes[self._firsts(start, stop)]
        return sizes

    def keys(self, start: int, stop: int) -> Iterator[str]:
        """Yield the keys of the objects from one number to another; of their first fields."""
        if self._all:
            return chain.from_iterable(self._catalog.keys(start, stop))
        ordinals = self._firsts(start, stop)
        if not len(ordinals):
            return iter(())
        if self._pairs is not None:  # first members need not come in the order of the pairs
            return (entry.key for entry in self._catalog.entries(ordinals))
        first, last = int(ordinals[0]), int(ordinals[-1]) + 1
        drawn = np.zeros(last - first, np.bool_)
        drawn[ordinals - first] = True
        return compress(chain.from_iterable(self._catalog.keys(first, last)), drawn)

    def subsets(self) -> list[Subset]:
        """Return what is listed of each subset; nothing without a split."""
        if self._subsets is None:
            return []
        places = self._places.values
        sizes = self._catalog.sizes[
            slice(len(places)) if self._pairs is None else self._found.values
        ]
        found = []
        for n, name in enumerate(self._subsets.names):
            mine = places == n
            groups = len(np.unique(self._groups.values[mine]))
            of = self._found_sources.values[mine] if self._mixed else np.zeros(mine.sum(), int)
            used = n == self._subsets.used
            found.append(Subset(name, int(mine.sum()), groups, sizes[mine], of, used))
        return found
