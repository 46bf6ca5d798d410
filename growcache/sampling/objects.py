"""Group listed keys into objects, and assign each object to a subset by its group's hash."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress, islice
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from growcache.config import BlockGroup, LabelGroup, SplitConfig
from growcache.config_source import FieldConfig, SourceConfig
from growcache.errors import ConfigError
from growcache.sampling.label_table import NO_ROW
from growcache.sampling.labels import Labels
from growcache.sampling.messages import PartVisit
from growcache.sampling.orders import Ints
from growcache.sampling.sources import first_urls, name_source, source_of_url
from growcache.seeding import derive_seed, hash64
from growcache.store.catalog import Catalog
from growcache.store.urls import UrlTemplate
from growcache.usercode import short_key

Kind = TypeVar("Kind", bound=np.generic)


class GrowingArray(Generic[Kind]):
    """Values of one dtype. Views that were returned before keep their content.

    >>> numbers = GrowingArray(np.dtype(np.int64))
    >>> for n in range(3):
    ...     numbers.extend(np.array([n, n]))
    >>> numbers.values.tolist()
    [0, 0, 1, 1, 2, 2]
    """

    def __init__(self, dtype: np.dtype[Kind]) -> None:
        self._room = np.zeros(64, dtype)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def values(self) -> npt.NDArray[Kind]:
        return self._room[: self._count]

    def extend(self, values: npt.NDArray[Kind]) -> None:
        count = self._count + len(values)
        if count > len(self._room):
            grown = np.zeros(max(count, 2 * len(self._room)), self._room.dtype)
            grown[: self._count] = self.values
            self._room = grown
        self._room[self._count : count] = values
        self._count = count


NO_SUBSET = -1  # of an object without a subset


class Split:
    def __init__(self, split: SplitConfig) -> None:
        self.names = tuple(split.fractions)
        self.used = self.names.index(split.use)
        self._seed = split.seed
        self.label = split.group.label if isinstance(split.group, LabelGroup) else None
        self._group = re.compile(split.group) if isinstance(split.group, str) else None
        self._block = split.group.block if isinstance(split.group, BlockGroup) else None
        # The last bound is 1 if no object is left out, regardless of rounding.
        bounds = np.cumsum(list(split.fractions.values()))
        self._bounds = [1.0 if bound > 1 - 1e-9 else float(bound) for bound in bounds]
        self._last: tuple[str, int] = ("", NO_SUBSET)

    def groups(self, keys: Sequence[str]) -> list[str]:
        """Return the group of each key. Without ``split.group`` each key is its own group."""
        if self._block is not None:
            return [str(int(key) // self._block) for key in keys]
        return [self._group_of(key) for key in keys] if self._group else list(keys)

    def places(self, groups: Sequence[str]) -> npt.NDArray[np.int8]:
        """Return the number of each group's subset in `names`, or `NO_ROW` without one."""
        return np.fromiter(map(self._place, groups), np.int8, len(groups))

    def _group_of(self, key: str) -> str:
        assert self._group is not None
        match = self._group.search(key)
        if match is None or not match["group"]:
            raise ConfigError(
                f"split.group: expected {self._group.pattern} to match every key, found "
                f"{short_key(key)}; correct it, or narrow source.url",
                code="GC113",
            )
        return match["group"]

    def _place(self, group: str) -> int:
        if group != self._last[0]:  # keys of one group are usually consecutive
            # 53 bits, as many as a float has: uniform over [0, 1).
            share = (derive_seed("split", self._seed, group) >> 75) / (1 << 53)
            found = (n for n, bound in enumerate(self._bounds) if share < bound)
            self._last = (group, next(found, NO_SUBSET))
        return self._last[1]


@dataclass(frozen=True, slots=True)
class CompleteObjects:
    """Objects with a member of each field."""

    members: Ints  # ordinals in the catalog; int64 [objects, fields]
    keys: list[str]
    stores: list[int]

    @property
    def lasts(self) -> Ints:
        """Ordinal of the member that completed each object; ascending."""
        lasts: Ints = self.members.max(axis=1, initial=-1)
        return lasts


