"""The loaders of a dataset, and what becomes of them between its iterations."""

from __future__ import annotations

import threading
from dataclasses import replace

from growcache.loading.epochs import Engine
from growcache.loading.framework import Framework
from growcache.loading.leftovers import Leftovers
from growcache.loading.maps import MapPool
from growcache.loading.options import LoaderOptions
from growcache.seeding import derive
from growcache.tensorflow.live import end_with_the_interpreter

# After an epoch so long the next one is kept ready, with its lease, threads and memory.
IDLE_SECONDS = 5.0


class Engines:
    """One loader per iterator that is under way, and one for the next iteration.

    Where an iteration ended, its loader is ahead in the next epoch already, and waits for
    an iterator. Where none comes it lets go of everything: evictions wait for its lease, and
    nobody says when a dataset will be iterated no more. It stays what it is, so the next
    epoch is the same, and only begins later. Where an iteration was broken off, its loader
    ends; the next one finds its memory for as long, and need not check what it had checked.

    Args:
        options: of the first loader. The others have other seeds, so that iterations that
            were broken off do not repeat the same order.
        framework: of all of them.
    """

    def __init__(self, options: LoaderOptions, framework: Framework) -> None:
        self._options = options
        self._leftovers = Leftovers(IDLE_SECONDS)
        self._framework = replace(framework, leftovers=self._leftovers)
        self._maps = MapPool.of(options.root)  # which knows what was found whole
        # One that its own thread passes: the collector may close these in the middle of a call.
        self._lock = threading.RLock()
        self._idle: Engine | None = None
        self._ahead = False  # the idle one is in the next epoch already
        self._timer: threading.Timer | None = None
        self._made = 0
        self._closed = False

    @property
    def any_ahead(self) -> bool:
        """Whether the next iteration finds a loader that is ahead already."""
        return self._ahead

    def begin(self) -> None:
        """Have a loader begin, for an iteration that is about to ask for one."""
        with self._lock:
            if self._ahead or self._closed:
                return
            engine = self._idle or self._make()
            engine.begin()
            self._keep(engine)

    def take(self) -> Engine:
        """Return a loader for an iteration."""
        with self._lock:
            return self._pop() or self._make()

    def give_back(self, engine: Engine, *, whole: bool) -> None:
        """Take a loader back.

        Args:
            engine: that `take` returned.
            whole: whether its epoch came to its end.
        """
        with self._lock:
            if whole and not self._closed and self._idle is None:
                self._keep(engine)
                return
        engine.close()

    def close(self) -> None:
        """End the one that waits, and those that will be given back."""
        with self._lock:
            self._closed = True
            engine = self._pop()
        if engine is not None:
            engine.close()
        self._leftovers.close()

    def _keep(self, engine: Engine) -> None:
        """Keep a loader that is ahead."""
        self._pop()
        self._idle, self._ahead = engine, True
        # A fixed one may stay: nothing is evicted from under it, and it sees to that.
        if not self._options.fixed and not self._closed:
            self._begin_timer(engine)

    def _pop(self) -> Engine | None:
        engine, self._idle, self._ahead = self._idle, None, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return engine

    def _begin_timer(self, engine: Engine) -> None:
        self._timer = threading.Timer(IDLE_SECONDS, self._rest, [engine])
        self._timer.daemon = True
        self._timer.start()

    def _rest(self, engine: Engine) -> None:
        with self._lock:
            if self._idle is engine:
                self._ahead = False
                engine.close()

    def _make(self) -> Engine:
        options, number = self._options, self._made
        if number:
            seed = derive(options.seed, "iterator", number)
            options = replace(options, seed=seed, min_samples=1)
        self._made = number + 1
        engine = Engine(options, self._framework)
        end_with_the_interpreter(engine)
        return engine
