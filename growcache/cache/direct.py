"""Writing past the page cache, for caches that memory cannot hold.

Through the page cache every byte is copied once more into memory that the kernel must first
find and clear, and pushes out bytes that readers still use; on a virtual machine that costs
more than fetching them. Where memory can hold the cache it is well spent all the same, for
the readers then never wait for the disk.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np

from growcache.cache.formats.mapped import Buffer, Bytes

ALIGNED = 4096  # offset, length and address of a direct write; no device asks for more
CHUNK_BYTES = 4 << 20
HUGE_BYTES = 2 << 20  # a page that the kernel may take instead of 512 small ones
LEAST_BYTES = 1 << 20  # smaller files are not worth the two calls more
SHARE_OF_MEMORY = 0.5  # what the page cache can be expected to keep for one cache


def beyond_memory(max_bytes: int, memory: int) -> bool:
    """Return whether a full cache of this bound would not stay in memory.

    >>> beyond_memory(200 * 10**9, 64 * 10**9), beyond_memory(10 * 10**9, 64 * 10**9)
    (True, False)
    """
    return max_bytes > SHARE_OF_MEMORY * memory


def open_direct(
    path: str | os.PathLike[str], mode: int, directory: int | None = None
) -> int | None:
    """Return a descriptor for `write_direct`; None where the file system has no such thing.

    Args:
        path: of the file.
        mode: of the file.
        directory: the descriptor of the folder that a relative path starts from.

    Raises:
        OSError: the file cannot be made at all.
    """
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(path, flags | os.O_DIRECT, mode, dir_fd=directory)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return None


def write_direct(descriptor: int, pieces: Iterable[Buffer], size: int) -> None:
    """Write the pieces one after the other, in aligned chunks, and cut the file to its size.

    Args:
        descriptor: of `open_direct`; its blocks are allocated.
        pieces: contiguous bytes, of ``size`` bytes together; each is copied before the next
            is asked for.
        size: bytes of the file.

    Raises:
        OSError: as of ``write``.
    """
    for chunk in _chunks(pieces):
        _write_all(descriptor, chunk)
    os.ftruncate(descriptor, size)


def _chunks(pieces: Iterable[Buffer]) -> Iterator[Bytes]:
    """Yield the same bytes in an aligned block; the last time rounded up, with zeros."""
    block, filled = _block(), 0
    for piece in pieces:
        rest: Bytes = np.frombuffer(piece, np.uint8)
        while len(rest):
            part = rest[: CHUNK_BYTES - filled]
            block[filled : filled + len(part)] = part
            filled, rest = filled + len(part), rest[len(part) :]
            if filled == CHUNK_BYTES:
                yield block
                filled = 0
    if filled:
        whole = -(-filled // ALIGNED) * ALIGNED
        block[filled:whole] = 0
        yield block[:whole]


class _OfThread(threading.local):
    """The block of each thread that writes, kept for its next file.

    A new one for every file is cleared by the kernel page by page, which costs as much as
    the writing.
    """

    block: Bytes | None = None


_of_thread = _OfThread()


def _block() -> Bytes:
    """Return this thread's block, aligned; its content is that of the last file."""
    if _of_thread.block is None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, CHUNK_BYTES + HUGE_BYTES, flags=flags)
        with suppress(OSError):  # a kernel without huge pages has small ones
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole: Bytes = np.frombuffer(memory, np.uint8)
        start = -whole.ctypes.data % HUGE_BYTES
        _of_thread.block = whole[start : start + CHUNK_BYTES]
    return _of_thread.block


def _write_all(descriptor: int, chunk: Bytes) -> None:
    written = 0
    while written < len(chunk):
        written += os.write(descriptor, chunk[written:].data)
