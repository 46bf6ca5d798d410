"""Shards for a reader that opens the files itself, as TensorFlow does.

Such a reader asks for files long before it reads them, and reads samples long before it delivers
them. So a shard is counted, and its bytes are released, once all of its samples were delivered.
Nothing here waits for the reader's progress, because that would be a deadlock: where no shard may be
given yet, the answer is "nothing now".
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from growcache.cache.index.schema import ShardRow
from growcache.cache.leases import Lease
from growcache.errors import ConfigError, CorruptShardError, GrowcacheError
from growcache.loading.framework import Integers
from growcache.loading.maps import ShardKey, shard_key
from growcache.loading.options import LoaderOptions
from growcache.loading.plan import plan_pass, window_samples
from growcache.loading.snapshot import Snapshot
from growcache.loading.waiting import (
    SnapshotChoice,
    WaitControl,
    choose_shards,
    take_snapshot,
    wait_for_samples,
    warn_if_service_stopped,
)
from growcache.threads import DaemonThread, Future

NOTHING_NOW = -1  # the token of "nothing now"
PAUSE_SECONDS = 0.05  # at most, between two "nothing now"
AHEAD_SHARDS = 4  # the next snapshot is taken when so many are left to give

_log = logging.getLogger(__name__)


class StreamClosedError(Exception):
    """The stream was closed while it waited; no user sees it."""


class VerifiedShards:
    """Which shards this process found whole; maps are not kept, unlike in `MapPool`.

    A map would keep the space of a shard that is let go in the middle of a pass.
    """

    def __init__(self) -> None:
        self._good: dict[ShardKey, int] = {}  # bytes of its files
        self._bad: set[ShardKey] = set()

    def keep(self, rows: Iterable[ShardRow]) -> None:
        """Forget all other shards."""
        keys = {shard_key(row) for row in rows}
        self._good = {key: nbytes for key, nbytes in self._good.items() if key in keys}
        self._bad &= keys

    def is_whole(self, snapshot: Snapshot, row: ShardRow, *, again: bool) -> bool:
        """Return whether the shard's bytes are what was written; if not, that is logged once.

        Args:
            snapshot: that holds it.
            row: of the index.
            again: look even at what was found whole before.
        """
        key = shard_key(row)
        if key in self._bad:
            return False
        nbytes = _shard_bytes(snapshot, row)
        if self._good.get(key) == nbytes and not again:
            return True
        try:
            _verify_shard(snapshot, row)
        except CorruptShardError as error:
            self._bad.add(key)
            _log.warning("skipping a corrupt shard: %s", error)
            return False
        self._good[key] = nbytes
        return True


def _shard_bytes(snapshot: Snapshot, row: ShardRow) -> int:
    """Return the bytes of a shard's files; a file that is not there has none."""
    try:
        return sum(path.stat().st_size for path in snapshot.files(row.number))
    except FileNotFoundError:
        return 0


def _verify_shard(snapshot: Snapshot, row: ShardRow) -> None:
    path = snapshot.file(row.number)
    shard = snapshot.map_anew(row.number)
    try:
        found = shard.digest()  # in order, so this also brings a cold file into memory
    finally:
        shard.close()
    if found != row.digest:
        raise CorruptShardError(
            f"{path}: expected the digest {row.digest}, found {found}; run growcache check"
        )


@dataclass(slots=True)
class GivenShard:
    """A shard that was given to the reader.

    Attributes:
        of: its pass.
        row: of the index.
        undelivered: samples that did not come out of the reader yet.
        read: whether the reader has all of it in memory.
    """

    of: StreamPass
    row: ShardRow
    undelivered: int
    read: bool = False


@dataclass(slots=True)
class StreamPass:
    """One visit of every shard of a snapshot.

    Attributes:
        number: of the pass.
        snapshot: with its lease.
        rows: its shards in the order of the plan.
        given: the tokens of the shards that the reader still works on.
        all_given: whether the reader was given all of them.
    """

    number: int
    snapshot: Snapshot
    rows: list[ShardRow]
    given: set[int] = field(default_factory=set)
    all_given: bool = False

    @property
    def lease(self) -> Lease:
        """The lease of the snapshot; nobody maps its shards, so their states are set here."""
        return self.snapshot.lease


def open_stream_pass(
    options: LoaderOptions,
    number: int,
    min_samples: int,
    watch: WaitControl | None = None,
) -> StreamPass:
    """Return a pass over what is cached, as soon as that is enough.

    Args:
        options: of the loader.
        number: of the pass.
        min_samples: to wait for.
        watch: ends the wait.

    Raises:
        StreamClosedError: ``watch`` stopped it.
        ConfigError: there will never be one batch.
    """
    watch = watch or WaitControl(threading.Event(), lambda: False)
    while True:
        choice = wait_for_pass(options, min_samples, watch)
        if watch.stopped():
            raise StreamClosedError
        snapshot = take_snapshot(options, watch, choice)
        if snapshot is None:
            raise StreamClosedError
        if rows := _planned_rows(options, snapshot, number):
            return StreamPass(number, snapshot, rows)
        snapshot.close()  # all of it was evicted between two looks


