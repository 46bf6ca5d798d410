"""How the producer of a loader is started: in a thread, or in a process of its own."""

from __future__ import annotations

import logging
import sys

from growcache.cache import services
from growcache.cache.leases import RankNote
from growcache.loading.blocks import Cutter
from growcache.loading.child import Child
from growcache.loading.following import company, next_walk
from growcache.loading.framework import Framework
from growcache.loading.links import Link
from growcache.loading.options import LoaderOptions
from growcache.loading.orders import Order
from growcache.loading.process import ProcessSource, portable
from growcache.loading.producer import Producer
from growcache.loading.relay import RelayedSource
from growcache.loading.resume import Missing
from growcache.loading.sources import Kind, Source, ThreadSource
from growcache.loading.state import LoaderState


class Starter:
    """Starts producers for one consumer.

    Args:
        options: of the loader.
        framework: what the front door lends.
    """

    def __init__(self, options: LoaderOptions, framework: Framework) -> None:
        self._options = options
        self._framework = framework
        self._cutter = Cutter(options, framework)

    @property
    def may_choose(self) -> bool:
        """Whether a thread may be left for a process.

        Other ranks follow the process that they know, a fixed set is pinned by the walk that
        found it, and a transform runs in threads of the trainer.
        """
        options = self._options
        fixed = options.ranks.share or options.fixed or options.transform is not None
        return options.gather == "auto" and not fixed

    def start(self, kind: Kind, start: LoaderState, missing: Missing, wanted: int) -> Source:
        """Start one of a kind.

        To be called in the thread that iterates: the walks of all ranks are counted alike.

        Args:
            kind: where it runs.
            start: where it begins.
            missing: what to do about shards of the start that are not there any more.
            wanted: the epoch that the consumer begins.
        """
        note = next_walk(self._options)
        if kind == "process":
            return self.process(Child(), start, missing, wanted, note)
        return self.thread(start, missing, wanted, note)

    def thread(
        self, start: LoaderState, missing: Missing, wanted: int, note: RankNote | None = None
    ) -> Source:
        """Start one in a thread."""
        options = self._options

        def make(link: Link) -> Producer:
            ranks = company(options, note)
            return Producer(
                *(options, link, self._framework, start, missing, ranks), self._cutter.cut_now
            )

        return ThreadSource(wanted, make)

    def process(
        self,
        child: Child,
        start: LoaderState,
        missing: Missing,
        wanted: int,
        note: RankNote | None = None,
    ) -> Source:
        """Start one in a gather process that waits for its order."""
        order = Order(
            options=portable(self._options),
            start=start,
            missing=missing,
            note=note,
            wanted=wanted,
            argv=sys.argv,
            level=logging.getLogger("growcache").getEffectiveLevel(),
            failed=services.reason_of(self._options.root),
        )
        carrier = self._framework.carrier
        if self._options.batch_transform is None and carrier is None:
            return ProcessSource(child, order, self._cutter.cut)
        lock = None if carrier is None else carrier.lock
        source = ProcessSource(child, order, lock=lock)
        return RelayedSource(source, wanted, self._cutter)
