"""Detects a wait for samples that can never end, because the bound of the cache is too small."""

from __future__ import annotations

from dataclasses import dataclass

from growcache.cache.index.schema import CacheTotals
from growcache.cache.status_model import Status

STAYS_FULL_SECONDS = 3.0  # after which a full cache counts as having its final size
TURNOVERS = 2  # of the cache during a wait, after which it will not hold more


def is_stuck(status: Status) -> bool:
    """Whether the service waits only for this reader, because no other reader holds anything."""
    full = status.state == "full" or (
        status.state == "waiting" and status.waiting_reason == "readers"
    )
    held = any(lease.shards for lease in status.leases) or bool(status.foreign_leases)
    return full and status.samples > 0 and not held


@dataclass
class BoundCheck:
    """Decides from observations of a cache during one wait. Pure."""

    most: int = 0  # usable samples at one time, so far
    _usable: int = -1
    _stuck_since: float = 0.0
    _held: int = 0  # samples of the cache at one time, so far
    _evicted: int | None = None  # samples when shards reached their full size

    def is_endless(
        self, now: float, usable: int, totals: CacheTotals, *, stuck: bool, ramping: bool
    ) -> bool:
        """Return whether the cache will never have more than ``most`` usable samples."""
        if not stuck or usable != self._usable:
            self._usable, self._stuck_since = usable, now
        if ramping or self._evicted is None:
            self._evicted = totals.evicted_samples
        self.most, self._held = max(self.most, usable), max(self._held, totals.samples)
        evicted = totals.evicted_samples - self._evicted
        turned_over = evicted >= TURNOVERS * max(1, self._held)
        return turned_over or now - self._stuck_since > STAYS_FULL_SECONDS
