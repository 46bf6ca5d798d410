"""Fill one group of shards: visit its parts, transform the samples, distribute and encode them.

The limits are the store's latency over the reads in flight, and then the client's CPU time per
byte. Therefore many visits run concurrently, and large arrays are not copied between the
client's buffer and the file.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from growcache.cache.formats.encoding import EncodedFile
from growcache.cache.incoming import bytes_to_reserve, encode_shard
from growcache.cache.sidecar import EMPTY, Hole, Origins, SampleOrigin, Sidecar, version_of
from growcache.errors import (
    BudgetSpentError,
    ConfigError,
    FormatError,
    StoreError,
    StoreRefusedError,
    TransientStoreError,
)
from growcache.formats.base import Visit, read_partly
from growcache.formats.memory import DecodeGate
from growcache.sampling.messages import (
    LabelValues,
    PartVisit,
    Permit,
    hole_reason,
    stored_bytes,
)
from growcache.sampling.sampler_memory import (
    GroupLimits,
    MemoryBudget,
    VisitResult,
    YieldEstimate,
)
from growcache.sampling.sources import Sources
from growcache.schema import Array, Origin, Sample, Schema, Value
from growcache.seeding import derive_seed, generator_at
from growcache.store.contract import Entry
from growcache.store.request_counts import failure_code
from growcache.store.store import MOST_ASKED_OBJECTS
from growcache.usercode import CodeDigest, UserCode, load_code, short_key

PARAMETERS = ("sample", "rng", "origin")


@dataclass(frozen=True, slots=True)
class SampleTransform:
    code: UserCode
    seed: int

    @property
    def digest(self) -> CodeDigest:
        """Digest of its module, which is part of the cache's fingerprint."""
        return self.code.digest

    def __call__(
        self, sample: Sample, origin: Origin, where: tuple[int | str, ...]
    ) -> Sample | None:
        """Return the function's result for a copy of the sample, or None if it skips the sample."""
        copies = {name: _copy(value) for name, value in sample.items()}
        rng = generator_at(self.seed, "transform", *where)
        bits = derive_seed(self.seed, "global", *where)
        # For code that uses the global generators of NumPy and Python.
        np.random.seed(bits & 0xFFFFFFFF)
        random.seed(bits)
        values = {"sample": copies, "rng": rng, "origin": origin}
        given = list(copies.values())
        result = self.code(origin.key, values)
        return None if result is None else self.code.sample(origin.key, result, given)


def load_transform(
    name: str | None, options: Mapping[str, Any], seed: int
) -> SampleTransform | None:
    """Return the transform with the name ``package.module:function``, or None without a name.

    A class is instantiated once, with ``options`` as its arguments. A function gets them as
    keyword arguments.
    """
    if name is None:
        return None
    where = ("sampling.transform", "sampling.transform_options")
    code = load_code(name, options, PARAMETERS, where)
    if "sample" not in code.parameters:
        raise ConfigError(
            f"sampling.transform: {name} must take sample, and may take rng and origin, "
            f"found ({', '.join(code.parameters)})",
            code="GC108",
        )
    return SampleTransform(code, seed)


def _copy(value: Any) -> Array | Any:
    return value.copy() if isinstance(value, np.ndarray) else value


WEIGHT = "_weight"  # field with the weight of a sample that undoes the bias of sampling.strata


@dataclass(frozen=True, slots=True)
class EncodedShard:
    sidecar: Sidecar
    files: list[EncodedFile]

    @property
    def needed_bytes(self) -> int:
        return bytes_to_reserve(self.sidecar)


_WIDEST = 16  # bytes in which a value of one byte may be stored


def _largest_sample(limits: GroupLimits | None, schema: Schema | None) -> int | None:
    """Return the size beyond which a sample cannot be kept, and so need not be decoded."""
    if limits is not None:
        return limits.largest
    if schema is None or schema.is_ragged:
        return None
    return _WIDEST * schema.nbytes


