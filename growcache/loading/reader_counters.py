"""Counts what a training loop receives, into the lease of the pass that it is of.

The lease belongs to the producer, which may be another process; the loop writes its fields of
fixed places into the same file: before a pass is over, and at the end. Between these a thread does
so a few times a second, for each write lets go of the interpreter's lock, and the loop might wait
long for it to come back.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import suppress

from growcache.cache.files import Layout
from growcache.cache.lease_counters import Counters
from growcache.cache.leases import COUNT_SECONDS, COUNTERS_AT, lease_path
from growcache.cache.locks import close_owned, open_owned


class ReaderCounters:
    """What one loop received; used by its thread, but for `flush` and `close`.

    Args:
        layout: of the cache.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pid = os.getpid()
        self._counters = Counters(counts=True)
        self._descriptor: int | None = None  # of the lease that they are written into
        self._written = True
        self._told_batches = 0
        self._turn = threading.RLock()

    def begin_epoch(self, number: int) -> None:
        """Note in which epoch the loop stands."""
        self._counters.epoch = number

    def begin_pass(self, number: int, lease: str) -> None:
        """Count into this lease from now on."""
        self.flush()
        with self._turn:
            before, self._counters = self._counters, Counters(counts=True)
            self._let_go()
            if not self._written:  # its lease was gone: what it did not hear counts here
                self._counters = before
            self._counters.gave_state, self._counters.epoch = before.gave_state, before.epoch
            self._counters.pass_number = number
            self._told_batches = 0
            # Where it is gone already, the producer was closed by somebody.
            with suppress(OSError):
                self._descriptor = open_owned(lease_path(self._layout, lease), os.O_WRONLY)
            self._written = False
        self.flush()
        _follow(self)

    def receive(self, samples: int) -> None:
        """Count a batch."""
        counters = self._counters  # no call where none is needed: this is done for each batch
        counters.delivered += samples
        counters.batches += 1
        self._written = False
        if not _news.is_set():
            _news.set()

    def wait(self, seconds: float) -> None:
        """Count a time without a batch."""
        self._counters.wait(seconds)
        self._written = False

    def note_state(self) -> None:
        """Note that the loader gave its state, so that it may come back for the rest."""
        if not self._counters.gave_state:
            self._counters.gave_state, self._written = True, False
            self.flush()

    def flush(self) -> None:
        """Write what was counted."""
        if self._pid != os.getpid():  # the lease is the parent's
            return
        with self._turn:
            if self._descriptor is not None and not self._written:
                self._written = True  # first: what is counted meanwhile is not
                if self._counters.batches != self._told_batches:
                    self._told_batches = self._counters.batches
                    self._counters.progress_at = time.time()
                try:
                    os.pwrite(self._descriptor, self._counters.pack(), COUNTERS_AT)
                except OSError:  # a full disk may refuse even to write over what is there
                    self._written = False

    def close(self) -> None:
        """Write what was counted, and let the lease go; twice is harmless."""
        self.flush()
        with self._turn:
            self._let_go()

    def _let_go(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and self._pid == os.getpid():
            close_owned(descriptor)


_news = threading.Event()  # something was counted that is not written yet
_followed: weakref.WeakSet[ReaderCounters] = weakref.WeakSet()
_gate = threading.Lock()
_writer: threading.Thread | None = None


def _follow(counters: ReaderCounters) -> None:
    """Have the thread write these from now on."""
    global _writer
    with _gate:
        _followed.add(counters)
        if _writer is None:
            made = threading.Thread(target=_write_all, name="growcache-counters", daemon=True)
            with suppress(RuntimeError):  # at the interpreter's end Python 3.12.0 starts none
                made.start()
                _writer = made


def _write_all() -> None:
    while True:
        _news.wait()
        time.sleep(COUNT_SECONDS)
        _news.clear()
        with _gate:
            followed = list(_followed)
        for counters in followed:
            counters.flush()
        del followed


def _begin_in_child() -> None:
    """Forget the thread, which only the parent has, and its locks, which it may have held."""
    global _news, _gate, _writer
    _news, _gate, _writer = threading.Event(), threading.Lock(), None
    _followed.clear()


os.register_at_fork(after_in_child=_begin_in_child)
