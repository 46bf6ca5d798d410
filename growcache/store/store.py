"""The store of a source over any backends: read slots, retries, accounting, and several URLs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice, zip_longest
from typing import TYPE_CHECKING, TypeVar

from growcache.config_source import SourceConfig
from growcache.errors import (
    AccessError,
    CredentialsError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from growcache.store.contract import PAGE_ENTRIES, Backend, Entry, Page, storable_entries
from growcache.store.hedging import Hedging
from growcache.store.left_out import left_out_by
from growcache.store.listing import (
    MOST_RANGES,
    ListingRounds,
    UnsortedError,
    UrlListing,
)
from growcache.store.read_slots import ReadMeter, ReadSlots
from growcache.store.request_counts import CANCELLED, GET, PROCESS_REQUESTS
from growcache.store.response_check import (
    BrokenReadError,
    check_length,
    check_same_object,
    settling_seconds,
)
from growcache.store.retries import (
    MOST_PROBED_OBJECTS,
    RenewableBackend,
    RetryPolicy,
    StoreProbe,
    is_transient,
    may_be_a_lapse,
    stalled_seconds,
)
from growcache.store.store_errors import UnsupportedKeyError
from growcache.store.urls import BUCKET_SCHEMES, Location
from growcache.threads import ConcurrentCalls
from growcache.usercode import short_key

if TYPE_CHECKING:
    from typing_extensions import Buffer


T = TypeVar("T")

logger = logging.getLogger(__name__)

MOST_ASKED_OBJECTS = 2  # other objects, to find out whether only one object fails
_CONCURRENT_HEADS = 16  # objects of known names that are requested together


@dataclass(slots=True)
class ClientSettings:
    """Arguments of all clients.

    ``source.storage_options`` may change while the store is in use.
    """

    source: SourceConfig
    concurrency: int
    timeout_seconds: float


class RemoteStore:
    def __init__(
        self,
        source: SourceConfig,
        clients: Sequence[tuple[Location, RenewableBackend]],
        retries: RetryPolicy,
        concurrency: int,
        on_bytes: Callable[[int], None] | None = None,
        settings: ClientSettings | None = None,
        meter: ReadMeter | None = None,
    ) -> None:
        self.source = source
        self._meter = meter
        self._settings = settings
        self._locations = [location for location, _ in clients]
        self._clients = [client for _, client in clients]
        self._retries = retries
        self._concurrency = self._most_concurrency = concurrency
        self._on_bytes = on_bytes
        self._read_slots: ReadSlots | None = None
        self._hedging: Hedging | None = None
        self._served = self._throttled = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._refused_turn = asyncio.Lock()
        self._probes: dict[int, StoreProbe] = {}
        self.left_out: Counter[str] = Counter()  # files left out of the listing, by name

    async def read(self, entry: Entry, start: int = 0, stop: int | None = None) -> Buffer:
        if stop is None or stop > entry.size:
            stop = entry.size
        if start < 0:
            raise ValueError(f"start must not be negative, found {start}")
        if start >= stop:
            return b""
        # A version that only its time identifies must become unambiguous first.
        if entry.etag is None and (wait := settling_seconds(entry.mtime, time.time())):
            await asyncio.sleep(wait)
        client = self._clients[entry.store]
        slots = self._slots_of_this_loop()
        await slots.acquire()  # `async with` would take two more coroutines
        try:
            requested_at = time.monotonic()
            # One after the other, because the first is usually refused again.
            if client.is_refused:
                async with self._refused_turn:
                    data = await self._read_with_retries(entry, start, stop)
            else:
                data = await self._read_with_retries(entry, start, stop)
        finally:
            # A read keeps its slot during back-off, because a throttling store needs fewer
            # requests.
            slots.release()
        client.is_refused = False
        client.recent_reads.record(entry, requested_at)
        if self._on_bytes is not None:
            self._on_bytes(stop - start)
        return data

    async def _read_with_retries(self, entry: Entry, start: int, stop: int) -> Buffer:
        client = self._clients[entry.store]
        generation = client.generation
        if self._meter is not None:
            await self._meter.book(stop - start)
        try:  # without a function for retries, which a read seldom needs
            if self._hedging is None:
                began = time.monotonic()
                data = await client.get(entry, start, stop)
                check_length(entry, (start, stop), len(data))  # type: ignore[arg-type]
                PROCESS_REQUESTS.served_get(time.monotonic() - began, stop - start)
            else:
                data = await self._hedging.race(client.get, entry, start, stop)
                check_length(entry, (start, stop), len(data))  # type: ignore[arg-type]
            self._served += 1
            return data
        except asyncio.CancelledError:
            if self._hedging is None:
                PROCESS_REQUESTS.ended(GET, CANCELLED)
            raise
        except StoreError as error:
            if self._hedging is None:  # a race counts both requests itself
                PROCESS_REQUESTS.failed(GET, error)
            self._note_failure(error, stop - start)
            if is_transient(error) and self.given_up(entry):
                raise
            return await self._retry_read(error, entry, (start, stop), generation)

    async def _retry_read(
        self, failure: StoreError, entry: Entry, wanted: tuple[int, int], generation: int
    ) -> Buffer:
        async def attempt() -> Buffer:
            nonlocal failure
            try:
                if isinstance(failure, BrokenReadError):  # the object may have been rewritten
                    await self._check_unchanged(entry)
                return await self._read_again(entry, *wanted)
            except StoreError as error:
                failure = error
                raise

        return await self._retry(failure, entry, attempt, generation)

    async def _read_again(self, entry: Entry, start: int, stop: int) -> Buffer:
        data = await self._request(entry, start, stop)
        self._served += 1
        return data

    async def _request(self, entry: Entry, start: int, stop: int) -> Buffer:
        """Make one request.

        The caller counts the answer, because a hedge's answer is the read's answer.
        """
        if self._meter is not None:
            await self._meter.book(stop - start)
        try:
            data = await self._clients[entry.store].counted_get(entry, start, stop)
            check_length(entry, (start, stop), len(data))  # type: ignore[arg-type]
            return data
        except StoreError as error:
            self._note_failure(error, stop - start)
            raise

    def _note_failure(self, error: StoreError, nbytes: int) -> None:
        """Return the booked bytes of an attempt, unless some of them may have been sent."""
        if is_transient(error) and error.throttled:
            self._throttled += 1
        if self._meter is not None and (not is_transient(error) or error.status is not None):
            self._meter.give_back(nbytes)

    async def _check_unchanged(self, entry: Entry) -> None:
        try:
            found = await asyncio.to_thread(self._clients[entry.store].head, entry.key)
        except AccessError:  # some users may read an object but not request its size
            return
        check_same_object(entry, found)

    async def fails_alone(
        self, entry: Entry, since: float, others: Sequence[Entry] = ()
    ) -> bool:
        client = self._clients[entry.store]
        if not client.recent_reads.has_other_since(entry.key, since):
            near = [one for one in others if self._clients[one.store] is client]
            known = client.recent_reads.other_objects(entry.key) or near
            requested = [one for one in known if one.size and one.key != entry.key]
            if not await self._one_answers(requested):
                return False
        client.given_up.add(entry.key)
        return True

    async def _one_answers(self, entries: Sequence[Entry]) -> bool:
        for entry in entries[:MOST_ASKED_OBJECTS]:
            try:
                async with asyncio.timeout(stalled_seconds(self._retries.timeout_seconds)):
                    await self._clients[entry.store].counted_get(entry, 0, 1)
            except (ObjectMissingError, ObjectChangedError):
                return True
            except (StoreError, TimeoutError):
                continue
            return True
        return False

    def _may_hedge(self) -> bool:
        """Whether hedges are allowed: not with a byte budget, nor while reads are limited."""
        limited = self._meter is not None and self._meter.is_limited
        return not limited and self._concurrency >= self._most_concurrency

    def limit_reads(self, concurrency: int) -> None:
        """Set the number of reads that may be in flight."""
        self._concurrency = concurrency
        if self._read_slots is not None:
            self._read_slots.resize(concurrency)

    def take_answers(self) -> tuple[int, int]:
        """Return the numbers of served and of throttled reads since the last call."""
        found, self._served, self._throttled = (self._served, self._throttled), 0, 0
        return found

    def given_up(self, entry: Entry, since: float = 0.0) -> bool:
        return self._clients[entry.store].given_up.contains(entry.key, since)

    async def current_entry(self, entry: Entry) -> Entry:
        return await self._head_with_retries(entry.store, entry.key)

    async def find(self, key: str) -> Entry:
        location = self._locations[0]
        if location.pattern.startswith("/") and not key.startswith("/"):
            key = location.prefix + key
        return await self._head_with_retries(0, key)

    def is_named_by_url(self, entry: Entry) -> bool:
        return self._locations[entry.store].matches(entry.key)

    def key_of_field(self, store: int, below: str) -> str:
        return self._locations[store].prefix + below

    async def find_of_field(self, store: int, below: str) -> Entry:
        """Return an entry from the number of its URL, and its key below that URL's fixed folder."""
        return await self._head_with_retries(store, self.key_of_field(store, below))

    async def _head_with_retries(self, store: int, key: str) -> Entry:
        client = self._clients[store]

        def head() -> Awaitable[Entry]:
            return asyncio.to_thread(client.head, key)

        async with self._slots_of_this_loop():
            requested_at, generation = time.monotonic(), client.generation
            try:
                found = await head()
            except StoreError as error:
                asked = Entry(key, 0, None, None, store)
                found = await self._retry(error, asked, head, generation)
        if found.size:
            client.recent_reads.record(found, requested_at)
        return replace(found, store=store) if store else found

    async def _retry(
        self,
        error: StoreError,
        entry: Entry,
        attempt: Callable[[], Awaitable[T]],
        generation: int,
    ) -> T:
        if is_transient(error):
            try:
                return await self._retries.retry(attempt, error)
            except StoreError as last:
                if is_transient(last):
                    raise
                error = last
        return await self._retry_refused(error, entry, attempt, generation)

    async def _retry_refused(
        self,
        error: StoreError,
        entry: Entry,
        attempt: Callable[[], Awaitable[T]],
        generation: int,
    ) -> T:
        """Return the result of further attempts after a refusal, or raise the refusal.

        The refusal concerns the object if each further attempt is refused and the store serves
        another object right after it. The result is remembered for a while, so that an object
        of many parts is not probed for each of them.
        """
        client, probe = self._clients[entry.store], self._probe_of(entry.store)
        all_pauses = self._retries.refusal_pauses
        pauses = iter(() if client.denied.contains(entry.key) else all_pauses)
        was_renewed = False
        while True:
            refusal = await probe.refusal_of(entry, error)
            client.is_refused = refusal is not None
            if refusal is None:
                pause = next(pauses, None) if may_be_a_lapse(error) else None
                if pause is None:
                    if may_be_a_lapse(error):
                        client.denied.add(entry.key)
                    raise error from None
                self._retries.report(error)
                await asyncio.sleep(pause)
            elif was_renewed or not await asyncio.to_thread(client.renew, generation):
                raise refusal from None
            else:
                pauses, was_renewed = iter(all_pauses), True
            try:
                return await attempt()
            except StoreError as again:
                if is_transient(again):
                    raise
                error = again

    def _probe_of(self, store: int) -> StoreProbe:
        client = self._clients[store]
        if (found := self._probes.get(id(client))) is None:
            found = StoreProbe(client, lambda: self._list_some(client))
            self._probes[id(client)] = found
        return found

    def _list_some(self, client: RenewableBackend) -> Iterator[Entry]:
        for number, location in enumerate(self._locations):
            if self._clients[number] is not client:
                continue
            try:
                if location.is_key:
                    yield replace(client.head(location.pattern), store=number)
                    continue
                page = next(client.listing(location, None), Page())
            except StoreError as error:
                if is_transient(error):
                    raise
                continue
            found = [one for one in page if one.size and location.matches(one.key)]
            step = max(1, len(found) // (MOST_PROBED_OBJECTS + 1))
            yield from (replace(one, store=number) for one in islice(found, 0, None, step))

    def pages(self) -> Iterator[list[Entry]]:
        for client in self._clients:
            self._retries.run(client.connected)
        sections = [
            UrlListing(number, location, backend, self._is_new, partial(self.kept, number))
            for number, (location, backend) in enumerate(
                zip(self._locations, self._clients, strict=True)
            )
        ]
        listings = []
        for (is_key, _), grouped in groupby(
            sections, lambda one: (one.location.is_key, id(one.backend))
        ):
            run = list(grouped)
            pages = self._list_named_objects(run) if is_key else self._list(run)
            listings.append(filter(None, map(storable_entries, pages)))
        yield from self._in_order(listings)

    def set_options(self, options: Mapping[str, object]) -> None:
        """Use other ``storage_options`` from now on. Blocks.

        After a CredentialsError the next read tries again.
        """
        if self._settings is None or dict(options) == self.source.storage_options:
            return
        self.source = self.source.model_copy(update={"storage_options": dict(options)})
        self._settings.source = self.source
        for client in dict.fromkeys(self._clients):
            client.renew(client.generation, at_once=True)

    async def close(self) -> None:
        for backend in dict.fromkeys(self._clients):
            await backend.close()

    def _list(self, sections: list[UrlListing]) -> Iterator[list[Entry]]:
        if all(section.backend.sorted for section in sections):
            most = min(MOST_RANGES, self._concurrency)
            try:
                yield from ListingRounds(sections, self._retries, most).pages()
            except UnsortedError as error:
                logger.warning(
                    "store does not list in the order of keys, so it is listed page by page: "
                    "it showed %a after a greater name",
                    short_key(str(error)),
                )
                self.left_out.clear()
            else:
                return
        yield from self._in_order([section.pages(self._retries) for section in sections])

    def _in_order(self, listings: Sequence[Iterator[list[Entry]]]) -> Iterator[list[Entry]]:
        """Yield the listings in order, or in turn for several fields.

        In turn, the objects of a sample arrive together.
        """
        if not self.source.fields:
            yield from chain(*listings)
            return
        for pages in zip_longest(*listings):
            yield from (page for page in pages if page is not None)

    def _list_named_objects(self, sections: list[UrlListing]) -> Iterator[list[Entry]]:
        def head(section: UrlListing) -> Entry:
            entry = self._retries.run(
                lambda: _head_of_named_object(section.backend, section.location.pattern)
            )
            return replace(entry, store=section.number)

        fresh = [
            partial(head, section)
            for section in sections
            if section.is_new(section.location.pattern, section.number)
        ]
        for at in range(0, len(fresh), PAGE_ENTRIES):
            try:
                heads = fresh[at : at + PAGE_ENTRIES]
                yield ConcurrentCalls(heads, _CONCURRENT_HEADS).results()
            except ObjectMissingError as error:
                error.exit_code = 2  # the URL itself is wrong, rather than one object
                raise

    def kept(self, number: int, found: list[Entry]) -> list[Entry]:
        """Return the matches of a URL without files that are not data, which are counted."""
        if self.source.fields or self._locations[number].is_key:
            return found
        name_of = left_out_by(self._locations[number], self.source.format)
        names = [name_of(entry.key, entry.size) for entry in found]
        self.left_out.update(filter(None, names))
        return [entry for entry, name in zip(found, names, strict=True) if name is None]

    @property
    def locations(self) -> Sequence[Location]:
        """The parsed URLs, in order."""
        return self._locations

    def heads(self, named: Sequence[Entry]) -> list[Entry | None]:
        """Return the current entries of objects, with None for missing ones. Blocks."""

        def head(one: Entry) -> Entry | None:
            try:
                backend = self._clients[one.store]
                found = self._retries.run(lambda: _head_of_named_object(backend, one.key))
            except (ObjectMissingError, UnsupportedKeyError):
                return None
            return replace(found, store=one.store)

        if all(self._locations[one.store].scheme == "file" for one in named):
            return list(map(head, named))  # faster than a thread
        return ConcurrentCalls(
            [partial(head, one) for one in named], _CONCURRENT_HEADS
        ).results()

    def _is_new(self, key: str, number: int) -> bool:
        """Whether no earlier URL lists the key. With several fields, placeholders decide."""
        if self.source.fields:
            return True
        identity = self._clients[number].identity
        return not any(
            backend.identity == identity and location.matches(key)
            for location, backend in zip(
                self._locations[:number], self._clients[:number], strict=True
            )
        )

    def _slots_of_this_loop(self) -> ReadSlots:
        loop = asyncio.get_running_loop()
        if self._read_slots is None or self._loop is not loop:
            self._read_slots, self._loop = ReadSlots(self._concurrency), loop
            self._refused_turn = asyncio.Lock()
            self._probes = {}
            if self._meter is not None and all(
                one.scheme in BUCKET_SCHEMES for one in self._locations
            ):
                self._hedging = Hedging(self._request, self._may_hedge)
        return self._read_slots


def _head_of_named_object(backend: Backend, key: str) -> Entry:
    """Return the entry of the object that a URL names.

    Its refusal counts as one of the whole store.
    """
    try:
        return backend.head(key)
    except (TransientStoreError, ObjectMissingError, UnsupportedKeyError):
        raise
    except AccessError as error:
        raise CredentialsError(str(error)) from None
    except StoreError as error:  # answers to HEAD have no body with an explanation
        raise CredentialsError(
            f"{error}, as it does where credentials have expired", code="GC205"
        ) from None
