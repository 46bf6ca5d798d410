"""The purge lists that several machines share (``source.purged``).

Their objects are added to the cache's own list, which the supervisor applies. Nothing is drawn
before each list was read once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from growcache.cache.files import CacheLayout
from growcache.cache.purge_list import append_to_list, named_objects
from growcache.cache.sidecar import version_of
from growcache.config_source import SourceConfig
from growcache.errors import ConfigError, GrowcacheError, SamplingError, StoreError
from growcache.store.contract import Entry, Store
from growcache.store.opening import open_store
from growcache.store.retries import RetryPolicy
from growcache.store.urls import LOCAL_SCHEMES, parse_url, redact

if TYPE_CHECKING:
    from typing_extensions import Buffer

AGAIN_SECONDS = 60.0

OnRead = Callable[[GrowcacheError | None], None]


class SharedPurges:
    """Reads the lists in its own thread, at once and then every minute.

    ``on_read`` is called on the event loop after the lists were read, with an error if reading
    failed.
    """

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        layout: CacheLayout,
        timeout_seconds: float,
        on_read: OnRead,
        on_retry: Callable[[BaseException], None],
    ) -> None:
        self.sources = sources
        self._layout = layout
        self._retries = RetryPolicy(timeout_seconds, self._retried, lambda error: True)
        self._timeout_seconds = timeout_seconds
        self._on_read = on_read
        self._on_retry = on_retry
        self._versions: dict[str, str] = {}
        self._stopped = threading.Event()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, name="purge lists", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            found: GrowcacheError | None = None
            try:
                self._retries.run(self._read_all)
            except GrowcacheError as error:
                found = error
            except Exception as error:  # noqa: BLE001 - a client may raise anything
                found = SamplingError(
                    f"source.purged: {type(error).__name__}: {error}", code="GC219"
                )
            self._call_soon(lambda found=found: self._on_read(found))  # type: ignore[misc]
            self._stopped.wait(AGAIN_SECONDS)

    def _call_soon(self, callback: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)

    def _retried(self, error: BaseException) -> None:
        self._call_soon(lambda: self._on_retry(error))

    def _read_all(self) -> None:
        """Read with the current sources, because their options may have changed."""
        for source in self.sources:
            if source.purged is not None:
                try:
                    self._read(source, source.purged)
                except StoreError as error:
                    named = type(error)(f"source.purged: {error}", code=error.code)
                    named.exit_code = error.exit_code
                    raise named from None
                except ConfigError as error:
                    shown = redact(source.purged)
                    raise ConfigError(f"source.purged {shown}: {error}", code="GC219") from None

    def _read(self, source: SourceConfig, url: str) -> None:
        store, entry = find_list(source, url, self._timeout_seconds)
        version = version_of(entry.etag, entry.size, entry.mtime)
        data = asyncio.run(_contents(store, entry, known=version == self._versions.get(url)))
        if data is not None:
            lines = bytes(data).decode("utf-8", "surrogateescape").split("\n")
            append_to_list(self._layout, named_objects(lines, int(time.time())))
            self._versions[url] = version


def find_list(source: SourceConfig, url: str, timeout_seconds: float) -> tuple[Store, Entry]:
    """Return the only object that a URL names, and its store. Blocks."""
    client = "auto" if parse_url(url).scheme in LOCAL_SCHEMES else source.client
    own = source.model_copy(update={"url": (url,), "fields": {}, "client": client})
    store = open_store(own, timeout_seconds=timeout_seconds)
    listed = [entry for page in store.pages() for entry in page]
    if len(listed) != 1:
        raise ConfigError(f"expected one purge list there, found {len(listed)}", code="GC219")
    return store, listed[0]


async def _contents(store: Store, entry: Entry, *, known: bool) -> Buffer | None:
    try:
        return None if known else await store.read(entry)
    finally:
        await store.close()
