"""Inputs of plans without a source: windows of 256 KiB in S3, a GPU machine, an NVMe."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from growcache.config_text import load_config
from growcache.formats.base import Measure
from growcache.monitor.plan_cache import ShardBytes
from growcache.monitor.plan_figures import Figure, PlanInputs
from growcache.monitor.plan_scenario import Parts
from growcache.monitor.prices import find_price
from growcache.sampling.sizing import MeasuredSource, measure_sizing
from growcache.schema import Field, Schema

SAMPLE_BYTES = 262_144


def plan_inputs(
    link: float = 50e6,
    consume: float | None = 400.0,
    population: float = 4_000_000.0,
    sampling: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    visit: int = 1,
    error: float = 0.0,
    **cache: Any,
) -> PlanInputs:
    """Return inputs of a cache with these settings; ``error``: of the link, relative."""
    values = {"path": "/nvme/cache", "max_bytes": "10GB", **cache}
    source = {"url": "s3://bucket/recordings/**/*.npy", "options": {"window": 1024}}
    config = load_config({"source": source, "sampling": sampling or {}, "cache": values})
    schema = Schema((Field("x", "<f4", (1024, 64)),))
    measured = MeasuredSource(Measure(SAMPLE_BYTES, 128, 64, visit), 64, True)
    sizing = measure_sizing(config, [measured], schema)

    def known(value: float) -> Figure:
        return Figure.exact(value, "measured")

    found = PlanInputs(
        config=config,
        sizing=sizing,
        parts=Parts((1.0,), (population / visit,)),
        shard_bytes=ShardBytes(SAMPLE_BYTES + 60, 120),
        record_bytes=SAMPLE_BYTES + 60,
        sample_bytes=SAMPLE_BYTES,
        catalog_bytes=4_000_000,
        link_bytes_per_second=Figure(link, (1 - error) * link, (1 + error) * link, "measured"),
        limited_by="link" if math.isfinite(link) else "latency",
        visit_seconds=known(0.05),
        visit_bytes=known(float(visit * SAMPLE_BYTES)),
        visit_requests=known(1.0),
        visit_samples=known(float(visit)),
        cpu_seconds=known(0.0003),
        disk_bytes_per_second=known(1e9),
        free_bytes=known(800e9),
        startup_seconds=Figure(2.0, 2.0 - error, 2.0 + error, "assumed"),
        population_samples=known(population),
        consumption=None if consume is None else Figure.exact(consume, "given"),
        min_samples=Figure.exact(1000, "assumed"),
        price=find_price("us-east-1/standard"),
    )
    return replace(found, **(changes or {}))
