"""Single values as bytes, and lists of them as few buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from growcache.cache.formats.mapped import Buffer
from growcache.errors import FormatError
from growcache.schema import BYTES, STR, Field

# From here on a value is handed to writev as it is; below, one copy into a common block
# costs less than the Python operations per value would.
DIRECT_BYTES = 64 * 1024


class EncodedFile(NamedTuple):
    """A file of a shard, ready to be written.

    Attributes:
        suffix: what its name has after the shard's number.
        buffers: that, one after the other, are its bytes.
    """

    suffix: str
    buffers: list[Buffer]


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


def coalesced(pieces: Iterable[Buffer]) -> list[Buffer]:
    """Return the same bytes in fewer buffers: neighbours that are small are put together."""
    buffers: list[Buffer] = []
    small: list[Buffer] = []
    for piece in pieces:
        if len(piece) < DIRECT_BYTES:
            small.append(piece)
            continue
        buffers += (_joined(small), piece)
        small = []
    buffers.append(_joined(small))
    return [buffer for buffer in buffers if len(buffer)]


def _joined(pieces: list[Buffer]) -> bytes:
    return b"".join(piece if isinstance(piece, bytes) else piece.data for piece in pieces)
