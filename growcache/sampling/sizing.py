"""Sizes of parts, groups and shards: measured on one object per source, and never changed."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from growcache.cache import space
from growcache.cache.files import BLOCK_BYTES
from growcache.cache.formats import CACHE_FORMATS
from growcache.config import Config, SamplingConfig
from growcache.errors import ConfigError
from growcache.formats.base import Measure
from growcache.sampling.messages import Permit
from growcache.schema import Schema

RAMP_GROUPS = 4  # groups of each size before the size doubles
RAMP_DOUBLINGS = 5  # the first shards have a 32nd of a full one, so that training can start
RAMP_END = RAMP_GROUPS * RAMP_DOUBLINGS  # from this group on shards are full
TOPPING_DOUBLINGS = 6  # a group that makes up for a few holes has a 64th of the parts
TOPPING_END = RAMP_GROUPS * TOPPING_DOUBLINGS


@dataclass(frozen=True, slots=True)
class Sizing:
    samples_per_object: int  # estimate for one visit; with cuts the mean over visits
    stride_bytes: float  # bytes of an object per sample
    overhead_bytes: int  # bytes of an object that belong to no sample
    whole: bool  # each object is one part: read whole, or drawn at random
    shard_samples: int
    group_shards: int = 1
    max_parts: int | None = None  # of a fixed set
    doublings: int = RAMP_DOUBLINGS  # of the size of groups until they are full
    # Whether later groups make up for holes, until the set has its number of samples.
    tops_up: bool = False
    # For several sources. Then stride_bytes, overhead_bytes and whole have no meaning.
    cuts: tuple[Partitioning, ...] = ()
    names_decide: bool = False  # as in `Partitioning`

    @property
    def partitionings(self) -> tuple[Partitioning, ...]:
        visit = self.samples_per_object
        one = Partitioning(
            visit,
            self.stride_bytes,
            self.overhead_bytes,
            self.whole,
            samples_per_whole=visit,
            names_decide=self.names_decide,
        )
        return self.cuts or (one,)

    def group_parts(self, group: int) -> int:
        """Return the number of parts of a group. The first groups are small (protocol 7)."""
        ahead = max(0, self.doublings - group // RAMP_GROUPS)
        samples = (self.shard_samples * self.group_shards) >> ahead
        return max(1, -(-samples // self.samples_per_object))

    def parts_before(self, group: int) -> int:
        return _sum_before(group, self.group_parts, RAMP_END)

    def parts_given(self, group: int) -> int:
        """Return the number of parts of all groups before one. They end with a fixed set."""
        parts = self.parts_before(group)
        if self.max_parts is None or parts <= self.max_parts:
            return parts
        if not self.tops_up:
            return self.max_parts
        topping = group - _planned_groups(self)
        return self.max_parts + _sum_before(topping, self._topping_parts, TOPPING_END)

    def _topping_parts(self, number: int) -> int:
        """Return the parts of a group after the planned ones.

        It is small, and larger if many samples are missing.
        """
        assert self.max_parts is not None
        most = min(self.max_parts, self.group_parts(RAMP_END))
        return max(1, most >> max(0, TOPPING_DOUBLINGS - number // RAMP_GROUPS))


def _sum_before(group: int, parts: Callable[[int], int], ramp_end: int) -> int:
    """Return the sum of ``parts`` over earlier groups.

    It changes every few groups up to an end.
    """
    steps, within = divmod(min(group, ramp_end), RAMP_GROUPS)
    head = RAMP_GROUPS * sum(parts(RAMP_GROUPS * step) for step in range(steps))
    return head + (within + max(0, group - ramp_end)) * parts(group)


@lru_cache(maxsize=8)
def _planned_groups(sizing: Sizing) -> int:
    assert sizing.max_parts is not None
    groups = range(RAMP_END + sizing.max_parts + 1)  # of at least one part
    return bisect_left(groups, sizing.max_parts, key=sizing.parts_before)


Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Partitioning:
    samples_per_object: int
    stride_bytes: float
    overhead_bytes: int
    whole: bool
    ranged: bool = True  # whether its format reads parts of objects by byte range
    samples_per_whole: float = 1.0  # estimate for an object that is one part
    names_decide: bool = False  # whether an object is compressed, and therefore one part

    def parts(self, sizes: Ints, compressed: Mask | bool = False) -> Ints:
        """Return the number of parts of objects by their sizes in bytes, at least one each."""
        if self.whole:
            return np.ones(len(sizes), np.int64)
        samples = np.floor((sizes - self.overhead_bytes) / self.stride_bytes + 1e-9)
        parts: Ints = np.maximum(1, -(-samples // self.samples_per_object)).astype(np.int64)
        return np.where(compressed, 1, parts)

    def samples(self, sizes: Ints) -> float:
        if self.whole:
            return len(sizes) * self.samples_per_whole
        samples = (sizes - self.overhead_bytes) / self.stride_bytes
        return float(np.maximum(0, np.floor(samples + 1e-9)).sum())


SHARD_BYTES = 64_000_000  # large enough to read at full speed, small enough for fine eviction
SHARDS_IN_CACHE = 64  # with fewer, eviction would be coarse
GROUP_SAMPLES = 500_000  # of tiny samples, whose origins take more than they do
GROUP_BYTES = 256_000_000  # that a sampler may have in memory for one group
MOST_GROUP_BYTES = 1_000_000_000  # the same, if the user sets the sizes
ALIKE = 4  # samples of one visit in a shard, if the group allows it
MAX_GROUP_SHARDS = 32
MOST_SHARDS = 16_384  # of a full cache with automatic sizes, because a loader maps each of them
SIDECAR_BYTES = 160  # of the sidecar per sample, about
ROUNDING_BYTES = 4 * BLOCK_BYTES  # of a shard's two files, however small they are
KEPT_BYTES = 32 * ROUNDING_BYTES  # of a shard that is never evicted, at least
# A group of samples that differ in size may be this much larger than expected.
LIMIT_OF_EXPECTED = 4


@dataclass(frozen=True, slots=True)
class MeasuredSource:
    measure: Measure
    samples_per_object: float
    ranged: bool
    names_decide: bool = False


def objects_take_turns(sampling: SamplingConfig) -> bool:
    return sampling.weight_by == "objects" and sampling.order == "permutation"


def takes_some_samples(sampling: SamplingConfig) -> bool:
    """Whether a visit takes some samples of a whole object, so that all visits yield equally many.

    If objects take turns, a visit takes all samples, because another visit would fetch the
    object again.
    """
    return sampling.weight_by == "objects" and sampling.order == "replacement"


def measure_sizing(
    config: Config,
    measured: Sequence[MeasuredSource],
    schema: Schema,
    sample_bytes: float | None = None,
) -> Sizing:
    """Return the sizes for a configuration and the measured objects.

    ``sample_bytes`` is the mean size of the probed samples' values, if their sizes differ.
    """
    values = schema.nbytes if sample_bytes is None else sample_bytes
    record_bytes = CACHE_FORMATS[config.cache.format].record_bytes(schema, values)
    ones = [_sizing_of(config, n, one, record_bytes) for n, one in enumerate(measured)]
    if config.weights is None:
        return ones[0]
    cuts = [
        replace(
            sizing.partitionings[0],
            ranged=one.ranged,
            samples_per_whole=sizing.samples_per_object
            if one.ranged
            else one.samples_per_object,
            names_decide=one.names_decide,
        )
        for sizing, one in zip(ones, measured, strict=True)
    ]
    if takes_some_samples(config.sampling):  # each visit takes equally many samples
        least = min(cut.samples_per_object for cut in cuts)
        cuts = [replace(c, samples_per_object=least, samples_per_whole=least) for c in cuts]
    visits = np.array([c.samples_per_whole if c.whole else c.samples_per_object for c in cuts])
    weights = np.array(config.weights)
    mean = float(weights.sum() / (weights / np.maximum(visits, 1e-9)).sum())
    largest = max(ones, key=lambda sizing: sizing.group_shards)
    limit = config.cache.max_samples
    return replace(
        largest,
        samples_per_object=max(1, round(mean)),
        max_parts=None if limit is None else max(1, math.ceil(limit / mean)),
        tops_up=limit is not None,
        cuts=tuple(cuts),
    )


def _sizing_of(config: Config, number: int, one: MeasuredSource, record_bytes: int) -> Sizing:
    measure, ranged = one.measure, one.ranged
    if not ranged and config.sampling.samples_per_object not in ("auto", measure.samples):
        raise ConfigError(
            f"sampling.samples_per_object: source.format {config.sources[number].format} reads "
            f"objects whole, {measure.samples} samples at a time; leave it auto",
            code="GC103",
        )
    visit = _samples_per_visit(config, measure, record_bytes, ranged=ranged)
    group = shards_per_group(visit, int(config.cache.max_bytes))
    limit = config.cache.max_samples
    if limit is not None and limit < visit:
        raise ConfigError(
            f"cache.max_samples: {limit} is less than the {visit} samples that one visit "
            "yields; raise it, or lower sampling.samples_per_object",
            code="GC110",
        )
    return Sizing(
        samples_per_object=visit,
        stride_bytes=float(measure.stride_bytes),
        overhead_bytes=measure.overhead_bytes,
        whole=takes_some_samples(config.sampling) or not ranged,
        shard_samples=_samples_per_shard(config, record_bytes, group),
        group_shards=group,
        max_parts=None if limit is None else -(-limit // visit),
        tops_up=limit is not None,
        doublings=_doublings(config, record_bytes, group),
        names_decide=one.names_decide and config.weights is None,
    )


def _doublings(config: Config, record_bytes: int, group: int) -> int:
    """Return the doublings.

    Without eviction they are fewer, because small first shards stay.
    """
    if config.cache.eviction != "none":
        return RAMP_DOUBLINGS
    full = _samples_per_shard(config, record_bytes, group) * record_bytes
    return min(RAMP_DOUBLINGS, max(0, (full // KEPT_BYTES).bit_length() - 1))


def shards_per_group(visit: int, max_bytes: int) -> int:
    """Return the number of shards over which the samples of a visit are distributed.

    Samples of one object are alike, so no shard gets more than `ALIKE` of a visit. A very large
    cache has fewer shards, because each is mapped. A very small one also has fewer, because the
    last blocks of files would take too much.

    >>> [shards_per_group(visit, 10**11) for visit in (1, 3, 16, 100, 10_000)]
    [1, 3, 4, 25, 32]
    >>> shards_per_group(10_000, 10**12), shards_per_group(10_000, 3 * 10**6)
    (4, 11)
    """
    mapped = GROUP_BYTES * MOST_SHARDS // max_bytes
    held = max_bytes * ALIKE // SHARDS_IN_CACHE // ROUNDING_BYTES
    most = max(ALIKE, min(MAX_GROUP_SHARDS, mapped, held))
    return min(max(min(visit, ALIKE), -(-visit // ALIKE)), most)


def group_limits(
    config: Config, sizing: Sizing, schema: Schema, sample_bytes: float
) -> dict[str, int]:
    """Return the bytes of values at which a group is cut, and the most for one visit.

    The keys are those of the cache's sizes, because shards depend on them. The limits follow
    only from the bound, however small the first samples were (protocol 10). An eighth of the
    bound is reserved for the listing.
    """
    whole = any(cut.whole or cut.names_decide for cut in sizing.partitionings)
    if not (schema.is_ragged or whole):
        return {}
    samples = max(sizing.shard_samples * sizing.group_shards, sizing.samples_per_object)
    overhead = sizing.group_shards * ROUNDING_BYTES + samples * SIDECAR_BYTES
    max_bytes = int(config.cache.max_bytes)
    room = (max_bytes - space.fixed_budget(max_bytes).total) * 7 // 8
    share = room // (config.sampling.samplers + 2) - overhead
    expected = int(samples * max(sample_bytes, 1))
    memory = max(GROUP_BYTES, min(LIMIT_OF_EXPECTED * expected, MOST_GROUP_BYTES))
    limit = max(min(share, memory), min(expected, MOST_GROUP_BYTES))
    most = min((room - overhead) // 2, MOST_GROUP_BYTES)
    return {"group_limit_bytes": limit, "group_most_bytes": max(limit, most)}


def _samples_per_shard(config: Config, record_bytes: int, group: int) -> int:
    wanted = config.sampling.shard_samples
    if wanted != "auto":
        return wanted
    # A larger group takes no larger share of the cache than one of `ALIKE` shards.
    in_cache = SHARDS_IN_CACHE * -(-group // ALIKE)
    held = int(config.cache.max_bytes) // in_cache // (record_bytes + SIDECAR_BYTES)
    shard_bytes = min(SHARD_BYTES, GROUP_BYTES // group)
    return max(1, min(shard_bytes // max(1, record_bytes), held, GROUP_SAMPLES // group))


def _samples_per_visit(
    config: Config, measure: Measure, record_bytes: int, *, ranged: bool
) -> int:
    if not ranged:
        return max(1, measure.samples)
    wanted = config.sampling.samples_per_object
    if wanted != "auto":
        return wanted
    # At most a quarter of a group, so that at least four visits are distributed over its
    # shards.
    shard = _samples_per_shard(config, record_bytes, ALIKE)
    most = min(shard, config.cache.max_samples or shard)
    return _affordable(config, record_bytes, max(1, min(measure.together, most)))


def _affordable(config: Config, record_bytes: int, visit: int) -> int:
    """Lower the samples of a visit until a group of shards fits into memory and bound."""
    while visit > 1 and not _fits(config, record_bytes, visit):
        visit //= 2
    return visit


def _fits(config: Config, record_bytes: int, visit: int) -> bool:
    limit = int(config.cache.max_bytes)
    group = shards_per_group(visit, limit)
    samples = group * _samples_per_shard(config, record_bytes, group)
    nbytes = samples * (record_bytes + SIDECAR_BYTES) + group * ROUNDING_BYTES
    needed = space.minimum_bytes(config.sampling.samplers, nbytes + nbytes // 4)
    return nbytes <= MOST_GROUP_BYTES and needed <= limit


def stored_sizing(sizes: dict[str, Any]) -> Sizing:
    values = {field.name: sizes[field.name] for field in fields(Sizing) if field.name in sizes}
    cuts = tuple(Partitioning(**cut) for cut in sizes.get("cuts", ()))
    return Sizing(**values | {"cuts": cuts})


def sizing_values(sizing: Sizing) -> dict[str, Any]:
    """Return the values for `stored_sizing`.

    They are keys of the fingerprint, and never change.
    """
    values = asdict(sizing)
    if sizing.doublings == RAMP_DOUBLINGS:
        del values["doublings"]
    if not sizing.tops_up:
        del values["tops_up"]
    cuts = list(values.pop("cuts"))
    for one in (values, *cuts):  # earlier caches do not have it
        if not one["names_decide"]:
            del one["names_decide"]
    return values | ({"cuts": cuts} if cuts else {})


def with_configured_sizes(config: Config, sizing: Sizing, *, ranged: bool) -> Sizing:
    """Apply the explicit settings, so that a changed one shows in the fingerprint."""
    sampling = config.sampling
    if sampling.shard_samples != "auto":
        sizing = replace(sizing, shard_samples=sampling.shard_samples)
    wanted = sampling.samples_per_object
    if wanted != "auto" and sizing.cuts:
        cuts = (replace(c, samples_per_object=wanted) if c.ranged else c for c in sizing.cuts)
        return replace(sizing, cuts=tuple(cuts))
    if wanted != "auto" and ranged:
        sizing = replace(sizing, samples_per_object=wanted)
    return sizing


def check_bound(
    config: Config,
    group_bytes: int,
    catalog_bytes: int,
    *,
    largest_bytes: int = 0,
) -> None:
    """Refuse groups that are larger than memory or bound allow (protocol 10 and 11).

    ``largest_bytes`` is the size of an encoded or possible group that must find room.
    """
    if group_bytes > MOST_GROUP_BYTES:
        raise ConfigError(
            f"sampling.shard_samples: a group of {group_bytes:,} bytes does not fit the "
            f"{MOST_GROUP_BYTES:,} bytes of memory that a sampler may use for one; "
            "choose fewer samples per shard",
            code="GC110",
        )
    least = max(
        space.minimum_bytes(config.sampling.samplers, group_bytes, catalog_bytes),
        space.minimum_bytes(-1, largest_bytes, catalog_bytes),
    )
    if int(config.cache.max_bytes) < least:
        raise ConfigError(
            f"cache.max_bytes: {int(config.cache.max_bytes):,} bytes cannot hold "
            f"{config.sampling.samplers} workers + 2 groups of {group_bytes:,} bytes and the "
            f"index; give at least {least:,}, fewer sampling.workers, or a smaller "
            "sampling.shard_samples",
            code="GC110",
        )


class SizeEstimate:
    """Predicts the size of the next group from the last one."""

    def __init__(self, sizing: Sizing, record_bytes: int) -> None:
        self._sizing = sizing
        self._part_bytes_measured = sizing.samples_per_object * (record_bytes + SIDECAR_BYTES)
        self._part_bytes = 0.0  # of the last encoded group

    def learn(self, permit: Permit, nbytes: int) -> None:
        share = len(permit.written) / len(permit.shards)
        beyond = max(0, nbytes / share - self._rounding_bytes)
        if made := len(permit.visits) - len(permit.left_out):
            self._part_bytes = beyond / made

    def group_bytes(self, parts: int) -> int:
        return self._bytes(parts, self._part_bytes or self._part_bytes_measured)

    def full_group_bytes(self) -> int:
        return self._bytes(self._sizing.group_parts(RAMP_END), self._part_bytes_measured)

    def shard_bytes(self, number: int, capacity: int) -> int:
        """Return a low estimate of a shard that was never drawn."""
        shards = self._sizing.group_shards
        group = self.group_bytes(self._sizing.group_parts(number // shards))
        return 3 * (min(capacity, group) // shards) // 4

    def _bytes(self, parts: int, part_bytes: float) -> int:
        return int(parts * part_bytes) + self._rounding_bytes

    @property
    def _rounding_bytes(self) -> int:
        return self._sizing.group_shards * ROUNDING_BYTES
