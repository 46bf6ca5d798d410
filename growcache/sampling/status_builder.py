"""The status of a running service: counts, outages, recent errors, and facts from the components."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from growcache.cache.cache import Cache
from growcache.cache.files import generation_in
from growcache.cache.locks import this_process
from growcache.cache.status import (
    delivered_fields,
    foreign_statuses,
    read_status,
    service_lease_statuses,
)
from growcache.cache.status_model import (
    MovedStatus,
    SetAsideStatus,
    SourceStatus,
    State,
    Status,
    SubsetStatus,
    WorkerStatus,
)
from growcache.config import Config
from growcache.errors import GrowcacheError, StoreRefusedError
from growcache.sampling.byte_budget import ByteBudget
from growcache.sampling.dispatch import Dispatcher
from growcache.sampling.messages import Message, awaited_event
from growcache.sampling.objects import Objects
from growcache.sampling.population import Population
from growcache.sampling.rate_limiter import (
    DISK_EVENT,
    OutageNotice,
    StoreSilence,
    WaitReason,
    reason_of_holders,
)
from growcache.sampling.sampler_pool import SamplerPool
from growcache.sampling.sizing import RAMP_END
from growcache.sampling.space_allocator import Rate
from growcache.secrecy import url_without_secrets
from growcache.store.catalog import Catalog
from growcache.usercode import printable

# Clients of a store.
LISTING, TABLES, PURGES, SAMPLERS = "listing", "tables", "purge lists", "samplers"


def process_fields(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the fields of a status about this process, the supervisor, from now on."""
    return {**this_process(), "path": str(path), "started_at": time.time()}


def cache_fields(cache: Cache) -> dict[str, Any]:
    totals = cache.totals()
    every = [cache, *cache.older.caches]
    return {
        "shards": totals.shards,
        "samples": totals.samples,
        "bytes": cache.bytes_used,
        "max_bytes": cache.space.in_force,
        "target_bytes": cache.max_bytes,
        "budget_bytes": cache.space.budget.total,
        "retired_bytes": totals.retired_bytes,
        "retired_shards": totals.retired_shards,
        "reserved_bytes": cache.space.reserved,
        "drawn": totals.drawn,
        "evicted_samples": totals.evicted_samples,
        "refetched_samples": totals.refetched_samples,
        "holes": totals.holes,
        "empty_visits": totals.empty_visits,
        "complete": cache.meta.complete,
        "generation": generation_in(cache.layout.root) or 0,
        "older_samples": cache.older.samples,
        "leases": [
            lease
            for one in every
            for lease in service_lease_statuses(one.leases, one.lease_table.kept_for())
        ],
        "foreign_leases": [
            lease for one in every for lease in foreign_statuses(one.lease_table.foreign)
        ],
        **delivered_fields(cache.remover.jobs, cache.leases, totals),
        "wishes": len(cache.refetch_queue.pending),
        "purging": len(cache.remover.purging.numbers),
        "updated_at": time.time(),
    }


def _left_out_before(root: Path) -> dict[str, int]:
    try:
        return read_status(root).left_out
    except (GrowcacheError, OSError, ValueError):
        return {}


class Waiting(NamedTuple):
    state: State
    event: str | None = None
    reason: WaitReason | None = None