@dataclass(slots=True)
class _PartialObject:
    members: list[int]  # -1 if not listed yet
    key: str  # of the first field; of another one until that is listed


class FieldJoin:
    """Joins listed members of several fields to objects, when their last members are listed.

    An entry of a source without fields is an object by itself.
    """

    def __init__(self, sources: Sequence[SourceConfig]) -> None:
        self._firsts = first_urls(sources)
        self._joins = [_SourceJoin(one.fields) if one.fields else None for one in sources]
        self.fields = max(max(1, len(one.fields)) for one in sources)

    @property
    def unmatched(self) -> int:
        return sum(one.unmatched for one in self._joins if one is not None)

    def add(self, first: int, stores: Sequence[int], keys: Sequence[str]) -> CompleteObjects:
        members: list[list[int]] = []
        names: list[str] = []
        urls: list[int] = []
        for ordinal, (store, key) in enumerate(zip(stores, keys, strict=True), first):
            source = source_of_url(self._firsts, store)
            url, join = self._firsts[source], self._joins[source]
            whole = (
                _PartialObject([ordinal], key)
                if join is None
                else join.add(ordinal, store - url, key)
            )
            if whole is not None:
                members.append(whole.members + [-1] * (self.fields - len(whole.members)))
                names.append(whole.key)
                urls.append(store if join is None else url)
        rows = np.array(members, np.int64).reshape(-1, self.fields)
        return CompleteObjects(rows, names, urls)

    def complaint(self, shown: int) -> str:
        for number, join in enumerate(self._joins):
            if join is not None and join.unmatched:
                return name_source(join.complaint(shown), number, len(self._joins))
        return ""


class _SourceJoin:
    def __init__(self, fields: Mapping[str, FieldConfig]) -> None:
        self._names = list(fields)
        self.unmatched = 0
        self._templates = [UrlTemplate.from_url(field.url) for field in fields.values()]
        self._rivals = [self._rivals_of(n) for n in range(len(self._templates))]
        self._partial: dict[tuple[str, ...], _PartialObject] = {}

    def _rivals_of(self, number: int) -> list[UrlTemplate]:
        """Return the templates with more fixed characters, which take the keys that both match."""
        own = self._templates[number]
        ranked = [
            (template.literal_characters, -n) for n, template in enumerate(self._templates)
        ]
        return [
            template
            for n, template in enumerate(self._templates)
            if template.folder == own.folder and ranked[n] > ranked[number]
        ]

    def add(self, ordinal: int, field: int, key: str) -> _PartialObject | None:
        """Return the object that this member completes, or None."""
        values = self._templates[field].values(key)
        if values is None or any(rival.values(key) for rival in self._rivals[field]):
            return None
        found = self._partial.get(values)
        if found is None:
            found = self._partial[values] = _PartialObject([-1] * len(self._names), key)
        found.members[field] = ordinal
        self.unmatched += 1
        if field == 0:
            found.key = key
        if -1 in found.members:
            return None
        del self._partial[values]
        self.unmatched -= len(found.members)
        return found

    def complaint(self, shown: int) -> str:
        some = ", ".join(map(self._described, islice(self._partial.values(), shown)))
        return (
            f"source.fields: {len(self._partial):,} of the objects lack a field: {some}. Add what is "
            "missing, narrow the URLs, or leave these out with source.on_missing: skip"
        )

    def _described(self, one: _PartialObject) -> str:
        members = zip(self._names, one.members, strict=True)
        lacking = [name for name, ordinal in members if ordinal == -1]
        return f"{short_key(one.key)} (no {', '.join(lacking)})"


SHOWN = 10  # objects without labels that a message lists

Mask: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Subset:
    name: str
    objects: int
    groups: int
    sizes: Ints
    sources: Ints
    used: bool


