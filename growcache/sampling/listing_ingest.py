"""Add listed pages to the catalog as far as the bound has room. A thread lists ahead."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from growcache.cache.cache import Cache
from growcache.cache.status_model import left_out_text
from growcache.config import Config
from growcache.errors import (
    ConfigError,
    CredentialsError,
    GrowcacheError,
    SamplingError,
    StoreRefusedError,
    TransientStoreError,
)
from growcache.formats import is_user_format
from growcache.formats.base import endless_entry
from growcache.sampling.messages import Message
from growcache.sampling.sources import (
    SourceListings,
    first_urls,
    name_source,
    open_listings,
    source_of_url,
)
from growcache.sampling.space_allocator import SpaceAllocator
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry

_log = logging.getLogger(__name__)

PAGES_AHEAD = 4  # pages that wait for the loop, because a listing must not fill the memory

OnPage = Callable[[list[Entry]], None]
OnEnd = Callable[[GrowcacheError | None], None]


class ListingThread:
    """Passes the pages of a store to callbacks on the event loop."""

    def __init__(self, source: SourceListings, on_page: OnPage, on_end: OnEnd) -> None:
        self._source = source
        self._on_page = on_page
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._slots = threading.Semaphore(PAGES_AHEAD)
        self._stopped = False
        threading.Thread(target=self._run, name="listing", daemon=True).start()

    @property
    def left_out(self) -> Mapping[str, int]:
        return self._source.left_out

    @property
    def catalogs(self) -> list[str]:
        return self._source.catalogs

    def more(self) -> None:
        self._slots.release()

    def adopt(self, options: Sequence[Mapping[str, Any]]) -> None:
        thread = threading.Thread(
            target=self._adopt, args=(options,), name="listing-options", daemon=True
        )
        thread.start()

    def _adopt(self, options: Sequence[Mapping[str, Any]]) -> None:
        with contextlib.suppress(CredentialsError):  # the next request raises it, and retries
            self._source.set_options(options)

    def stop(self) -> None:
        self._stopped = True
        self._slots.release()

    def _run(self) -> None:
        error: GrowcacheError | None = None
        try:
            for page in self._source.pages():
                self._slots.acquire()
                if self._stopped:
                    return
                self._call_soon(self._page, page)
        except GrowcacheError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - a client may raise anything
            error = SamplingError(f"the listing failed: {type(caught).__name__}: {caught}")
        self._call_soon(self._end, error)

    def _call_soon(self, callback: Callable[..., None], value: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, value)

    def _page(self, page: list[Entry]) -> None:
        if not self._stopped:
            self._on_page(page)

    def _end(self, error: GrowcacheError | None) -> None:
        if not self._stopped:
            self._on_end(error)


STARTED_SHARDS = 4  # shards, of which the first are small
STARTING_SECONDS = 5.0
PAGE_SECONDS = 0.1  # at least, between two pages until then
PAGE_BYTES, ENTRY_BYTES = 8192, 64  # of the catalog, per page and per key, as upper estimates
LISTING_SHARE = 32  # 1/32 of the bound is reserved for the rest of the listing


def runs_user_format(config: Config) -> bool:
    """Whether user code decides the content of a source, and whether it has a listing."""
    return any(is_user_format(source.format) for source in config.sources)


class ListingIngest:
    def __init__(
        self,
        config: Config,
        cache: Cache,
        catalog: Catalog,
        wake: Callable[[], None],
        fail: Callable[[Exception], None],
        retried: Callable[[BaseException], None],
        answered: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._cache = cache
        self._catalog = catalog
        self._wake = wake
        self._fail = fail
        self._retried = retried
        self._answered = answered
        self.pages: deque[list[Entry]] = deque()
        self._firsts = first_urls(config.sources)
        self._shown: set[int] = set()  # sources with a listed object
        self._listing: ListingThread | None = None
        self._born = time.monotonic()
        self._next_page = -math.inf  # monotonic seconds
        self._over = False
        self._has_listed = len(catalog) > 0
        self._page_needs = 0  # bytes, largest so far
        self.listed = False
        self.watched: frozenset[str] = frozenset()
        self.relisted: list[Entry] = []
        # Files that this run's listing left out, by name; None until it is complete.
        self.left_out: Mapping[str, int] | None = None

    def start(self, introduction: Message | None, *, refresh: bool) -> None:
        """Start the listing.

        A user's format needs ``introduction``, which tells whether there is a listing.
        """
        if self._catalog.complete and not refresh:
            self.listed = True
            return
        self._catalog.complete = False
        if runs_user_format(self._config):
            if introduction is None:
                return
            if not introduction["listed"]:
                self._page([endless_entry(self._config.sources[0].format)])
                self._ended(None)
                return
        pages = open_listings(
            self._config.sources,
            timeout_seconds=self._config.sampling.timeout_seconds,
            on_retry=self._retried,
            retries_forever=self._is_waited_for,
            lengths=introduction["lengths"] if introduction is not None else (),
            refresh=refresh,
        )
        self._listing = ListingThread(pages, self._page, self._ended)

    def _is_waited_for(self, error: TransientStoreError) -> bool:
        """Whether the listing retries forever. Called in its thread.

        A refusal before the first page ends the run, because it is probably a configuration
        error.
        """
        return self._has_listed or not isinstance(error, StoreRefusedError)

    @property
    def catalogs(self) -> list[str]:
        """Where the objects of each shared catalog come from, in words."""
        return [] if self._listing is None else self._listing.catalogs

    def adopt(self, options: Sequence[Mapping[str, Any]]) -> None:
        if self._listing is not None:
            self._listing.adopt(options)

    def stop(self) -> None:
        if self._listing is not None:
            self._listing.stop()

    def _page(self, page: list[Entry]) -> None:
        self._has_listed = True
        self._answered()
        self.pages.append(page)
        self._wake()

    def _ended(self, error: GrowcacheError | None) -> None:
        self._answered()
        if error is not None:
            self._fail(error)
        self._over = True
        self._wake()

    def take(self, allocator: SpaceAllocator | None, *, awaited: bool = False) -> None:
        """Add listed pages to the catalog. After a CacheFullError the next call continues.

        ``awaited``: the service waits for the listing before it can make room.
        """
        while self.pages and self._is_due():
            if not self._has_room_for(self.pages[0], allocator, awaited=awaited):
                break
            page = self.pages.popleft()
            if self.watched:
                self.relisted += [
                    one for one in page if one.key in self.watched and not one.is_unwritten
                ]
            self._shown.update(
                source_of_url(self._firsts, store) for store in {e.store for e in page}
            )
            if self._listing is not None:
                self._listing.more()
            self._catalog.append(page)  # keeps the page even on a full disk
            self._cache.space.catalog_bytes = self._catalog.allocated_bytes
        if not self.listed:
            self._cache.space.listing_ahead = self._reserved_for_listing(allocator)
        if not self._over or self.pages or self.listed:
            return
        if self._listing is not None:
            self.left_out = self._listing.left_out
        self._refuse_empty()
        if self.left_out:
            _log.warning("listing leaves out: %s", left_out_text(self.left_out))
        self._catalog.flush()
        self._catalog.complete = True
        self._cache.space.listing_ahead = 0
        self.listed = True

    def _refuse_empty(self) -> None:
        for number, source in enumerate(self._config.sources):
            if number not in self._shown:
                urls = ", ".join(source.url)
                words = left_out_text(self.left_out) if self.left_out else ""
                said = (
                    f"the listing is empty: no object matches {urls}; check bucket, prefix and "
                    f"glob in source.url{f'. Left out: {words}' if words else ''}"
                )
                raise ConfigError(
                    name_source(said, number, len(self._config.sources)), code="GC217"
                )

    def _is_due(self) -> bool:
        """Whether to add a page now.

        Until the first samples exist, samplers get the processors.

        The limit is `STARTING_SECONDS`, because some draws need the whole listing.
        """
        now = time.monotonic()
        started = self._cache.totals().drawn_shards >= STARTED_SHARDS
        if started or now - self._born > STARTING_SECONDS:
            return True
        due = now >= self._next_page
        if due:
            self._next_page = now + PAGE_SECONDS
        return due

    def _reserved_for_listing(self, allocator: SpaceAllocator | None) -> int:
        """Return the reserve, which is 0 without eviction, because a full cache then draws no more."""
        if allocator is None or not allocator.evicts:
            return 0
        most = max(self._cache.max_bytes // LISTING_SHARE, self._page_needs)
        return min(most, allocator.spare)

    def _has_room_for(
        self, page: list[Entry], allocator: SpaceAllocator | None, *, awaited: bool
    ) -> bool:
        """Make room for a page, because the catalog counts against the bound."""
        needed = _catalog_bytes(page)
        self._page_needs = max(self._page_needs, needed)
        self._cache.space.measure()
        if (short := needed - self._cache.bytes_left()) > 0 and self._cache.older:
            self._cache.older.give_way(short)
            self._cache.count_older()
        if self._cache.bytes_left() >= needed:
            return True
        new = self._catalog.new_entries(page)
        needed = _catalog_bytes(new)
        if new and allocator is not None:
            allocator.make_room_for_listing(needed)
            self._cache.space.measure()  # evictions enlarge the log of the index
        if not new or self._cache.bytes_left() >= needed:
            return True
        taken = self._cache.space.catalog_bytes + self._cache.space.budget.total + needed
        totals = self._cache.totals()
        empty = not (totals.shards or totals.retired_shards or self._cache.older)
        if taken > self._cache.max_bytes or (allocator is None and (awaited or empty)):
            raise ConfigError(
                f"cache.max_bytes: the listing of {len(self._catalog) + len(page):,} objects or "
                f"more and the index take {taken:,} bytes by themselves; raise it",
                code="GC110",
            )
        return False


def _catalog_bytes(entries: Sequence[Entry]) -> int:
    return PAGE_BYTES + sum(len(entry.key) + ENTRY_BYTES for entry in entries)
