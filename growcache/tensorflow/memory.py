"""The C library's memory, as TensorFlow's use of Python's generators leaves it."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGEST = 32 << 20  # the highest that glibc takes, and where its own adjusting ends


def keep_freed_memory() -> None:
    """Have tensors use freed memory again, as they do before a generator is used.

    With the first generator TensorFlow has glibc give memory back sooner (M_TRIM_THRESHOLD).
    To set that ends glibc's adjusting of another threshold, from which on each piece is
    mapped, cleared and unmapped for itself: then it is 128 KiB for good, less than most
    batches and many samples, and reading takes two to four times as long. So both are set to
    what they come to by themselves.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return  # another C library, which TensorFlow does not touch
    mallopt(M_MMAP_THRESHOLD, LARGEST)
    mallopt(M_TRIM_THRESHOLD, 2 * LARGEST)
