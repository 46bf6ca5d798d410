"""The way to a GPU.

The buffers are page-locked where they are (``cudaHostRegister``) instead of allocated by
CUDA: so they are the same with and without a device, and memory that is shared with
another process can be locked as well. Whole pages are locked, and none twice: so a buffer
needs pages of its own.

Every thread has a current device, GPU 0 at first, and whatever it asks CUDA for opens a
context there, of some hundred megabytes. So no thread asks before it has said which one.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import NamedTuple

import torch

from growcache.loading.framework import Bytes
from growcache.torch.lanes import Mark
from growcache.torch.libraries import call_loaded

PORTABLE = 1  # cudaHostRegisterPortable: locked for every device

_log = logging.getLogger(__name__)


class CudaMark(NamedTuple):
    """An event behind copies.

    Attributes:
        event: of CUDA.
        device: that it is of.
    """

    event: torch.cuda.Event
    device: torch.device

    def query(self) -> bool:
        """Return whether it has happened."""
        with torch.cuda.device(self.device):
            passed: bool = self.event.query()  # type: ignore[no-untyped-call]
        return passed

    def synchronize(self) -> None:
        """Wait for it."""
        with torch.cuda.device(self.device):
            self.event.synchronize()


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
        # What `batch_transform` refers to may have been made just now.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._locks = True

    def enter(self) -> None:
        """Make the stream, and so its device, the calling thread's."""
        torch.cuda.set_stream(self._stream)

    def lock(self, buffer: Bytes) -> None:
        """Page-lock a buffer until it is freed; without, copies are slower, not wrong."""
        if not self._locks:
            return
        where, runtime = buffer.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = int(runtime.cudaHostRegister(where, buffer.nbytes, PORTABLE))
        if not error:
            kept = weakref.finalize(buffer, _unlock, where, self._device, os.getpid())
            kept.atexit = False
            return
        self._locks = False
        _forget_error()
        _log.warning(
            "%d bytes cannot be page-locked (CUDA error %d), and no more is tried; copies to "
            "%s are slower",
            *(buffer.nbytes, error, self._device),
        )

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor there."""
        return tensor.to(self._device, non_blocking=True)

    def mark(self) -> Mark:
        """Return a mark behind the copies."""
        return CudaMark(self._stream.record_event(), self._device)

    def arrive(self, mark: Mark, tensors: list[torch.Tensor]) -> None:
        """Let the current stream wait for the mark, and keep the tensors' memory for it."""
        assert isinstance(mark, CudaMark)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(mark.event)
        for tensor in tensors:
            tensor.record_stream(stream)


def _unlock(where: int, device: torch.device, pid: int) -> None:
    """Let go of pages, in whichever thread the buffer was freed; a fork has none."""
    if pid != os.getpid():
        return
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if error := int(runtime.cudaHostUnregister(where)):
            _forget_error()
            _log.warning("memory stays page-locked (CUDA error %d)", error)


def _forget_error() -> None:
    """Take back what failed last in this thread; or its next kernel would raise that error.

    CUDA keeps it until somebody asks, and torch asks where it starts a kernel, such as one
    of the user's `batch_transform`.
    """
    call_loaded("cudart", "cudaGetLastError")
    call_loaded("amdhip64", "hipGetLastError")
