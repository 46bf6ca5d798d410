"""Copies of many rows of memory in one system call, which lets go of the GIL once.

NumPy lets go of it for each row, and beside a busy thread waits to have it back each time.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from growcache.cache.formats import bus_errors
from growcache.errors import CorruptShardError

Bytes: TypeAlias = npt.NDArray[np.uint8]
Integers: TypeAlias = npt.NDArray[np.int64]

# Of a call. IOV_MAX is 1024, but NumPy lets go of the GIL to compute more than 500 numbers.
MOST_ROWS = 500


def copy_rows(memory: Bytes, starts: Integers, lengths: Integers, out: Bytes) -> bool:
    """Copy rows of one piece of memory into ``out``, one behind the other.

    By the call that reads the memory of other processes, Linux' ``process_vm_readv``. It is a
    tenth to a sixth slower than ``memcpy``.

    Args:
        memory: uint8 [k]; only the rows are touched.
        starts: int64 [n], where they begin.
        lengths: int64 [n], in bytes.
        out: uint8 [all lengths], contiguous.

    Returns:
        whether it was done; not every system has such a call, or allows it.

    Raises:
        IndexError: a row that is not within the memory.
        ValueError: ``out`` is not as long as all rows.
        CorruptShardError: a row cannot be read, for its file is shorter than its map, or the
            disk fails. Read in another way it would end the process (SIGBUS).
    """
    if _read is None:
        return False
    if sum(lengths.tolist()) != len(out):  # the kernel would write beyond it
        raise ValueError(f"rows of {sum(lengths.tolist())} bytes for {len(out)}")
    done = 0
    for first in range(0, len(starts), MOST_ROWS):
        some = slice(first, first + MOST_ROWS)
        rows = _located(memory, starts[some], lengths[some])
        wanted = sum(rows[:, 1].tolist())
        if not _copy(_read, rows, out.ctypes.data + done, wanted):
            return False
        done += wanted
    return True


def _located(memory: Bytes, starts: Integers, lengths: Integers) -> Integers:
    """Return the address and length of each row: int64 [n, 2], the kernel's ``iovec``."""
    rows = np.empty((len(starts), 2), np.int64)
    rows[:, 0], rows[:, 1] = starts, lengths
    first, last = int(starts.min()), int((starts + lengths).max())
    if first < 0 or last > len(memory):
        raise IndexError(f"rows from {first} to {last} of {len(memory)} bytes")
    rows[:, 0] += memory.ctypes.data
    return rows


def _copy(read: _Read, rows: Integers, target: int, wanted: int) -> bool:
    """Copy rows that one call takes, in another one what it leaves over."""
    while wanted:
        into = (ctypes.c_size_t * 2)(target, wanted)
        copied = read(os.getpid(), into, 1, rows.ctypes.data, len(rows), 0)
        if copied == wanted:
            break
        if copied < 0 and ctypes.get_errno() == errno.EFAULT:
            bus_errors.mark_damaged(int(rows[0, 0]))
            raise CorruptShardError(
                "a shard cannot be read where it is mapped: its file was cut short, or the "
                "disk fails; run growcache check"
            )
        if copied <= 0:
            return False
        rows = _behind(rows, copied)
        target, wanted = target + copied, wanted - copied
    return True


def _behind(rows: Integers, copied: int) -> Integers:
    """Return what is left of rows; a call copies 2 GB at most, or up to what it cannot read."""
    ends = np.cumsum(rows[:, 1])
    first = int(np.searchsorted(ends, copied, side="right"))
    rest = rows[first:].copy()
    over = int(rest[0, 1]) - (int(ends[first]) - copied)
    rest[0] += (over, -over)
    return rest


_Read: TypeAlias = Callable[[int, Any, int, int, int, int], int]


def _found() -> _Read | None:
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    if ctypes.sizeof(size) != np.int64().itemsize:
        return None  # as long as numbers of an iovec are
    try:
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return None  # another system
    call.restype = ctypes.c_ssize_t
    call.argtypes = [ctypes.c_int, pointer, size, pointer, size, size]
    found: _Read = call
    return found


_read = _found()
