"""Counts of deliveries: the user's report, and the counters in the lease.

The lease belongs to the producer, which may be another process. The loop's process writes its
counters into the lease file at fixed offsets: before a pass ends, and a few times a second. A
thread does this, because each write releases the interpreter's lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.cache.files import CacheLayout, directory_of, generation_in, generation_paths
from growcache.cache.index.reader import IndexView
from growcache.cache.lease_views import COUNTERS_AT, LeaseCounters, lease_path
from growcache.cache.locks import close_owned, open_owned
from growcache.cache.reader_lease import COUNTERS_SECONDS
from growcache.cache.sidecar import Sidecar
from growcache.errors import CorruptShardError
from growcache.loading.framework import Integers
from growcache.loading.report_table import WARN_REUSE, report_table
from growcache.loading.service_watch import ServiceWatches
from growcache.loading.snapshot import Snapshot
from growcache.seeding import hash64

SMALL_VISIT_BYTES = 1_000_000  # below this, a request takes longer to start than to transfer
WAIT_SHARE = 0.1  # an epoch is held up if it waits for more than this share of its time

Floats: TypeAlias = npt.NDArray[np.float64]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Report:
    """Figures about a loader's deliveries, in its latest epoch and since it was made.

    Deliveries are counted per shard: each sample of a shard counts as delivered once before any
    counts as delivered twice. That is exact if every pass is read to its end. Otherwise the
    figures about distinct samples, ``uses_max`` and ``ess_samples`` are estimates.

    Attributes:
        samples: Samples delivered in the latest epoch.
        new_samples: Samples of these that this loader delivered for the first time.
        passes: Passes over the cache that have started.
        cache_samples: Samples in the latest snapshot.
        reuse: Delivered samples divided by distinct samples, since the loader was made.
        reuse_recent: The same during the latest turnover, in which as many distinct samples
            were delivered as the cache holds. Equal to ``reuse`` until the second turnover has
            ended.
        uses_max: Deliveries of the most used sample.
        coverage_samples: Distinct samples divided by the population; None while the population
            is unknown.
        coverage_objects: Objects with a delivered sample divided by all objects; None while
            their number is unknown.
        ess_samples: Effective sample size (Σu)²/Σu² of the uses u.
        age_seconds_mean: Mean seconds since the samples of the latest snapshot were drawn.
        age_seconds_max: Seconds since the oldest of them was drawn.
        skipped: Samples that were never delivered because their shards are corrupt.
        wait_seconds: Seconds that the consumer waited for batches in the latest epoch.
        limited_by: The bottleneck: ``"training"``, ``"loading"``, or ``"cache"`` (waiting for
            samples).
        gather: Where batches are put together: ``"thread"`` or ``"process"``.
        generation: Generation of the latest snapshot. Each ``--replace`` starts the next one.
        fingerprint: Fingerprint of the configuration that drew this generation.
    """

    samples: int = 0
    new_samples: int = 0
    passes: int = 0
    cache_samples: int = 0
    reuse: float = 0.0
    reuse_recent: float = 0.0
    uses_max: float = 0.0
    coverage_samples: float | None = None
    coverage_objects: float | None = None
    ess_samples: float = 0.0
    age_seconds_mean: float = 0.0
    age_seconds_max: float = 0.0
    skipped: int = 0
    wait_seconds: float = 0.0
    limited_by: str = "training"
    gather: str = "thread"
    generation: int = 0
    fingerprint: str | None = None

    def metrics(self, prefix: str = "data/") -> dict[str, float]:
        """Return all known numbers by name, each name with ``prefix``, for an experiment tracker.

        >>> Report(samples=64, reuse=1.5).metrics("")["reuse"]
        1.5
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            prefix + name: float(value)
            for name, value in values.items()
            if isinstance(value, int | float)
        }

    def _repr_html_(self) -> str:
        """Return a table for a notebook cell, with warnings first."""
        return report_table(self)

    def __str__(self) -> str:
        covered = "" if self.coverage_samples is None else f", {self.coverage_samples:.1%} seen"
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return (
            f"{self.samples} samples ({self.new_samples} new) of {self.cache_samples} cached, "
            f"reuse {self.reuse:.2f}{covered}, age {self.age_seconds_mean:.0f} s, "
            f"waited {self.wait_seconds:.2f} s, limited by {self.limited_by}{skipped}"
        )


