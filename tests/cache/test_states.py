"""Cache against a model: whatever is done to it, in whatever order, over restarts."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from growcache.cache.cache import Cache
from growcache.cache.eviction_policy import choose_early_retirements, choose_evictions
from growcache.cache.files import allocated_tree, shard_number
from growcache.cache.formats import open_shard
from growcache.cache.index.reader import read_index
from growcache.cache.reader_lease import Lease
from growcache.cache.status import read_status
from tests.cache.making import KINDS, MAX_BYTES, need, opened, permit_of, write

POLICIES = st.sampled_from(["fifo", "random", "most_used"])
PICK = st.integers(0, 10**6)


class CacheMachine(RuleBasedStateMachine):
    """The model: which shards are live, retired, gone; what each reader may still open."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="growcache-")) / "cache"
        self.cache: Cache | None = None
        self.now = 0.0
        self.next = 0
        self.live: dict[int, int] = {}  # number → samples
        self.retired: set[int] = set()
        self.open: list[tuple[Lease, set[int], set[int]]] = []  # lease, held, read
        self.writing: dict[str, int] = {}  # permit → shard
        self.drawn = self.evicted = self.delivered = self.uncounted = 0

    def teardown(self) -> None:
        for lease, _, _ in self.open:
            lease.close()
        if self.cache is not None:
            self.cache.close()
        shutil.rmtree(self.root.parent)

    @property
    def it(self) -> Cache:
        assert self.cache is not None
        return self.cache

    @initialize(kind=st.sampled_from(sorted(KINDS)))
    def begin(self, kind: str) -> None:
        self.identity = KINDS[kind]
        self.cache = opened(self.root, self.identity)

    # The sampler and the supervisor

    def _make_room(self, nbytes: int, policy: str, min_uses: int) -> None:
        cache = self.it
        candidates = cache.candidates()
        assert {c.number for c in candidates} == set(self.live)
        choice = choose_evictions(
            policy, candidates, nbytes - cache.bytes_left(), min_uses, self.drawn
        )
        self._retired(choice.evict)
        deleted = cache.evict(choice.evict)
        assert set(choice.evict) <= set(deleted) | self._held(), "free, yet not deleted"
        self.retired -= set(deleted)
        if not choice.short_bytes:
            return
        left = [c for c in candidates if c.number not in choice.evict]
        ahead = choose_early_retirements(
            policy, left, MAX_BYTES, cache.totals().retired_bytes, min_uses, self.drawn
        )
        cache.retire(ahead)
        self._retired(ahead)

    def _retired(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            self.evicted += self.live.pop(number)
            self.retired.add(number)

    def _held(self) -> set[int]:
        return set().union(*(held for _, held, _ in self.open))

    @rule(count=st.sampled_from([0, 1, 8, 60]), policy=POLICIES, min_uses=st.integers(0, 1))
    def write_one(self, count: int, policy: str, min_uses: int) -> None:
        self.write_a_shard(count, policy, min_uses)

    def write_a_shard(self, count: int, policy: str, min_uses: int) -> None:
        number, permit = self.next, permit_of(self.next)
        self.it.meta.issue(number)
        self.next += 1
        nbytes = need(number, count, self.identity)
        if not self.it.reserve(permit, nbytes):
            self._make_room(nbytes, policy, min_uses)
            if not self.it.reserve(permit, nbytes):
                return
        write(self.it.layout, permit, number, count, self.identity)
        self.writing[permit] = count

    @rule(min_uses=st.integers(0, 1))
    def write_many_at_once(self, min_uses: int) -> None:
        for _ in range(6):
            self.write_a_shard(count=60, policy="fifo", min_uses=min_uses)

    @precondition(lambda self: self.writing)
    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        from growcache.cache.sidecar import Sidecar

        permit = sorted(self.writing)[pick % len(self.writing)]
        count, number = self.writing.pop(permit), _group_of(permit)
        path = self.it.layout.incoming_path(permit, number, ".json")
        (row,) = self.it.commit(permit, [Sidecar.from_bytes(path.read_bytes())])
        assert (row.number, row.samples) == (number, count)
        self.live[number] = count
        self.drawn += count

    @precondition(lambda self: self.writing)
    @rule(pick=PICK)
    def sampler_dies(self, pick: int) -> None:
        permit = sorted(self.writing)[pick % len(self.writing)]
        del self.writing[permit]
        self.it.discard(permit, [_group_of(permit)])

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def evict_at_will(self, pick: int) -> None:
        number = sorted(self.live)[pick % len(self.live)]
        self._retired((number,))
        self.retired -= set(self.it.evict([number]))

    @rule()
    def poll(self) -> None:
        self.now += 1.0
        self.it.poll_leases(self.now)
        self.delivered += self.uncounted
        self.uncounted = 0
        self.retired &= self._held()

    @rule()
    def maintain(self) -> None:
        self.it.maintain()

    # Readers

    @precondition(lambda self: len(self.open) < 3)
    @rule(job=st.sampled_from(["a", "b", ""]))
    def take_a_snapshot(self, job: str) -> None:
        numbers = [row.number for row in read_index(self.root).shards]
        assert set(numbers) == set(self.live)
        lease = Lease.create(self.root, job, numbers)
        lease.drop(set(numbers) - {row.number for row in read_index(self.root).shards})
        self.open.append((lease, set(numbers), set()))

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def snapshot_while_evicting(self, pick: int) -> None:
        """The shard is retired after the reader chose it and before its lease is seen."""
        numbers = [row.number for row in read_index(self.root).shards]
        self.evict_at_will(pick)
        lease = Lease.create(self.root, "a", numbers)
        gone = set(numbers) - {row.number for row in read_index(self.root).shards}
        lease.drop(gone)
        self.open.append((lease, set(numbers) - gone, set()))

    @precondition(lambda self: any(held for _, held, _ in self.open))
    @rule(pick=PICK, mapped=st.booleans())
    def read_a_shard(self, pick: int, mapped: bool) -> None:
        lease, held, read = next(entry for entry in self.open if entry[1])
        number = sorted(held)[pick % len(held)]
        lease.mark_read(number, mapped=mapped)
        if number not in read:
            read.add(number)
        if not mapped:
            held.discard(number)

    @precondition(lambda self: self.open)
    @rule(pick=PICK)
    def end_a_snapshot(self, pick: int) -> None:
        lease, _, read = self.open.pop(pick % len(self.open))
        # Uses are counted for shards that are still known when the lease is finished.
        self.uncounted += sum(self._samples_ever(number) for number in read)
        lease.close()

    def _samples_ever(self, number: int) -> int:
        with closing(sqlite3.connect(self.it.layout.index)) as connection:
            rows = connection.execute(
                "SELECT samples FROM shards WHERE number = ?", [number]
            ).fetchall()
        return int(rows[0][0]) if rows else 0

    # Time passes

    @rule()
    def restart(self) -> None:
        """Permits are lost; leases of readers that live on hold."""
        self.it.close()
        self.writing.clear()
        # As after a kill: nothing but the lock tells readers that nobody counts now.
        self.cache = opened(self.root, self.identity)
        self.delivered += self.uncounted
        self.uncounted = 0
        self.retired &= self._held()

    # What must always hold

    @invariant()
    def the_bound_holds(self) -> None:
        assert allocated_tree(self.root) <= MAX_BYTES

    @invariant()
    def what_is_charged_covers_what_is_there(self) -> None:
        if self.cache is not None:
            charged = self.it.bytes_used + self.it.space.reserved
            assert allocated_tree(self.root) <= charged <= MAX_BYTES

    @invariant()
    def rows_and_totals_are_the_models(self) -> None:
        if self.cache is None:
            return
        view = read_index(self.root)
        assert {row.number: row.samples for row in view.shards} == self.live
        totals = self.it.totals()
        assert totals == view.totals
        assert (totals.samples, totals.drawn) == (sum(self.live.values()), self.drawn)
        assert totals.evicted_samples == self.evicted
        assert totals.retired_shards == len(self.retired)
        assert totals.delivered == self.delivered
        assert totals.lost_shards == 0

    @invariant()
    def every_live_shard_and_every_held_one_is_whole(self) -> None:
        if self.cache is None:
            return
        for number in {*self.live, *self._held()}:
            assert self.it.layout.sidecar(number).exists()
        for row in read_index(self.root).shards:
            kind = self.identity
            shard = open_shard(
                self.it.layout, row.number, row.samples, kind.schema, kind.cache_format
            )
            assert not row.samples or shard.digest() == row.digest
            shard.close()

    @invariant()
    def no_other_file_lies_about(self) -> None:
        if self.cache is None:
            return
        known = set(self.live) | self.retired
        assert {shard_number(p) for p in self.it.layout.shards.iterdir()} == known
        assert {_group_of(p.name) for p in self.it.layout.incoming.iterdir()} == {
            _group_of(permit) for permit in self.writing
        }

    @invariant()
    def status_can_be_read(self) -> None:
        if self.cache is not None:
            assert read_status(self.root).state == "running"


def _group_of(permit: str) -> int:
    return int(permit.split("-")[1])


def _settings(**values: Any) -> settings:
    return settings(deadline=None, suppress_health_check=list(HealthCheck), **values)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = _settings(max_examples=25, stateful_step_count=30)
