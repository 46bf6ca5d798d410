"""LMDB data files: each value is a sample, read by byte range without a local copy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    MOST_VISIT_BYTES,
    MOST_VISIT_SAMPLES,
    Measure,
    ObjectReader,
    SamplesWithOrigins,
    Visit,
    choice_option,
    refuse_unknown_options,
    take_some,
)
from growcache.formats.items import ItemsFormat, decode_option
from growcache.formats.lmdb_tree import (
    BRANCH,
    LEAF,
    LmdbPage,
    LmdbValue,
    TreeReader,
    TreeTop,
    TreeWalk,
    refuse_database_names,
)
from growcache.schema import Sample
from growcache.seeding import generator_at
from growcache.usercode import UserCode

RANDOM_LEAVES = 32  # at most, read together
# Read together, because with fewer, some values would be much more likely than others.
_FEWEST_LEAVES = 8
_SPARE_LEAVES = 2  # beyond one per value, because a leaf may be hit twice or hold little
_WHOLE = 4  # parts of at most this many values per taken value are read completely
_MOST_ROUNDS = 16  # after which no more values are expected
# Of the mean over the leaves that were hit, relative: bounds how much the chances may differ.
_MOST_VARIANCE = 1 / 50
_POSITIONS = 1 << 62  # number of random positions


async def read_random_values(
    trees: TreeReader, reader: ObjectReader, top: TreeTop, visit: Visit
) -> list[LmdbValue]:
    """Return the random values of a part that the visit takes, in their order.

    Leaves are hit at random positions. A leaf with many positions is hit more often, so its
    values count less in the choice among all values found. Leaves that differ need more hits
    than leaves that are alike, so that all values have the same chance.
    """
    take, key = visit.take or 0, reader.entry.key
    near = top.levels <= 1 and len(top.pages) <= RANDOM_LEAVES * visit.parts
    if near or _WHOLE * take * visit.parts >= top.entries:
        return take_some(await trees.find(reader, top, visit.part, visit.parts), visit, key)
    rng = generator_at("take", visit.seed, visit.round, key, visit.part, visit.parts)
    first, last = (
        Fraction(n * len(top.pages), visit.parts) for n in (visit.part, visit.part + 1)
    )
    count = min(RANDOM_LEAVES, max(_FEWEST_LEAVES, take + _SPARE_LEAVES))
    leaves: dict[Fraction, LmdbPage] = {}
    met: dict[Fraction, tuple[list[LmdbValue], float]] = {}
    for _ in range(_MOST_ROUNDS):
        draws = rng.integers(_POSITIONS, size=count).tolist()
        positions = [first + (last - first) * Fraction(n, _POSITIONS) for n in draws]
        walk = trees.walk(reader, top)
        for start, (width, leaf) in (await _leaves_at(walk, top, positions)).items():
            if start in met:
                continue
            low, high = max(first, start), min(last, start + width)
            indices = range(
                math.ceil((low - start) / width * leaf.count),
                math.ceil((high - start) / width * leaf.count),
            )
            values = [value for i in indices for value in await walk.values(leaf, i)]
            leaves[start], met[start] = leaf, (values, float(high - low))
        if _enough_leaves(met.values(), take):
            break
    pool = [(at, i) for at, (values, _) in sorted(met.items()) for i in range(len(values))]
    if not pool:
        refuse_database_names(trees.walk(reader, top), list(leaves.values()))
        return []
    weights = np.array([1 / met[at][1] for at, _ in pool])
    shares = weights / weights.sum()
    if take * shares.max() < 1 - 1e-9:
        # With equal distances no value occurs twice, and its chance is exactly its share.
        distances = (np.arange(take) + rng.random()) / take
        chosen = np.searchsorted(np.cumsum(shares)[:-1], distances, side="right")
    else:
        chosen = rng.choice(len(pool), min(take, len(pool)), replace=False, p=shares)
    return [met[pool[i][0]][0][pool[i][1]] for i in sorted(chosen.tolist())]


def _enough_leaves(met: Collection[tuple[list[LmdbValue], float]], take: int) -> bool:
    """Whether ``take`` values can be chosen with about equal chances."""
    counts = np.array([len(values) for values, _ in met])
    widths = np.array([width for _, width in met])
    weights = widths.min() / widths
    sums = counts * weights
    if not sums.any() or take * weights[counts > 0].max() > sums.sum():
        return False
    return bool(sums.var() <= _MOST_VARIANCE * len(sums) * sums.mean() ** 2)


async def _leaves_at(
    walk: TreeWalk, top: TreeTop, positions: Sequence[Fraction]
) -> dict[Fraction, tuple[Fraction, LmdbPage]]:
    """Return the leaves and their widths, by their first position."""
    spans = [(Fraction(int(at)), Fraction(1), top.pages[int(at)]) for at in positions]
    pages: dict[int, LmdbPage] = {}
    for level in range(top.levels):
        numbers = list(dict.fromkeys(number for _, _, number in spans))
        pages = dict(zip(numbers, await walk.read(numbers), strict=True))
        for i, (start, width, number) in enumerate(spans if level < top.levels - 1 else ()):
            page = pages[number]
            page.must_be(BRANCH)
            width /= page.count
            index = math.floor((positions[i] - start) / width)
            spans[i] = (start + index * width, width, page.child(index))
    for page in pages.values():
        page.must_be(LEAF)
    return {start: (width, pages[number]) for start, width, number in spans}


_OPTIONS = ("database", "decode", "key")


class LmdbFormat(ItemsFormat):
    inline_bytes = MOST_VISIT_BYTES

    def __init__(self, database: str | None, key: str, code: UserCode | None) -> None:
        super().__init__(code)
        self._trees = TreeReader(database)
        self._key = key

    async def measure(self, reader: ObjectReader) -> Measure:
        top = await self._trees.top(reader)
        stride = max(1.0, reader.entry.size / max(1, top.entries))
        together = max(1, int(top.page_bytes / stride))  # small values: those of one page
        return Measure(stride, 0, top.entries, together)

    async def read(self, reader: ObjectReader, visit: Visit) -> SamplesWithOrigins:
        top = await self._trees.top(reader)
        if visit.take is None:
            found = await self._trees.find(reader, top, visit.part, visit.parts)
        else:
            found = await read_random_values(self._trees, reader, top, visit)
        _refuse_too_much(reader, found)
        values = await self._trees.fetch(reader, found)
        key = reader.entry.key
        return await self.samples_of(
            key,
            values,
            partial(self._sample, key),
            lambda value: f"the value at byte {value.start:,}",
        )

    def _sample(self, name: str, value: LmdbValue) -> Sample | None:
        key, data = value.key, value.data
        assert data is not None
        if self._code is not None:
            return self.by_user(name, data, key)
        if self._key == "none":
            return {"data": data}
        if self._key == "bytes":
            return {"data": data, "key": key}
        try:
            return {"data": data, "key": key.decode()}
        except UnicodeDecodeError:
            raise FormatError(
                f"its key {key[:40]!r} is not text; choose key: bytes", code="GC303"
            ) from None


def _refuse_too_much(reader: ObjectReader, found: Sequence[LmdbValue]) -> None:
    nbytes = sum(one.stop - one.start for one in found)
    if nbytes > reader.entry.size:
        raise FormatError(
            f"{reader.entry.key}: damaged LMDB file: several values overlap", code="GC302"
        )
    if nbytes > MOST_VISIT_BYTES or len(found) > MOST_VISIT_SAMPLES:
        raise FormatError(
            f"{reader.entry.key}: one visit may read at most {MOST_VISIT_BYTES:,} bytes and "
            f"{MOST_VISIT_SAMPLES:,} values, found {nbytes:,} bytes and {len(found):,} values; "
            "lower sampling.samples_per_object, or take fewer",
            code="GC305",
        )


def open_lmdb(options: Mapping[str, Any]) -> LmdbFormat:
    refuse_unknown_options("lmdb", options, _OPTIONS)
    database = options.get("database")
    if database is not None and (not isinstance(database, str) or not database):
        raise ConfigError(f"source.options.database: expected a name, found {database!r}")
    key = choice_option(
        {"key": options.get("key") or "none"}, "key", ("none", "str", "bytes"), "none"
    )
    if options.get("decode") and key != "none":
        raise ConfigError("source.options.key: works only without decode", code="GC103")
    _, code = decode_option(options)
    return LmdbFormat(database, key, code)
