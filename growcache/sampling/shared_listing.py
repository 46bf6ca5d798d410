"""The listing of a source with a shared catalog (``source.catalog``): one service lists, others read.

A service that finds no catalog writes a pointer first, and then lists. Other services read the
published parts meanwhile, and list themselves if the pointer stands still. Two concurrent
listings are harmless, because each pointer refers to a complete listing, and parts never
change. If a catalog cannot be read or written, the service logs a warning and lists the store.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

import numpy as np
import orjson

from growcache.cache.locks import are_pids_ours, pid_namespace
from growcache.config_source import SourceConfig
from growcache.config_text import to_json_value
from growcache.errors import AccessError, FormatError, StoreError
from growcache.sampling.fingerprint import server_options
from growcache.secrecy import hash_secrets, url_without_secrets
from growcache.seeding import Uint64Array, hash64
from growcache.store.contract import PAGE_ENTRIES, Entry
from growcache.store.retries import RetryPolicy
from growcache.store.shared_catalog import (
    MOST_PART_BYTES,
    MOST_POINTER_BYTES,
    VERSION,
    Part,
    PartPacker,
    Pointer,
    PublishedListing,
    decode_pointer,
    encode_pointer,
    part_sizes,
    unpack_part,
    version_words,
)
from growcache.store.shared_folder import SharedFolder, open_shared_folder
from growcache.store.store import RemoteStore
from growcache.store.urls import BUCKET_SCHEMES, WEB_SCHEMES, Location, parse_url, redact
from growcache.usercode import printable, short_key

if TYPE_CHECKING:
    from growcache.sampling.zarr_listing import ZarrListing

_log = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # between two looks at a pointer that is being updated
BEAT_SECONDS = 5.0  # between two pointers of a listing in progress
STALLED_SECONDS = 30.0  # after which a pointer without changes counts as abandoned
# For which a service that waits for one catalog leaves the next one to others.
YIELD_SECONDS = 5.0
FRESH_SECONDS = 600.0  # age up to which a refresh takes a catalog as it is
MOST_READS = 3  # of a pointer that may be half written

Listed: TypeAlias = "RemoteStore | ZarrListing"
Earlier: TypeAlias = tuple[PublishedListing, ...]


def catalog_name(source: SourceConfig) -> str:
    """Return the pointer's name: a hash of the values that decide the objects of a listing.

    The version of the files is part of it.
    """
    values = {
        "version": VERSION,
        "url": [url_without_secrets(url) for url in source.url],
        "fields": bool(source.fields),
        "format": source.format,
        # The missing chunks of Zarr follow from them.
        "options": hash_secrets(source.options) if source.format == "zarr" else {},
        "server": server_options(source.storage_options),
    }
    text = orjson.dumps(to_json_value(values), option=orjson.OPT_SORT_KEYS)
    return f"{hashlib.blake2b(text, digest_size=16).hexdigest()}.json"


class CatalogFiles:
    """The files of one source in a shared folder.

    Requests are retried like pages of a listing.
    """

    def __init__(
        self, source: SourceConfig, timeout_seconds: float, retries: RetryPolicy
    ) -> None:
        assert source.catalog is not None
        self.url = redact(source.catalog)
        self._name = catalog_name(source)
        self._retries = retries
        self._timeout_seconds = timeout_seconds
        self.open(source)

    def open(self, source: SourceConfig) -> None:
        """Use the source's current client and options from now on."""
        assert source.catalog is not None
        self._folder: SharedFolder = open_shared_folder(
            source.catalog, source, self._timeout_seconds
        )

    def pointer(self) -> Pointer | None:
        for _ in range(0 if self._folder.atomic else MOST_READS - 1):
            with suppress(FormatError):
                return self._read_pointer()
            time.sleep(POLL_SECONDS)
        return self._read_pointer()

    def _read_pointer(self) -> Pointer | None:
        data = self._retries.run(lambda: self._folder.read(self._name, MOST_POINTER_BYTES))
        return None if data is None else decode_pointer(data)

    def write_pointer(self, pointer: Pointer, *, only_new: bool = False) -> bool:
        data = encode_pointer(pointer)
        return self._retries.run(
            lambda: self._folder.write(self._name, data, only_new=only_new)
        )

    def part(self, part: Part) -> list[Entry]:
        packed = self._retries.run(lambda: self._folder.read(part.name, MOST_PART_BYTES))
        if packed is None:
            raise FormatError(f"{part.name} is gone")
        return unpack_part(part, packed)

    def write_part(self, part: Part, packed: bytes) -> None:
        self._retries.run(lambda: self._folder.write(part.name, packed))


