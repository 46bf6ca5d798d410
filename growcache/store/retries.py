"""Retries, renewed clients, and the decision whether a refusal concerns one object or the whole store.

A transient failure is retried with jittered exponential back-off until nothing moved for the timeout.
A refusal belongs to the object if the store still gives other objects, and the object is then left out.
Otherwise it belongs to the store, which is waited for: its client is made again, because clients keep
the credentials and certificates that they read when they were made.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar

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
from growcache.store.store_errors import UnsupportedKeyError

if TYPE_CHECKING:
    from tenacity import RetryCallState
    from typing_extensions import Buffer

    from growcache.store.contract import Backend, Entry, Page
    from growcache.store.urls import Location


T = TypeVar("T")

FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 8.0
LONGEST_WAIT_SECONDS_OF_ENDLESS = 5.0  # so that whoever waits for hours goes on soon


def stalled_seconds(timeout_seconds: float) -> float:
    """Return after how long without a byte a connection is given up.

    Early enough that another one has its chance before the whole read is.
    """
    return max(0.1, timeout_seconds / 4)


class RetryPolicy:
    """Tries again what failed for a transient reason.

    The clock starts with the first failure, so that one long attempt that broke off (a
    large object on a slow link) is not by itself a reason to give up.
    """

    def __init__(
        self,
        timeout_seconds: float,
        on_retry: Callable[[BaseException], None] | None = None,
        endless: Callable[[TransientStoreError], bool] | None = None,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._on_retry = on_retry
        self._endless = endless

    def call(self, attempt: Callable[[], T]) -> T:
        """Return what ``attempt`` returns, in the end.

        Raises:
            TransientStoreError: still failing after ``timeout_seconds``.
        """
        try:
            return attempt()
        except TransientStoreError as error:
            if not self._is_tried_again(error):
                raise
            from tenacity import Retrying

            policy = self._policy(time.monotonic())
            first = _FirstFailure(error)

            def again() -> T:
                first.raise_it()
                return attempt()

            return Retrying(**policy)(again)

    async def again(self, attempt: Callable[[], Awaitable[T]], error: TransientStoreError) -> T:
        """Return what ``attempt`` returns, in the end, after a first try ended in ``error``.

        The first try is the caller's own, because going through tenacity costs as much as a
        small read.

        Raises:
            TransientStoreError: still failing after ``timeout_seconds``.
        """
        from tenacity import AsyncRetrying

        policy = self._policy(time.monotonic())
        first = _FirstFailure(error)

        async def again() -> T:
            first.raise_it()
            return await attempt()

        return await AsyncRetrying(**policy)(again)

    def _is_tried_again(self, error: BaseException) -> bool:
        if not isinstance(error, TransientStoreError):
            return False
        if self._endless is not None:
            return self._endless(error)
        return not isinstance(error, StoreRefusedError)

    def _policy(self, since: float) -> dict[str, Any]:
        from tenacity import (
            retry_if_exception,
            stop_before_delay,
            stop_never,
            wait_random_exponential,
        )

        endless = self._endless is not None
        longest = LONGEST_WAIT_SECONDS_OF_ENDLESS if endless else LONGEST_WAIT_SECONDS
        return {
            "retry": retry_if_exception(self._is_tried_again),
            "wait": wait_random_exponential(FIRST_WAIT_SECONDS, longest),
            "stop": stop_never if endless else stop_before_delay(self.timeout_seconds),
            "before_sleep": self._tell,
            "retry_error_callback": partial(self._give_up, since),
        }

    def tell(self, error: BaseException) -> None:
        """Tell of a failure that is tried again: else a sampler that waits seems to be stuck."""
        if self._on_retry is not None:
            self._on_retry(error)

    def _tell(self, state: RetryCallState) -> None:
        if state.outcome is not None and (error := state.outcome.exception()) is not None:
            self.tell(error)

    def _give_up(self, since: float, state: RetryCallState) -> Any:
        error = state.outcome.exception() if state.outcome is not None else None
        given_up = TransientStoreError(
            f"{error}; given up after {state.attempt_number} tries, "
            f"{self.timeout_seconds:g} s without progress"
        )
        given_up.since = since
        raise given_up from error


class _FirstFailure:
    """Replays the failure that came before tenacity, so that it waits first."""

    def __init__(self, error: TransientStoreError) -> None:
        self._error: TransientStoreError | None = error

    def raise_it(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error


GIVEN_UP_FOR_TIMEOUTS = (
    2.0  # times `timeout_seconds`: for so long an object that was given up is tried only once
)
MOST_EXPIRING_KEYS = 10_000  # objects that are remembered


# A successful read: the object, when it was asked for, and when all of it was there (monotonic
# seconds). One is made for every read, and a tuple is made five times as fast as an object.
_SuccessfulRead: TypeAlias = "tuple[Entry, float, float]"


class RecentReads:
    """The last successful reads of one store in this process.

    Two reads of different keys are enough: one of them is not the key in question. Reads may end
    in several threads; a race loses one of two successes that came together.
    """

    def __init__(self) -> None:
        self._last: _SuccessfulRead | None = None
        self._before: _SuccessfulRead | None = None  # the last one of another key

    def answered(self, entry: Entry, began: float) -> None:
        """Note a successful read."""
        last = self._last
        if last is not None and last[0].key != entry.key:
            self._before = last
        self._last = (entry, began, time.monotonic())

    def others_since(self, key: str, since: float) -> bool:
        """Return whether the store answered for another key."""
        return any(at >= since for _, _, at in self._others(key))

    def others_asked_since(self, key: str, since: float) -> bool:
        """Return whether the store answered for another key that was asked for since then.

        What was asked for before may have been let in before who asks was refused.
        """
        return any(began >= since for _, began, _ in self._others(key))

    def witnesses(self, key: str) -> list[Entry]:
        """Return objects other than ``key`` that could be read, the last one first."""
        return [entry for entry, _, _ in self._others(key)]

    def _others(self, key: str) -> list[_SuccessfulRead]:
        found = (self._last, self._before)
        return [one for one in found if one is not None and one[0].key != key]


class ExpiringKeys:
    """The objects of one store that kept failing while others answered."""

    def __init__(self, timeout_seconds: float) -> None:
        self._lasts = GIVEN_UP_FOR_TIMEOUTS * timeout_seconds
        self._at: dict[str, float] = {}

    def note(self, key: str) -> None:
        """Note that an object was given up now."""
        now = time.monotonic()
        if len(self._at) >= MOST_EXPIRING_KEYS:
            self._at = {k: at for k, at in self._at.items() if at + self._lasts > now}
        if len(self._at) < MOST_EXPIRING_KEYS:
            self._at[key] = now

    def since(self, key: str, moment: float = 0.0) -> bool:
        """Whether an object was given up lately, and after a moment, monotonic seconds."""
        at = self._at.get(key)
        return at is not None and at >= moment and at + self._lasts > time.monotonic()


RENEW_SECONDS = 1.0  # at least between two clients


class RenewableBackend:
    """A `Backend` over one that can be replaced."""

    def __init__(self, make: Callable[[], Backend], *, lazily: bool = False) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self._tried_at = time.monotonic()
        self.generation = 0
        self.evidence = RecentReads()
        self.refused = False
        try:
            self._backend = make()
        except CredentialsError:
            if not lazily:
                raise

    @property
    def identity(self) -> str:
        return self.opened().identity

    @property
    def sorted(self) -> bool:
        return self.opened().sorted

    def opened(self) -> Backend:
        """Return the one in use.

        Raises:
            CredentialsError: there was none so far, and still are no credentials.
        """
        if self._backend is None:
            self._backend = self._made()
        return self._backend

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        seen = self.generation
        try:
            yield from self.opened().listing(location, after)
        except StoreRefusedError:
            self.renew(seen)
            raise

    def head(self, key: str) -> Entry:
        return self.opened().head(key)

    def get(self, entry: Entry, start: int, stop: int) -> Awaitable[Buffer]:
        return (self._backend or self.opened()).get(entry, start, stop)

    async def close(self) -> None:
        if self._backend is not None:
            await self._backend.close()

    def renew(self, seen: int, *, at_once: bool = False) -> bool:
        """Make the client anew, at most once a second; return whether there is a newer one. Blocks.

        Raises:
            CredentialsError: it cannot be made with what stands there now.
        """
        with self._lock:
            if self.generation != seen:
                return True
            now = time.monotonic()
            if now - self._tried_at < RENEW_SECONDS and not at_once:
                return False
            self._tried_at = now
            # The old one ends with the last of its reads, when nothing refers to it any more.
            self._backend = self._made()
            self.generation += 1
            return True

    def _made(self) -> Backend:
        """Return a new backend; what was right once and is not now, is to be mended as credentials are."""
        try:
            return self._make()
        except StoreRefusedError:
            raise
        except (ConfigError, OSError) as error:
            raise CredentialsError(str(error)) from None


MOST_PROBED_OBJECTS = 3  # other objects that are asked for
# Before an object that was refused, while others are given, is asked for again. Logins that lapse
# again and again, or one bad gateway of many, refuse any object now and then.
REFUSAL_PAUSES_SECONDS = (1.0, 2.0, 4.0)
FRESH_REFUSAL_SECONDS = 1.0  # that nothing was given so lately needs no proof


def is_transient(error: StoreError) -> TypeGuard[TransientStoreError]:
    """Whether trying again for a while may help: the store did not answer, or is overloaded."""
    return isinstance(error, TransientStoreError) and not isinstance(error, StoreRefusedError)


def is_object_error(error: StoreError) -> bool:
    """Whether a failure is this object's whatever the store says of others."""
    return isinstance(error, ObjectChangedError | UnsupportedKeyError)


