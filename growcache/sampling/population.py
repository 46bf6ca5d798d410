"""The population: the parts of an edition's objects, the lanes of nodes, and the strata.

Permuted blocks divide the draws among strata (Matts & Lachin, Controlled Clinical Trials 9,
1988). So shares are exact from block to block, and the number of a draw determines its stratum.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import TypeAlias

import numpy as np

from growcache.cache.side_files import Edition
from growcache.config import Config
from growcache.errors import CacheError, ConfigError
from growcache.formats.compressed import USUAL_RATIO, compression_by_name
from growcache.sampling.draws import GroupDraw
from growcache.sampling.lanes import FINE_LANES, lane_mask
from growcache.sampling.messages import PartVisit
from growcache.sampling.objects import GrowingArray, Objects, Subset
from growcache.sampling.orders import Floats, Ints, locate
from growcache.sampling.sizing import Sizing
from growcache.sampling.stratum_draws import EditionStrata, Mask
from growcache.seeding import Uint64Array, hash64, stream64
from growcache.store.catalog import Catalog
from growcache.usercode import short_key

LEAST_PER_VISIT = 0.01  # samples; sources whose visits yield less are not drawn from
_PARTS_AT_ONCE = 1 << 16  # parts that are examined together


class Population:
    """The parts of all objects.

    Their numbers never change, because the catalog is append-only, and sizes determine the
    parts.
    """

    def __init__(self, catalog: Catalog, objects: Objects, sizing: Sizing) -> None:
        self._catalog = catalog
        self._objects = objects
        self._sizing = sizing
        self._starts: Ints = np.zeros(1, np.int64)
        self._compressed = GrowingArray(np.dtype(np.bool_))
        self._hashes: Uint64Array = np.zeros(0, np.uint64)  # of the keys, if lanes matter

    def check_listing(self, edition: Edition) -> None:
        if len(self._catalog) < edition.objects or (
            self._catalog.digest(edition.objects) != edition.digest
        ):
            cache = shlex.quote(str(self._catalog.path.parent))
            raise CacheError(
                f"the store's listing no longer begins with the {edition.objects:,} objects "
                f"that this cache was drawn from; empty it with: growcache clear {cache}",
                code="GC409",
            )

    def strata(
        self, listed: int, lanes: str | None = None, own_parts: int | None = None
    ) -> EditionStrata:
        """Return the parts as one stratum.

        ``own_parts``: number of those in the lanes, if known.
        """
        starts = self.starts(listed)
        owned, lane_of = self.owned(listed, lanes), self.lane_of(listed)
        if own_parts is None:
            own_parts = int(self.own_parts(listed, lanes).sum())
        own = np.array([own_parts])
        return EditionStrata(
            ("",),
            starts[-1:],
            own,
            own,
            lambda _, parts: parts,
            lambda _: starts,
            None if owned is None else lambda _, parts: owned(parts),
            lambda _, parts: lane_of(parts),
        )

    def owned(self, listed: int, lanes: str | None) -> Callable[[Ints], Mask] | None:
        """Return the mask of parts that are in these lanes, or None for all lanes.

        It does not read the listing, because draws apply it to every part between two turns of
        the service's loop.
        """
        if lanes is None:
            return None
        self._hashes_of(self._objects.among(listed))
        is_owned, lane_of = lane_mask(lanes), self.lane_of(listed)

        def mask(parts: Ints) -> Mask:
            found: Mask = is_owned[lane_of(parts)]
            return found

        return mask

    def lane_of(self, listed: int) -> Callable[[Ints], Ints]:
        """Return a function from parts to their fine lanes."""
        starts = self.starts(listed)

        def lanes(parts: Ints) -> Ints:
            hashes = self._hashes_of(len(starts) - 1)
            # In order, because a search close to the previous one is several times as fast.
            order = np.argsort(parts)
            found = np.empty(len(parts), np.int64)
            found[order] = _lanes(hashes, *locate(starts, parts[order]))
            return found

        return lanes

    def own_parts(self, listed: int, lanes: str | None) -> Ints:
        """Return the number of parts of each object that are in these lanes."""
        starts = self.starts(listed)
        if lanes is None:
            return np.diff(starts)
        hashes = self._hashes_of(len(starts) - 1)
        counts, is_owned = np.zeros(len(starts) - 1, np.int64), lane_mask(lanes)
        for at in range(0, int(starts[-1]), _PARTS_AT_ONCE):
            parts = np.arange(at, min(at + _PARTS_AT_ONCE, int(starts[-1])))
            ordinals, within = locate(starts, parts)
            owned = ordinals[is_owned[_lanes(hashes, ordinals, within)]] - ordinals[0]
            here = counts[ordinals[0] : ordinals[-1] + 1]
            here += np.bincount(owned, minlength=len(here))
        return counts

    def parts(self, listed: int) -> int:
        objects = self._objects.among(listed)
        self._extend(objects)
        return int(self._starts[objects])

    def starts(self, listed: int) -> Ints:
        """Return the first part of every object, and the total: int64 [objects + 1]."""
        objects = self._objects.among(listed)
        self._extend(objects)
        return self._starts[: objects + 1]

    def visits(self, draw: GroupDraw) -> tuple[PartVisit, ...]:
        ordinals, within = locate(self._starts, draw.parts)
        counts = self._starts[ordinals + 1] - self._starts[ordinals]
        visits = self._objects.visits(ordinals)
        rows = zip(visits, within.tolist(), counts.tolist(), strict=True)
        cut = (
            visit if of == 1 else replace(visit, part=part, parts=of)
            for visit, part, of in rows
        )
        if draw.rounds is None:
            return tuple(cut)
        weights = repeat(None) if draw.weights is None else draw.weights.tolist()
        more = zip(cut, draw.rounds.tolist(), weights, strict=False)
        return tuple(
            replace(visit, round=round_, weight=weight) for visit, round_, weight in more
        )

    def sources(self, listed: int) -> list[tuple[int, float]]:
        """Return the number of objects of each source, and an estimate of their samples."""
        objects = self._objects.among(listed)
        sources = self._objects.sources(0, objects)
        samples = self._samples(self._objects.sizes(0, objects), sources, self._packed(objects))
        return list(zip(self._objects.counts(listed).tolist(), samples.tolist(), strict=True))

    def subsets(self) -> list[tuple[Subset, float]]:
        return [
            (one, float(self._samples(one.sizes, one.sources).sum()))
            for one in self._objects.subsets()
        ]

    def per_visit(self, listed: int) -> Floats:
        """Estimate the samples of a visit to each source, with 1 for sources without a listing."""
        starts = self.starts(listed)
        objects = len(starts) - 1
        sources = self._objects.sources(0, objects)
        parts = np.bincount(sources, np.diff(starts), len(self._sizing.partitionings))
        samples = self._samples(self._objects.sizes(0, objects), sources, self._packed(objects))
        found: Floats = np.divide(samples, parts, out=np.ones(len(parts)), where=parts > 0)
        # A source with only empty objects must not be drawn from forever.
        return np.maximum(found, LEAST_PER_VISIT)

    def _packed(self, objects: int) -> Mask:
        self._extend(objects)
        return self._compressed.values[:objects]

    def _samples(self, sizes: Ints, sources: Ints, compressed: Mask | None = None) -> Floats:
        """Estimate the samples of each source."""
        if compressed is not None:
            sizes = np.where(compressed, USUAL_RATIO * sizes, sizes)
        cuts = enumerate(self._sizing.partitionings)
        return np.array([cut.samples(sizes[sources == number]) for number, cut in cuts])

    def _counts(self, start: int, stop: int) -> Ints:
        sizes = self._objects.sizes(start, stop)
        sources = self._objects.sources(start, stop)
        counts = np.zeros(len(sizes), np.int64)
        compressed = self._compressed_among(start, stop, sources)
        self._compressed.extend(compressed)
        for number, cut in enumerate(self._sizing.partitionings):
            mine = sources == number
            counts[mine] = cut.parts(sizes[mine], compressed[mine])
        return counts

    def _compressed_among(self, start: int, stop: int, sources: Ints) -> Mask:
        """Return which objects are compressed, in sources whose names decide that."""
        found = np.zeros(stop - start, np.bool_)
        decide = np.array([cut.names_decide for cut in self._sizing.partitionings])
        if decide.any():
            asked = decide[sources].tolist()
            keys = zip(asked, self._objects.keys(start, stop), strict=True)
            named = (one and compression_by_name(key) is not None for one, key in keys)
            found = np.fromiter(named, np.bool_, stop - start)
        return found

    def _extend(self, objects: int) -> None:
        known = len(self._starts) - 1
        if objects > known:
            more = self._starts[-1] + np.cumsum(self._counts(known, objects))
            self._starts = np.concatenate([self._starts, more])

    def _hashes_of(self, objects: int) -> Uint64Array:
        known = len(self._hashes)
        if objects > known:
            keys = self._objects.keys(known, objects)
            more = np.fromiter(map(hash64, keys), np.uint64, objects - known)
            self._hashes = np.concatenate([self._hashes, more])
        return self._hashes[:objects]


def _lanes(hashes: Uint64Array, ordinals: Ints, within: Ints) -> Ints:
    # By key rather than ordinal, so that nodes with listings in different orders agree.
    words = stream64(hashes[ordinals], within.astype(np.uint64))
    return (words % np.uint64(FINE_LANES)).astype(np.int64)


BLOCK_DRAWS = 1024  # least draws of a block
DRAWS_PER_STRATUM = 32  # on average, if that is more; bounds the error of a share
DRAWS_OF_THE_LEAST = 128  # of the smallest source; bounds the error of its share to 0.4 %
MOST_BLOCK_DRAWS = 1 << 18  # permuting them takes milliseconds
MOST_STRATA = 100_000


_SHOWN = 5
_POWERS = {"balanced": 0.0, "natural": 1.0, "sqrt": 0.5}  # of the number of parts

Weights = str | Mapping[str, float]


def stratum_shares(names: Sequence[str], parts: Ints, weights: Weights) -> Floats:
    """Return each stratum's share of the draws.

    ``parts`` is 0 if a stratum cannot be drawn now. Strata that are not in ``weights`` have
    weight 1.

    >>> stratum_shares(["a", "b"], np.array([100, 900]), "sqrt").round(2).tolist()
    [0.25, 0.75]
    """
    if isinstance(weights, str):
        wanted = np.power(np.asarray(parts, np.float64), _POWERS[weights]) * (parts > 0)
    else:
        _refuse_unknown(names, weights)
        wanted = np.array([float(weights.get(name, 1.0)) for name in names]) * (parts > 0)
    if not wanted.sum():
        raise ConfigError(
            "sampling.strata.weights: expected a stratum with a weight above 0 that has samples, "
            f"found none among {_named(names)}",
            code="GC113",
        )
    found: Floats = wanted / wanted.sum()
    return found


def _refuse_unknown(names: Sequence[str], weights: Mapping[str, float]) -> None:
    known = set(names)
    if unknown := [name for name in weights if name not in known]:
        raise ConfigError(
            f"sampling.strata.weights: there is no stratum {_named(unknown)}; the source has "
            f"{_named(sorted(known))}",
            code="GC113",
        )


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def source_shares(weights: Sequence[float], parts: Ints, per_visit: Floats) -> Floats:
    """Return each source's share of the draws. The shares sum to 1.

    >>> source_shares([1.0, 1.0], np.array([9, 9]), np.array([1.0, 3.0])).tolist()
    [0.75, 0.25]
    """
    wanted = np.asarray(weights) / per_visit * (parts > 0)
    found: Floats = wanted / wanted.sum()
    return found


def block_draws(wanted: Floats) -> int:
    """Return the draws of a block that is large enough for the smallest share.

    >>> block_draws(np.array([0.5, 0.5])), block_draws(np.array([0.999, 0.001]))
    (1024, 128000)
    """
    least = float(wanted[wanted > 0].min())
    return min(MOST_BLOCK_DRAWS, max(BLOCK_DRAWS, round(DRAWS_OF_THE_LEAST / least)))


def block_quotas(wanted: Floats, block: int | None = None) -> Ints:
    """Return the draws of each stratum in a block: at least one, unless its share is 0.

    >>> block_quotas(np.array([0.5, 0.4999, 0.0001, 0.0])).tolist()
    [512, 511, 1, 0]
    """
    drawn = np.flatnonzero(wanted)
    total = block or max(BLOCK_DRAWS, DRAWS_PER_STRATUM * len(drawn))
    exact = wanted[drawn] * total
    counts = np.maximum(1, np.floor(exact)).astype(np.int64)
    # Largest remainders first. Rare strata are raised to one draw at the expense of the others.
    order = np.argsort(counts - exact, kind="stable")
    missing = total - int(counts.sum())
    if missing > 0:
        counts[order[:missing]] += 1
    while missing < 0:
        over = [i for i in order[::-1] if counts[i] > 1][:-missing]
        counts[over] -= 1
        missing += len(over)
    found = np.zeros(len(wanted), np.int64)
    found[drawn] = counts
    return found


# Names of the strata of the objects from one number to another.
StratumNames: TypeAlias = Callable[[Objects, int, int], Iterable[str]]
_LABELS_AT_ONCE = 4096  # objects whose labels are looked up together


def stratum_names(config: Config) -> StratumNames:
    assert config.sampling.strata is not None
    by = config.sampling.strata.by
    (source,) = config.sources
    labels = source.labels
    if labels is not None and by in labels.columns:
        return _labelled(by)
    if "(?P<stratum>" in by:
        return _by_key(_matching(by))
    form, options = source.formats[0]  # keys are those of the first field
    if by == "label" and form == "image" and options.get("label", "folder") == "folder":
        return _by_key(_folder)
    raise ConfigError(
        "sampling.strata.by: expected one of source.labels.columns, a regular expression with "
        f"(?P<stratum>…) for the keys, or label with source.format image, found {by!r}",
        code="GC113",
    )


def source_names(objects: Objects, start: int, stop: int) -> Iterable[str]:
    return map(str, objects.sources(start, stop).tolist())


def _labelled(column: str) -> StratumNames:
    def names(objects: Objects, start: int, stop: int) -> Iterator[str]:
        for at in range(start, stop, _LABELS_AT_ONCE):
            yield from objects.label_texts(column, at, min(stop, at + _LABELS_AT_ONCE))

    return names


def _by_key(name: Callable[[str], str]) -> StratumNames:
    return lambda objects, start, stop: map(name, objects.keys(start, stop))


def _matching(by: str) -> Callable[[str], str]:
    pattern = re.compile(by)

    def name(key: str) -> str:
        match = pattern.search(key)
        if match is None or match["stratum"] is None:
            raise ConfigError(
                f"sampling.strata.by: expected {by} to match every key, found "
                f"{short_key(key)}; correct it, or narrow source.url",
                code="GC113",
            )
        return match["stratum"]

    return name


def _folder(key: str) -> str:
    return key.rpartition("/")[0].rpartition("/")[2]


class ObjectStrata:
    """The strata of objects.

    Strata are numbered in the order of their first appearance in the listing, so their numbers
    never change.
    """

    def __init__(
        self,
        objects: Objects,
        population: Population,
        names: StratumNames,
        known: Sequence[str] = (),
        *,
        by_objects: bool = False,
    ) -> None:
        self._by_objects = by_objects
        self._objects = objects
        self._population = population
        self._names = names
        self._numbers = {name: number for number, name in enumerate(known)}
        self._strata = GrowingArray(np.dtype(np.int32))  # of the objects, by number

    def strata(self, listed: int, lanes: str | None = None) -> EditionStrata:
        objects = self._objects.among(listed)
        self._look(objects)
        starts = self._population.starts(listed)
        strata = self._strata.values[:objects]
        order = np.argsort(strata, kind="stable")
        ends = np.cumsum(np.diff(starts)[order])
        sorted_starts = np.concatenate([np.zeros(1, np.int64), ends])
        firsts = np.searchsorted(strata[order], np.arange(len(self._numbers) + 1))
        bounds = sorted_starts[firsts]

        def place(stratum: int, local: Ints) -> Ints:
            places, within = locate(sorted_starts, bounds[stratum] + local)
            found: Ints = starts[order[places]] + within
            return found

        def starts_of(stratum: int) -> Ints:
            first, stop = firsts[stratum], firsts[stratum + 1]
            found: Ints = sorted_starts[first : stop + 1] - bounds[stratum]
            return found

        owned = self._population.owned(listed, lanes)
        lane_of = self._population.lane_of(listed)
        own_parts = self._population.own_parts(listed, lanes)
        own = np.zeros(len(self._numbers), np.int64)
        np.add.at(own, strata, own_parts)
        natural = own
        if self._by_objects:
            natural = np.bincount(strata[own_parts > 0], minlength=len(own))
        return EditionStrata(
            tuple(self._numbers),
            np.diff(bounds),
            own,
            natural,
            place,
            starts_of,
            None if owned is None else lambda stratum, local: owned(place(stratum, local)),
            lambda stratum, local: lane_of(place(stratum, local)),
        )

    def _look(self, objects: int) -> None:
        known = len(self._strata)
        if objects <= known:
            return
        numbers = self._numbers
        names = self._names(self._objects, known, objects)
        found = (numbers.setdefault(name, len(numbers)) for name in names)
        self._strata.extend(np.fromiter(found, np.int32, objects - known))
        if len(numbers) > MOST_STRATA:
            raise ConfigError(
                f"sampling.strata.by: expected at most {MOST_STRATA:,} strata, found "
                f"{len(numbers):,}; choose something that more objects have in common",
                code="GC113",
            )
