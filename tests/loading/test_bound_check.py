"""A wait is given up where the bound of the cache has no room for what is waited for, and only there."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.cache.index.schema import CacheTotals
from growcache.cache.status_model import ForeignLeaseStatus, LeaseStatus, Status
from growcache.loading.bound_check import STAYS_FULL_SECONDS, TURNOVERS, BoundCheck, is_stuck

FULL = Status(state="full", waiting_reason="readers", samples=10)
LEASE = LeaseStatus("a", "default", "host", 1, "train", 0.0, shards=3, open=True)
FOREIGN = ForeignLeaseStatus("b", "newer", 0, None, held=None, advice="")


@pytest.mark.parametrize(
    ("status", "stuck"),
    [
        (FULL, True),
        (replace(FULL, state="waiting"), True),
        (replace(FULL, state="waiting", waiting_reason="store"), False),
        (replace(FULL, state="running"), False),
        (replace(FULL, samples=0), False),
        (replace(FULL, leases=[LEASE]), False),
        (replace(FULL, leases=[replace(LEASE, shards=0)]), True),
        (replace(FULL, foreign_leases=[FOREIGN]), False),
    ],
)
def test_a_service_is_stuck_where_only_the_waiting_reader_can_help(
    status: Status, stuck: bool
) -> None:
    assert is_stuck(status) == stuck


Look = tuple[float, int, int, int]  # seconds, samples: usable ones, all that are held, evicted


def answers(*looks: Look, stuck: bool = True, ramping: bool = False) -> list[bool]:
    check = BoundCheck()
    return [
        check.is_endless(
            *(at, usable, CacheTotals(samples=held, evicted_samples=evicted)),
            stuck=stuck,
            ramping=ramping,
        )
        for at, usable, held, evicted in looks
    ]


def test_a_cache_that_stays_full_ends_the_wait() -> None:
    late = STAYS_FULL_SECONDS + 1
    assert answers((0, 5, 9, 0), (late, 5, 9, 0)) == [False, True]
    assert answers((0, 5, 9, 0), (late, 6, 9, 0), (late + 1, 6, 9, 0)) == [False] * 3
    assert answers((0, 5, 9, 0), (late, 5, 9, 0), stuck=False) == [False] * 2


def test_a_cache_that_turned_over_ends_the_wait_once_shards_are_large() -> None:
    looks = [(0.0, 0, 9, 100), (1.0, 3, 9, 101), (2.0, 0, 5, 100 + 9 * TURNOVERS)]
    assert answers(*looks, stuck=False) == [False, False, True]
    assert answers(*looks, stuck=False, ramping=True) == [False] * 3


@given(st.lists(st.integers(1, 50), max_size=50))
def test_a_cache_that_only_grows_is_waited_for(steps: list[int]) -> None:
    sums = accumulate(steps)
    assert not any(answers(*((10.0 * at, n, n, 0) for at, n in enumerate(sums))))
