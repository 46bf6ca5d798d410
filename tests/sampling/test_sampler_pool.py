"""How many groups a sampler works on at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.sampling.sampler_pool import (
    MOST_PERMITS,
    PERMITS_EACH,
    AssignedPermit,
    SamplerSlot,
)


def taken(visits: int, concurrency: int) -> int:
    """Return the number of groups that a sampler takes, by their visits."""
    slot = SamplerSlot(0, ready=True)
    while slot.has_room(concurrency):
        slot.permits[str(len(slot.permits))] = AssignedPermit(visits)
    return len(slot.permits)


@pytest.mark.parametrize(
    ("visits", "groups"), [(1000, 2), (16, 2), (15, 3), (8, 3), (6, 4), (1, 4)]
)
def test_as_many_groups_as_keep_all_reads_in_flight(visits: int, groups: int) -> None:
    assert taken(visits, 16) == groups


@given(st.integers(1, 10**6), st.integers(1, 1000))
def test_while_one_is_written_the_others_are_enough_or_the_most(
    visits: int, concurrency: int
) -> None:
    groups = taken(visits, concurrency)
    assert PERMITS_EACH <= groups <= MOST_PERMITS
    assert groups == MOST_PERMITS or (groups - 1) * visits >= concurrency
    assert groups == PERMITS_EACH or (groups - 2) * visits < concurrency


def test_one_more_for_wishes_where_all_others_wait_for_room() -> None:
    slot = SamplerSlot(
        0, ready=True, permits={"a": AssignedPermit(99), "b": AssignedPermit(99)}
    )
    assert not slot.has_room_for_refetch(16)
    slot.paused |= {"a"}
    assert not slot.has_room_for_refetch(16)
    slot.paused |= {"b"}
    assert slot.has_room_for_refetch(16)
    assert not slot.has_room(16)
    slot.ready = False
    assert not slot.has_room_for_refetch(16)
