"""Choose the shards to evict: which may go, in which order, and how many. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from growcache.seeding import derive_seed

RETIRED_SHARE = 0.2


class Candidate(NamedTuple):
    """A live shard, as the policies see it. A tuple, because thousands are made."""

    number: int
    seq: int  # order of commits, which is the order of age
    allocated: int  # bytes that its deletion would free
    uses: int  # by all jobs together
    min_job_uses: int  # fewest uses by a live job; without live jobs, the most by any job
    leased: bool  # whether a reader holds it


@dataclass(frozen=True, slots=True)
class EvictionChoice:
    evict: tuple[int, ...]
    short_bytes: int  # still missing after that


Order = Callable[[Sequence[Candidate], int], list[Candidate]]


def _fifo(candidates: Sequence[Candidate], seed: int) -> list[Candidate]:
    return sorted(candidates, key=lambda c: c.seq)


def _random(candidates: Sequence[Candidate], seed: int) -> list[Candidate]:
    return sorted(candidates, key=lambda c: derive_seed(seed, "evict", c.number))


def _most_used(candidates: Sequence[Candidate], seed: int) -> list[Candidate]:
    return sorted(candidates, key=lambda c: (-c.uses, c.seq))


def _none(candidates: Sequence[Candidate], seed: int) -> list[Candidate]:
    return []


ORDERS: dict[str, Order] = {
    "fifo": _fifo,
    "most_used": _most_used,
    "none": _none,
    "random": _random,
}


def choose_evictions(
    policy: str,
    candidates: Sequence[Candidate],
    need_bytes: int,
    min_uses: int,
    seed: int = 0,
) -> EvictionChoice:
    """Return the first shards in the policy's order that may go and together free ``need_bytes``.

    A shard with fewer than ``min_uses`` uses by some live job stays. ``seed`` must differ
    between decisions, because ``random`` with a constant order would always evict the newest
    shard.
    """
    ripe = [c for c in candidates if c.min_job_uses >= min_uses and not c.leased]
    return _take(ORDERS[policy](ripe, seed), need_bytes)


def choose_early_retirements(
    policy: str,
    candidates: Sequence[Candidate],
    max_bytes: int,
    retired_bytes: int,
    min_uses: int,
    seed: int = 0,
) -> tuple[int, ...]:
    """Return the shards to retire although readers hold them.

    New snapshots leave out retired shards, so these become free as epochs end. Without this, a
    cache whose readers always hold everything would never be refreshed. At most a fifth of
    ``max_bytes``, but at least one shard, is retired at a time.
    """
    ripe = [c for c in candidates if c.min_job_uses >= min_uses]
    budget = max_bytes * RETIRED_SHARE - retired_bytes
    chosen: list[int] = []
    for candidate in ORDERS[policy](ripe, seed):
        budget -= candidate.allocated
        if budget < 0 and (chosen or retired_bytes):
            break
        chosen.append(candidate.number)
    return tuple(chosen)


def choose_for_lower_bound(
    policy: str,
    candidates: Sequence[Candidate],
    need_bytes: int,
    retired_bytes: int,
    min_uses: int,
    seed: int = 0,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shards to evict and to retire after the bound was lowered.

    The user asked for less, so ``min_uses`` only decides the order, and as much as needed is
    retired at once. With policy ``none`` nothing is evicted. ``retired_bytes`` excludes shards
    that are held for a dead reader.
    """
    ripe = choose_evictions(policy, candidates, need_bytes, min_uses, seed)
    left = [c for c in candidates if c.number not in set(ripe.evict)]
    rest = choose_evictions(policy, left, ripe.short_bytes, 0, seed)
    leased = [c for c in left if c.leased]
    ahead = _take(ORDERS[policy](leased, seed), rest.short_bytes - retired_bytes)
    return (*ripe.evict, *rest.evict), ahead.evict


def _take(ordered: Iterable[Candidate], need_bytes: int) -> EvictionChoice:
    chosen: list[int] = []
    for candidate in ordered:
        if need_bytes <= 0:
            break
        chosen.append(candidate.number)
        need_bytes -= candidate.allocated
    return EvictionChoice(tuple(chosen), max(0, need_bytes))
