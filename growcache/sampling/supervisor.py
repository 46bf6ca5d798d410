"""The process that owns a cache: it lists, grants permits, commits, evicts and reports.

Everything happens on one event loop, and nothing else changes the cache between two turns of
the loop. Samplers are child processes. The listing is a thread that only delivers pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from growcache.cache.cache import Cache
from growcache.cache.files import is_full_disk
from growcache.cache.side_files import Identity
from growcache.cache.status_model import Status
from growcache.config import Config
from growcache.errors import (
    CacheError,
    CacheFullError,
    CacheGoneError,
    GrowcacheError,
    SamplingError,
    StoreRefusedError,
    TransientStoreError,
    coded_text,
)
from growcache.sampling.awaited_labels import AwaitedLabels
from growcache.sampling.byte_budget import ByteBudget
from growcache.sampling.config_reload import ConfigFile, ConfigReload
from growcache.sampling.dispatch import Dispatcher
from growcache.sampling.end_requests import listen_for_the_end
from growcache.sampling.engines.choice import engines_of
from growcache.sampling.failed_visits import has_new_version
from growcache.sampling.fingerprint import configured_values
from growcache.sampling.labels import Labels, LabelsReader
from growcache.sampling.listing_ingest import ListingIngest, runs_user_format
from growcache.sampling.messages import (
    Message,
    budget_message,
    identity_message,
    refusal_error,
    setup_message,
    storage_message,
)
from growcache.sampling.objects import Objects, Split, field_join
from growcache.sampling.permits import RunLimits
from growcache.sampling.read_limits import ReadLimits
from growcache.sampling.records import Records
from growcache.sampling.sampler_pool import SamplerDeath, SamplerPool, SamplerSlot
from growcache.sampling.schema_search import FoundIdentity, SchemaSearch
from growcache.sampling.shared_purges import SharedPurges
from growcache.sampling.sources import first_urls
from growcache.sampling.status_builder import LISTING, PURGES, TABLES, StatusBuilder
from growcache.store.catalog import Catalog
from growcache.store.opening import open_store
from growcache.usercode import printable

TURN_SECONDS = 0.05  # at the latest; messages and pages cause a turn at once
LEASES_SECONDS = 0.1
UPKEEP_SECONDS = 1.0
HISTORY_SECONDS = 10.0
SHOW_SECONDS = 0.25
# For which the status shows a full disk after the last failed write.
FULL_SECONDS = 2 * UPKEEP_SECONDS
WARN_SECONDS = 60.0
MOST_FAILED_STARTS = 5  # consecutive, of samplers in one slot
PATIENCE = 1.5  # times the timeout, because a read's own retries may take half as long again
GRACE_SECONDS = 5.0  # after that, before a sampler counts as stuck

OnStatus = Callable[[Status], None]

_log = logging.getLogger(__name__)


class Supervisor:
    def __init__(
        self,
        config: Config,
        cache: Cache,
        limits: RunLimits,
        on_status: OnStatus,
        *,
        refresh: bool = False,
        retry_holes: bool = False,
        file: ConfigFile | None = None,
        on_stderr: Callable[[bytes], None] | None = None,
    ) -> None:
        self._config = config
        self._on_stderr = on_stderr
        self._cache = cache
        self._limits = limits
        self._on_status = on_status
        self._refresh = refresh
        self._retry_holes = retry_holes
        # First, because the catalog must not mix two sources.
        cache.claim(configured_values(config))
        self._catalog = Catalog.open(cache.layout.catalog)
        self._was_listed = len(self._catalog) > 0  # by an earlier run
        subsets = Split(config.split) if config.split is not None else None
        self._objects = Objects(
            self._catalog,
            subsets,
            field_join(config.sources),
            skips=config.sources[0].on_missing == "skip",
            firsts=first_urls(config.sources),
        )
        sampling = config.sampling
        self._budget = ByteBudget(sampling.max_egress, sampling.max_bytes_per_second)
        self._read_limits = ReadLimits(
            len(config.sources), sampling.samplers, sampling.concurrency
        )
        self._status = StatusBuilder(config, cache, self._catalog, self._objects, self._budget)
        self._records = Records(cache)
        self._dispatcher: Dispatcher | None = None
        self._identity: Identity | None = None
        self._introduction: Message | None = None
        self._search = SchemaSearch(config, cache, self._catalog, self._objects)
        self._awaited_labels = AwaitedLabels(config.sources, self._objects, self._search)
        self._listing = ListingIngest(
            config,
            cache,
            self._catalog,
            self._wake,
            self._fail,
            self._listing_retried,
            self._status.silences[LISTING].answered,
        )
        self._labels: LabelsReader | None = None
        self._purges: SharedPurges | None = None
        self._awaits_purges = any(source.purged is not None for source in config.sources)
        self._file = file
        self._reload: ConfigReload | None = None
        self._found: FoundIdentity | None = None
        self._full_at = -math.inf  # when the disk was last full, monotonic seconds
        self._error: Exception | None = None
        self._ended = False
        self._blocked_since = time.monotonic()
        self._next: dict[str, float] = {}
        self._shown = Status()

    async def run(self, parent: int | None, *, handle_interrupt: bool = True) -> Status:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._started = time.monotonic()
        listen_for_the_end(self._end, parent, handle_interrupt=handle_interrupt)
        setup = setup_message(self._config)
        engines = engines_of(self._config, setup, self._fail, self._on_stderr)
        self._pool = SamplerPool(engines, setup, self._receive, self._died, self._fail)
        if self._file is not None:
            self._reload = ConfigReload(self._file, self._config, self._adopt, self._wake_soon)
        try:
            self._guard(self._start_listing)
            self._guard(self._start_labels)
            self._guard(self._start_purges)
            while not self._ended and self._error is None:
                await self._sleep()
                self._guard(self._turn)
                self._guard(self._after_turn)
        finally:
            self._listing.stop()
            if self._purges is not None:
                self._purges.stop()
            if self._reload is not None:
                self._reload.stop()
            await self._pool.stop()
            if self._dispatcher is not None:
                self._guard(self._dispatcher.discard_all)
            self._guard(self._show_the_end)
            self._guard(lambda: self._records.write_metrics(self._shown, self._hole_kinds))
            self._guard(lambda: self._records.append_history(self._shown))
            self._guard(self._catalog.close)
            self._guard(lambda: self._records.write_status(self._shown))
            self._on_status(self._shown)
        if self._error is not None:
            raise self._error
        return self._shown

    # -------------------------------------------------------------- the outside

    def _end(self) -> None:
        self._ended = True
        self._wake()

    def _wake_soon(self) -> None:
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._woken.set()

    def _start_listing(self) -> None:
        if self._refresh:
            self._listing.watched = frozenset(hole.key for hole in self._cache.holes())
        self._listing.start(self._introduction, refresh=self._refresh)

    def _start_labels(self) -> None:
        if self._awaited_labels:
            self._labels = LabelsReader(
                self._config.sources,
                self._config.sampling,
                self._budget.book,
                self._labels_read,
                lambda error: self._status.note_retry(TABLES, error),
                self._retries_labels,
            )

    def _start_purges(self) -> None:
        if self._awaits_purges:
            self._purges = SharedPurges(
                self._config.sources,
                self._cache.layout,
                self._config.sampling.timeout_seconds,
                self._purges_read,
                lambda error: self._status.note_retry(PURGES, error),
            )

    def _purges_read(self, error: GrowcacheError | None) -> None:
        if error is None:
            self._status.silences[PURGES].answered()
            self._guard(self._look_at_purges)
            self._awaits_purges = False
        elif self._awaits_purges:
            self._fail(error)
        else:  # the list that was read stays valid, and is read again
            self._status.last_errors.append(coded_text(error))
        self._wake()

    def _retries_labels(self, error: TransientStoreError) -> bool:
        """Whether tables are read again forever.

        A refusal in the first run ends it, because it is probably a configuration error.
        """
        return self._was_listed or not isinstance(error, StoreRefusedError)

    def _labels_read(self, found: Labels | GrowcacheError) -> None:
        self._status.silences[TABLES].answered()
        if isinstance(found, GrowcacheError):
            self._fail(found)
        else:
            self._awaited_labels.found = found
        self._wake()

    def _listing_retried(self, error: BaseException) -> None:
        # In the listing's thread, where losing a count is harmless.
        self._status.note_retry(LISTING, error)
        self._status.last_errors.append(f"listing: {error}")

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
            self._status.last_errors.append(coded_text(error))
        self._wake()

    def _guard(self, step: Callable[[], object]) -> None:
        """Run a step.

        An error ends the service, and `run` raises it, first of all a missing cache.
        """
        try:
            try:
                step()
            except (GrowcacheError, OSError) as error:
                self._cache.require_in_place(error)
                raise
        except CacheGoneError as error:
            self._fail(error)
        except CacheFullError as error:
            self._disk_is_full(error)
        except GrowcacheError as error:
            self._fail(error)
        except OSError as error:
            if is_full_disk(error):
                self._disk_is_full(error)
            else:
                self._fail(
                    CacheError(f"cannot use {self._config.cache.path}: {error}", code="GC405")
                )
        except Exception as error:  # noqa: BLE001 - a defect, which `run` raises after the stop
            self._fail(error)

    def _disk_is_full(self, error: OSError) -> None:
        """Record a full disk. The step is atomic, and the next turn retries it."""
        if not self._disk_full:
            self._status.last_errors.append(str(error))
        self._full_at = time.monotonic()

    @property
    def _disk_full(self) -> bool:
        return time.monotonic() - self._full_at < FULL_SECONDS

    # ------------------------------------------------------------ the samplers

    def _receive(self, slot: SamplerSlot, message: Message) -> None:
        self._guard(lambda: self._react(slot, message))
        self._wake()

    def _react(self, slot: SamplerSlot, message: Message) -> None:
        match message["type"]:
            case "progress":
                self._progressed(slot, message)
                return
            case "called":
                slot.note_user_call(message["ended"], message["call"])
                return
            case "book":
                self._budget.book(slot, message["bytes"], slot.answer_booking)
                return
            case "unread":
                self._budget.give_back(message["bytes"])
                return
        slot.note_progress()
        match message["type"]:
            case "ready":
                self._sampler_ready(slot, message)
            case "refused":
                raise refusal_error(message)
            case "probed":
                self._probed(slot, message)
            case _ if self._dispatcher is not None:
                self._status.last_errors.extend(self._dispatcher.receive(slot, message))

    def _progressed(self, slot: SamplerSlot, message: Message) -> None:
        if message["nbytes"] or message["retries"] or message["paced"]:
            slot.note_progress()
        for permit_id, done in message["parts"].items():
            work = slot.permits.get(permit_id)
            if work is not None and work.done != done:
                slot.note_progress()
                work.done = done
                if self._dispatcher is not None:
                    self._dispatcher.visited(permit_id, done)
        self._status.note_progress(message)
        self._records.metrics.add(message["counts"])
        self._read_limits.answered(message["answers"], time.monotonic())
        self._read_limits.hand_out(self._pool.slots)

    def _adopt(self, config: Config) -> None:
        options = [source.storage_options for source in config.sources]
        is_new = options != [source.storage_options for source in self._config.sources]
        if is_new:
            for source in config.sources:  # without a request, to refuse invalid options
                open_store(source, without_credentials=True)
        if self._dispatcher is not None:
            self._dispatcher.adopt_settings(config)
        else:
            self._cache.adopt_settings(config.cache)
        self._config = config
        sampling = config.sampling
        self._budget.adopt(sampling.max_egress, sampling.max_bytes_per_second)
        self._pool.broadcast(budget_message(config))
        if is_new:
            self._pool.setup = setup_message(config)
            self._pool.broadcast(storage_message(config))
            self._listing.adopt(options)
            if self._labels is not None:
                self._labels.sources = config.sources
            if self._purges is not None:
                self._purges.sources = config.sources

    def _sampler_ready(self, slot: SamplerSlot, message: Message) -> None:
        slot.ready = True
        slot.send(budget_message(self._config))
        slot.send(storage_message(self._config))  # it may have changed since the setup
        first, self._introduction = self._introduction is None, message
        if first and runs_user_format(self._config):
            self._start_listing()
        if self._identity is not None:
            slot.send(identity_message(self._identity))
        # Or it would start reading at full concurrency.
        self._read_limits.hand_out(self._pool.slots)

    def _probed(self, slot: SamplerSlot, message: Message) -> None:
        assert self._introduction is not None
        self._status.last_errors.extend(message.get("errors", [])[-3:])
        found = self._search.answered(
            slot, message, self._introduction, listed=self._listing.listed
        )
        if found is not None and self._dispatcher is None:
            self._found = found

    def _died(self, slot: SamplerSlot, permit_ids: list[str], death: SamplerDeath) -> None:
        if death.stalled is None:  # a stall was reported before the kill
            self._status.last_errors.append(f"sampler {slot.id} ended {death}")
        self._guard(lambda: self._sampler_died(slot, permit_ids, death))
        self._wake()

    def _sampler_died(
        self, slot: SamplerSlot, permit_ids: list[str], death: SamplerDeath
    ) -> None:
        self._budget.forget(slot)
        self._search.lost(slot, death)
        for permit_id in permit_ids:
            if self._dispatcher is not None:
                self._dispatcher.abandoned(permit_id, death)
        if slot.failed_starts >= MOST_FAILED_STARTS:
            raise SamplingError(
                f"sampler processes ended at their start {slot.failed_starts} times in a row, "
                f"the last {death}; their output above says why",
                code="GC504",
            )

    # ----------------------------------------------------------------- identity

    def _identify(self) -> None:
        if self._introduction is None or not len(self._catalog):
            return
        if self._awaited_labels:
            self._search.waiting_for = self._awaited_labels.event
            return
        if self._awaits_purges:
            self._search.waiting_for = "the purge list (source.purged)"
            return
        listed = self._listing.listed
        found = self._found or self._search.known(self._introduction, listed=listed)
        if found is not None:
            self._establish(found)
        else:
            ready = [slot for slot in self._pool.slots if slot.ready]
            self._search.probe(ready, listed=listed)

    def _establish(self, found: FoundIdentity) -> None:
        self._cache.set_identity(found.identity)
        # The one on disk, which may have an earlier fingerprint.
        identity = self._cache.meta.identity
        assert identity is not None
        if self._search.lacks_objects(listed=self._listing.listed):
            return  # the shards of the cache were drawn from a longer listing
        dispatcher = Dispatcher(
            self._config,
            self._cache,
            self._catalog,
            self._objects,
            identity,
            found.sizing,
            self._limits,
            self._budget,
        )
        dispatcher.check_bound(self._config)
        self._identity, self._dispatcher = identity, dispatcher
        self._pool.broadcast(identity_message(identity))

    # ------------------------------------------------------------------ a turn

    async def _sleep(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), TURN_SECONDS)
        self._woken.clear()

    def _turn(self) -> None:
        now = time.monotonic()
        if self._due("leases", now, LEASES_SECONDS):
            self._cache.require_in_place()
            self._cache.poll_leases(now)
            self._follow_older(now)
            self._look_at_purges()
        if self._cache.purger.busy:
            self._purge(now + TURN_SECONDS)
        self._listing.take(
            self._dispatcher.space if self._dispatcher else None,
            awaited=self._search.lacks_objects(listed=self._listing.listed),
        )
        self._awaited_labels.join(listed=self._listing.listed)
        if not self._awaited_labels:
            self._objects.look(len(self._catalog))
            if self._listing.listed:
                self._objects.finish()
        if self._reload is not None:
            self._status.last_errors.extend(self._reload.look(now))
        if self._dispatcher is None:
            self._identify()
        if self._dispatcher is not None:
            self._try_holes_again(self._dispatcher)
            self._dispatcher.turn(self._pool.slots)
        if self._due("upkeep", now, UPKEEP_SECONDS):
            self._upkeep()

    def _look_at_purges(self) -> None:
        if self._cache.purger.look():
            self._cache.older.follow_list(self._cache.layout)
            self._status.last_errors.clear()  # they may contain keys
            if self._dispatcher is not None:
                self._dispatcher.purged()

    def _purge(self, until: float) -> None:
        lost = self._cache.purger.step(until)
        if self._dispatcher is not None:
            self._dispatcher.lost(lost)

    def _follow_older(self, now: float) -> None:
        older = self._cache.older
        if not older:
            return
        older.poll(now)
        if self._cache.meta.complete:
            older.give_way(older.bytes)
        older.end_empty()
        self._cache.count_older()

    def _try_holes_again(self, dispatcher: Dispatcher) -> None:
        count = 0
        if self._retry_holes:
            count += dispatcher.makeups.retry_holes()
            self._retry_holes = False
        if self._listing.relisted and self._listing.listed:
            count += dispatcher.makeups.retry_holes(has_new_version(self._listing.relisted))
            self._listing.relisted = []
        if count:
            _log.warning("supervisor retries %d %s", count, "hole" if count == 1 else "holes")

    def _after_turn(self) -> None:
        """Show the status and check the limits, even while the disk is full."""
        now = time.monotonic()
        if self._due("show", now, SHOW_SECONDS):
            self._show()
        self._check_limits(now)

    def _due(self, what: str, now: float, seconds: float) -> bool:
        if now < self._next.get(what, 0.0):
            return False
        self._next[what] = now + seconds
        return True

    def _upkeep(self) -> None:
        patience = PATIENCE * self._config.sampling.timeout_seconds + GRACE_SECONDS
        self._status.last_errors.extend(self._pool.kill_stalled(patience))
        self._warn_of_holders()
        self._cache.maintain()
        self._cache.older.maintain()
        is_known = self._shown.started_at is not None
        if is_known and self._due("history", time.monotonic(), HISTORY_SECONDS):
            self._records.append_history(self._shown)

    def _warn_of_holders(self) -> None:
        now = time.monotonic()
        blocked = self._dispatcher.writes.blocked if self._dispatcher is not None else ""
        if not blocked:
            self._blocked_since = now
        elif (
            self._due("warning", now, WARN_SECONDS) and now - self._blocked_since > WARN_SECONDS
        ):
            self._status.last_errors.append(
                f"samplers have waited for a minute or more for {blocked}"
            )

    def _check_limits(self, now: float) -> None:
        limits, dispatcher = self._limits, self._dispatcher
        duration = math.inf if limits.duration_seconds is None else limits.duration_seconds
        if now - self._started >= duration:
            self._end()
        if dispatcher is None:
            return
        if limits.samples is not None and dispatcher.drawn_this_run >= limits.samples:
            self._end()
        elif dispatcher.only_set_aside and (limits.until_full or limits.samples is not None):
            self._end()
            _log.warning(
                "service ended without all samples: %s", dispatcher.makeups.status.words
            )
        elif dispatcher.at_rest and (limits.until_full or limits.samples is not None):
            self._end()
            if not limits.until_full:
                _log.warning(
                    "service ended after %d samples in this run, because no more will come: %s",
                    dispatcher.drawn_this_run,
                    dispatcher.final_reason,
                )

    # ------------------------------------------------------------------ status

    def _show(self) -> None:
        self._shown = self._current_status()
        for said in self._status.outage_messages(self._dispatcher, time.monotonic()):
            _log.warning("%s", said)
        self._on_status(self._shown)
        self._records.show(self._shown, self._hole_kinds, time.monotonic())

    def _show_the_end(self) -> None:
        # First without reading the cache, because it may be gone.
        self._shown = replace(
            self._shown,
            state="stopped",
            waiting_for=None,
            workers=0,
            worker_states=[],
            pid=None,
        )
        self._shown = self._current_status(stopped=True)

    @property
    def _hole_kinds(self) -> Mapping[str, int]:
        return self._dispatcher.hole_kinds if self._dispatcher is not None else {}

    def _current_status(self, *, stopped: bool = False) -> Status:
        endless = self._introduction is not None and not self._introduction["listed"]
        if self._dispatcher is not None:
            population = self._dispatcher.draws.population
            listed = self._listing.listed and not endless
            if listed:
                self._guard(lambda: self._status.measure_population(population))
        return self._status.status(
            self._dispatcher,
            self._pool,
            listed=self._listing.listed,
            endless=endless,
            startup_event=self._search.waiting_for,
            stopped=stopped,
            disk_full=self._disk_full,
            restart_for=self._reload.restart_for if self._reload else [],
            left_out=self._listing.left_out,
            catalogs=self._listing.catalogs,
            ended_by=printable(coded_text(self._error)) if stopped and self._error else None,
        )
