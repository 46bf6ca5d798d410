"""Histories of caches that never were, for tests of reports."""

from __future__ import annotations

from growcache.cache.history import HistoryRecord, JobRecord

BEGAN = 1_800_000_000.0


def history_of(
    records: int,
    seconds: float = 10.0,
    *,
    drawn: int = 100,
    delivered: int = 300,
    waited: float = 0.0,
    job: str = "train",
    start: int = 0,
) -> list[HistoryRecord]:
    """Return a history that grows evenly: so much is drawn, delivered and waited between records."""
    return [
        HistoryRecord(
            BEGAN + seconds * i,
            run=BEGAN,
            state="running",
            samples=min(500, drawn * i),
            bytes=1000 * min(500, drawn * i),
            max_bytes=500_000,
            drawn=drawn * i,
            evicted_samples=max(0, drawn * i - 500),
            delivered=delivered * i,
            egress_bytes=1000 * drawn * i,
            requests=drawn * i,
            coverage=min(1.0, drawn * i / 10_000),
            reuse=delivered / drawn if drawn else None,
            jobs={job: JobRecord(delivered * i, i, waited * i, 0, 3.0, 42.0)},
        )
        for i in range(start, start + records)
    ]
