"""LMDB data files: each value is a sample, read by byte range without a local copy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from growcache.errors import ConfigError, FormatError
from growcache.formats.base import (
    MOST_VISIT_BYTES,
    MOST_VISIT_SAMPLES,
    Measure,
    ObjectFormat,
    ObjectReader,
    Visit,
    choice_option,
    refuse_unknown_options,
    samples_of_items,
)
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
from growcache.formats.user_threads import UserThreads, load_decoder
from growcache.schema import Sample
from growcache.seeding import generator_at
from growcache.usercode import UserCode

RANDOM_LEAVES = 8  # that are met at a time, side by side, and that values are taken of
MOST_TRIES = 32  # after which there are no more values
_POSITIONS = 1 << 62  # of random positions


@dataclass(frozen=True, slots=True)
class _Spot:
    """A page on the way to a random position."""

    page: int  # its number
    start: Fraction  # its first position
    width: Fraction  # its number of positions
    at: Fraction  # the random position

    def below(self, page: LmdbPage) -> _Spot:
        """Return the spot of the child page that has the position."""
        page.must_be(BRANCH)
        width = self.width / page.count
        index = math.floor((self.at - self.start) / width)
        return _Spot(page.child(index), self.start + index * width, width, self.at)


@dataclass(frozen=True, slots=True)
class _RandomLeaf:
    start: Fraction  # its first position
    page: LmdbPage
    values: list[LmdbValue]  # those of the visit's part
    share: Fraction  # its positions in the part

    @property
    def slighted(self) -> float:
        """By what factor its values would be taken too seldom."""
        return len(self.values) / float(self.share)


async def read_random_values(
    trees: TreeReader, reader: ObjectReader, top: TreeTop, visit: Visit
) -> list[LmdbValue]:
    """Return the random values of a part that the visit takes, in their order."""
    take, place = visit.take or 0, (visit.part, visit.parts)
    rng = generator_at("take", visit.seed, visit.round, reader.entry.key, *place)
    near = top.levels <= 1 and len(top.pages) <= RANDOM_LEAVES * visit.parts
    if not near and take * visit.parts < top.entries:
        return await _RandomLeaves(trees, reader, top, visit).some(take, rng)
    found = await trees.find(reader, top, *place)
    if take >= len(found):
        return found
    return [found[i] for i in sorted(rng.choice(len(found), take, replace=False))]


class _RandomLeaves:
    """The random leaves of one visit."""

    def __init__(
        self, trees: TreeReader, reader: ObjectReader, top: TreeTop, visit: Visit
    ) -> None:
        self._trees = trees
        self._reader = reader
        self._top = top
        pages = len(top.pages)
        self._first = Fraction(visit.part * pages, visit.parts)
        self._last = Fraction((visit.part + 1) * pages, visit.parts)
        self._met: dict[Fraction, _RandomLeaf] = {}

    async def some(self, take: int, rng: np.random.Generator) -> list[LmdbValue]:
        chosen: set[tuple[Fraction, int]] = set()
        for _ in range(MOST_TRIES):
            leaves = await self._meet(rng.integers(_POSITIONS, size=RANDOM_LEAVES).tolist())
            most = max(leaf.slighted for leaf in self._met.values())
            for leaf in leaves:
                if rng.random() * most < leaf.slighted:
                    missing = min(-(-take // RANDOM_LEAVES), take - len(chosen))
                    chosen |= _pick_values(leaf, missing, chosen, rng)
            if len(chosen) == take:
                break
        if not any(leaf.values for leaf in self._met.values()):
            refuse_database_names(self._walk, [leaf.page for leaf in self._met.values()])
        return [self._met[at].values[i] for at, i in sorted(chosen)]

    @property
    def _walk(self) -> TreeWalk:
        return self._trees.walk(self._reader, self._top)

    async def _meet(self, draws: Sequence[int]) -> list[_RandomLeaf]:
        """Return the leaves at random positions; one may appear twice."""
        top, walk, length = self._top, self._walk, self._last - self._first
        places = [self._first + length * Fraction(n, _POSITIONS) for n in draws]
        spots = [_Spot(top.pages[int(at)], Fraction(int(at)), Fraction(1), at) for at in places]
        for _ in range(top.levels - 1):
            pages = await _read_pages(walk, spots)
            spots = [spot.below(pages[spot.page]) for spot in spots]
        leaves = await _read_pages(walk, spots)
        for spot in spots:
            if spot.start not in self._met:
                self._met[spot.start] = await self._leaf(spot, leaves[spot.page])
        return [self._met[spot.start] for spot in spots]

    async def _leaf(self, spot: _Spot, page: LmdbPage) -> _RandomLeaf:
        page.must_be(LEAF)
        start, walk = max(self._first, spot.start), self._walk
        stop = min(self._last, spot.start + spot.width)
        first = math.ceil((start - spot.start) / spot.width * page.count)
        last = math.ceil((stop - spot.start) / spot.width * page.count)
        values = [one for i in range(first, last) for one in await walk.values(page, i)]
        return _RandomLeaf(spot.start, page, values, stop - start)


async def _read_pages(walk: TreeWalk, spots: Sequence[_Spot]) -> dict[int, LmdbPage]:
    numbers = list(dict.fromkeys(spot.page for spot in spots))
    return dict(zip(numbers, await walk.read(numbers), strict=True))


def _pick_values(
    leaf: _RandomLeaf, most: int, chosen: set[tuple[Fraction, int]], rng: np.random.Generator
) -> set[tuple[Fraction, int]]:
    """Return random values of a leaf that were not chosen yet."""
    fresh = [i for i in range(len(leaf.values)) if (leaf.start, i) not in chosen]
    picked = rng.permutation(len(fresh))[:most]
    return {(leaf.start, fresh[i]) for i in picked}


_OPTIONS = ("database", "decode", "key")


class LmdbFormat(ObjectFormat):
    ranged = True

    def __init__(self, database: str | None, key: str, decode: UserCode | None) -> None:
        self._trees = TreeReader(database)
        self._key = key
        self._decode = decode
        self._threads = UserThreads()
        self.code_digest = decode.digest if decode else None

    async def measure(self, reader: ObjectReader) -> Measure:
        top = await self._trees.top(reader)
        stride = max(1.0, reader.entry.size / max(1, top.entries))
        together = max(1, int(top.page_bytes / stride))  # small values: those of one page
        return Measure(stride, 0, top.entries, together)

    async def read(self, reader: ObjectReader, visit: Visit) -> list[tuple[Sample, int, int]]:
        """An origin is where the value lies, in bytes."""
        top = await self._trees.top(reader)
        if visit.take is None:
            found = await self._trees.find(reader, top, visit.part, visit.parts)
        else:
            found = await read_random_values(self._trees, reader, top, visit)
        _refuse_too_much(reader, found)
        values = await self._trees.fetch(reader, found)
        key = reader.entry.key
        decode = partial(self._sample, key)
        if self._decode is not None:
            return await self._threads.samples_of_items(key, values, decode, _label)
        return samples_of_items(key, values, decode, _label)

    def _sample(self, name: str, value: LmdbValue) -> Sample | None:
        key, data = value.key, value.data
        assert data is not None
        if self._decode is not None:
            result = self._decode(name, {"data": data, "key": key})
            return None if result is None else self._decode.sample(name, result)
        if self._key == "none":
            return {"data": data}
        if self._key == "bytes":
            return {"data": data, "key": key}
        try:
            return {"data": data, "key": key.decode()}
        except UnicodeDecodeError:
            raise FormatError(f"its key {key[:40]!r} is no text; choose key: bytes") from None


def _label(value: LmdbValue) -> str:
    return f"the value at byte {value.start:,}"


def _refuse_too_much(reader: ObjectReader, found: Sequence[LmdbValue]) -> None:
    nbytes = sum(one.stop - one.start for one in found)
    if nbytes > reader.entry.size:
        raise FormatError(
            f"{reader.entry.key}: damaged LMDB file: several values lie in the same place"
        )
    if nbytes > MOST_VISIT_BYTES or len(found) > MOST_VISIT_SAMPLES:
        raise FormatError(
            f"{reader.entry.key}: one visit may read {MOST_VISIT_BYTES:,} bytes and "
            f"{MOST_VISIT_SAMPLES:,} values, found {nbytes:,} bytes and {len(found):,} values; lower "
            "sampling.samples_per_object, or take fewer"
        )


def open_lmdb(options: Mapping[str, Any]) -> LmdbFormat:
    """Return the format.

    Options:
        database: name of one of the file's databases; the unnamed one by default.
        key: ``str`` or ``bytes``: the value's key as field ``key``; ``none``.
        decode: ``package.module:function`` of ``data``, and ``key`` (bytes) if it takes it,
            that returns the sample; None to leave the value out. It runs in threads of the
            samplers, several at once.

    Raises:
        ConfigError: an unknown option, or a value that cannot be meant.
    """
    refuse_unknown_options("lmdb", options, _OPTIONS)
    database, decode = options.get("database"), options.get("decode")
    if database is not None and (not isinstance(database, str) or not database):
        raise ConfigError(f"source.options.database: expected a name, found {database!r}")
    key = choice_option(
        {"key": options.get("key") or "none"}, "key", ("none", "str", "bytes"), "none"
    )
    if decode is not None and key != "none":
        raise ConfigError("source.options.key: goes with values as they are, not with decode")
    return LmdbFormat(database, key, None if decode is None else load_decoder(decode))
