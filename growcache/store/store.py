"""The store of a source, over any backends: read slots, retries, accounting, and several URLs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice, zip_longest
from typing import TYPE_CHECKING, TypeVar

from growcache.config import SourceConfig
from growcache.errors import (
    AccessError,
    ConfigError,
    CredentialsError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    TransientStoreError,
)
from growcache.store.contract import PAGE_ENTRIES, Backend, Entry, Page
from growcache.store.listing import WIDTH, ConcurrentCalls, Rounds, UnsortedError, UrlListing
from growcache.store.response_check import (
    BrokenReadError,
    check_length,
    check_same_object,
    settling_seconds,
)
from growcache.store.retries import (
    GIVEN_UP_FOR_TIMEOUTS,
    MOST_PROBED_OBJECTS,
    REFUSAL_PAUSES_SECONDS,
    ExpiringKeys,
    RenewableBackend,
    RetryPolicy,
    StoreProbe,
    is_transient,
    may_be_a_lapse,
    stalled_seconds,
)
from growcache.store.store_errors import UnsupportedKeyError
from growcache.store.urls import BUCKET_SCHEMES, SSH_SCHEMES, WEB_SCHEMES, Location, parse_url
from growcache.usercode import short_key

if TYPE_CHECKING:
    from typing_extensions import Buffer


T = TypeVar("T")

logger = logging.getLogger(__name__)


LONGEST_KEY = (
    8192  # characters; stores allow 1,024 bytes, file systems 4,096, web servers about this
)
LONGEST_ETAG = 1024  # characters
LARGEST_OBJECT_BYTES = (
    1 << 50
)  # bytes; no store holds larger objects, and sums of sizes must stay exact
MOST_ASKED_OBJECTS = 2  # other objects, to find out whether only one fails
UNDOUBTED_SECONDS = 60.0  # at least, for which a refusal that was an object's is not doubted
_SHOWN_KEY_CHARACTERS = 80  # characters
_CONCURRENT_HEADS = 16  # objects of known names that are asked for at once


def storable_entries(page: list[Entry]) -> list[Entry]:
    """Return the entries that can be kept; what else a store lists is left out, with a warning.

    Listing, index and shards hold keys as UTF-8, and names of files can be any bytes. Nor is a
    store believed that tells of keys of megabytes, or of objects larger than all disks.
    """
    odd = [entry.key for entry in page if not _is_utf8(entry.key)]
    if odd:
        _warn_left_out("names that are no UTF-8", odd)
        page = [entry for entry in page if _is_utf8(entry.key)]
    unlikely = [entry.key for entry in page if not _is_plausible(entry)]
    if unlikely:
        _warn_left_out("objects with a name, version or size that cannot be", unlikely)
        page = [entry for entry in page if _is_plausible(entry)]
    return page


def _warn_left_out(what: str, keys: list[str]) -> None:
    shown = (
        keys[0]
        if len(keys[0]) <= _SHOWN_KEY_CHARACTERS
        else keys[0][:_SHOWN_KEY_CHARACTERS] + "…"
    )
    logger.warning("%s are left out of the listing: %d, such as %a", what, len(keys), shown)


def _is_plausible(entry: Entry) -> bool:
    return (
        len(entry.key) <= LONGEST_KEY
        and 0 <= entry.size <= LARGEST_OBJECT_BYTES
        and (entry.etag is None or _is_header_value(entry.etag))
    )


def _is_header_value(etag: str) -> bool:
    """Whether a version can be sent back, as one that requests ask for; obstore panics if not."""
    return len(etag) <= LONGEST_ETAG and etag.isascii() and etag.isprintable()


def _is_utf8(key: str) -> bool:
    try:
        return key.isascii() or bool(key.encode())
    except UnicodeEncodeError:
        return False


class RemoteStore:
    """The `Store` over any backends; see `open_store`."""

    def __init__(
        self,
        source: SourceConfig,
        backends: Sequence[tuple[Location, Backend]],
        patience: RetryPolicy,
        concurrency: int,
        on_bytes: Callable[[int], None] | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        self.source = source
        self._settings = settings
        self._locations = [location for location, _ in backends]
        clients = {id(backend): _renewable(backend) for _, backend in backends}
        self._backends = [clients[id(backend)] for _, backend in backends]
        self._patience = patience
        self._concurrency = concurrency
        self._on_bytes = on_bytes
        self._slots: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        given_up = {
            id(client): ExpiringKeys(patience.timeout_seconds) for client in self._backends
        }
        self._given_up = [given_up[id(client)] for client in self._backends]
        undoubted = max(UNDOUBTED_SECONDS / GIVEN_UP_FOR_TIMEOUTS, patience.timeout_seconds)
        denied = {id(client): ExpiringKeys(undoubted) for client in self._backends}
        self._denied = [denied[id(client)] for client in self._backends]
        self._turn = asyncio.Lock()
        self._inquiries: dict[int, StoreProbe] = {}

    def others_answered(self, entry: Entry, since: float) -> bool:
        """Return whether another key of the object's store could be read since then."""
        return self._backends[entry.store].evidence.others_since(entry.key, since)

    async def read(self, entry: Entry, start: int = 0, stop: int | None = None) -> Buffer:
        if stop is None or stop > entry.size:
            stop = entry.size
        if start < 0:
            raise ValueError(f"start must not be negative, found {start}")
        if start >= stop:
            return b""
        # Where a version is known by its time alone, that has to be unambiguous first.
        if entry.etag is None and (wait := settling_seconds(entry.mtime, time.time())):
            await asyncio.sleep(wait)
        client = self._backends[entry.store]
        slots = self._slots_of_this_loop()
        await slots.acquire()  # `async with` takes two more coroutines
        try:
            began = time.monotonic()
            if client.refused:  # one after the other: mostly the first one is refused again
                async with self._turn:
                    data = await self._insistent_read(entry, start, stop)
            else:
                data = await self._insistent_read(entry, start, stop)
        finally:
            # A read that backs off keeps its slot: a throttling store wants fewer requests.
            slots.release()
        client.refused = False
        client.evidence.answered(entry, began)
        if self._on_bytes is not None:
            self._on_bytes(stop - start)
        return data

    async def _insistent_read(self, entry: Entry, start: int, stop: int) -> Buffer:
        client = self._backends[entry.store]
        generation = client.generation
        try:
            data = await client.get(entry, start, stop)  # `_read_once` without its coroutine
            check_length(entry, (start, stop), len(data))  # type: ignore[arg-type]
            return data
        except StoreError as error:
            if is_transient(error) and self.given_up(entry):
                raise
            attempt = self._another_read(entry, start, stop, error)
            return await self._despite(error, entry, attempt, generation)

    async def _read_once(self, entry: Entry, start: int, stop: int) -> Buffer:
        data = await self._backends[entry.store].get(entry, start, stop)
        check_length(entry, (start, stop), len(data))  # type: ignore[arg-type]
        return data

    def _another_read(
        self, entry: Entry, start: int, stop: int, error: StoreError
    ) -> Callable[[], Awaitable[Buffer]]:
        """Return a retry; after a broken response it first asks whether the object was rewritten."""
        last = error

        async def attempt() -> Buffer:
            nonlocal last
            if isinstance(last, BrokenReadError):
                await self._check_unchanged(entry)
            try:
                return await self._read_once(entry, start, stop)
            except StoreError as error:
                last = error
                raise

        return attempt

    async def _check_unchanged(self, entry: Entry) -> None:
        """Refuse an object that was rewritten, because no retry would mend that.

        Raises:
            StoreError: as `read` does.
        """
        try:
            found = await asyncio.to_thread(self._backends[entry.store].head, entry.key)
        except AccessError:  # some may read an object and not ask for its size
            return
        check_same_object(entry, found)

    async def fails_alone(
        self, entry: Entry, since: float, others: Sequence[Entry] = ()
    ) -> bool:
        if not self.others_answered(entry, since):
            client = self._backends[entry.store]
            near = [one for one in others if self._backends[one.store] is client]
            known = client.evidence.witnesses(entry.key) or near
            asked = [one for one in known if one.size and one.key != entry.key]
            if not await self._one_answers(asked):
                return False
        self._given_up[entry.store].note(entry.key)
        return True

    async def _one_answers(self, entries: Sequence[Entry]) -> bool:
        """Ask for a byte of the first few objects, past the reads that wait for a slot."""
        for entry in entries[:MOST_ASKED_OBJECTS]:
            try:
                async with asyncio.timeout(stalled_seconds(self._patience.timeout_seconds)):
                    await self._backends[entry.store].get(entry, 0, 1)
            except (ObjectMissingError, ObjectChangedError):
                return True
            except (StoreError, TimeoutError):
                continue
            return True
        return False

    def given_up(self, entry: Entry, since: float = 0.0) -> bool:
        return self._given_up[entry.store].since(entry.key, since)

    async def renewed(self, entry: Entry) -> Entry:
        return replace(await self._headed(entry.store, entry.key), store=entry.store)

    async def find(self, key: str) -> Entry:
        location = self._locations[0]
        if location.pattern.startswith("/") and not key.startswith("/"):
            key = location.prefix + key
        return await self._headed(0, key)

    def key_beside(self, store: int, below: str) -> str:
        """Return the key of an object of another field; see `beside`."""
        return self._locations[store].prefix + below

    async def beside(self, store: int, below: str) -> Entry:
        """Return the entry of an object of another field.

        Raises:
            StoreError: as `Store.read` does.
        """
        return replace(await self._headed(store, self.key_beside(store, below)), store=store)

    async def _headed(self, store: int, key: str) -> Entry:
        """Return the entry of an object as the store has it now, among those of the first URL."""
        client = self._backends[store]

        def head() -> Awaitable[Entry]:
            return asyncio.to_thread(client.head, key)

        async with self._slots_of_this_loop():
            began, generation = time.monotonic(), client.generation
            try:
                found = await head()
            except StoreError as error:
                asked = Entry(key, 0, None, None, store)
                found = await self._despite(error, asked, head, generation)
        if found.size:
            client.evidence.answered(found, began)
        return found

    async def _despite(
        self,
        error: StoreError,
        entry: Entry,
        attempt: Callable[[], Awaitable[T]],
        generation: int,
    ) -> T:
        """Return what an attempt returns, after a first one failed.

        Raises:
            StoreRefusedError: the failure is the store's.
            TransientStoreError: there was no answer for too long.
            StoreError: it is this object's.
        """
        if is_transient(error):
            try:
                return await self._patience.again(attempt, error)
            except StoreError as last:
                if is_transient(last):
                    raise
                error = last
        return await self._until_known(error, entry, attempt, generation)

    async def _until_known(
        self,
        error: StoreError,
        entry: Entry,
        attempt: Callable[[], Awaitable[T]],
        generation: int,
    ) -> T:
        """Return what an attempt returns after one was refused, or raise whose the refusal is.

        It is the object's if it is refused again after each pause, and another object is given
        right after each time: a lapse would have to end right then, every time. So it is for a
        while then: an object of many parts is not doubted at each of them.
        """
        client, inquiry = self._backends[entry.store], self._inquiry(entry.store)
        denied = self._denied[entry.store]
        pauses, was_renewed = (
            iter(() if denied.since(entry.key) else REFUSAL_PAUSES_SECONDS),
            False,
        )
        while True:
            refusal = await inquiry.refusal(entry, error)
            client.refused = refusal is not None
            if refusal is None:
                pause = next(pauses, None) if may_be_a_lapse(error) else None
                if pause is None:
                    if may_be_a_lapse(error):
                        denied.note(entry.key)
                    raise error from None
                self._patience.tell(error)
                await asyncio.sleep(pause)
            elif was_renewed or not await asyncio.to_thread(client.renew, generation):
                raise refusal from None
            else:
                pauses, was_renewed = iter(REFUSAL_PAUSES_SECONDS), True
            try:
                return await attempt()
            except StoreError as again:
                if is_transient(again):
                    raise
                error = again

    def _inquiry(self, store: int) -> StoreProbe:
        client = self._backends[store]
        if (found := self._inquiries.get(id(client))) is None:
            found = StoreProbe(client, lambda: self._some_listed(client))
            self._inquiries[id(client)] = found
        return found

    def _some_listed(self, client: RenewableBackend) -> Iterator[Entry]:
        """Yield some objects that a client has, as far as it can list; blocks.

        Raises:
            TransientStoreError: it does not answer.
        """
        for number, (location, backend) in enumerate(
            zip(self._locations, self._backends, strict=True)
        ):
            if backend is not client:
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
        for client in self._backends:
            self._patience.call(client.opened)
        numbered = enumerate(zip(self._locations, self._backends, strict=True))
        listings = []
        for (is_key, _), grouped in groupby(numbered, lambda n: (n[1][0].is_key, id(n[1][1]))):
            run = list(grouped)
            listings.append(self._heads(run) if is_key else self._listings(run))
        yield from self._in_order(listings)

    def adopt(self, options: Mapping[str, object]) -> None:
        """Go by other ``storage_options`` from now on. Blocks.

        Raises:
            CredentialsError: no client can be made with them now; the next read tries again.
        """
        if self._settings is None or dict(options) == self.source.storage_options:
            return
        source = self.source.model_copy(update={"storage_options": dict(options)})
        self.source = source
        self._settings.source = source
        for client in {id(client): client for client in self._backends}.values():
            client.renew(client.generation, at_once=True)

    async def close(self) -> None:
        for backend in {id(backend): backend for backend in self._backends}.values():
            await backend.close()

    def _listings(
        self, run: list[tuple[int, tuple[Location, RenewableBackend]]]
    ) -> Iterator[list[Entry]]:
        sections = [
            UrlListing(number, location, backend, lambda key, n: not self._listed(key, n))
            for number, (location, backend) in run
        ]
        for page in self._by_rounds(sections):
            if found := storable_entries(page):
                yield found

    def _by_rounds(self, sections: list[UrlListing]) -> Iterator[list[Entry]]:
        if all(section.backend.sorted for section in sections):
            most = min(WIDTH, self._concurrency)
            try:
                yield from Rounds(sections, self._patience, most).pages()
            except UnsortedError as error:
                logger.warning(
                    "the store does not list in the order of keys, so it is listed page after "
                    "page: it showed %a after a greater name",
                    short_key(str(error)),
                )
            else:
                return
        yield from self._in_order([self._kept(section) for section in sections])

    def _kept(self, section: UrlListing) -> Iterator[list[Entry]]:
        return map(section.kept, self._resumed(section.location, section.backend))

    def _in_order(self, listings: Sequence[Iterator[list[Entry]]]) -> Iterator[list[Entry]]:
        """Yield one listing after the other; of several fields by turns.

        So partners come soon after one another.
        """
        if not self.source.fields:
            yield from chain(*listings)
            return
        for pages in zip_longest(*listings):
            yield from (page for page in pages if page is not None)

    def _heads(
        self, run: list[tuple[int, tuple[Location, RenewableBackend]]]
    ) -> Iterator[list[Entry]]:
        def head(number: int, location: Location, backend: RenewableBackend) -> Entry:
            entry = self._patience.call(
                lambda: _head_of_named_object(backend, location.pattern)
            )
            return replace(entry, store=number)

        fresh = [
            partial(head, number, location, backend)
            for number, (location, backend) in run
            if not self._listed(location.pattern, number)
        ]
        for at in range(0, len(fresh), PAGE_ENTRIES):
            try:
                yield storable_entries(
                    ConcurrentCalls(fresh[at : at + PAGE_ENTRIES], _CONCURRENT_HEADS).results()
                )
            except ObjectMissingError as error:
                error.exit_code = 2  # the URL itself is wrong, not one object of many
                raise

    def _resumed(self, location: Location, backend: Backend) -> Iterator[list[Entry]]:
        """Yield a listing that goes on after transient failures, from the last key."""
        after: str | None = None
        listing: Iterator[Page] | None = None

        def advance() -> Page | None:
            nonlocal listing
            if listing is None:
                listing = _refuse_repeated_pages(backend.listing(location, after))
            try:
                return next(listing, None)
            except TransientStoreError:
                listing = None
                raise

        while (page := self._patience.call(advance)) is not None:
            if page:
                after = page[-1].key
                yield page

    def _listed(self, key: str, number: int) -> bool:
        """Whether an earlier URL of the same bucket or file system has the key already.

        Whose a key is of several fields, their placeholders say.
        """
        if self.source.fields:
            return False
        identity = self._backends[number].identity
        return any(
            backend.identity == identity and location.matches(key)
            for location, backend in zip(
                self._locations[:number], self._backends[:number], strict=True
            )
        )

    def _slots_of_this_loop(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._loop is not loop:
            self._slots, self._loop = asyncio.Semaphore(self._concurrency), loop
            self._turn = asyncio.Lock()
            self._inquiries = {}
        return self._slots


def _renewable(backend: Backend) -> RenewableBackend:
    return (
        backend if isinstance(backend, RenewableBackend) else RenewableBackend(lambda: backend)
    )


def _head_of_named_object(backend: Backend, key: str) -> Entry:
    """Return the entry of an object that a URL names.

    Raises:
        CredentialsError: it is refused. What a listing is refused is told as of all of it.
    """
    try:
        return backend.head(key)
    except (TransientStoreError, ObjectMissingError, UnsupportedKeyError):
        raise
    except AccessError as error:
        raise CredentialsError(str(error)) from None
    except StoreError as error:  # answers to HEAD have no body, so no word of what is wrong
        raise CredentialsError(f"{error}, as it does where credentials have expired") from None


def _refuse_repeated_pages(pages: Iterator[Page]) -> Iterator[Page]:
    """Yield pages as long as they move on.

    Raises:
        StoreError: one comes again, as of a store that loses the place and lists for ever.
    """
    told: set[int] = set()  # a number for each page
    for page in pages:
        if page:
            number = hash((page[0], page[-1], len(page)))
            if number in told:
                raise StoreError(
                    f"the store's listing repeats its page of {len(page)} objects that ends with "
                    f"{short_key(page[-1].key)}; it cannot be listed to its end"
                )
            told.add(number)
        yield page


def open_store(
    source: SourceConfig,
    *,
    concurrency: int = 16,
    timeout_seconds: float = 60,
    on_retry: Callable[[BaseException], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
    lazily: bool = False,
    endless: Callable[[TransientStoreError], bool] | None = None,
) -> RemoteStore:
    """Return the store that holds the objects of a source. Asks it nothing yet.

    Args:
        source: URLs, storage options and client.
        concurrency: reads in flight.
        timeout_seconds: without progress for so long, a read or listing is given up.
        on_retry: told of every failure that is tried again, in the thread it happened in.
        on_bytes: told the size of every successful read.
        lazily: where no credentials are to be found, say so only when something is asked for.
        endless: tells which failures are tried again for ever; see `RetryPolicy`.

    Raises:
        ConfigError: a URL or option that no client understands.
        CredentialsError: no credentials are to be found.
    """
    clients: dict[tuple[object, ...], RenewableBackend] = {}
    backends: list[tuple[Location, Backend]] = []
    settings = ClientSettings(source, concurrency, timeout_seconds)
    for url in source.url:
        location = parse_url(url)
        if location.scheme == "file" and source.client != "fsspec":
            client: tuple[object, ...] = ("file",)
        elif location.scheme in SSH_SCHEMES:
            client = tuple(url.split("/", 3)[:3])  # the host, with who asks
        elif location.scheme in BUCKET_SCHEMES:
            is_web_key = location.scheme in WEB_SCHEMES and location.is_key
            client = (location.root, location.userinfo, location.asked, is_web_key)
        else:
            client = (url,)
        if client not in clients:
            opening = _BackendFactory(location, url, settings)
            clients[client] = RenewableBackend(opening.backend, lazily=lazily)
            location = opening.location
        backends.append((location, clients[client]))
    patience = RetryPolicy(timeout_seconds, on_retry, endless)
    return RemoteStore(source, backends, patience, concurrency, on_bytes, settings)


@dataclass(slots=True)
class ClientSettings:
    """What clients are made of; the options of a source may change while it is read."""

    source: SourceConfig
    concurrency: int
    timeout_seconds: float


class _BackendFactory:
    """Makes the client of a URL, again and again."""

    def __init__(self, location: Location, url: str, settings: ClientSettings) -> None:
        self.location = self._location = location
        self._url = url
        self._settings = settings

    def backend(self) -> Backend:
        """Return a new client."""
        now = self._settings
        self.location, backend = _open_backend(
            self._location, self._url, now.source, now.concurrency, now.timeout_seconds
        )
        return backend


def _open_backend(
    location: Location,
    url: str,
    source: SourceConfig,
    concurrency: int,
    timeout_seconds: float,
) -> tuple[Location, Backend]:
    def by_fsspec() -> tuple[Location, Backend]:
        from growcache.store.fsspec import open_fsspec

        return open_fsspec(location, url, source, concurrency, timeout_seconds)

    if location.scheme in SSH_SCHEMES and source.client != "obstore":
        try:
            from growcache.store.sftp import open_sftp
        except ImportError:
            raise ConfigError(
                f"source.url {location.url}: SFTP needs asyncssh: pip install 'growcache[sftp]'"
            ) from None

        return location, open_sftp(location, url, source, concurrency, timeout_seconds)
    # Imported here: a sampler of local files needs neither obstore nor fsspec.
    if location.scheme == "file" and source.client == "auto":
        from growcache.store.local import LocalBackend

        return location, LocalBackend(concurrency)
    if source.client != "fsspec":
        from growcache.store.obstore import open_obstore

        opened = open_obstore(location, source, timeout_seconds)
        if opened is not None and source.client == "obstore":
            return location, opened
        if opened is not None:
            from growcache.store.obstore import UnsupportedKeysBackend

            return location, UnsupportedKeysBackend(opened, lambda: by_fsspec()[1])
    return by_fsspec()
