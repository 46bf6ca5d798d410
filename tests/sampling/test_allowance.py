"""What a group keeps does not depend on the order in which its visits end."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from growcache.sampling.allowance import Allowance, Limits, Visited, admit

LIMITS = Limits(group_bytes=100, sample_bytes=60)


def visited(*sizes: int) -> Visited:
    samples = [{"x": np.zeros(size, "|u1")} for size in sizes]
    return Visited(samples, [(i, i + 1) for i in range(len(sizes))])


def kept(result: Visited) -> list[int]:
    return [sample["x"].nbytes for sample in result.samples]


def test_what_fits_is_kept_and_what_does_not_is_a_hole() -> None:
    first, second = visited(50, 61, 10), visited(50, 40)
    assert admit(first, 0, LIMITS) == 60
    assert (kept(first), first.origins) == ([50, 10], [(0, 1), (2, 3)])
    assert first.hole is not None
    assert "61 bytes is larger than the 60" in first.hole
    assert admit(second, 60, LIMITS) == 100
    assert kept(second) == [40]
    assert second.hole is not None
    assert "does not fit into the 100" in second.hole


@given(st.lists(st.lists(st.integers(0, 70), max_size=3), max_size=8), st.randoms())
def test_any_order_keeps_the_same(sizes: list[list[int]], rng: random.Random) -> None:
    def run(order: list[int]) -> list[tuple[list[int], str | None]]:
        allowance = Allowance(len(sizes), LIMITS)
        for place in order:
            allowance.put(place, visited(*sizes[place]))
        return [(kept(result), result.hole) for result in allowance.results()]

    shuffled = list(range(len(sizes)))
    rng.shuffle(shuffled)
    found = run(shuffled)
    assert found == run(list(range(len(sizes))))
    assert sum(sum(mine) for mine, _ in found) <= LIMITS.group_bytes


def test_samples_of_one_size_are_never_refused() -> None:
    allowance = Allowance(2, None)
    allowance.put(1, visited(1000))
    allowance.put(0, visited(1000))
    assert [kept(result) for result in allowance.results()] == [[1000], [1000]]


def test_visits_wait_while_too_much_waits_for_an_earlier_one() -> None:
    async def run() -> None:
        allowance = Allowance(4, LIMITS)
        allowance.put(1, visited(60, 50))
        waiting = asyncio.create_task(allowance.room())
        await asyncio.sleep(0)
        assert not waiting.done()
        allowance.put(0, visited(1))
        await asyncio.wait_for(waiting, 1)
        allowance.put(2, visited())
        await asyncio.wait_for(allowance.room(), 1)

    asyncio.run(run())


@pytest.mark.parametrize(("cache_format", "least"), [("tfrecord", 100), ("npy", 1000)])
def test_shards_of_samples_that_differ_are_sized_by_their_mean(
    cache_format: str, least: int
) -> None:
    from growcache.config import Config
    from growcache.remote.formats import Measure
    from growcache.sampling.sizing import SHARD_BYTES, group_limit_bytes, measure_sizing
    from growcache.schema import Field, Schema

    config = Config.model_validate(
        {
            "source": {"url": "memory://x", "format": "npy"},
            "cache": {"path": "x", "max_bytes": "100GB", "format": cache_format},
        }
    )
    schema = Schema((Field("x", "<f4", (None,)),))
    measure = Measure(samples=1, stride_bytes=10.0, overhead_bytes=0)
    sizing = measure_sizing(config, measure, schema, ranged=False, sample_bytes=20_000.5)
    assert 0.98 * SHARD_BYTES < sizing.shard_samples * 20_000 <= SHARD_BYTES
    limit = group_limit_bytes(sizing, schema, 20_000.5)
    assert limit == int(4 * sizing.shard_samples * 20_000.5)
    assert group_limit_bytes(sizing, Schema((Field("x", "<f4", (5,)),)), 20) is None
    assert sizing.shard_samples > least


@pytest.mark.parametrize("visit", [1, 16])
def test_shards_of_tiny_samples_fit_the_memory_of_a_sampler(visit: int) -> None:
    from growcache.config import Config
    from growcache.remote.formats import Measure
    from growcache.sampling.sizing import SIDECAR_BYTES, check_bound, measure_sizing
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
    sizing = measure_sizing(config, measure, schema, ranged=True)
    samples = sizing.shard_samples * sizing.group_shards
    check_bound(config, samples * (50 + SIDECAR_BYTES), 10**6)
    assert samples > 100_000


@pytest.mark.mutant(
    11,
    "growcache/sampling/sizing.py",
    "    if int(config.cache.max_bytes) < least:",
    "    if False:",
)
def test_a_bound_that_cannot_hold_the_groups_in_flight_is_refused() -> None:
    from growcache.cache.budget import minimum_bytes
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
