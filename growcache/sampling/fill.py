"""Filling one group of shards: visit the parts, transform, deal, encode. No state.

What limits it: the store's latency over the reads in flight, then the client's CPU per
byte. So many visits run at once, large arrays are never copied on their way from the
client's buffer to the file, and everything is encoded before any room is asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from growcache.cache.formats.values import EncodedFile
from growcache.cache.incoming import needed_bytes
from growcache.cache.packing import pack
from growcache.cache.sidecar import EMPTY, DrawnFrom, Hole, Origins, Sidecar, version_of
from growcache.errors import FormatError, StoreError, StoreRefusedError, TransientStoreError
from growcache.remote.formats import Visit, read_found
from growcache.remote.formats.decoding import Gate
from growcache.remote.sources import Sources
from growcache.remote.store import MOST_ASKED, Entry
from growcache.sampling.allowance import Allowance, Limits, Visited, Yields
from growcache.sampling.messages import Joined, Permit, Stop
from growcache.sampling.pace import Pace
from growcache.sampling.reasons import reason
from growcache.sampling.transforms import Transform
from growcache.schema import Origin, Sample, Schema, Value
from growcache.usercode import short

WEIGHT = "_weight"  # field: by which a sample counts to undo what sampling.strata favours


@dataclass(frozen=True, slots=True)
class Filled:
    """A shard that is ready to be written."""

    sidecar: Sidecar
    files: list[EncodedFile]

    @property
    def needed_bytes(self) -> int:
        """Bytes on disk to reserve for it."""
        return needed_bytes(self.sidecar)


class Filler:
    """Fills groups; everything it needs to know travels in the permit.

    Args:
        sources: what is read from, and how objects are decoded.
        transform: the user's, or None.
        seed: of everything random.
        concurrency: visits at once.
        pace: what holds reading back to the allowed rate.
        weighted: whether every sample has its weight, as field `WEIGHT`.

    Attributes:
        gate: that decoding goes through.
    """

    def __init__(
        self,
        sources: Sources,
        transform: Transform | None,
        seed: int,
        concurrency: int,
        pace: Pace,
        *,
        weighted: bool = False,
    ) -> None:
        self._sources = sources
        self._transform = transform
        self._seed = seed
        self._concurrency = concurrency
        self._pace = pace
        self._weighted = weighted
        self._turns = asyncio.Lock()
        self.gate = Gate()
        self._yields = Yields()

    async def visit_all(
        self,
        permit: Permit,
        schema: Schema | None,
        on_visit: Callable[[], None],
        limits: Limits | None = None,
        on_setback: Callable[[int, str], None] = lambda place, error: None,
    ) -> Sequence[Visited]:
        """Return what each stop of the permit brought, in their order.

        Groups begin their visits one after the other. Side by side they would end together, and
        nothing be read while they are written.

        Args:
            permit: what to visit.
            schema: of the samples; None where it is not known yet.
            on_visit: called after each.
            limits: of what is kept in memory; what comes after them is left out, if the
                permit lets visits be, and else a hole.
            on_setback: told the place of a visit that is set aside, and why: its object keeps
                failing while others answer.

        Raises:
            TransientStoreError: the group must be filled again later, as a whole.
        """
        allowance = Allowance(
            len(permit.stops), limits, defers=permit.defers, yields=self._yields
        )
        stops = iter(enumerate(permit.stops))
        left_out, began = frozenset(permit.left_out), time.monotonic()
        begun = asyncio.Event()  # all visits, or one has failed
        # A transform may make a sample smaller.
        largest = None if limits is None or self._transform else limits.largest

        async def work() -> None:
            try:
                for place, stop in stops:
                    if place == len(permit.stops) - 1:
                        begun.set()
                    if place in left_out:
                        allowance.put(place, Visited(left_out=True))
                        on_visit()
                        continue
                    if not await allowance.begin(place, _stored_bytes(stop)):
                        on_visit()
                        continue
                    await self._pace.wait()
                    with self.gate.visit(largest):
                        try:
                            visited = await self._visited(permit, stop, schema, began)
                        except TransientStoreError as error:
                            if not await self._is_set_aside(permit, stop, error, began):
                                raise
                            on_setback(place, str(error))
                            visited = Visited(left_out=True)
                        allowance.put(place, visited)
                    on_visit()
            finally:
                begun.set()

        count = min(self._concurrency, len(permit.stops))
        tasks: list[asyncio.Task[None]] = []
        try:
            async with self._turns:
                tasks += [asyncio.create_task(work()) for _ in range(count)]
                if tasks:
                    await begun.wait()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # one failed visit fails the group: the others are in vain
                task.cancel()
        return allowance.results()

    async def _visited(
        self, permit: Permit, stop: Stop, schema: Schema | None, began: float
    ) -> Visited:
        """Return what one stop brought; nothing where its object is known to fail.

        Makeup groups find that out anew.
        """
        since = began if permit.made_up else 0.0
        if permit.defers and self._sources.given_up(stop.entry, since):
            return Visited(left_out=True)
        return await self.visit(permit, stop, schema)

    async def _is_set_aside(
        self, permit: Permit, stop: Stop, error: TransientStoreError, began: float
    ) -> bool:
        """Whether a visit that failed is set aside, for others of its store are answered."""
        if not permit.defers or isinstance(error, StoreRefusedError):
            return False
        since = began if error.since is None else error.since
        others = [one.entry for one in permit.stops if one.entry.key != stop.entry.key]
        return await self._sources.fails_alone(
            stop.entry, since, [*others[:MOST_ASKED], *permit.others]
        )

    async def visit(self, permit: Permit, stop: Stop, schema: Schema | None) -> Visited:
        """Return what one stop brought; a permanent failure is a hole (protocol 6)."""
        round_ = permit.round if stop.round is None else stop.round
        visit = Visit(stop.part, stop.parts, round_, self._seed, permit.take)
        now: Entry | None = None
        try:
            if stop.renewed:
                stop = await self._renewed(stop)
                now = stop.entry
            reader = self._sources.reader(stop.entry, stop.partners)
            found, unread = await read_found(self._sources.format_of(stop.entry), reader, visit)
            visited = self.prepared(permit, stop, found, schema)
            if unread is not None:
                visited.hole = reason(stop.entry.key, unread)
            visited.entry = now
            return visited
        except TransientStoreError:
            raise
        except (StoreError, FormatError) as error:
            return Visited(hole=reason(stop.entry.key, error), entry=now)

    async def _renewed(self, stop: Stop) -> Stop:
        """Return a stop with the versions of its objects that are there now."""
        entry, *partners = [
            await self._sources.renewed(one) for one in (stop.entry, *stop.partners)
        ]
        return replace(stop, entry=entry, partners=tuple(partners))

    def prepared(
        self,
        permit: Permit,
        stop: Stop,
        found: list[tuple[Sample, int, int]],
        schema: Schema | None,
    ) -> Visited:
        """Return decoded samples as they will be cached: transformed, and of the schema.

        Those of which that cannot be said are a hole beside the others.

        Raises:
            FormatError: that is all of them: the transform failed, or they are not of the schema.
        """
        visited = Visited()
        odd: FormatError | None = None
        for index, (sample, start, end) in enumerate(found):
            try:
                made = self._transformed(permit, stop, (sample, start, end), index)
                if made is not None and self._weighted:
                    made = _weighted(made, 1.0 if stop.weight is None else stop.weight)
                if made is not None and schema is not None:
                    made = self._conformed(made, schema, stop.entry.key)
            except FormatError as error:
                odd = odd or error
                continue
            if made is not None:
                visited.samples.append(made)
                visited.origins.append((start, end))
        if odd is not None:
            if not visited.samples:
                raise odd
            visited.hole = reason(stop.entry.key, odd)
        return visited

    def _transformed(
        self, permit: Permit, stop: Stop, found: tuple[Sample, int, int], index: int
    ) -> Sample | None:
        """Return what the user's function makes of a sample; None where it passes over it."""
        bare, start, end = found
        sample = join(bare, stop.joined, stop.entry.key)
        if self._transform is None:
            return sample
        origin = Origin(stop.entry.key, stop.entry.etag, start, end)
        return self._transform(sample, origin, (permit.round, stop.entry.key, stop.part, index))

    def _conformed(self, sample: Sample, schema: Schema, key: str) -> Sample:
        try:
            return schema.conform(sample)
        except FormatError as error:
            maker = f"{self._transform.code.name} on " if self._transform else ""
            raise FormatError(f"{maker}{short(key)}: {error}") from None


