"""A client that is made anew when its store refuses it.

Clients and their libraries keep what they read at their beginning: files of credentials, profiles,
tokens, certificates. So where a store refuses who asks, the whole client is made again, with what
stands there now.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from growcache.errors import ConfigError, CredentialsError, StoreRefusedError
from growcache.remote.evidence import Evidence

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from growcache.remote.store import Backend, Entry, Page
    from growcache.remote.urls import Location

RENEW_SECONDS = 1.0  # at least between two clients


class Client:
    """A `Backend` over one that can be replaced.

    Args:
        make: returns a new one.
        lazily: go on without one where there are no credentials yet; whoever asks is told.

    Attributes:
        generation: how often it was made anew.
        evidence: of what it could read.
        refused: whether the store refused everything the last time.
    """

    def __init__(self, make: Callable[[], Backend], *, lazily: bool = False) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self._tried_at = time.monotonic()
        self.generation = 0
        self.evidence = Evidence()
        self.refused = False
        try:
            self._backend = make()
        except CredentialsError:
            if not lazily:
                raise

    @property
    def identity(self) -> str:
        """See `Backend.identity`."""
        return self.opened().identity

    @property
    def sorted(self) -> bool:
        """See `Backend.sorted`."""
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
        """See `Backend.listing`; the one after a refusal is a new client's."""
        seen = self.generation
        try:
            yield from self.opened().listing(location, after)
        except StoreRefusedError:
            self.renew(seen)
            raise

    def head(self, key: str) -> Entry:
        """See `Backend.head`."""
        return self.opened().head(key)

    def get(self, entry: Entry, start: int, stop: int) -> Awaitable[Buffer]:
        """See `Backend.get`."""
        return (self._backend or self.opened()).get(entry, start, stop)

    async def close(self) -> None:
        """See `Backend.close`."""
        if self._backend is not None:
            await self._backend.close()

    def renew(self, seen: int, *, at_once: bool = False) -> bool:
        """Make the client anew, at most once a second; return whether there is a newer one. Blocks.

        Args:
            seen: the generation that was refused.
            at_once: what it is made of is known to have changed.

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
