"""The user's function in processes of growcache's own, for ``num_workers``.

Rows lie in memory that the processes have mapped, and results of one size are put straight
into memory that they have mapped as well; what is ragged, small, or from before the shapes
were known, comes over the socket. Processes live on while snapshots change. What they take
next is decided as they become free, and what comes where does not depend on it.
"""

from __future__ import annotations

import logging
import math
import select
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from growcache.errors import CacheError
from growcache.loading.arena import Arena
from growcache.loading.child import Child
from growcache.loading.crews import Out, Rows
from growcache.loading.late_calls import LateCalls
from growcache.loading.shipping import Shipped
from growcache.loading.stopping import StoppedError
from growcache.schema import Schema

CHUNKS = 4  # of a block per process: the last to finish is waited for
AT_ONCE = 2  # per process: one that it works on, and one that waits there
MOST_TRIES = 3  # of rows whose process died

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process is told first.

    Attributes:
        function: the user's.
        seed: of the loader.
        argv: of the trainer.
        timeout_seconds: of a call, until it is told of.
    """

    function: Shipped
    seed: int
    argv: list[str]
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Work:
    """Rows to be transformed.

    Attributes:
        rows: of a chunk.
        schema: that results must fit; None: they are returned as they are.
        out: where they go; None for a field whose memory the process cannot reach.
    """

    rows: Rows
    schema: Schema | None = None
    out: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """The rows were transformed: all results, or what could not be put where it goes."""

    values: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The user's function, or its module, raised."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class Late:
    """The call with a row of what is worked on has taken so many seconds, and goes on."""

    row: int
    seconds: float


@dataclass(eq=False, slots=True)
class _Chunk:
    start: int
    stop: int
    tries: int = 0


@dataclass(eq=False, slots=True)
class _Worker:
    child: Child
    chunks: deque[_Chunk] = field(default_factory=deque)


class Workers:
    """A crew of processes; used by one thread at a time.

    Args:
        count: how many.
        setup: what each is told.
        arena: of the rows and results.
    """

    def __init__(self, count: int, setup: Setup, arena: Arena) -> None:
        self._setup = setup
        self._arena = arena
        self._cancelled = False
        self._workers = [self._started() for _ in range(count)]

    def results(self, rows: Rows, late: LateCalls[int]) -> list[Any]:
        """Return what the function makes of each row."""
        found: list[Any] = [None] * len(rows)

        def take(chunk: _Chunk, values: Any) -> None:
            found[chunk.start : chunk.stop] = values

        self._run(
            len(rows), lambda _, chunk: Work(rows.part(chunk.start, chunk.stop)), take, late
        )
        return found

    def fill(self, rows: Rows, out: Out, schema: Schema, late: LateCalls[int]) -> None:
        """Put what the function makes of each row into ``out``."""

        def work(worker: _Worker, chunk: _Chunk) -> Work:
            wire, reached = worker.child.wire, dict[str, Any]()
            for name, values in out.items():
                place = values[chunk.start : chunk.stop]
                there = isinstance(place, np.ndarray) and self._arena.reaches(wire, place)
                reached[name] = place if there else None
            return Work(rows.part(chunk.start, chunk.stop), schema, reached)

        def take(chunk: _Chunk, values: Any) -> None:
            for name, value in values.items():
                out[name][chunk.start : chunk.stop] = value

        self._run(len(rows), work, take, late)
        wires = [worker.child.wire for worker in self._workers]
        for values in out.values():
            if isinstance(values, np.ndarray):
                self._arena.filled(wires, values)

    def _run(
        self,
        rows: int,
        work: Callable[[_Worker, _Chunk], Work],
        take: Callable[[_Chunk, Any], None],
        late: LateCalls[int],
    ) -> None:
        """Have all rows transformed, chunk by chunk, by whoever is free."""
        step = max(1, math.ceil(rows / (CHUNKS * len(self._workers))))
        left = deque(_Chunk(a, min(a + step, rows)) for a in range(0, rows, step))
        while left or any(worker.chunks for worker in self._workers):
            self._hand_out(left, work)
            for worker in _speaking(self._workers):
                self._answer(worker, take, left, late)

    def _hand_out(self, left: deque[_Chunk], work: Callable[[_Worker, _Chunk], Work]) -> None:
        """Give a chunk to each that has none before any gets another."""
        for held in range(AT_ONCE):
            for worker in self._workers:
                if left and len(worker.chunks) <= held:
                    worker.chunks.append(chunk := left.popleft())
                    self._send(worker, work(worker, chunk))

    def _send(self, worker: _Worker, work: Work) -> None:
        try:
            self._arena.send(worker.child.wire, work, lend=False)
        except OSError:
            # It died, or has half a message: either way the end is what is received next.
            worker.child.wire.shut()

    def _answer(
        self,
        worker: _Worker,
        take: Callable[[_Chunk, Any], None],
        left: deque[_Chunk],
        late: LateCalls[int],
    ) -> None:
        try:
            answer = worker.child.wire.receive().head
        except EOFError as end:
            self._go_on()
            left.extendleft(reversed(worker.chunks))
            self._replace(worker, end)
            return
        if isinstance(answer, Late):
            late.tell(worker.chunks[0].start + answer.row, answer.seconds)
            return
        chunk = worker.chunks.popleft()
        if isinstance(answer, Raised):
            raise answer.error
        take(chunk, answer.values)

    def _replace(self, worker: _Worker, end: EOFError) -> None:
        why, chunks = worker.child.why(end), list(worker.chunks)
        self._arena.forget(worker.child.wire)
        worker.child.close()
        worker.chunks.clear()
        chunks[0].tries += 1
        if chunks[0].tries >= MOST_TRIES:
            raise CacheError(
                f"a process of num_workers {why}, {MOST_TRIES} times on the same samples; look for "
                "what in transform ends it, or use num_workers=0"
            )
        _log.warning("a process of num_workers %s; another one takes its place", why)
        worker.child = self._started().child
        self._go_on()  # who cancels meanwhile may have met its predecessor only

    def _go_on(self) -> None:
        if self._cancelled:
            raise StoppedError

    def _started(self) -> _Worker:
        # At exit who uses them closes them; they end with this process in any case.
        child = Child("transform", at_exit=False)
        child.send(self._setup)
        return _Worker(child)

    def cancel(self) -> None:
        """End the processes' work at once: nobody wants it any more."""
        self._cancelled = True
        for worker in self._workers:
            worker.child.wire.shut()

    def close(self) -> None:
        """End the processes."""
        self.cancel()  # all, before one is waited for
        for worker in self._workers:
            worker.child.close()


def _speaking(workers: Iterable[_Worker]) -> list[_Worker]:
    """Return whose answers can be received; waits for one."""
    waiting = {worker.child.wire.fileno(): worker for worker in workers if worker.chunks}
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    return [waiting[descriptor] for descriptor, _ in poll.poll()]
