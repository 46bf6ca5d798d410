"""Files of one array, as `numpy.load` reads them, whose header is known before they are read.

NumPy's own header is written otherwise by other versions of NumPy, and reading one means to
believe it. Ours is a function of dtype and shape, so a file is right where it begins with
the bytes that are expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from growcache.cache.formats.mapped import Bytes, Integers
from growcache.cache.formats.mapping import map_file
from growcache.errors import CorruptShardError

_MAGIC = b"\x93NUMPY\x01\x00"
_ALIGNED = 64  # bytes; so the values lie as a vector unit likes them
INTEGER = "<i8"


def header(dtype: str, shape: Sequence[int]) -> bytes:
    """Return what an ``.npy`` file begins with.

    >>> header("<i8", (3,)).index(b"(3,)"), len(header("<i8", (3, 2))) % 64
    (60, 0)
    """
    sizes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({sizes}), }}".encode()
    padding = -(len(_MAGIC) + 2 + len(text) + 1) % _ALIGNED
    length = len(text) + padding + 1
    return _MAGIC + length.to_bytes(2, "little") + text + b" " * padding + b"\n"


def table(values: Integers) -> list[bytes]:
    """Return the buffers of a file of integers."""
    return [header(INTEGER, values.shape), values.astype(INTEGER).tobytes()]


def open_array(path: Path, dtype: str, shape: Sequence[int]) -> tuple[Bytes, Bytes]:
    """Return the map of an ``.npy`` file, and the bytes of its values.

    Raises:
        CorruptShardError: it is missing, or is not an array of that dtype and shape.
    """
    memory, expected = map_file(path), header(dtype, shape)
    count = 1
    for size in shape:  # in Python's integers, for these may come from a damaged file
        count *= size
    nbytes = len(expected) + count * np.dtype(dtype).itemsize
    if memory[: len(expected)].tobytes() != expected or len(memory) != nbytes:
        raise CorruptShardError(
            f"{path}: expected {nbytes} bytes with an array {dtype}{list(shape)}, found "
            f"{len(memory)} bytes that are not; run growcache check"
        )
    return memory, memory[len(expected) :]


def open_table(path: Path, shape: Sequence[int]) -> tuple[Bytes, Integers]:
    """Return the map of a file of integers, and the integers.

    Raises:
        CorruptShardError: it is missing, or has another shape.
    """
    memory, data = open_array(path, INTEGER, shape)
    return memory, data.view(INTEGER).reshape(shape)


def lengths_of(dims: Integers, unit_bytes: int, most: int) -> Integers | None:
    """Return the bytes of values, or None where sizes cannot be those of values in a file.

    Args:
        dims: int64 [n, k], not to be trusted.
        unit_bytes: of a value whose sizes are all 1.
        most: bytes of the file.

    Returns:
        int64 [n], each at most ``most``.
    """
    if (dims < 0).any():
        return None
    # An empty array may be huge but for its empty dimension; nobody could index it.
    nominal = np.maximum(dims, 1).astype(np.float64).prod(axis=1) * max(unit_bytes, 1)
    if (nominal >= 2.0**62).any():
        return None
    lengths = _products(dims, unit_bytes)
    return None if (lengths > most).any() else lengths


def _products(dims: Integers, unit_bytes: int) -> Integers:
    """Return the lengths, where that can be without memory of their own.

    A reader keeps all shards of its snapshot open: bytes per sample are gigabytes in all.
    """
    if not dims.shape[1]:
        return np.broadcast_to(np.int64(unit_bytes), (len(dims),))
    lengths: Integers
    if dims.shape[1] == 1 and unit_bytes == 1:
        lengths = dims[:, 0]
    else:
        lengths = dims.prod(axis=1) * unit_bytes
    return lengths
