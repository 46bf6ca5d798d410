"""Counts of this process's requests to stores by outcome, and the durations of those that were served.

One instance counts for all stores of a process, because only their sum is shown.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from growcache.errors import (
    AccessError,
    FormatError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
    StoreRefusedError,
    TransientStoreError,
)
from growcache.store.counts import Counts, observe

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from growcache.store.contract import Entry, Page

Read: TypeAlias = Callable[["Entry", int, int], Awaitable["Buffer"]]

OPS = GET, HEAD, LIST, PUT = "get", "head", "list", "put"
SERVED, CANCELLED = "ok", "cancelled"

# Upper bounds of the histogram's buckets, in seconds. One more bucket has the longer requests.
REQUEST_BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


def failure_code(error: BaseException) -> str:
    """Return the kind of a failure: one of a few words, without keys or hosts.

    >>> failure_code(ObjectMissingError("s3://b/x does not exist")), failure_code(OSError())
    ('missing', 'other')
    """
    match error:
        case TransientStoreError(throttled=True):
            return "timeout" if error.status is None else "throttled"
        case AccessError():
            return "denied"
        case ObjectMissingError():
            return "missing"
        case ObjectChangedError():
            return "changed"
        case StoreRefusedError():
            return "refused"
        case TransientStoreError():
            return "connection" if error.status is None else "server_error"
        case FormatError():
            return "format"
    return "other"


class RequestCounts:
    """Counters that only increase.

    Each read calls ``served_get``, always in the thread of one event loop. Any thread may call
    the other methods.
    """

    def __init__(self) -> None:
        self._gets = [0] * (len(REQUEST_BOUNDS) + 1)
        self._get_seconds = 0.0
        self._get_bytes = 0
        self._lock = threading.Lock()
        self._codes: dict[str, dict[str, int]] = {}
        self._retries: dict[str, int] = {}
        self._seconds: dict[str, list[float]] = {}

    def served_get(self, seconds: float, nbytes: int) -> None:
        self._gets[bisect_left(REQUEST_BOUNDS, seconds)] += 1
        self._get_seconds += seconds
        self._get_bytes += nbytes

    def served(self, op: str, seconds: float) -> None:
        with self._lock:
            observe(self._seconds, op, seconds, REQUEST_BOUNDS)
        self.ended(op, SERVED)

    def failed(self, op: str, error: BaseException) -> None:
        self.ended(op, failure_code(error))

    def ended(self, op: str, code: str) -> None:
        with self._lock:
            codes = self._codes.setdefault(op, {})
            codes[code] = codes.get(code, 0) + 1

    def retried(self, error: BaseException) -> None:
        reason = failure_code(error)
        with self._lock:
            self._retries[reason] = self._retries.get(reason, 0) + 1

    async def counted_get(self, get: Read, entry: Entry, start: int, stop: int) -> Buffer:
        """Return the result of ``get`` and count it.

        The usual path of a read does the same without this coroutine.
        """
        began = time.monotonic()
        try:
            data = await get(entry, start, stop)
        except StoreError as error:
            self.failed(GET, error)
            raise
        except asyncio.CancelledError:
            self.ended(GET, CANCELLED)
            raise
        self.served_get(time.monotonic() - began, stop - start)
        return data

    def counted_head(self, head: Callable[[str], Entry], key: str) -> Entry:
        began = time.monotonic()
        try:
            found = head(key)
        except StoreError as error:
            self.failed(HEAD, error)
            raise
        self.served(HEAD, time.monotonic() - began)
        return found

    def counted_read(self, read: Callable[[], bytes]) -> bytes:
        """Return the result of ``read``, which is the whole of a small object, and count it."""
        began = time.monotonic()
        try:
            data = read()
        except StoreError as error:
            self.failed(GET, error)
            raise
        self.served_get(time.monotonic() - began, len(data))
        return data

    def counted_write(self, write: Callable[[], bool]) -> bool:
        began = time.monotonic()
        try:
            written = write()
        except StoreError as error:
            self.failed(PUT, error)
            raise
        self.served(PUT, time.monotonic() - began)
        return written

    def counted_pages(self, pages: Iterator[Page]) -> Iterator[Page]:
        """Yield the pages of a listing and count each as a request, except an empty one at the end."""
        count = 0
        while True:
            began = time.monotonic()
            try:
                page = next(pages)
            except StopIteration:
                return
            except StoreError as error:
                self.failed(LIST, error)
                raise
            if page or not count:
                self.served(LIST, time.monotonic() - began)
            count += 1
            yield page

    def totals(self) -> Counts:
        with self._lock:
            codes = {op: dict(codes) for op, codes in self._codes.items()}
            seconds: Counts = {op: list(buckets) for op, buckets in self._seconds.items()}
            retries: Counts = dict(self._retries)
        codes[GET] = {SERVED: sum(self._gets)} | codes.get(GET, {})
        requests: Counts = {op: {**of_op} for op, of_op in codes.items()}
        return {
            "requests": requests,
            "request_seconds": {GET: [*self._gets, self._get_seconds], **seconds},
            "retries": retries,
            "read_bytes": self._get_bytes,
        }


PROCESS_REQUESTS = RequestCounts()
