"""Keys that obstore cannot name: they are legal in S3, so another client takes its place."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from growcache.remote.answers import UnnameableKeyError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from growcache.remote.store import Backend, Entry, Page
    from growcache.remote.urls import Location

logger = logging.getLogger(__name__)

_ODD_COMPONENTS = frozenset({"", ".", ".."})
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def is_odd(key: str) -> bool:
    """Whether obstore takes the key for no path.

    >>> is_odd("a//b"), is_odd("a/../b"), is_odd("a/..b/%2F#?.npy")
    (True, True, False)
    """
    if not _ODD_COMPONENTS.isdisjoint(key.split("/")):
        return True
    return not key.isprintable() and _CONTROL.search(key) is not None


class OddKeys:
    """A `Backend` over obstore's, and over another one for odd keys, made when one comes.

    What obstore's listing cannot show is that a key begins or ends with a slash: such an
    object is a hole.
    """

    def __init__(self, usual: Backend, opened: Callable[[], Backend]) -> None:
        self.identity = usual.identity
        self.sorted = usual.sorted
        self._usual = usual
        self._open = opened
        self._made: Backend | None = None

    def listing(self, location: Location, after: str | None) -> Iterator[Page]:
        """See `Backend.listing`; from the first odd key on it is the other one's."""
        last = after
        if self._made is None:
            try:
                for page in self._usual.listing(location, after):
                    last = page[-1].key if page else last
                    yield page
            except UnnameableKeyError as error:
                logger.info("%s; the rest of the listing is fsspec's", error)
            else:
                return
        yield from self._other.listing(location, last)

    def head(self, key: str) -> Entry:
        """See `Backend.head`."""
        return self._for(key).head(key)

    def get(self, entry: Entry, start: int, stop: int) -> Awaitable[Buffer]:
        """See `Backend.get`."""
        return self._for(entry.key).get(entry, start, stop)

    async def close(self) -> None:
        """See `Backend.close`."""
        await self._usual.close()
        if self._made is not None:
            await self._made.close()

    @property
    def _other(self) -> Backend:
        if self._made is None:
            self._made = self._open()
        return self._made

    def _for(self, key: str) -> Backend:
        return self._other if is_odd(key) else self._usual
