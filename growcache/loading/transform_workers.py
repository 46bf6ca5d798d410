"""The processes of ``num_workers``, which call the user's `transform`: both ends.

Rows and results of a fixed size are in shared memory. Ragged, small and first results use the
socket. Processes outlive snapshots and have no state. The end of the connection ends them at
once.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import queue
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from growcache.errors import CacheError
from growcache.loading.child_process import ChildProcess, Message, MessageSocket, listen
from growcache.loading.ragged import Column, Ragged
from growcache.loading.shared_memory import SharedReceiver, SharedSender
from growcache.loading.transform import (
    PickledFunction,
    ResultColumns,
    SlowCallWatch,
    TransformCall,
    TransformRows,
    portable_error,
    store_result,
)
from growcache.schema import Schema
from growcache.threads import StoppedError

CHUNKS = 4  # of a block per process, because the last one to finish is waited for
CHUNKS_IN_FLIGHT = 2  # per process: one in work, and one that waits there
MAX_TRIES = 3  # of rows whose process died

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    function: PickledFunction
    seed: int
    argv: list[str]
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class TransformWork:
    rows: TransformRows
    schema: Schema | None = None
    out: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkDone:
    """All results, or those that do not fit."""

    values: Any


@dataclass(frozen=True, slots=True)
class WorkFailed:
    error: BaseException


@dataclass(frozen=True, slots=True)
class SlowCall:
    row: int
    seconds: float


@dataclass(eq=False, slots=True)
class _Chunk:
    start: int
    stop: int
    tries: int = 0


@dataclass(eq=False, slots=True)
class _Worker:
    child: ChildProcess
    chunks: deque[_Chunk] = field(default_factory=deque)


class ProcessExecutor:
    def __init__(
        self,
        count: int,
        setup: WorkerSetup,
        shared_sender: SharedSender,
        stopped: Callable[[], bool],
    ) -> None:
        self._setup = setup
        self._shared_sender = shared_sender
        self._stopped = stopped
        self._workers = [self._start_worker() for _ in range(count)]

    def run(
        self,
        rows: TransformRows,
        slow_calls: SlowCallWatch,
        schema: Schema | None = None,
        out: ResultColumns | None = None,
    ) -> list[Any]:
        found: list[Any] = [None] * len(rows)

        def work(worker: _Worker, chunk: _Chunk) -> TransformWork:
            reached = dict[str, Any]()
            for name, values in (out or {}).items():
                place = values[chunk.start : chunk.stop]
                there = isinstance(place, np.ndarray) and self._shared_sender.reaches(
                    worker.child.connection, place
                )
                reached[name] = place if there else None
            return TransformWork(rows.part(chunk.start, chunk.stop), schema, reached)

        def take(chunk: _Chunk, values: Any) -> None:
            if out is None:
                found[chunk.start : chunk.stop] = values
                return
            for name, value in values.items():
                out[name][chunk.start : chunk.stop] = value

        self._run(len(rows), work, take, slow_calls)
        return found

    def connections(self) -> list[MessageSocket]:
        return [worker.child.connection for worker in self._workers]

    def _run(
        self,
        rows: int,
        work: Callable[[_Worker, _Chunk], TransformWork],
        take: Callable[[_Chunk, Any], None],
        slow_calls: SlowCallWatch,
    ) -> None:
        step = max(1, math.ceil(rows / (CHUNKS * len(self._workers))))
        left = deque(_Chunk(a, min(a + step, rows)) for a in range(0, rows, step))
        while left or any(worker.chunks for worker in self._workers):
            self._raise_if_stopped()
            self._hand_out(left, work)
            for worker in _workers_with_answers(self._workers):
                self._answer(worker, take, left, slow_calls)

    def _hand_out(
        self, left: deque[_Chunk], work: Callable[[_Worker, _Chunk], TransformWork]
    ) -> None:
        """Give a chunk to each idle worker before any gets another one."""
        for held in range(CHUNKS_IN_FLIGHT):
            for worker in self._workers:
                if left and len(worker.chunks) <= held:
                    worker.chunks.append(chunk := left.popleft())
                    self._send(worker, work(worker, chunk))

    def _send(self, worker: _Worker, work: TransformWork) -> None:
        try:
            self._shared_sender.send(worker.child.connection, work, lend=False)
        except OSError:
            # The worker died or has half a message. Either way the next receive reports its
            # end.
            worker.child.connection.shut()

    def _answer(
        self,
        worker: _Worker,
        take: Callable[[_Chunk, Any], None],
        left: deque[_Chunk],
        slow_calls: SlowCallWatch,
    ) -> None:
        try:
            answer = worker.child.connection.receive().head
        except EOFError as end:
            self._raise_if_stopped()
            left.extendleft(reversed(worker.chunks))
            self._replace(worker, end)
            return
        if isinstance(answer, SlowCall):
            slow_calls.report(worker.chunks[0].start + answer.row, answer.seconds)
            return
        chunk = worker.chunks.popleft()
        if isinstance(answer, WorkFailed):
            raise answer.error
        take(chunk, answer.values)

    def _replace(self, worker: _Worker, end: EOFError) -> None:
        why, chunks = worker.child.why(end), list(worker.chunks)
        self._shared_sender.forget(worker.child.connection)
        worker.child.close()
        worker.chunks.clear()
        chunks[0].tries += 1
        if chunks[0].tries >= MAX_TRIES:
            raise CacheError(
                f"a worker process (num_workers) {why}, {MAX_TRIES} times on the same samples; "
                "find out what in transform ends it, or use num_workers=0",
                code="GC607",
            )
        _log.warning("worker process (num_workers) %s; another one takes its place", why)
        worker.child = self._start_worker().child

    def _raise_if_stopped(self) -> None:
        if self._stopped():
            raise StoppedError

    def _start_worker(self) -> _Worker:
        # At exit their user closes them. They end with this process in any case.
        child = ChildProcess("transform", at_exit=False)
        child.send(self._setup)
        return _Worker(child)

    def close(self) -> None:
        for worker in self._workers:  # all of them, before any is waited for
            worker.child.connection.shut()
        for worker in self._workers:
            worker.child.close()


def _workers_with_answers(workers: Iterable[_Worker]) -> list[_Worker]:
    waiting = {worker.child.connection.fileno(): worker for worker in workers if worker.chunks}
    poll = select.poll()
    for descriptor in waiting:
        poll.register(descriptor, select.POLLIN)
    return [waiting[descriptor] for descriptor, _ in poll.poll(POLL_MILLISECONDS)]


POLL_MILLISECONDS = 100  # between two checks whether to stop
WORKER_NAME = "a process of num_workers"


def main(connection: MessageSocket) -> None:
    try:
        setup = connection.receive().head
    except EOFError:
        return
    works: queue.SimpleQueue[TransformWork] = queue.SimpleQueue()
    listen(connection, functools.partial(_receive_work, connection, works))
    sys.argv = setup.argv
    call, turn = _load_call(setup), threading.Lock()
    if isinstance(call, TransformCall):
        watch = threading.Thread(
            target=_watch_slow_calls, args=(connection, turn, call, setup), daemon=True
        )
        watch.start()
    while True:
        work = works.get()
        answer = call if isinstance(call, WorkFailed) else _do_work(call, work)
        del work  # its memory may be needed for another block
        _send_answer(connection, turn, answer)


def _send_answer(
    connection: MessageSocket, turn: threading.Lock, answer: WorkDone | WorkFailed | SlowCall
) -> None:
    try:
        with turn:
            connection.send(Message(answer))
    except OSError:
        os._exit(0)


def _watch_slow_calls(
    connection: MessageSocket, turn: threading.Lock, call: TransformCall, setup: WorkerSetup
) -> None:
    """Report long calls, because the thread that makes them is in the user's code."""

    def report(row: int, seconds: float) -> None:
        if any(row == other for other, _ in call.running.values()):  # else it has just ended
            _send_answer(connection, turn, SlowCall(row, seconds))

    slow_calls = SlowCallWatch(setup.timeout_seconds, report)
    while True:
        time.sleep(slow_calls.pause_seconds)
        slow_calls.look(dict(call.running), time.monotonic())


