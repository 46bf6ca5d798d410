"""The user's synchronous code beside the sampler's event loop: threads, and reads from them."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from growcache.errors import GrowcacheError, StoreError, TransientStoreError
from growcache.remote.formats.objects import Reader

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

MOST_THREADS = 64  # visits in flight beyond that wait for a thread
_FIRST_AHEAD, _MOST_AHEAD = 1 << 16, 1 << 23  # bytes read ahead of what is asked for


_here = threading.local()  # the call that a thread of ours is running


class Call:
    """One run of the user's code, which may ask the event loop for bytes.

    Attributes:
        failure: the transient failure of a read, if one failed so; whatever the user's code
            made of it, its result is then not the one that the next try would give.
    """

    def __init__(self) -> None:
        self.failure: TransientStoreError | None = None
        self._loop = asyncio.get_running_loop()
        self._given_up = False

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop, from the user's thread, and return its result.

        The user's code may keep a file for its later calls: then those are what fails.
        """
        running: Call = getattr(_here, "call", self)
        try:
            running.check()
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except TransientStoreError as error:
            running.failure = error
            raise
        finally:
            work.close()

    def check(self) -> None:
        """End the user's code early, where nobody wants its result any more.

        Raises:
            StoreError: the group was given up.
        """
        if self._given_up:
            raise StoreError("this read was given up")

    def give_up(self) -> None:
        """Let the user's code end at its next read or sample."""
        self._given_up = True

    def run(self, work: Callable[[Call], T]) -> T:
        """Return what ``work`` returns, in the user's thread."""
        _here.call = self
        return work(self)


class Threads:
    """Runs synchronous code; made when first used."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[Call], T]) -> T:
        """Return what ``work`` returns.

        Raises:
            TransientStoreError: one of its reads failed so, whatever became of that.
        """
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MOST_THREADS, "growcache-user")
        call = Call()
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


class ObjectFile(io.RawIOBase):
    """A remote object as a read-only, seekable file, for one thread at a time.

    Who reads on where it stopped gets more at once each time, up to 8 MiB.
    """

    def __init__(self, call: Call, reader: Reader) -> None:
        super().__init__()
        self._call = call
        self._reader = reader
        self._at = 0
        self._held, self._start = memoryview(b""), 0
        self._ahead = _FIRST_AHEAD

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position; nothing is read yet."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._reader.entry.size}
        at = base[whence] + offset
        if at < 0:
            raise ValueError(f"expected a position of at least 0, found {at}")
        self._at = at
        return at

    def readinto(self, buffer: Buffer) -> int:
        """Fill the buffer as far as the object goes; return how many bytes were read."""
        into = memoryview(buffer).cast("B")
        wanted = min(len(into), max(0, self._reader.entry.size - self._at))
        done = 0
        while done < wanted:
            found = self._window(wanted - done)
            into[done : done + len(found)] = found
            self._at += len(found)
            done += len(found)
        return done

    def _window(self, wanted: int) -> memoryview:
        """Return bytes from the position on, at least one and at most ``wanted``."""
        end = self._start + len(self._held)
        if not self._start <= self._at < end:
            follows = self._at == end
            self._ahead = min(_MOST_AHEAD, 2 * self._ahead) if follows else _FIRST_AHEAD
            stop = min(self._reader.entry.size, self._at + max(wanted, self._ahead))
            data = self._call.wait(self._reader.read(self._at, stop))
            self._held, self._start = memoryview(data).cast("B"), self._at
        begin = self._at - self._start
        return self._held[begin : begin + wanted]
