"""Whether a wait for samples can never end, because the bound of the cache has no room for enough of them."""

from __future__ import annotations

from dataclasses import dataclass

from growcache.cache.index.schema import CacheTotals
from growcache.cache.status_model import Status

STAYS_FULL_SECONDS = 3.0  # that a cache stays full before it counts as all there will be
TURNOVERS = 2  # of the cache during a wait, after which it holds as much as it ever will


def is_stuck(status: Status) -> bool:
    """Whether the service can only go on once this reader reads: no other one holds anything."""
    full = status.state == "full" or (
        status.state == "waiting" and status.waiting_reason == "readers"
    )
    held = any(lease.shards for lease in status.leases) or bool(status.foreign_leases)
    return full and status.samples > 0 and not held


@dataclass
class BoundCheck:
    """Decides from looks at a cache during one wait. Pure."""

    most: int = 0  # usable samples that were found at one time
    _usable: int = -1
    _stuck_since: float = 0.0
    _held: int = 0  # samples of the cache at one time, at most
    _evicted: int | None = None  # samples, when shards reached their full size

    def is_endless(
        self, now: float, usable: int, totals: CacheTotals, *, stuck: bool, ramping: bool
    ) -> bool:
        """Return whether more than ``most`` usable samples will never be found."""
        if not stuck or usable != self._usable:
            self._usable, self._stuck_since = usable, now
        if ramping or self._evicted is None:
            self._evicted = totals.evicted_samples
        self.most, self._held = max(self.most, usable), max(self._held, totals.samples)
        evicted = totals.evicted_samples - self._evicted
        turned_over = evicted >= TURNOVERS * max(1, self._held)
        return turned_over or now - self._stuck_since > STAYS_FULL_SECONDS