class StatusBuilder:
    """Counts everything that no other component counts, and builds the status."""

    def __init__(
        self,
        config: Config,
        cache: Cache,
        catalog: Catalog,
        objects: Objects,
        budget: ByteBudget,
    ) -> None:
        self.failures = 0  # requests and visits that are retried
        self.last_errors: deque[str] = deque(maxlen=5)
        self.silences = {
            client: StoreSilence() for client in (LISTING, TABLES, PURGES, SAMPLERS)
        }
        self._notice = OutageNotice()
        self._budget = budget
        self._config = config
        self._cache = cache
        self._catalog = catalog
        self._objects = objects
        self._began = time.monotonic()
        self._process = process_fields(config.cache.path)
        # A run without a listing shows the files that the last listing left out.
        self._left_out_before = _left_out_before(config.cache.path)
        self._samples = Rate()
        self._bytes = Rate()
        self._measured = -1
        self._parts: int | None = None
        self._population_samples: float | None = None
        self._subsets: list[SubsetStatus] = []
        self._sources: list[tuple[int, float]] = []

    def note_retry(self, client: str, error: BaseException) -> None:
        self.failures += 1
        refused = isinstance(error, StoreRefusedError)
        self.silences[client].failed(awaited_event(error), time.monotonic(), refused=refused)

    def note_progress(self, message: Message) -> None:
        self.failures += message["retries"]
        self._budget.note_unbooked(message["unbooked"])
        if message["retries"]:
            self.last_errors.append(message["last_error"])
        if message["nbytes"]:
            self.silences[SAMPLERS].answered()
        elif message["retries"]:
            awaited = f"the store to answer ({printable(message['last_error'])})"
            self.silences[SAMPLERS].failed(awaited, time.monotonic())

    def _silent_store(self, now: float) -> str:
        found = (silence.waiting_for(now) for silence in self.silences.values())
        return next(filter(None, found), "")

    def outage_messages(self, dispatcher: Dispatcher | None, now: float) -> list[str]:
        """Return warnings.

        An outage is reported once after some seconds, and its end as well.
        """
        refused = dispatcher.breaker.waiting_for if dispatcher is not None else ""
        return self._notice.look(refused or self._silent_store(now), now)

    def measure_population(self, population: Population) -> None:
        objects = len(self._catalog)
        if objects == self._measured:
            return
        self._parts = population.parts(objects)
        self._sources = population.sources(objects)
        self._population_samples = sum(samples for _, samples in self._sources)
        self._subsets = [
            SubsetStatus(one.name, one.used, one.objects, one.groups, samples)
            for one, samples in population.subsets()
        ]
        self._cache.meta.set_population(self._parts, self._population_samples)
        self._measured = objects

    def status(
        self,
        dispatcher: Dispatcher | None,
        pool: SamplerPool,
        *,
        listed: bool,
        endless: bool,
        startup_event: str,
        stopped: bool,
        disk_full: bool,
        restart_for: list[str],
        left_out: Mapping[str, int] | None,
        catalogs: list[str],
        ended_by: str | None,
    ) -> Status:
        cache, now = self._cache, time.monotonic()
        fields = self._process | cache_fields(cache)
        self._samples.note(now, cache.totals().drawn)
        self._bytes.note(now, self._budget.spent)
        if stopped:
            waiting = Waiting("stopped")
        elif disk_full:
            waiting = Waiting("waiting", f"{DISK_EVENT}: it is full", "disk")
        else:
            waiting = self._waiting(dispatcher, pool, startup_event, now)
        identity = cache.meta.identity
        return Status(
            **fields | {"pid": None if stopped else self._process["pid"]},
            state=waiting.state,
            waiting_for=waiting.event,
            waiting_reason=waiting.reason,
            population=self._parts,
            population_samples=self._population_samples,
            coverage=self._coverage(dispatcher),
            failures=self.failures,
            workers=pool.alive,
            samples_per_second=0.0 if stopped else self._samples.per_second,
            bytes_per_second=0.0 if stopped else self._bytes.per_second,
            listing_complete=listed,
            fingerprint=identity.fingerprint if dispatcher and identity else None,
            uptime_seconds=now - self._began,
            catalog_bytes=self._catalog.allocated_bytes,
            egress_bytes=self._budget.spent,
            objects=0 if endless else self._objects.listed,
            retries=self.failures,
            restarts=pool.restarts,
            last_errors=[printable(error) for error in self.last_errors],
            worker_states=[] if stopped else self._workers(dispatcher, pool),
            sample_bytes=int(identity.sizes["sample_bytes"]) if identity else None,
            full=dispatcher is not None
            and (dispatcher.space.at_bound or dispatcher.verdict.state == "full"),
            ramping=dispatcher is not None
            and cache.meta.deferrals.draw_number(dispatcher.queue.next_new) < RAMP_END,
            endless=endless,
            subsets=self._subsets,
            sources=self._mixed(dispatcher),
            strata=dispatcher.draws.strata(dispatcher.queue.next_new) if dispatcher else [],
            unmatched=self._objects.unmatched,
            left_out=self._left_out_before if left_out is None else dict(left_out),
            catalogs=catalogs,
            set_aside=dispatcher.makeups.status if dispatcher else SetAsideStatus(),
            moved=dispatcher.draws.moved(dispatcher.queue.next_new)
            if dispatcher
            else MovedStatus(),
            restart_for=restart_for,
            ended_by=ended_by,
        )

    def _waiting(
        self, dispatcher: Dispatcher | None, pool: SamplerPool, startup_event: str, now: float
    ) -> Waiting:
        samplers_event = "" if any(slot.ready for slot in pool.slots) else pool.waiting_for
        if samplers_event and not self._cache.meta.complete:
            return Waiting("waiting", printable(samplers_event), "cluster")
        if dispatcher is None:
            silent_store = self._silent_store(now)
            reason: WaitReason = "store" if silent_store else "start"
            return Waiting("waiting", printable(silent_store or startup_event), reason)
        silent_store = self.silences[SAMPLERS].waiting_for(now)
        return self._waiting_of_permits(dispatcher, printable(silent_store))

    def _waiting_of_permits(self, dispatcher: Dispatcher, silent_store: str) -> Waiting:
        complete, verdict = self._cache.meta.complete, dispatcher.verdict
        refused, writes = dispatcher.breaker.waiting_for, dispatcher.writes
        if refused and not complete:
            return Waiting("waiting", refused, "store")
        if self._cache.shrinking:
            return Waiting("shrinking", *dispatcher.space.awaited_to_shrink())
        if writes.blocked and writes.stuck:
            if writes.short_of_disk:
                return Waiting("waiting", writes.blocked, "disk")
            if not dispatcher.space.evicts:
                return Waiting("full", writes.blocked, "room")
            return Waiting("waiting", writes.blocked, reason_of_holders(writes.blocked))
        if complete:
            return Waiting("complete", None, "complete")
        if silent_store and dispatcher.at_work:
            return Waiting("waiting", silent_store, "store")
        if verdict.granted or (verdict.state == "waiting" and writes.permits):
            # Work is in progress, but the status still shows why no further permit is granted.
            return Waiting("running", verdict.waiting_for, verdict.reason)
        return Waiting(verdict.state, verdict.waiting_for, verdict.reason)

    def _mixed(self, dispatcher: Dispatcher | None) -> list[SourceStatus]:
        weights = self._config.weights
        if weights is None or dispatcher is None:
            return []
        rounds = dispatcher.draws.rounds(dispatcher.queue.next_new)
        urls = (
            ", ".join(map(url_without_secrets, source.url)) for source in self._config.sources
        )
        rows = zip(urls, weights, self._sources, rounds, strict=False)
        return [
            SourceStatus(url, weight / sum(weights), objects, samples, round_)
            for url, weight, (objects, samples), round_ in rows
        ]

    def _coverage(self, dispatcher: Dispatcher | None) -> float | None:
        if dispatcher is None or not self._parts:
            return None
        parts, draws, group = self._parts, dispatcher.draws, dispatcher.queue.next_new
        drawn, missing = self._cache.totals().drawn_parts, dispatcher.makeups.missing
        if draws.replacement:
            return -math.expm1(-drawn / parts)  # expected value for independent draws
        if (distinct := draws.distinct(group)) is not None:
            return max(0, min(distinct - missing, drawn)) / parts
        # A refetch may have skipped ahead, even to a later round.
        if dispatcher.round and not dispatcher.queue.behind:
            return max(0.0, 1.0 - missing / parts)
        return min(1.0, drawn / parts)

    def _workers(self, dispatcher: Dispatcher | None, pool: SamplerPool) -> list[WorkerStatus]:
        issued = dispatcher.writes.permits if dispatcher is not None else {}
        states = []
        for state in (slot.status() for slot in pool.slots):
            if state.permit is not None and (one := issued.get(state.permit)):
                word = "writing" if one.granted else "waiting" if one.waits else state.state
                state = replace(state, parts=len(one.permit.visits), state=word)
            states.append(state)
        return states
