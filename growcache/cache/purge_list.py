"""The purge list: the objects whose samples must be removed, as hashes of their keys.

The file `purged` has a line of JSON per object, and only grows. A line without its end belongs
to a command that was interrupted before it reported anything, so the next command removes it. A
damaged line is an error, because skipping it would let the object be drawn again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import google_crc32c
import orjson

from growcache.cache.files import (
    SIDECAR,
    CacheLayout,
    fsync_directory,
    naming_full_disk,
)
from growcache.cache.index.reader import known_identity
from growcache.cache.locks import FileLock, close_owned, open_owned
from growcache.cache.side_files import Identity
from growcache.cache.sidecar import Sidecar
from growcache.config_source import PLACEHOLDER
from growcache.errors import CacheError, ConfigError
from growcache.store.urls import UrlTemplate, parse_url

RULE = 1  # version of the rule that says which bytes are hashed, and how
LOCK_SECONDS = 10.0

_HASH = re.compile(r"[0-9a-f]{64}")


class PurgedObject(NamedTuple):
    sha256: str  # of its key, hexadecimal
    at: int  # time of the first purge, seconds since the epoch


def key_hash(key: str) -> str:
    """Return the hash of a key, which need not be valid Unicode.

    >>> key_hash("sub-01.npy")[:16]
    '92d2abc67c941da7'
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def key_of(name: str) -> str:
    """Return the key of an object from its key or its URL.

    >>> key_of("s3://bucket/a/b.npy"), key_of("a/b.npy")
    ('a/b.npy', 'a/b.npy')
    """
    return parse_url(name).pattern if "://" in name else name


@dataclass(frozen=True, slots=True)
class PurgeList:
    hashes: frozenset[str] = frozenset()
    size: int = 0  # bytes of the complete lines that were read

    def __bool__(self) -> bool:
        return bool(self.hashes)

    def holds(self, keys: Iterable[str]) -> bool:
        return bool(self.hashes) and any(key_hash(key) in self.hashes for key in keys)


NOTHING_PURGED = PurgeList()


def line_of(purged: PurgedObject) -> bytes:
    values = {"sha256": purged.sha256, "at": purged.at, "rule": RULE}
    return orjson.dumps({**values, "crc32c": _checksum(values)}) + b"\n"


def _checksum(values: dict[str, Any]) -> str:
    return f"{google_crc32c.value(orjson.dumps(values, option=orjson.OPT_SORT_KEYS)):08x}"


def parse_line(line: bytes) -> PurgedObject | None:
    """Return the object that `line_of` wrote, or None if the line is damaged or of a later version."""
    try:
        values = orjson.loads(line)
        checksum = values.pop("crc32c")
        purged = PurgedObject(values["sha256"], values["at"])
        known = values["rule"] == RULE and checksum == _checksum(values)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    right = type(purged.sha256) is str and _HASH.fullmatch(purged.sha256)
    return purged if known and right and type(purged.at) is int else None


def parse_list(data: bytes, label: object, start: int = 0) -> list[PurgedObject]:
    """Return the objects of complete lines from byte ``start`` on.

    Raises:
        CacheError: A line is damaged.
    """
    found: list[PurgedObject] = []
    lines = data[start : data.rfind(b"\n") + 1].splitlines()
    for number, line in enumerate(lines, 1 + data.count(b"\n", 0, start)):
        purged = parse_line(line)
        if purged is None:
            raise CacheError(
                f"{label}: line {number} is damaged, or was written by a newer growcache; "
                "replace it with the same line of another copy of the list, or remove it and "
                "purge its object again",
                code="GC416",
            )
        found.append(purged)
    return found


def named_objects(lines: Iterable[str], at: int) -> dict[PurgedObject, str | None]:
    """Return the objects of lines, each with its key if known.

    Lines are keys, URLs or lines of a purge list.
    """
    found: dict[PurgedObject, str | None] = {}
    for line in filter(None, (line.rstrip("\r\n") for line in lines)):
        purged = parse_line(line.encode("utf-8", "surrogateescape")) if line[0] == "{" else None
        if purged is None and line.startswith('{"') and '"sha256"' in line:
            raise ConfigError(
                f"a line of a purge list is damaged: {line[:40]}…; copy the list again",
                code="GC219",
            )
        if purged is None:
            key = key_of(line)
            found[PurgedObject(key_hash(key), at)] = key
        else:
            found[purged] = None
    return found


