"""The sidecar: the file next to a shard that describes it.

Its bytes depend only on the samples, and on no clock, host or permit. So equal draws give equal
files, and sidecars are enough to rebuild the index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import google_crc32c
import orjson

from growcache.cache.deferrals import ShardDeferrals
from growcache.cache.deferrals import number as checked_number
from growcache.cache.files import RECORDS
from growcache.cache.side_files import EditionValues, editions_in_sidecar
from growcache.errors import CachePathError, CorruptShardError
from growcache.schema import Origin, Schema
from growcache.store.contract import Entry

FORMAT_VERSION = 1
EMPTY = "empty"  # key in `Sidecar.counts`: visits to whole objects without a sample
_COUNTS = (
    "edition",
    "round",
    "number",
    "group",
    "samples",
    "parts",
    "record_bytes",
    "shard_bytes",
)
_SELDOM = ("left_out", "makeups", "made_up")  # columns that are omitted if they are empty
_MOST = 1 << 62
# No file name leads out of the shard's directory, because dots in a field's name are encoded.
_FILE = re.compile(r"\.tfrecord|\.offsets\.npy|\.npy/[^/.\x00][^/\x00]*")
_HEAD = '{"crc32c":"%08x","sidecar":'
_HEAD_BYTES = len(_HEAD % 0)


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """The origin of one sample, as the sampler knows it."""

    key: str  # without bucket or scheme
    etag: str | None  # None if the store has no versions
    size: int  # bytes of the object, as listed
    mtime: float | None  # seconds since the epoch, as listed
    part: int  # number of the visited part
    parts: int
    start: int  # first row or byte
    stop: int  # one past the last
    round: int | None = None  # pass of the permutation; None: the shard's
    store: int = 0  # index of the configured URL that listed the object


@dataclass(frozen=True, slots=True)
class Origins:
    """The origins of a shard's samples: a table of objects, and columns per sample."""

    keys: tuple[str, ...] = ()
    etags: tuple[str | None, ...] = ()
    sizes: tuple[int, ...] = ()
    mtimes: tuple[float | None, ...] = ()
    object: tuple[int, ...] = ()
    part: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()
    round: tuple[int, ...] = ()  # empty if all are of the shard's round
    stores: tuple[int, ...] = ()  # empty if the first URL listed all objects

    @classmethod
    def pack(cls, rows: Iterable[SampleOrigin]) -> Origins:
        rows = list(rows)
        table: dict[tuple[str, str | None, int, float | None, int], int] = {}
        objects = [(r.key, r.etag, r.size, r.mtime, r.store) for r in rows]
        places = [table.setdefault(each, len(table)) for each in objects]
        columns = tuple(zip(*table, strict=True)) or ((), (), (), (), ())
        keys, etags, sizes, mtimes, stores = columns
        return cls(
            keys=keys,
            etags=etags,
            sizes=sizes,
            mtimes=mtimes,
            object=tuple(places),
            part=tuple(r.part for r in rows),
            parts=tuple(r.parts for r in rows),
            start=tuple(r.start for r in rows),
            stop=tuple(r.stop for r in rows),
            round=tuple(r.round for r in rows if r.round is not None),
            stores=stores if any(stores) else (),
        )

    def rows(self) -> Iterator[SampleOrigin]:
        """Yield the origin of each sample; the inverse of `pack`."""
        rounds, stores = self.round or repeat(None), self.stores or repeat(0)
        objects = list(
            zip(self.keys, self.etags, self.sizes, self.mtimes, stores, strict=False)
        )
        places = zip(self.part, self.parts, self.start, self.stop, rounds, strict=False)
        for o, place in zip(self.object, places, strict=False):
            key, etag, size, mtime, store = objects[o]
            yield SampleOrigin(key, etag, size, mtime, *place, store)

    @property
    def identities(self) -> Iterator[tuple[int, str]]:
        return zip(self.stores or repeat(0), self.keys, strict=False)

    def __len__(self) -> int:
        return len(self.object)

    def entry(self, i: int) -> Entry:
        """Return the object of a sample as it was listed."""
        o = self.object[i]
        store = self.stores[o] if self.stores else 0
        return Entry(self.keys[o], self.sizes[o], self.etags[o], self.mtimes[o], store)

    def __getitem__(self, i: int) -> Origin:
        o = self.object[i]
        return Origin(self.keys[o], self.etags[o], self.start[i], self.stop[i])


class ShardFile(NamedTuple):
    suffix: str
    nbytes: int
    crc32c: int | None  # None if its records have checksums


@dataclass(frozen=True, slots=True)
class Hole:
    """A visit that permanently yields nothing, and the reason."""

    key: str
    part: int
    reason: str
    version: str = ""  # of the object, if it differs from the listed one


def version_of(etag: str | None, size: int, mtime: float | None) -> str:
    """Return a text that identifies a version of an object.

    >>> version_of('"e"', 9, 1.0), version_of(None, 9, 1.0)
    ('"e"', '9 bytes of 1.0')
    """
    return etag or f"{size} bytes of {mtime}"