def _receive_work(connection: MessageSocket, works: queue.SimpleQueue[TransformWork]) -> None:
    receiver = SharedReceiver()
    while True:
        works.put(receiver.receive(connection))


def _load_call(setup: WorkerSetup) -> TransformCall | WorkFailed:
    try:
        return TransformCall(setup.function.load(), setup.seed)
    except BaseException as error:  # noqa: BLE001 - the trainer raises it
        error.add_note("while the transform was loaded in a process of num_workers")
        return WorkFailed(portable_error(error, WORKER_NAME))


def _do_work(call: TransformCall, work: TransformWork) -> WorkDone | WorkFailed:
    try:
        return WorkDone(_transform_rows(call, work))
    except BaseException as error:  # noqa: BLE001 - the trainer raises it
        return WorkFailed(portable_error(error, WORKER_NAME))
    finally:
        call.running.clear()


def _private_rows(rows: TransformRows) -> TransformRows:
    """Copy the rows, because the user's code may keep samples, and shared buffers are recycled."""
    columns: dict[str, Column] = {
        name: replace(column, values=column.values.copy())
        if isinstance(column, Ragged)
        else column.copy()
        for name, column in rows.columns.items()
    }
    return replace(rows, columns=columns)


def _transform_rows(call: TransformCall, work: TransformWork) -> Any:
    rows, n, schema = _private_rows(work.rows), len(work.rows), work.schema
    if schema is None:
        return [call.plain(rows, i) for i in range(n)]
    out: dict[str, Any] = dict(work.out)
    returned = {
        f.name: [None] * n if f.is_ragged else np.empty((n, *f.fixed_shape), f.item_dtype)
        for f in schema.fields
        if work.out[f.name] is None
    }
    out |= returned
    for i in range(n):
        store_result(schema, call(rows, i), out, i)
    return returned
