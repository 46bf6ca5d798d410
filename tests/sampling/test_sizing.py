"""How many samples a visit yields, and a shard holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from growcache.cache.formats import CACHE_FORMATS
from growcache.config_text import load_config
from growcache.formats.base import Measure
from growcache.sampling.sizing import (
    ALIKE,
    MAX_GROUP_SHARDS,
    MeasuredSource,
    SizeEstimate,
    Sizing,
    check_bound,
    group_limits,
    measure_sizing,
)
from growcache.schema import Field, Schema

SCHEMA = Schema((Field("x", "<f4", (1000,)),))


def sized(together: int, **sampling: Any) -> Sizing:
    cache = {"max_bytes": "10GB", **sampling.pop("cache", {})}
    config = load_config({"source": {"url": "x"}, "sampling": sampling, "cache": cache})
    measured = MeasuredSource(Measure(4000.0, 0, 10**6, together), 1.0, ranged=True)
    return measure_sizing(config, [measured], SCHEMA)


def test_a_visit_is_worth_what_is_fetched_together() -> None:
    assert sized(1).samples_per_object == 1
    assert sized(100).samples_per_object == 100
    assert sized(100, samples_per_object=3).samples_per_object == 3
    assert sized(100, weight_by="objects").samples_per_object == 100


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"cache": {"max_bytes": "500MB"}},
        {"shard_samples": 7},
        {"cache": {"max_samples": 50, "eviction": "none"}},
    ],
)
def test_but_for_a_quarter_of_a_group_at_most(sampling: dict[str, Any]) -> None:
    """So that a group holds several visits, whose samples are mixed in its shards."""
    sizing = sized(10**6, **sampling)
    assert sizing.samples_per_object > 1
    visits = sizing.shard_samples * sizing.group_shards / sizing.samples_per_object
    assert round(visits, 1) >= 4
    assert ALIKE <= sizing.group_shards <= MAX_GROUP_SHARDS
    assert sizing.max_parts in (None, 1)


@settings(deadline=None)
@given(
    values=st.integers(1, 2000),
    together=st.sampled_from([1, 3, 6, 16, 24, 100, 10_000]),
    max_bytes=st.integers(5_000_000, 2_000_000_000),
    ragged=st.booleans(),
    form=st.sampled_from(list(CACHE_FORMATS)),
)
def test_a_bound_of_megabytes_holds_what_is_sized_by_it(
    values: int, together: int, max_bytes: int, ragged: bool, form: str
) -> None:
    cache = {"max_bytes": max_bytes, "format": form}
    config = load_config({"source": {"url": "x"}, "cache": cache})
    schema = Schema((Field("x", "<f4", (None if ragged else values,)),))
    measure, nbytes = Measure(4.0 * values, 0, 10**6, together), 4.0 * values
    sizing = measure_sizing(config, [MeasuredSource(measure, 1.0, ranged=True)], schema, nbytes)
    forecast = SizeEstimate(sizing, CACHE_FORMATS[form].record_bytes(schema, nbytes))
    limits = group_limits(config, sizing, schema, nbytes)
    largest = limits.get("group_limit_bytes", 0)
    check_bound(config, forecast.full_group_bytes(), 8192, largest_bytes=largest)
