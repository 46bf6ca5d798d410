"""The contract of a store: its objects, and the methods of every store and backend.

A `Store` holds the objects of one source and tries again what fails. A `Backend` is one client on one
bucket, host or file system: it makes single attempts and raises growcache's errors.
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

PAGE_ENTRIES = 1000  # entries; what S3 answers at once


def paginate(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield `PAGE_ENTRIES` items at a time; the last list has fewer, and may be empty."""
    rest = iter(items)
    while True:
        page = list(islice(rest, PAGE_ENTRIES))
        yield page
        if len(page) < PAGE_ENTRIES:
            return


@dataclass(frozen=True, slots=True)
class Entry:
    key: str  # without bucket or scheme; of local files the absolute path
    size: int  # bytes
    etag: (
        str | None
    )  # the version as the store names it, quotes included; None where it has none
    mtime: float | None  # last modification, seconds since the epoch; None where unknown
    store: int = 0  # index into `SourceConfig.url`

    @property
    def is_unwritten(self) -> bool:
        """Whether the object is known by its name alone, because the store has none: a chunk of fill values."""
        return not self.size and self.etag is None and self.mtime is None


def unwritten_entry(key: str, store: int) -> Entry:
    return Entry(key, 0, None, None, store)


class Page(list[Entry]):
    """Some objects of a listing; ``last`` if nothing is known to follow."""

    def __init__(self, entries: Iterable[Entry] = (), *, last: bool = False) -> None:
        super().__init__(entries)
        self.last = last


# Characters; stores allow 1,024 bytes, file systems 4,096, web servers about this.
LONGEST_KEY = 8192
LONGEST_ETAG = 1024  # characters
# No store holds larger objects, and sums of sizes must stay exact.
LARGEST_OBJECT_BYTES = 1 << 50
_SHOWN_KEY_CHARACTERS = 80


def storable_entries(page: list[Entry]) -> list[Entry]:
    """Return the entries that the catalog can hold, and warn of the others.

    Keys are stored as UTF-8, while names of files can be any bytes. Keys of megabytes, and objects larger than any
    disk, are taken for errors of the store.
    """
    for words, is_storable in _REQUIREMENTS.items():
        kept = [entry for entry in page if is_storable(entry)]
        if len(kept) < len(page):
            odd = next(entry.key for entry in page if not is_storable(entry))
            shown = odd[:_SHOWN_KEY_CHARACTERS] + "…" * (len(odd) > _SHOWN_KEY_CHARACTERS)
            left_out = len(page) - len(kept)
            logger.warning(
                "%s are left out of the listing: %d, such as %a", words, left_out, shown
            )
        page = kept
    return page


def _is_plausible(entry: Entry) -> bool:
    etag = entry.etag or ""  # obstore panics if it cannot be sent back in a request
    return (
        len(entry.key) <= LONGEST_KEY
        and 0 <= entry.size <= LARGEST_OBJECT_BYTES
        and len(etag) <= LONGEST_ETAG
        and etag.isascii()
        and etag.isprintable()
    )


_REQUIREMENTS: dict[str, Callable[[Entry], bool]] = {
    "names that are no UTF-8": lambda entry: is_utf8(entry.key),
    "objects with a name, version or size that cannot be": _is_plausible,
}


class Store(Protocol):
    """The objects of one source."""

    @property
    def source(self) -> SourceConfig:
        """The configuration that the store was opened with."""

    async def find(self, key: str) -> Entry:
        """Return the entry of an object, listed or not, in the bucket of the first URL.

        Args:
            key: in the bucket or on the host. On file systems a key that does not begin with
                ``/`` is below the folder that the URL names.

        Raises:
            StoreError: as `read` does.
        """

    def pages(self) -> Iterator[list[Entry]]:
        """Yield the listing page by page. Blocks: iterate in a thread.

        Sizes are known, empty objects are included, folders are not. The same objects come in
        the same order, which need not be that of their keys. Where a store that cannot resume
        a listing fails in the middle of it, or does not list as it should, keys may come twice.

        Raises:
            AccessError: the store refuses the credentials or the bucket.
            ObjectMissingError: no such bucket, folder or (for a URL without glob) object.
            TransientStoreError: no answer for ``timeout_seconds``.
        """

    async def read(self, entry: Entry, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes [start, stop) of an object, all of them by default.

        The buffer is read-only and owns its memory. A range that reaches past the end is cut
        off there.

        Raises:
            ObjectChangedError: not the version that was listed.
            ObjectMissingError: deleted since.
            AccessError: refused.
            TransientStoreError: no progress for ``timeout_seconds``, retries included.
            StoreError: any other answer.
        """

    async def fails_alone(
        self, entry: Entry, since: float, others: Sequence[Entry] = ()
    ) -> bool:
        """Whether an object keeps failing while others of its bucket or host are given.

        If so, it is *given up*: for some time, failed reads of it are not retried.

        Args:
            entry: an object whose read was given up.
            since: when that failed first, monotonic seconds.
            others: objects of which one byte is requested if no other was given since.
        """

    def given_up(self, entry: Entry, since: float = 0.0) -> bool:
        """Whether an object was given up lately, and after a moment, monotonic seconds."""

    async def current_entry(self, entry: Entry) -> Entry:
        """Return the entry of the version of an object that is there now.

        Raises:
            StoreError: as `read` does.
        """

    def is_named_by_url(self, entry: Entry) -> bool:
        """Whether a listing would show an object of this key."""

    async def close(self) -> None:
        """Release connections and threads; the store cannot be used afterwards."""


class Backend(Protocol):
    """One client on one bucket, host or file system; single attempts, growcache's errors."""

    @property
    def identity(self) -> str:
        """Backends of one identity have the same objects under the same keys."""

    @property
    def sorted(self) -> bool:
        """Whether listings are in the order of keys, and begin after any name for one request."""

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        """Yield pages of the objects below ``location.prefix``, matching or not.

        ``after``: the last key seen before a failure; may be ignored.
        """

    def head(self, key: str) -> Entry:
        """Return the entry of one object. Blocks."""

    def get(self, entry: Entry, start: int, stop: int) -> Awaitable[Buffer]:
        """Return a non-empty range of an object, unless it changed."""

    async def close(self) -> None:
        """Release connections and threads."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a store, as object formats read it."""

    store: Store
    entry: Entry
    others: tuple[Entry, ...] = ()  # the objects of the other fields

    @property
    def partners(self) -> Sequence[StoredObject]:
        return [StoredObject(self.store, entry) for entry in self.others]

    async def read(self, start: int = 0, stop: int | None = None) -> Buffer:
        """Return the bytes [start, stop); see `Store.read`."""
        return await self.store.read(self.entry, start, stop)

    @property
    def source(self) -> SourceConfig:
        return self.store.source

    def is_named_by_url(self, key: str) -> bool:
        """Whether the URL that the object was listed by names another one, too."""
        return self.store.is_named_by_url(replace(self.entry, key=key))

    async def find(self, key: str) -> StoredObject:
        return StoredObject(self.store, await self.store.find(key))
