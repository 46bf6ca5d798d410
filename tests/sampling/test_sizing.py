"""How many samples a visit yields, and a shard holds."""

from __future__ import annotations

from typing import Any

import pytest

from growcache.config import load_config
from growcache.remote.formats import Measure
from growcache.sampling.draws import Sizing
from growcache.sampling.sizing import ALIKE, MAX_GROUP_SHARDS, measure_sizing
from growcache.schema import Field, Schema

SCHEMA = Schema((Field("x", "<f4", (1000,)),))


def sized(together: int, **settings: Any) -> Sizing:
    cache = {"max_bytes": "10GB", **settings.pop("cache", {})}
    config = load_config({"source": {"url": "x"}, "sampling": settings, "cache": cache})
    return measure_sizing(config, Measure(4000.0, 0, 10**6, together), SCHEMA, ranged=True)


def test_a_visit_is_worth_what_is_fetched_together() -> None:
    assert sized(1).samples_per_object == 1
    assert sized(100).samples_per_object == 100
    assert sized(100, samples_per_object=3).samples_per_object == 3
    assert sized(100, weight_by="objects").samples_per_object == 100


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cache": {"max_bytes": "500MB"}},
        {"shard_samples": 7},
        {"cache": {"max_samples": 50, "eviction": "none"}},
    ],
)
def test_but_for_a_quarter_of_a_group_at_most(settings: dict[str, Any]) -> None:
    """So that a group holds several visits, whose samples are mixed in its shards."""
    sizing = sized(10**6, **settings)
    assert sizing.samples_per_object > 1
    visits = sizing.shard_samples * sizing.group_shards / sizing.samples_per_object
    assert round(visits, 1) >= 4
    assert ALIKE <= sizing.group_shards <= MAX_GROUP_SHARDS
    assert sizing.max_parts in (None, 1)