class KnownVersions:
    """The objects and versions of earlier listings, as hashes of 64 bits."""

    def __init__(self, pages: Iterable[list[Entry]] = ()) -> None:
        hashes = [_hashes_of(page) for page in pages]
        self._sorted = np.sort(np.concatenate([np.zeros(0, np.uint64), *hashes]))

    def new_among(self, entries: list[Entry]) -> list[Entry]:
        if not len(self._sorted):
            return entries
        hashes = _hashes_of(entries)
        at = np.minimum(np.searchsorted(self._sorted, hashes), len(self._sorted) - 1)
        new = np.flatnonzero(self._sorted[at] != hashes)
        return [entries[place] for place in new.tolist()]


def _hashes_of(entries: list[Entry]) -> Uint64Array:
    return np.fromiter(map(hash64, version_words(entries)), np.uint64, len(entries))


class CatalogWriter:
    """Publishes a listing in progress. The first failure ends that, but not the listing."""

    def __init__(
        self,
        files: CatalogFiles,
        listing: PublishedListing,
        earlier: Earlier,
        known: KnownVersions,
    ) -> None:
        self._files = files
        self._listing = listing
        # For a listing without news, only its time is worth publishing.
        self._earlier = tuple(one for one in earlier if one.parts)
        self._known = known
        self._sizes = part_sizes()
        self._packer = PartPacker(next(self._sizes))
        self._beaten_at = time.monotonic()
        self.failed = False

    def begin(self) -> None:
        """Publish the pointer, so that other services can follow."""
        if not self.failed:
            self._try(self._publish_pointer)

    def add(self, page: list[Entry]) -> None:
        if not self.failed:
            self._packer.add(self._known.new_among(page))
            if self._packer.is_full:
                self._try(self._publish_part)
            if time.monotonic() - self._beaten_at > BEAT_SECONDS:
                self._try(self._publish_pointer)

    def finish(self, left_out: Mapping[str, int]) -> PublishedListing:
        if not self.failed:
            self._listing = replace(self._listing, complete=True, left_out=dict(left_out))
            self._try(self._publish_part)
        return self._listing

    def _publish_part(self) -> None:
        if self._packer.entries:
            part, packed = self._packer.finish()
            self._files.write_part(part, packed)
            self._listing = replace(self._listing, parts=(*self._listing.parts, part))
            self._packer = PartPacker(next(self._sizes))
        self._publish_pointer()

    def _publish_pointer(self) -> None:
        self._listing = replace(self._listing, at=time.time())
        self._files.write_pointer(Pointer((*self._earlier, self._listing)))
        self._beaten_at = time.monotonic()

    def _try(self, publish: Callable[[], None]) -> None:
        try:
            publish()
        except StoreError as error:
            self.failed = True
            _log.warning(
                "source.catalog %s: this listing is not published: %s", self._files.url, error
            )


@dataclass(slots=True)
class _Watch:
    """How long a pointer has not changed, by the clock of this machine."""

    most_seconds: float
    last: Pointer | None = None
    since: float = 0.0

    def stalled(self, pointer: Pointer | None) -> bool:
        now = time.monotonic()
        if pointer != self.last or not self.since:
            self.last, self.since = pointer, now
        return now - self.since >= self.most_seconds


