"""Copy batches to a device concurrently with the loop, from page-locked memory.

The thread that makes batches starts the copies in a separate stream, in which `batch_transform`
computes, too. The loop's stream waits for an event after them, which costs the process nothing.
Two kinds of memory must not be reused too early:

- The source of a copy. Buffers are recycled when nothing refers to them, so a reference is kept
  until the event has happened.
- The target of a copy. It belongs to the copying stream, but the user's stream may still
  compute with a tensor after the user has dropped it. This use is therefore registered
  (``record_stream``).

Buffers are page-locked in place (``cudaHostRegister``), so shared memory can be locked as well.
The first CUDA call in a thread opens a context on its current device, which is GPU 0 at first.
Each thread therefore sets its device before.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from growcache.errors import ConfigError
from growcache.loading.buffers import allocate_pages, allocate_private
from growcache.loading.framework import Bytes


def call_loaded(names: str, function: str, *arguments: int) -> None:
    """Call a function of each loaded library whose name matches ``names``, by file.

    A library that is loaded by its name may be another copy with its own state.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for path in sorted(set(re.findall(rf"(/.*/lib(?:{names})\b[^/\n]*)$", maps, re.MULTILINE))):
        try:
            found = getattr(ctypes.CDLL(path), function)
        except (OSError, AttributeError):
            continue
        found(*arguments)


