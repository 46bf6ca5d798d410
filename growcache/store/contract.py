"""The contract of a store: its objects, and the methods of every store and backend.

A `Store` holds the objects of one source, and retries failed requests. A `Backend` is one
client on one bucket, host or file system. It makes single attempts, and raises growcache's
errors.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Protocol, TypeVar

from growcache.config_source import SourceConfig
from growcache.schema import is_utf8
from growcache.store.urls import Location

if TYPE_CHECKING:
    from typing_extensions import Buffer


T = TypeVar("T")

logger = logging.getLogger(__name__)

PAGE_ENTRIES = 1000  # as many as S3 lists in one response


def paginate(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield lists of `PAGE_ENTRIES` items. The last list has fewer, and may be empty."""
    rest = iter(items)
    while True:
        page = list(islice(rest, PAGE_ENTRIES))
        yield page
        if len(page) < PAGE_ENTRIES:
            return


@dataclass(frozen=True, slots=True)
class Entry:
    """One object of a store, as a listing or a request describes it.

    Attributes:
        key: Key without bucket or scheme. For local files the absolute path.
        size: Size in bytes.
        etag: Version as the store names it, including quotes; None if the store has no
            versions.
        mtime: Last modification in seconds since the epoch; None if unknown.
        store: Index of its URL in `SourceConfig.url`.
    """

    key: str
    size: int
    etag: str | None
    mtime: float | None
    store: int = 0

    @property
    def is_unwritten(self) -> bool:
        """Whether the store lacks the object, which has only a name: a Zarr chunk of fill values."""
        return not self.size and self.etag is None and self.mtime is None


def unwritten_entry(key: str, store: int) -> Entry:
    return Entry(key, 0, None, None, store)


class Page(list[Entry]):
    """A list of objects from a listing.

    Attributes:
        last: Whether the listing is known to end with this page.
    """

    def __init__(self, entries: Iterable[Entry] = (), *, last: bool = False) -> None:
        super().__init__(entries)
        self.last = last


# Characters. Stores allow 1,024 bytes, file systems 4,096, and web servers about this many.
LONGEST_KEY = 8192
LONGEST_ETAG = 1024  # characters
# No store holds larger objects. The limit keeps sums of sizes exact.
LARGEST_OBJECT_BYTES = 1 << 50
_SHOWN_KEY_CHARACTERS = 80


def storable_entries(page: list[Entry]) -> list[Entry]:
    """Return the entries that the catalog can hold, and warn about the others.

    Keys are stored as UTF-8, whereas file names may be any bytes. Keys of megabytes, and
    objects larger than any disk, count as errors of the store.
    """
    for words, is_storable in _REQUIREMENTS.items():
        kept = [entry for entry in page if is_storable(entry)]
        if len(kept) < len(page):
            odd = next(entry.key for entry in page if not is_storable(entry))
            shown = odd[:_SHOWN_KEY_CHARACTERS] + "…" * (len(odd) > _SHOWN_KEY_CHARACTERS)
            left_out = len(page) - len(kept)
            logger.warning("listing leaves out %s: %d, such as %a", words, left_out, shown)
        page = kept
    return page


def _is_plausible(entry: Entry) -> bool:
    etag = entry.etag or ""  # obstore panics if it cannot send the ETag back
    return (
        len(entry.key) <= LONGEST_KEY
        and 0 <= entry.size <= LARGEST_OBJECT_BYTES
        and len(etag) <= LONGEST_ETAG
        and etag.isascii()
        and etag.isprintable()
    )


_REQUIREMENTS: dict[str, Callable[[Entry], bool]] = {
    "names that are not UTF-8": lambda entry: is_utf8(entry.key),
    "objects with an impossible name, version or size": _is_plausible,
}


