"""Single values as bytes, and many of them as the pieces of a file.

A byte on its way to the disk is looked at by checksums and copied. Each of these walks over
a whole shard would fetch it from memory again, so files are pieces that are made one after
the other, and all that has to be done with a piece is done while the core's cache has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from growcache.cache.formats.mapped import Buffer
from growcache.errors import FormatError
from growcache.schema import BYTES, STR, Field

# From here on a value is written from where it lies; below, one copy into a common block
# costs less than the Python operations per value would.
DIRECT_BYTES = 64 * 1024
PIECE_BYTES = (
    256 * 1024
)  # at most: of a core's second cache, which often is no larger than twice that


class EncodedFile(NamedTuple):
    """A file of a shard, ready to be written.

    Attributes:
        suffix: what its name has after the shard's number.
        nbytes: its size.
        pieces: that, one after the other, are its bytes; they may be asked for again.
        guarded: whether its records carry checksums of their own.
    """

    suffix: str
    nbytes: int
    pieces: Iterable[Buffer]
    guarded: bool = False


def plain(suffix: str, buffers: list[Buffer]) -> EncodedFile:
    """Return a file of these bytes."""
    return EncodedFile(suffix, sum(map(len, buffers)), buffers)


def split(buffer: Buffer) -> Iterator[Buffer]:
    """Yield a buffer in pieces of at most `PIECE_BYTES`."""
    if len(buffer) <= PIECE_BYTES:
        yield buffer
        return
    for start in range(0, len(buffer), PIECE_BYTES):
        yield buffer[start : start + PIECE_BYTES]


def stored(
    field: Field, ragged_dims: tuple[int, ...], value: object
) -> tuple[Buffer, list[int]]:
    """Return a value's bytes and the sizes of its ragged dimensions.

    Large arrays are not copied. The positions of those dimensions are the caller's to know,
    for asking the field would cost as much as all the rest.

    Raises:
        FormatError: it is not what the field says.
    """
    if not isinstance(value, np.ndarray):
        return _stored_blob(field, value)
    shape = value.shape
    if value.dtype.str != field.dtype or not (shape == field.shape or field.allows(shape)):
        raise FormatError(f"expected {field}, found {value.dtype}{list(shape)}")
    dims = [shape[i] for i in ragged_dims]
    if value.nbytes < DIRECT_BYTES:
        return value.tobytes(), dims
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8), dims


def _stored_blob(field: Field, value: object) -> tuple[bytes, list[int]]:
    if type(value) is bytes and field.dtype == BYTES:
        return value, [len(value)]
    if type(value) is str and field.dtype == STR:
        data = value.encode()
        return data, [len(data)]
    found = "nothing" if value is None else type(value).__name__
    raise FormatError(f"expected {field}, found {found}")


def coalesced(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yield the same bytes in fewer buffers: neighbours that are small are put together."""
    small: list[Buffer] = []
    held = 0
    for buffer in buffers:
        is_large = len(buffer) >= DIRECT_BYTES
        if held and (is_large or held + len(buffer) > PIECE_BYTES):
            yield _joined(small)
            small, held = [], 0
        if is_large:
            yield buffer
        elif len(buffer):
            small.append(buffer)
            held += len(buffer)
    if held:
        yield _joined(small)


def _joined(pieces: list[Buffer]) -> bytes:
    return b"".join(piece if isinstance(piece, bytes) else piece.data for piece in pieces)
