"""Shards for a reader that opens the files itself, such as TensorFlow.

Such a reader asks for files long before it reads them, and reads samples long before it
delivers them. So a shard is counted and released after all of its samples were delivered.
Nothing here waits for the reader's progress, which would be a deadlock. The answer is then
"nothing now".
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from growcache.cache.index.schema import ShardRow
from growcache.cache.reader_lease import Lease
from growcache.errors import CorruptShardError, GrowcacheError
from growcache.loading.framework import Integers
from growcache.loading.options import LoaderOptions
from growcache.loading.snapshot import Snapshot
from growcache.loading.snapshot_choice import choose_shards, take_new_snapshot, wait_for_pass
from growcache.loading.waiting import WaitControl, in_a_generation
from growcache.loading.windows import plan_snapshot
from growcache.threads import DaemonThread, Future

NOTHING_NOW = -1  # the token of "nothing now"
PAUSE_SECONDS = 0.05  # at most, between two "nothing now"
AHEAD_SHARDS = 4  # left to deliver when the next snapshot is taken


class StreamClosedError(Exception):
    pass


@dataclass(slots=True)
class GivenShard:
    of: StreamPass
    row: ShardRow
    undelivered: int
    read: bool = False


@dataclass(slots=True)
class StreamPass:
    number: int
    snapshot: Snapshot
    rows: list[ShardRow]
    given: set[int] = field(default_factory=set)
    all_given: bool = False

    @property
    def lease(self) -> Lease:
        return self.snapshot.lease


def open_stream_pass(
    options: LoaderOptions,
    number: int,
    min_samples: int,
    watch: WaitControl | None = None,
) -> StreamPass:
    watch = watch or WaitControl(threading.Event(), lambda: False)

    def attempt() -> Snapshot | None:
        view = wait_for_pass(options, min_samples, watch)
        return None if watch.stopped() else take_new_snapshot(options, watch, view)

    while True:
        snapshot = in_a_generation(options.root, attempt)
        if snapshot is None:
            raise StreamClosedError
        rows = {row.number: row for row in snapshot.shards}
        windows = plan_snapshot(options, snapshot, number).windows(options)
        if windows:
            planned = [rows[n] for window in windows for n in window.numbers]
            return StreamPass(number, snapshot, planned)
        snapshot.close()  # all of it was evicted between two looks


def wait_for_stream(options: LoaderOptions, min_samples: int) -> None:
    watch = WaitControl(threading.Event(), lambda: False)
    view = wait_for_pass(options, min_samples, watch)
    choose_shards(options.at_generation(view.root), watch, view)


class ShardStream:
    """The shards of consecutive passes, with at most two leases.

    Any thread may call `shards`, `read` and `delivered`.
    """

    def __init__(
        self,
        options: LoaderOptions,
        next_pass: Callable[[], int],
        *,
        endless: bool,
        tokens: Iterator[int],
    ) -> None:
        self._options = options
        self._next_pass = next_pass
        self._endless = endless
        self._lock = threading.RLock()
        self._closed = False
        self._pid = os.getpid()
        self._waits_long = False  # the next pass waits for samples
        self._wake = threading.Event()
        self._given: dict[int, GivenShard] = {}
        # Samples yet to be delivered of shards that were released.
        self._late: dict[int, int] = {}
        self._tokens = tokens
        self._passes: list[StreamPass] = []  # passes that hold a lease
        self._ahead: Future[StreamPass] | None = None
        self._ahead_ready = threading.Event()
        self._news = threading.Event()  # something was read, or the next pass is ready

    @property
    def closed(self) -> bool:
        return self._closed

    def begin(self, min_samples: int) -> StreamPass:
        opened = self._open(min_samples)
        with self._lock:
            self._enter(opened)
            if self._closed:
                self._end(opened, used=False)
                raise StreamClosedError
        return opened

    def shards(self) -> Iterator[tuple[str, int, int]]:
        """Yield (path, token, samples). `NOTHING_NOW` means "ask again"."""
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
        with self._lock:
            shard = self._given.get(token)
            if shard is None:
                return  # it is `NOTHING_NOW`, or its pass was released
            shard.read = True
        self._news.set()

    def delivered(self, tokens: Integers) -> None:
        values, counts = np.unique(tokens, return_counts=True)
        with self._lock:
            for token, count in zip(values.tolist(), counts.tolist(), strict=True):
                shard = self._given.get(token)
                if shard is None:  # its pass was released, or it belongs to another stream
                    self._count_late(token, count)
                    continue
                shard.undelivered -= count
                shard.of.lease.count(count)
                if shard.undelivered <= 0:
                    self._finish(token, used=True)
                    self._let_go(shard.of)

    def _count_late(self, token: int, count: int) -> None:
        """Count samples of a released pass whose last samples were still in memory."""
        if token in self._late:
            self._pass.lease.count(count)
            self._late[token] -= count
            if self._late[token] <= 0:
                del self._late[token]

    def close(self) -> None:
        """End all passes. A shard that was delivered in part counts as used."""
        if self._pid != os.getpid():  # a forked child has neither the leases nor the threads
            return
        self._closed = True
        self._wake.set()
        self._news.set()
        with self._lock:
            for running in list(self._passes):
                self._end(running, used=False)
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            # Its error does not matter, because no lease was taken.
            with suppress(StreamClosedError, GrowcacheError, OSError):
                ahead.result().snapshot.close()

    def _open(self, min_samples: int) -> StreamPass:
        watch = WaitControl(
            self._wake, lambda: self._closed, self._on_long_wait, self._unread_shards
        )
        return open_stream_pass(self._options, self._next_pass(), min_samples, watch)

    def _on_long_wait(self) -> None:
        self._waits_long = True
        self._news.set()

    def _unread_shards(self) -> dict[str, list[int]]:
        return {p.lease.name: [row.number for row in p.rows] for p in list(self._passes)}

    def _give(self, running: StreamPass, row: ShardRow) -> int | None:
        whole = running.snapshot.is_whole(row.number)
        with self._lock:
            if not whole or self._closed:
                running.lease.drop([row.number])
                return None
            token = next(self._tokens)
            self._given[token] = GivenShard(running, row, row.samples)
            running.given.add(token)
            return token

    def _look_ahead(self) -> None:
        """Take the next snapshot, unless that would be a third lease."""
        with self._lock:
            if self._ahead is not None or self._closed:
                return
            for old in [p for p in self._passes if p is not self._pass]:
                # Its files are not needed after they were read, because undelivered samples are
                # in memory and will be delivered.
                if not all(self._given[token].read for token in old.given):
                    return
                self._end(old, used=True)
            self._ahead_ready.clear()
            self._waits_long = False
            thread = DaemonThread("snapshot")
            self._ahead = thread.submit(self._open_ahead)
            thread.close(wait=False)

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
        """End the pass if the next one waits for samples, which need its space."""
        with self._lock:
            if self._waits_long and all(shard.read for shard in self._given.values()):
                for running in list(self._passes):
                    self._end(running, used=True)
                    self._wake.set()

    def _is_reading(self) -> bool:
        with self._lock:
            return not all(shard.read for shard in self._given.values())

    def _enter(self, opened: StreamPass) -> None:
        self._pass = opened
        self._passes.append(opened)

    def _finish(self, token: int, *, used: bool) -> None:
        shard = self._given.pop(token)
        shard.of.given.discard(token)
        if shard.undelivered > 0:
            self._late[token] = shard.undelivered
        if used or shard.undelivered < shard.row.samples:
            shard.of.lease.mark_read(shard.row.number, mapped=False)

    def _let_go(self, running: StreamPass) -> None:
        if running.all_given and not running.given:
            self._end(running, used=True)

    def _end(self, running: StreamPass, *, used: bool) -> None:
        for token in list(running.given):
            self._finish(token, used=used)
        running.snapshot.close()
        if running in self._passes:
            self._passes.remove(running)
