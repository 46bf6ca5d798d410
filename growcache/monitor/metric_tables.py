"""Tables of a service's counters: waits by rank, time by stage, requests by outcome.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from growcache.cache.lease_views import WAIT_BOUNDS
from growcache.cache.metrics_file import JobMetrics, Metrics
from growcache.store.counts import Counts, Leaf
from growcache.usercode import printable

WAIT_SHARES = (0.5, 0.99)  # of the batches, whose waits are shown
MOST_RANKS = 64


def metric_tables(metrics: Metrics | None) -> dict[str, Any]:
    """Return the tables, which are empty if no service has written counters."""
    found = metrics or Metrics()
    return {
        "ranks": rank_rows(found.jobs)[:MOST_RANKS],
        "stages": stage_rows(_part(found.counts, "group_seconds")),
        "requests": request_rows(_part(found.counts, "requests")),
        "waiting": _descending(_part(found.counts, "waiting_seconds").items()),
    }


def _part(counts: Counts, key: str) -> Counts:
    found = counts.get(key)
    return found if isinstance(found, dict) else {}


def rank_rows(jobs: Mapping[str, JobMetrics]) -> list[dict[str, Any]]:
    """Return the exposed waits of each rank, longest first."""
    rows = [
        {
            "job": printable(name),
            "rank": printable(rank),
            "open": job.open,
            "batches": sum(waits.wait_buckets),
            "wait_seconds": waits.wait_seconds,
            "below": [wait_below(waits.wait_buckets, share) for share in WAIT_SHARES],
        }
        for name, job in jobs.items()
        for rank, waits in job.ranks.items()
    ]
    return sorted(rows, key=lambda row: (not row["open"], -row["wait_seconds"]))


def wait_below(buckets: Sequence[int], share: float) -> float | None:
    """Return the bound below which a share of the waits stayed.

    It is None without waits, or beyond the last bound.

    >>> wait_below([98, 0, 2], 0.5), wait_below([98, 0, 2], 0.99) == WAIT_BOUNDS[2], wait_below([0], 0.5)
    (0.0001, True, None)
    """
    total, seen = sum(buckets), 0
    for bound, count in zip(WAIT_BOUNDS, buckets, strict=False):
        seen += count
        if total and seen >= share * total:
            return bound
    return None


def stage_rows(histograms: Counts) -> list[dict[str, Any]]:
    """Return the seconds of each stage of a group, and the number of groups.

    >>> stage_rows({"fetch": [1, 2, 9.5], "encode": [3, 0, 0.5]})[0]
    {'name': 'fetch', 'count': 3, 'amount': 9.5}
    """
    rows = [
        {"name": printable(stage), "count": int(sum(leaf[:-1])), "amount": leaf[-1]}
        for stage, leaf in histograms.items()
        if isinstance(leaf, list)
    ]
    return sorted(rows, key=lambda row: -row["amount"])


def request_rows(requests: Counts) -> list[dict[str, Any]]:
    """Return the number of requests by operation and outcome.

    >>> request_rows({"get": {"ok": 9, "timeout": 1}})[1]
    {'name': 'get timeout', 'amount': 1}
    """
    return _descending(
        (f"{op} {code}", count)
        for op, codes in requests.items()
        if isinstance(codes, dict)
        for code, count in codes.items()
    )


def _descending(amounts: Iterable[tuple[str, Leaf | Counts]]) -> list[dict[str, Any]]:
    rows = [
        {"name": printable(name), "amount": amount}
        for name, amount in amounts
        if isinstance(amount, int | float)
    ]
    return sorted(rows, key=lambda row: -row["amount"])
