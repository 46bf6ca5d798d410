"""How many groups a sampler works on at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.sampling.rate_limiter import reads_wanted
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


@pytest.mark.mutant(
    10,
    "growcache.sampling.sampler_pool:SamplerSlot.has_room",
    "usual or self._reads_too_little(concurrency, memory_bytes)",
    "usual",
)
def test_slow_reads_of_older_groups_do_not_hold_up_those_of_others() -> None:
    slow = AssignedPermit(64, done=60, nbytes=10)
    slot = SamplerSlot(0, ready=True, permits={"a": slow, "b": replace(slow)})
    assert slot.has_room(16, memory_bytes=100)
    assert not SamplerSlot(0, permits=slot.permits).has_room(16, memory_bytes=100)
    slot.permits["c"] = AssignedPermit(64, nbytes=10)
    assert not slot.has_room(16, memory_bytes=100)
    slot.permits["c"].done = 64 - reads_wanted(16) + 8  # all three have as many left as wanted
    assert slot.has_room(16, memory_bytes=100)


@pytest.mark.mutant(
    10,
    "growcache.sampling.sampler_pool:SamplerSlot._reads_too_little",
    "sum(work.nbytes for work in permits) + largest >= memory_bytes",
    "False",
)
def test_groups_whose_slow_reads_are_awaited_keep_within_the_memory() -> None:
    slot = SamplerSlot(0, ready=True)
    while slot.has_room(16, memory_bytes=100):
        slot.permits[str(len(slot.permits))] = AssignedPermit(64, done=63, nbytes=10)
    assert sum(work.nbytes for work in slot.permits.values()) == 90


def test_no_further_group_while_two_are_written() -> None:
    slow, read = AssignedPermit(64, done=63, nbytes=1), AssignedPermit(64, done=64, nbytes=1)
    slot = SamplerSlot(0, ready=True, permits={"a": read, "b": slow})
    assert slot.has_room(16, memory_bytes=100)
    slot.permits["c"] = replace(read)
    assert not slot.has_room(16, memory_bytes=100)


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
