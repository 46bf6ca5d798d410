"""Retries, renewed clients, and the decision whether a refusal concerns one object or the whole store.

A transient failure is retried with jittered exponential back-off until the timeout passes
without progress. A refusal concerns the object if the store still serves other objects; the
object is then left out. Otherwise it concerns the store. The client is then replaced, because
clients keep the credentials and certificates that they started with.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias, TypeGuard, TypeVar

from growcache.errors import (
    AccessError,
    ConfigError,
    CredentialsError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    StoreMissingError,
    StoreRefusedError,
    TransientStoreError,
)
from growcache.store.request_counts import PROCESS_REQUESTS
from growcache.store.store_errors import UnsupportedKeyError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from growcache.store.contract import Backend, Entry, Page
    from growcache.store.urls import Location


T = TypeVar("T")

FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 8.0
LONGEST_WAIT_SECONDS_FOREVER = 5.0  # so that a service continues soon after a wait of hours
# Seconds until an object that was refused while others were served is requested again. Logins
# that lapse repeatedly, or one bad gateway among many, refuse arbitrary objects now and then.
REFUSAL_PAUSES_SECONDS = (1.0, 2.0, 4.0)


def stalled_seconds(timeout_seconds: float) -> float:
    return max(0.1, timeout_seconds / 4)


class RetryPolicy:
    """Retries transient failures.

    The clock starts with the first failure, so a single long attempt that broke off (a large
    object on a slow link) is no reason to give up. With ``retries_forever`` the timeout is
    ignored. Without it, a refusal by the whole store is not retried, because it will not end
    soon.
    """

    def __init__(
        self,
        timeout_seconds: float,
        on_retry: Callable[[BaseException], None] | None = None,
        retries_forever: Callable[[TransientStoreError], bool] | None = None,
        refusal_pauses: Sequence[float] = REFUSAL_PAUSES_SECONDS,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.refusal_pauses = refusal_pauses
        self._on_retry = on_retry
        self._retries_forever = retries_forever

    def run(self, attempt: Callable[[], T]) -> T:
        failures, since = 0, 0.0
        while True:
            try:
                return attempt()
            except TransientStoreError as error:
                failures, since = failures + 1, since or time.monotonic()
                seconds = self._pause_after(error, failures, since)
            time.sleep(seconds)

    async def retry(self, attempt: Callable[[], Awaitable[T]], error: TransientStoreError) -> T:
        failures, since = 1, time.monotonic()
        while True:
            await asyncio.sleep(self._pause_after(error, failures, since))
            try:
                return await attempt()
            except TransientStoreError as again:
                failures, error = failures + 1, again

    def report(self, error: BaseException) -> None:
        """Report a retried failure, so that a waiting sampler does not look stuck."""
        PROCESS_REQUESTS.retried(error)
        if self._on_retry is not None:
            self._on_retry(error)

    def _pause_after(self, error: TransientStoreError, failures: int, since: float) -> float:
        if self._retries_forever is None:
            is_retried, longest = not isinstance(error, StoreRefusedError), LONGEST_WAIT_SECONDS
        else:
            is_retried, longest = self._retries_forever(error), LONGEST_WAIT_SECONDS_FOREVER
        if not is_retried:
            raise error
        bound = FIRST_WAIT_SECONDS * 2.0 ** min(failures - 1, 30)
        seconds = max(error.retry_after, random.uniform(0, min(bound, longest)))
        spent = time.monotonic() - since + seconds
        if self._retries_forever is None and spent >= self.timeout_seconds:
            given_up = TransientStoreError(
                f"{error}; given up after {failures} tries, "
                f"{self.timeout_seconds:g} s without progress"
            )
            given_up.since = since
            raise given_up from error
        self.report(error)
        return seconds


# In units of `timeout_seconds`: how long an object that was given up is tried only once.
GIVEN_UP_FOR_TIMEOUTS = 2.0
MOST_EXPIRING_KEYS = 10_000  # remembered objects


# A successful read: the object, the time of the request, and the time of the full answer
# (monotonic seconds). A tuple, because one is made for every read, and an object takes five
# times as long.
_SuccessfulRead: TypeAlias = "tuple[Entry, float, float]"


class RecentReads:
    """The latest successful reads of one store, of two different keys.

    A race of threads may lose one of them.
    """

    def __init__(self) -> None:
        self._last: _SuccessfulRead | None = None
        self._before: _SuccessfulRead | None = None  # the latest one of another key

    def record(self, entry: Entry, requested_at: float) -> None:
        last = self._last
        if last is not None and last[0].key != entry.key:
            self._before = last
        self._last = (entry, requested_at, time.monotonic())

    def has_other_since(self, key: str, since: float) -> bool:
        return any(at >= since for _, _, at in self._others(key))

    def has_other_requested_since(self, key: str, since: float) -> bool:
        """Like `has_other_since`, without requests that may have preceded the credentials' refusal."""
        return any(requested_at >= since for _, requested_at, _ in self._others(key))

    def other_objects(self, key: str) -> list[Entry]:
        return [entry for entry, _, _ in self._others(key)]

    def _others(self, key: str) -> list[_SuccessfulRead]:
        found = (self._last, self._before)
        return [one for one in found if one is not None and one[0].key != key]


