"""The metrics of a running service: counts of samplers and stores, and facts about the cache.

The counters are, by name: ``requests`` (by operation and code), ``request_seconds`` (histograms
by operation), ``read_bytes``, ``retries`` (by reason), ``group_seconds`` (histograms by stage),
``waiting_seconds`` (by reason), ``holes`` (by kind), ``drawn``, ``evicted``, ``moved_parts``,
``egress_bytes``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from growcache.cache.cache import Cache
from growcache.cache.metrics_file import (
    JobMetrics,
    Metrics,
    RankMetrics,
    monotonic,
    quantiles,
    read_metrics,
)
from growcache.cache.status_model import Status
from growcache.cache.uses import JobSums, add_open_leases
from growcache.store.counts import Counts, minus, number_in, plus
from growcache.store.request_counts import PROCESS_REQUESTS

AGE_QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
SURVEY_SECONDS = 5.0  # between two surveys of all shards
SURVEY_COST_SHARE = 0.002  # of the time may go into surveys


def metrics_before(cache: Cache) -> Metrics:
    """Return the last metrics, or those of the generation that this one replaces."""
    layouts = [cache.layout, *(one.layout for one in reversed(cache.older.caches))]
    found = (read_metrics(layout.root) for layout in layouts)
    return next((one for one in found if one is not None), Metrics(began_at=time.time()))


class MetricsBuilder:
    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.shown = metrics_before(cache)
        self._counts = plus({}, self.shown.counts)
        self._own_before = PROCESS_REQUESTS.totals()
        self._egress = 0
        self._reason: str | None = None
        self._reason_since = 0.0  # monotonic seconds
        self._holes: Mapping[str, int] = {}
        self._survey = ShardSurvey(cache)

    def add(self, counts: Counts) -> None:
        """Add the counts of a sampler since its last report."""
        self._counts = plus(self._counts, counts)

    def note_waiting(self, reason: str | None, now: float) -> None:
        """Add the time since the last call to the waiting time of the reason since then.

        ``now`` is in monotonic seconds.
        """
        if self._reason is not None:
            self.add({"waiting_seconds": {self._reason: now - self._reason_since}})
        self._reason, self._reason_since = reason, now

    def build(self, status: Status, holes: Mapping[str, int]) -> Metrics:
        """Return the current metrics. ``holes`` are those of this run, by kind."""
        own = PROCESS_REQUESTS.totals()
        self.add(minus(own, self._own_before))
        self.add({"holes": minus(holes, self._holes)})
        self.add({"egress_bytes": status.egress_bytes - self._egress})
        self._own_before, self._holes = own, dict(holes)
        self._egress = status.egress_bytes
        drawn_before = number_in(self._counts, "drawn")
        for name, now in (("drawn", status.drawn), ("evicted", status.evicted_samples)):
            self._counts[name] = monotonic(now, number_in(self._counts, name))
        # Another cache, or another index.
        is_anew = number_in(self._counts, "drawn") < drawn_before
        moved_before = 0 if is_anew else number_in(self._counts, "moved_parts")
        self._counts["moved_parts"] = max(moved_before, status.moved.parts)  # 0 at the start
        self._survey.look([job.name for job in status.jobs])
        self.shown = Metrics(
            updated_at=time.time(),
            began_at=self.shown.began_at,
            counts=self._counts,
            jobs=self._jobs(status, {} if is_anew else self.shown.jobs),
            age_seconds=self._survey.age_seconds(),
            age_seconds_mean=self._survey.age_seconds_mean(),
        )
        return self.shown

    def _jobs(self, status: Status, before: Mapping[str, JobMetrics]) -> dict[str, JobMetrics]:
        sums = add_open_leases(self._cache.remover.jobs, self._cache.leases)
        found = {}
        for job in status.jobs:
            ranks = sums.get(job.name, JobSums()).ranks
            now = JobMetrics(
                delivered=job.delivered,
                batches=job.batches,
                epoch=job.epoch,
                reuse=job.reuse,
                ess_samples=self._survey.effective.get(job.name),
                open=job.open,
                ranks={r: RankMetrics(w.seconds, w.histogram) for r, w in ranks.items()},
            )
            found[job.name] = now.not_below(before.get(job.name, JobMetrics()))
        return found


class ShardSurvey:
    """Figures that need every shard: their ages, and the effective sample size of each job."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._due = 0.0  # monotonic seconds
        self._drawn_at: Mapping[str, float] = {}  # wall times, by quantile of the age
        self._drawn_at_mean: float | None = None
        self.effective: dict[str, float] = {}  # samples, by job

    def look(self, jobs: Sequence[str]) -> None:
        """Repeat the survey, unless it was recent. The more shards, the rarer surveys are."""
        began = time.monotonic()
        if began < self._due:
            return
        rows = [(-row.drawn_at, row.samples) for row in self._cache.shards.live.values()]
        samples = self._cache.shards.live_samples
        self._drawn_at = {q: -at for q, at in quantiles(sorted(rows), AGE_QUANTILES).items()}
        self._drawn_at_mean = -sum(at * n for at, n in rows) / samples if samples else None
        self.effective = {job: self._cache.remover.effective_samples(job) for job in jobs}
        ended = time.monotonic()
        self._due = ended + max(SURVEY_SECONDS, (ended - began) / SURVEY_COST_SHARE)

    def age_seconds(self) -> dict[str, float]:
        now = time.time()
        return {q: max(0.0, now - at) for q, at in self._drawn_at.items()}

    def age_seconds_mean(self) -> float | None:
        mean = self._drawn_at_mean
        return None if mean is None else max(0.0, time.time() - mean)
