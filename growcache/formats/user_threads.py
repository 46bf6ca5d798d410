"""Run the user's synchronous functions in threads, next to the sampler's event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from growcache.errors import (
    ConfigError,
    FormatError,
    GrowcacheError,
    StoreError,
    TransientStoreError,
)
from growcache.formats.base import ItemT, SamplesWithOrigins, samples_of_items
from growcache.schema import Sample
from growcache.usercode import UserCode, load_code

T = TypeVar("T")

MOST_THREADS = 64  # visits in flight beyond that wait for a thread


_this_thread = threading.local()  # the call that a thread of ours is running


class UserCall:
    """One run of the user's code, which may ask the event loop for bytes."""

    def __init__(self) -> None:
        # Of a read. The result is then not what the next try would give, even if the user's
        # code handled the failure.
        self.failure: TransientStoreError | None = None
        self._loop = asyncio.get_running_loop()
        self._given_up = False

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, from the user's thread, and return its result.

        After the call has ended this fails, because the user's code may keep a file.
        """
        running: UserCall = getattr(_this_thread, "call", self)
        try:
            running.check()
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except TransientStoreError as error:
            running.failure = error
            raise
        finally:
            work.close()

    def check(self) -> None:
        """End the user's code early if its result is no longer needed."""
        if self._given_up:
            raise StoreError("this read was given up")

    def give_up(self) -> None:
        """Let the user's code end at its next read or sample."""
        self._given_up = True

    def run(self, work: Callable[[UserCall], T]) -> T:
        _this_thread.call = self
        return work(self)


class UserThreads:
    """A pool of threads for synchronous code, created when first used."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[UserCall], T]) -> T:
        """Return the result of ``work``; raise the transient failure of a read, if it had one."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MOST_THREADS, "growcache-user")
        call = UserCall()
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._pool, call.run, work)
        except asyncio.CancelledError:
            call.give_up()
            raise
        except GrowcacheError:
            if call.failure is not None:
                raise call.failure from None
            raise
        if call.failure is not None:
            raise call.failure
        return result

    async def samples_of_items(
        self,
        key: str,
        items: Sequence[ItemT],
        decode: Callable[[ItemT], Sample | None],
        label: Callable[[ItemT], str],
        errors: Sequence[FormatError] = (),
    ) -> SamplesWithOrigins:
        """As `base.samples_of_items`, where ``decode`` runs the user's code."""
        return await self.run(
            lambda call: samples_of_items(
                key, items, decode, label, errors=errors, before_each=call.check
            )
        )


def load_decoder(name: object) -> UserCode:
    where = ("source.options.decode", "source.options")
    code = load_code(str(name), {}, ("data", "key"), where)
    if "data" not in code.parameters:
        raise ConfigError(f"source.options.decode: {name} must take data, and may take key")
    return code
