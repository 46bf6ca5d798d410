"""Files in memory that hold no descriptor.

`mmap.mmap` keeps one open for as long as the map lives (until ``trackfd=False`` of Python
3.13), and most users' limit is 1,024 for all of their program: a cache of 64 GB would reach
it. So this asks the C library itself. The arrays are private and writable, because torch
warns about read-only memory; nothing ever writes to them.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.cache.formats import bus_errors
from growcache.errors import CacheError, CorruptShardError

Bytes: TypeAlias = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_uint,
)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_POPULATE_READ = 22  # of Linux 5.14; Python knows no name for it
_PAGE = mmap.PAGESIZE

# Brought by one call: beside a thread that is busy in Python each call costs a switch interval.
PIECE_BYTES = 32 << 20
# A device that is read so far ahead by itself is at full speed.
FAR_BYTES = 4 << 20
# What one request to read ahead is sure to cover: kernels cut longer ones short.
REQUEST_BYTES = 128 << 10
_PROCESS_MADVISE, _MOST_RANGES = 440, 1024  # the same number on every architecture

_FAILED = ctypes.c_void_p(-1).value


class _Map:
    """What the arrays of a file stand on; unmapped with the last of them.

    Args:
        descriptor: of the file.
        size: in bytes.
        flags: as of ``mmap``.
    """

    def __init__(self, descriptor: int, size: int, flags: int = mmap.MAP_PRIVATE) -> None:
        self._size = size
        self._address = _libc.mmap(
            None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0
        )
        if self._address == _FAILED:
            raise CacheError(
                f"cannot map a file of {size:,} bytes: {_reason()}; a process may have as many "
                "maps as sysctl vm.max_map_count says: larger shards need fewer"
            )
        if flags & mmap.MAP_PRIVATE:  # what others write may be cut short by them
            bus_errors.watch(self._address, size)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (self._address, False),
        }

    def __del__(self, unwatch: Any = bus_errors.unwatch, munmap: Any = _libc.munmap) -> None:
        if self._address != _FAILED:
            unwatch(self._address)
            munmap(self._address, self._size)


def map_file(path: Path) -> Bytes:
    """Return the bytes of a file; the last array that views them unmaps it.

    Raises:
        CorruptShardError: there is no such file.
        CacheError: no memory, or more maps than the system allows.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return np.asarray(_Map(file.fileno(), size)) if size else np.empty(0, np.uint8)
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptShardError(f"{path}: the shard is missing; run growcache check") from None


def map_shared(descriptor: int, size: int) -> Bytes:
    """Return the bytes of a file, shared with all who map it so; the last array unmaps it.

    Its pages are brought in at once, so that nobody meets page faults in the middle of a step.

    Raises:
        CacheError: no memory, or more maps than the system allows.
    """
    return np.asarray(_Map(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE))


def bring(memory: Bytes, *, asking: bool = True) -> Iterator[Bytes]:
    """Yield a file that `map_file` mapped in pieces, each when all of it is in memory.

    Reading where a map is cold costs a wait per page or few, ten times the disk's time. So
    pieces are brought in order, by one call each that does not hold the GIL, and mapped by it.

    Args:
        memory: uint8 [k], the whole file.
        asking: for all of it at first; where the kernel itself reads `FAR_BYTES` ahead,
            that only gets into its way.

    Raises:
        CorruptShardError: it is shorter now than it was, or the disk cannot read it.
    """
    if asking:
        _ask(memory)
    for start in range(0, len(memory), PIECE_BYTES):
        piece = memory[start : start + PIECE_BYTES]
        _populate(piece)
        yield piece


def _ask(memory: Bytes) -> None:
    """Have the kernel begin to read all of a map, in requests that it does not cut short.

    A kernel that cannot be asked so (before Linux 5.10) reads what is touched.
    """
    starts = np.arange(0, len(memory), REQUEST_BYTES, dtype=np.uint64)
    ranges = np.empty((len(starts), 2), np.uint64)  # address and length, as of ``iovec``
    ranges[:, 0] = starts + np.uint64(memory.ctypes.data)
    ranges[:, 1] = np.minimum(np.uint64(len(memory)) - starts, np.uint64(REQUEST_BYTES))
    with suppress(OSError):  # no such call
        process = os.pidfd_open(os.getpid())
        try:
            for first in range(0, len(ranges), _MOST_RANGES):
                some = ranges[first : first + _MOST_RANGES]
                advice = (some.ctypes.data, len(some), mmap.MADV_WILLNEED, 0)
                _libc.syscall(_PROCESS_MADVISE, process, *advice)
        finally:
            os.close(process)


def _populate(piece: Bytes) -> None:
    try:
        _advise(piece, _POPULATE_READ)
    except OSError as error:
        if error.errno == errno.EFAULT:
            raise CorruptShardError(
                f"{len(piece):,} bytes of a shard cannot be read from the disk; run growcache check"
            ) from None
        if error.errno != errno.EINVAL:
            raise
        piece[::_PAGE].max()  # an older kernel: touch every page, without the GIL


def in_memory(memory: Bytes) -> bool:
    """Return whether all of a mapped file is in the page cache, so far as this user may know.

    Of a file that belongs to others, and may not be written, the kernel always says yes.
    """
    if not len(memory):
        return True
    pages: Bytes = np.empty(-(-len(memory) // _PAGE), np.uint8)
    if _libc.mincore(memory.ctypes.data, len(memory), pages.ctypes.data):
        raise OSError(ctypes.get_errno(), _reason())
    return bool((pages & 1).all())


def let_go(memory: Bytes) -> None:
    """Forget the pages of a map, which stays; the page cache may keep them, see `forget`."""
    _advise(memory, mmap.MADV_DONTNEED)


def forget(path: Path) -> None:
    """Let a file leave the page cache, but for what others have mapped.

    It may be gone, or not be opened: this is advice, and what it is about was read already.
    """
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def read_ahead_bytes(path: Path) -> int:
    """Return how far the kernel reads ahead on the device of a file; 0 where it does not say."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for where in (
        f"class/bdi/{number}",
        f"dev/block/{number}/bdi",
        f"dev/block/{number}/../bdi",
    ):
        with suppress(OSError, ValueError):
            return 1024 * int(Path("/sys", where, "read_ahead_kb").read_text(encoding="ascii"))
    return 0


def _advise(memory: Bytes, advice: int) -> None:
    """Call ``madvise``.

    Raises:
        OSError: as of it.
    """
    if len(memory) and _libc.madvise(memory.ctypes.data, len(memory), advice):
        raise OSError(ctypes.get_errno(), _reason())


def _reason() -> str:
    return os.strerror(ctypes.get_errno())
