"""Check that a store sent the requested range of the listed version.

A store, a proxy or a cache may answer a request with another range. Such a response is never
decoded, and a retry may succeed. A version that only its time identifies is read after the
clock's tick has ended, because a second change within the tick would leave no trace.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING

from growcache.errors import ErrorCode, ObjectChangedError, TransientStoreError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from growcache.store.contract import Entry


# Kernels stamp files by a clock with ticks of 1 to 10 ms.
TICK_SECONDS = 0.02
# Some file systems and protocols (SFTP, HTTP, FAT) have whole seconds, by the server's clock.
WHOLE_TICK_SECONDS = 2.0


def settling_seconds(changed: float | None, now: float) -> float:
    """Return the wait after which no further change can have the same time.

    A time in the future needs no wait.

    >>> settling_seconds(100.25, 100.5), settling_seconds(101.0, 102.5)
    (0.0, 0.5)
    >>> settling_seconds(900.0, 100.0)
    0.0
    """
    if changed is None or (age := now - changed) >= WHOLE_TICK_SECONDS:
        return 0.0
    tick = WHOLE_TICK_SECONDS if changed == int(changed) else TICK_SECONDS
    return tick - age if -tick < age < tick else 0.0


_CONTENT_RANGE = re.compile(r"\s*bytes\s+(\d{1,19})-(\d{1,19})/(\d{1,19}|\*)\s*", re.IGNORECASE)


class BrokenReadError(TransientStoreError):
    """A response is not the requested range, or not all of it."""

    code: ErrorCode = "GC218"


@dataclass(slots=True)  # frozen ones take three times as long
class Response:
    span: tuple[int, int] | None  # first byte, and one after the last; None: the whole object
    total: int | None = None  # bytes of the object
    etag: str | None = None
    mtime: float | None = None


def response_of(
    entry: Entry, wanted: tuple[int, int], status: int, headers: Mapping[str, str]
) -> Response:
    span, total = None, None
    if status == 206:
        span, total = parse_content_range(entry, wanted, headers.get("content-range", ""))
    elif "content-encoding" not in headers and headers.get("content-length", "").isdecimal():
        total = int(headers["content-length"])
    etag = headers.get("etag")
    # Parsing a time takes as long as all other checks together.
    modified = None if etag and entry.etag else http_seconds(headers.get("last-modified"))
    return Response(span, total, etag, modified)


def parse_content_range(
    entry: Entry, wanted: tuple[int, int], text: str
) -> tuple[tuple[int, int], int | None]:
    # A shortcut for the usual case, in a third of the time.
    if text == f"bytes {wanted[0]}-{wanted[1] - 1}/{entry.size}":
        return wanted, entry.size
    found = _CONTENT_RANGE.fullmatch(text)
    if found is None:
        raise BrokenReadError(
            f"{entry.key}: expected bytes {_range_text(wanted)}, the store sent a part of the object "
            "without saying which"
        )
    total = None if found[3] == "*" else int(found[3])
    return (int(found[1]), int(found[2]) + 1), total


def is_requested_range(requested: str, sent: str) -> bool:
    """Whether a Content-Range header answers a Range header, which may extend past the end.

    >>> is_requested_range("bytes=5-9", "bytes 5-9/20"), is_requested_range("bytes=5-9", "bytes 0-4/20")
    (True, False)
    >>> is_requested_range("bytes=5-9", "bytes 5-7/8"), is_requested_range("bytes=-4", "bytes 16-19/20")
    (True, True)
    """
    found = _CONTENT_RANGE.fullmatch(sent)
    wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", requested)
    if found is None or wanted is None:
        return False
    first, last, total = int(found[1]), int(found[2]), found[3]
    if not wanted[1]:  # a suffix of the object
        return last - first + 1 <= int(wanted[2]) and total in (str(last + 1), "*")
    is_end = total in (str(last + 1), "*")
    return first == int(wanted[1]) and (str(last) == wanted[2] or is_end)


def check_response(entry: Entry, wanted: tuple[int, int], response: Response) -> None:
    """Raise unless the response is the wanted range of the listed version."""
    if is_other_version(entry, response.etag, response.mtime):
        raise ObjectChangedError(
            f"{entry.key} was rewritten since it was listed: expected version "
            f"{entry.etag or entry.mtime}, found {response.etag or response.mtime}"
        )
    check_range(entry, wanted, response)
    check_has_version(entry, response)


def check_has_version(entry: Entry, response: Response) -> None:
    if entry.etag and not response.etag and response.mtime is None:
        raise BrokenReadError(
            f"{entry.key}: expected version {entry.etag}, the store sent an answer without one"
        )


def check_range(entry: Entry, wanted: tuple[int, int], response: Response) -> None:
    """Raise BrokenReadError unless the response is the wanted range of an object of the listed size."""
    if response.span is not None and response.span != wanted:
        raise BrokenReadError(
            f"{entry.key}: expected bytes {_range_text(wanted)}, the store sent "
            f"{_range_text(response.span)}"
        )
    if response.total is not None and response.total != entry.size:
        raise BrokenReadError(
            f"{entry.key}: expected an object of {entry.size} bytes, the store answered for "
            f"one of {response.total}"
        )


def check_length(entry: Entry, wanted: tuple[int, int], found: int) -> None:
    if found != wanted[1] - wanted[0]:
        raise BrokenReadError(
            f"{entry.key}: expected {wanted[1] - wanted[0]} bytes at {wanted[0]}, the store sent "
            f"{found}"
        )


async def read_at_most(chunks: AsyncIterable[Buffer], most: int, entry: Entry) -> bytes:
    parts, found = [], 0
    async for chunk in chunks:
        parts.append(chunk)
        if (found := found + len(chunk)) > most:  # type: ignore[arg-type]
            raise BrokenReadError(f"{entry.key}: expected {most} bytes, the store sends more")
    return b"".join(parts)


def check_same_version(entry: Entry, found: Entry) -> None:
    if (found.size, found.etag, found.mtime) != (entry.size, entry.etag, entry.mtime):
        raise changed_error(entry, found)


def check_same_object(entry: Entry, found: Entry) -> None:
    """Raise ObjectChangedError if an answer to HEAD shows that the object was rewritten.

    An answer without a version proves nothing if the listing had one, because it may come from
    a proxy.
    """
    version = found.etag if entry.etag else found.mtime
    if version is None and (entry.etag or entry.mtime is not None):
        return
    if found.size != entry.size or is_other_version(entry, found.etag, found.mtime):
        raise changed_error(entry, found)


def changed_error(entry: Entry, found: Entry) -> ObjectChangedError:
    return ObjectChangedError(
        f"{entry.key} was rewritten since it was listed: expected {entry.size} bytes of "
        f"{entry.etag or f'time {entry.mtime}'}, found {found.size} of "
        f"{found.etag or f'time {found.mtime}'}"
    )


def is_other_version(entry: Entry, etag: str | None, mtime: float | None) -> bool:
    """Whether a response is of another version than the listed one.

    The ETag decides if both have one, and the time if the listing has no ETag. Headers have no
    fractions of seconds.

    >>> from growcache.store.contract import Entry
    >>> is_other_version(Entry("k", 1, '"a"', 7.0), "a", 8.0)
    False
    >>> is_other_version(Entry("k", 1, None, 7.0), '"a"', 8.0)
    True
    """
    if entry.etag:
        same = etag == entry.etag
        return bool(etag) and not same and bare_etag(entry.etag) != bare_etag(str(etag))
    return entry.mtime is not None and mtime is not None and int(entry.mtime) != int(mtime)


def bare_etag(etag: str) -> str:
    """Return an ETag without quotes and weakness mark, because stores write these differently.

    >>> bare_etag('W/"a"'), bare_etag('"a"'), bare_etag("a")
    ('a', 'a', 'a')
    """
    return etag.removeprefix("W/").strip('"')


def http_seconds(text: str | None) -> float | None:
    try:
        return parsedate_to_datetime(text).timestamp() if text else None
    except (ValueError, TypeError, OverflowError):
        return None


def _range_text(span: tuple[int, int]) -> str:
    return f"{span[0]}-{span[1] - 1}"


logger = logging.getLogger(__name__)


@functools.cache
def _warn_no_ranges(root: str) -> None:
    logger.warning(
        "store %s does not support ranges, so every read of a part fetches the whole object",
        root.rstrip("/"),
    )


class RangeSupport:
    def __init__(self, root: str) -> None:
        self._root = root
        self.has_ranges: bool | None = None  # None: no range was requested yet

    def record(self, *, is_whole: bool) -> None:
        """Record the response to a request for a range.

        A whole object is refused if the server has sent ranges before.
        """
        if is_whole and self.has_ranges:
            raise BrokenReadError(
                f"{self._root}: expected a part of an object, the server sent all of it, although "
                "it serves ranges"
            )
        if is_whole:
            _warn_no_ranges(self._root)
        self.has_ranges = not is_whole