def _stored_bytes(stop: Stop) -> float:
    """Return about how many bytes in the store a visit is about."""
    return (stop.entry.size + sum(partner.size for partner in stop.partners)) / stop.parts


def _weighted(sample: Sample, weight: float) -> Sample:
    if WEIGHT in sample:
        raise FormatError(f"a sample has a field {WEIGHT} already; sampling.strata adds one")
    return {**sample, WEIGHT: np.asarray(weight, np.float32)}


def join(sample: Sample, values: Joined, key: str) -> Sample:
    """Return a sample with more fields.

    Raises:
        FormatError: it has one of them already.
    """
    if not values:
        return sample
    if taken := sample.keys() & values.keys():
        raise FormatError(
            f"{short(key)}: its samples have a field {min(taken)!r} of their own, and "
            "source.labels.columns names another; call the table's column something else"
        )
    return sample | {name: _value(value) for name, value in values.items()}


def _value(value: float | str) -> Value:
    if isinstance(value, str):
        return value
    return np.asarray(value, np.int64 if isinstance(value, int) else np.float64)


def none_came(permit: Permit, visited: Sequence[Visited]) -> bool:
    """Whether every visit that was tried is set aside; what was not even tried says nothing.

    A group of which nothing is tried is empty, as it was when it was filled first.
    """
    tried = [one for place, one in enumerate(visited) if place not in permit.left_out]
    return bool(tried) and all(one.left_out for one in tried)


