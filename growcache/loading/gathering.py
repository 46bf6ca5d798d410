"""The gather process ``python -m growcache gather``: a producer outside of the trainer's GIL.

It takes its orders over a socket of which the trainer alone has the other end. The end of
the connection without an order to stop is the trainer's death, and this process's: at once,
so that its leases are those of a dead reader, as the trainer's own would be.
"""

from __future__ import annotations

import functools
import logging
import os
import sys

import numpy as np

from growcache.cache import services
from growcache.cache.sigterm import release_at_sigterm
from growcache.loading import framework
from growcache.loading.arena import Arena
from growcache.loading.borrowed import message
from growcache.loading.calls import portable
from growcache.loading.following import company
from growcache.loading.framework import Bytes, Framework, Integers
from growcache.loading.links import Failure, Item, Link
from growcache.loading.listening import listen
from growcache.loading.orders import (
    Begin,
    EndPass,
    Halt,
    Logged,
    More,
    Order,
    Ready,
    ServiceChanged,
    Stop,
)
from growcache.loading.producer import Producer
from growcache.loading.stopping import StoppedError
from growcache.loading.wire import Wire

# The thread that gathers takes turns with those that open windows; by default for 5 ms each.
SWITCH_SECONDS = 0.5e-3
# From here on a row is copied quicker than an index of all rows.
LONG_ROW_BYTES = 8192


def main(wire: Wire) -> None:
    """Serve the trainer until it says stop, or is gone."""
    try:
        wire.send(message(Ready()))
    except OSError:
        return
    try:
        order = wire.receive().head
    except EOFError:
        return
    if isinstance(order, Order):  # else there is nothing to do any more
        _serve(wire, order)
    # What threads are left hold nothing; an orderly end would wait for them.
    sys.stderr.flush()
    os._exit(0)


def _serve(wire: Wire, order: Order) -> None:
    release_at_sigterm()
    sys.argv = order.argv
    sys.setswitchinterval(SWITCH_SECONDS)
    _log_to(wire, order.level)
    services.note(order.options.root, order.failed)
    arena = Arena()
    outlet = _Outlet(wire, arena, order.wanted)
    listen(wire, functools.partial(_follow, wire, arena, outlet.link, order))
    ranks = company(order.options, order.note)
    lent = Framework(take_rows, take_slices, allocate=arena.allocate)
    begin = order.start, order.missing
    Producer(order.options, outlet.link, lent, *begin, ranks, arena=arena).run()


def take_rows(memory: Bytes, starts: Integers, out: Bytes) -> None:
    """Copy rows, as `growcache.loading.framework.take_rows` does, long ones one by one.

    That is the quickest there is, and holds the interpreter's lock, which nobody else wants
    here. Of torch's copies it makes 1.1 times the speed with rows of 256 KiB, and three
    quarters with rows of 3 KiB; but torch takes two seconds to import, and 150 MB.

    Raises:
        IndexError: a row that is not within the memory.
    """
    nbytes = out.shape[1]
    if nbytes < LONG_ROW_BYTES:
        framework.take_rows(memory, starts, out)
        return
    if starts.min() < 0 or starts.max() > len(memory) - nbytes:
        raise IndexError(f"rows at {starts.min()} to {starts.max()} of {len(memory)} bytes")
    source, target = memory.data, out.reshape(-1).data
    for place, start in zip(range(0, len(target), nbytes), starts.tolist(), strict=True):
        target[place : place + nbytes] = source[start : start + nbytes]


def take_slices(memory: Bytes, starts: Integers, lengths: Integers, out: Bytes) -> None:
    """Copy rows of different lengths one by one, too."""
    np.concatenate(framework.slices(memory, starts, lengths), out=out)


class _Outlet:
    """Where the producer puts what it makes."""

    def __init__(self, wire: Wire, arena: Arena, wanted: int) -> None:
        self._wire = wire
        self._arena = arena
        self.link = Link(wanted, self._put)
        self.link.by_block = True

    def _put(self, item: Item) -> None:
        if isinstance(item, Failure):
            item = Failure(portable(item.error, "the gather process"))
        try:
            self._arena.send(self._wire, item)
        except OSError:
            # Told to stop, or to be told in a moment; where the trainer is gone, this ends. It
            # ends as well where but half of a message went, and the trainer is told.
            self._wire.shut()
            self.link.stop.wait()
            raise StoppedError from None


def _follow(wire: Wire, arena: Arena, link: Link, order: Order) -> None:
    while True:
        match wire.receive().head:
            case More(delivered, waited, free, spoiled):
                arena.returned(free, spoiled)
                link.more(delivered, waited=waited)
            case Begin(epoch):
                link.begin(epoch)
            case EndPass(pass_number):
                link.end_pass(pass_number)
            case Halt():
                link.halt.set()
                link.tokens.put(True)  # a block that waits for one is made already
            case ServiceChanged(reason):
                services.note(order.options.root, reason)
                link.wake.set()
            case Stop():
                link.close()
                return


class _Sender(logging.Handler):
    """Has the trainer log what is logged here."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        said = Logged(record.name, record.levelno, record.getMessage())
        try:
            self._wire.send(message(said))
        except OSError:
            return  # nobody is there to hear it


def _log_to(wire: Wire, level: int) -> None:
    log = logging.getLogger("growcache")
    log.setLevel(level)
    log.addHandler(_Sender(wire))
    log.propagate = False