class ExpiringKeys:
    """Objects of one store that failed repeatedly while others were served. Each expires."""

    def __init__(self, timeout_seconds: float) -> None:
        self._lasts = GIVEN_UP_FOR_TIMEOUTS * timeout_seconds
        self._at: dict[str, float] = {}

    def add(self, key: str) -> None:
        now = time.monotonic()
        if len(self._at) >= MOST_EXPIRING_KEYS:
            self._at = {k: at for k, at in self._at.items() if at + self._lasts > now}
        if len(self._at) < MOST_EXPIRING_KEYS:
            self._at[key] = now

    def contains(self, key: str, since: float = 0.0) -> bool:
        at = self._at.get(key)
        return at is not None and at >= since and at + self._lasts > time.monotonic()


RENEW_SECONDS = 1.0  # at least, between two clients
UNDOUBTED_SECONDS = 60.0  # at least, during which an object's own refusal is not probed again


class RenewableBackend:
    def __init__(
        self,
        make: Callable[[], Backend],
        *,
        without_credentials: bool = False,
        timeout_seconds: float = 60.0,
        renew_seconds: float = RENEW_SECONDS,
    ) -> None:
        self._make = make
        self._renew_seconds = renew_seconds
        self._lock = threading.Lock()
        self._tried_at = time.monotonic()
        self.backend: Backend | None = None
        self.generation = 0  # how often the client was replaced
        self.recent_reads = RecentReads()
        # Objects that kept failing while others were served.
        self.given_up = ExpiringKeys(timeout_seconds)
        # Objects whose refusal concerned only them, so that it is not probed again.
        undoubted = max(UNDOUBTED_SECONDS / GIVEN_UP_FOR_TIMEOUTS, timeout_seconds)
        self.denied = ExpiringKeys(undoubted)
        self.is_refused = False  # whether the store refused everything at the last probe
        try:
            self.backend = make()
        except CredentialsError:
            if not without_credentials:
                raise

    @property
    def identity(self) -> str:
        return self.connected().identity

    @property
    def sorted(self) -> bool:
        return self.connected().sorted

    def connected(self) -> Backend:
        """Return the current backend.

        Raises:
            CredentialsError: There are still no credentials.
        """
        if self.backend is None:
            self.backend = self._make_anew()
        return self.backend

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        generation = self.generation
        try:
            pages = self.connected().listing(location, after)
            yield from PROCESS_REQUESTS.counted_pages(pages)
        except StoreRefusedError:
            self.renew(generation)
            raise

    def head(self, key: str) -> Entry:
        return PROCESS_REQUESTS.counted_head(self.connected().head, key)

    def get(self, entry: Entry, start: int, stop: int) -> Awaitable[Buffer]:
        return self.connected().get(entry, start, stop)

    def counted_get(self, entry: Entry, start: int, stop: int) -> Awaitable[Buffer]:
        return PROCESS_REQUESTS.counted_get(self.connected().get, entry, start, stop)

    async def close(self) -> None:
        if self.backend is not None:
            await self.backend.close()

    def renew(self, generation: int, *, at_once: bool = False) -> bool:
        """Replace the client; return whether it is newer than a refused ``generation``. Blocks.

        The client is replaced at most once a second, unless the options are known to have
        changed (``at_once``).
        """
        with self._lock:
            if self.generation != generation:
                return True
            now = time.monotonic()
            if now - self._tried_at < self._renew_seconds and not at_once:
                return False
            self._tried_at = now
            # The old client ends with the last of its reads, when nothing refers to it any
            # more.
            self.backend = self._make_anew()
            self.generation += 1
            return True

    def _make_anew(self) -> Backend:
        # Options that worked before and fail now will be repaired like credentials.
        try:
            return self._make()
        except StoreRefusedError:
            raise
        except (ConfigError, OSError) as error:
            raise CredentialsError(str(error)) from None