def encode_group(
    permit: Permit,
    visited: Sequence[Visited],
    schema: Schema,
    fingerprint: str,
    cache_format: str,
) -> list[Filled]:
    """Return the shards to be written: samples of visits are dealt round-robin over a group."""
    hands: list[list[tuple[Sample, DrawnFrom]]] = [[] for _ in permit.shards]
    holes: list[list[Hole]] = [[] for _ in permit.shards]
    empty = [0 for _ in permit.shards]
    left_out: list[list[int]] = [[] for _ in permit.shards]
    for place, (stop, result) in enumerate(zip(permit.stops, visited, strict=True)):
        if result.left_out:
            left_out[place % len(hands)].append(place)
        elif result.hole is not None:
            hole = Hole(stop.entry.key, stop.part, result.hole, _version(result.entry))
            holes[place % len(hands)].append(hole)
        elif not result.samples and stop.parts == 1:  # one of several parts may well be empty
            empty[place % len(hands)] += 1
        pairs = zip(result.samples, result.origins, strict=True)
        for index, (sample, (start, end)) in enumerate(pairs):
            hand = hands[(place + index) % len(hands)]
            hand.append((sample, _drawn_from(stop, result.entry or stop.entry, start, end)))
    return [
        _encode(
            permit,
            place,
            hand,
            _Yield(holes[place], empty[place], left_out[place]),
            schema,
            fingerprint,
            cache_format,
        )
        for place, hand in enumerate(hands)
        if permit.shards[place] in permit.written
    ]


def _version(entry: Entry | None) -> str:
    return "" if entry is None else version_of(entry.etag, entry.size, entry.mtime)


@dataclass(frozen=True, slots=True)
class _Yield:
    """The visits counted to a shard that brought nothing."""

    holes: list[Hole]
    empty: int
    left_out: list[int]


def _drawn_from(stop: Stop, e: Entry, start: int, end: int) -> DrawnFrom:
    place = (stop.part, stop.parts, start, end)
    return DrawnFrom(e.key, e.etag, e.size, e.mtime, *place, stop.round, e.store)


def _encode(
    permit: Permit,
    place: int,
    hand: list[tuple[Sample, DrawnFrom]],
    without: _Yield,
    schema: Schema,
    fingerprint: str,
    cache_format: str,
) -> Filled:
    packed = pack(cache_format, schema, [sample for sample, _ in hand])
    visits = len(range(place, len(permit.stops), len(permit.shards)))
    sidecar = Sidecar(
        fingerprint=fingerprint,
        edition=permit.edition,
        round=permit.round,
        number=permit.shards[place],
        group=permit.group,
        parts=visits - len(without.left_out),
        origins=Origins.pack(drawn for _, drawn in hand),
        holes=tuple(without.holes),
        counts={EMPTY: without.empty} if without.empty else {},
        editions=permit.editions,
        left_out=tuple(without.left_out),
        makeups=permit.makeups,
        made_up=permit.made_up,
        **packed.facts,
    )
    return Filled(sidecar, packed.files)