class GroupFiller:
    def __init__(
        self,
        sources: Sources,
        transform: SampleTransform | None,
        seed: int,
        concurrency: int,
        *,
        weighted: bool = False,
    ) -> None:
        self._sources = sources
        self._transform = transform
        self._seed = seed
        self._concurrency = concurrency
        self._weighted = weighted
        self._turns = asyncio.Lock()
        self.gate = DecodeGate()
        self._yields = YieldEstimate()

    async def visit_all(
        self,
        permit: Permit,
        schema: Schema | None,
        on_visit: Callable[[], None],
        limits: GroupLimits | None = None,
        on_setback: Callable[[int, str], None] = lambda place, error: None,
    ) -> Sequence[VisitResult]:
        """Return the result of each visit, in order.

        Groups start their visits one after another. In parallel they would end together, and
        nothing would be read while they are written. ``on_setback`` is called with the place of
        a visit that is set aside, and the reason. After a TransientStoreError the whole group
        must be filled again later.
        """
        budget = MemoryBudget(
            len(permit.visits), limits, defers=permit.defers, yields=self._yields
        )
        visits = iter(enumerate(permit.visits))
        left_out, purged = frozenset(permit.left_out), frozenset(permit.purged)
        began = time.monotonic()
        started = asyncio.Event()  # all visits have started, or one has failed
        # A transform may make a sample smaller.
        largest = None if self._transform else _largest_sample(limits, schema)

        async def work() -> None:
            try:
                for place, visit in visits:
                    if place == len(permit.visits) - 1:
                        started.set()
                    if place in left_out:
                        budget.put(place, VisitResult(left_out=True))
                        on_visit()
                        continue
                    if place in purged:
                        budget.put(place, VisitResult())
                        on_visit()
                        continue
                    if not await budget.begin(place, stored_bytes(visit)):
                        on_visit()
                        continue
                    with self.gate.visit(largest):
                        try:
                            visited = await self._visited(permit, visit, schema, began)
                        except TransientStoreError as error:
                            if not await self._is_set_aside(permit, visit, error, began):
                                raise
                            on_setback(place, str(error))
                            visited = VisitResult(left_out=True)
                        budget.put(place, visited)
                    on_visit()
            finally:
                started.set()

        count = min(self._concurrency, len(permit.visits))
        tasks: list[asyncio.Task[None]] = []
        try:
            async with self._turns:
                tasks += [asyncio.create_task(work()) for _ in range(count)]
                if tasks:
                    await started.wait()
            await asyncio.gather(*tasks)
        except BudgetSpentError:
            deque(visits, maxlen=0)  # later ones would be read in vain
            budget.stop()
            await asyncio.wait(tasks)  # the bytes that the others have booked count as read
            raise
        finally:
            for task in tasks:  # one failed visit fails the group, so the others are in vain
                task.cancel()
        return budget.results()

    async def _visited(
        self, permit: Permit, visit: PartVisit, schema: Schema | None, began: float
    ) -> VisitResult:
        """Make a visit, unless its object is known to fail. Makeup groups retry it."""
        since = began if permit.made_up else 0.0
        if permit.defers and self._sources.given_up(visit.entry, since):
            return VisitResult(left_out=True)
        return await self.visit(permit, visit, schema)

    async def _is_set_aside(
        self, permit: Permit, visit: PartVisit, error: TransientStoreError, began: float
    ) -> bool:
        if not permit.defers or isinstance(error, StoreRefusedError):
            return False
        since = began if error.since is None else error.since
        purged = frozenset(permit.purged)
        allowed = (one.entry for at, one in enumerate(permit.visits) if at not in purged)
        others = [entry for entry in allowed if entry.key != visit.entry.key]
        return await self._sources.fails_alone(
            visit.entry, since, [*others[:MOST_ASKED_OBJECTS], *permit.others]
        )

    async def visit(
        self, permit: Permit, visit: PartVisit, schema: Schema | None
    ) -> VisitResult:
        """Make one visit. A permanent failure is a hole (protocol 6)."""
        round_ = permit.round if visit.round is None else visit.round
        format_visit = Visit(visit.part, visit.parts, round_, self._seed, permit.take)
        now: Entry | None = None
        try:
            if visit.renewed:
                visit = await self._renewed(visit)
                now = visit.entry
            reader = self._sources.reader(visit.entry, visit.partners)
            found, unread = await read_partly(
                self._sources.format_of(visit.entry), reader, format_visit
            )
            visited = self.prepared(permit, visit, found, schema)
            if unread is not None:
                visited.hole = hole_reason(visit.entry.key, unread)
                visited.hole_kind = failure_code(unread)
            visited.entry = now
            return visited
        except TransientStoreError:
            raise
        except (StoreError, FormatError) as error:
            reason = hole_reason(visit.entry.key, error)
            return VisitResult(hole=reason, hole_kind=failure_code(error), entry=now)

    async def _renewed(self, visit: PartVisit) -> PartVisit:
        entry, *partners = [
            await self._sources.current_entry(one) for one in (visit.entry, *visit.partners)
        ]
        return replace(visit, entry=entry, partners=tuple(partners))

    def prepared(
        self,
        permit: Permit,
        visit: PartVisit,
        found: list[tuple[Sample, int, int]],
        schema: Schema | None,
    ) -> VisitResult:
        """Transform the samples. Those of another schema form a hole.

        Raises:
            FormatError: All samples have another schema.
        """
        visited = VisitResult()
        odd: FormatError | None = None
        began = time.monotonic()
        for index, (sample, start, end) in enumerate(found):
            try:
                made = self._transformed(permit, visit, (sample, start, end), index)
                if made is not None and self._weighted:
                    made = _with_weight(made, 1.0 if visit.weight is None else visit.weight)
                if made is not None and schema is not None:
                    made = self._conformed(made, schema, visit.entry.key)
            except FormatError as error:
                odd = odd or error
                continue
            if made is not None:
                visited.samples.append(made)
                visited.origins.append((start, end))
        if self._transform is not None:
            visited.transform_seconds = time.monotonic() - began
        if odd is not None:
            if not visited.samples:
                raise odd
            visited.hole = hole_reason(visit.entry.key, odd)
            visited.hole_kind = failure_code(odd)
        return visited

    def _transformed(
        self, permit: Permit, visit: PartVisit, found: tuple[Sample, int, int], index: int
    ) -> Sample | None:
        """Return the transformed sample, or None if the user's function skips it."""
        bare, start, end = found
        sample = with_labels(bare, visit.joined, visit.entry.key)
        if self._transform is None:
            return sample
        origin = Origin(visit.entry.key, visit.entry.etag, start, end)
        round_ = permit.round if visit.round is None else visit.round
        return self._transform(sample, origin, (round_, visit.entry.key, visit.part, index))

    def _conformed(self, sample: Sample, schema: Schema, key: str) -> Sample:
        try:
            return schema.conform(sample)
        except FormatError as error:
            maker = f"{self._transform.code.name} on " if self._transform else ""
            raise FormatError(f"{maker}{short_key(key)}: {error}", code=error.code) from None


