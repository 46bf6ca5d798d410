"""A process of ``num_workers``: ``python -m growcache transform``.

It holds no state: rows come in, the user's function is called, results go where they belong.
The end of the connection ends it at once, whatever the user's code does.
"""

from __future__ import annotations

import functools
import os
import queue
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np

from growcache.loading.borrowed import Borrowed
from growcache.loading.calls import portable
from growcache.loading.crews import Call, Rows, store
from growcache.loading.gather import Column
from growcache.loading.late_calls import LateCalls
from growcache.loading.listening import listen
from growcache.loading.ragged import Ragged
from growcache.loading.wire import Frame, Wire
from growcache.loading.workers import Done, Late, Raised, Setup, Work

WHERE = "a process of num_workers"


def main(wire: Wire) -> None:
    """Serve who started this, until the connection ends."""
    try:
        setup = wire.receive().head
    except EOFError:
        return
    works: queue.SimpleQueue[Work] = queue.SimpleQueue()
    listen(wire, functools.partial(_take, wire, works))
    sys.argv = setup.argv
    call, turn = _loaded(setup), threading.Lock()
    if isinstance(call, Call):
        watch = threading.Thread(target=_watch, args=(wire, turn, call, setup), daemon=True)
        watch.start()
    while True:
        work = works.get()
        answer = call if isinstance(call, Raised) else _answer(call, work)
        del work  # its memory may be wanted for another block
        _send(wire, turn, answer)


def _send(wire: Wire, turn: threading.Lock, answer: Done | Raised | Late) -> None:
    try:
        with turn:
            wire.send(Frame(answer))
    except OSError:
        os._exit(0)


def _watch(wire: Wire, turn: threading.Lock, call: Call, setup: Setup) -> None:
    """Tell of calls that take long; the one that makes them is in the user's code."""

    def tell(row: int, seconds: float) -> None:
        if any(row == other for other, _ in call.running.values()):  # else it has just ended
            _send(wire, turn, Late(row, seconds))

    late = LateCalls(setup.timeout_seconds, tell)
    while True:
        time.sleep(late.pause_seconds)
        late.look(dict(call.running), time.monotonic())


def _take(wire: Wire, works: queue.SimpleQueue[Work]) -> None:
    borrowed = Borrowed()
    while True:
        works.put(borrowed.receive(wire))


def _loaded(setup: Setup) -> Call | Raised:
    try:
        return Call(setup.function.load(), setup.seed)
    except BaseException as error:  # noqa: BLE001 - it is raised in the trainer
        error.add_note("while the transform was loaded in a process of num_workers")
        return Raised(portable(error, WHERE))


def _answer(call: Call, work: Work) -> Done | Raised:
    try:
        return Done(_made(call, work))
    except BaseException as error:  # noqa: BLE001 - it is raised in the trainer
        return Raised(portable(error, WHERE))
    finally:
        call.running.clear()


def _private(rows: Rows) -> Rows:
    """Return the rows in memory of this process: the user's code may keep samples.

    What is shared is filled again, and nobody here tells what still refers to it.
    """
    columns: dict[str, Column] = {
        name: replace(column, values=column.values.copy())
        if isinstance(column, Ragged)
        else column.copy()
        for name, column in rows.columns.items()
    }
    return replace(rows, columns=columns)


def _made(call: Call, work: Work) -> Any:
    rows, n, schema = _private(work.rows), len(work.rows), work.schema
    if schema is None:
        return [call.plain(rows, i) for i in range(n)]
    out: dict[str, Any] = dict(work.out)
    returned = {
        f.name: [None] * n if f.is_ragged else np.empty((n, *f.fixed_shape), f.item)
        for f in schema.fields
        if work.out[f.name] is None
    }
    out |= returned
    for i in range(n):
        store(schema, call(rows, i), out, i)
    return returned
