"""The one process that owns a cache: lists, hands out permits, commits, evicts, reports.

Everything happens on one event loop, between two turns of which nothing else touches the
cache. Samplers are child processes; the listing is a thread that only delivers pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from growcache.cache.cache import Cache
from growcache.cache.identity import Identity
from growcache.cache.status import Status, write_status
from growcache.config import Config
from growcache.errors import ConfigError, GrowcacheError, SamplingError
from growcache.remote.catalog import Catalog
from growcache.remote.formats import Measure, open_format
from growcache.remote.store import Entry, open_store
from growcache.sampling.dispatch import Dispatcher, RunLimits
from growcache.sampling.draws import Sizing
from growcache.sampling.fingerprint import identify, wishes
from growcache.sampling.listing import Listing
from growcache.sampling.messages import Message
from growcache.sampling.overview import Overview
from growcache.sampling.roster import Roster, Slot
from growcache.sampling.sizing import check_bound, measure_sizing, stored_sizing, with_wishes
from growcache.schema import Schema

TURN_SECONDS = 0.05  # at the latest; messages and pages cause a turn at once
LEASES_SECONDS = 0.1
UPKEEP_SECONDS = 1.0
HISTORY_SECONDS = 10.0
SHOW_SECONDS = 0.25
PROBED = 16  # objects tried in search of a first readable one
PATIENCE = 1.5  # a read's own retries may last half as long again as the timeout
GRACE_SECONDS = 5.0  # beyond that, before a sampler counts as stuck

OnStatus = Callable[[Status], None]


def run(
    config: Config,
    *,
    until_full: bool = False,
    duration: float | None = None,
    samples: int | None = None,
    refresh: bool = False,
    on_status: OnStatus = lambda status: None,
    on_ready: Callable[[], None] = lambda: None,
    parent: int | None = None,
    handle_interrupt: bool = True,
) -> Status:
    """Run the service in this process until it is stopped, and return its last status.

    In the main thread SIGINT and SIGTERM stop it cleanly.

    Args:
        config: of the service.
        until_full: end when the cache is full or complete.
        duration: end after so many seconds.
        samples: end after so many samples were drawn.
        refresh: list the source again, for objects that are new.
        on_status: told the status about four times a second.
        on_ready: told once the cache exists and is ours.
        parent: a descriptor; the service stops when its other end is closed.
        handle_interrupt: whether SIGINT stops the service; SIGTERM always does.

    Raises:
        GrowcacheError: with what is wrong and what to do; see its ``exit_code``.
    """
    open_format(config.source.format, config.source.options)  # a typing error costs no process
    cache = Cache.open(config.cache.path, config.cache)
    try:
        limits = RunLimits(until_full, duration, samples)
        supervisor = Supervisor(config, cache, limits, on_status, refresh=refresh)
        on_ready()
        return asyncio.run(supervisor.run(parent, handle_interrupt=handle_interrupt))
    finally:
        cache.close()


class Supervisor:
    """A running service; see `run`."""

    def __init__(
        self,
        config: Config,
        cache: Cache,
        limits: RunLimits,
        on_status: OnStatus,
        *,
        refresh: bool = False,
    ) -> None:
        self._config = config
        self._cache = cache
        self._limits = limits
        self._on_status = on_status
        self._refresh = refresh
        cache.claim(wishes(config))  # first: the catalog must not mix two sources
        self._catalog = Catalog.open(cache.layout.catalog)
        self._overview = Overview(config, cache, self._catalog)
        self._dispatcher: Dispatcher | None = None
        self._identity: Identity | None = None
        self._introduction: Message | None = None
        self._probing = False
        self._probe_from = 0
        self._listed = False
        self._error: GrowcacheError | None = None
        self._ended = False
        self._next: dict[str, float] = {}
        self._last_errors: deque[str] = deque(maxlen=5)

    async def run(self, parent: int | None, *, handle_interrupt: bool = True) -> Status:
        """Serve until told to stop, or until a limit or an error ends the run."""
        self._woken = asyncio.Event()
        self._born = time.monotonic()
        self._listen_for_the_end(parent, handle_interrupt=handle_interrupt)
        sampling = self._config.sampling
        setup: Message = {"type": "setup", "config": self._config.model_dump(mode="json")}
        self._roster = Roster(sampling.workers, setup, self._heard, self._died)
        listing = self._start_listing()
        try:
            while not self._ended and self._error is None:
                await self._sleep()
                self._guard(self._turn)
        finally:
            if listing is not None:
                listing.stop()
            await self._roster.stop()
            status = self._status(stopped=True)
            self._catalog.close()
            write_status(self._config.cache.path, status)
            self._on_status(status)
        if self._error is not None:
            raise self._error
        return status

    # -------------------------------------------------------------- the outside

    def _listen_for_the_end(self, parent: int | None, *, handle_interrupt: bool) -> None:
        loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGTERM, self._end)
            if handle_interrupt:
                loop.add_signal_handler(signal.SIGINT, self._end)
        if parent is not None:
            loop.add_reader(parent, self._parent_spoke, parent)

    def _parent_spoke(self, parent: int) -> None:
        if not os.read(parent, 4096):
            asyncio.get_running_loop().remove_reader(parent)
            self._end()

    def _end(self) -> None:
        self._ended = True
        self._woken.set()

    def _start_listing(self) -> Listing | None:
        if self._catalog.complete and not self._refresh:
            self._listed = True
            return None
        self._catalog.complete = False
        store = open_store(
            self._config.source,
            timeout_seconds=self._config.sampling.timeout_seconds,
            on_retry=self._listing_retried,
        )
        return Listing(store, self._page, self._listing_ended)

    def _listing_retried(self, error: BaseException) -> None:
        self._overview.failures += 1  # from the listing's thread; a lost count is no harm
        self._last_errors.append(f"listing: {error}")

    def _page(self, page: list[Entry]) -> None:
        self._guard(lambda: self._catalog.append(page))
        self._woken.set()

    def _listing_ended(self, error: GrowcacheError | None) -> None:
        if error is not None:
            self._fail(error)
        elif not len(self._catalog):
            urls = ", ".join(self._config.source.url)
            self._fail(
                ConfigError(
                    f"the listing is empty: no object matches {urls}; check bucket, prefix and "
                    "glob in source.url"
                )
            )
        else:
            self._catalog.flush()
            self._catalog.complete = True
            self._listed = True
        self._woken.set()

    def _fail(self, error: GrowcacheError) -> None:
        self._error = self._error or error
        self._woken.set()

    def _guard(self, step: Callable[[], object]) -> None:
        try:
            step()
        except GrowcacheError as error:
            self._fail(error)

    # ------------------------------------------------------------ the samplers

    def _heard(self, slot: Slot, message: Message) -> None:
        self._guard(lambda: self._react(slot, message))
        self._woken.set()

    def _react(self, slot: Slot, message: Message) -> None:
        if message["type"] == "progress":
            self._progressed(slot, message)
            return
        slot.moved()
        permit = message.get("id", "")
        dispatcher = self._dispatcher
        match message["type"]:
            case "ready":
                self._introduce(slot, message)
            case "refused":
                kind = ConfigError if message["exit_code"] == 2 else SamplingError
                raise kind(message["error"])
            case "probed":
                self._probed(message)
            case "need" if dispatcher and permit in slot.permits:
                slot.paused.add(permit)
                dispatcher.need(permit, message["bytes"])
            case "written" if dispatcher and permit in slot.permits:
                self._landed(slot, permit)
                dispatcher.written(permit)
            case "failed" if dispatcher and permit in slot.permits:
                self._landed(slot, permit)
                self._last_errors.append(message["error"])
                dispatcher.failed(permit, message["error"])

    def _landed(self, slot: Slot, permit: str) -> None:
        slot.permits.pop(permit, None)
        slot.paused.discard(permit)

    def _progressed(self, slot: Slot, message: Message) -> None:
        if message["nbytes"] or message["retries"] or message["paced"]:
            slot.moved()
        for permit, done in message["parts"].items():
            if slot.permits.get(permit, done) != done:
                slot.moved()
            if permit in slot.permits:
                slot.permits[permit] = done
        self._overview.failures += message["retries"]
        self._overview.egress_bytes += message["nbytes"]
        if message["retries"]:
            self._last_errors.append(message["last_error"])

    def _introduce(self, slot: Slot, message: Message) -> None:
        slot.ready = True
        self._introduction = message
        if self._identity is not None:
            slot.send(_identity_message(self._identity))

    def _died(self, slot: Slot, permits: list[str]) -> None:
        self._probing = False
        if self._dispatcher is not None:
            for permit in permits:
                self._dispatcher.abandoned(permit)
        self._woken.set()

    # --------------------------------------------------------------- beginnings

    def _identify(self) -> None:
        """Find out what the cache is of: from the cache itself, or from a first object."""
        introduction = self._introduction
        if introduction is None or not len(self._catalog) or self._probing:
            return
        stored = self._cache.identity
        if stored is not None and self._cache.totals().drawn_shards:
            if not self._covers_editions():
                return
            sizing = with_wishes(self._config, stored_sizing(stored.sizes))
            self._establish(stored.schema, sizing, stored.sizes)
            return
        ready = [slot for slot in self._roster.slots if slot.ready]
        last = min(len(self._catalog), self._probe_from + PROBED)
        if ready and last > self._probe_from:
            entries = [self._catalog.entry(i) for i in range(self._probe_from, last)]
            ready[0].send(
                {"type": "probe", "entries": [[*asdict(e).values()] for e in entries]}
            )
            ready[0].moved()
            self._probing, self._probe_from = True, last

    def _covers_editions(self) -> bool:
        """Whether the listing, which may have to be made anew, is as long as it was."""
        editions = self._cache.editions
        return self._listed or not editions or len(self._catalog) >= editions[-1].objects

    def _probed(self, message: Message) -> None:
        self._probing = False
        if "schema" not in message:
            errors = message["errors"]
            self._last_errors.extend(errors[-3:])
            if self._listed and self._probe_from >= len(self._catalog):
                raise SamplingError(
                    "no object of the source can be read as source.format "
                    f"{self._config.source.format}: {errors[0]}"
                )
            return
        assert self._introduction is not None
        schema = Schema.from_json(message["schema"])
        measure = Measure(**message["measure"])
        ranged = self._introduction["ranged"]
        sizing = measure_sizing(self._config, measure, schema, ranged=ranged)
        kept = {
            "record_bytes": self._cache.record_bytes(schema),
            "sample_bytes": schema.nbytes,
            "samples_per_whole": sizing.samples_per_object,
        }
        self._establish(schema, sizing, kept)

    def _establish(self, schema: Schema, sizing: Sizing, kept: dict[str, Any]) -> None:
        assert self._introduction is not None
        digest = self._introduction["transform_digest"]
        identity = identify(self._config, schema, sizing, digest, kept)
        self._cache.set_identity(identity)
        dispatcher = Dispatcher(
            self._config, self._cache, self._catalog, identity, sizing, self._limits
        )
        check_bound(self._config, dispatcher.full_group_bytes)
        self._identity, self._dispatcher = identity, dispatcher
        self._roster.broadcast(_identity_message(identity))

    # ------------------------------------------------------------------ a turn

    async def _sleep(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), TURN_SECONDS)
        self._woken.clear()

    def _turn(self) -> None:
        now = time.monotonic()
        self._cache.catalog_bytes = self._catalog.allocated_bytes
        if self._due("leases", now, LEASES_SECONDS):
            self._cache.poll_leases(now)
        if self._dispatcher is None:
            self._identify()
        if self._dispatcher is not None:
            self._dispatch(self._dispatcher)
        if self._due("upkeep", now, UPKEEP_SECONDS):
            self._upkeep()
        if self._due("show", now, SHOW_SECONDS):
            self._show()
        self._check_limits(now)

    def _due(self, what: str, now: float, seconds: float) -> bool:
        if now < self._next.get(what, 0.0):
            return False
        self._next[what] = now + seconds
        return True

    def _dispatch(self, dispatcher: Dispatcher) -> None:
        dispatcher.egress_bytes = self._overview.egress_bytes
        for permit in dispatcher.grant_waiting():
            for slot in self._roster.slots:
                if permit in slot.permits:
                    slot.paused.discard(permit)
                    slot.moved()
                    slot.send({"type": "grant", "id": permit})
        while idle := [slot for slot in self._roster.slots if slot.has_room]:
            slot = min(idle, key=lambda slot: len(slot.permits))
            given = dispatcher.next_permit()
            if given is None:
                break
            slot.permits[given.id] = 0
            slot.moved()
            slot.send(given.to_message())
        self._cache.set_complete(dispatcher.complete or self._full_for_good(dispatcher))

    def _full_for_good(self, dispatcher: Dispatcher) -> bool:
        """Whether nothing will ever be added, because nothing is ever evicted."""
        full = dispatcher.verdict.mood == "full"
        return full and self._config.cache.eviction == "none" and dispatcher.stuck

    def _upkeep(self) -> None:
        self._cache.maintain()
        patience = PATIENCE * self._config.sampling.timeout_seconds + GRACE_SECONDS
        for place in self._roster.kill_stalled(patience):
            self._last_errors.append(f"sampler {place} made no progress and was restarted")

        if self._due("history", time.monotonic(), HISTORY_SECONDS):
            self._cache.append_history(self._overview.history())

    def _check_limits(self, now: float) -> None:
        limits, dispatcher = self._limits, self._dispatcher
        if limits.duration_seconds is not None and now - self._born >= limits.duration_seconds:
            self._end()
        if dispatcher is None:
            return
        if limits.samples is not None and dispatcher.drawn_this_run >= limits.samples:
            self._end()
        at_rest = dispatcher.stuck and dispatcher.verdict.mood in ("full", "complete")
        if limits.until_full and at_rest:
            self._end()

    # ------------------------------------------------------------------ status

    def _show(self) -> None:
        status = self._status()
        self._on_status(status)
        if self._due("status", time.monotonic(), 2 * SHOW_SECONDS):
            write_status(self._config.cache.path, status)

    def _status(self, *, stopped: bool = False) -> Status:
        if self._dispatcher is not None:
            population = self._dispatcher.population
            self._overview.measure_population(population, listed=self._listed)
        return self._overview.status(
            self._dispatcher,
            self._roster,
            uptime_seconds=time.monotonic() - self._born,
            fingerprint=self._identity.fingerprint if self._identity else None,
            last_errors=list(self._last_errors),
            listed=self._listed,
            complete=self._cache.complete,
            stopped=stopped,
        )


def _identity_message(identity: Identity) -> Message:
    return {
        "type": "identity",
        "schema": identity.schema.to_json(),
        "fingerprint": identity.fingerprint,
    }