def read_bytes(layout: CacheLayout) -> bytes:
    try:
        return layout.purged.read_bytes()
    except FileNotFoundError:
        return b""


def read_purge_list(layout: CacheLayout, known: PurgeList = NOTHING_PURGED) -> PurgeList:
    """Return the list.

    ``known`` was read before, so only additions are read. May raise CacheError.
    """
    data = read_bytes(layout)
    known = known if known.size <= len(data) else NOTHING_PURGED
    added = parse_list(data, layout.purged, known.size)
    hashes = known.hashes.union(purged.sha256 for purged in added)
    return PurgeList(hashes, max(known.size, data.rfind(b"\n") + 1))


def copy_list(source: CacheLayout, target: CacheLayout) -> None:
    """Add the objects in one cache's list to the list of another cache."""
    if data := read_bytes(source):
        append_to_list(target, parse_list(data, source.purged))


def append_to_list(layout: CacheLayout, purged: Iterable[PurgedObject]) -> int:
    """Add the objects that the list lacks, durably; return their number."""
    with (
        FileLock.of_directory(layout.root.resolve(), LOCK_SECONDS),
        naming_full_disk(str(layout.purged)),
    ):
        known = read_purge_list(layout)
        new = {one.sha256: one for one in purged if one.sha256 not in known.hashes}
        if new:
            _append(layout, known.size, b"".join(map(line_of, new.values())))
        return len(new)


def _append(layout: CacheLayout, size: int, lines: bytes) -> None:
    descriptor = open_owned(layout.purged, os.O_WRONLY | os.O_CREAT)
    try:
        os.ftruncate(descriptor, size)  # an interrupted line
        try:
            view = memoryview(lines)
            while view:
                view = view[os.pwrite(descriptor, view, size + len(lines) - len(view)) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        close_owned(descriptor)
    fsync_directory(layout.root)


def is_purged(
    layout: CacheLayout, purges: PurgeList | None = None, identity: Identity | None = None
) -> Callable[[str], bool]:
    """Return the test of a sample's key, from the cache's list and identity.

    May raise CacheError.
    """
    found = read_purge_list(layout) if purges is None else purges
    if not found:
        return lambda key: False
    identity = identity or known_identity(layout)
    if identity is None and any(layout.shards.glob(f"*{SIDECAR}")):
        # With several fields, a sidecar has only the first field's object.
        raise CacheError(
            f"{layout.identity} is missing, and so is its copy in the index, so samples cannot "
            "be compared with the purged objects; the next growcache run CONFIG writes it again",
            code="GC416",
        )
    keys_of = keys_of_object(identity.parts if identity else {})
    return lambda key: found.holds(keys_of(key))


def purged_samples(sidecar: Sidecar, test: Callable[[str], bool]) -> int:
    origins = sidecar.origins
    gone = [test(key) for key in origins.keys]
    return sum(gone[o] for o in origins.object)


def names_purged(sidecar: Sidecar, test: Callable[[str], bool]) -> bool:
    """Whether a shard has samples or holes of purged objects."""
    keys = {*sidecar.origins.keys, *(hole.key for hole in sidecar.holes)}
    return any(map(test, keys))


KeysOfObject = Callable[[str], Iterator[str]]


def keys_of_object(parts: dict[str, Any]) -> KeysOfObject:
    """Return a function from a sample's key to the keys of all objects that it was made from.

    ``parts`` are those of the cache's identity. A sidecar has only the first field's object.
    """
    fields = [
        value for name, value in parts.items() if re.fullmatch(r"source\.(\d+\.)?fields", name)
    ]
    joined = [
        [(_prefix(url), UrlTemplate.from_url(url)) for _, url, *_ in some] for some in fields
    ]

    def keys(key: str) -> Iterator[str]:
        yield key
        for (_, first), *others in joined:
            values = first.values(key)
            if values is not None:
                yield from (prefix + other.render(values) for prefix, other in others)

    return keys


def _prefix(url: str) -> str:
    return parse_url(PLACEHOLDER.sub("*", url)).prefix