@dataclass(frozen=True, slots=True)
class PassFacts:
    """Facts of a snapshot for the report, as columns, because it may have ten thousand shards."""

    numbers: Integers
    samples: Integers
    drawn_at: Floats
    left_out: Integers
    view: IndexView
    waited_seconds: float

    @classmethod
    def of(cls, snapshot: Snapshot, waited_seconds: float) -> PassFacts:
        rows = snapshot.shards
        others = [row.number for row in snapshot.view.shards if not snapshot.has(row.number)]
        return cls(
            np.array([row.number for row in rows], np.int64),
            np.array([row.samples for row in rows], np.int64),
            np.array([row.drawn_at for row in rows], np.float64),
            np.array(others, np.int64),
            replace(snapshot.view, shards=[], retired=[], uses={}, counted=frozenset()),
            waited_seconds,
        )


@dataclass(slots=True)
class UseSums:
    once: float = 0.0
    squares: float = 0.0
    most: float = 0.0

    def add(self, delivered: Iterable[int], sizes: Iterable[int]) -> None:
        size = np.maximum(np.array(list(sizes), np.int64), 1)
        counts = np.array(list(delivered), np.int64)
        uses, more = np.divmod(counts, size)  # ``more`` samples have one use more
        self.once += float(counts.sum())
        self.squares += float(((size - more) * uses**2 + more * (uses + 1) ** 2).sum())
        self.most = max(self.most, float((uses + (more > 0)).max(initial=0)))


