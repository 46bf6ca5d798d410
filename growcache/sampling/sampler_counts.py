"""A sampler's counts for the metrics: requests, time per stage of a group, and holes by kind."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from growcache.store.counts import Counts, minus, observe
from growcache.store.request_counts import PROCESS_REQUESTS

if TYPE_CHECKING:
    from growcache.sampling.messages import Permit
    from growcache.sampling.sampler_memory import VisitResult

Stage = Literal["fetch", "transform", "encode", "reserve", "write"]

# Upper bounds of the histogram of stages, in seconds. One more bucket has the longer times.
STAGE_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class SamplerCounts:
    """Counters of this process, and the changes since the last report."""

    def __init__(self) -> None:
        self._stages: dict[str, list[float]] = {}
        self._taken = self._totals()

    def observe(self, stage: Stage, seconds: float) -> None:
        observe(self._stages, stage, seconds, STAGE_BOUNDS)

    @contextmanager
    def timed(self, stage: Stage) -> Iterator[None]:
        """Observe the duration of the block, unless it raises."""
        began = time.monotonic()
        yield
        self.observe(stage, time.monotonic() - began)

    def take(self) -> Counts:
        totals = self._totals()
        found, self._taken = minus(totals, self._taken), totals
        return found

    def _totals(self) -> Counts:
        stages: Counts = {stage: list(buckets) for stage, buckets in self._stages.items()}
        return {**PROCESS_REQUESTS.totals(), "group_seconds": stages}


def hole_kinds(permit: Permit, visited: Sequence[VisitResult]) -> dict[str, dict[str, int]]:
    """Return the holes by shard and kind.

    A hole belongs to the shard in which its visit starts.
    """
    found: dict[str, dict[str, int]] = {}
    for place, result in enumerate(visited):
        if result.hole is not None and not result.left_out:
            shard = str(permit.shards[place % len(permit.shards)])
            of_shard = found.setdefault(shard, {})
            of_shard[result.hole_kind] = of_shard.get(result.hole_kind, 0) + 1
    return found
