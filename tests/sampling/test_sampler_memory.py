"""What a group keeps does not depend on the order in which its visits end."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.sampling.sampler_memory import (
    GroupLimits,
    MemoryBudget,
    VisitResult,
    YieldEstimate,
    admit,
)

LIMITS = GroupLimits(group_bytes=100, sample_bytes=60, most_bytes=100)
CUT = GroupLimits(group_bytes=100, sample_bytes=1000, most_bytes=200)


def visited(*sizes: int) -> VisitResult:
    samples = [{"x": np.zeros(size, "|u1")} for size in sizes]
    return VisitResult(samples, [(i, i + 1) for i in range(len(sizes))])


def kept(result: VisitResult) -> list[int]:
    return [sample["x"].nbytes for sample in result.samples]


def test_what_fits_is_kept_and_what_does_not_is_a_hole() -> None:
    first, second = visited(50, 61, 10), visited(50, 40)
    assert admit(first, first.nbytes, 0, LIMITS) == 60
    assert (kept(first), first.origins) == ([50, 10], [(0, 1), (2, 3)])
    assert first.hole is not None
    assert "61 bytes is larger than the 60" in first.hole
    assert admit(second, second.nbytes, 60, LIMITS) == 100
    assert kept(second) == [40]
    assert second.hole is not None
    assert "does not fit into the 100" in second.hole


@given(st.lists(st.lists(st.integers(0, 70), max_size=3), max_size=8), st.randoms())
def test_any_order_keeps_the_same(sizes: list[list[int]], rng: random.Random) -> None:
    def run(order: list[int]) -> list[tuple[list[int], str | None]]:
        budget = MemoryBudget(len(sizes), LIMITS)
        for place in order:
            budget.put(place, visited(*sizes[place]))
        return [(kept(result), result.hole) for result in budget.results()]

    shuffled = list(range(len(sizes)))
    rng.shuffle(shuffled)
    found = run(shuffled)
    assert found == run(list(range(len(sizes))))
    assert sum(sum(mine) for mine, _ in found) <= LIMITS.group_bytes


def test_samples_of_one_size_are_never_refused() -> None:
    budget = MemoryBudget(2, None)
    budget.put(1, visited(1000))
    budget.put(0, visited(1000))
    assert [kept(result) for result in budget.results()] == [[1000], [1000]]


Run = list[tuple[list[int], bool, bool]]  # sizes, left out, a hole


def run(
    sizes: list[list[int]], order: list[int], *, defers: bool, without: frozenset[int]
) -> Run:
    budget = MemoryBudget(len(sizes), CUT, defers=defers)
    for place in order:
        out = place in without
        budget.put(place, VisitResult(left_out=True) if out else visited(*sizes[place]))
    return [(kept(r), r.left_out, r.hole is not None) for r in budget.results()]


many = st.lists(st.lists(st.integers(0, 70) | st.just(150), max_size=3), max_size=8)


@given(many, st.randoms())
def test_a_group_is_cut_alike_in_any_order_and_made_alike_without_what_was_left_out(
    sizes: list[list[int]], rng: random.Random
) -> None:
    shuffled = list(range(len(sizes)))
    rng.shuffle(shuffled)
    nothing: frozenset[int] = frozenset()
    first = run(sizes, shuffled, defers=True, without=nothing)
    assert first == run(sizes, list(range(len(sizes))), defers=True, without=nothing)
    left_out = frozenset(place for place, (_, out, _) in enumerate(first) if out)
    assert left_out == frozenset(range(len(sizes) - len(left_out), len(sizes)))
    assert first == run(sizes, shuffled, defers=False, without=left_out)
    started = [place for place, of in enumerate(sizes) if sum(of)]
    assert not started or started[0] not in left_out  # so makeup groups come to an end
    total = sum(sum(mine) for mine, _, _ in first)
    assert total <= max(100, sum(sizes[started[0]]) if started else 0)
    assert not any(hole for mine, _, hole in first if sum(mine) <= 100 and not hole)


def test_a_single_visit_may_take_more_than_its_group() -> None:
    nothing: frozenset[int] = frozenset()
    found = run([[150], [1]], [0, 1], defers=True, without=nothing)
    assert found == [([150], False, False), ([], True, False)]
    found = run([[150, 60], [1]], [0, 1], defers=True, without=nothing)
    assert found == [([150], False, True), ([], True, False)]  # what no shard can hold


def test_visits_wait_for_one_that_may_fill_the_group() -> None:
    async def follow() -> None:
        yields = YieldEstimate()
        budget = MemoryBudget(4, CUT, defers=True, yields=yields)
        assert await budget.begin(0, 1000.0)  # nothing is known of what bytes bring
        assert await budget.begin(1, 1000.0)
        budget.put(0, visited(60))
        waiting = asyncio.create_task(budget.begin(2, 500.0))
        await asyncio.sleep(0)
        assert not waiting.done()  # 60 are there, and 90 may come
        budget.put(1, visited(10))
        assert await asyncio.wait_for(waiting, 1)
        budget.put(2, visited(50))
        assert not await budget.begin(3, 1.0)  # the group is full
        assert [r.left_out for r in budget.results()] == [False, False, True, True]
        assert yields.expected(2500.0) == 120.0

    asyncio.run(follow())


def test_of_samples_of_one_size_no_visit_waits() -> None:
    async def follow() -> None:
        budget = MemoryBudget(2, None)
        assert await budget.begin(0, 1e12)
        assert await budget.begin(1, 1e12)

    asyncio.run(follow())


@pytest.mark.parametrize(("cache_format", "least"), [("tfrecord", 100), ("npy", 1000)])
def test_shards_of_samples_that_differ_are_sized_by_their_mean(
    cache_format: str, least: int
) -> None:
    from growcache.config import Config
    from growcache.formats.base import Measure
    from growcache.sampling.sizing import (
        GROUP_BYTES,
        MOST_GROUP_BYTES,
        SHARD_BYTES,
        MeasuredSource,
        group_limits,
        measure_sizing,
    )
    from growcache.schema import Field, Schema

    config = Config.model_validate(
        {
            "source": {"url": "memory://x", "format": "npy"},
            "cache": {"path": "x", "max_bytes": "100GB", "format": cache_format},
        }
    )
    schema = Schema((Field("x", "<f4", (None,)),))
    measure = Measure(samples=1, stride_bytes=10.0, overhead_bytes=0)
    sizing = measure_sizing(
        config, [MeasuredSource(measure, 1.0, ranged=False)], schema, 20_000.5
    )
    assert 0.98 * SHARD_BYTES < sizing.shard_samples * 20_000 <= SHARD_BYTES
    limits = group_limits(config, sizing, schema, 20_000.5)
    assert limits["group_limit_bytes"] == GROUP_BYTES
    assert limits["group_most_bytes"] == MOST_GROUP_BYTES
    assert sizing.shard_samples > least


@pytest.mark.parametrize(("workers", "max_bytes"), [(8, 64_000_000), (2, 10**9), (32, 10**8)])
def test_a_group_may_take_its_share_of_the_bound(workers: int, max_bytes: int) -> None:
    """However small the first samples were (protocol 10)."""
    from growcache.cache.space import fixed_budget
    from growcache.config import Config
    from growcache.sampling.sizing import GROUP_BYTES, Sizing, group_limits
    from growcache.schema import Field, Schema

    config = Config.model_validate(
        {
            "source": {"url": "memory://x", "format": "bytes"},
            "sampling": {"workers": workers},
            "cache": {"path": "x", "max_bytes": max_bytes},
        }
    )
    schema = Schema((Field("data", "bytes", ()),))
    limits = group_limits(config, Sizing(1, 50.0, 0, True, 32), schema, 50)
    share = (max_bytes - fixed_budget(max_bytes).total) / (workers + 2)
    limit = limits["group_limit_bytes"]
    assert min(GROUP_BYTES, 0.8 * share) < limit < share
    assert limit <= limits["group_most_bytes"] < max_bytes / 2
    fixed = Schema((Field("x", "<f4", (5,)),))
    assert group_limits(config, Sizing(1, 20.0, 0, False, 32), fixed, 20) == {}


@pytest.mark.parametrize("visit", [1, 16])
def test_shards_of_tiny_samples_fit_the_memory_of_a_sampler(visit: int) -> None:
    from growcache.config import Config
    from growcache.formats.base import Measure
    from growcache.sampling.sizing import (
        SIDECAR_BYTES,
        MeasuredSource,
        check_bound,
        measure_sizing,
    )
    from growcache.schema import Field, Schema

    config = Config.model_validate(
        {
            "source": {"url": "memory://x", "options": {"axis": 0}},
            "sampling": {"samples_per_object": visit},
            "cache": {"path": "x", "max_bytes": "100GB"},
        }
    )
    schema = Schema((Field("x", "<f4", (3,)),))
    measure = Measure(samples=10**6, stride_bytes=12.0, overhead_bytes=128)
    sizing = measure_sizing(config, [MeasuredSource(measure, 1.0, ranged=True)], schema)
    samples = sizing.shard_samples * sizing.group_shards
    check_bound(config, samples * (50 + SIDECAR_BYTES), 10**6)
    assert samples > 100_000


@pytest.mark.mutant(
    11, "growcache.sampling.sizing:check_bound", "int(config.cache.max_bytes) < least", "False"
)
def test_a_bound_that_cannot_hold_the_groups_in_flight_is_refused() -> None:
    from growcache.cache.space import minimum_bytes
    from growcache.config import Config
    from growcache.errors import ConfigError
    from growcache.sampling.sizing import check_bound

    def bounded(max_bytes: int) -> Config:
        values = {"source": {"url": "memory://x"}, "cache": {"max_bytes": max_bytes}}
        return Config.model_validate({**values, "sampling": {"workers": 3}})

    least = minimum_bytes(3, 500_000, 20_000)
    check_bound(bounded(least), 500_000, 20_000)
    with pytest.raises(ConfigError, match=f"give at least {least:,}"):
        check_bound(bounded(least - 1), 500_000, 20_000)