class Store(Protocol):
    """The objects of one source.

    Failed requests are retried, except where a method says otherwise.

    Every error about an object or the store is a `StoreError`.
    """

    @property
    def source(self) -> SourceConfig:
        """The configuration that opened the store."""

    async def find(self, key: str) -> Entry:
        """Return the entry of an object in the bucket of the first URL, listed or not.

        Args:
            key: Key in the bucket or on the host. On file systems, a key that does not start
                with ``/`` is relative to the folder that the URL names.

        Returns:
            The entry, with the current size and version.

        Raises:
            StoreError: As for `read`.
        """

    def pages(self) -> Iterator[list[Entry]]:
        """Yield the listing page by page. This blocks, so iterate in a thread.

        Sizes are known, empty objects are included, and folders are not. The same objects
        always arrive in the same order, which need not be the order of their keys. Keys may
        arrive twice if a store fails in the middle of a listing that it cannot resume, or does
        not list correctly.

        Yields:
            Pages: lists of entries, in the store's order.

        Raises:
            AccessError: The store refuses the credentials or the bucket.
            ObjectMissingError: The bucket, the folder or (for a URL without a glob) the object
                does not exist.
            TransientStoreError: The store did not answer for ``timeout_seconds``.
        """

    async def read(self, entry: Entry, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes [start, stop) of an object.

        The buffer is read-only and owns its memory. A range beyond the end of the object is cut
        off there.

        Args:
            entry: The object, in its listed version.
            start: First byte.
            stop: One after the last byte; None means the end of the object.

        Raises:
            ObjectChangedError: The object was rewritten after it was listed.
            ObjectMissingError: The object was deleted after it was listed.
            AccessError: The store refuses this object.
            TransientStoreError: No progress for ``timeout_seconds``, in spite of retries.
            StoreError: The store answered in another unexpected way.
        """

    async def fails_alone(
        self, entry: Entry, since: float, others: Sequence[Entry] = ()
    ) -> bool:
        """Whether an object keeps failing while its bucket or host serves others.

        Such an object is *given up*: for some time its failed reads are not retried.

        Args:
            entry: The object whose reads failed.
            since: Time of the first failure, in monotonic seconds.
            others: Objects to try. One byte is requested of them, unless the store has served
                another object since.
        """

    def given_up(self, entry: Entry, since: float = 0.0) -> bool:
        """Whether an object was given up recently, and after ``since`` (monotonic seconds)."""

    async def current_entry(self, entry: Entry) -> Entry:
        """Return the entry of the current version of an object.

        Raises:
            StoreError: As for `read`.
        """

    def is_named_by_url(self, entry: Entry) -> bool:
        """Whether a listing would include an object with this key."""

    async def close(self) -> None:
        """Release connections and threads. The store cannot be used afterwards."""


class Backend(Protocol):
    """One client on one bucket, host or file system.

    Every method makes a single attempt, and raises growcache's errors. `Store` retries.
    """

    @property
    def identity(self) -> str:
        """Name of the place.

        Backends with the same identity have the same objects under the same keys.
        """

    @property
    def sorted(self) -> bool:
        """Whether listings are sorted by key, and can start after any name with one request."""

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        """Yield pages of the objects below ``location.prefix``, whether they match or not.

        Blocks.

        Args:
            location: Parsed URL of the source.
            after: Last key that was listed before a failure. A backend that cannot resume
                ignores it.
        """

    def head(self, key: str) -> Entry:
        """Return the current entry of one object. Blocks."""

    def get(self, entry: Entry, start: int, stop: int) -> Awaitable[Buffer]:
        """Return the bytes [start, stop) of an object, which is a non-empty range.

        Raises:
            ObjectChangedError: The object is not in the version of ``entry``.
        """

    async def close(self) -> None:
        """Release connections and threads."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a store, as object formats read it.

    Attributes:
        store: The store that has the object.
        entry: Its key, size and version.
        others: Entries of the other fields' objects, if several objects make a sample.
    """

    store: Store
    entry: Entry
    others: tuple[Entry, ...] = ()

    @property
    def partners(self) -> Sequence[StoredObject]:
        return [StoredObject(self.store, entry) for entry in self.others]

    async def read(self, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes [start, stop) of the object; see `Store.read`."""
        return await self.store.read(self.entry, start, stop)

    @property
    def source(self) -> SourceConfig:
        return self.store.source

    def is_named_by_url(self, key: str) -> bool:
        """Whether the URL that listed this object also names an object with ``key``."""
        return self.store.is_named_by_url(replace(self.entry, key=key))

    async def find(self, key: str) -> StoredObject:
        return StoredObject(self.store, await self.store.find(key))