class DeliveryCounts:
    """Counts of deliveries per shard, for the consumer's thread.

    Evicted shards are kept as sums. A refetched shard counts as new.
    """

    def __init__(self, root: Path) -> None:
        self._layout = CacheLayout(root)
        self._facts: PassFacts | None = None
        self._fingerprint: str | None = None  # of the generation that is being read
        self._passes = 0
        self._cached = 0  # samples in the latest snapshot
        self._sizes: dict[int, int] = {}  # of shards that may still be delivered
        self._delivered: dict[int, int] = {}  # samples delivered, by shard
        self._gone = UseSums()
        self._held: deque[tuple[int, set[int]]] = deque()  # such shards, by pass
        self._objects = np.zeros(0, np.uint64)  # hashes of the delivered objects, in order
        self._objects_of: set[int] = set()  # shards whose objects were counted
        self._total = self._distinct = self._skipped = 0
        self._turn = (0, 0, 0)  # delivered, distinct and cached when the turnover began
        self._recent: float | None = None
        self._warned = False
        self._epoch = 0
        self.begin_epoch()

    def begin_epoch(self) -> int:
        """Return the epoch's number, which `deliver` takes."""
        self._epoch += 1
        self._began = time.monotonic()
        self._ended: float | None = None
        self._samples = self._new = 0
        self._waited = self._waited_cache = 0.0
        return self._epoch

    def end_epoch(self) -> None:
        self._ended = time.monotonic()

    def begin_pass(self, number: int, facts: PassFacts, *, again: bool = False) -> None:
        """Record the snapshot of a pass; ``again`` if the pass is continued.

        No array operation runs here; see `deliver`.
        """
        self._passes += not again
        self._waited_cache += facts.waited_seconds
        numbers, samples = facts.numbers.tolist(), facts.samples.tolist()
        self._enter_generation(facts.view)
        self._sizes.update(zip(numbers, samples, strict=True))
        if again:  # the rest of the same pass was leased again
            self._held.append((number, {*numbers, *facts.left_out.tolist()}))
            return
        self._facts = facts
        if self._held and number < self._held[-1][0]:
            self._held.clear()  # a state of an earlier pass was loaded
        self._held.append((number, {*numbers, *facts.left_out.tolist()}))
        self._cached = sum(samples)
        if self._passes == 1:
            self._turn = (0, 0, self._cached)

    def _enter_generation(self, view: IndexView) -> None:
        """Turn the last generation's shards into sums, because the new one reuses the numbers."""
        root = view.root or self._layout.root
        if self._fingerprint not in (None, view.fingerprint):
            gone = [n for n in self._delivered if n in self._sizes]
            self._gone.add([self._delivered[n] for n in gone], [self._sizes[n] for n in gone])
            self._sizes, self._delivered = {}, {}
            self._held.clear()
            self._objects_of = set()
        if root != self._layout.root:
            self._layout = CacheLayout(root)
        self._fingerprint = view.fingerprint

    def skip(self, lost: int) -> None:
        self._skipped += lost

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def deliver(self, counts: Mapping[int, int], epoch: int) -> None:
        """Count delivered samples per shard, also for an epoch that has ended.

        No array operation runs here, because it would release the GIL. Getting it back can take
        the loop a switch interval (5 ms).
        """
        for number, count in counts.items():
            before, size = self._delivered.get(number, 0), self._sizes.get(number, 0)
            if size:  # else it is gone, and an abandoned iterator reports it late
                self._delivered[number] = before + count
            self._total += count
            new = min(before + count, size) - min(before, size)
            self._distinct += new
            if epoch == self._epoch:
                self._samples += count
                self._new += new
        self._turn_over()

    def enter(self, pass_number: int) -> None:
        before = len(self._held)
        while self._held and self._held[0][0] < pass_number:
            self._held.popleft()
        if len(self._held) == before:
            return
        gone = self._sizes.keys() - set[int]().union(*(numbers for _, numbers in self._held))
        used = [number for number in gone if number in self._delivered]
        sizes = {number: self._sizes.pop(number) for number in gone}
        self._gone.add(map(self._delivered.pop, used), [sizes[number] for number in used])
        self._objects_of -= gone

    def _turn_over(self) -> None:
        delivered, distinct, cached = self._turn
        if not cached or self._distinct - distinct < cached:
            return
        # In the first turnover the cache fills, so its few samples are read often.
        if distinct:
            self._recent = (self._total - delivered) / (self._distinct - distinct)
        self._turn = (self._total, self._distinct, self._cached)
        if self._recent is not None and self._recent > WARN_REUSE and not self._warned:
            self._warned = True
            _log.warning(
                "loader delivered every sample %.1f times during one turnover of the cache, "
                "because training outruns the remote store; more sampling.workers, "
                "sampling.concurrency or a faster link bring more distinct samples%s",
                *(self._recent, "" if self._facts is None else _visit_hint(self._facts.view)),
            )

    def report(self) -> Report:
        if self._facts is None:
            return Report(wait_seconds=self._waited)
        uses = replace(self._gone)
        uses.add(self._delivered.values(), map(self._sizes.__getitem__, self._delivered))
        reuse = self._total / self._distinct if self._distinct else 0.0
        mean, oldest = _sample_ages(self._facts)
        population, editions = self._facts.view.population_samples, self._facts.view.editions
        return Report(
            samples=self._samples,
            new_samples=self._new,
            passes=self._passes,
            cache_samples=self._cached,
            reuse=reuse,
            reuse_recent=reuse if self._recent is None else self._recent,
            uses_max=uses.most,
            coverage_samples=min(1.0, self._distinct / population) if population else None,
            coverage_objects=(
                min(1.0, self._count_objects() / editions[-1].objects)
                if population and editions and editions[-1].objects
                else None  # the listing has not ended, or there is none
            ),
            ess_samples=uses.once**2 / uses.squares if uses.squares else 0.0,
            age_seconds_mean=mean,
            age_seconds_max=oldest,
            skipped=self._skipped,
            wait_seconds=self._waited,
            limited_by=self._limit(),
            generation=generation_in(self._layout.root) or 0,
            fingerprint=self._fingerprint,
        )

    def _limit(self) -> str:
        elapsed = (self._ended or time.monotonic()) - self._began
        if self._waited <= WAIT_SHARE * elapsed:
            return "training"
        return "cache" if self._waited_cache > self._waited / 2 else "loading"

    def _count_objects(self) -> int:
        """Count the delivered objects by hashes of 8 bytes, because there may be millions."""
        seen = [self._objects]
        for number in self._delivered.keys() - self._objects_of:
            try:
                data = self._layout.sidecar(number).read_bytes()
                origins = Sidecar.from_bytes(data).origins
            except (FileNotFoundError, CorruptShardError):
                continue
            hashes = (hash64(f"{store}\x00{key}") for store, key in origins.identities)
            seen.append(np.fromiter(hashes, np.uint64))
            self._objects_of.add(number)
        if len(seen) > 1:
            self._objects = np.unique(np.concatenate(seen))
        return len(self._objects)


def _visit_hint(view: IndexView) -> str:
    if view.identity is None:
        return ""
    sizes = view.identity.sizes
    each = sizes.get("samples_per_object") or 0
    nbytes = each * (sizes.get("sample_bytes") or 0)
    if not each or sizes.get("whole") or not sizes.get("ranged") or nbytes >= SMALL_VISIT_BYTES:
        return ""
    return (
        f"; a visit to an object brings {each} sample{'s' * (each != 1)} ({nbytes:,.0f} "
        "bytes): a larger sampling.samples_per_object brings more with the same requests, but "
        "needs a new cache"
    )


def _sample_ages(facts: PassFacts) -> tuple[float, float]:
    ages = np.maximum(0.0, time.time() - facts.drawn_at)
    samples = int(facts.samples.sum())
    mean = float((ages * facts.samples).sum()) / samples if samples else 0.0
    return mean, float(ages.max(initial=0.0))


