"""A cache in virtual time for `SpaceAllocator` and `WriteQueue`, without files.

It has shards, one job's uses of them, and the leases of that job. So a simulation evicts,
retires ahead and waits by the service's own code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from growcache.cache import space
from growcache.cache.eviction_policy import Candidate
from growcache.cache.files import whole_blocks
from growcache.cache.incoming import reserved_bytes
from growcache.config import CacheConfig
from growcache.loading.report import UseSums


class ShardBytes(NamedTuple):
    """Bytes of shards on disk, by their samples."""

    record: float  # bytes of a sample in the shard
    sidecar: float  # bytes of the sidecar per sample

    def _files(self, samples: int) -> tuple[int, int]:
        return int(samples * self.record), int(samples * self.sidecar)

    def allocated(self, samples: int) -> int:
        return sum(map(whole_blocks, self._files(samples)))

    def reserved(self, samples: int) -> int:
        """Return the bytes that a sampler requests."""
        return reserved_bytes(self._files(samples))


class Shard(NamedTuple):
    number: int
    seq: int
    samples: int
    allocated: int


@dataclass(eq=False, slots=True)
class SimulatedLease:
    name: str
    numbers: frozenset[int]
    open: bool = True
    job: str = "default"
    created: float = 0.0
    pid: int = 0
    host: str = ""

    @property
    def holds(self) -> bool:
        return self.open and bool(self.numbers)


class Totals(NamedTuple):
    """The sums that eviction and the write queue need."""

    samples: int
    drawn: int
    drawn_parts: int
    drawn_shards: int
    retired_shards: int
    refetched_shards: int = 0


@dataclass(slots=True)
class _NoRefetches:
    """No shard is refetched, made up, set aside, kept for dead readers, or held by others."""

    wanted: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    foreign: tuple[()] = ()
    pending: dict[int, str] = field(default_factory=dict)

    def kept_for(self) -> tuple[()]:
        return ()

    def of(self, _: Iterable[int]) -> tuple[()]:
        return ()

    def has_open_below(self, _: int) -> bool:
        return False


class SimulatedSpace:
    """The space account, of which only the shards change."""

    listing_ahead = 0

    def __init__(self, max_bytes: int, catalog_bytes: int) -> None:
        self.max_bytes = self.in_force = max_bytes
        self.budget = space.fixed_budget(max_bytes)
        self.catalog_bytes = catalog_bytes
        self.shard_bytes = 0
        self._promised: dict[str, int] = {}
        self.reserved = 0

    def left(self) -> int:
        used = self.shard_bytes + self.budget.total + self.catalog_bytes
        return self.max_bytes - used - self.reserved

    def reserve(self, permit: str, nbytes: int) -> bool:
        if nbytes > self.left():
            return False
        self._promised[permit] = nbytes
        self.reserved += nbytes
        return True

    def release(self, permit: str) -> None:
        self.reserved -= self._promised.pop(permit, 0)


class SimulatedCache:
    """A simulated cache with the names of `Cache`."""

    older: tuple[()] = ()
    returning_samples = 0

    def __init__(self, config: CacheConfig, sizes: ShardBytes, catalog_bytes: int) -> None:
        self.space = SimulatedSpace(int(config.max_bytes), catalog_bytes)
        self.refetch_queue = self.lease_table = _NoRefetches()
        self._sizes = sizes
        self.live: dict[int, Shard] = {}
        self.retired: dict[int, Shard] = {}
        self.uses: dict[int, int] = {}
        self.leases: list[SimulatedLease] = []
        self.live_samples = self.drawn = self.drawn_parts = self.drawn_shards = 0
        self.evicted_samples = 0
        self._gone = UseSums()
        self._order = itertools.count()
        self._candidates: list[Candidate] | None = None

    @property
    def max_bytes(self) -> int:
        return self.space.max_bytes

    @property
    def bytes_used(self) -> int:
        return self.max_bytes - self.space.left() - self.space.reserved

    def totals(self) -> Totals:
        drawn = (self.drawn, self.drawn_parts, self.drawn_shards)
        return Totals(self.live_samples, *drawn, len(self.retired))

    # --- for the allocator ---

    def bytes_left(self) -> int:
        return self.space.left()

    def bytes_left_for_shards(self) -> int:
        return self.space.left()

    def reserve(self, permit: str, nbytes: int) -> bool:
        return self.space.reserve(permit, nbytes)

    def disk_holds_promises(self) -> bool:
        return True

    def disk_holds_a_lease(self) -> bool:
        return True

    @property
    def clearing_bytes(self) -> int:
        return sum(shard.allocated for shard in self.retired.values())

    def candidates(self) -> list[Candidate]:
        if self._candidates is None:
            held, uses = self._held(), self.uses
            self._candidates = [
                Candidate(n, s.seq, s.allocated, uses[n], uses[n], n in held)
                for n, s in self.live.items()
            ]
        return self._candidates

    def _held(self) -> frozenset[int]:
        return frozenset[int]().union(*(lease.numbers for lease in self.leases))

    # --- changes ---

    def commit(self, permit: str, numbers: Iterable[int], samples: int, parts: int) -> int:
        """Make shards live that share the samples of a group; return their bytes."""
        self.space.release(permit)
        numbers = list(numbers)
        cuts = [samples * i // len(numbers) for i in range(len(numbers) + 1)]
        nbytes = 0
        for number, (start, stop) in zip(numbers, itertools.pairwise(cuts), strict=True):
            allocated = self._sizes.allocated(stop - start)
            self.live[number] = Shard(number, next(self._order), stop - start, allocated)
            self.uses[number] = 0
            nbytes += allocated
        self.space.shard_bytes += nbytes
        self.live_samples += samples
        self.drawn += samples
        self.drawn_parts += parts
        self.drawn_shards += len(numbers)
        self._candidates = None
        return nbytes

    def retire(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            shard = self.live.pop(number)
            self.retired[number] = shard
            self.live_samples -= shard.samples
            self.evicted_samples += shard.samples
        self._candidates = None

    def evict(self, numbers: Iterable[int]) -> None:
        self.retire(numbers)
        self.delete_unheld()

    def delete_unheld(self) -> None:
        held = self._held()
        gone = [shard for number, shard in self.retired.items() if number not in held]
        for shard in gone:
            del self.retired[shard.number]
            self.space.shard_bytes -= shard.allocated
        self._gone.add(
            [self.uses.pop(shard.number) * shard.samples for shard in gone],
            [shard.samples for shard in gone],
        )

    def take_lease(self, numbers: Iterable[int], name: str) -> SimulatedLease:
        lease = SimulatedLease(name, frozenset(numbers))
        self.leases.append(lease)
        self._candidates = None
        return lease

    def close_lease(self, lease: SimulatedLease) -> None:
        lease.open = False
        self.leases.remove(lease)
        self._candidates = None
        self.delete_unheld()

    def use(self, numbers: Iterable[int], times: int = 1) -> None:
        for number in numbers:
            if number in self.uses:
                self.uses[number] += times
        self._candidates = None

    def effective_samples(self) -> float:
        """Return (Σu)² / Σu² over all samples that arrived; see `Report.ess_samples`."""
        sums = UseSums(self._gone.once, self._gone.squares, self._gone.most)
        there = [*self.live.values(), *self.retired.values()]
        sums.add([self.uses[s.number] * s.samples for s in there], [s.samples for s in there])
        return sums.once**2 / sums.squares if sums.squares else 0.0
