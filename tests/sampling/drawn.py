"""Editions for tests of the draws, and the same draws by the slowest way there is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from growcache.sampling.draws import Draws
from growcache.sampling.orders import Ints, PartOrder, Permutation, TurnOrders
from growcache.sampling.sizing import Sizing
from growcache.sampling.stratum_draws import DrawnEdition, EditionStrata, Mask
from growcache.seeding import derive_seed

Owned = Callable[[Ints], Mask]


def starts_of(parts: Sequence[int]) -> Ints:
    """Return the first part of every object, and the total."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(parts, np.int64))])


def edition(
    number: int,
    parts: int | Ints,
    first_group: int = 0,
    *,
    owned: Owned | None = None,
    lanes: str | None = None,
) -> DrawnEdition:
    """Return an edition of one stratum: a number of parts, or objects with these starts."""
    starts = np.arange(parts + 1) if isinstance(parts, int) else parts
    own = starts[-1:] if owned is None else np.array([owned(np.arange(starts[-1])).sum()])
    mask = None if owned is None else lambda _, local: owned(local)
    lanes = "some" if owned is not None and lanes is None else lanes
    strata = EditionStrata(
        ("",), starts[-1:], own, own, lambda _, local: local, lambda _: starts, mask
    )
    return DrawnEdition(number, first_group, strata, lanes)


def drawn_by(seed: int, sizing: Sizing, editions: Sequence[DrawnEdition], **more: Any) -> Draws:
    """Return draws from these editions."""
    draws = Draws(seed, sizing, **more)
    for one in editions:
        draws.add(one)
    return draws


def slowly(
    seed: int, sizing: Sizing, editions: Sequence[DrawnEdition], groups: int, *, turns: bool
) -> list[tuple[int, int, list[int]]]:
    """Return (edition, round, parts) of the first groups, by one set and a plain walk."""
    orders, found = TurnOrders(seed), list[tuple[int, int, list[int]]]()
    last = {one.first_group: one for one in editions}  # of several at one group
    drawn: set[int] = set()
    round_, position, current = 0, 0, last[0]
    permuted = current  # the edition whose orders are followed: not one that adds nothing

    def begin(before: tuple[PartOrder, int] | None) -> PartOrder:
        if turns:
            return orders.make(permuted.number, permuted.strata.starts(0), round_, before)
        size = int(permuted.strata.sizes[0])
        return Permutation(size, derive_seed(seed, "order", permuted.number, round_))

    def waiting() -> set[int]:
        parts = np.arange(current.strata.sizes[0])
        return set(parts[current.strata.mask(0, parts)].tolist()) - drawn

    order = begin(None)
    for group in range(groups):
        if group and group in last:
            old, current = current, last[group]
            if (old.lanes, *old.strata.sizes) != (current.lanes, *current.strata.sizes):
                permuted = current
                order, position = begin((order, position)), 0
        if not waiting():
            drawn, round_, position = set(), round_ + 1, 0
            order = begin(None)
        count, parts = sizing.group_parts(group), list[int]()
        left = waiting()
        while left and len(parts) < count:
            part = int(order.forward(np.array([position]))[0])
            position += 1
            if part in left:
                left.remove(part)
                parts.append(part)
        drawn |= set(parts)
        found.append((current.number, round_, parts))
    return found