@dataclass(frozen=True, slots=True)
class Sidecar:
    fingerprint: str
    edition: int  # of its group
    round: int  # pass of the permutation
    number: int
    group: int
    schema: Schema
    samples: int  # 0: there are no files
    parts: int  # visits whose samples count to this shard
    record_bytes: int  # of every record; 0 if they differ
    shard_bytes: int  # of all files
    digest: str  # xxh3_128 of the concatenated files, hexadecimal; empty without files
    origins: Origins
    holes: tuple[Hole, ...] = ()  # visits that yielded nothing
    # Of the draw, on which alone they depend.
    counts: dict[str, int] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION  # of this file
    cache_format: str = "tfrecord"  # of the records
    files: tuple[ShardFile, ...] = ()  # in the order of the digest
    # Up to its own, so that shards alone record what was drawn.
    editions: tuple[EditionValues, ...] = ()
    left_out: tuple[int, ...] = ()  # visits of this shard that were deferred
    makeups: tuple[int, ...] = ()  # makeup groups before its own
    # Group and place where first drawn; 1: a hole.
    made_up: tuple[tuple[int, int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.samples and not self.files:  # the only file of records of equal length
            files = (ShardFile(RECORDS, self.shard_bytes, None),)
            object.__setattr__(self, "files", files)

    def origin(self, i: int) -> Origin:
        return self.origins[i]

    @property
    def deferral_notes(self) -> ShardDeferrals:
        return ShardDeferrals(self.group, self.left_out, self.makeups, self.made_up)

    def to_bytes(self) -> bytes:
        values = {name: getattr(self, name) for name in self.__slots__}
        for name in _SELDOM:
            if not values[name]:
                del values[name]
        values["schema"] = self.schema.to_json()
        values["counts"] = dict(sorted(self.counts.items()))
        columns = {name: getattr(self.origins, name) for name in Origins.__slots__}
        for name in ("round", "stores"):
            if not columns[name]:
                del columns[name]
        values["origins"] = columns
        values["holes"] = [
            [h.key, h.part, h.reason, *([h.version] if h.version else [])] for h in self.holes
        ]
        inner = _dumps(values)
        head = _HEAD % google_crc32c.value(inner)
        return b"%b%b}" % (head.encode(), inner)

    @classmethod
    def from_bytes(cls, data: bytes, label: str = "sidecar") -> Sidecar:
        """Return the sidecar that `to_bytes` wrote.

        Raises:
            CorruptShardError: The data are damaged.
            CachePathError: A newer version wrote them.
        """
        inner = data[_HEAD_BYTES:-1]
        head = (_HEAD % google_crc32c.value(inner)).encode()
        if data[:_HEAD_BYTES] != head or data[-1:] != b"}":
            raise CorruptShardError(f"{label}: the sidecar of the shard is damaged")
        try:
            values = _loads(inner)
            _refuse_newer(values["format_version"], label)
            return _checked(cls(**_converted(values)))
        except CachePathError:  # it is a ValueError, too
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptShardError(
                f"{label}: the sidecar of the shard cannot be read ({type(error).__name__})"
            ) from None


def _refuse_newer(version: object, label: str) -> None:
    """Refuse a newer sidecar, which is valid although unknown, so it must not count as damaged."""
    if type(version) is int and version > FORMAT_VERSION:
        raise CachePathError(
            f"{label} was written by a newer growcache (version {version}, this one knows "
            f"{FORMAT_VERSION}): upgrade growcache, or choose another cache.path",
            code="GC408",
        )
    if version != FORMAT_VERSION:
        raise CorruptShardError(
            f"{label}: expected version {FORMAT_VERSION}, found {version!r:.20}"
        )


def _converted(values: dict[str, Any]) -> dict[str, Any]:
    origins = {name: tuple(column) for name, column in values["origins"].items()}
    return {
        **values,
        "origins": Origins(**origins),
        "schema": Schema.from_json(values["schema"]),
        "holes": tuple(Hole(*hole) for hole in values["holes"]),
        "files": tuple(ShardFile(*facts) for facts in values.get("files", ())),
        "editions": tuple(e.values for e in editions_in_sidecar(values.get("editions", ()))),
        "left_out": tuple(map(checked_number, values.get("left_out", ()))),
        "makeups": tuple(map(checked_number, values.get("makeups", ()))),
        "made_up": tuple(
            (checked_number(g), checked_number(p), checked_number(hole))
            for g, p, hole in values.get("made_up", ())
        ),
    }


def _checked(sidecar: Sidecar) -> Sidecar:
    """Return the sidecar, or raise ValueError. Its readers check nothing more."""
    numbers = (
        *(getattr(sidecar, name) for name in _COUNTS),
        *(f.nbytes for f in sidecar.files),
    )
    if not all(type(number) is int and 0 <= number < _MOST for number in numbers):
        raise ValueError("not a number")
    origins = sidecar.origins
    stores = origins.stores or origins.keys
    table = [origins.keys, origins.etags, origins.sizes, origins.mtimes, stores]
    objects = {len(column) for column in table}
    rounds = origins.round or origins.object
    columns = [origins.object, origins.part, origins.parts, origins.start, origins.stop, rounds]
    if not all(type(store) is int and 0 <= store < _MOST for store in origins.stores):
        raise ValueError("not the number of a store")
    if len(objects) != 1 or {len(column) for column in columns} != {sidecar.samples}:
        raise ValueError("origins that do not match the samples")
    if origins.object and not 0 <= min(origins.object) <= max(origins.object) < objects.pop():
        raise ValueError("an origin without an object")
    if not all(_FILE.fullmatch(file.suffix) for file in sidecar.files):
        raise ValueError("not a file of a shard")
    return sidecar


def _dumps(values: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(values)
    except TypeError:  # local file names may be invalid Unicode, which orjson refuses
        return json.dumps(values, separators=(",", ":")).encode()


def _loads(data: bytes) -> dict[str, Any]:
    try:
        found: dict[str, Any] = orjson.loads(data)
    except orjson.JSONDecodeError:
        found = json.loads(data)
    return found
