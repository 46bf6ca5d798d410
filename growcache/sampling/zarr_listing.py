"""The listing of a Zarr source: the store's listing, and then the chunks that the store lacks."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from growcache.config_source import SourceConfig
from growcache.formats.zarr_unwritten import ChunkCensus
from growcache.store.contract import Entry, StoredObject, paginate
from growcache.store.store import RemoteStore
from growcache.usercode import short_key

_log = logging.getLogger(__name__)


class ZarrListing:
    """A listing with unwritten chunks at its end, in an order that depends only on the listing."""

    def __init__(self, store: RemoteStore, census: ChunkCensus) -> None:
        self._store = store
        self._census = census

    @property
    def source(self) -> SourceConfig:
        return self._store.source

    @property
    def left_out(self) -> Counter[str]:
        return self._store.left_out

    def set_options(self, options: Mapping[str, Any]) -> None:
        self._store.set_options(options)

    def pages(self) -> Iterator[list[Entry]]:
        listed = unwritten = 0
        with asyncio.Runner() as runner:
            for page in self._store.pages():
                yield page  # first, so that samplers can start with it
                listed += len(page)
                runner.run(
                    self._census.note(page, lambda entry: StoredObject(self._store, entry))
                )
        for page in paginate(filter(self._store.is_named_by_url, self._census.unwritten())):
            unwritten += len(page)
            if page:
                yield page
        self._report(unwritten, listed)

    def _report(self, unwritten: int, listed: int) -> None:
        if unwritten:
            _log.warning(
                "listing has %d chunks that were never written, and %d objects. Unwritten "
                "chunks are drawn as fill values (unwritten: skip in source.options leaves "
                "them out)",
                unwritten,
                listed,
            )
        for root, chunks in islice(self._census.left_out.items(), 1):
            _log.warning(
                "listing leaves out the unwritten chunks of %d arrays that claim too many or "
                "too large ones: %s has %d",
                len(self._census.left_out),
                short_key(root),
                chunks,
            )
