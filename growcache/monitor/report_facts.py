"""Gather the facts about a cache for a report, without writing into the cache."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from growcache.cache.history import HistoryRecord, read_history
from growcache.cache.index.inspection import read_holes
from growcache.cache.index.reader import read_index
from growcache.cache.metrics_file import Metrics, read_metrics
from growcache.cache.status import read_status
from growcache.cache.status_model import Status
from growcache.errors import ConfigError
from growcache.loading.waiting import shown_generation
from growcache.monitor.hole_reasons import HoleGroup, group_holes
from growcache.monitor.report import of_last_generation
from growcache.monitor.report_objects import DrawnObjects, read_drawn_objects
from growcache.monitor.store_address import store_address
from growcache.monitor.verdicts import (
    RECENT_SECONDS,
    Answer,
    answer_questions,
    recent_changes,
)
from growcache.monitor.versions import library_versions
from growcache.store.urls import parse_url

MOST_PLAN_BYTES = 10_000_000


@dataclass(frozen=True, slots=True)
class ReportFacts:
    made_at: float
    status: Status
    records: Sequence[HistoryRecord] = ()
    metrics: Metrics | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)  # of the identity
    schema: str = ""
    holes: Sequence[HoleGroup] = ()
    noted_holes: int = 0
    drawn: DrawnObjects = field(default_factory=DrawnObjects)
    answers: Sequence[Answer] = ()
    plan: Mapping[str, Any] | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    store_addresses: Sequence[str | None] = ()

    @property
    def own_records(self) -> list[HistoryRecord]:
        """The part of the history in which the current samples were drawn."""
        return of_last_generation(self.records)

    @property
    def ranks(self) -> dict[str, int]:
        """Number of loops of each job, whose waits are summed in the history."""
        if self.metrics is None:
            return {}
        return {name: max(1, len(job.ranks)) for name, job in self.metrics.jobs.items()}


def gather_facts(cache: Path, plan: Path | None = None) -> ReportFacts:
    """Read a cache. Raises the errors of `read_index`, and ConfigError for an invalid plan."""
    planned = None if plan is None else read_plan(plan)
    root = shown_generation(cache)
    status, records = read_status(root), read_history(cache)
    identity = read_index(root).identity
    parts = {} if identity is None else identity.parts
    _, noted = read_holes(root)
    now = time.time()
    recent = [record for record in records if record.at > now - 2 * RECENT_SECONDS]
    answers = answer_questions(status, recent_changes(recent, status))
    return ReportFacts(
        now,
        status,
        records,
        read_metrics(root),
        parts,
        "" if identity is None else str(identity.schema),
        group_holes(noted),
        len(noted),
        read_drawn_objects(root, parts),
        (answers.fed, answers.growth, answers.awaited),
        planned,
        library_versions(),
        store_addresses(parts),
    )


def store_addresses(parts: Mapping[str, Any]) -> list[str | None]:
    """Return the addresses of the first source's URLs, as this process would find them."""
    urls = parts.get("source.url") or parts.get("source.0.url") or []
    options = parts.get("source.storage_options") or {}
    return [store_address(parse_url(url), options, os.environ) for url in urls]


def read_plan(path: Path) -> dict[str, Any]:
    """Return the output of `growcache plan --json`."""
    advice = "write one with: growcache plan CONFIG --json > plan.json"
    try:
        if path.stat().st_size > MOST_PLAN_BYTES:
            raise ConfigError(f"--plan: {path} is too large for a plan; {advice}", code="GC105")
        values = orjson.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--plan: cannot read {path}: {error.strerror}; {advice}", code="GC105"
        ) from None
    except orjson.JSONDecodeError:
        raise ConfigError(f"--plan: {path} is not JSON; {advice}", code="GC105") from None
    if isinstance(values, list) and values:  # of a sweep
        values = values[0]
    if not isinstance(values, dict) or not any(
        isinstance(one, dict) for one in values.values()
    ):
        raise ConfigError(
            f"--plan: expected a plan in {path}, found other JSON; {advice}", code="GC105"
        )
    return values
