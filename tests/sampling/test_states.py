"""Permits, leases, readers, uses and restarts against a model: in whatever order they come.

The dispatcher, the cache and the snapshots are the real ones; samplers and the clock are
simulated. The checks are of safety and of progress: a sampler can go on, or the service names
the event that all wait for, and names it truly. At the end of every run all readers read
and all samplers work, and the cache must turn over.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from growcache.cache.cache import Cache
from growcache.cache.files import allocated_tree
from growcache.cache.incoming import write_incoming
from growcache.cache.index.reader import read_index
from growcache.cache.index.writer import IndexWriter
from growcache.cache.lease_views import read_leases
from growcache.cache.reader_lease import Lease
from growcache.cache.sidecar import Sidecar
from growcache.config import Config
from growcache.errors import CacheMissingError
from growcache.loading.snapshot import Snapshot
from growcache.sampling.dispatch import Dispatcher
from growcache.sampling.fill import EncodedShard, encode_group
from growcache.sampling.fingerprint import identify
from growcache.sampling.listing_ingest import LISTING_SHARE
from growcache.sampling.messages import Permit
from growcache.sampling.objects import Objects
from growcache.sampling.permits import RunLimits
from growcache.sampling.sampler_memory import VisitResult
from growcache.sampling.sampler_pool import SamplerDeath
from growcache.sampling.sizing import Sizing
from growcache.schema import Schema
from growcache.store.catalog import Catalog
from growcache.store.contract import Entry
from tests.dead_readers import killed

SCHEMA = Schema.from_sample({"x": np.zeros(512, "<f4")})
SIZING = Sizing(
    samples_per_object=1, stride_bytes=2048.0, overhead_bytes=128, whole=True, shard_samples=8
)
BOUNDS = (780_000, 840_000, 1_000_000)
SLOTS = 4
MOST_DEATHS = 12  # of samplers on one group; with 15 the service rightly gives up
RESUME_SECONDS = 50.0
PICK = st.integers(0, 10**6)


def value_of(key: str) -> float:
    """What every value of an object's sample is."""
    return float(int(key.removeprefix("k")))


@dataclass
class Work:
    """What a played sampler does."""

    permit: Permit
    shards: list[EncodedShard] = field(default_factory=list)  # once they are encoded
    granted: bool = False


