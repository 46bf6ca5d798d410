"""The files of a shared catalog, as bytes. Pure.

A part has objects as lines of JSON, packed by gzip, so that `source.manifest` can read it, too.
Its name is its digest, so it never changes. The pointer names the parts of every published
listing, and is written last.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from growcache.errors import FormatError
from growcache.store.contract import Entry, storable_entries

VERSION = 1
# Each part has twice as many as the one before.
FIRST_PART_ENTRIES, MOST_PART_ENTRIES = (1_000, 64_000)
MOST_PART_BYTES = 1 << 26  # of a part that is read, unpacked
# Unpacked bytes after which a part is written, whatever its number of entries.
FULL_PART_BYTES = 1 << 24
MOST_POINTER_BYTES = 1 << 26
LATEST = 1e11  # seconds since the epoch that are still a valid date
_PACKED_LEVEL = 1  # level 6 takes twice the time for 8 % fewer bytes
_GZIP_WINDOW = 31  # tells zlib to expect gzip's header and checksum
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Part:
    digest: str  # of the packed bytes
    entries: int

    @property
    def name(self) -> str:
        return f"{self.digest}.jsonl.gz"


@dataclass(frozen=True, slots=True)
class PublishedListing:
    """One listing of the store, without the objects of earlier listings that have not changed."""

    publisher: str
    at: float  # end or last write, in seconds since the epoch
    complete: bool
    parts: tuple[Part, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def entries(self) -> int:
        return sum(part.entries for part in self.parts)


@dataclass(frozen=True, slots=True)
class Pointer:
    listings: tuple[PublishedListing, ...]  # in order; only the last may be incomplete

    @property
    def last(self) -> PublishedListing:
        return self.listings[-1]

    @property
    def complete(self) -> tuple[PublishedListing, ...]:
        return tuple(one for one in self.listings if one.complete)

    @property
    def entries(self) -> int:
        return sum(one.entries for one in self.listings)

    def parts(self) -> Iterator[Part]:
        """Yield the parts, newest listing first, because the first entry of a key counts."""
        for listing in reversed(self.listings):
            yield from listing.parts


def encode_pointer(pointer: Pointer) -> bytes:
    listings = [
        {
            "publisher": one.publisher,
            "at": one.at,
            "complete": one.complete,
            "parts": [[part.digest, part.entries] for part in one.parts],
            "left_out": dict(one.left_out),
        }
        for one in pointer.listings
    ]
    return orjson.dumps({"growcache_catalog": VERSION, "listings": listings})


def decode_pointer(data: bytes) -> Pointer:
    """Return a pointer.

    Raises:
        FormatError: The data is not a pointer of this version.
    """
    try:
        values = orjson.loads(data)
        version = values["growcache_catalog"]
        listings = tuple(map(_listing, values["listings"])) if version == VERSION else ()
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"expected the pointer of a catalog ({error!r:.80})") from None
    if version != VERSION:
        raise FormatError(f"expected a catalog of version {VERSION}, found {version!r:.20}")
    if not listings:
        raise FormatError("expected a listing in the pointer, found none")
    return Pointer(listings)


def _listing(values: Any) -> PublishedListing:
    parts = tuple(_part(digest, entries) for digest, entries in values["parts"])
    left_out = {str(name)[:80]: int(count) for name, count in values["left_out"].items()}
    publisher, at = str(values["publisher"])[:200], float(values["at"])
    if not 0 <= at <= LATEST:  # also excludes NaN, with which a pointer would never settle
        raise ValueError(f"{at} is not a time")
    return PublishedListing(publisher, at, values["complete"] is True, parts, left_out)


def _part(digest: Any, entries: Any) -> Part:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r:.40} is not a digest")
    return Part(digest, int(entries))


def part_digest(packed: bytes) -> str:
    return hashlib.blake2b(packed, digest_size=16).hexdigest()


class PartPacker:
    """Packs entries into a part while they arrive, so that only packed bytes are in memory."""

    def __init__(self, most_entries: int) -> None:
        self._most = most_entries
        self._packer = zlib.compressobj(_PACKED_LEVEL, wbits=_GZIP_WINDOW)
        self._pieces: list[bytes] = []
        self._unpacked = 0
        self.entries = 0

    def add(self, entries: Iterable[Entry]) -> None:
        lines = [_line(entry) for entry in entries]
        text = b"".join(lines)
        self.entries += len(lines)
        self._unpacked += len(text)
        self._pieces.append(self._packer.compress(text))

    @property
    def is_full(self) -> bool:
        return self.entries >= self._most or self._unpacked >= FULL_PART_BYTES

    def finish(self) -> tuple[Part, bytes]:
        packed = b"".join([*self._pieces, self._packer.flush()])
        return Part(part_digest(packed), self.entries), packed


def _line(entry: Entry) -> bytes:
    values = {"key": entry.key, "size": entry.size, "etag": entry.etag, "mtime": entry.mtime}
    if entry.store:
        values["url"] = entry.store
    return orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)


def unpack_part(part: Part, packed: bytes) -> list[Entry]:
    """Return the entries of a part.

    Raises:
        FormatError: The bytes differ from those that were published.
    """
    if part_digest(packed) != part.digest:
        raise FormatError(f"{part.name} has another digest than its name says")
    text = _unpacked(packed)
    try:
        rows = orjson.loads(b"[" + text.rstrip(b"\n").replace(b"\n", b",") + b"]")
        entries = [_entry(row) for row in rows]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{part.name}: expected lines of JSON ({error!r:.80})") from None
    if len(entries) != part.entries or len(storable_entries(entries)) != len(entries):
        raise FormatError(f"{part.name} has objects that no listing has")
    return entries


def _unpacked(packed: bytes) -> bytes:
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    try:
        text = unpacker.decompress(packed, MOST_PART_BYTES)
    except zlib.error as error:
        raise FormatError(f"expected gzip: {error}") from None
    if not unpacker.eof:
        raise FormatError(f"expected at most {MOST_PART_BYTES:,} bytes in a part")
    return text


_TEXT, _NUMBER = (str, type(None)), (int, float, type(None))


def _entry(row: Mapping[str, Any]) -> Entry:
    key, size, etag, mtime = row["key"], row["size"], row["etag"], row["mtime"]
    store = row.get("url", 0)
    if not (
        type(key) is str
        and type(size) is int
        and type(store) is int
        and type(etag) in _TEXT
        and type(mtime) in _NUMBER
    ):
        raise TypeError(f"{key!r:.40} is not an object")
    return Entry(key, size, etag, mtime, store)


def part_sizes() -> Iterator[int]:
    """Yield the maximum number of entries per part: few at first, so that readers start soon."""
    entries = FIRST_PART_ENTRIES
    while True:
        yield entries
        entries = min(2 * entries, MOST_PART_ENTRIES)


def version_words(entries: Sequence[Entry]) -> list[str]:
    """Return a text per object and version, by which listings are compared."""
    return [
        f"{entry.store}\x00{entry.key}\x00{entry.size}\x00{entry.etag or entry.mtime}"
        for entry in entries
    ]