class Objects:
    """The objects to draw from, numbered in the order of the listing.

    Numbers never change. The catalog is append-only, and key, split and the table of labels
    decide whether an object is drawn from. ``labels`` is set before the first call of `look`.
    """

    def __init__(
        self,
        catalog: Catalog,
        subsets: Split | None = None,
        pairs: FieldJoin | None = None,
        *,
        skips: bool = False,
        firsts: Sequence[int] = (0,),
    ) -> None:
        self._catalog = catalog
        self._subsets = subsets
        self._pairs = pairs
        self._skips = skips
        self._url_firsts = np.array(firsts)
        self.labels: Labels | None = None
        self._unlabelled = 0
        self._finished = False
        self._missing: list[tuple[int, str]] = []  # first ones of these
        # Ordinals in the catalog of the objects to draw from, and of all; of pairs the last
        # members'.
        self._ordinals = GrowingArray(np.dtype(np.int64))
        self._members = GrowingArray(np.dtype(np.int64))
        self._looked = 0  # entries of the catalog that were processed
        self._found = GrowingArray(np.dtype(np.int64))  # of pairs, the first members' ordinals
        # By source: objects to draw from, and all objects.
        self._sources = GrowingArray(np.dtype(np.int16))
        self._found_sources = GrowingArray(np.dtype(np.int16))
        # By object, with a split; `NO_ROW` without labels:
        self._places = GrowingArray(np.dtype(np.int8))
        self._groups = GrowingArray(np.dtype(np.uint64))

    @property
    def _all(self) -> bool:
        whole = self._subsets is None and self.labels is None and self._pairs is None
        return whole and len(self._url_firsts) == 1

    def look(self, listed: int) -> None:
        """Process the first ``listed`` entries of the catalog."""
        if self._all or listed <= self._looked:
            return
        for stores, keys in self._catalog.stores_and_keys(self._looked, listed):
            if self._pairs is None:
                drawn = self._sorted_out(stores, keys)
                self._ordinals.extend(np.flatnonzero(drawn) + self._looked)
                self._note_sources(stores, drawn)
            else:
                self._pair_up(self._pairs.add(self._looked, stores, keys))
            self._looked += len(keys)
        if self._unlabelled and not self._skips:
            raise ConfigError(self.complaint(), code="GC112")

    def finish(self) -> None:
        self._finished = True
        if self._pairs is not None and self._pairs.unmatched and not self._skips:
            raise ConfigError(self._pairs.complaint(SHOWN), code="GC308")

    @property
    def unmatched(self) -> int:
        """Number of objects without labels or, after the listing, without a field."""
        lacking = self._pairs.unmatched if self._pairs is not None and self._finished else 0
        return self._unlabelled + lacking

    @property
    def listed(self) -> int:
        """Number of listed objects of all subsets, complete or not."""
        if self._pairs is None:
            return len(self._catalog)
        return len(self._found) + self._pairs.unmatched

    def _pair_up(self, whole: CompleteObjects) -> None:
        drawn = self._sorted_out(whole.stores, whole.keys)
        self._found.extend(whole.members[:, 0])
        self._ordinals.extend(whole.lasts[drawn])
        self._members.extend(whole.members[drawn].ravel())
        self._note_sources(whole.stores, drawn)

    def _note_sources(self, stores: Sequence[int], drawn: Mask) -> None:
        sources = np.searchsorted(self._url_firsts, np.asarray(stores), side="right") - 1
        self._found_sources.extend(sources.astype(np.int16))
        self._sources.extend(sources[drawn].astype(np.int16))

    def _sorted_out(self, stores: list[int], keys: list[str]) -> Mask:
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
        self._places.extend(np.where(labelled, places, NO_SUBSET))
        self._groups.extend(np.fromiter(map(hash64, groups), np.uint64, len(groups)))
        wanted: Mask = places == self._subsets.used
        return wanted if label is None else wanted | ~labelled

    def complaint(self) -> str:
        if not self._unlabelled:
            return self._pairs.complaint(SHOWN) if self._pairs is not None else ""
        assert self.labels is not None
        looked = self._unlabelled + len(self._ordinals)
        return self.labels.complaint(self._missing, self._unlabelled, looked)

    def among(self, listed: int) -> int:
        """Return the number of objects among the first ``listed`` entries of the catalog."""
        if self._all:
            return listed
        self.look(listed)
        return int(np.searchsorted(self._ordinals.values, listed))

    def visits(self, numbers: Ints) -> list[PartVisit]:
        """Return visits to objects, each as a single part."""
        visits = self._bare_visits(numbers)
        if self.labels is None:
            return visits
        stores, keys = [one.entry.store for one in visits], [one.entry.key for one in visits]
        joined = self.labels.joined(stores, keys)
        return [replace(one, joined=more) for one, more in zip(visits, joined, strict=True)]

    def label_texts(self, column: str, start: int, stop: int) -> list[str]:
        """Return a column of the labels, as in the table, for the objects between two numbers."""
        assert self.labels is not None
        visits = self._bare_visits(np.arange(start, stop))
        stores, keys = [one.entry.store for one in visits], [one.entry.key for one in visits]
        return self.labels.texts(column, self.labels.rows(stores, keys))

    def _bare_visits(self, numbers: Ints) -> list[PartVisit]:
        if self._pairs is None:
            ordinals = numbers if self._all else self._ordinals.values[numbers]
            return [PartVisit(entry) for entry in self._catalog.entries(ordinals)]
        rows = [[int(n) for n in row if n >= 0] for row in self._rows[numbers]]
        entries = iter(self._catalog.entries(list(chain.from_iterable(rows))))
        members = ([next(entries) for _ in row] for row in rows)
        return [PartVisit(first, partners=tuple(others)) for first, *others in members]

    @property
    def _rows(self) -> Ints:
        """The ordinals of pairs' members: int64 [objects, fields], -1 for missing ones."""
        assert self._pairs is not None
        rows: Ints = self._members.values.reshape(-1, self._pairs.fields)
        return rows

    def _firsts(self, start: int, stop: int) -> Ints:
        if self._pairs is None:
            return self._ordinals.values[start:stop]
        return self._rows[start:stop, 0]

    def sources(self, start: int, stop: int) -> Ints:
        if self._all:
            return np.zeros(stop - start, np.int64)
        return self._sources.values[start:stop].astype(np.int64)

    def numbers(self, source: int, start: int, stop: int) -> Ints:
        """Return the objects from ``start`` to ``stop`` among those of a source."""
        if self._all:
            return np.arange(start, min(stop, len(self._catalog)))
        return np.flatnonzero(self._sources.values == source)[start:stop]

    def counts(self, listed: int) -> Ints:
        """Return the number of objects by source among the first ``listed`` entries: int64 [sources]."""
        return np.bincount(self.sources(0, self.among(listed)), minlength=len(self._url_firsts))

    def sizes(self, start: int, stop: int) -> Ints:
        """Return the sizes of objects in bytes, each by its first field."""
        if self._all:
            return self._catalog.sizes[start:stop]
        sizes: Ints = self._catalog.sizes[self._firsts(start, stop)]
        return sizes

    def keys(self, start: int, stop: int) -> Iterator[str]:
        if self._all:
            return self._keys_between(start, stop)
        ordinals = self._firsts(start, stop)
        if not len(ordinals):
            return iter(())
        if self._pairs is not None:  # first members need not be in the order of the pairs
            return (entry.key for entry in self._catalog.entries(ordinals))
        first, last = int(ordinals[0]), int(ordinals[-1]) + 1
        drawn = np.zeros(last - first, np.bool_)
        drawn[ordinals - first] = True
        return compress(self._keys_between(first, last), drawn)

    def _keys_between(self, start: int, stop: int) -> Iterator[str]:
        found = self._catalog.stores_and_keys(start, stop)
        return chain.from_iterable(keys for _, keys in found)

    def subsets(self) -> list[Subset]:
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
            of = self._found_sources.values[mine].astype(np.int64)
            used = n == self._subsets.used
            found.append(Subset(name, int(mine.sum()), groups, sizes[mine], of, used))
        return found


def field_join(sources: Sequence[SourceConfig]) -> FieldJoin | None:
    return FieldJoin(sources) if any(source.fields for source in sources) else None