class Service(RuleBasedStateMachine):
    """The model: the digest of each number ever committed, and the parts of each round."""

    def __init__(self) -> None:
        super().__init__()
        # In memory, where there is such a file system: every step syncs.
        memory = Path("/dev/shm")
        self.folder = Path(
            tempfile.mkdtemp(prefix="growcache-", dir=memory if memory.is_dir() else None)
        )
        self.root = self.folder / "cache"
        self.now = time.monotonic()  # a start looks at the leases by the real clock
        self.cache: Cache | None = None
        self.work: dict[str, Work] = {}
        self.deaths: dict[int, int] = {}
        self.readers: list[Snapshot] = []
        self.digests: dict[int, str] = {}
        self.seen: dict[int, set[str]] = {}  # round → keys
        self.listed = 0
        self.allowed = 0

    def teardown(self) -> None:
        try:
            if self.cache is not None:
                self.everybody_goes_on()
        finally:
            for reader in self.readers:
                reader.close()
            if self.cache is not None:
                self.it.close()
                self.catalog.close()
            shutil.rmtree(self.folder)

    @property
    def it(self) -> Cache:
        assert self.cache is not None
        return self.cache

    @initialize(
        bound=st.sampled_from(BOUNDS),
        eviction=st.sampled_from(["fifo", "random", "most_used"]),
        min_uses=st.sampled_from([0, 1, 2]),
        objects=st.integers(1, 120),
    )
    def begin(self, bound: int, eviction: str, min_uses: int, objects: int) -> None:
        self.config = Config.model_validate(
            {
                "source": {"url": "memory://bucket/*"},
                "cache": {
                    "path": self.root,
                    "max_bytes": bound,
                    "min_free": 0,
                    "eviction": eviction,
                    "min_uses": min_uses,
                    "resume_seconds": RESUME_SECONDS,
                },
            }
        )
        self.bound = self.allowed = bound
        self._open()
        self.list_more(objects)

    def _open(self) -> None:
        cache = self.config.cache.model_copy(update={"max_bytes": self.bound})
        self.cache = Cache.open(self.root, cache)
        self.catalog = Catalog.open(self.it.layout.catalog)
        sizes = {"record_bytes": self.it.record_bytes(SCHEMA), "sample_bytes": SCHEMA.nbytes}
        identity = identify(self.config, SCHEMA, SIZING, {}, sizes)
        self.it.set_identity(identity)
        self.fingerprint = identity.fingerprint
        self.dispatcher = Dispatcher(
            self.config,
            self.it,
            self.catalog,
            Objects(self.catalog),
            identity,
            SIZING,
            RunLimits(),
            clock=lambda: self.now,
        )
        smallest = self.config.cache.model_copy(update={"max_bytes": BOUNDS[0]})
        self.dispatcher.check_bound(self.config.model_copy(update={"cache": smallest}))

    # The store

    @precondition(lambda self: self.listed < 400)
    @rule(objects=st.integers(1, 60))
    def list_more(self, objects: int) -> None:
        first, self.listed = self.listed, self.listed + objects
        self.catalog.append(
            [Entry(f"k{n}", 2176, None, 0.0) for n in range(first, self.listed)]
        )
        self.it.space.catalog_bytes = self.catalog.allocated_bytes

    @rule(complete=st.booleans())
    def the_listing_ends_or_begins_anew(self, complete: bool) -> None:
        if complete:
            self.catalog.flush()
        self.catalog.complete = complete
        ahead = min(self.bound // LISTING_SHARE, self.dispatcher.space.spare)
        self.it.space.listing_ahead = 0 if complete else ahead

    # Samplers

    def _pick(self, pick: int, wanted: Callable[[Work], bool]) -> Work | None:
        found = [self.work[name] for name in sorted(self.work) if wanted(self.work[name])]
        return found[pick % len(found)] if found else None

    @rule()
    def turn(self) -> None:
        """One turn of the supervisor, after which a sampler can go on, or the awaited event is named."""
        self.it.poll_leases(self.now)
        for permit in self.dispatcher.writes.grant():
            self.work[permit].granted = True
        while len(self.work) < SLOTS:
            given = self.dispatcher.next_permit()
            if given is None:
                break
            assert given.id not in self.work
            assert not {n for w in self.work.values() for n in w.permit.shards} & {
                *given.shards
            }, "two samplers fill the same shard"
            self.work[given.id] = Work(given)
        self._somebody_goes_on_or_the_event_is_named()

    def _somebody_goes_on_or_the_event_is_named(self) -> None:
        if any(work.granted or not work.shards for work in self.work.values()):
            return  # a sampler writes, or reads from the store
        verdict, said = self.dispatcher.verdict, self.dispatcher.writes.blocked
        if not self.work:
            assert not verdict.granted
            said = verdict.waiting_for or ""
        assert said or verdict.state == "complete", (verdict, self.work)
        leases = read_leases(self.root)
        reading = {lease.job for lease in leases if lease.open and lease.job}
        if "no job reads" in said:
            assert not reading, said
        if "to release" in said:
            assert any(lease.holding() for lease in leases if not lease.closed), said
        if "to read more" in said:
            assert reading, said

    @rule(pick=PICK)
    def encode(self, pick: int) -> None:
        work = self._pick(pick, lambda work: not work.shards)
        if work is None:
            return
        permit = work.permit
        visited = [
            VisitResult([{"x": np.full(512, value_of(visit.entry.key), "<f4")}], [(0, 1)])
            for visit in permit.visits
        ]
        work.shards = encode_group(permit, visited, SCHEMA, self.fingerprint, "tfrecord")
        self.dispatcher.need(permit.id, sum(shard.needed_bytes for shard in work.shards))

    @rule(pick=PICK)
    def write(self, pick: int) -> None:
        work = self._pick(pick, lambda work: work.granted)
        if work is None:
            return
        permit = work.permit
        written = [
            write_incoming(self.it.layout, permit.id, shard.sidecar, shard.files)
            for shard in work.shards
        ]
        del self.work[permit.id]
        self.dispatcher.written(permit.id)
        for sidecar in written:
            self._committed(sidecar, permit)

    def _committed(self, sidecar: Sidecar, permit: Permit) -> None:
        known = self.digests.setdefault(sidecar.number, sidecar.digest)
        assert known == sidecar.digest, "a number stands for one content"
        seen = self.seen.setdefault(permit.round, set())
        keys = {visit.entry.key for visit in permit.visits}
        assert len(keys) == len(permit.visits)
        assert not keys & seen, "a part was drawn twice in a round"
        seen |= keys

    @rule(pick=PICK)
    def a_sampler_dies(self, pick: int) -> None:
        work = self._pick(
            pick, lambda work: self.deaths.get(work.permit.group, 0) < MOST_DEATHS
        )
        if work is not None:
            group = work.permit.group
            self.deaths[group] = self.deaths.get(group, 0) + 1
            del self.work[work.permit.id]
            self.dispatcher.abandoned(work.permit.id, SamplerDeath(-9))

    @rule(pick=PICK, disk=st.booleans())
    def a_group_fails_for_now(self, pick: int, disk: bool) -> None:
        wanted = (lambda work: work.granted) if disk else (lambda work: not work.shards)
        work = self._pick(pick, wanted)
        if work is not None:
            del self.work[work.permit.id]
            self.dispatcher.failed(work.permit.id, "503 SlowDown", disk=disk)

    # Readers

    @precondition(lambda self: len(self.readers) < 3)
    @rule(job=st.sampled_from(["a", "b", ""]))
    def a_reader_comes(self, job: str) -> None:
        try:
            self.readers.append(Snapshot.take(self.root, job=job))
        except CacheMissingError:
            assert not self.digests

    @precondition(lambda self: any(len(reader) for reader in self.readers))
    @rule(pick=PICK)
    def a_reader_reads(self, pick: int) -> None:
        readers = [reader for reader in self.readers if len(reader)]
        self._read(readers[pick % len(readers)], pick)

    def _read(self, reader: Snapshot, pick: int) -> None:
        i = pick % len(reader)
        found, origin = np.asarray(reader[i]["x"]), reader.origin(i)
        assert (found == value_of(origin.key)).all()

    def _read_all(self, reader: Snapshot) -> None:
        for i in range(len(reader)):
            self._read(reader, i)

    @precondition(lambda self: self.readers)
    @rule(pick=PICK)
    def a_reader_reads_all_and_goes(self, pick: int) -> None:
        reader = self.readers.pop(pick % len(self.readers))
        self._read_all(reader)
        reader.close()

    @precondition(lambda self: self.readers)
    @rule(pick=PICK)
    def a_reader_dies(self, pick: int) -> None:
        reader = self.readers.pop(pick % len(self.readers))
        with killed(reader.lease):
            reader.close()

    @rule(pick=PICK)
    def a_shard_goes_between_two_looks_of_a_reader(self, pick: int) -> None:
        rows = [row for row in read_index(self.root).shards if row.samples]
        if not rows or len(self.readers) > 2:
            return
        create, gone = Lease.create, rows[pick % len(rows)].number

        def later(*arguments: Any, **named: Any) -> Lease:
            self.it.evict([gone])
            return create(*arguments, **named)

        with mock.patch.object(Lease, "create", later):
            reader = Snapshot.take(self.root, job="a")
        assert gone not in {row.number for row in reader.shards}
        self.readers.append(reader)

    @rule(pick=PICK)
    def a_reader_comes_between_two_steps_of_an_eviction(self, pick: int) -> None:
        live = [row.number for row in read_index(self.root).shards]
        if not live or len(self.readers) > 2:
            return
        write, came = IndexWriter.write, len(self.readers)

        def later(ledger: IndexWriter, change: Callable[[], None]) -> None:
            if len(self.readers) == came:
                self.readers.append(Snapshot.take(self.root, job="b"))
            write(ledger, change)

        with mock.patch.object(IndexWriter, "write", later):
            self.it.evict([live[pick % len(live)]])

    # Time, and those who run the service

    @rule(seconds=st.sampled_from([0.1, 1.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.it.poll_leases(self.now)
        self.it.maintain()

    @rule()
    def restart(self) -> None:
        """As after a kill: what samplers were at is lost."""
        self.work.clear()
        self.it.close()
        self.catalog.close()
        self._open()
        self.it.poll_leases(self.now)
        objects, self.listed = self.listed, 0
        self.list_more(objects)  # what was not flushed is listed again

    @rule(bound=st.sampled_from(BOUNDS))
    def the_bound_changes(self, bound: int) -> None:
        self.allowed = max(bound, self.it.bytes_used + self.it.space.reserved)
        self.bound = bound
        bounds = self.config.cache.model_copy(update={"max_bytes": bound})
        self.dispatcher.adopt_settings(self.config.model_copy(update={"cache": bounds}))

    # What must never happen

    @invariant()
    def the_bound_holds(self) -> None:
        if self.cache is None:
            return
        charged = self.it.bytes_used + self.it.space.reserved
        assert allocated_tree(self.root) <= charged <= self.allowed
        self.allowed = max(self.bound, min(self.allowed, charged))

    @invariant()
    def no_shard_disappears_under_a_reader(self) -> None:
        for reader in self.readers:
            for row in reader.shards:
                assert reader.file(row.number).exists()

    @invariant()
    def rows_are_what_was_committed(self) -> None:
        if self.cache is None:
            return
        view = read_index(self.root)
        for row in view.shards:
            assert self.digests[row.number] == row.digest
        totals = view.totals
        assert totals == self.it.totals()
        assert totals.drawn_shards == len(self.digests)
        assert totals.drawn == totals.samples + totals.evicted_samples
        assert totals.lost_shards == 0

    # What must always happen

    @rule()
    def everybody_goes_on(self) -> None:
        """Readers end what they are at and read all that comes; samplers do their work."""
        while self.readers:
            self.a_reader_reads_all_and_goes(0)
        self.the_listing_ends_or_begins_anew(complete=True)
        before = len(self.digests)
        self.now += 2 * RESUME_SECONDS
        for _ in range(60):
            self.now += 60.0  # more than any group is put off
            self._go_once_around()
            if self.dispatcher.complete or len(self.digests) >= before + 12:
                break
        else:
            raise AssertionError(f"nothing came of it: {self.dispatcher.verdict}")
        for _ in range(2):
            self.time_passes(2 * RESUME_SECONDS)
        open_leases = {reader.lease.path for reader in self.readers}
        assert {*self.it.layout.leases.iterdir()} == open_leases, (
            "the dead hold nothing for ever"
        )

    def _go_once_around(self) -> None:
        self.turn()
        for _ in range(SLOTS):
            self.encode(0)
        self.turn()
        for _ in range(SLOTS):
            self.write(0)
        before = list(self.readers)
        self.a_reader_comes("a")
        for reader in self.readers[len(before) :]:
            self._read_all(reader)
        for reader in before:  # only now: as with a loader, some snapshot is always held
            self.readers.remove(reader)
            reader.close()


TestService = Service.TestCase
TestService.settings = settings(
    deadline=None,
    max_examples=20,
    stateful_step_count=30,
    suppress_health_check=list(HealthCheck),
)