class CopyEvent(Protocol):
    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class DeviceCopies(Protocol):
    def enter(self) -> None: ...

    def lock(self, buffer: Bytes) -> None: ...

    def copy(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def mark(self) -> CopyEvent: ...

    def arrive(self, mark: CopyEvent, tensors: list[torch.Tensor]) -> None: ...


class PassedEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class BlockingCopies:
    """Copies to any device except CUDA, which block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self) -> None: ...

    def lock(self, buffer: Bytes) -> None: ...

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def mark(self) -> CopyEvent:
        return PassedEvent()

    def arrive(self, mark: CopyEvent, tensors: list[torch.Tensor]) -> None: ...


HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device

_log = logging.getLogger(__name__)


class CudaEvent(NamedTuple):
    event: torch.cuda.Event
    device: torch.device

    def query(self) -> bool:
        with torch.cuda.device(self.device):
            passed: bool = self.event.query()  # type: ignore[no-untyped-call]
        return passed

    def synchronize(self) -> None:
        with torch.cuda.device(self.device):
            self.event.synchronize()


class CudaCopies:
    def __init__(self, device: torch.device) -> None:
        found: int | None = device.index  # torch's annotation lacks None
        self._device = torch.device(
            "cuda", torch.cuda.current_device() if found is None else found
        )
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Tensors that `batch_transform` refers to may still be in the making.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._locks = True

    def enter(self) -> None:
        torch.cuda.set_stream(self._stream)

    def lock(self, buffer: Bytes) -> None:
        """Page-lock a buffer. Without the lock, copies are slower but correct."""
        if not self._locks:
            return
        where, runtime = buffer.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(where, buffer.nbytes, HOST_REGISTER_PORTABLE))
        if not error:
            kept = weakref.finalize(buffer, _unregister, where, self._device, os.getpid())
            kept.atexit = False
            return
        self._locks = False
        _forget_error()
        _log.warning(
            "transfer cannot page-lock %d bytes (CUDA error %d) and stops trying; copies to %s "
            "are slower",
            *(buffer.nbytes, error, self._device),
        )

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def mark(self) -> CopyEvent:
        return CudaEvent(self._stream.record_event(), self._device)

    def arrive(self, mark: CopyEvent, tensors: list[torch.Tensor]) -> None:
        """Make the current stream wait for the copies, and keep the tensors' memory until then."""
        assert isinstance(mark, CudaEvent)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(mark.event)
        for tensor in tensors:
            tensor.record_stream(stream)


def _unregister(where: int, device: torch.device, pid: int) -> None:
    """Unlock pages, in any thread, but not in a forked child."""
    if pid != os.getpid():
        return
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if error := int(runtime.cudaHostUnregister(where)):
            _forget_error()
            _log.warning("transfer leaves memory page-locked (CUDA error %d)", error)


def _forget_error() -> None:
    """Clear the last CUDA error of this thread, because torch would raise it at its next kernel."""
    call_loaded("cudart", "cudaGetLastError")
    call_loaded("amdhip64", "hipGetLastError")


# Copies in flight. The bus is faster than the gather, so the first copy has ended long before
# it is waited for.
MAX_IN_FLIGHT = 8


class SentBatch(NamedTuple):
    batch: Any
    mark: CopyEvent


class DeviceTransfer:
    def __init__(self, make_copies: Callable[[], DeviceCopies]) -> None:
        self._make_copies = make_copies
        self._copies: DeviceCopies | None = None
        self._begin_here()

    def _begin_here(self) -> None:
        self._pid = os.getpid()
        self._under_way: deque[SentBatch] = deque()
        self._turn = threading.Lock()  # one thread may take over from another
        weakref.finalize(self, _await_copies, self._under_way, self._pid)

    def begin(self) -> None:
        forked = self._pid != os.getpid()
        if forked:
            self._begin_here()
        if forked or self._copies is None:
            self._copies = self._make_copies()

    def enter(self) -> None:
        """Make the device current in this thread; a `batch_transform` may have changed it."""
        self._device_copies.enter()

    @property
    def _device_copies(self) -> DeviceCopies:
        assert self._copies is not None
        return self._copies

    def lock(self, buffer: Bytes) -> None:
        self.enter()
        self._device_copies.lock(buffer)

    def allocate(self, nbytes: int, kept: list[Bytes] | None) -> Bytes:
        if kept is None:
            return allocate_private(nbytes, kept)
        buffer = allocate_pages(nbytes)
        self.lock(buffer)
        return buffer

    def send(self, batch: Any, origin: object = None) -> SentBatch:
        self.enter()
        with self._turn:
            while self._under_way and self._under_way[0].mark.query():
                self._under_way.popleft()
            if len(self._under_way) >= MAX_IN_FLIGHT:
                self._under_way[0].mark.synchronize()
                self._under_way.popleft()
            there = map_tensors(self._device_copies.copy, batch)
            mark = self._device_copies.mark()
            self._under_way.append(SentBatch((batch, origin), mark))
        return SentBatch(there, mark)

    def receive(self, sent: SentBatch) -> Any:
        self._device_copies.arrive(sent.mark, list(tensors_of(sent.batch)))
        return sent.batch


def _await_copies(under_way: deque[SentBatch], pid: int) -> None:
    """Wait for all copies, because their source memory may be freed next; not in a forked child."""
    try:
        while under_way and pid == os.getpid():
            under_way[0].mark.synchronize()
            under_way.popleft()  # only now, because the entry keeps the memory
    except RuntimeError as error:
        under_way.clear()
        _log.warning("transfer no longer waits for copies: %s", str(error).partition("\n")[0])


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Return the batch with each tensor replaced by the function's result.

    >>> map_tensors(lambda t: t + 1, {"x": torch.tensor(1), "names": ["a", "b"]})
    {'x': tensor(2), 'names': ['a', 'b']}
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {name: map_tensors(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict | list | tuple):
        for value in batch.values() if isinstance(batch, dict) else batch:
            yield from tensors_of(value)


def transfer_to(device: Any) -> DeviceTransfer | None:
    """Return the transfer to a device, or None for memory.

    Raises:
        ConfigError: The device is unknown or absent.
    """
    found = _known_device(device)
    if found.type == "cpu":
        return None
    if found.type == "cuda":
        _refuse_absent(found)
        return DeviceTransfer(lambda: CudaCopies(found))
    return DeviceTransfer(lambda: BlockingCopies(found))


def _known_device(device: Any) -> torch.device:
    try:
        found = torch.device(device)
        if found.type != "cuda":
            torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f'device expected as "cuda", "cuda:1" or another that is there, found {device!r}: '
            f"{reason:.200}",
            code="GC803",
        ) from None
    return found


def _refuse_absent(device: torch.device) -> None:
    """Raise ConfigError for an absent device.

    The count comes from NVML: as long as CUDA is not initialized, the process may fork.
    """
    count = torch.cuda.device_count()
    if count > (device.index or 0):
        return
    there = f"there are {count}" if count else "it finds no GPU"
    if torch.version.cuda is None and torch.version.hip is None:
        there = "it is built without CUDA"
    raise ConfigError(
        f"device {str(device)!r} is not there for torch {torch.__version__}: {there}; leave "
        "device out, or install a build for this machine",
        code="GC803",
    )
