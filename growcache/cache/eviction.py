"""Which shards leave the cache: what may go, in which order, and how much is enough. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from growcache.seeding import derive_seed

RETIRED_SHARE = 0.2


class Candidate(NamedTuple):
    """A live shard, as the policies see it (a tuple, for they are made by the thousand).

    Attributes:
        number: of the shard.
        seq: order of commit, which is the order of age.
        allocated: bytes that its end would free.
        uses: how often it was read, all jobs together.
        min_job_uses: how often the live job that used it least did; where no job lives,
            how often the job did that used it most.
        leased: whether a reader holds it.
    """

    number: int
    seq: int
    allocated: int
    uses: int
    min_job_uses: int
    leased: bool


@dataclass(frozen=True, slots=True)
class EvictionChoice:
    """What to evict; ``short_bytes`` are still missing when that is done."""

    evict: tuple[int, ...]
    short_bytes: int


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


def choose(
    policy: str,
    candidates: Sequence[Candidate],
    need_bytes: int,
    min_uses: int,
    seed: int = 0,
) -> EvictionChoice:
    """Return the first shards of the policy that may go and free ``need_bytes``.

    Args:
        policy: a key of `ORDERS`.
        candidates: the live shards.
        need_bytes: to be freed; 0 or less needs nothing.
        min_uses: a shard used less by some live job stays.
        seed: must differ from decision to decision. With one order for ever, ``random``
            would evict what came last instead of anything.
    """
    ripe = [c for c in candidates if c.min_job_uses >= min_uses and not c.leased]
    return _take(ORDERS[policy](ripe, seed), need_bytes)


def retire_ahead(
    policy: str,
    candidates: Sequence[Candidate],
    max_bytes: int,
    retired_bytes: int,
    min_uses: int,
    seed: int = 0,
) -> tuple[int, ...]:
    """Return the shards to retire although readers hold them.

    New snapshots leave retired shards out, so they become free as epochs end; else a
    cache whose readers always hold everything would never be refreshed.

    Args:
        policy: a key of `ORDERS`.
        candidates: the live shards.
        max_bytes: the bound; at most a fifth of it is retired at a time, but always at
            least one shard.
        retired_bytes: what is retired and not yet deleted.
        min_uses: as for `choose`.
        seed: as for `choose`.
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


def shrink(
    policy: str,
    candidates: Sequence[Candidate],
    need_bytes: int,
    retired_bytes: int,
    min_uses: int,
    seed: int = 0,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shards to evict and those to retire, because the bound was lowered.

    The user asked for less, so ``min_uses`` only says which go first, and as much is retired
    as is needed: it goes as readers let go. With ``none`` nothing ever goes.

    Args:
        policy: a key of `ORDERS`.
        candidates: the live shards.
        need_bytes: to be freed.
        retired_bytes: of that, what is retired already, and not kept for a reader who died.
        min_uses: as for `choose`.
        seed: as for `choose`.
    """
    ripe = choose(policy, candidates, need_bytes, min_uses, seed)
    left = [c for c in candidates if c.number not in set(ripe.evict)]
    rest = choose(policy, left, ripe.short_bytes, 0, seed)
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
