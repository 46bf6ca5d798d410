"""Whose a failure is: one object's, which is then left out, or the store's, which is waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, TypeGuard

from growcache.errors import (
    AccessError,
    CredentialsError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    StoreMissingError,
    StoreRefusedError,
    TransientStoreError,
)
from growcache.remote.answers import UnnameableKeyError

if TYPE_CHECKING:
    from growcache.remote.clients import Client
    from growcache.remote.store import Entry

MOST_WITNESSES = 3  # other objects that are asked for
# Before an object that was refused, while others are given, is asked for again. Logins that lapse
# again and again, or one bad gateway of many, refuse any object now and then.
PAUSES = (1.0, 2.0, 4.0)
FRESH_SECONDS = 1.0  # that nothing was given so lately needs no proof


def is_passing(error: StoreError) -> TypeGuard[TransientStoreError]:
    """Whether trying again for a while may help: the store did not answer, or is overloaded."""
    return isinstance(error, TransientStoreError) and not isinstance(error, StoreRefusedError)


def is_of_the_object(error: StoreError) -> bool:
    """Whether a failure is this object's whatever the store says of others."""
    return isinstance(error, ObjectChangedError | UnnameableKeyError)


def is_doubtful(error: StoreError) -> bool:
    """Whether a failure may be one of who asks although another object is given right after it.

    A login that lapses for a moment looks like that; objects do not vanish for moments.
    """
    return not isinstance(error, ObjectChangedError | ObjectMissingError | UnnameableKeyError)


def ruling(error: StoreError, *, others_answer: bool) -> StoreRefusedError | None:
    """Return the store's refusal that a failed request for one object is; None: the object's.

    Args:
        error: of the request; none that passes.
        others_answer: whether the store gives other objects meanwhile.

    >>> ruling(ObjectMissingError("s3://b/x does not exist (404)"), others_answer=True)
    >>> ruling(AccessError("s3://b/x may not be read"), others_answer=False)
    CredentialsError('s3://b/x may not be read')
    """
    if isinstance(error, StoreRefusedError):
        return error
    if others_answer or is_of_the_object(error):
        return None
    if isinstance(error, AccessError):
        return CredentialsError(str(error))
    if isinstance(error, ObjectMissingError):
        return StoreMissingError(f"{error}, nor does any other object that was asked for")
    return StoreRefusedError(f"{error}, and gives no other object either")


class Inquiry:
    """Asks a store for other objects, where one was refused; one inquiry at a time.

    It belongs to one event loop.

    Args:
        client: of the store.
        listed: returns some of its objects; called where none that was read so far can be. Blocks.
    """

    def __init__(self, client: Client, listed: Callable[[], Iterable[Entry]]) -> None:
        self._client = client
        self._listed = listed
        self._lock = asyncio.Lock()
        self._denied_at = -1.0  # when no other object was given, monotonic seconds

    async def refusal(self, entry: Entry, error: StoreError) -> StoreRefusedError | None:
        """Return the store's refusal that a failure is; None where it is the object's.

        Args:
            entry: what was asked for.
            error: what came of it just now; none that passes.

        Raises:
            TransientStoreError: nobody knows, for the store does not answer now.
        """
        known = isinstance(error, StoreRefusedError) or is_of_the_object(error)
        others = not known and await self._others_answer(entry, time.monotonic())
        return ruling(error, others_answer=others)

    async def _others_answer(self, entry: Entry, since: float) -> bool:
        evidence = self._client.evidence
        async with self._lock:
            if evidence.others_asked_since(entry.key, since):
                return True
            # Where all was refused a moment ago, that this one is refused too needs no question;
            # if the store answers again just now, the next try shows it.
            fresh = FRESH_SECONDS if self._client.refused else 0.0
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
        for one in islice(others, MOST_WITNESSES):
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