MOST_PROBED_OBJECTS = 3  # other objects that a probe requests
FRESH_REFUSAL_SECONDS = 1.0  # during which a refusal of everything needs no new probe


def is_transient(error: StoreError) -> TypeGuard[TransientStoreError]:
    return isinstance(error, TransientStoreError) and not isinstance(error, StoreRefusedError)


def is_object_error(error: StoreError) -> bool:
    return isinstance(error, ObjectChangedError | UnsupportedKeyError)


def may_be_a_lapse(error: StoreError) -> bool:
    """Whether the credentials may have lapsed briefly, even if another object is served right after."""
    return not isinstance(error, ObjectChangedError | ObjectMissingError | UnsupportedKeyError)


def store_refusal(error: StoreError, *, others_answer: bool) -> StoreRefusedError | None:
    """Return the store's refusal behind a failed request, or None if the object is the cause.

    >>> store_refusal(ObjectMissingError("s3://b/x does not exist (404)"), others_answer=True)
    >>> store_refusal(AccessError("s3://b/x may not be read"), others_answer=False)
    CredentialsError('s3://b/x may not be read')
    """
    if isinstance(error, StoreRefusedError):
        return error
    if others_answer or is_object_error(error):
        return None
    if isinstance(error, AccessError):
        return CredentialsError(str(error))
    if isinstance(error, ObjectMissingError):
        return StoreMissingError(f"{error}, nor does any other object that was asked for")
    return StoreRefusedError(f"{error}, and gives no other object either")


class StoreProbe:
    """Requests other objects of a store that refused one.

    One probe runs at a time, in one event loop. ``list_some`` blocks.
    """

    def __init__(
        self, client: RenewableBackend, list_some: Callable[[], Iterable[Entry]]
    ) -> None:
        self._client = client
        self._list_some = list_some
        self._lock = asyncio.Lock()
        self._denied_at = -1.0  # when no other object was served, monotonic seconds

    async def refusal_of(self, entry: Entry, error: StoreError) -> StoreRefusedError | None:
        """Return the store's refusal behind a recent failure, or None.

        Raises:
            TransientStoreError: The cause cannot be decided yet.
        """
        known = isinstance(error, StoreRefusedError) or is_object_error(error)
        others = not known and await self._gives_another(entry, time.monotonic())
        return store_refusal(error, others_answer=others)

    async def _gives_another(self, entry: Entry, since: float) -> bool:
        reads = self._client.recent_reads
        async with self._lock:
            if reads.has_other_requested_since(entry.key, since):
                return True
            # If everything was refused a moment ago, this refusal needs no probe. If the store
            # has recovered meanwhile, the next attempt will show it.
            fresh = FRESH_REFUSAL_SECONDS if self._client.is_refused else 0.0
            if self._denied_at >= since - fresh:
                return False
            requested_at = time.monotonic()
            found = await self._gives_any(self._other_objects(entry))
            if not found:
                self._denied_at = requested_at
            return found or reads.has_other_requested_since(entry.key, since)

    async def _other_objects(self, entry: Entry) -> AsyncIterator[Entry]:
        known = self._client.recent_reads.other_objects(entry.key)
        for one in known:
            yield one
        requested = {entry.key, *(one.key for one in known)}
        listed = await asyncio.to_thread(lambda: list(self._list_some()))
        others = (one for one in listed if one.key not in requested and one.size)
        for one in islice(others, MOST_PROBED_OBJECTS):
            yield one

    async def _gives_any(self, entries: AsyncIterator[Entry]) -> bool:
        async for one in entries:
            requested_at = time.monotonic()
            try:
                await self._client.counted_get(one, 0, 1)
            except ObjectChangedError:  # the store serves it, in another version
                return True
            except StoreRefusedError:
                return False
            except TransientStoreError:
                raise
            except StoreError:
                continue
            self._client.recent_reads.record(one, requested_at)
            return True
        return False