def wait_for_pass(
    options: LoaderOptions, min_samples: int, watch: WaitControl | None = None
) -> SnapshotChoice:
    """Wait until a pass can begin, see `open_stream_pass`; return what it is taken of."""
    watch, least = watch or WaitControl(threading.Event(), lambda: False), options.least_samples
    view = wait_for_samples(
        options.root,
        max(min_samples, least),
        complete=options.fixed,
        wake=watch.wake,
        stopped=watch.stopped,
    )
    if watch.stopped():
        return SnapshotChoice(view)
    warn_if_service_stopped(options.root, view)
    if view.totals.samples < least:
        raise ConfigError(
            f"all {view.totals.samples} samples of {options.root} are less than one batch of "
            f"{least}; use a smaller batch_size or drop_last=False"
        )
    return choose_shards(options, watch, view)


def _planned_rows(options: LoaderOptions, snapshot: Snapshot, number: int) -> list[ShardRow]:
    windows = plan_pass(
        [(row.number, row.samples) for row in snapshot.shards],
        seed=options.seed,
        pass_number=number,
        target_samples=window_samples(
            snapshot.sample_bytes, len(snapshot) / max(1, len(snapshot.shards))
        ),
        shuffle=options.shuffle and not options.fixed,
    )
    by_number = {row.number: row for row in snapshot.shards}
    return [by_number[number] for window in windows for number in window.numbers]


