"""Copies of rows by torch's operations, which release the GIL once for many of them."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from growcache.loading.framework import LONG_ROW_BYTES, Bytes, Integers, slices


def call_loaded(names: str, function: str, *arguments: int) -> None:
    """Call a function of each mapped library of that name that has it.

    By file, because another copy of a library, loaded by its name, would have a state of its
    own.
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


# Rows with fewer elements are copied by memcpy, those with more through a tensor iterator
# that is a third slower and starts a parallel region per row (at::internal::GRAIN_SIZE).
GRAIN_ELEMENTS = 32_768
SMALLEST_CHUNK = 2048
# From more numbers on NumPy lets go of the GIL to compute.
UNLOCKED_NUMBERS = 500


def take_rows(memory: Bytes, starts: Integers, out: Bytes) -> None:
    """Copy rows that begin anywhere into ``out``, in one operation that releases the GIL once."""
    nbytes = out.shape[1]
    chunk = _chunk_bytes(nbytes)  # long rows are copied as many short ones
    index = _chunk_starts(starts, nbytes, chunk)
    # A view whose rows begin at every single byte. NumPy makes it, because each operation of
    # torch's releases the GIL, and a busy loop then keeps it for as long as a copy takes.
    shape = (max(0, len(memory) - chunk + 1), chunk)
    table = np.ndarray(shape, np.uint8, memory, strides=(1, 1))
    target = torch.from_numpy(out.reshape(-1, chunk))
    torch.index_select(torch.from_numpy(table), 0, torch.from_numpy(index), out=target)


def _chunk_starts(starts: Integers, nbytes: int, chunk: int) -> Integers:
    """Return where the chunks of all rows begin: int64 [chunks]."""
    if chunk == nbytes:
        return starts
    before = np.arange(0, nbytes, chunk)
    index = np.empty((len(starts), len(before)), np.int64)
    if len(starts) > UNLOCKED_NUMBERS:
        np.add(starts[:, None], before, out=index)
    else:  # column by column it does not
        for column, by in enumerate(before.tolist()):
            np.add(starts, by, out=index[:, column])
    return index.reshape(-1)


@functools.lru_cache(maxsize=256)
def _chunk_bytes(nbytes: int) -> int:
    """Return the largest divisor of a row below the grain, or the row where it has none."""
    if nbytes < GRAIN_ELEMENTS:
        return nbytes
    pieces = range(-(-nbytes // (GRAIN_ELEMENTS - 1)), nbytes // SMALLEST_CHUNK + 1)
    return next((nbytes // n for n in pieces if nbytes % n == 0), nbytes)


def take_slices(memory: Bytes, starts: Integers, lengths: Integers, out: Bytes) -> None:
    join_parts(slices(memory, starts, lengths), out)


def join_parts(parts: Sequence[Bytes], out: Bytes) -> None:
    """Copy the parts back to back; long ones without holding the GIL in between.

    For short ones, making tensors takes as long as the copy. Empty ones cost `torch.cat` its
    fast path.
    """
    if len(out) < LONG_ROW_BYTES * len(parts):
        np.concatenate(parts, out=out)
        return
    tensors = [torch.from_numpy(part) for part in parts if len(part)]
    torch.cat(tensors, out=torch.from_numpy(out))


def copy_in_this_thread_alone() -> None:
    """Keep torch's operations of the calling thread out of its pool of threads.

    They would wait for a second thread that is preempted, or busy with the user's step, which
    costs a factor of ten. OpenMP keeps the number per thread, so others are unaffected;
    `torch.set_num_threads` would change them.
    """
    torch.get_num_threads()  # torch sets the number when a thread first asks for it
    call_loaded("gomp|iomp5|omp", "omp_set_num_threads", 1)
