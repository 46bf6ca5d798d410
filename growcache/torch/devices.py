"""Batches on a device: sent there beside the loop, from memory that is page-locked.

The thread that makes batches begins the copies, in a stream of its own, and puts a mark
behind them. What the user's `batch_transform` computes on the device is in that stream, too.
The loop's thread lets its own stream wait for the mark, which costs the process nothing.
Two kinds of memory must not be used again too early:

- what is copied *from*: the buffers of the gather go round as soon as nobody refers to
  them, so they are referred to until the mark was passed;
- what is copied *to*: it belongs to the stream that copies, and the user's stream may
  still compute with what the user has let go of. The stream is told (``record_stream``).
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from growcache.errors import ConfigError
from growcache.loading.buffers import allocate_here, allocate_pages
from growcache.loading.framework import Bytes
from growcache.torch.cuda import CudaLane
from growcache.torch.lanes import Lane, Mark, PlainLane

# Copies begun and not awaited. The bus is faster than the gather, so it is the first that
# is awaited, and long done.
MOST_UNDER_WAY = 8

_log = logging.getLogger(__name__)


class Sent(NamedTuple):
    """A batch on its way.

    Attributes:
        batch: there; it may not be used before the mark.
        mark: behind its copies.
    """

    batch: Any
    mark: Mark


class Sender:
    """Brings batches to a device: the `growcache.loading.framework.Carrier` of torch.

    Args:
        lane: makes the way there, in the loop's thread, when it first iterates.
    """

    def __init__(self, lane: Callable[[], Lane]) -> None:
        self._make = lane
        self._lane: Lane | None = None
        self._begin_here()

    def _begin_here(self) -> None:
        self._pid = os.getpid()
        self._under_way: deque[Sent] = deque()
        self._turn = threading.Lock()  # one thread takes over from another one
        weakref.finalize(self, _wait_for, self._under_way, self._pid)

    def begin(self) -> None:
        """Make the way, if there is none yet; that of the process that forked is none."""
        forked = self._pid != os.getpid()
        if forked:
            self._begin_here()
        if forked or self._lane is None:
            self._lane = self._make()

    def enter(self) -> None:
        """Have the calling thread, one of the loader's own, work on the device.

        Every time anew, for a `batch_transform` may have left it elsewhere.
        """
        self._way.enter()

    @property
    def _way(self) -> Lane:
        assert self._lane is not None
        return self._lane

    def lock(self, buffer: Bytes) -> None:
        """Page-lock memory for as long as the array lives."""
        self.enter()
        self._way.lock(buffer)

    def allocate(self, nbytes: int, kept: list[Bytes] | None) -> Bytes:
        """Return memory for batches; what is used again and again is page-locked."""
        if kept is None:
            return allocate_here(nbytes, kept)
        buffer = allocate_pages(nbytes)
        self.lock(buffer)
        return buffer

    def send(self, batch: Any, origin: object = None) -> Sent:
        """Begin to copy the tensors of a batch: of dicts, lists and tuples, however nested.

        Args:
            batch: to be sent.
            origin: what it was made of, in this thread: copies of that may be under way too.
        """
        self.enter()
        with self._turn:
            while self._under_way and self._under_way[0].mark.query():
                self._under_way.popleft()
            if len(self._under_way) >= MOST_UNDER_WAY:
                self._under_way[0].mark.synchronize()
                self._under_way.popleft()
            there = mapped(self._way.copy, batch)
            mark = self._way.mark()
            self._under_way.append(Sent((batch, origin), mark))
        return Sent(there, mark)

    def receive(self, sent: Sent) -> Any:
        """Return the batch, for the stream that is current in this thread."""
        self._way.arrive(sent.mark, list(tensors_of(sent.batch)))
        return sent.batch


def _wait_for(under_way: deque[Sent], pid: int) -> None:
    """Wait for all copies: then the memory they come from may go. A fork has its own.

    A device that failed copies nothing any more. It tells whoever works with it, which a
    finalizer cannot.
    """
    try:
        while under_way and pid == os.getpid():
            under_way[0].mark.synchronize()
            under_way.popleft()  # only now: it is what keeps the memory
    except RuntimeError as error:
        under_way.clear()
        _log.warning("copies are not awaited any more: %s", str(error).partition("\n")[0])


def mapped(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Return a batch with the function's results in place of its tensors.

    >>> mapped(lambda t: t + 1, {"x": torch.tensor(1), "names": ["a", "b"]})
    {'x': tensor(2), 'names': ['a', 'b']}
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: mapped(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(function, value) for value in batch)
    return batch


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch, in the order in which `mapped` goes through them."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict | list | tuple):
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors_of(value)


def sender_to(device: Any) -> Sender | None:
    """Return what brings batches to a device; None where that is memory.

    Raises:
        ConfigError: there is no such device.
    """
    found = _device(device)
    if found.type == "cpu":
        return None
    if found.type == "cuda":
        _refuse_absent(found)
        return Sender(lambda: CudaLane(found))
    return Sender(lambda: PlainLane(found))


def _device(device: Any) -> torch.device:
    """Return a device that torch knows; whether it is there, only CUDA is asked later."""
    try:
        found = torch.device(device)
        if found.type != "cuda":
            torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f'device expected as "cuda", "cuda:1" or another that is there, found {device!r}: '
            f"{reason:.200}"
        ) from None
    return found


def _refuse_absent(device: torch.device) -> None:
    """Refuse a GPU that is not there.

    Only the count is asked for, which the driver's library for monitoring (NVML) knows without
    CUDA being initialized, so one may fork afterwards. `torch.cuda.is_available` initializes it.
    """
    count = torch.cuda.device_count()
    if count > (device.index or 0):
        return
    there = f"there are {count}" if count else "it finds no GPU"
    if torch.version.cuda is None and torch.version.hip is None:
        there = "it is built without CUDA"
    raise ConfigError(
        f"device {str(device)!r} is not there for torch {torch.__version__}: {there}; leave "
        "device out, or install a build for this machine"
    )
