"""The parts of the source: the objects of an edition, cut into parts."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import repeat

import numpy as np
import numpy.typing as npt

from growcache.cache.side_files import Edition
from growcache.errors import CacheError
from growcache.sampling.draws import DrawnEdition, GroupDraw
from growcache.sampling.messages import PartVisit
from growcache.sampling.objects import Objects, Subset
from growcache.sampling.orders import Floats, Ints, locate
from growcache.sampling.sizing import Sizing
from growcache.seeding import Uint64Array, hash64, stream64
from growcache.store.catalog import Catalog

LEAST_PER_VISIT = 0.01  # samples; visits that bring less than this are no source


class Population:
    """What can be drawn from, as far as it is listed.

    Part numbers never change: the catalog is append-only and an object's parts follow from
    its size, so the parts of an edition are a prefix of those of the next.

    Args:
        catalog: the listing.
        objects: those of it that are drawn from.
        sizing: how objects are cut.
        node: this machine's number among ``nodes``.
        nodes: machines that draw disjoint samples of one source.
    """

    def __init__(
        self, catalog: Catalog, objects: Objects, sizing: Sizing, node: int = 0, nodes: int = 1
    ) -> None:
        self._catalog = catalog
        self._objects = objects
        self._sizing = sizing
        self._node = node
        self._nodes = nodes
        self._starts: Ints = np.zeros(1, np.int64)
        self._hashes: Uint64Array = np.zeros(
            0, np.uint64
        )  # of the keys; only with several nodes

    @property
    def mine(self) -> Callable[[Ints], npt.NDArray[np.bool_]] | None:
        """The mask of parts that this node draws; None where it draws all."""
        return self._mine if self._nodes > 1 else None

    def span(self, edition: Edition) -> DrawnEdition:
        """Return the edition as the draws see it.

        Raises:
            CacheError: the listing is not the one that the edition was made of.
        """
        if len(self._catalog) < edition.objects or (
            self._catalog.digest(edition.objects) != edition.digest
        ):
            cache = shlex.quote(str(self._catalog.path.parent))
            raise CacheError(
                f"the store's listing no longer begins with the {edition.objects:,} objects "
                f"that this cache was drawn from; empty it with: growcache clear {cache}"
            )
        parts = self.parts(edition.objects)
        return DrawnEdition(edition.edition, parts, edition.first_group, edition.objects)

    def parts(self, listed: int) -> int:
        """Return how many parts the objects among the first ``listed`` of the catalog have."""
        objects = self._objects.among(listed)
        self._extend(objects)
        return int(self._starts[objects])

    def starts(self, listed: int) -> Ints:
        """Return the first part of every object among the first ``listed``, and the total."""
        objects = self._objects.among(listed)
        self._extend(objects)
        return self._starts[: objects + 1]

    def own(self, objects: int, node: int, nodes: int) -> npt.NDArray[np.bool_]:
        """Return which of the first objects are a node's, where nodes share out objects."""
        if nodes == 1:
            return np.ones(objects, np.bool_)
        mask: npt.NDArray[np.bool_] = self._hashes[:objects] % np.uint64(nodes) == np.uint64(
            node
        )
        return mask

    def stops(self, draw: GroupDraw) -> tuple[PartVisit, ...]:
        """Return where the parts of a draw lie, as visits of a permit."""
        ordinals, within = locate(self._starts, draw.parts)
        counts = self._starts[ordinals + 1] - self._starts[ordinals]
        stops = self._objects.stops(ordinals)
        rows = zip(stops, within.tolist(), counts.tolist(), strict=True)
        cut = (
            stop if of == 1 else replace(stop, part=part, parts=of) for stop, part, of in rows
        )
        if draw.rounds is None:
            return tuple(cut)
        weights = repeat(None) if draw.weights is None else draw.weights.tolist()
        more = zip(cut, draw.rounds.tolist(), weights, strict=False)
        return tuple(
            replace(stop, round=round_, weight=weight) for stop, round_, weight in more
        )

    def samples(self, listed: int, samples_per_whole: float) -> float:
        """Estimate the samples of the objects among the first ``listed`` of the catalog.

        Args:
            listed: entries of the catalog.
            samples_per_whole: in each object that is one part, where there is one source.
        """
        objects = self._objects.among(listed)
        sources = self._objects.sources(0, objects)
        found = self._samples(self._objects.sizes(0, objects), sources, samples_per_whole)
        return float(found.sum())

    def sources(self, listed: int) -> list[tuple[int, float]]:
        """Return how many objects of each source are drawn from, and their samples, estimated."""
        objects = self._objects.among(listed)
        sources = self._objects.sources(0, objects)
        samples = self._samples(self._objects.sizes(0, objects), sources, 1.0)
        return list(zip(self._objects.counts(listed).tolist(), samples.tolist(), strict=True))

    def subsets(self, samples_per_whole: float) -> list[tuple[Subset, float]]:
        """Return what is listed of each subset of a split, and its samples, estimated."""
        return [
            (one, float(self._samples(one.sizes, one.sources, samples_per_whole).sum()))
            for one in self._objects.subsets()
        ]

    def per_visit(self, listed: int) -> Floats:
        """Estimate how many samples a visit to each source yields, of what is listed.

        Returns:
            float64 [sources]; 1 for a source of which nothing is listed.
        """
        starts = self.starts(listed)
        objects = len(starts) - 1
        sources = self._objects.sources(0, objects)
        parts = np.bincount(sources, np.diff(starts), len(self._sizing.cuts))
        samples = self._samples(self._objects.sizes(0, objects), sources, 1.0)
        found: Floats = np.divide(samples, parts, out=np.ones(len(parts)), where=parts > 0)
        # A source of nothing but empty objects must not be drawn from for ever.
        return np.maximum(found, LEAST_PER_VISIT)

    def _samples(self, sizes: Ints, sources: Ints, samples_per_whole: float) -> Floats:
        """Return the samples of objects, by source."""
        count = max(1, len(self._sizing.cuts))
        cuts = [self._sizing.cut(source, samples_per_whole) for source in range(count)]
        if count == 1:
            return np.array([cuts[0].samples(sizes)])
        return np.array([cut.samples(sizes[sources == n]) for n, cut in enumerate(cuts)])

    def _counts(self, start: int, stop: int) -> Ints:
        """Return how many parts the objects from one number to another have."""
        sizes = self._objects.sizes(start, stop)
        if not self._sizing.cuts:
            return self._sizing.cut().parts(sizes)
        sources = self._objects.sources(start, stop)
        counts = np.zeros(len(sizes), np.int64)
        for number, cut in enumerate(self._sizing.cuts):
            mine = sources == number
            counts[mine] = cut.parts(sizes[mine])
        return counts

    def _extend(self, objects: int) -> None:
        known = len(self._starts) - 1
        if objects > known:
            more = self._starts[-1] + np.cumsum(self._counts(known, objects))
            self._starts = np.concatenate([self._starts, more])
            if self._nodes > 1:
                keys = self._objects.keys(known, objects)
                hashes = np.fromiter(map(hash64, keys), np.uint64, objects - known)
                self._hashes = np.concatenate([self._hashes, hashes])

    def _mine(self, parts: Ints) -> npt.NDArray[np.bool_]:
        # By key, not by ordinal: nodes that listed in another order still agree.
        ordinals, within = locate(self._starts, parts)
        words = stream64(self._hashes[ordinals], within.astype(np.uint64))
        mask: npt.NDArray[np.bool_] = words % np.uint64(self._nodes) == np.uint64(self._node)
        return mask