class ShardStream:
    """The shards of one iteration, pass after pass, with at most two leases.

    `shards`, `read` and `delivered` are called by any of the reader's threads.

    Args:
        options: of the loader.
        next_pass: gives the number of each pass.
        checked: what is known about shards; shared by the iterations of one dataset.
        endless: go on with another pass after the first.
        tokens: gives shards their names, so that streams which share it have no name twice.
    """

    def __init__(
        self,
        options: LoaderOptions,
        next_pass: Callable[[], int],
        checked: VerifiedShards,
        *,
        endless: bool,
        tokens: Iterator[int],
    ) -> None:
        self._options = options
        self._next_pass = next_pass
        self._checked = checked
        self._endless = endless
        self._lock = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        self._holding = False  # the next pass waits for samples
        self._wake = threading.Event()
        self._given: dict[int, GivenShard] = {}
        self._late: dict[int, int] = {}  # samples of shards that were let go, to come yet
        self._tokens = tokens
        self._passes: list[StreamPass] = []  # those that hold a lease
        self._ahead: Future[StreamPass] | None = None
        self._ahead_ready = threading.Event()
        self._news = threading.Event()  # something was read, or the next pass is ready

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def begin(self, min_samples: int) -> StreamPass:
        """Return the first pass, as soon as there is enough for it.

        Raises:
            StreamClosedError: `close` was called meanwhile.
        """
        begun = self._open(min_samples)
        with self._lock:
            self._enter(begun)
            if self._closed:
                self._end(begun, used=False)
                raise StreamClosedError
        return begun

    def shards(self) -> Iterator[tuple[str, int, int]]:
        """Yield (path, token, samples) of whole and leased shards, in planned order.

        The token names the shard; `NOTHING_NOW` stands for "nothing now, ask again".

        Raises:
            CorruptShardError: not one shard of a pass is whole.
        """
        while not self._closed:
            running = self._pass
            yield from self._shards_of(running)
            with self._lock:
                running.all_given = True
                self._let_go(running)
            if not self._endless:
                return
            yield from self._until_next_pass()

    def _shards_of(self, running: StreamPass) -> Iterator[tuple[str, int, int]]:
        any_whole = False
        for place, row in enumerate(running.rows):
            if self._closed:
                return
            if self._endless and place >= len(running.rows) - AHEAD_SHARDS:
                self._look_ahead()
            token = self._give(running, row)
            if token is not None:
                any_whole = True
                path = os.fspath(running.snapshot.file(row.number))
                yield path, token, row.samples
        if not any_whole and not self._closed:
            raise CorruptShardError(
                f"every shard of {self._options.root} is damaged; run growcache check"
            )

    def read(self, token: int) -> None:
        """Say that the reader has all samples of a shard in memory, or delivered."""
        with self._lock:
            shard = self._given.get(token)
            if shard is None:
                return  # it is `NOTHING_NOW`, or its pass was let go
            shard.read = True
        self._news.set()

    def delivered(self, tokens: Integers) -> None:
        """Say of which shards a batch came.

        Args:
            tokens: int64 [n], one per sample.
        """
        values, counts = np.unique(tokens, return_counts=True)
        with self._lock:
            for token, count in zip(values.tolist(), counts.tolist(), strict=True):
                shard = self._given.get(token)
                if shard is None:  # its pass was let go, or it is another stream's
                    self._count_late(token, count)
                    continue
                shard.undelivered -= count
                shard.of.lease.count(count)
                if shard.undelivered <= 0:
                    self._finish(token, used=True)
                    self._let_go(shard.of)

    def _count_late(self, token: int, count: int) -> None:
        """Count samples of a pass that was let go while its last ones were in memory."""
        if token in self._late:
            self._pass.lease.count(count)
            self._late[token] -= count
            if self._late[token] <= 0:
                del self._late[token]

    def close(self) -> None:
        """Free the leases; of what was delivered in part, the use is counted."""
        if self._pid != os.getpid():  # a forked child has no leases, and none of the threads
            return
        self._closed = True
        self._wake.set()
        self._news.set()
        with self._lock:
            for running in list(self._passes):
                self._end(running, used=False)
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # What was raised there concerns nobody: it never came to hold anything.
            with suppress(StreamClosedError, GrowcacheError, OSError):
                ahead.result().snapshot.close()

    def _open(self, min_samples: int) -> StreamPass:
        watch = WaitControl(self._wake, lambda: self._closed, self._hold, self._own)
        return open_stream_pass(self._options, self._next_pass(), min_samples, watch)

    def _hold(self) -> None:
        """Have the pass ended as soon as the reader has read its files."""
        self._holding = True
        self._news.set()

    def _own(self) -> dict[str, list[int]]:
        """Return the shards that are, or will be, used, by lease."""
        return {p.lease.name: [row.number for row in p.rows] for p in list(self._passes)}

    def _give(self, running: StreamPass, row: ShardRow) -> int | None:
        """Return the token of a shard; None where it is damaged."""
        again = self._options.verify == "always"
        whole = self._checked.is_whole(running.snapshot, row, again=again)
        with self._lock:
            if not whole or self._closed:
                running.lease.drop([row.number])
                return None
            token = next(self._tokens)
            self._given[token] = GivenShard(running, row, row.samples)
            running.given.add(token)
            return token

    def _look_ahead(self) -> None:
        """Have the next snapshot taken, unless there would be three leases then."""
        with self._lock:
            if self._ahead is not None or self._closed:
                return
            for old in [p for p in self._passes if p is not self._pass]:
                # Its files are needed no more once they were read; what is not delivered
                # yet is in memory and will be.
                if not all(self._given[token].read for token in old.given):
                    return
                self._end(old, used=True)
            self._ahead_ready.clear()
            self._holding = False
            hand = DaemonThread("snapshot")
            self._ahead = hand.ahead(self._open_ahead)
            hand.close(wait=False)

    def _open_ahead(self) -> StreamPass:
        try:
            return self._open(1)
        finally:
            self._ahead_ready.set()
            self._news.set()

    def _until_next_pass(self) -> Iterator[tuple[str, int, int]]:
        while not self._closed:
            self._news.clear()
            self._look_ahead()
            with self._lock:
                ahead = self._ahead if self._ahead_ready.is_set() else None
                if ahead is not None and not self._closed:
                    self._ahead = None
                    self._enter(ahead.result())
                    return
            self._end_held()
            if not self._is_reading():
                self._news.wait(PAUSE_SECONDS)
            yield "", NOTHING_NOW, 0

    def _end_held(self) -> None:
        """End the pass where the next one waits for samples, which need its room."""
        with self._lock:
            if self._holding and all(shard.read for shard in self._given.values()):
                for running in list(self._passes):
                    self._end(running, used=True)
                    self._wake.set()

    def _is_reading(self) -> bool:
        """Whether the reader is in the middle of a shard; to wait would hold that up as well."""
        with self._lock:
            return not all(shard.read for shard in self._given.values())

    def _enter(self, begun: StreamPass) -> None:
        self._checked.keep(begun.rows)
        self._pass = begun
        self._passes.append(begun)

    def _finish(self, token: int, *, used: bool) -> None:
        shard = self._given.pop(token)
        shard.of.given.discard(token)
        if shard.undelivered > 0:
            self._late[token] = shard.undelivered
        if used or shard.undelivered < shard.row.samples:
            shard.of.lease.mark_read(shard.row.number, mapped=False)

    def _let_go(self, running: StreamPass) -> None:
        """Free the pass's lease where it protects nothing any more."""
        if running.all_given and not running.given:
            self._end(running, used=True)

    def _end(self, running: StreamPass, *, used: bool) -> None:
        for token in list(running.given):
            self._finish(token, used=used)
        running.snapshot.close()
        if running in self._passes:
            self._passes.remove(running)
