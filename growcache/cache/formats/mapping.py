"""Files in memory that hold no descriptor.

`mmap.mmap` keeps one open for as long as the map lives (until ``trackfd=False`` of Python
3.13), and most users' limit is 1,024 for all of their program: a cache of 64 GB would reach
it. So this asks the C library itself. The arrays are private and writable, because torch
warns about read-only memory; nothing ever writes to them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from growcache.errors import CacheError, CorruptShardError

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
_FAILED = ctypes.c_void_p(-1).value


class _Map:
    """What the arrays of a file stand on; unmapped with the last of them."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._size = size
        self._address = _libc.mmap(
            None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0
        )
        if self._address == _FAILED:
            raise CacheError(
                f"cannot map a file of {size:,} bytes: {_reason()}; a process may have as many "
                "maps as sysctl vm.max_map_count says: larger shards need fewer"
            )
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size,),
            "data": (self._address, False),
        }

    def __del__(self, munmap: Any = _libc.munmap) -> None:
        if self._address != _FAILED:
            munmap(self._address, self._size)


def map_file(path: Path) -> npt.NDArray[np.uint8]:
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


def will_need(memory: npt.NDArray[np.uint8]) -> None:
    """Ask the kernel to read a whole file that `map_file` mapped.

    Raises:
        OSError: it cannot.
    """
    if len(memory) and _libc.madvise(memory.ctypes.data, len(memory), mmap.MADV_WILLNEED):
        raise OSError(ctypes.get_errno(), _reason())


def _reason() -> str:
    return os.strerror(ctypes.get_errno())
