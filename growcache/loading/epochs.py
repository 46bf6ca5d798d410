"""Epochs as the training loop sees them: the consumer's side of the thread that runs ahead."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

from growcache.cache.index import IndexView, read_index
from growcache.errors import CacheMissingError
from growcache.loading.blocks import Block, count_of
from growcache.loading.bookmark import Bookmark
from growcache.loading.following import company
from growcache.loading.framework import NUMPY, Framework
from growcache.loading.options import LoaderOptions
from growcache.loading.producer import EpochEnd, Failure, Item, Link, PassBegun, Producer
from growcache.loading.report import Report, Tally
from growcache.loading.resume import Missing, refuse_missing, refuse_other_cache
from growcache.loading.state import LoaderState, rest_of


class Engine:
    """The consumer's side: each `epoch` is one epoch of batches.

    Its thread starts with the first epoch and ends with `close`, garbage collection or the
    interpreter.

    Args:
        options: of the loader.
        framework: what the front door lends.
    """

    def __init__(self, options: LoaderOptions, framework: Framework = NUMPY) -> None:
        self._options = options
        self._framework = framework
        self._link: Link | None = None
        self._pid = os.getpid()
        self._next_epoch = self._next_pass = 0
        self._loaded: LoaderState | None = None  # until something of it was delivered
        self._missing: Missing = "refetch"
        self._bookmark = Bookmark(options, LoaderState())
        self._finalizer: weakref.finalize[..., Engine] | None = None
        self._tally = Tally(options.root)

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of the next epoch.

        What is left of an epoch that was broken off is not made up for: it is gone, and an
        older iterator raises RuntimeError where it is asked again.
        """
        link = self._running()
        number, self._next_epoch = self._next_epoch, self._next_epoch + 1
        link.begin(number)
        self._bookmark.begin_epoch(number)
        self._tally.begin_epoch()
        while True:
            item = self._receive(link, number)
            if isinstance(item, Failure):
                self.close()
                raise item.error
            self._loaded = None
            if isinstance(item, Block):
                yield from self._batches(item, link)
                del item  # its memory is wanted for the block after the next
            elif isinstance(item, EpochEnd):
                self._bookmark.end_epoch(number)
                if self._options.samples_per_epoch is None:
                    link.end_pass(self._next_pass - 1)
                self._tally.end_epoch()
                return

    @property
    def report(self) -> Report:
        """What was delivered so far."""
        return self._tally.report(self._link.skipped if self._link else 0)

    @property
    def state(self) -> LoaderState:
        """Where the consumer stands."""
        return self._bookmark.state

    def load(self, state: LoaderState, missing: Missing) -> None:
        """Go on from there with the next epoch; one that is under way is over.

        Raises:
            ConfigError: the cache is another one.
            CacheError: shards are gone, and ``missing`` forbids that.
        """
        self._refuse(state, missing)
        self.close()
        self._loaded, self._missing = state, missing
        self._bookmark = Bookmark(self._options, state)

    def _refuse(self, state: LoaderState, missing: Missing) -> None:
        """Refuse what is sure to fail now, rather than in the next epoch."""
        try:
            view = read_index(self._options.root)
        except CacheMissingError:
            view = IndexView()
        refuse_other_cache(view, state.fingerprint, self._options)
        rest = rest_of(state, self._options)
        if missing == "error" and rest is not None:
            refuse_missing(view, rest, self._options)

    def close(self) -> None:
        """End the thread and free the leases; the next epoch starts another."""
        if self._finalizer is not None:
            self._finalizer()
        self._link = self._finalizer = None

    def _running(self) -> Link:
        if self._pid != os.getpid():  # a fork copies no threads
            self._link, self._pid = None, os.getpid()
            if self._finalizer is not None:
                self._finalizer.detach()
        if self._loaded is not None:  # broken off before the first batch: once more
            self.close()
        if self._link is None:
            self._link = self._start()
        return self._link

    def _start(self) -> Link:
        start = self._loaded or LoaderState(
            epoch=self._next_epoch, next_epoch=self._next_epoch, next_pass=self._next_pass
        )
        self._next_epoch, self._next_pass = start.next_epoch, start.next_pass
        self._bookmark = Bookmark(self._options, start)
        link = Link(self._next_epoch)
        ranks = company(self._options)
        producer = Producer(self._options, link, self._framework, start, self._missing, ranks)
        thread = threading.Thread(target=producer.run, name="growcache-loader", daemon=True)
        thread.start()
        # Also at exit: a daemon in the middle of a copy must not meet a dying interpreter.
        self._finalizer = weakref.finalize(self, link.close, thread)
        return link

    def _receive(self, link: Link, number: int) -> Item:
        """Return the next item of this epoch; what is left of earlier ones is dropped."""
        while True:
            if link is not self._link or link.wanted != number:
                raise RuntimeError(
                    "this epoch is over: the loader was closed, or iterated anew meanwhile"
                )
            began = time.perf_counter()
            item = link.items.get()
            self._tally.waited(time.perf_counter() - began)
            if isinstance(item, PassBegun):
                self._next_pass = item.plan.number + 1
                identity = item.facts.view.identity
                self._bookmark.begin_pass(item.plan, identity.fingerprint if identity else None)
                self._tally.begin_pass(item.facts)
                continue
            if isinstance(item, Block):
                link.tokens.put(True)
            if isinstance(item, Failure) or item.epoch == number:
                return item

    def _batches(self, block: Block, link: Link) -> Iterator[Any]:
        rows, size = len(block.numbers), self._options.batch_size
        delivered = 0
        marks = iter(block.marks)
        try:
            while block.batches:
                delivered = min(delivered + size, rows)
                link.delivered = mark = next(marks)
                self._bookmark.deliver(block.epoch, mark, block.form)
                yield block.batches.popleft()
        finally:
            whole = delivered == rows
            self._tally.deliver(block.counts if whole else count_of(block.numbers[:delivered]))
