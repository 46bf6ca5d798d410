"""The parts of the source: the objects of an edition, cut into parts, and the lanes that nodes own."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import repeat

import numpy as np

from growcache.cache.side_files import Edition
from growcache.errors import CacheError
from growcache.sampling.draws import EditionStrata, GroupDraw, Mask
from growcache.sampling.messages import PartVisit
from growcache.sampling.objects import Objects, Subset
from growcache.sampling.orders import Floats, Ints, locate
from growcache.sampling.sizing import Sizing
from growcache.seeding import Uint64Array, derive_seed, hash64, stream64
from growcache.store.catalog import Catalog

LEAST_PER_VISIT = 0.01  # samples; visits that bring less than this are no source
_AT_ONCE = 1 << 16  # parts that are looked at together


LANES = 256  # of them each part is in one, for ever


def owned_lanes(node: int, nodes: int) -> str | None:
    """Return the lanes of a node, as `Edition.lanes` has them; None where it owns all.

    A lane is owned by the node with the largest hash of the two (rendezvous hashing). So a node that is added takes
    lanes from all others, and no lane moves between two of these.
    """
    if nodes == 1:
        return None
    owners = [
        max(range(nodes), key=lambda one: derive_seed("lane", lane, one))
        for lane in range(LANES)
    ]
    return np.packbits(np.array(owners) == node).tobytes().hex()


class Population:
    """What can be drawn from, as far as it is listed.

    Part numbers never change: the catalog is append-only and an object's parts follow from
    its size, so the parts of an edition are a prefix of those of the next.
    """

    def __init__(self, catalog: Catalog, objects: Objects, sizing: Sizing) -> None:
        self._catalog = catalog
        self._objects = objects
        self._sizing = sizing
        self._starts: Ints = np.zeros(1, np.int64)
        self._hashes: Uint64Array = np.zeros(0, np.uint64)  # of the keys, where lanes matter

    def check_listing(self, edition: Edition) -> None:
        """Check that the listing is the one that the edition was made of.

        Raises:
            CacheError: it is another one.
        """
        if len(self._catalog) < edition.objects or (
            self._catalog.digest(edition.objects) != edition.digest
        ):
            cache = shlex.quote(str(self._catalog.path.parent))
            raise CacheError(
                f"the store's listing no longer begins with the {edition.objects:,} objects "
                f"that this cache was drawn from; empty it with: growcache clear {cache}"
            )

    def strata(self, listed: int, lanes: str | None = None) -> EditionStrata:
        """Return the parts of the first ``listed`` objects of the catalog, as one stratum."""
        starts = self.starts(listed)
        owned = self.owned(listed, lanes)
        own = np.array([self.own_parts(listed, lanes).sum()])
        return EditionStrata(
            ("",),
            starts[-1:],
            own,
            own,
            lambda _, parts: parts,
            lambda _: starts,
            None if owned is None else lambda _, parts: owned(parts),
        )

    def owned(self, listed: int, lanes: str | None) -> Callable[[Ints], Mask] | None:
        """Return the mask of parts that are in these lanes; None for all lanes.

        The mask needs no look at the listing: the draws ask it for every part, between two turns of the service's loop.
        """
        if lanes is None:
            return None
        starts = self.starts(listed)
        hashes = self._hashes_of(len(starts) - 1)
        is_owned = np.unpackbits(np.frombuffer(bytes.fromhex(lanes), np.uint8)).astype(np.bool_)

        def mask(parts: Ints) -> Mask:
            # By key, not by ordinal: nodes that listed in another order still agree.
            ordinals, within = locate(starts, parts)
            words = stream64(hashes[ordinals], within.astype(np.uint64))
            found: Mask = is_owned[words % np.uint64(LANES)]
            return found

        return mask

    def own_parts(self, listed: int, lanes: str | None) -> Ints:
        """Return how many parts of every object are in these lanes."""
        starts = self.starts(listed)
        owned = self.owned(listed, lanes)
        counts = np.diff(starts)
        if owned is not None:
            counts = np.zeros(len(counts), np.int64)
            for at in range(0, int(starts[-1]), _AT_ONCE):
                parts = np.arange(at, min(at + _AT_ONCE, int(starts[-1])))
                np.add.at(counts, locate(starts, parts[owned(parts)])[0], 1)
        return counts

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

    def stops(self, draw: GroupDraw) -> tuple[PartVisit, ...]:
        """Return the parts of a draw as visits of a permit."""
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

    def sources(self, listed: int) -> list[tuple[int, float]]:
        """Return how many objects of each source are drawn from, and their samples, estimated."""
        objects = self._objects.among(listed)
        sources = self._objects.sources(0, objects)
        samples = self._samples(self._objects.sizes(0, objects), sources)
        return list(zip(self._objects.counts(listed).tolist(), samples.tolist(), strict=True))

    def subsets(self) -> list[tuple[Subset, float]]:
        return [
            (one, float(self._samples(one.sizes, one.sources).sum()))
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
        parts = np.bincount(sources, np.diff(starts), len(self._sizing.partitionings))
        samples = self._samples(self._objects.sizes(0, objects), sources)
        found: Floats = np.divide(samples, parts, out=np.ones(len(parts)), where=parts > 0)
        # A source of nothing but empty objects must not be drawn from for ever.
        return np.maximum(found, LEAST_PER_VISIT)

    def _samples(self, sizes: Ints, sources: Ints) -> Floats:
        cuts = enumerate(self._sizing.partitionings)
        return np.array([cut.samples(sizes[sources == number]) for number, cut in cuts])

    def _counts(self, start: int, stop: int) -> Ints:
        """Return how many parts the objects from one number to another have."""
        sizes = self._objects.sizes(start, stop)
        sources = self._objects.sources(start, stop)
        counts = np.zeros(len(sizes), np.int64)
        for number, cut in enumerate(self._sizing.partitionings):
            mine = sources == number
            counts[mine] = cut.parts(sizes[mine])
        return counts

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