class SharedListing:
    def __init__(
        self,
        listed: Listed,
        store: RemoteStore,
        timeout_seconds: float,
        on_retry: Callable[[BaseException], None] | None = None,
        *,
        refresh: bool = False,
        stalled_seconds: float = STALLED_SECONDS,
        awaited: set[SharedListing] | None = None,
    ) -> None:
        """Prepare a listing.

        ``awaited`` has those of this service's sources that others list now.
        """
        self._listed = listed
        self._awaited = set() if awaited is None else awaited
        self._stalled_seconds = stalled_seconds
        self._store = store
        self._refresh = refresh
        self._files = CatalogFiles(
            listed.source, timeout_seconds, RetryPolicy(timeout_seconds, on_retry)
        )
        self._may_write = True
        self._place = parse_url(self.source.catalog.rstrip("/") + "/")  # type: ignore[union-attr]
        self._publisher = _this_publisher()
        self._read: set[str] = set()  # digests of parts
        self._left_out: Counter[str] | None = None  # from the catalog
        self.said = ""  # where the objects come from, for the status

    @property
    def source(self) -> SourceConfig:
        return self._listed.source

    @property
    def left_out(self) -> Counter[str]:
        return self._listed.left_out if self._left_out is None else self._left_out

    def set_options(self, options: Mapping[str, Any]) -> None:
        self._listed.set_options(options)
        self._files.open(self._listed.source)

    def pages(self) -> Iterator[list[Entry]]:
        earlier: Earlier | None = ()
        known = KnownVersions()
        try:
            try:
                earlier = yield from self._followed()
            finally:
                self._awaited.discard(self)
            known = self._known(earlier or ())
        except AccessError as error:
            self._may_write = False
            self._warn(f"it may not be read, so this service lists for itself: {error}")
        except (FormatError, StoreError) as error:
            earlier = ()
            self._warn(
                f"it cannot be used, so this service lists, and publishes again: {error}"
            )
        if earlier is not None:
            yield from self._published(earlier, known)

    def _warn(self, text: str) -> None:
        _log.warning("source.catalog %s: %s", self._files.url, text)

    def _followed(self) -> Generator[list[Entry], None, Earlier | None]:
        """Yield the published entries.

        Returns None if that is all, or else the listings that this service has to extend.
        """
        watch, began = _Watch(self._stalled_seconds), time.monotonic()
        while True:
            pointer = self._files.pointer()
            if pointer is None and self._may_claim(began) and self._claimed():
                return ()
            if pointer is not None:
                if self._is_outdated(pointer):
                    return pointer.complete
                if not pointer.last.complete:
                    self._awaited.add(self)
                yield from self._unread(pointer)
                if pointer.last.complete:
                    self._note(pointer)
                    return None
            if pointer is not None and _has_died(pointer.last.publisher):
                return pointer.complete
            if watch.stalled(pointer):
                self._warn(
                    f"nothing new for {self._stalled_seconds:g} s, so this service lists"
                )
                return () if pointer is None else pointer.complete
            self._awaited.add(self)
            time.sleep(POLL_SECONDS)

    def _is_outdated(self, pointer: Pointer) -> bool:
        """Whether a refresh must list anew.

        A listing in progress, or a recent one, is enough.
        """
        age = abs(time.time() - pointer.last.at)  # another clock may be ahead
        return self._refresh and pointer.last.complete and age >= FRESH_SECONDS

    def _may_claim(self, began: float) -> bool:
        """Whether to list now.

        Two services with the same sources would each list one, and wait.
        """
        return not self._awaited - {self} or time.monotonic() - began > YIELD_SECONDS

    def _claimed(self) -> bool:
        """Write the first pointer; return whether this service lists."""
        if not self._may_write:
            return False
        try:
            return self._files.write_pointer(Pointer((self._own(),)), only_new=True)
        except AccessError as error:
            self._may_write = False
            self._warn(f"this service may not publish, so it waits for one that does: {error}")
            return False

    def _own(self) -> PublishedListing:
        return PublishedListing(self._publisher, time.time(), complete=False)

    def _unread(self, pointer: Pointer) -> Iterator[list[Entry]]:
        for part in pointer.parts():
            if part.digest not in self._read:
                entries = self._files.part(part)
                self._refuse_others(part, entries)
                for at in range(0, len(entries), PAGE_ENTRIES):
                    yield entries[at : at + PAGE_ENTRIES]
                self._read.add(part.digest)

    def _refuse_others(self, part: Part, entries: list[Entry]) -> None:
        """Refuse keys that are not in this source, because they would be read with its credentials."""
        for entry in entries:
            if not self._is_ours(entry):
                raise FormatError(
                    f"{part.name} has {short_key(entry.key)}, which source.url does not name"
                )

    def _is_ours(self, entry: Entry) -> bool:
        locations = self._store.locations
        if not 0 <= entry.store < len(locations):
            return False
        location = locations[entry.store]
        return location.matches(entry.key) and not leads_out(location, entry.key)

    def _is_of_the_catalog(self, entry: Entry) -> bool:
        place, location = self._place, self._store.locations[entry.store]
        return place.root == location.root and entry.key.startswith(place.pattern)

    def _note(self, pointer: Pointer) -> None:
        self._left_out = Counter(pointer.last.left_out)
        last = pointer.last
        self.said = _listed_words(pointer.entries, f"read from {self._files.url}", last)
        _log.info("%s", self.said)

    def _known(self, earlier: Earlier) -> KnownVersions:
        parts = (part for listing in earlier for part in listing.parts)
        return KnownVersions(map(self._files.part, parts))

    def _published(self, earlier: Earlier, known: KnownVersions) -> Iterator[list[Entry]]:
        writer = CatalogWriter(self._files, self._own(), earlier, known)
        writer.failed = not self._may_write
        writer.begin()
        for listed in self._listed.pages():
            page = [entry for entry in listed if not self._is_of_the_catalog(entry)]
            writer.add(page)
            if page:
                yield page
        listing = writer.finish(self._listed.left_out)
        if not writer.failed:
            entries = listing.entries + sum(one.entries for one in earlier)
            self.said = _listed_words(entries, f"published to {self._files.url}", listing)


