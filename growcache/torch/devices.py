"""Batches on a device: sent there beside the loop, from memory that is page-locked.

The thread that makes batches begins the copies, in a stream of its own, and puts a mark
behind them. The loop's thread lets its own stream wait for that mark, which costs the
process nothing. Two kinds of memory must not be used again too early:

- what is copied *from*: the buffers of the gather go round as soon as nobody refers to
  them, so they are referred to until the mark was passed;
- what is copied *to*: it belongs to the stream that copies, and the user's stream may
  still compute with what the user has let go of. The stream is told (``record_stream``).

The buffers are page-locked where they are (``cudaHostRegister``) instead of allocated by
CUDA: so they are the same with and without a device, and memory that is shared with
another process can be locked as well.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from growcache.errors import ConfigError
from growcache.loading.buffers import allocate_here
from growcache.loading.framework import Bytes

# Copies begun and not awaited. The bus is faster than the gather, so it is the first that
# is awaited, and long done.
MOST_UNDER_WAY = 8

PORTABLE = 1  # cudaHostRegisterPortable: locked for every device

_log = logging.getLogger(__name__)


class Mark(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """Return whether the stream has passed it."""

    def synchronize(self) -> None:
        """Return when the stream has passed it."""


class Lane(Protocol):
    """A way to a device: all that is done with it."""

    def lock(self, buffer: Bytes) -> None:
        """Page-lock a buffer for as long as it lives."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor there, behind all copies before."""

    def mark(self) -> Mark:
        """Return a mark behind all copies that were begun."""

    def arrive(self, mark: Mark, tensors: list[torch.Tensor]) -> None:
        """Let what the calling thread computes from now on come behind the mark."""


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
        self._under_way: deque[Sent] = deque()
        self._turn = threading.Lock()  # one thread takes over from another one
        weakref.finalize(self, _wait_for, self._under_way)

    def begin(self) -> None:
        """Make the way, if there is none yet."""
        if self._lane is None:
            self._lane = self._make()

    @property
    def _way(self) -> Lane:
        assert self._lane is not None
        return self._lane

    def lock(self, buffer: Bytes) -> None:
        """Page-lock memory for as long as the array lives."""
        self._way.lock(buffer)

    def allocate(self, nbytes: int, kept: list[Bytes] | None) -> Bytes:
        """Return memory for batches; what is used again and again is page-locked."""
        buffer = allocate_here(nbytes, kept)
        if kept is not None:
            self.lock(buffer)
        return buffer

    def send(self, batch: Any) -> Sent:
        """Begin to copy the tensors of a batch: of dicts, lists and tuples, however nested."""
        with self._turn:
            while self._under_way and self._under_way[0].mark.query():
                self._under_way.popleft()
            if len(self._under_way) >= MOST_UNDER_WAY:
                self._under_way[0].mark.synchronize()
                self._under_way.popleft()
            there = mapped(self._way.copy, batch)
            mark = self._way.mark()
            self._under_way.append(Sent(batch, mark))
        return Sent(there, mark)

    def receive(self, sent: Sent) -> Any:
        """Return the batch, for the stream that is current in this thread."""
        self._way.arrive(sent.mark, list(tensors_of(sent.batch)))
        return sent.batch


def _wait_for(under_way: deque[Sent]) -> None:
    """Wait for all copies: then the memory they come from may go."""
    while under_way:
        under_way[0].mark.synchronize()
        under_way.popleft()  # only now: it is what keeps the memory


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


class Passed:
    """The mark of copies that are done when they return."""

    def query(self) -> bool:
        """Say so."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class PlainLane:
    """Copies that are awaited where they are begun: any device but those of CUDA.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, buffer: Bytes) -> None:
        """Leave the buffer as it is."""

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor there."""
        return tensor.to(self._device)

    def mark(self) -> Mark:
        """Return a mark that was passed."""
        return Passed()

    def arrive(self, mark: Mark, tensors: list[torch.Tensor]) -> None:
        """Do nothing: they are there."""


class CudaLane:
    """Copies in a stream of their own.

    Args:
        device: where to; without an index the one that is current in this thread. Threads
            have their own: in one that makes batches it would always be the first.
    """

    def __init__(self, device: torch.device) -> None:
        found: int | None = device.index  # its type says that there always is one
        self._device = torch.device(
            "cuda", torch.cuda.current_device() if found is None else found
        )
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def lock(self, buffer: Bytes) -> None:
        """Page-lock a buffer until it is freed; without, copies are slower, not wrong."""
        where, runtime = buffer.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(where, buffer.nbytes, PORTABLE))
        if error:
            _log.warning(
                "%d bytes cannot be page-locked (CUDA error %d); copies to %s are slower",
                *(buffer.nbytes, error, self._device),
            )
            return
        weakref.finalize(buffer, runtime.cudaHostUnregister, where).atexit = False

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor there."""
        with torch.cuda.stream(self._stream):
            return tensor.to(self._device, non_blocking=True)

    def mark(self) -> Mark:
        """Return an event behind the copies."""
        mark: Mark = self._stream.record_event()
        return mark

    def arrive(self, mark: Mark, tensors: list[torch.Tensor]) -> None:
        """Let the current stream wait for the event, and keep the tensors' memory for it."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(mark)  # type: ignore[arg-type]
        for tensor in tensors:
            tensor.record_stream(stream)


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
    """Refuse a GPU that is not there; this starts no context, so one may fork afterwards."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > (device.index or 0):
        return
    there = f"there are {count}" if count else "it finds no GPU"
    if torch.version.cuda is None and torch.version.hip is None:
        there = "it is built without CUDA"
    raise ConfigError(
        f"device {str(device)!r} is not there for torch {torch.__version__}: {there}; leave "
        "device out, or install a build for this machine"
    )