def may_be_a_lapse(error: StoreError) -> bool:
    """Whether a failure may be one of who asks although another object is given right after it.

    A login that lapses for a moment looks like that; objects do not vanish for moments.
    """
    return not isinstance(error, ObjectChangedError | ObjectMissingError | UnsupportedKeyError)


def store_refusal(error: StoreError, *, others_answer: bool) -> StoreRefusedError | None:
    """Return the store's refusal that a failed request for one object is; None: the object's.

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
    """Asks a store for other objects, where one was refused; one inquiry at a time.

    It belongs to one event loop.
    """

    def __init__(self, client: RenewableBackend, listed: Callable[[], Iterable[Entry]]) -> None:
        self._client = client
        self._listed = listed
        self._lock = asyncio.Lock()
        self._denied_at = -1.0  # when no other object was given, monotonic seconds

    async def refusal(self, entry: Entry, error: StoreError) -> StoreRefusedError | None:
        """Return the store's refusal that a failure is; None where it is the object's.

        Raises:
            TransientStoreError: nobody knows, for the store does not answer now.
        """
        known = isinstance(error, StoreRefusedError) or is_object_error(error)
        others = not known and await self._others_answer(entry, time.monotonic())
        return store_refusal(error, others_answer=others)

    async def _others_answer(self, entry: Entry, since: float) -> bool:
        evidence = self._client.evidence
        async with self._lock:
            if evidence.others_asked_since(entry.key, since):
                return True
            # Where all was refused a moment ago, that this one is refused too needs no question;
            # if the store answers again just now, the next try shows it.
            fresh = FRESH_REFUSAL_SECONDS if self._client.refused else 0.0
            if self._denied_at >= since - fresh:
                return False
            asked_at = time.monotonic()
            found = await self._any_given(self._witnesses(entry))
            if not found:
                self._denied_at = asked_at
            return found or evidence.others_asked_since(entry.key, since)

    async def _witnesses(self, entry: Entry) -> AsyncIterator[Entry]:
        """Yield those that could be read last, and if they are gone, too, some that are listed."""
        known = self._client.evidence.witnesses(entry.key)
        for one in known:
            yield one
        asked = {entry.key, *(one.key for one in known)}
        listed = await asyncio.to_thread(lambda: list(self._listed()))
        others = (one for one in listed if one.key not in asked and one.size)
        for one in islice(others, MOST_PROBED_OBJECTS):
            yield one

    async def _any_given(self, witnesses: AsyncIterator[Entry]) -> bool:
        async for one in witnesses:
            began = time.monotonic()
            try:
                await self._client.get(one, 0, 1)
            except ObjectChangedError:  # it gives the object, of another version
                return True
            except StoreRefusedError:
                return False
            except TransientStoreError:
                raise
            except StoreError:
                continue
            self._client.evidence.answered(one, began)
            return True
        return False