def leads_out(location: Location, key: str) -> bool:
    """Whether a client may read something above the folder that a key names.

    >>> leads_out(parse_url("/data/**"), "/data/../secret")
    True
    >>> leads_out(parse_url("https://h/data/**"), "data/%2E%2e/secret")
    True
    >>> leads_out(parse_url("s3://b/data/**"), "data/../a name in a bucket")
    False
    """
    if location.scheme in BUCKET_SCHEMES - WEB_SCHEMES:
        return False
    path = unquote(key) if location.scheme in WEB_SCHEMES else key
    return ".." in path.split("/")


def _this_publisher() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{pid_namespace()}"


def _has_died(publisher: str) -> bool:
    """Whether a publisher was a process that this one could see, and that is gone.

    A publisher with this process's own number has also ended.
    """
    host, _, process = publisher.partition(":")
    pid, _, namespace = process.partition(":")
    if not (pid.isdigit() and namespace.isdigit() and are_pids_ours(host, int(namespace))):
        return False
    return publisher == _this_publisher() or not Path("/proc", pid).exists()


def _listed_words(entries: int, verb: str, listing: PublishedListing) -> str:
    at = datetime.fromtimestamp(min(listing.at, time.time()), UTC)
    by = printable(":".join(listing.publisher.split(":")[:2]))  # host and pid
    return f"{entries:,} objects {verb}, listed by {by} at {at:%Y-%m-%d %H:%M} UTC"
