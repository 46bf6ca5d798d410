"""Listing the store in a thread of its own, so that sampling starts on the first page."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from growcache.errors import CredentialsError, GrowcacheError, SamplingError
from growcache.remote.sources import Pages
from growcache.remote.store import Entry

PAGES_AHEAD = 4  # pages the loop may lag behind: a listing must not fill the memory

OnPage = Callable[[list[Entry]], None]
OnEnd = Callable[[GrowcacheError | None], None]


class Listing:
    """Feeds the pages of a store to callbacks on the event loop.

    Args:
        source: what is listed.
        on_page: told each page; `more` asks for another one when it is dealt with.
        on_end: told None at the end, or what ended the listing early.
    """

    def __init__(self, source: Pages, on_page: OnPage, on_end: OnEnd) -> None:
        self._source = source
        self._on_page = on_page
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._slots = threading.Semaphore(PAGES_AHEAD)
        self._stopped = False
        threading.Thread(target=self._run, name="listing", daemon=True).start()

    def more(self) -> None:
        """Let the thread go on: a page that it told was dealt with."""
        self._slots.release()

    def adopt(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Go by other ``storage_options`` of the sources from now on."""
        thread = threading.Thread(
            target=self._adopt, args=(options,), name="listing-options", daemon=True
        )
        thread.start()

    def _adopt(self, options: Sequence[Mapping[str, Any]]) -> None:
        with contextlib.suppress(CredentialsError):  # the next request tells, and tries again
            self._source.adopt(options)

    def stop(self) -> None:
        """Let the thread end at its next page; nothing more is told."""
        self._stopped = True
        self._slots.release()

    def _run(self) -> None:
        error: GrowcacheError | None = None
        try:
            for page in self._source.pages():
                self._slots.acquire()
                if self._stopped:
                    return
                self._tell(self._page, page)
        except GrowcacheError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - a client may raise anything; all is told
            error = SamplingError(f"the listing failed: {type(caught).__name__}: {caught}")
        self._tell(self._end, error)

    def _tell(self, callback: Callable[..., None], value: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, value)

    def _page(self, page: list[Entry]) -> None:
        if not self._stopped:
            self._on_page(page)

    def _end(self, error: GrowcacheError | None) -> None:
        if not self._stopped:
            self._on_end(error)
