"""The files that a service writes about itself: its status, the metrics, the history."""

from __future__ import annotations

from collections.abc import Mapping

from growcache.cache.cache import Cache
from growcache.cache.history import history_record
from growcache.cache.metrics_file import JobMetrics, write_metrics
from growcache.cache.status import write_status
from growcache.cache.status_model import Status
from growcache.sampling.metrics_builder import MetricsBuilder

STATUS_SECONDS = 0.5
METRICS_SECONDS = 1.0
# The file may take 1/24 of the fixed part of the bound, and so may its next version.
METRICS_SHARE = 24


class Records:
    def __init__(self, cache: Cache) -> None:
        self.metrics = MetricsBuilder(cache)
        cache.inherit_history()
        self._cache = cache
        self._last_jobs: dict[str, JobMetrics] = {}  # as in the history
        self._status_due = self._metrics_due = 0.0  # monotonic seconds

    def show(self, status: Status, holes: Mapping[str, int], now: float) -> None:
        """Write the files that are due. ``holes`` are those of this run, by kind."""
        self.metrics.note_waiting(status.waiting_reason, now)
        if now >= self._status_due:
            self._status_due = now + STATUS_SECONDS
            self.write_status(status)
        if now >= self._metrics_due:
            self._metrics_due = now + METRICS_SECONDS
            self.write_metrics(status, holes)

    def write_status(self, status: Status) -> None:
        self._cache.require_in_place()  # the folder may belong to another service by now
        write_status(self._cache.layout.root, status)

    def write_metrics(self, status: Status, holes: Mapping[str, int]) -> None:
        self._cache.require_in_place()
        metrics = self.metrics.build(status, holes)
        most_bytes = self._cache.space.budget.total // METRICS_SHARE
        write_metrics(self._cache.layout, metrics, most_bytes)

    def append_history(self, status: Status) -> None:
        if status.started_at is None:  # nothing was shown yet
            return
        metrics = self.metrics.shown
        record = history_record(status, metrics, self._last_jobs)
        self._cache.index_writer.append_history(record.to_values())
        for job in record.jobs:  # the latest job moves to the end
            self._last_jobs.pop(job, None)
            self._last_jobs[job] = metrics.jobs[job]