def _with_weight(sample: Sample, weight: float) -> Sample:
    if WEIGHT in sample:
        raise FormatError(
            f"a sample has a field {WEIGHT} already; sampling.strata adds one", code="GC303"
        )
    return {**sample, WEIGHT: np.asarray(weight, np.float32)}


def with_labels(sample: Sample, values: LabelValues, key: str) -> Sample:
    if not values:
        return sample
    if taken := sample.keys() & values.keys():
        raise FormatError(
            f"{short_key(key)}: its samples have a field {min(taken)!r} of their own, and "
            "source.labels.columns names another; rename the table's column",
            code="GC303",
        )
    return sample | {name: _label_value(value) for name, value in values.items()}


def _label_value(value: float | str) -> Value:
    if isinstance(value, str):
        return value
    return np.asarray(value, np.int64 if isinstance(value, int) else np.float64)


def none_came(permit: Permit, visited: Sequence[VisitResult]) -> bool:
    """Whether every attempted visit is set aside; False without an attempt."""
    tried = [one for place, one in enumerate(visited) if place not in permit.left_out]
    return bool(tried) and all(one.left_out for one in tried)


def encode_group(
    permit: Permit,
    visited: Sequence[VisitResult],
    schema: Schema,
    fingerprint: str,
    cache_format: str,
    lengths: Sequence[int] | None = None,
) -> list[EncodedShard]:
    """Distribute the samples of a visit round-robin over the shards, and encode these.

    Shards that are written are cut to ``lengths``.
    """
    shards, purged = [_ShardContents() for _ in permit.shards], frozenset(permit.purged)
    for place, (visit, result) in enumerate(zip(permit.visits, visited, strict=True)):
        shard = shards[place % len(shards)]
        if result.left_out:
            shard.left_out.append(place)
        elif result.hole is not None:
            version = _version(result.entry)
            shard.holes.append(Hole(visit.entry.key, visit.part, result.hole, version))
        elif not result.samples and visit.parts == 1 and place not in purged:
            shard.empty += 1  # one of several parts may be empty
        pairs = zip(result.samples, result.origins, strict=True)
        for index, (sample, (start, end)) in enumerate(pairs):
            shard = shards[(place + index) % len(shards)]
            shard.samples.append(sample)
            shard.origins.append(_origin_of(visit, result.entry or visit.entry, start, end))
    written = [
        (place, shard)
        for place, shard in enumerate(shards)
        if permit.shards[place] in permit.written
    ]
    for (_, shard), length in zip(written, lengths or (), strict=lengths is not None):
        del shard.samples[length:], shard.origins[length:]
    return [
        _encode(permit, place, shard, schema, fingerprint, cache_format)
        for place, shard in written
    ]


def _version(entry: Entry | None) -> str:
    return "" if entry is None else version_of(entry.etag, entry.size, entry.mtime)


@dataclass(slots=True)
class _ShardContents:
    samples: list[Sample] = field(default_factory=list)
    origins: list[SampleOrigin] = field(default_factory=list)
    holes: list[Hole] = field(default_factory=list)
    empty: int = 0
    left_out: list[int] = field(default_factory=list)


def _origin_of(visit: PartVisit, e: Entry, start: int, end: int) -> SampleOrigin:
    place = (visit.part, visit.parts, start, end)
    return SampleOrigin(e.key, e.etag, e.size, e.mtime, *place, visit.round, e.store)


def _encode(
    permit: Permit,
    place: int,
    contents: _ShardContents,
    schema: Schema,
    fingerprint: str,
    cache_format: str,
) -> EncodedShard:
    packed = encode_shard(cache_format, schema, contents.samples)
    visits = len(range(place, len(permit.visits), len(permit.shards)))
    sidecar = Sidecar(
        fingerprint=fingerprint,
        edition=permit.edition,
        round=permit.round,
        number=permit.shards[place],
        group=permit.group,
        parts=visits - len(contents.left_out),
        origins=Origins.pack(contents.origins),
        holes=tuple(contents.holes),
        counts={EMPTY: contents.empty} if contents.empty else {},
        editions=permit.editions,
        left_out=tuple(contents.left_out),
        makeups=permit.makeups,
        made_up=permit.made_up,
        **packed.facts,
    )
    return EncodedShard(sidecar, packed.files)