def _lease_file(layout: CacheLayout, lease: str) -> Path:
    """Return the file of a lease, in the generation that its pass reads."""
    paths = generation_paths(directory_of(layout.root))
    files = [lease_path(CacheLayout(path), lease) for path in paths]
    return next((file for file in files if file.exists()), files[-1])


class ReaderCounters:
    """Counters of a reader for the lease, used by the loop's thread.

    Other threads call only `flush` and `close`.
    """

    def __init__(self, layout: CacheLayout, watched: Path | None = None) -> None:
        """Start with counters of 0.

        Args:
            layout: The cache that is read.
            watched: The cache whose service the loop depends on; None if it depends on none.
        """
        self._layout = layout
        self.watched = watched
        self._pid = os.getpid()
        self._counters = LeaseCounters(counts=True)
        self._descriptor: int | None = None  # of the lease that has the counters
        self._written = True
        self._written_batches = 0
        self._seen = (0, 0)  # pass and batches when the thread last looked
        self._turn = threading.RLock()

    def begin_epoch(self, number: int) -> None:
        self._counters.epoch = number

    def begin_pass(self, number: int, lease: str) -> None:
        self.flush()
        with self._turn:
            before, self._counters = self._counters, LeaseCounters(counts=True)
            self._let_go()
            if not self._written:  # that lease was gone, so its unwritten counts continue here
                self._counters = before
            self._counters.gave_state, self._counters.epoch = before.gave_state, before.epoch
            self._counters.pass_number = number
            self._written_batches = 0
            # The lease is gone if another thread has closed the producer.
            with suppress(OSError):
                self._descriptor = open_owned(_lease_file(self._layout, lease), os.O_WRONLY)
            self._written = False
        self.flush()
        counter_thread.write(self)

    def receive(self, samples: int) -> None:
        counters = self._counters  # no calls here, because this runs for each batch
        counters.delivered += samples
        counters.batches += 1
        self._written = False
        if not counter_thread.unwritten.is_set():
            counter_thread.unwritten.set()

    def wait(self, seconds: float) -> None:
        self._counters.wait(seconds)
        self._written = False

    def note_state(self) -> None:
        if not self._counters.gave_state:
            self._counters.gave_state, self._written = True, False
            self.flush()

    def flush(self) -> None:
        if self._pid != os.getpid():  # the lease is the parent's
            return
        with self._turn:
            if self._descriptor is not None and not self._written:
                self._written = True  # first, so that a concurrent count clears it
                if self._counters.batches != self._written_batches:
                    self._written_batches = self._counters.batches
                    self._counters.progress_at = time.time()
                try:
                    os.pwrite(self._descriptor, self._counters.pack(), COUNTERS_AT)
                except OSError:  # a full disk may refuse even an overwrite
                    self._written = False

    def has_progressed(self) -> bool:
        """Whether batches were received since the last call. Only one thread calls it."""
        before, self._seen = self._seen, (self._counters.pass_number, self._counters.batches)
        return before != self._seen

    def close(self) -> None:
        self.flush()
        with self._turn:
            self._let_go()

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and self._pid == os.getpid():
            close_owned(descriptor)


class _CounterThread:
    def __init__(self) -> None:
        self.unwritten = threading.Event()  # something was counted that is not written yet
        self.lock = threading.Lock()
        self._counters: weakref.WeakSet[ReaderCounters] = weakref.WeakSet()
        self._services = ServiceWatches()
        self._runs = False

    def write(self, counters: ReaderCounters) -> None:
        with self.lock:
            self._counters.add(counters)
            if not self._runs:
                made = threading.Thread(
                    target=self._run, name="growcache-counters", daemon=True
                )
                with suppress(RuntimeError):  # Python 3.12.0 starts none at its end
                    made.start()
                    self._runs = True

    def _run(self) -> None:
        while True:
            self.unwritten.wait()
            time.sleep(COUNTERS_SECONDS)
            self.unwritten.clear()
            with self.lock:
                counters = list(self._counters)
            training: set[Path] = set()
            while counters:
                one = counters.pop()
                one.flush()
                if one.watched is not None and one.has_progressed():
                    training.add(one.watched)
                del one  # or its loader could not be freed before the next batch
            self._services.look(training)


counter_thread = _CounterThread()


def _forget_parents_thread() -> None:
    global counter_thread
    counter_thread = _CounterThread()


os.register_at_fork(after_in_child=_forget_parents_thread)
