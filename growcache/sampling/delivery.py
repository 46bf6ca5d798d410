"""Move encoded shards into the folder ``incoming/`` of the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from growcache.cache.files import CacheLayout
from growcache.cache.incoming import discard_incoming, exceeds_page_cache, write_incoming
from growcache.cache.locks import FileLock
from growcache.cache.sidecar import Sidecar
from growcache.cache.system import memory_bytes
from growcache.config import CacheConfig
from growcache.sampling.fill import EncodedShard

LOCK_SECONDS = 30.0


class Delivery(Protocol):
    async def deliver(self, permit_id: str, shards: Sequence[EncodedShard]) -> object:
        """Wait until the shards are on the cache's disk.

        After an OSError nothing of them is left.
        """


class IncomingFiles:
    """Writes shards of permits, for a process on the cache's machine."""

    def __init__(self, cache: CacheConfig) -> None:
        self._layout = CacheLayout(cache.path)
        # Held while this process lives. A new supervisor removes litter only after all are
        # gone.
        self._lock = FileLock.acquire(
            self._layout.samplers_lock, shared=True, seconds=LOCK_SECONDS
        )
        self._direct = exceeds_page_cache(int(cache.max_bytes), memory_bytes())

    async def deliver(self, permit_id: str, shards: Sequence[EncodedShard]) -> list[Sidecar]:
        """Write the shards and return the complete sidecars."""
        try:
            return [
                await asyncio.to_thread(
                    write_incoming,
                    self._layout,
                    permit_id,
                    shard.sidecar,
                    shard.files,
                    direct=self._direct,
                )
                for shard in shards
            ]
        except OSError:
            numbers = [shard.sidecar.number for shard in shards]
            discard_incoming(self._layout, permit_id, numbers)
            raise
